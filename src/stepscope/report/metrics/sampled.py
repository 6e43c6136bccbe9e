"""Definitions of the figures of sampled stacks: hotspots, waits, slow steps, ranks, stages, flame graphs."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_HOTSPOTS = "`stepscope hotspots --json`"

SECTIONS = (
    Section(
        "Hotspots",
        "Hotspots",
        _HOTSPOTS,
        metrics(
            samples=(
                "count",
                "Samples read from all files, whatever became of them; with skipped_samples they are the files' own sum. In the unit of `unit`: samples, or the us or bytes of files that hold weights.",
            ),
            skipped_samples=("count", "Samples of records that could not be read."),
            selected_samples=(
                "count",
                "Samples that rows are made of; with the values of left_out they sum to samples.",
            ),
            waiting_samples=("count", "Selected samples whose innermost Python frame is a known wait."),
            left_out=(
                "count",
                "reason -> samples that were not selected, by the first reason that holds: launchers, helper processes, other ranks, other processes, other phases, parked threads (a known thread other than the main one, in a known wait), torn or the recorder's own.",
            ),
            kinds=("count", "kind of the innermost frame -> selected samples."),
            working_rows=("count", "Rows that work, before any limit."),
            waiting_rows=("count", "Rows that wait, before any limit."),
            files=("count", "Files or segments with samples."),
            rate_hz=("count", "Samples per second and thread; missing where unknown or different between files."),
            wall_s=(
                "s",
                "How long sampling lasted: the union of the segments' times; else the longest a file states; else the samples of the busiest thread by the rate (`wall_source` nominal), which is less where waiting was not sampled.",
            ),
            steps=("count", "Steady steps behind ms_per_step, of all ranks."),
            mean_step_ms=("ms", "Mean over ranks of the mean steady step."),
        ),
    ),
    Section(
        "HotspotRow",
        "Hotspots: each",
        f"{_HOTSPOTS}, `rows`",
        metrics(
            line=("count", "Line of the innermost frame; missing where it is unknown or several were merged."),
            library_function_line=("count", "Line of the innermost frame of the library on the way there."),
            samples=("count", "Selected samples with this innermost frame."),
            proportion=("share", "samples by selected_samples: of the time of all selected threads together."),
            seconds=(
                "s",
                "samples by the rate, summed over threads; of files in us the sum itself; missing where a rate is unknown.",
            ),
            ms_per_step=(
                "ms",
                "Per rank the share of its main thread's samples in steady steps, times its mean steady step; the mean over ranks. Missing without such samples.",
            ),
            roles=("count", "role of the process -> samples."),
        ),
    ),
    Section(
        "SampledProcess",
        "Hotspots: processes",
        f"{_HOTSPOTS}, `processes`",
        metrics(
            pid=("count", "Process id; missing where the file names none."),
            rank=("count", "Rank it belongs to. In files of others ranks are numbered by file and process id."),
            threads=("count", "Threads with selected samples; missing where the file does not tell threads apart."),
            samples=("count", "Selected samples of the process."),
            waiting_samples=("count", "Of them those in a known wait."),
        ),
    ),
    Section(
        "LoaderWait",
        "Waiting for the loader",
        "views.sampled.waits",
        metrics(
            rank=("count", "The rank that waits."),
            wait_ms_per_step=(
                "ms",
                "Measured data wait of the rank's mean steady step; missing where no step tells it.",
            ),
            wait_share=(
                "share",
                "Of the sampled time of the main thread's loop, what it spends in its loader's `__next__`.",
            ),
            samples=("count", "Samples of the main thread in its loader."),
            loop_samples=(
                "count",
                "Samples of the main thread's loop: segments that steady steps fill; without steps, the user's function that fetches batches and calls the model, from the line of the fetch on, imports and compilation left out.",
            ),
        ),
    ),
    Section(
        "WaitPart",
        "Parts of a wait",
        "views.sampled.waits.parts",
        metrics(
            ms_per_step=("ms", "The part's share of the measured data wait of a mean steady step."),
            share=(
                "share",
                "Of the wait; the parts exclude each other and sum to 1. Where times are known and waits last longer than the time between samples, each moment goes to the first that holds of: pinning, a batch on its way, busy workers (in equal parts), starting workers, idle workers. Elsewhere samples of the same period stand for the moments, threads taken as independent.",
            ),
            samples=("count", "The share of the wait's samples, in whole numbers that sum to them."),
            lines=("count", "Lines of the user's in it: 0 or 1, or as many as were summed up."),
        ),
    ),
    Section(
        "SlowSteps",
        "Slow steps",
        "views.sampled.slow_steps",
        metrics(
            slow_steps=("count", "Sampled steady steps above the threshold."),
            typical_steps=("count", "All other sampled steady steps."),
            threshold_ms=(
                "ms",
                "1.5 medians, or the median and 5 spreads where that is more; the spread is that of the faster half, which slow steps cannot widen.",
            ),
            median_ms=("ms", "Median wall time of the steady steps of all ranks."),
            slow_mean_ms=("ms", "Mean wall time of the slow steps."),
            typical_mean_ms=("ms", "Mean wall time of the typical steps."),
        ),
    ),
    Section(
        "SlowLine",
        "Lines of slow steps",
        "views.sampled.slow_steps.lines",
        metrics(
            slow_ms_per_step=(
                "ms",
                "The line's share of the sampled time inside slow steps, times the mean slow step.",
            ),
            typical_ms_per_step=("ms", "The same of typical steps."),
            extra_ms_per_step=(
                "ms",
                "The difference. Lines are named where it is at least 2 % of what a slow step takes more, and half the time between samples.",
            ),
            samples=("count", "Samples of the line in slow steps, by the time between samples; at least 10."),
        ),
    ),
    Section(
        "RankLines",
        "Ranks against each other",
        "views.sampled.rank_lines",
        metrics(
            ranks=("count", "Ranks with at least 50 samples in their loop, which were compared."),
            straggler=(
                "count",
                "The rank that waits least for the others: at least 5 % of its loop and 4 standard deviations of chance less than their median; missing where none does, where waiting was not sampled, and where nothing shows that ranks exchange gradients.",
            ),
            waiters=("count", "Ranks that wait at least half of that difference longer than the straggler."),
        ),
    ),
    Section(
        "RankLine",
        "Lines in which ranks differ",
        "views.sampled.rank_lines.lines",
        metrics(
            by_rank=(
                "ms or share",
                "rank -> the line's share of the rank's loop, times the rank's mean steady step where steps are known (`unit` says which).",
            ),
            spread=(
                "ms or share",
                "Largest minus smallest of the ranks. Lines are named where their shares differ by at least 2 % and 4 standard deviations of chance.",
            ),
            most=("count", "The rank with the largest figure."),
        ),
    ),
    Section(
        "SampledViews",
        "Phases of the sampled loop",
        "views.sampled",
        metrics(phases=("share", "phase -> its share of the samples of the main threads' loop, all ranks.")),
    ),
    Section(
        "StageTime",
        "Stages of the run",
        "views.sampled.stages",
        metrics(
            samples=(
                "count",
                "Samples of the main threads of ranks in this stage; over all stages they are all such samples.",
            ),
            share=(
                "share",
                "Of the samples of all stages. Imports and compilation are told by frames and come first; then what lies before the first step, in warm-up, in steady steps (first batches of epochs included); the rest, profiled steps and evaluation too, is `other`.",
            ),
            waiting_share=("share", "Of the stage's samples, those in a known wait."),
        ),
    ),
    Section(
        "FlameTree",
        "Flame graphs",
        "`stepscope flamegraph`",
        metrics(
            parent=("count", "The box above, by its number; -1 at the root."),
            frame=("count", "The frame of the box, by its number."),
            value=(
                "count",
                "In `unit`, what was sampled or traced in the box and all below it. In ms per step: the share of the rank's main-thread samples in steady steps, times the rank's mean step; samples of its other threads count the same; over several ranks, their mean. In samples, us or bytes: as the files count. In trees of device and operator time: durations inside profiled windows, by their steps.",
            ),
            base=(
                "count",
                "The same of the other side of a difference, 0 where the path is not there; per step where both sides know steps, else scaled to the same total.",
            ),
            hidden=(
                "count",
                "Of the root's value, what belongs to paths below --min-share (0.05 % of the tree), beyond 20,000 boxes or 1,000 levels. It stays in the boxes that lead there.",
            ),
        ),
    ),
    Section(
        "FlameGraph",
        "Flame graphs: all trees",
        "`stepscope flamegraph`",
        metrics(source=("count", "frame -> text of the line, where it is at hand.")),
    ),
    Section(
        "FlameFrame",
        "Flame graphs: frames",
        "`stepscope flamegraph`",
        metrics(line=("count", "Line; of a box that stands for several, the one sampled most.")),
    ),
)
