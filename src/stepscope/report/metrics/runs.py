"""Definitions of the figures of a run: steps, findings, quality, and what was measured around the steps."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "RunFacts",
        "The run",
        "run",
        metrics(
            started_ns=("ns", "Start of the recording, since the epoch."),
            ended_ns=("ns", "Its end; missing where the recorder was killed."),
            exit_status=("count", "What the command ended with, as a shell says it: 128 + n for signal n."),
            ranks=("count", "Numbers of the training processes that were heard of."),
            world_size=("count", "How many there should be, by the launcher's word."),
        ),
    ),
    Section(
        "FrameworkFacts",
        "The training framework",
        "run.framework",
        metrics(
            steps_counted=(
                "count",
                "What the framework's own counter grew by over the training steps that have it; missing without any.",
            ),
            steps_cut=("count", "The same by the recorder: training steps, or their batches where it counts batches."),
            parted_at=("count", "The first step in which the two differ."),
        ),
    ),
    Section(
        "StepFacts",
        "Steps",
        "steps, views.steps_by_kind",
        metrics(
            count=("count", "Steady steps: after warm-up, not the first batch of an epoch, outside profiler windows."),
            mean_ms=("ms", "Mean wall time of the steady steps, those of all ranks together."),
            median_ms=("ms", "Median of the same."),
            p95_ms=("ms", "95th percentile of the same: one step in twenty takes longer."),
            per_second=("1/s", "Steady steps per second: 1 by the mean."),
            samples_per_second=("1/s", "Rows of the batches by wall time of the steps, summed over ranks."),
            excluded=("count", "Steps left out of the statistics, by reason."),
            first_batch_ms=(
                "ms",
                "Mean wall time of the first step of an epoch, which starts workers and fills queues.",
            ),
            ranks=("count", "Ranks the figures are of."),
            series=("ms", "(step, wall time) of the first rank, thinned so that stalls stay."),
            by_rank=("count", "Steady steps of each of `ranks`; `count` is their sum."),
        ),
    ),
    Section(
        "ProfiledFacts",
        "Profiled steps",
        "views.profiled; said beside every table and page of operators, kernels and modules",
        metrics(
            steps=("count", "Steps that the traces name and hold whole: what their totals are divided by."),
            mean_ms=("ms", "Their mean, as the overview cuts them: with the device work that they launched."),
            steady_ms=("ms", "The mean steady step outside of them; missing where every step was profiled."),
        ),
    ),
    Section(
        "PartitionPart",
        "Parts of the step",
        "steps.partition",
        metrics(
            ms=(
                "ms",
                "Mean time of the part in a steady step, on the host's clock. The parts exclude each other and sum to the mean step. data_wait is time in the loader's `__next__`; of steps that ask no loader, before_forward is what lies before the first forward pass.",
            ),
            share=("share", "The same by the mean step; the shares sum to 1."),
        ),
    ),
    Section(
        "FixedCosts",
        "Paid once",
        "views.fixed_costs, steps.fixed_cost_s",
        metrics(
            total_s=(
                "s",
                "What a run pays once, apart from steady steps: before the first step, warm-up and windows, as far as they are known; the first step counts only where no warm-up is known.",
            ),
            before_first_step_s=("s", "From the start of the process to its first step: imports, data, model."),
            first_step_s=("s", "The whole first step: allocation, compilation, autotuning."),
            warmup_s=(
                "s",
                "What the warm-up steps, the first one and what it compiles included, took beyond as many steady ones; mean over processes.",
            ),
            windows_s=(
                "s",
                "Stopping profiler windows and writing their traces, and what the steps in which the script's own profiler starts or stops took beyond steady ones; of the process that spent most.",
            ),
        ),
    ),
    Section(
        "Unexplained",
        "What nobody explained",
        "unexplained",
        metrics(
            ms=("ms", "Of the mean steady step: what no finding and no known work accounts for. The sum of its parts."),
            share=("share", "The same by the mean step."),
        ),
    ),
    Section(
        "UnexplainedPart",
        "What nobody explained: a part",
        "unexplained.parts",
        metrics(
            ms=("ms", "Of the mean steady step; the parts exclude each other."),
            share=("share", "The same by the mean step."),
        ),
    ),
    Section(
        "Finding",
        "Findings",
        "findings",
        metrics(
            cost_ms_per_step=(
                "ms",
                "What the loss costs in a mean step of its basis, measured as the rule says (docs/findings.md).",
            ),
            share=("share", "The same by `step_ms`."),
            step_ms=(
                "ms",
                "The mean step of `basis`: of steady steps as the headline has it, of profiled ones, or of all of the run.",
            ),
            gain_ceiling=(
                "share",
                "Upper bound of what the run could gain if this one loss vanished. Ceilings do not add up.",
            ),
            ranks=("count", "Ranks it was seen on."),
        ),
    ),
    Section(
        "Diagnosis",
        "All findings together",
        "views.findings_share",
        metrics(
            counted_share=(
                "share",
                "Sum of the shares of findings of steady or profiled steps that no other explains. Above 1 they overlap.",
            ),
        ),
    ),
    Section(
        "Interval",
        "Expected gain",
        "findings[].expected_gain",
        metrics(
            low=("share", "Lower end of what the fix should gain of the mean step, by a model of cores and CPU time."),
            high=("share", "Upper end of the same."),
        ),
    ),
    Section(
        "Place",
        "Places",
        "where, place",
        metrics(
            line=("count", "Line in the file. Where only the function is known, the line it begins on."),
            share=(
                "share",
                "The place's part of what it is a place of: of the cost of a finding, of the time of an operator.",
            ),
        ),
    ),
    Section(
        "Quality",
        "Quality of the recording",
        "quality.counts",
        metrics(
            counts=("count", "Records read, lost, salvaged and missing, by kind. Missing is said, never made zero.")
        ),
    ),
    Section(
        "TraceFacts",
        "Quality of a trace",
        "quality.traces",
        metrics(
            rank=("count", "Rank of the trace: from its metadata, else its name, else the next free number."),
            events=("count", "Entries seen in the file."),
            salvaged=("count", "Of them not valid JSON, and mended."),
            lost=("count", "Of them not usable."),
            unsupported=("count", "Of kinds that hold no slice, arrow, allocation or name."),
            clipped=("count", "Slices cut in the tree so that all nest."),
            repaired=(
                "count",
                "Slices whose duration was impossible: negative, over seven days, or over later work of its stream.",
            ),
            device_events=("count", "Slices of devices: kernels, copies, fills."),
            device_ns=("ns", "Their durations, summed: streams side by side count twice."),
            linked_ns=("ns", "Of it what reached an operator, by the way it was found."),
            before_recording_ns=("ns", "Of it what was launched before the recording began."),
            graph_ns=("ns", "Of it what a CUDA graph replayed, which keeps no link to operators."),
            unlinked_ns=("ns", "The rest; the four sum to device_ns."),
            link_rate=("share", "Linked by device time launched in the recording."),
        ),
    ),
    Section(
        "ReadingFacts",
        "Quality of all traces together",
        "quality.reading",
        metrics(
            traces=("count", "Trace files read."),
            events=("count", "Entries seen in them."),
            salvaged=("count", "Entries mended."),
            lost=("count", "Entries lost."),
            clipped=("count", "Slices cut so that all nest."),
            repaired=("count", "Impossible durations repaired."),
            device_events=("count", "Slices of devices."),
            link_rate=("share", "Device time linked to operators, by device time launched in the recordings."),
            linked_shares=("share", "The same by the way the link was found."),
            graph_share=("share", "Replayed by CUDA graphs, of the device time launched in the recordings."),
            unlinked_share=("share", "Linked to nothing, of the same."),
            before_recording_share=("share", "Launched before the recordings began, of all device time."),
        ),
    ),
    Section(
        "StackFacts",
        "Sampled stacks",
        "views.stacks",
        metrics(
            rate_hz=("1/s", "Samples a second: the median over segments of the main source."),
            samples=("count", "Sampled stacks of all processes and threads."),
            skipped=("count", "Samples torn or not parsed."),
            steady_samples=("count", "Samples of the ranks' main threads in steps."),
            by_phase=("count", "Steady samples of main threads, by phase of the step."),
        ),
    ),
    Section(
        "HotLine",
        "Sampled lines",
        "views.stacks.hot_lines, views.loader.lines",
        metrics(
            line=("count", "Line in the file."),
            self_samples=("count", "Samples in which this is the innermost line of the user's."),
            share=("share", "Of the samples of main threads of the same role during steps."),
            ms_per_step=("ms", "Its share of the samples of the main thread times the mean step."),
            waiting_share=("share", "Samples of the line in which the thread waited: for a lock, a file, a device."),
        ),
    ),
    Section(
        "LoaderFacts",
        "Loader",
        "views.loader",
        metrics(
            num_workers=("count", "Worker processes of the DataLoader; 0 loads in the training process."),
            batch_size=("count", "Rows of a batch."),
            data_wait_ms=("ms", "Mean time in the loader's __next__ in a steady step."),
            data_wait_share=("share", "The same by the mean step."),
            workers_busy_share=("share", "Sampled time the workers worked while the training process waited for data."),
            workers_idle_share=("share", "Sampled time they waited meanwhile."),
            cpu_limit=("count", "Cores the process may use: affinity or cgroup quota, whichever is less."),
            suggested_workers=("count", "Workers suggested, from these cores."),
            load_ms=("ms", "Work to make the batches of one step, summed over workers."),
            compute_ms=("ms", "The step without its data wait."),
            cores_used=("count", "Mean CPU use of the training process, in cores."),
            samples=("count", "Sampled stacks the lines stand on."),
            threads=("count", "Threads of torch on the CPU, where the script set them."),
            ranks_on_host=("count", "Ranks that share the cores."),
        ),
    ),
    Section(
        "BatchContent",
        "What a batch of the loader holds",
        "views.loader.batch",
        metrics(
            tensors=("count", "Tensors in a batch, median of the batches that were looked at."),
            bytes=("bytes", "Their bytes; what a worker hands over."),
            objects=("count", "Numbers, texts and containers in it."),
            batches=("count", "Batches of the training loader that were looked at."),
            per_step=("count", "Batches that a training step fetches."),
        ),
    ),
    Section(
        "LoopFacts",
        "Python loops over items",
        "views.loops",
        metrics(
            calls_per_step=("count", "Calls of the callee from the loop in a step."),
            ms_per_step=("ms", "Forward time of the loop in a steady step; time_source says where it comes from."),
            operators_per_call=("count", "Torch operators that each call runs."),
            loop_line=("count", "Line of the `for`, where the source was at hand."),
            loop_end=("count", "Its last line."),
            backward_ms_per_step=("ms", "Autograd nodes of the loop's operators; not in ms_per_step."),
            backward_at_most_ms_per_step=("ms", "The same if the window slowed all nodes alike: an upper bound."),
            backward_calls_per_step=("count", "Calls of these nodes in a step."),
            window_steps=("count", "Profiled steps it was seen in."),
            samples=("count", "Sampled stacks that stand in the loop."),
            at_most_ms_per_step=(
                "ms",
                "Of ms_per_step where samples tell it, with what chance (95 %) and missed samples may add.",
            ),
            operators_ms_per_step=("ms", "Its operators in a profiled step, as recorded, not scaled."),
            calls_per_invocation=("count", "Items of one pass through the loop, median."),
        ),
    ),
    Section(
        "IoFacts",
        "Files in the step",
        "views.io",
        metrics(
            calls_per_step=("count", "Calls in a steady step."),
            ms_per_step=("ms", "Time the main thread is blocked by it, in a steady step."),
            count=("count", "Events or samples it stands on."),
            call_ms_per_step=("ms", "Of the call that holds it and trains nothing: all that runs in it, as sampled."),
            call_at_most_ms_per_step=("ms", "The same with what chance (95 %) and missed samples may add."),
        ),
    ),
    Section(
        "PythonFacts",
        "Python on the main thread",
        "views.python",
        metrics(
            ms_per_step=("ms", "Sampled time in a steady step."),
            share=("share", "The same by the mean step."),
            samples=("count", "Samples it stands on."),
            waiting_share=("share", "Of these, samples in which the thread waited."),
            python_fraction=("share", "Of the sampled function, what ran outside torch operators in the window."),
            unknown_ms_per_step=("ms", "Of it, what nothing could tell from torch operators."),
            call_ms_per_step=("ms", "Of the call that holds it and trains nothing: all that runs in it, as sampled."),
            call_at_most_ms_per_step=("ms", "The same with what chance (95 %) and missed samples may add."),
            sampling=("ratio", "By how much chance may make the sampled Python time of the call larger (95 %)."),
        ),
    ),
    Section(
        "WindowFacts",
        "Profiler windows",
        "views.windows",
        metrics(
            rank=("count", "Rank that recorded it."),
            steps=("count", "Steps in it."),
            stop_ms=("ms", "Stopping the profiler."),
            export_ms=("ms", "Writing the trace."),
            bytes=("bytes", "Size of the trace file."),
            overhead_ratio=(
                "ratio",
                "Mean wall time of its steps by that of steady steps outside: 1.3 is 30 % slower.",
            ),
        ),
    ),
    Section(
        "Site",
        "Where things were made",
        "views.sites",
        metrics(rank=("count", "Rank that made it.")),
    ),
    Section(
        "ProcessFacts",
        "Processes",
        "views.processes",
        metrics(pid=("count", "Number of the process on its host.")),
    ),
    Section(
        "regions",
        "Regions",
        "views.regions",
        metrics(
            calls=("count", "Times the range was entered in the steps looked at."),
            calls_per_step=("count", "The same by steps."),
            ms_per_step=("ms", "Time in it in a step, on the host's clock; ranges in ranges count in both."),
        ),
    ),
    Section(
        "system",
        "Telemetry",
        "views.system",
        metrics(
            system=(
                "in the name",
                "Means and peaks of telemetry in the run; each name carries its unit: docs/run_folder.md says where each reading comes from.",
            )
        ),
    ),
    Section(
        "DeviceTime",
        "Device time by kind",
        "views.device_time",
        metrics(
            rank=("count", "Rank of the trace."),
            total_ns=("ns", "First start to last end of the device slices of the scope."),
            busy_ns=("ns", "Time covered by any of them: a union over all streams."),
            compute_ns=("ns", "Time covered by kernels and fills, kernels of collectives left out."),
            communication_ns=(
                "ns",
                "Time covered by kernels of collectives (nccl, rccl, cross_device_reduce in the name).",
            ),
            memcpy_ns=("ns", "Time covered by copies."),
            exposed_communication_ns=("ns", "Communication that no compute covers."),
            exposed_memcpy_ns=("ns", "Copies that neither compute nor communication covers."),
            idle_ns=("ns", "total_ns without busy_ns."),
            busy_share=("share", "busy_ns by total_ns. It says that something ran, not that the device was full."),
            events=("count", "Device slices of the scope."),
            kind_ns=("ns", "Plain sums of durations by category: streams side by side count twice."),
        ),
    ),
    Section(
        "DeviceLines",
        "Device time by line of your code",
        "views.device_lines",
        metrics(
            total_ns=("ns", "Time that is attributed: of device slices, or of operators where there is no device."),
            unattributed=("ns", "What no line explains, by reason. Lines and this sum to total_ns."),
            unattributed_shares=("share", "The same by total_ns."),
            attributed_share=("share", "What lines explain, guesses included, by total_ns."),
            guessed_share=("share", "Of it what only a line of a library explains."),
            steps=("count", "Profiled steps of all processes the times are spread over."),
        ),
    ),
    Section(
        "DeviceLine",
        "A line's device time",
        "views.device_lines.lines",
        metrics(
            ns=("ns", "Durations of the device slices whose launch this line caused; each counts for one line only."),
            share=("share", "The same by all device time."),
            ms_per_step=("ms", "The same by profiled steps."),
            events=("count", "Device slices."),
            via=(
                "ns",
                "The same by how the line was found: direct, or through the forward operator by sequence or flow.",
            ),
            top=("ns", "The kernels that take most of it."),
        ),
    ),
)
