"""What a run was set up with: constructions of the user's that findings speak of, its framework, its knobs and seed.

Constructions are loaders, optimizers, DDP, GradScaler, a framework's settings. A loader is told by its identity. Where
a framework makes one of its own, its line merely runs the framework and is nobody's subject: spoken of is the user's
own construction over the same data set, else the line of the settings that the framework makes loaders from, else
none.

Knobs, what became of them, and the seed are what it was started with to be compared. All of it is input of unknown
origin: entries that make no sense are passed over and counted, lengths are bounded.
"""

from __future__ import annotations

import re
from typing import Any

import polars as pl

from stepscope.analyze.machine.readings import manifest_objects
from stepscope.engine.journal import event_data, place_of
from stepscope.model import FrameworkFacts, Note, Place, Settings, Site, StepFacts
from stepscope.model.comparison import AppliedKnob, TrialFacts
from stepscope.read.text import integer, string
from stepscope.tables.schema import Tables

# First folder of an installed package -> the framework whose words an advice takes.
PACKAGES = {
    "transformers": "transformers",
    "trl": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "lightning",
    "lightning_fabric": "fabric",
    "fastai": "fastai",
    "skorch": "skorch",
    "ignite": "ignite",
    "composer": "composer",
    "deepspeed": "deepspeed",
    "ultralytics": "ultralytics",
    "keras": "keras",
}
# Of several that a script uses the one in front runs the loop: Trainer on Accelerate, Fabric below Lightning.
FRAMEWORKS = (
    *("transformers", "ultralytics", "composer", "lightning", "fabric", "fastai", "skorch", "ignite", "keras"),
    *("deepspeed", "accelerate"),
)
BUILDERS = frozenset(["transformers", "ultralytics", "skorch", "fastai"])  # of loaders, from settings of their own

_Data = dict[str, Any]


def facts(tables: Tables) -> tuple[Site, ...]:
    """One per construction, in order of time."""
    return tuple(
        Site(str(data.get("what") or "?"), place_of(data), _arguments(data), row["rank"] or 0, string(data.get("via")))
        for row, data in event_data(tables, "site")
    )


def settings(tables: Tables, event: _Data | None, trained_by: FrameworkFacts | None = None) -> Settings | None:
    """Of the framework that runs the loop: the one that was seen training.

    In recordings that know none, it is told by who made the loader of `event`, else by who was told its settings. Of
    several such lines the last before the loader was made; None where no framework was seen.
    """
    built, before = _framework(_made(tables, event)), (event or {}).get("_time")
    told: dict[str, _Data] = {}  # framework -> a construction that is its settings, unless another framework made it
    for row, data in event_data(tables, "site"):
        package, _, what = str(data.get("what") or "").partition(".")
        own = "fabric" if what == "Fabric" else PACKAGES.get(package) if what else None
        late = own in told and before is not None and row["time_ns"] > before
        if own is not None and not late and _framework(data) in (None, own):
            told[own] = data
    name = built if built in BUILDERS else next((name for name in FRAMEWORKS if name in told), None)
    if trained_by is not None:
        name = "fabric" if trained_by.name == "Fabric" else PACKAGES.get(trained_by.package, name)
    if name is None:
        return None
    # fastai's loaders are none of torch's: nobody saw them made
    tells = told.get(name, {})
    called = {str(tells["what"]).rpartition(".")[2]: tells["called"]} if string(tells.get("called")) else {}
    loaders = name == built or (name == "fastai" and built is None)
    return Settings(name, place_of(tells), loaders=loaders, called=called)


def site_of(tables: Tables, event: _Data | None) -> _Data | None:
    """What to speak of where that loader's arguments are meant; without a `file` where no line says them.

    In recordings whose sites know no loader it is the only one.
    """
    sites = [data for _, data in event_data(tables, "site") if data.get("what") == "DataLoader"]
    if not any("id" in data for data in sites):
        return sites[0] if len(sites) == 1 else None
    made = _made(tables, event)
    if made is None or _framework(made) in (None, "fastai"):
        return made
    own = [data for data in sites if data.get("dataset") is not None and data["dataset"] == made.get("dataset")]
    places = {place_of(data) for data in own if _framework(data) is None}
    found = settings(tables, event)
    of_settings = found.place if found is not None and found.loaders else None
    place = places.pop() if len(places) == 1 else of_settings
    return {**made, **{name: getattr(place, name, None) for name in ("file", "line", "function")}}


