"""What training steps compute without need.

`training_steps` holds a trace's training steps and says how much of their wall time a piece of work takes. The
questions: `extra_calls` (models called once more, copies of the model), `needless_operators` (forward work done twice,
whole tensors of zeros for small parts, float64), `wasted_operators` (forms of a computation that do much more than
another one).
"""

from __future__ import annotations

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import SampledTime
from stepscope.analyze.redundant import extra_calls, needless_operators, wasted_operators
from stepscope.analyze.redundant.training_steps import TrainingScene, scenes
from stepscope.model.device_losses import PassesFacts, PassFacts


def facts(context: Context, timed: SampledTime | None) -> PassesFacts | None:
    """None without a trace of training steps and without sampled stacks of steady steps (`timed`)."""
    runs: dict[str, list[TrainingScene]] = {}
    for scene in scenes(context.base, context.labelled):
        runs.setdefault(scene.span.ref.run, []).append(scene)
    made = []
    for run, own in sorted(runs.items()):
        steps = sum(len(scene) for scene in own)
        known = timed if all(scene.steady_ns is not None for scene in own) else None
        updating, growing = wasted_operators.made_by(own) or (None, None)
        gpus = dict.fromkeys(gpu for scene in own for _, gpu in sorted(scene.span.gpus.items()))
        one = PassFacts(
            run=run,
            traces=tuple(scene.span.ref.label for scene in own),
            ranks=tuple(sorted({scene.span.ref.rank for scene in own})),
            steps=steps,
            has_steps=all(scene.windows.has_steps for scene in own),
            step_ms=sum(scene.step_ms * len(scene) for scene in own) / steps,
            on_device=any(len(scene.found) > 0 for scene in own),
            gpus=tuple(gpus),
            modules=any(len(scene.calls.rows) > 0 for scene in own),
            types=any(scene.has("types") for scene in own),
            shapes=any(scene.has("shapes") for scene in own),
            functions=any(bool(scene.span.is_function.any()) for scene in own),
            numbered=any(scene.has("sequence") for scene in own),
            extra_calls=extra_calls.extra_calls(own, context.sampled, known),
            doubles=needless_operators.doubles(own),
            recompute=needless_operators.recompute(own, context.sampled, known),
            wide_gradients=needless_operators.wide_gradients(own),
            wasted=wasted_operators.wasted(own, known),
            made_by_updates=updating,
            made_by_growing=growing,
            copies=extra_calls.traced_copies(own),
        )
        made.append(one)
    found = PassesFacts(runs=tuple(made), copies=extra_calls.sampled_copies(context.sampled, timed))
    return found if found.runs or found.copies is not None else None
