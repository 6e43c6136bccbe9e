"""Definitions of the figures of pauses, cores, drift, profilers, and of the loader's rhythm."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "PauseFacts",
        "Garbage collections",
        "findings of system.garbage_collection",
        metrics(
            count=("count", "Collections that began in a steady training step: full ones, others above a millisecond."),
            full=("count", "Of these, collections of all generations."),
            collected=("count", "Objects they freed."),
            steps=("count", "Steady training steps."),
            steps_struck=("count", "Of these, steps in which a collection began."),
            ms_per_step=("ms", "Time of the collections inside their steps, by steady steps."),
            longest_ms=("ms", "The longest of them, as far as it lies in its step."),
        ),
    ),
    Section(
        "PauseLine",
        "Garbage collections: a line",
        "findings of system.garbage_collection",
        metrics(
            count=("count", "Collections that struck while the main thread was at the line."),
            ms_per_step=("ms", "Their time, by steady steps."),
        ),
    ),
    Section(
        "ChildrenFacts",
        "Processes of the script",
        "findings of system.children_hold_cores",
        metrics(
            cores=("cores", "CPU use of processes that neither train nor load batches, mean over readings."),
            ms_per_step=(
                "ms",
                "Of what the main thread waited for a core, their part by the CPU use of all that ran beside it.",
            ),
            at_most_ms_per_step=(
                "ms",
                "That wait, with what the main thread may have spun meanwhile; or the distance to the quickest hundredth "
                "of the steady steps, whichever is more.",
            ),
        ),
    ),
    Section(
        "Child",
        "Processes of the script: alike in command and line",
        "findings of system.children_hold_cores",
        metrics(
            processes=("count", "Processes that used a core in the steady time."),
            cores=("cores", "Their CPU use, mean over readings."),
        ),
    ),
    Section(
        "CpuFacts",
        "Cores",
        "findings of system.threads_beyond_cores and its neighbours",
        metrics(
            readings=("count", "Readings of telemetry between the first and the last steady step."),
            seconds=("s", "From the first of them to the last."),
            cores=("cores", "Cores the run may use: affinity, cut by the cgroup's quota; of the smallest host."),
            ranks_on_host=("count", "Training processes on the fullest host."),
            threads=("count", "Threads of torch in each rank, as the script or the environment set them."),
            own_cores=("cores", "CPU use of all processes of the run on a host, mean over readings."),
            run_delay_share=(
                "share",
                "Of the wall time, in which a rank's main thread could run and had no core (schedstat), mean over ranks.",
            ),
            throttled_share=(
                "share",
                "Growth of the cgroup's throttled time by wall time; it is summed over cores, so it may be above 1.",
            ),
            throttled_ms_per_step=(
                "ms",
                "That time or the main thread's wait, whichever is less, per mean steady step.",
            ),
            own_ms_per_step=(
                "ms",
                "Of the wait without throttling, what others cannot have caused: they have only the cores they use, or "
                "where that is not read those the run leaves.",
            ),
            main_cpu_share=("share", "Of the wall time, in which the main thread had a core, mean over ranks."),
            waits_ms_per_step=(
                "ms",
                "Of the mean steady step, what the main thread waits for loader workers and files, or sleeps at a line.",
            ),
            others_ms_per_step=(
                "ms",
                "Of the wait without throttling, what the run's other threads cannot have caused, at most what others had.",
            ),
            involuntary_switches_per_s=("1/s", "How often the main thread was taken off its core."),
            pressure_pct=("percent", "Of the time, in which something waited for a core (PSI), the cgroup's if known."),
            load=("count", "Mean load of the machine over a minute."),
            voluntary_switches_per_s=("1/s", "How often the main thread went to sleep."),
            migrations_per_s=("1/s", "How often the main thread was moved to another core."),
            stolen_cores=("cores", "What a hypervisor gave to other machines."),
        ),
    ),
    Section(
        "MemoryPressureFacts",
        "Memory pressure",
        "findings of system.swapping_or_faults",
        metrics(
            seconds=("s", "Of telemetry between the first and the last steady step."),
            major_faults_per_step=(
                "count",
                "Page faults of a training process that read a disk, per mean steady step.",
            ),
            stalled_pct=("percent", "Of the time, in which something stood still for want of memory (PSI)."),
            rss_bytes=("bytes", "Highest resident size of a training process."),
        ),
    ),
    Section(
        "PageFaultFacts",
        "Page faults",
        "findings of memory.page_faults",
        metrics(
            steps=("count", "Steady training steps whose faults are known."),
            minor_per_step=(
                "count",
                "Pages that the system had to map in a step, for all threads of the process; mean.",
            ),
            main_share=("share", "Of the faults, those that the main thread had itself, by telemetry."),
            kept_share=("share", "Of the faults, those by which the processes grew: no loss, and not in the cost."),
            page_bytes=("bytes", "Size of a page."),
            threads=("count", "Threads that faulted at once when the cost was measured."),
            ns_alone=("ns", "Processor time of a fault on one thread alone, zeroing the page included."),
            ns_beside=("ns", "Of a fault to each thread where several fault at once."),
            ns_returned=("ns", "To give a page back."),
            cost_ms_per_step=(
                "ms",
                "What the training thread paid: its own faults, and giving all pages back; at most the step's own work.",
            ),
            at_most_ms_per_step=("ms", "The same with all faults one after another."),
            libc=("text", "C library of the machine, with its version."),
            preloaded=("text", "LD_PRELOAD of the command."),
            settings=("text", "Variables of the command that set the allocator."),
            huge_pages=("text", "Whether the kernel gives pages of 2 MiB: always, on request (madvise) or never."),
            installed=("text", "Allocators that LD_PRELOAD could load."),
            largest_bytes=("bytes", "Largest allocation in a window that recorded memory."),
        ),
    ),
    Section(
        "DriftFacts",
        "Drift of steps",
        "findings of host.step_drift",
        metrics(
            steps=("count", "Steady training steps."),
            parts=("count", "Parts the run is cut into."),
            early_ms=("ms", "The line through all steps (Theil and Sen) at the first one, mean over ranks."),
            late_ms=("ms", "The same at the last one."),
            lost_ms_per_step=("ms", "The line's mean over its start."),
            medians_ms=("ms", "Median step of each part."),
            phases=("ms", "By phase, the last part's median over the first part's."),
        ),
    ),
    Section(
        "DriftLine",
        "Drift of steps: a line",
        "findings of host.step_drift",
        metrics(
            early_ms_per_step=("ms", "Sampled time at the line, per step of the first third of the steady time."),
            late_ms_per_step=("ms", "The same of the last third."),
            samples=("count", "Samples at the line in the last third."),
        ),
    ),
    Section(
        "ProfilerFacts",
        "The script's own profiler",
        "findings of system.profiler_overhead",
        metrics(
            inside=("count", "Training steps it recorded."),
            outside=("count", "Steady ones it did not."),
            inside_ms=("ms", "Mean step under it."),
            outside_ms=("ms", "Mean step outside."),
            steps=("count", "All training steps of these ranks."),
            lost_ms_per_step=(
                "ms",
                "What its steps took over those outside, by means or medians, whichever tells less; by all steps.",
            ),
            total_ms_per_step=("ms", "Mean of all steps."),
        ),
    ),
    Section(
        "EpochFacts",
        "Workers started for every epoch",
        "findings of input.first_batch",
        metrics(
            num_workers=("count", "The loader's setting."),
            restarts=("count", "Iterators made during training, without the first."),
            make_ms=("ms", "Median time to make one of them."),
            first_wait_ms=("ms", "Median wait for their first batch."),
            usual_wait_ms=("ms", "Median wait for their other batches."),
            batch_ms=("ms", "Work to make one batch, from sampled stacks of the workers."),
            lost_ms_per_step=(
                "ms",
                "Time to make these iterators, and what first batches waited beyond usual_wait_ms and batch_ms (only where "
                "batch_ms is known), by all training steps.",
            ),
            at_most_ms_per_step=(
                "ms",
                "Time to make these iterators, as much again at most for the gap before (the old workers end), and what the "
                "first steps of these epochs took beyond the faster quarter of the second halves; by all training steps.",
            ),
            total_ms_per_step=("ms", "Wall time of all training steps and of changing iterators, by training steps."),
        ),
    ),
    Section(
        "WaveFacts",
        "Waves of waiting",
        "findings of input.prefetch_waves",
        metrics(
            period=("count", "Workers of the loader that feeds training."),
            waves=("count", "Steady steps by the period: so many steps with the longest waits are looked at."),
            share=("share", "Of all data wait of the first rank's steady steps, what lies in these steps."),
            regular=("share", "Of the distances between neighbouring ones, those that are the period."),
            wave_wait_ms=("ms", "Median data wait in them."),
            other_wait_ms=("ms", "Median data wait in the other steps."),
        ),
    ),
    Section(
        "TraceLoader",
        "The loader of a trace",
        "findings of input.loader_bound",
        metrics(
            fetches=("count", "Ranges of the loader's `__next__` in the traces of the run."),
            fetch_ms=("ms", "Mean time of one."),
        ),
    ),
)