def _made(tables: Tables, event: _Data | None) -> _Data | None:
    """The construction of the loader that an event tells of; one over the same data set where it was not written."""
    if event is None:
        return None
    sites = [
        data
        for row, data in event_data(tables, "site")
        if data.get("what") == "DataLoader" and event.get("_process", row["process"]) == row["process"]
    ]
    for name in ("id", "dataset"):
        same = [data for data in sites if data.get(name) is not None and data.get(name) == event.get(name)]
        if same and (name == "id" or len({place_of(data) for data in same}) == 1):
            return same[-1]
    return sites[0] if len({place_of(data) for data in sites}) == 1 else None


def _framework(site: _Data | None) -> str | None:
    """Whose code called the constructor at the user's line; None of the user's own and of other libraries'."""
    via = site.get("via") if site is not None else None
    if not isinstance(via, str):
        return None
    if via.startswith("lightning/fabric/"):
        return "fabric"
    return PACKAGES.get(via.split("/", 1)[0].split("\\", 1)[0])


def first_int(*values: object) -> int | None:
    """The first that is a whole number, or a text of one."""
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and re.fullmatch(r"\d+", value):
            return int(value)
    return None


def thread_count(value: object) -> int | None:
    """A number of threads that makes sense."""
    return int(str(value)) if re.fullmatch(r"[1-9]\d{0,4}", str(value)) else None


def threads_set(tables: Tables) -> tuple[int, Place | None] | None:
    """What the script last gave `torch.set_num_threads`, and where; None where it never did."""
    given = [
        (count, place_of(data))
        for _, data in event_data(tables, "site")
        if data.get("what") == "set_num_threads"
        for count in [thread_count(value) for value in _arguments(data).values()]
        if count is not None
    ]
    return given[-1] if given else None


def _arguments(data: _Data) -> dict[str, Any]:
    arguments = data.get("arguments")
    return dict(arguments) if isinstance(arguments, dict) else {}


BATCHES, OPTIMIZER_STEPS = "batches", "optimizer steps"  # what a framework may count that is no update


def framework(tables: Tables, train: StepFacts | None) -> FrameworkFacts | None:
    """The framework that trained first, on the first rank that tells of one; None where none was recognised."""
    told = sorted(event_data(tables, "framework"), key=lambda one: -1 if one[0]["rank"] is None else one[0]["rank"])
    events = [data for _, data in told]
    if not events:
        return None
    first = events[0]
    name, counts = string(first.get("name")) or "?", string(first.get("counts"))
    # Over all processes, differences from step to step: a training that was resumed begins where it was, and one that
    # begins anew in the same process counts from 0 again. The first has nothing before it: it is taken as the others.
    steps = tables.steps.filter((pl.col("kind") == "train") & pl.col("framework_step").is_not_null())
    theirs = pl.col("framework_step").diff().over("process")
    ours = pl.col("fetches").fill_null(0) if counts == BATCHES else pl.lit(1, dtype=pl.Int64)
    steps = steps.sort("process", "step").with_columns(theirs=pl.when(theirs >= 0).then(theirs), ours=ours)
    usual = steps["theirs"].median()
    usual_step = pl.lit(round(usual), dtype=pl.Int64) if isinstance(usual, float) else pl.col("ours")
    steps = steps.with_columns(pl.col("theirs").fill_null(usual_step))
    on_top = [entry for entry in first.get("on_top") or () if isinstance(entry, dict)]
    return FrameworkFacts(
        name=name,
        package=string(first.get("package")) or "",
        version=string(first.get("version")),
        supported=first.get("supported") is True,
        checked=_texts(first.get("checked")),
        seams=_texts(first.get("seams")),
        missing=_texts(first.get("missing")),
        counter=string(first.get("counter")),
        counts=counts,
        trainer=string(first.get("trainer")) or "",
        on_top=tuple(
            f"{entry['name']} {entry.get('version') or ''}".strip()
            for entry in on_top
            if isinstance(entry.get("name"), str)
        ),
        also=tuple(dict.fromkeys(other for other in _texts([event.get("name") for event in events]) if other != name)),
        cut_by=train.signal if train is not None else None,
        steps_counted=int(steps["theirs"].sum()) if steps.height else None,
        steps_cut=int(steps["ours"].sum()) if steps.height else None,
        parted_at=next(iter(steps.filter(pl.col("theirs") != pl.col("ours"))["step"]), None),
    )


