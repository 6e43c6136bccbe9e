"""Who runs the tasks: this process, processes beside it, or the workers of Dask; any `concurrent.futures.Executor`.

A worker that dies costs the file it was at: that one is done again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from stepscope.errors import EnvironmentRefusal
from stepscope.workers import main_is_guarded

ENGINES = ("inline", "pool", "dask")
LOCAL, SLURM = "local", "slurm"
_MORE_ROUNDS = 1  # with a new executor, for what a worker that died has left
_CONNECT_SECONDS = 30
_KILLED = "the process that read it was killed each time, mostly for want of memory; reduce it where there is more"
_DASK_MISSING = "--engine dask needs Dask; install it with: pip install 'stepscope[cluster]'"
_WORKER = {"cores": 1, "processes": 1, "memory": "2GB"}  # of a job of SLURM, where the site's settings say nothing

Task = Callable[[str], str]
Opened = Callable[[], contextlib.AbstractContextManager[Executor]]
Tell = Callable[[int, int], None]  # tasks done, and all


class Inline(Executor):
    """Runs each task where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it, as from any executor
            future.set_exception(error)
        return future


def pool(jobs: int) -> ProcessPoolExecutor:
    # Threads of the caller (Polars has some) do not survive a fork; and each worker has a core, not all of them.
    one_thread = ("POLARS_MAX_THREADS", os.environ.get("POLARS_MAX_THREADS", "1"))  # before anything imports Polars
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=os.putenv, initargs=one_thread)


@contextlib.contextmanager
def dask(scheduler: str, jobs: int) -> Iterator[Executor]:
    """Dask's workers as an executor; raises `EnvironmentRefusal` where Dask or its scheduler is not there.

    Args:
        scheduler: "local" for a cluster of processes here, "slurm" for jobs of SLURM, as the site's settings of
            dask-jobqueue describe them, else the address of a scheduler that runs.
        jobs: workers to start.
    """
    try:
        import dask as settings
        from distributed import Client, LocalCluster

        if scheduler == SLURM:
            from dask_jobqueue import SLURMCluster
    except ImportError:
        raise EnvironmentRefusal(_DASK_MISSING) from None
    with contextlib.ExitStack() as stack:
        where: Any = scheduler
        try:
            if scheduler == LOCAL:
                cluster = LocalCluster(
                    n_workers=jobs, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
                where = stack.enter_context(cluster)
            elif scheduler == SLURM:
                unsaid = {
                    name: value
                    for name, value in _WORKER.items()
                    if settings.config.get(f"jobqueue.slurm.{name}", None) is None
                }
                where = stack.enter_context(SLURMCluster(**unsaid))
                where.scale(jobs=jobs)
            client = stack.enter_context(Client(where, timeout=_CONNECT_SECONDS))
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"{error}".strip().partition("\n")[0] or type(error).__name__
            raise EnvironmentRefusal(
                f"--scheduler {scheduler}: {reason}; give the address of a scheduler that runs, such as "
                "tcp://10.0.0.1:8786, or local or slurm"
            ) from None
        yield client.get_executor(pure=False)


class Workers:
    """An executor that is opened when it is first needed, and once more where a worker's death has broken it."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._stack = contextlib.ExitStack()
        self._executor: Executor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *ending: object) -> None:
        self._stack.close()

    def run(
        self, task: Task, texts: Sequence[str], failed: Callable[[str], str], tell: Tell | None = None
    ) -> tuple[list[str], int]:
        """The answer to each text, and how many of them had to be asked for again because a worker was lost.

        What no worker answers runs once more in a process of its own; where it fails there, too, the answer is what
        `failed` makes of the reason.
        """
        answers: dict[int, str] = {}
        lost = 0
        for more in range(1 + _MORE_ROUNDS):
            missing = [number for number in range(len(texts)) if number not in answers]
            if not missing:
                break
            if more or self._executor is None:
                self._stack.close()
                self._executor = self._stack.enter_context(self._opened())
            executor, futures = self._executor, dict[int, Future[str]]()
            with contextlib.suppress(Exception):  # one that broke takes no more tasks
                for number in missing:
                    futures[number] = executor.submit(task, texts[number])
            for number, future in futures.items():
                # whatever an engine raises for a worker that was lost: what a task meets is its answer
                with contextlib.suppress(Exception):
                    answers[number] = future.result()
                    if tell is not None:
                        tell(len(answers), len(texts))
            lost += sum(number not in answers for number in missing)
        for number in range(len(texts)):
            if number not in answers:
                answers[number] = _alone(task, texts[number], failed)
        return [answers[number] for number in range(len(texts))], lost


def _alone(task: Task, text: str, failed: Callable[[str], str]) -> str:
    if not main_is_guarded():
        return task(text)
    with pool(1) as executor:
        future = executor.submit(task, text)
        error = future.exception()
    if error is None:
        return future.result()
    return failed(_KILLED if isinstance(error, BrokenProcessPool) else f"{type(error).__name__}: {error}")
