"""The tools that read, as a client of the official package sees them; hostile folders and questions among them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mcp import MCPError

from stepscope import agents
from stepscope.agents import tools
from stepscope.analyze.views.select import TABLES
from tests import gpu_traces
from tests.agents.asking import Asked, ask, runs_of
from tests.cli.calls import call
from tests.dashboard import served_runs as runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: a small one, another, one of hostile names, a trace with a device."""
    folder = tmp_path_factory.mktemp("agents")
    runs.small(folder / "runs")
    runs.fuzzed(folder / "runs")
    gpu_traces.write(folder / "gpu" / "worker0.pt.trace.json", steps=40)
    return folder


def test_only_reading_is_offered_and_each_tool_says_what_it_takes(folder: Path) -> None:
    async def questions(asked: Asked) -> None:
        offered = {tool.name: tool for tool in (await asked.client.list_tools()).tools}
        assert set(offered) == set(tools.READING)
        for tool in offered.values():
            assert tool.annotations is not None
            assert tool.annotations.read_only_hint
            assert tool.description
            assert tool.input_schema["type"] == "object"
        assert set(offered["findings"].input_schema["required"]) == {"run"}
        assert "--allow-run" not in await asked.error("findings")
        assert "no such tool" in await asked.error("start_run", argv=["true"])

    ask(runs_of(folder), questions)


def test_every_table_and_finding_of_every_run_fits_and_more_can_be_had(folder: Path) -> None:
    async def questions(asked: Asked) -> None:
        found = [run["name"] for run in (await asked.tool("list_runs"))["runs"]]
        assert len(found) == 3
        for run in found:
            brief = await asked.tool("findings", run=run, detail=True)
            for finding in brief["findings"]:
                await asked.tool("findings", run=run, finding=finding["id"], detail=True)
            for table in TABLES:
                pattern = ".*" if table == "stacks" else None  # those of an operator by its whole name
                document = await asked.tool("table", run=run, table=table, columns=["*"], filter=pattern)
                assert document.get("absent") or document["rows"]
        assert asked.largest <= 4_000
        rows = (await asked.tool("table", run="gpu", table="kernels", columns=["name", "calls"], max_bytes=90_000))[
            "rows"
        ]
        assert "left_out" in await asked.tool("table", run="gpu", table="kernels", columns=["name", "calls"], limit=1)
        large = await asked.tool(
            "table", run="gpu", table="kernels", columns=["name", "calls"], where={"calls": ">= 40"}
        )
        assert large["rows"] == [row for row in rows if row[1] >= 40]
        named = await asked.tool("table", run="gpu", table="kernels", columns=["name"], where={"name": "gemm"})
        assert named["rows"] == [[name] for name, _ in rows if "gemm" in name.lower()]
        assert named["rows"]

    ask(runs_of(folder), questions)


def test_the_shell_prints_what_the_tool_answers(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run,) = (folder / "runs").glob("small*")
    assert call("analyze", run, "--brief", "--no-cache") == 0
    printed = json.loads(capfd.readouterr().out)

    async def questions(asked: Asked) -> None:
        assert await asked.tool("findings", run=str(run)) == printed

    ask(runs_of(folder), questions)
    assert call("analyze", run, "--brief", "--table", "steps") == 2
    assert call("analyze", run, "--brief", "--json", "-") == 2


def test_wrong_questions_are_one_line(folder: Path) -> None:
    async def questions(asked: Asked) -> None:
        assert "list_runs" in await asked.error("findings", run="../etc")
        assert "list_runs" in await asked.error("findings", run="\x1b[31m\nx" * 900)
        assert "operators" in await asked.error("table", run="gpu", table="passwords")
        assert "max_bytes" in await asked.error("list_runs", max_bytes=1)
        assert "offset" in await asked.error("list_runs", offset=-1)
        assert "`int | null`" in await asked.error("list_runs", limit="all")
        assert "unknown field" in await asked.error("list_runs", shell="rm")
        assert "regular expression" in await asked.error("table", run="gpu", table="steps", where={"step": "("})
        assert "no such column" in await asked.error("table", run="gpu", table="steps", columns=["password"])
        assert "no experiment" in await asked.error("verdict", experiment="gpu")
        assert "no such finding" in await asked.error("source", run="gpu", finding="x")

    ask(runs_of(folder), questions)


def test_nothing_is_opened_that_lies_elsewhere_whatever_links_there_are(folder: Path, tmp_path: Path) -> None:
    (small,) = (folder / "runs").glob("small*")
    inside = tmp_path / "inside"
    (inside / "mixed" / "host-a").mkdir(parents=True)
    (inside / "linked").symlink_to(small)
    for part in small.iterdir():
        (inside / "mixed" / part.name).symlink_to(part) if part.name.startswith("rank") else None
    (inside / "mixed" / "host-a" / "manifest.json").write_text("{}")

    async def questions(asked: Asked) -> None:
        names = [run["name"] for run in (await asked.tool("list_runs"))["runs"]]
        assert names == ["mixed"]
        assert "no such run" in await asked.error("findings", run="linked")
        assert "no such run" in await asked.error("findings", run=str(small))
        assert "leads out" in await asked.error("findings", run="mixed")

    ask(runs_of(inside), questions)


def test_resources_are_reports_and_pages_and_nothing_else(folder: Path) -> None:
    async def questions(asked: Asked) -> None:
        client = asked.client
        listed = [str(each.uri) for each in (await client.list_resources()).resources]
        assert len((await client.list_resource_templates()).resource_templates) == 2
        report = next(uri for uri in listed if uri.endswith("/report.json") and "small" in uri)
        (content,) = (await client.read_resource(report)).contents
        assert json.loads(content.text)["schema"] == "stepscope.report/1"
        (page,) = (await client.read_resource("stepscope://docs/findings.md")).contents
        assert page.text.startswith("# ")
        for uri in ("stepscope://docs/../pyproject.toml", "stepscope://runs/../x/report.json", "file:///etc/passwd"):
            with pytest.raises(MCPError, match="no such"):
                await client.read_resource(uri)

    ask(runs_of(folder), questions)


def test_without_the_extra_one_line_says_how_to_get_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "stepscope.agents.server", raising=False)
    monkeypatch.delattr(agents, "server", raising=False)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    assert call("mcp", folder) == 4
    assert "pip install 'stepscope[agents]'" in capfd.readouterr().err


@pytest.mark.parametrize("words", [("--max-jobs", "0"), ("--max-seconds", "-1")])
def test_limits_that_are_none_are_refused(words: tuple[str, str], folder: Path) -> None:
    assert call("mcp", folder, *words) == 2


def test_source_that_may_not_be_quoted_is_refused(folder: Path) -> None:
    async def questions(asked: Asked) -> None:
        (run,) = (row["name"] for row in (await asked.tool("list_runs", search="small"))["runs"])
        finding = next(row for row in (await asked.tool("findings", run=run))["findings"] if "at" in row)
        assert "code" not in finding
        assert "may not be quoted" in await asked.error("source", run=run, finding=finding["id"])
        assert "places" in await asked.error("source", run=run, finding=finding["id"], place=99)

    ask(runs_of(folder), questions)

    async def refused(asked: Asked) -> None:
        assert "--no-source" in await asked.error("source", run="gpu", finding="any")

    ask(runs_of(folder, source=False), refused)