def framework_notes(found: FrameworkFacts | None) -> tuple[Note, ...]:
    """What the reader has to know: the framework's count is another than ours."""
    if found is None or found.steps_counted is None or found.parted_at is None:
        return ()
    ours = f"{found.steps_cut:,} {'batches of train steps' if found.counts == BATCHES else 'train steps'}"
    text = f"{found.name} counted {found.steps_counted:,} {found.counts} ({found.counter}), we saw {ours}"
    if found.counts == OPTIMIZER_STEPS and found.steps_counted > (found.steps_cut or 0):
        return (Note("info", f"{text}: some of them take steps of several optimizers", "steps.jsonl"),)
    return (Note("warning", f"{text}; they part at step {found.parted_at}", "steps.jsonl"),)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


MAX_KNOBS = 1_000  # reports of one run
MAX_TEXT = 400  # characters of a name, a value or a reason
SILENT = "no process of the run said what became of it"
SILENT_RANK = "this rank never said what became of it"


def trial(tables: Tables) -> TrialFacts | None:
    """None of a run without knobs and seed."""
    skipped: list[Any] = []  # entries that were passed over
    wanted, seed = _wanted(tables, skipped)
    knobs = _applied_knobs(tables, wanted, skipped)
    told = [integer(data.get("value")) for _, data in event_data(tables, "seed")]
    seed = next((value for value in (seed, *told) if value is not None), None)
    if not (knobs or skipped) and seed is None:
        return None
    return TrialFacts(knobs=knobs, seed=seed, skipped=len(skipped))


def _wanted(tables: Tables, skipped: list[Any]) -> tuple[dict[str, str], int | None]:
    """(knobs, seed) as the manifests' options give them."""
    knobs: dict[str, str] = {}
    seed = None
    for options in manifest_objects(tables, "options"):
        seed = integer(options.get("seed")) if seed is None else seed
        listed = options.get("knobs")
        for item in listed[:MAX_KNOBS] if isinstance(listed, list) else ():
            pair = [item.get("knob"), item.get("value")] if isinstance(item, dict) else item
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair):
                knobs.setdefault(pair[0][:MAX_TEXT], pair[1][:MAX_TEXT])
            else:
                skipped.append(item)
    return knobs, seed


def _applied_knobs(tables: Tables, wanted: dict[str, str], skipped: list[Any]) -> tuple[AppliedKnob, ...]:
    """Reports in order of knobs as they were asked for, then of ranks; with one for each rank that said nothing."""
    found: dict[AppliedKnob, None] = {}
    for row, data in event_data(tables, "knob"):
        knob, value, applied = string(data.get("knob")), string(data.get("value")), data.get("applied")
        if not knob or value is None or not isinstance(applied, bool) or len(found) >= MAX_KNOBS:
            skipped.append(row)
            continue
        texts = (string(data.get(name)) for name in ("observed", "reason", "file"))
        observed, reason, file = (text[:MAX_TEXT] if text else None for text in texts)
        line = integer(data.get("line"))
        line = line if file is not None and line is not None and line > 0 else None
        report = AppliedKnob(
            knob[:MAX_TEXT],
            value[:MAX_TEXT],
            applied,
            observed=observed,
            reason=reason,
            file=file,
            line=line,
            rank=row["rank"],
        )
        found.setdefault(report)
    told: list[AppliedKnob] = []
    for name, value in {**wanted, **{report.knob: report.value for report in found}}.items():
        own = [report for report in found if report.knob == name]
        if not own:
            told.append(AppliedKnob(name, value, applied=False, reason=SILENT))
            continue
        ranks = set() if any(report.rank is None for report in own) else {rank.rank for rank in tables.ranks}
        told += [report for report in own if report.rank not in ranks]
        for rank in sorted(ranks):
            silent = AppliedKnob(name, value, applied=False, reason=SILENT_RANK, rank=rank)
            told += [report for report in own if report.rank == rank] or [silent]
    return tuple(told)
