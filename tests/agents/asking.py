"""A client of the official package, in this process or with a server of its own, that notes how large answers are."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

from stepscope.agents.jobs import Jobs, Limits, OpenRuns
from stepscope.agents.server import make
from stepscope.api import ReadOptions

OPTIONS = ReadOptions(cache=False, keep=False, workers=1)


class Asked:
    """What `tool` answered: the document, or an error."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.largest = 0  # bytes of an answer that no more was asked for

    async def tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        text = await self._text(name, arguments, wrong=False)
        document: dict[str, Any] = json.loads(text)
        if "max_bytes" not in arguments:
            self.largest = max(self.largest, len(text.encode()))
        return document

    async def error(self, name: str, **arguments: Any) -> str:
        text = await self._text(name, arguments, wrong=True)
        assert "\n" not in text
        assert len(text) <= 1_000
        return text

    async def _text(self, name: str, arguments: dict[str, Any], *, wrong: bool) -> str:
        result = await self.client.call_tool(name, arguments)
        assert result.structured_content is None
        (content,) = result.content
        assert result.is_error == wrong, content.text
        return str(content.text)


def runs_of(root: Path, *, source: bool = True, limits: Limits | None = None) -> OpenRuns:
    return OpenRuns(root, OPTIONS, source=source, jobs=Jobs(root.resolve(), limits) if limits else None)


def ask(server: OpenRuns | StdioServerParameters, questions: Callable[[Asked], Awaitable[None]]) -> None:
    """Run `questions` with a client of a server, on a thread: a browser of other tests leaves a loop on this one."""

    async def main() -> None:
        async with Client(make(server) if isinstance(server, OpenRuns) else server) as client:
            await questions(Asked(client))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(anyio.run, main).result()
