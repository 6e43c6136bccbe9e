"""The documents say what the program has: commands, options, rules, event kinds, targets, links; and it takes them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

from stepscope.analyze.compilers import backends, xla_reports
from stepscope.diagnose.rules import RULES
from stepscope.tables.compile_reasons import known_words
from tests.builders import T0, step_rows
from tests.cli.calls import call
from tests.run_folders import make_run_folder, metrics_event

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "stepscope"
README = (REPOSITORY / "README.md").read_text()
COMMANDS_PAGE = (REPOSITORY / "docs" / "commands.md").read_text()
PYTHON_PAGE = (REPOSITORY / "docs" / "python.md").read_text()
DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "examples").glob("*/README.md"),
        *(REPOSITORY / "benchmarks").glob("*.md"),
    ]
)

# What the code of docs/python.md leaves to the reader's imagination.
LOOP = """
import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.randn(320, 8), torch.randn(320, 8)), batch_size=8)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def augment(images):
    return images * 2


def train(images, labels):
    loss = (model(images) - labels).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


"""


def options_of_commands() -> list[tuple[str, str]]:
    """(command, long option) of the whole command line, from the parsers themselves."""
    from stepscope.cli import COMMANDS, load

    return [
        (name, option)
        for name, command in COMMANDS.items()
        for parameter in load(name, command).params
        for option in parameter.opts
        if option.startswith("--") and option != "--help"
    ]


def event_kinds() -> set[str]:
    """The first arguments of `….journal.write("kind", …)` in the agent and in what it attaches."""
    kinds = set()
    for path in (SOURCE / "record").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "write":
                continue
            owner = node.func.value
            is_log = isinstance(owner, ast.Attribute) and owner.attr in {"journal", "_journal"}
            first = node.args[0] if node.args else None
            if is_log and isinstance(first, ast.Constant) and isinstance(first.value, str):
                kinds.add(first.value)
    return kinds


def test_the_page_of_commands_is_their_help() -> None:
    from scripts.commands import page

    assert page() == COMMANDS_PAGE, "run: python scripts/commands.py > docs/commands.md"


def test_every_option_is_in_the_section_of_its_command() -> None:
    parts = re.split(r"^## (\S+)$", COMMANDS_PAGE, flags=re.MULTILINE)[1:]
    described = dict(zip(parts[::2], parts[1::2], strict=True))
    found = options_of_commands()
    assert len(found) > 10
    assert [f"{name} {option}" for name, option in found if f"`{option}" not in described[name]] == []


def test_every_command_is_in_the_readme() -> None:
    from stepscope.cli import COMMANDS

    assert [name for name in COMMANDS if f"stepscope {name}" not in README] == []


def test_the_readme_is_short() -> None:
    """A screen and a half: what it is, what it says, how far to trust it, the verbs, limits. The rest is in docs/."""
    assert len(README.splitlines()) <= 160


def test_every_page_is_in_the_index_with_one_line() -> None:
    index = (REPOSITORY / "docs" / "README.md").read_text()
    rows = re.findall(r"^\| \[(\S+\.md)\]\((\S+\.md)\) \| .+ \|$", index, re.MULTILINE)
    pages = [path.name for path in (REPOSITORY / "docs").glob("*.md") if path.name != "README.md"]
    assert sorted(link for _, link in rows) == sorted(pages)
    assert all(name == link for name, link in rows)


def test_every_page_is_in_the_site_once() -> None:
    listed = re.findall(r"^ *- (\S+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "docs").glob("*.md"))


FINDINGS = (REPOSITORY / "docs" / "findings.md").read_text()
ITEMS = ("Example", "Evidence", "Threshold", "Caveat", "Learn", "Falsified", "Verified")
TRACES = REPOSITORY.parent / "shared" / "traces"
LISTED = r"([\w./-]+(?:, [\w./-]+)*)"  # names behind "zoo: " and its like, up to other words


def sections() -> dict[str, str]:
    """Rule -> its section of docs/findings.md."""
    parts = re.split(r"^## (\S+)$", FINDINGS, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def item(rule: str, name: str) -> str:
    """The text of one item of a rule's section."""
    found = re.findall(rf"^- \*\*{name}\*\*: (.+(?:\n  .+)*)$", sections()[rule], re.MULTILINE)
    assert len(found) == 1, f"{rule}: {len(found)} times {name}"
    return str(found[0])


