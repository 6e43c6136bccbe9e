"""Signals that end an experiment: noted, so that the run in progress is ended and what is known is written."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Call it for the signal that asked us to end, None while none did. Ignored signals stay ignored (`nohup`)."""

    def __init__(self) -> None:
        self._number: int | None = None

    def __call__(self) -> int | None:
        return self._number

    def __enter__(self) -> StopRequests:
        self._before = {
            number: signal.signal(number, self._note)
            for number in ENDINGS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature is Python's
        self._number = self._number or number
