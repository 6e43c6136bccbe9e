"""Connections that have not said yet what they want: so many of them, and no longer than a moment.

Whoever can reach the port can open connections without a token. One that does not send a request in time is closed; of
too many the oldest goes, which is never the user's, whose browser sends at once.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 10.0  # to send a request's headers
MAX_WAITING = 100  # connections; the usual limit of open files is 1,024


def protocol() -> Any:
    """What a server of uvicorn makes of a connection; those of one server share their places."""
    return partial(_Connection, {})


class _Connection(H11Protocol):
    """HTTP, with a deadline for the headers of each request."""

    def __init__(self, places: dict[_Connection, asyncio.TimerHandle], **given: Any) -> None:
        super().__init__(**given)
        self._places = places  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._wait()
        else:
            self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        super().connection_lost(exc)

    def _wait(self) -> None:
        if self in self._places or self.transport.is_closing():
            return
        self._places[self] = self.loop.call_later(REQUEST_S, self.transport.abort)
        if len(self._places) > MAX_WAITING:
            oldest = next(iter(self._places))
            oldest._leave()  # at once: several may come before its loss is told
            oldest.transport.abort()

    def _leave(self) -> None:
        timer = self._places.pop(self, None)
        if timer is not None:
            timer.cancel()
