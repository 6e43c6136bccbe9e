"""The trials of a sweep as Optuna keeps them: in its journal file, which a kill at any moment leaves readable.

A trial that was under way when the sweep was killed is taken up again, with its number and its values: it counts once.
What is drawn for a trial depends on the seed and its number alone: a sweep that was killed and continued makes the same
trials as one that was not. Optuna is an extra and imported here only.
"""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import EnvironmentRefusal, UnreadableInputError
from stepscope.files import open_regular
from stepscope.model.sweep import FAILED, FINISHED, MAXIMUM, MINIMUM, PRUNED, RUNNING, Parameter, Trial, Value
from stepscope.sweep.space import GRID, TPE, Request, grid

JOURNAL = "optuna.jsonl"
STARTUP_TRIALS = 5  # before any is pruned: a median of fewer ends trials that were only unlucky (Optuna's own default)
_MISSING = "a sweep needs Optuna, which is not installed; pip install 'stepscope[sweep]'"
_FACTS = ("reason", "folder", "wall_s", "steps", "seconds", "mean_ms")  # kept beside a trial


def library() -> Any:
    """Optuna, quiet. Raises `EnvironmentRefusal` where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise EnvironmentRefusal(_MISSING) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


class Study:
    """The journal of one sweep in its folder, which the caller has claimed. Raises `UnreadableInputError` for a journal
    that is damaged or of another sweep."""

    def __init__(self, folder: Path, key: str, request: Request) -> None:
        self._request = request
        self._optuna = library()
        path = folder / JOURNAL
        try:
            _mended(path)
            backend = self._optuna.storages.journal.JournalFileBackend(str(path))
            storage = self._optuna.storages.JournalStorage(backend)
            others = [study.study_name for study in storage.get_all_studies() if study.study_name != key]
            if others:
                raise UnreadableInputError(f"{path}: the journal of another sweep; name a new folder with --out")
            self._study = self._optuna.create_study(
                storage=storage,
                study_name=key,
                load_if_exists=True,
                directions=[{MINIMUM: "minimize", MAXIMUM: "maximize"}[each.direction] for each in request.objectives],
                pruner=self._optuna.pruners.MedianPruner(n_startup_trials=STARTUP_TRIALS),
            )
            self._study.get_trials(deepcopy=False)
        except UnreadableInputError:
            raise
        except OSError as error:
            raise EnvironmentRefusal(f"{path}: {error.strerror}; name a writable --out") from None
        except Exception as error:  # noqa: BLE001 - the folder may come from anywhere, and Optuna raises as it likes
            what = f"{type(error).__name__}: {error}".rstrip(": ")[:200]
            text = f"{path}: not the journal of a sweep ({what}); name a new folder with --out"
            raise UnreadableInputError(text) from None
        self._states = {
            self._optuna.trial.TrialState.COMPLETE: FINISHED,
            self._optuna.trial.TrialState.PRUNED: PRUNED,
            self._optuna.trial.TrialState.FAIL: FAILED,
        }

    def next(self) -> Underway:
        """The trial that was under way when the sweep ended, else a new one."""
        state = self._optuna.trial.TrialState
        known = self._study.get_trials(deepcopy=False)
        left = [trial for trial in known if trial.state == state.RUNNING]
        number = left[0].number if left else len(known)
        request, params = self._request, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if request.sampler == GRID and not left:
                waiting = [trial for trial in known if trial.state == state.WAITING]
                number = len(known) - len(waiting)
                if not waiting:
                    self._study.enqueue_trial(shuffled(request)[number])
            trial = self._optuna.trial.Trial(self._study, left[0]._trial_id) if left else self._study.ask()
            made = self._optuna.samplers.TPESampler if request.sampler == TPE else self._optuna.samplers.RandomSampler
            for param in request.params:
                # its draws depend on these words alone, and on the trials before
                seed = random.Random(f"{request.seed} {number} {param.name}").getrandbits(32)
                self._study.sampler = made(seed=seed)
                params[param.name] = _suggested(trial, param)
        return Underway(trial, number, params, dict(trial.user_attrs))

    def tell(self, underway: Underway, state: str, values: Sequence[float] = (), reason: str | None = None) -> None:
        """How it ended, once: `state` is FINISHED with the values of all objectives, PRUNED or FAILED with a reason."""
        underway.note(reason=reason)
        told = next(known for known, name in self._states.items() if name == state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._study.tell(underway.trial, list(values) if state == FINISHED else None, state=told)

    def trials(self) -> tuple[Trial, ...]:
        return tuple(self._trial(each) for each in self._study.get_trials(deepcopy=False) if each.params)

    def _trial(self, frozen: Any) -> Trial:
        names = [param.name for param in self._request.params]
        values = tuple(frozen.values or ()) if self._states.get(frozen.state) == FINISHED else ()
        return Trial(
            number=frozen.number,
            state=self._states.get(frozen.state, RUNNING),
            params={name: frozen.params[name] for name in names if name in frozen.params},
            value=values[0] if values else None,
            values=values,
            **{name: frozen.user_attrs.get(name) for name in _FACTS},
        )


class Underway:
    """A trial that is being made. `facts` are what an earlier session left of it."""

    def __init__(self, trial: Any, number: int, params: dict[str, Value], facts: Mapping[str, Any]) -> None:
        self.trial, self.number, self.params, self.facts = trial, number, params, facts

    def note(self, **facts: Any) -> None:
        """Keep facts of the run beside the trial; what is not known is left out."""
        for name, value in facts.items():
            if value is not None:
                self.trial.set_user_attr(name, value)

    def report(self, value: float, step: int) -> bool:
        """A value on the way, at a step that every trial reports; whether the trial is to be ended for it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trial that is made again reports the same steps again
            self.trial.report(value, step)
        return bool(self.trial.should_prune())


