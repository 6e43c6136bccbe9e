"""A dashboard that runs in a thread of the test's process, and a plain HTTP client for it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from stepscope.dashboard.server.start import Running, Settings

PATIENCE_S = 120
LISTED_S = 10  # a new run is in the list after the next look at the folder


@dataclass(frozen=True)
class Answer:
    """What came back; `headers` by lower-case name."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Dashboard:
    """One running server. `address` is what a user opens (with the token), `url` the same without it, ending in "/"."""

    running: Running

    @classmethod
    def start(cls, *paths: Path, **settings: Any) -> Dashboard:
        running = Running(Settings(paths=tuple(paths), **settings))
        running.begin()
        return cls(running)

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.running.close()

    def __getattr__(self, name: str) -> Any:
        """`address`, `url`, `token` and `port` of what runs."""
        return getattr(self.running, name)

    def page(self, run_id: str, page: str, **params: str) -> str:
        """The address of a page of a run, with the token: `#/run/ID/PAGE?...` behind it."""
        query = f"?{urlencode(params)}" if params else ""
        return f"{self.address}#/run/{run_id}/{page}{query}"

    def id(self, name: str) -> str:
        """The ID of the run that is called `name` in the list; of a trace, its file's name up to the first dot."""
        end = time.monotonic() + LISTED_S
        while True:
            entries = self.json("api/runs")["runs"]
            found = [entry["id"] for entry in entries if entry["name"].partition(".")[0] == name]
            if found or time.monotonic() > end:
                break
            time.sleep(0.2)
        assert len(found) == 1, f"{name}: {[entry['name'] for entry in entries]}"
        return str(found[0])

    def ask(
        self, target: str, *, method: str = "GET", headers: Mapping[str, str] | None = None, token: bool = True
    ) -> Answer:
        """One request of exactly this target ("api/runs" is below the base path, "/x" goes out as it is written)."""
        sent = {"Authorization": f"Bearer {self.token}"} if token else {}
        path = target if target.startswith("/") else f"{self.running.base_path}{target}"
        connection = http.client.HTTPConnection("127.0.0.1", self.running.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, headers={**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def json(self, target: str) -> Any:
        """The document at `target`, asked for until it is there; fails on an error."""
        end = time.monotonic() + PATIENCE_S
        while (answer := self.ask(target)).status == 202:
            assert time.monotonic() < end, f"{target}: still {answer.json}"
            time.sleep(0.05)
        assert answer.status == 200, f"{target}: {answer.status} {answer.body[:300]!r}"
        return answer.json
