"""The whole way of an agent over standard input and output: from the list of runs to the verdict on the fix."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import pytest
from mcp import StdioServerParameters

from tests.agents.asking import Asked, ask
from tests.integration.harness import PYTHON, environment, record

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(900)]  # trains six times
SLEEPY = Path(__file__).parents[1] / "experiment" / "scripts" / "sleepy.py"


def test_list_findings_source_prove_verdict(tmp_path: Path) -> None:
    shutil.copy(SLEEPY, tmp_path / "train.py")
    (tmp_path / "stepscope-runs").mkdir()
    options = ["--max-steps", "150", "--no-window", "--no-report"]
    record(tmp_path / "stepscope-runs" / "slow", [PYTHON, "train.py"], options=options, cwd=tmp_path)
    server = StdioServerParameters(
        command=PYTHON,
        args=["-m", "stepscope", "mcp", "--allow-run"],
        env={**environment(), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
    )

    async def questions(asked: Asked) -> None:
        (run,) = (await asked.tool("list_runs"))["runs"]
        findings = (await asked.tool("findings", run=run["name"]))["findings"]  # on a busy machine, that first
        finding = next(row for row in findings if row["rule"] == "input.loader_bound")
        detail = (await asked.tool("findings", run=run["name"], finding=finding["id"], detail=True))["findings"][0]
        source = await asked.tool("source", run=run["name"], finding=finding["id"])
        line = source["lines"][source["line"] - source["first_line"]]
        assert line.strip() == finding["code"]
        assert finding["at"].endswith(f"train.py:{source['line']}")
        lines = (await asked.tool("hot_lines", run=run["name"], file="train.py"))["lines"]
        assert lines[0]["samples"] >= lines[-1]["samples"]
        words = shlex.split(finding["prove"])
        assert words[:2] == ["stepscope", "experiment"]
        argv = words[words.index("--") + 1 :]
        job = await asked.tool(
            "start_experiment", argv=argv, tries=detail["try"], together=len(detail["try"]) > 1, pairs="2:2", steps=15
        )
        while job["state"] == "running":
            job = await asked.tool("job", job=job["job"], wait_seconds=20)
        assert job["state"] == "finished", job
        verdict = await asked.tool("verdict", experiment=job["made"])
        (candidate,) = verdict["candidates"]
        assert verdict["finished"]
        assert candidate["verdict"] in ("faster", "slower", "no_difference", "undecided", "void")
        assert candidate["applied"][0]["applied"]
        assert any("num_workers=" in change for change in candidate["change"])
        assert asked.largest <= 4_000

    ask(server, questions)
