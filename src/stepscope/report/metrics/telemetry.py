"""Definitions of the figures that telemetry gives of threads, GPUs' clocks, storage and nodes of memory."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "PoolFacts",
        "Threads of a training process",
        "findings of system.threads_beyond_cores",
        metrics(
            main_cpu_share=("share", "Of the wall time, in which the main thread was on a core (schedstat)."),
            main_off_share=("share", "Of the wall time, in which it was neither on a core nor ready for one."),
            used_cores=("cores", "CPU time of all other threads of the process by wall time."),
            ready_threads=("threads", "Time in which they were ready without a core, summed, by wall time."),
            timeslices_per_step=("count", "How often a thread of the process was put on a core, per mean steady step."),
            other_waits_share=(
                "share",
                "Of the mean steady step, the main thread's wait for loader workers and files and its sleep.",
            ),
            cores=("cores", "Cores the process could have used: without what others and loader workers took."),
            others_cores=("cores", "CPU use of processes that are not the run's, and what a hypervisor took."),
            lost_ms_per_step=(
                "ms",
                "The mean steady step less the step put together again with as many threads as cores: other waits, what "
                "the main thread did alone, and the pool's work over the cores. 6 us are taken out of the work for each "
                "time a thread was put on a core. At most what the main thread waited because of the pool.",
            ),
            at_most_ms_per_step=(
                "ms",
                "The same with 15 us, at most all the main thread waited and 15 us for each time it was put on a core.",
            ),
        ),
    ),
    Section(
        "GpuClocks",
        "Clocks of GPUs",
        "findings of system.gpu_clocks",
        metrics(
            readings=("count", "Readings of its clock between the first and the last steady step."),
            busy_readings=("count", "Of these, without the driver's word that the GPU idled."),
            utilization=("share", "Of the time, in which a kernel ran (NVML), mean over readings."),
            clock_mhz=("MHz", "Mean SM clock of the busy readings."),
            max_clock_mhz=("MHz", "The highest the driver tells."),
            reasons=("share", "Of the busy readings, by reason for a lower clock that somebody could remove."),
            lost_share=(
                "share",
                "1 - clock by highest clock where there is such a reason, else 0; mean over all readings.",
            ),
            power_w=("W", "Mean power of the busy readings."),
            power_limit_w=("W", "The limit in force."),
            power_default_w=("W", "The limit as delivered."),
            temperature_c=("C", "The highest of the busy readings."),
            strangers=("count", "Processes on it that are not the run's, the most at one reading."),
            strangers_bytes=("bytes", "Memory they hold, the most at one reading."),
        ),
    ),
    Section(
        "StorageFacts",
        "Storage",
        "evidence of findings of input.loader_bound",
        metrics(
            requested_bytes_per_s=("bytes/s", "Asked for by reads of loader workers, else of the training process."),
            device_bytes_per_s=("bytes/s", "Of these and of mapped files, what storage had to bring."),
            cold_share=("share", "The second by the first, at most 1; above 1 MB/s."),
            early_cold_share=("share", "The same in the first third of the steady time."),
            late_cold_share=("share", "The same in the last third."),
            blocked_share=("share", "Of the readings of these processes, those that met one in state D."),
            blocked_readings=("count", "These readings."),
            io_delay_share=("share", "Of their time, waiting for block devices, where the kernel counts it."),
            major_faults_per_s=("1/s", "Page faults of these processes that read a disk."),
            pressure_pct=("percent", "Of the time, in which something waited for storage (PSI)."),
        ),
    ),
    Section(
        "StorageMount",
        "Storage: a file system",
        "evidence of findings of input.loader_bound",
        metrics(
            files=("count", "Files of the run's processes on it, summed over looks, or paths the command names."),
        ),
    ),
    Section(
        "NumaFacts",
        "Nodes of memory",
        "evidence of findings on cores and clocks",
        metrics(
            nodes=("count", "Nodes with processors."),
            main_nodes=("share", "By node, of the readings of main threads of training processes."),
            gpu_nodes=("number", "By GPU, the node next to it."),
            away_share=("share", "Of the readings, those on another node than a GPU of the process."),
        ),
    ),
)
