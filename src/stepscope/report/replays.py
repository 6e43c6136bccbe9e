"""RUN/replay.json, and what reports and terminals say of a replayed operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.errors import EnvironmentRefusal
from stepscope.files import decoded_small
from stepscope.model.replay import SCHEMA, OperatorReplay, OperatorReplays
from stepscope.report import outputs, words
from stepscope.report.escape import json_bytes, one_line, plain, plain_mapping

NAME = "replay.json"
MAX_FILE_BYTES = 2_000_000
MAX_REPLAYS = 20  # operators kept beside a run, the newest first
SHOWN = 300  # characters of shapes, types and reasons

Row = Mapping[str, Any]


def kept(folder: Path) -> tuple[OperatorReplay, ...]:
    """The replays that lie beside a run, the newest first; none where the file is absent or cannot be read."""
    found = decoded_small(folder / NAME, MAX_FILE_BYTES, OperatorReplays)
    return found.replays[:MAX_REPLAYS] if found is not None and found.schema == SCHEMA else ()


def keep(folder: Path, replay: OperatorReplay) -> Path | None:
    """Lay `replay` beside a run, in the place of an older one of its operator; None where nothing can be written."""
    others = [other for other in kept(folder) if other.operator != replay.operator]
    try:
        outputs.write_file(folder / NAME, dumps((replay, *others[: MAX_REPLAYS - 1])))
    except EnvironmentRefusal:
        return None
    return folder / NAME


def dumps(replays: Sequence[OperatorReplay]) -> bytes:
    return json_bytes({"schema": SCHEMA, "replays": [plain_mapping(replay) for replay in replays]})


def device(variant: Row, gpus: Sequence[Any] = ()) -> str:
    """ "cpu, 2 threads, float64"."""
    parts = [str(variant["device"])]
    if variant["threads"] is not None:
        parts.append(words.things(variant["threads"], "thread"))
    if variant["dtype"] is not None:
        parts.append(str(variant["dtype"]))
    if variant["device"] != "cpu" and gpus:
        parts.append(plain(str(gpus[0]), 40))
    return plain(", ".join(parts), SHOWN)


def rows(replay: Row, call: Row) -> Iterator[dict[str, Any]]:
    """A line of the table for each variant."""
    for each in call["times"]:
        timed = each["per_call_ns"] is not None
        interval = ""
        if each["low_ns"] is not None and each["high_ns"] is not None:
            interval = f"{words.nanoseconds(each['low_ns'])} to {words.nanoseconds(each['high_ns'])}"
        yield {
            "on": device(each["variant"], replay["gpus"]),
            "per_call": words.nanoseconds(each["per_call_ns"]) if timed else one_line(each["reason"] or "", SHOWN),
            "interval": interval,
            "per_step": words.nanoseconds(each["per_step_ns"]) if timed else "",
            "ratio": f"{each['ratio']:.3g} ×" if each["ratio"] is not None else "",
        }


def headline(replay: Row, call: Row) -> str:
    """The operator, its inputs and how often it is called."""
    parts = [f"inputs {plain(call['shapes'], SHOWN)}" + (f" of {plain(call['types'], 80)}" if call["types"] else "")]
    if call["calls_per_step"] is not None:
        parts.append(f"{call['calls_per_step']:.4g} calls a step")
    if call["recorded_ns"] is not None:
        parts.append(f"recorded {words.nanoseconds(call['recorded_ns'])} a call")
    if call["layouts"] > 1:
        parts.append(f"the first of {call['layouts']} layouts or values")
    return f"{plain(replay['operator'], 100)}: {', '.join(parts)}"


def evidence(finding: Row, replays: Sequence[Row]) -> list[dict[str, Any]]:
    """The figures of replays that belong to a finding: of an operator it names, or one called at its line."""
    made = []
    places = {(place["file"], place["line"]) for place in finding["where"]}
    said = f"{finding['title']} {' '.join(each['metric'] for each in finding['evidence'])}"
    for replay in replays:
        at = replay["place"]
        if replay["operator"] not in said and not (at and (at["file"], at["line"]) in places):
            continue
        for each in replay["steps"]:
            name = f"{replay['operator']} alone on {device(each['variant'], replay['gpus'])}"
            value = float(f"{each['per_step_ns'] / 1e6:.4g}")
            made.append({"metric": name, "value": value, "unit": "ms", "source": "stepscope replay, per step"})
    return made