def shuffled(request: Request) -> list[dict[str, Value]]:
    """The grid in the order of the trials: by chance, so that the first ones of many lie everywhere in it."""
    every = grid(request.params)
    random.Random(request.seed).shuffle(every)
    return every


def ped_anova(units: Sequence[Sequence[float]], codes: Sequence[int], values: Sequence[float]) -> list[float]:
    """PED-ANOVA of parameters: how differently the best tenth of the trials lies in each. Less is better of `values`.

    `units` are rows of trials, from 0 to 1; `codes` the number of choices of a parameter whose values have no order,
    which stand in `units` as whole numbers, 0 for all others. Their divergences, in no unit, 0 where nothing differs.
    """
    optuna = library()
    kinds = [
        optuna.distributions.CategoricalDistribution(list(range(count)))
        if count
        else optuna.distributions.FloatDistribution(0.0, 1.0)
        for count in codes
    ]
    names = [str(number) for number in range(len(kinds))]
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study.add_trials(
            optuna.trial.create_trial(
                params={name: kind.to_external_repr(unit) for name, kind, unit in zip(names, kinds, row, strict=True)},
                distributions=dict(zip(names, kinds, strict=True)),
                value=float(value),
            )
            for row, value in zip(units, values, strict=True)
        )
        found = optuna.importance.PedAnovaImportanceEvaluator().evaluate(study, names)
    return [float(found[name]) for name in names]


def _suggested(trial: Any, param: Parameter) -> Value:
    if param.choices:
        return str(trial.suggest_categorical(param.name, list(param.choices)))
    assert param.low is not None
    assert param.high is not None
    if param.whole:
        return int(trial.suggest_int(param.name, int(param.low), int(param.high), log=param.log))
    return float(trial.suggest_float(param.name, param.low, param.high, log=param.log))


def _mended(path: Path) -> None:
    """Cut off a line that a kill left torn, and take away the lock of a process that is gone: the folder is ours."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{path}.lock")
    with contextlib.suppress(FileNotFoundError):
        with open_regular(path) as file:
            data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
