"""Definitions of the figures of work that training steps do not need."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "not in the report; behind rules on the host, on precision and on the backward pass"

SECTIONS = (
    Section(
        "PassFacts",
        "Needless work: the training steps of a run's traces",
        _WHERE,
        metrics(
            ranks=("count", "Ranks whose traces hold training steps."),
            steps=("count", "Profiled steps in which a backward pass runs; a trace that names none counts as one."),
            step_ms=(
                "ms",
                "The mean step that all times are part of: the steady one where a journal has it, else the profiled one.",
            ),
        ),
        about="Times are wall time lost: without a device the host's, less what recording adds (the excess of the "
        "profiled step over the steady one, up to 1 us for each slice); on a device the time in which nothing else ran, "
        "and idle time while the host prepared it.",
    ),
    Section(
        "ExtraCall",
        "Needless work: calls of a trained module that train nothing",
        _WHERE,
        metrics(
            calls_per_step=("count", "Calls of the module, mean over the profiled steps."),
            steps_share=("share", "Profiled steps with such a call."),
            ms_per_step=("ms", "Time of these calls; by samples of their line where there are 30."),
            around_ms_per_step=("ms", "With the user's code around them in which nothing is trained."),
            at_most_ms_per_step=("ms", "The same, at the upper end of what its samples allow for (95 %)."),
            nodes_per_step=("count", "Autograd nodes they recorded; 0 where gradients were off."),
            samples=("count", "Samples of the line."),
        ),
    ),
    Section(
        "ModelCopy",
        "Needless work: copies of the model",
        _WHERE,
        metrics(
            ms_per_step=("ms", "Samples below the function that copies, as a part of the mean steady step."),
            at_most_ms_per_step=("ms", "The same, at the upper end of what these samples allow for (95 %)."),
            samples=("count", "These samples."),
        ),
    ),
    Section(
        "Doubles",
        "Needless work: float64",
        _WHERE,
        metrics(
            compute_ms_per_step=("ms", "Operators of torch with an input of at least 1,024 elements in float64."),
            conversion_ms_per_step=("ms", "Copies between float64 and other types, with what asked for them."),
            operators_per_step=("count", "Such operators that lie in no other."),
            conversions_per_step=("count", "Such conversions."),
            parts=("ms", "By operator, in proportion to recorded times."),
        ),
    ),
    Section(
        "Recompute",
        "Needless work: forward operators run again in the backward pass",
        _WHERE,
        metrics(
            ms_per_step=(
                "ms",
                "From the first to the last such operator of a node, without nodes between; by samples where there are 50.",
            ),
            operators_per_step=("count", "Such operators that lie in no other."),
            checkpoints_per_step=("count", "Nodes for which something is computed again."),
            memory_share=("share", "The allocator's peak by the GPU's memory, where the trace recorded both."),
            samples=("count", "Samples below torch.utils.checkpoint in the backward pass."),
        ),
    ),
    Section(
        "WideGradients",
        "Needless work: whole tensors of zeros for the gradients of small parts",
        _WHERE,
        metrics(
            calls_per_step=("count", "Nodes of this kind and shape."),
            bytes_per_call=("bytes", "The tensor that each fills: elements by size of the type."),
            shape=("count", "Its dimensions."),
            part=("count", "Dimensions of the gradient that came in."),
            ms_per_step=("ms", "Time of the nodes and of adding up their results, less one of them."),
            at_most_ms_per_step=(
                "ms",
                "The most it can be where the profiled backward pass is far from the steady one.",
            ),
        ),
    ),
    Section(
        "PassLine",
        "Needless work: a line's part",
        _WHERE,
        metrics(ms_per_step=("ms", "The line's part of the loss, shared out by recorded time.")),
    ),
)