def rule_names() -> list[str]:
    from stepscope.diagnose import RISKS, RULES

    return [*(rule.name for rule in RULES), *(risk.name for risk in RISKS)]


@cache
def literals(folder: Path) -> set[str]:
    """Every string constant of the sources in a folder; strings beside each other are one."""
    trees = [ast.parse(path.read_text()) for path in folder.glob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_the_rules_page_names_exactly_the_rules() -> None:
    assert list(sections()) == rule_names()


@cache
def thresholds() -> dict[str, Any]:
    """The numbers that rules decide by, which stand in the rules' files, by the name of their constant."""
    from stepscope import diagnose
    from stepscope.diagnose.rule import REPORT_FLOOR, Thresholds

    found: dict[str, Any] = {"REPORT_FLOOR": REPORT_FLOOR}
    for module in iter_modules(diagnose.__path__, "stepscope.diagnose."):
        for name, value in vars(import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, Thresholds):
                assert found.setdefault(name, value) is value, f"two of the name {name}"
    return found


def assert_thresholds(text: str) -> int:
    """Every constant named exists, and has the value that stands behind it; how many values there are."""
    for constant, field in re.findall(r"`([A-Z_]+)\.(\w+)`", text):
        assert hasattr(thresholds()[constant], field), f"{constant}.{field}"
    number = r"(?:\d[\d.]*\d|\d)"
    valued = re.findall(rf"`([A-Z_]+)(?:\.(\w+))?` = ({number}(?:, {number})*)", text)
    for constant, field, values in valued:
        known = thresholds()[constant]
        known = getattr(known, field) if field else known
        said = [float(value) for value in values.split(", ")]
        assert said == [float(value) for value in (known if isinstance(known, tuple) else (known,))], constant
    return len(valued)


@pytest.mark.parametrize("rule", rule_names())
def test_the_section_of_a_rule(rule: str) -> None:
    text = sections()[rule]
    assert tuple(re.findall(r"^- \*\*(\w+)\*\*: ", text, re.MULTILINE)) == ITEMS
    assert len(text.split("- **Example**")[0].split()) >= 10, "says what it looks for"
    assert all(len(item(rule, name)) > 5 for name in ITEMS)
    assert re.match(r'".*"', item(rule, "Example"), re.DOTALL), "an example is a quoted title"
    threshold = item(rule, "Threshold")
    valued = assert_thresholds(threshold)
    assert valued or re.search(r"\b(no floor|none|as `)", threshold), "a threshold, or a word why there is none"
    links = re.findall(r"<(https://[^>]+)>", item(rule, "Learn"))
    assert links
    assert set(links) <= literals(SOURCE / "diagnose")
    verified = item(rule, "Verified")
    assert re.search(r"on a GPU: |zoo: |real trace: |real run: |unit test only", verified)
    planted = (REPOSITORY / "benchmarks" / "gpu" / "cases.py").read_text()
    for names in re.findall(rf"on a GPU: {LISTED}", verified):
        assert [name for name in names.split(", ") if "/" not in name and f"# planted: {name}\n" not in planted] == []
    for names in re.findall(rf"zoo: {LISTED}", verified):
        assert {name for name in names.split(", ") if "_" in name} <= zoo_names()
    for path in re.findall(r"\b(?:tests|examples)/[\w/.-]*\w", verified):
        assert (REPOSITORY / path).exists(), path
    if TRACES.exists():
        for names in re.findall(rf"real trace: {LISTED}", verified):
            assert [name for name in names.split(", ") if "/" in name and not (TRACES / name).exists()] == []


def zoo_names() -> set[str]:
    text = (REPOSITORY / "benchmarks" / "zoo" / "table.py").read_text()
    return set(re.findall(r'Entry\(\s*"(\w+)"', text))


def test_every_constant_of_the_page_has_that_value() -> None:
    assert assert_thresholds(FINDINGS) > 0


def test_every_event_kind_is_documented() -> None:
    page = (REPOSITORY / "docs" / "run_folder.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    kinds = event_kinds()
    assert {"loader", "gc", "site", "probe_error"} <= kinds
    assert kinds - documented == set()


def test_every_public_name_is_on_its_page() -> None:
    import stepscope

    public = [name for name in stepscope.__all__ if not name.startswith("_")]
    assert [name for name in public if f"stepscope.{name}" not in PYTHON_PAGE] == []


def test_make_targets_named_anywhere_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        named = set(re.findall(r"`(?:PYTHON=\S+ )?make ([a-z-]+)", path.read_text()))
        assert named <= targets, path


def anchors(page: Path) -> set[str]:
    """The names that a link may give behind `#`, as GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        files = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", path.read_text())
        assert [link for link in files if not (path.parent / link).exists()] == [], path
        links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", path.read_text())
        pages = [(f"{page}#{name}", path.parent / page if page else path, name) for page, name in links]
        assert [link for link, page, name in pages if name not in anchors(page)] == [], path


def test_the_tests_that_show_what_is_promised_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (REPOSITORY / "docs" / "faults.md").read_text())
    assert len(named) > 20
    for file, test in named:
        text = (REPOSITORY / file).read_text()
        assert not test or f"def {test}(" in text, f"{file}::{test}"


def test_source_files_named_in_the_architecture_exist() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([\w/]+\.py)`", page))
    everything = [str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")]
    assert len(names) > 20
    missing = [name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in everything)]
    assert missing == []


@pytest.mark.torch
@pytest.mark.process
def test_the_code_of_the_python_page_runs(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", PYTHON_PAGE, re.DOTALL)
    assert code is not None
    script = tmp_path / "train.py"
    script.write_text(LOOP + code.group(1) + "print(run.analysis.steps[0].count > 0, run.analysis.regions)")
    line = [sys.executable, str(script)]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("True ")
    assert "augment" in done.stdout


PAGE = (Path(__file__).resolve().parents[1] / "docs" / "compilers.md").read_text()


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the first table below `heading`."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}


def test_every_cause_is_explained() -> None:
    assert first_cells("Causes and what to do") == set(known_words().causes)


def test_every_rule_on_compilers_is_listed() -> None:
    others = ("transfer.device_to_host", "compute.execution_slow")  # what torch_xla's own rules ask besides
    rules = {rule.name for rule in RULES if rule.name.startswith("compile.") or rule.name in others}
    assert rules.issuperset(others)
    assert first_cells("What the rules ask") == rules


def test_the_numbers_it_names_exist() -> None:
    section = PAGE.partition("## What the rules ask\n")[2].partition("\n## ")[0]
    dotted = re.findall(r"`([A-Z]+)\.([a-z_]+)`", section)
    plain = re.findall(r"`([A-Z]+_[A-Z_]+)`", section)
    assert len(dotted) > 5
    assert [f"{owner}.{name}" for owner, name in dotted if not hasattr(thresholds().get(owner), name)] == []
    known = {*thresholds(), *vars(backends), *vars(xla_reports)}
    assert [name for name in plain if name not in known] == []


def test_warnings_and_rules_go_by_the_same_bounds() -> None:
    """They stand twice: the rules' numbers are loaded by `--help`, which must not load the analyses."""
    assert thresholds()["COMPILE"].slow_ms == xla_reports.SLOW_COMPILE_NS / 1e6
    assert thresholds()["EXECUTION"].slow_ms == xla_reports.SLOW_EXECUTE_NS / 1e6


# What of the documents is made here before commands are run, as recordings.
RECORDED = (
    *("RUN", "OTHER_RUN", "BEFORE", "AFTER", "before", "after", "ci", "qr", "runs/before", "runs/after"),
    *("sets/before", "sets/after", "gate/base", "gate/head", "stepscope-runs/20260101-120000-train"),
)
STACKS = """\
process 7:"python train.py";thread (7): MainThread;<module> (train.py:9);step (mylib/net.py:3) 60
process 7:"python train.py";thread (7): MainThread;<module> (train.py:9);load (mypackage/data.py:5) 40
"""
PROGRAMS = ("analyze", "hotspots", "flamegraph", "compare", "batch", "runs")
NEEDS_MORE = (
    "--rank",
    "--phase",
    "DUMPS",
    "--step ",
    "compiles",
    "energy",
    "--fail-on recompile",
    "--library flow",
)  # than is recorded here
STOPS = {"|", "||", "&&", ";", ">", ">>", "2>", "&"}


def commands_of(text: str) -> Iterator[str]:
    """Command lines in blocks of code and between backticks."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(stepscope [a-z].*)", line):
                yield match[1]
    yield from re.findall(r"(?<!`)`(stepscope [a-z]+[^`]*)`(?!`)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def words_of(line: str) -> list[str]:
    """As a shell parts them, up to what it does with the output."""
    lexer = shlex.shlex(re.sub(r"\$\([^)]*\)|\bPID\b", "1", line), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words = list(lexer)
    end = next((at for at, word in enumerate(words) if word in STOPS), len(words))
    return words[1:end]


@cache
def lines() -> dict[str, str]:
    """Each command line, without a comment behind it, and the first document it stands in."""
    found: dict[str, str] = {}
    for path in DOCUMENTS:
        for line in commands_of(path.read_text(encoding="utf-8")):
            found.setdefault(shlex.join(words_of(line)), path.name)
    return found


def parsed(line: str) -> Any:
    """Raises the parser's error for what the program does not take."""
    from stepscope.cli import COMMANDS, load

    name, *arguments = shlex.split(line)
    return load(name, COMMANDS[name]).make_context(name, arguments)


def test_every_command_line_of_the_documents_is_one() -> None:
    from stepscope.cli import COMMANDS, PARSE_ERROR

    wrong = []
    for line, document in lines().items():
        if line in COMMANDS:  # the command as a word of a sentence
            continue
        try:
            parsed(line)
        except (PARSE_ERROR, KeyError) as error:
            said = str(getattr(error, "message", error))
            if not said or said.endswith("requires an argument."):  # a sentence about an option, without what it takes
                continue
            wrong.append(f"{document}: stepscope {line}: {said}")
    assert len(lines()) > 100
    assert wrong == []


def test_those_that_need_a_recording_alone_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profile.txt").write_text(STACKS)
    losses = metrics_event(("train/loss", "found", [T0 + 1, T0 + 2], [2.0, 1.0]))
    for name in RECORDED:
        folder = tmp_path / name
        make_run_folder(folder.parent, name=folder.name, stacks_raw=STACKS, events=[losses], steps=step_rows(140))
    ran: dict[tuple[str, ...], str] = {}  # one of each set of options
    for line in lines():
        name, *arguments = shlex.split(line)
        starts = name == "runs" or (arguments and (tmp_path / arguments[0]).exists())
        kind = (name, *(word for word in arguments if word.startswith("-")))
        if name not in PROGRAMS or not starts or kind in ran or any(word in f"{line} " for word in NEEDS_MORE):
            continue
        status = call(name, *arguments)
        told = capfd.readouterr().err
        # a check of one run of each cannot be judged
        assert status == (4 if "slower=" in line else 0), f"stepscope {line}: {told}"
        ran[kind] = line
    assert {name for name, *_ in ran} == set(PROGRAMS)
    assert len(ran) > 15
