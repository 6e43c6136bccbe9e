"""How a run is, asked at `--metrics-port` while it trains: what is told, to whom, and that nobody is in the way."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from stepscope.api import open_run
from stepscope.record.host import openmetrics
from stepscope.schema import STEP_COLUMNS
from tests.wandb_file import records

pytestmark = [pytest.mark.process, pytest.mark.torch]

TOKEN = "a-token-of-ours"
# Trains, then asks for the page in both formats, and for what is refused.
ASKING = """
import json, os, sys, time, urllib.error, urllib.request
import torch
from plain_sgd import PlainSGD
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(120, 8), torch.randint(0, 2, (120,)))
model = torch.nn.Linear(8, 2)
optimizer = PlainSGD(model.parameters(), 0.25)
for inputs, labels in torch.utils.data.DataLoader(data, batch_size=4):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    time.sleep(0.02)
print(loss.item())
if len(sys.argv) > 2:
    time.sleep(2.5)  # the page is made once a second
    port, said = sys.argv[2], {}
    def ask(path, **headers):
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return [answer.status, answer.headers["Content-Type"], answer.read().decode()]
        except urllib.error.HTTPError as error:
            return [error.code, error.headers["Content-Type"], error.read().decode()]
    token = {"Authorization": "Bearer " + os.environ["STEPSCOPE_METRICS_TOKEN"]}
    said["opened"] = ask("/metrics", Accept="application/openmetrics-text; version=1.0.0", **token)
    said["plain"] = ask("/metrics?token=" + os.environ["STEPSCOPE_METRICS_TOKEN"])
    said["without"], said["wrong"] = ask("/metrics"), ask("/metrics?token=another")
    said["elsewhere"] = ask("/etc/passwd", **token)
    json.dump(said, open(sys.argv[1], "w"))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def recorded(folder: Path, *command: str, port: int, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stepscope", "run", "--no-report", "--metrics-port", str(port), "--out", "run", "--"]
    environment = {**os.environ, "STEPSCOPE_METRICS_TOKEN": TOKEN, **variables}
    return subprocess.run(
        [*line, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run that asked about itself, beside six clients that say nothing: its folder, the answers and its stderr."""
    folder, port = tmp_path_factory.mktemp("asked"), free_port()
    silent = "import socket, time; s = [socket.create_connection(('127.0.0.1', {0})) for _ in range(6)]; time.sleep(9)"
    (folder / "train.py").write_text(
        f"import subprocess, sys\nsilent = subprocess.Popen([sys.executable, '-c', {silent.format(port)!r}])\n"
        f"{ASKING}\nsilent.kill()\n"
    )
    done = recorded(folder, sys.executable, "train.py", "said.json", str(port), port=port)
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "said.json").read_text()), done.stderr


def families(text: str) -> dict[str, Any]:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    return {family.name: family for family in text_string_to_metric_families(text)}


def test_what_is_told_is_what_the_run_folder_holds(asked: tuple[Path, dict[str, Any], str]) -> None:
    folder, said, _ = asked
    status, kind, text = said["opened"]
    assert (status, kind.partition(";")[0]) == (200, "application/openmetrics-text")
    found = families(text)
    run = open_run(folder / "run")
    steps = run.tables.steps
    timed = steps.filter(~steps["in_window"])
    (sample,) = found["stepscope_steps"].samples
    assert (sample.name, sample.labels["rank"], sample.labels["kind"]) == ("stepscope_steps_total", "0", "train")
    assert steps.height == 30
    ends_ns = steps["start_ns"] + steps["wall_ns"]
    told = found["stepscope_last_step_timestamp_seconds"].samples[0].value
    assert told == pytest.approx(ends_ns[int(sample.value) - 1] / 1e9, abs=1e-6)
    assert ends_ns[-1] / 1e9 - told < 0.25  # steps of the last tenth of a second wait in the process
    assert found["stepscope_samples"].samples[0].value == 4 * sample.value
    seconds = sum(each.value for each in found["stepscope_timed_step_seconds"].samples)
    assert 0 < seconds <= timed["wall_ns"].sum() / 1e9 + 1e-6
    assert found["stepscope_timed_steps"].samples[0].value <= timed.height
    values = {name: family.samples[0].value for name, family in found.items() if name.endswith("_value")}
    for name, series in (("backward_loss", "train/loss"), ("train_grad_norm", "train/grad_norm")):
        kept = run.tables.metrics.filter(name=series).sort("time_ns")
        latest = kept.filter(kept["time_ns"] > kept["time_ns"][-1] - 800_000_000)  # read every half second
        assert values[f"stepscope_{name}_value"] in latest["value"].to_list()
    assert values["stepscope_train_lr_0_value"] == 0.25
    assert found["stepscope_rank_rss_bytes"].samples[0].value > 1_000_000
    assert found["stepscope_host_load_1m"].type == "gauge"
    assert found["stepscope_host_cgroup_throttled_ns"].type == "counter"


def test_a_client_of_the_older_format_gets_the_same_values(asked: tuple[Path, dict[str, Any], str]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    status, kind, text = asked[1]["plain"]
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    plain = {family.name for family in text_string_to_metric_families(text)}
    assert plain == set(families(asked[1]["opened"][2]))
    assert re.search(r"# TYPE stepscope_steps_total counter\nstepscope_steps_total\{", text)


def test_who_does_not_say_the_token_is_told_nothing(asked: tuple[Path, dict[str, Any], str]) -> None:
    _, said, stderr = asked
    assert [said[name][0] for name in ("without", "wrong", "elsewhere")] == [403, 403, 404]
    assert not any("stepscope_" in said[name][2] for name in ("without", "wrong", "elsewhere"))
    assert "stepscope: metrics at http://127.0.0.1:" in stderr
    assert TOKEN not in stderr  # whoever chose it knows it


def test_a_port_that_is_taken_is_a_line_and_the_run_goes_on(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = recorded(tmp_path, sys.executable, "-c", "print('it ran')", port=taken.getsockname()[1])
    assert (done.returncode, done.stdout) == (0, "it ran\n")  # nothing of ours
    assert "the run is recorded all the same" in done.stderr
    assert list((tmp_path / "run").glob("host-*/manifest.json"))


@pytest.mark.parametrize(
    ("port", "token", "said"),
    [
        (70000, TOKEN, "--metrics-port must lie between 0 and 65535"),
        (0, "short", "at least 8 characters"),
        (0, "with a space", "at least 8 characters"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    tmp_path: Path, port: int, token: str, said: str
) -> None:
    done = recorded(tmp_path, sys.executable, "-c", "print('it ran')", port=port, STEPSCOPE_METRICS_TOKEN=token)
    assert done.returncode == 2
    assert said in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


LOGGING = """
import sys, time, torch, wandb
from plain_sgd import PlainSGD
torch.manual_seed(0)
run = wandb.init(project="p", mode="offline", dir=sys.argv[1], settings=wandb.Settings(x_stats_sampling_interval=1.0))
data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.randint(0, 2, (160,)))
model = torch.nn.Linear(8, 2)
optimizer = PlainSGD(model.parameters(), 0.25)
for number, (inputs, labels) in enumerate(torch.utils.data.DataLoader(data, batch_size=4)):
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(float(sys.argv[2]))
    run.log({"loss": loss.item(), "number": number}, step=10 * number)
run.finish()
"""


def test_wandb_reads_it_by_itself_and_its_own_file_stays_what_it_was(tmp_path: Path) -> None:
    port = free_port()
    endpoints = json.dumps({"stepscope": f"http://127.0.0.1:{port}/metrics?token={TOKEN}"})
    (tmp_path / "train.py").write_text(LOGGING)
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "false"}
    line = [sys.executable, "train.py", str(tmp_path / "plain"), "0"]
    done = subprocess.run(
        line, cwd=tmp_path, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=90, check=True
    )
    with_us = recorded(
        tmp_path, sys.executable, "train.py", "ours", "0.08", port=port,
        WANDB_X_STATS_OPEN_METRICS_ENDPOINTS=endpoints, **quiet,
    )  # fmt: skip
    assert with_us.returncode == 0, with_us.stderr
    assert "ignored" not in done.stderr + with_us.stderr
    plain, ours = (list(records(tmp_path / name)) for name in ("plain", "ours"))
    assert logged(ours) == logged(plain)
    assert len(logged(ours)) == 40
    stats = [item.key for record in ours for item in record.stats.item]
    assert any(key.startswith("openmetrics.stepscope.stepscope_steps_total") for key in stats)
    assert not any("openmetrics" in item.key for record in plain for item in record.stats.item)


def logged(found: list[Any]) -> list[dict[str, str]]:
    """What a script logged, without its times."""
    history = (record.history for record in found if record.WhichOneof("record_type") == "history")
    items = ({item.key or ".".join(item.nested_key): item.value_json for item in row.item} for row in history)
    return [{key: value for key, value in row.items() if key not in ("_timestamp", "_runtime")} for row in items]


NAMES = ("a.b", "a/b", "", "x_total", "x" * 300, 'ünï/☃ <b>"q"\\\n\r\t', "\u2028\x85", "\udcff", '{a="b"}', "# EOF")
# What a list of series may not be.
ODD = (
    "null",
    "5",
    "[5]",
    "[{}]",
    '[{"values":5}]',
    '[{"values":[[1]]}]',
    '[{"values":[1e400]}]',
    f'[{{"values":[{10**400}]}}]',
    '[{"values":"AAAA"}]',
    '[{"values":"no base 64"}]',
)


def test_whatever_the_journals_hold_the_page_can_be_read(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families as of_the_older_format

    run = tmp_path / 'run "x"\nü'
    for name in ("host-a", "rank-0"):
        (run / name).mkdir(parents=True)
    claims = [{"folder": "rank-0", "pid": 7}, {"folder": "../../etc", "pid": 8}, {"folder": None}, [1]]
    (run / "host-a" / "agents.jsonl").write_text("\n".join(map(json.dumps, claims)) + "\n")
    values = (1.5, "nan", "inf", "-inf", -0.0)
    told = [[name, f"tool {at}", value] for name in NAMES for at, value in enumerate(values)]
    told += [[f"step-{number}", "log", 1.0] for number in range(openmetrics.SERIES_LIMIT)]
    events = [
        json.dumps({"kind": "metrics", "series": [{"name": name, "source": source, "values": [value]}]})
        for name, source, value in told
    ]
    (run / "rank-0" / "events.jsonl").write_text(
        "\n".join([*(f'{{"kind":"metrics","series":{text}}}' for text in ODD), *events, "{torn"])
    )
    wall = STEP_COLUMNS.index("wall_ns")
    odd: list[Any] = [1.5, "x", None, True, -5, 10**400]
    steps = [[0] * wall + [value] + [0] * (len(STEP_COLUMNS) - wall - 1) for value in [10**9, *odd]]
    (run / "rank-0" / "steps.jsonl").write_text("\n".join(map(json.dumps, [[], [1], *steps])) + "\n")
    endpoint = openmetrics.listen(0, {openmetrics.TOKEN_VARIABLE: TOKEN})
    look = openmetrics.start(os.dup(endpoint.socket.fileno()), endpoint.token, run / "host-a")
    look([("load_1m", "1", float("nan"), None, 'a"\n'), ("rss_bytes", "bytes", 5.0, 7, None)])
    answers = []
    for accepted in ("application/openmetrics-text", "text/plain"):
        request = urllib.request.Request(f"{endpoint.address}?token={TOKEN}", headers={"Accept": accepted})
        with urllib.request.urlopen(request, timeout=20) as answer:
            answers.append(answer.read().decode())
    endpoint.socket.close()
    found = families(answers[0])
    assert {family.name for family in of_the_older_format(answers[1])} == set(found)
    samples = [sample for family in found.values() for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {run.name}
    kept = [sample for sample in samples if sample.name.endswith("_value")]
    assert len(kept) == openmetrics.SERIES_LIMIT
    assert {sample.labels["name"] for sample in kept} >= {name for name in NAMES if name.isprintable()}
    assert found["stepscope_names_left_out"].samples[0].value > 0
    assert found["stepscope_steps"].samples[0].value == len(odd) + 1
    assert found["stepscope_rank_rss_bytes"].samples[0].value == 5.0
