"""Definitions of the figures of collectives, of several workers, of modules and of differences."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

SECTIONS = (
    Section(
        "ModuleTree",
        "Modules",
        "views.modules",
        metrics(
            device_ns=("ns", "Durations of all device slices of traces that hold modules."),
            unattributed_device_ns=(
                "ns",
                "device_ns without all self times: launched before the recording, outside modules, or by backward "
                "operators whose forward operator is not known.",
            ),
            backward_linked_share=("share", "Of the host time below backward operators, what reached a module."),
            steps=("count", "Steps of these traces."),
        ),
    ),
    Section(
        "ModuleNode",
        "Modules: each",
        "views.modules.nodes",
        metrics(
            depth=("count", "Modules around it. Beyond 100 levels a call counts for the module there."),
            calls=(
                "count",
                "Forward calls at this place of the tree; recomputation (checkpointing) counts at its own.",
            ),
            calls_per_step=("count", "Calls that begin in a step, by steps."),
            host_self_ns=(
                "ns",
                "Self times of all host slices whose innermost module this is, over calls and threads, backward operators "
                "left out. Waiting is in it, so it is no CPU time.",
            ),
            host_total_ns=("ns", "The same with all modules below."),
            device_self_ns=(
                "ns",
                "Durations of device slices that were launched with this module innermost around. A plain sum: streams "
                "side by side count twice. A CUDA graph counts for the module that replays it.",
            ),
            device_total_ns=("ns", "The same with all modules below; when the work runs does not matter."),
            backward_host_self_ns=(
                "ns",
                "Host time below autograd operators whose forward operator this module ran. Sums of gradients belong to "
                "a parameter and are in no module.",
            ),
            backward_host_total_ns=("ns", "The same with all modules below."),
            backward_device_self_ns=("ns", "Durations of device slices launched by these operators."),
            backward_device_total_ns=("ns", "The same with all modules below."),
            operators=("count", "Operators it calls with no other operator in between."),
        ),
        tables=("modules",),
    ),
    Section(
        "CollectiveRow",
        "Collectives of each rank",
        "views.communication",
        metrics(
            group_size=("count", "Ranks of the process group."),
            message_bytes=("bytes", "Of one call, the larger of the rank's input and output; never guessed."),
            calls=("count", "Kernels, or ranges of backends on the host such as gloo."),
            total_bytes=("bytes", "message_bytes times calls."),
            total_ns=("ns", "Durations of the calls, waiting for other ranks included: a plain sum."),
            mean_ns=("ns", "Mean duration of a call."),
            min_ns=("ns", "Shortest call."),
            max_ns=("ns", "Longest call."),
            overlapped_ns=(
                "ns",
                "Of the calls' time, what compute kernels or fills ran beside on any device of the trace; without device "
                "work, operators of the host that are no part of a collective. Copies hide nothing.",
            ),
            exposed_ns=(
                "ns",
                "Of the calls' time, when neither computation nor a collective that began earlier ran: no moment counts "
                "twice. It tells what nothing hides, not what blocks.",
            ),
            algorithm_bytes_per_s=(
                "bytes/s",
                "total_bytes by total_ns: a lower bound of the link's speed, as waiting is in it.",
            ),
            bus_bytes_per_s=(
                "bytes/s",
                "The same times 2(n-1)/n (all_reduce), (n-1)/n (all_gather, reduce_scatter, all_to_all, gather, scatter) or "
                "1 (broadcast, reduce, send, recv), n being the group's size: what the links carry.",
            ),
        ),
        tables=("communication",),
    ),
    Section(
        "WorkerShare",
        "Workers: a mean step of each",
        "views.distributed.workers",
        metrics(
            steps=("count", "Steps the means are of, as in the overview."),
            wall_ns=("ns", "Mean step. The next four sum to it."),
            computation_ns=("ns", "Computation while no collective ran."),
            overlap_ns=("ns", "Computation and a collective at once."),
            communication_ns=("ns", "A collective and no computation."),
            other_ns=("ns", "The rest: idle, copies alone, the host's work."),
            transferring_ns=(
                "ns",
                "Of each matched collective the last part, as long as the shortest run of any worker. An upper bound where "
                "ranks have no trace.",
            ),
            synchronizing_ns=("ns", "The rest of the matched collectives: waiting for other ranks."),
        ),
        tables=("distributed",),
    ),
    Section(
        "CollectiveOverWorkers",
        "Workers: collectives",
        "views.distributed.collectives",
        metrics(
            calls=("count", "Collectives found on at least two workers."),
            workers=("count", "Workers in the largest match."),
            total_bytes=("bytes", "Each match once, by its largest message."),
            mean_ns=("ns", "Mean over matched calls and workers; the sum of the next two."),
            transferring_ns=("ns", "Mean of the shortest call of each match."),
            synchronizing_ns=("ns", "Mean of what the calls take beyond that: waiting."),
            last_rank=("count", "The rank the others waited for longest altogether. Uses no clock of another host."),
        ),
        tables=("distributed-collectives",),
    ),
    Section(
        "Distributed",
        "Workers together",
        "views.distributed",
        metrics(
            missing_ranks=("count", "Numbers of ranks that are in the world or a group and have no trace."),
            matched=(
                "count",
                "Collectives with a partner: by group and sequence number, else the j-th call of the kind, group and size in "
                "the step.",
            ),
            unmatched=("count", "Calls without one, point to point included; they count in no split of waiting."),
        ),
    ),
    Section(
        "Diff",
        "Differences",
        "analyze --diff",
        metrics(
            base_steps=("count", "Steps of the first side that its figures are divided by."),
            other_steps=("count", "The same of the other side."),
        ),
        about=(
            "A difference tells what changed, not whether it is more than noise. Values are per step where both sides know "
            "their steps, else totals. In the tree, steps are laid over each other and their parts matched in order by type and "
            "name; what finds no partner stands under `not matched`."
        ),
    ),
    Section(
        "DiffRow",
        "Differences: a row",
        "analyze --diff --table",
        metrics(
            level=("count", "Depth in the tree; 0 in flat tables."),
            base_calls=("count", "Calls on the first side."),
            other_calls=("count", "Calls on the other side."),
            base_ns=(
                "ns",
                "Time on the first side. Overview: the part; operators: host self; kernels: device time; modules: host, "
                "forward and backward; tree: host with all below, summed over threads.",
            ),
            other_ns=("ns", "The same on the other side."),
            delta_ns=("ns", "Other without base; missing counts as nothing."),
            ratio=("ratio", "Other by base."),
            base_device_ns=(
                "ns",
                "Device time on the first side: of operators self, of modules and the tree with all below.",
            ),
            other_device_ns=("ns", "The same on the other side."),
            device_delta_ns=("ns", "Other device time without that of the base."),
        ),
        tables=("diff",),
    ),
)
