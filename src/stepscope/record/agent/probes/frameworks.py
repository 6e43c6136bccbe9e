"""Training frameworks and their seams: the one table of what is patched in whose loop, and what it means.

Read against the versions named in `checked`; in any other version the same seams are tried, and what is not there is
said. Nothing here is a clock: steps are cut by the step cutter alone. `docs/frameworks.md` is this table for users, and
`imports.FRAMEWORK_MODULES` names its modules for the import hook; tests compare both with it.
"""

from __future__ import annotations

from typing import NamedTuple

# What a seam means. A call of TRAIN lasts as long as the training; one of CALL happens in each step of a loop that is
# the user's own; a call of ENGINE is training, and evaluation where it runs inside another one. At CALLBACKS the
# callbacks are known; EVENT calls handlers of the event that is its first argument. OPTIMIZER updates the parameters
# where that is none of torch's optimizers, whose hooks tell. The others are regions, by name.
TRAIN, CALL, ENGINE, CALLBACKS, EVENT, OPTIMIZER = "train", "call", "engine", "callbacks", "event", "optimizer"
EVALUATION, CHECKPOINT, LOGGING = "evaluation", "checkpoint", "logging"


class Seam(NamedTuple):
    """`owner.name` of `module`, a method."""

    meaning: str
    module: str
    owner: str
    name: str
    path: str = ""  # from the method's object to the callbacks; EVENT: to the dictionary of handlers by event
    unless: str = ""  # the keyword argument that, when true, makes it something else

    @property
    def place(self) -> str:
        """`Trainer.train`."""
        return f"{self.owner}.{self.name}"


class Framework(NamedTuple):
    """`package` is what is imported; its `__version__` begins with one of `checked` where the seams were read."""

    name: str
    package: str
    checked: tuple[str, ...]
    seams: tuple[Seam, ...]
    counter: str = ""  # from the object that trains to its own number of completed steps; "" where it keeps none
    counts: str = "updates"  # or "batches": what the counter counts; "optimizer steps" where each optimizer's is one
    begun: bool = False  # the counter says the step that runs, counted when it begins
    hooks: tuple[str, ...] = ("on_",)  # what methods of callbacks begin with


def _lightning(package: str, top: str) -> Framework:
    return Framework(
        "Lightning",
        top,
        ("2.6",),
        (
            Seam(TRAIN, f"{package}.trainer.trainer", "Trainer", "fit"),
            Seam(CALLBACKS, f"{package}.loops.fit_loop", "_FitLoop", "run", "trainer.callbacks"),
            Seam(EVALUATION, f"{package}.loops.evaluation_loop", "_EvaluationLoop", "run"),
            Seam(CHECKPOINT, f"{package}.trainer.trainer", "Trainer", "save_checkpoint"),
            Seam(
                LOGGING,
                f"{package}.trainer.connectors.logger_connector.logger_connector",
                "_LoggerConnector",
                "log_metrics",
            ),
        ),
        counter="global_step",
        counts="optimizer steps",
    )


def _fabric(package: str, top: str) -> Framework:
    module = f"{package}.fabric"
    return Framework(
        "Fabric",
        top,
        ("2.6",),
        (
            Seam(CALL, module, "Fabric", "backward", "_callbacks"),
            Seam(CHECKPOINT, module, "Fabric", "save"),
            Seam(LOGGING, module, "Fabric", "log_dict"),
        ),
    )


# A framework that trains through another one stands before it: the first that trains names the run.
FRAMEWORKS: tuple[Framework, ...] = (
    Framework(
        "HF Trainer",
        "transformers",
        ("5.23",),
        (
            Seam(TRAIN, "transformers.trainer", "Trainer", "train", "callback_handler.callbacks"),
            Seam(EVALUATION, "transformers.trainer", "Trainer", "evaluate"),
            Seam(EVALUATION, "transformers.trainer", "Trainer", "predict"),
            Seam(CHECKPOINT, "transformers.trainer", "Trainer", "_save_checkpoint"),
            Seam(CHECKPOINT, "transformers.trainer", "Trainer", "save_model"),
            Seam(LOGGING, "transformers.trainer", "Trainer", "log"),
        ),
        counter="state.global_step",
    ),
    _lightning("lightning.pytorch", "lightning"),
    _lightning("pytorch_lightning", "pytorch_lightning"),
    _fabric("lightning.fabric", "lightning"),
    _fabric("lightning_fabric", "lightning_fabric"),
    Framework(
        "fastai",
        "fastai",
        ("2.8",),
        (
            Seam(TRAIN, "fastai.learner", "Learner", "_do_fit", "cbs"),
            Seam(EVALUATION, "fastai.learner", "Learner", "_do_epoch_validate"),
            Seam(OPTIMIZER, "fastai.optimizer", "Optimizer", "step"),
            Seam(CHECKPOINT, "fastai.learner", "Learner", "save"),
        ),
        counter="train_iter",
        counts="batches",
        hooks=("before_", "after_"),
    ),
    Framework(
        "ignite",
        "ignite",
        ("0.5",),
        (
            Seam(ENGINE, "ignite.engine.engine", "Engine", "run"),
            Seam(EVENT, "ignite.engine.engine", "Engine", "_fire_event", "_event_handlers"),
            Seam(CHECKPOINT, "ignite.handlers.checkpoint", "Checkpoint", "__call__"),
        ),
        counter="state.iteration",
        counts="batches",
    ),
    Framework(
        "Keras",
        "keras",
        ("3.15",),
        (
            Seam(TRAIN, "keras.src.backend.torch.trainer", "TorchTrainer", "fit"),
            Seam(EVALUATION, "keras.src.backend.torch.trainer", "TorchTrainer", "evaluate"),
            Seam(EVALUATION, "keras.src.backend.torch.trainer", "TorchTrainer", "predict"),
            Seam(CALLBACKS, "keras.src.callbacks.callback_list", "CallbackList", "on_train_begin", "callbacks"),
            Seam(OPTIMIZER, "keras.src.optimizers.base_optimizer", "BaseOptimizer", "apply"),
            Seam(CHECKPOINT, "keras.src.models.model", "Model", "save"),
            Seam(CHECKPOINT, "keras.src.models.model", "Model", "save_weights"),
        ),
        counter="optimizer._iterations",  # `iterations` divides it by the accumulation, on the device
        counts="batches",
    ),
    Framework(
        "skorch",
        "skorch",
        ("1.4",),
        (
            Seam(TRAIN, "skorch.net", "NeuralNet", "fit_loop", "callbacks_"),
            Seam(EVALUATION, "skorch.net", "NeuralNet", "run_single_epoch", unless="training"),
            Seam(CHECKPOINT, "skorch.net", "NeuralNet", "save_params"),
        ),
    ),
    Framework(
        "Composer",
        "composer",
        ("0.33",),
        (
            Seam(TRAIN, "composer.trainer.trainer", "Trainer", "fit", "state.callbacks"),
            Seam(EVALUATION, "composer.trainer.trainer", "Trainer", "_eval_loop"),
            Seam(CHECKPOINT, "composer.callbacks.checkpoint_saver", "CheckpointSaver", "_save_checkpoint"),
            Seam(LOGGING, "composer.loggers.logger", "Logger", "log_metrics"),
        ),
        counter="state.timestamp.batch.value",
        hooks=("run_event", "before_", "after_", "fit_", "iteration_", "epoch_", "batch_", "eval_"),
    ),
    Framework(
        "Ultralytics",
        "ultralytics",
        ("8.4",),
        (
            Seam(TRAIN, "ultralytics.engine.trainer", "BaseTrainer", "_do_train"),
            Seam(EVENT, "ultralytics.engine.trainer", "BaseTrainer", "run_callbacks", "callbacks"),
            Seam(EVALUATION, "ultralytics.engine.trainer", "BaseTrainer", "validate"),
            Seam(CHECKPOINT, "ultralytics.engine.trainer", "BaseTrainer", "save_model"),
            Seam(LOGGING, "ultralytics.engine.trainer", "BaseTrainer", "save_metrics"),
        ),
    ),
    Framework(
        "torchtitan",
        "torchtitan",
        ("0.2",),
        (
            Seam(TRAIN, "torchtitan.trainer", "Trainer", "train"),
            Seam(TRAIN, "torchtitan.train", "Trainer", "train"),
            Seam(EVALUATION, "torchtitan.components.validate", "Validator", "validate"),
            Seam(CHECKPOINT, "torchtitan.components.checkpointer.base", "BaseCheckpointManager", "save"),
            Seam(CHECKPOINT, "torchtitan.components.checkpoint", "CheckpointManager", "save"),
            Seam(LOGGING, "torchtitan.components.metrics", "MetricsProcessor", "log"),
        ),
        counter="step",
        begun=True,
    ),
    Framework(
        "DeepSpeed",
        "deepspeed",
        ("0.19",),
        (
            Seam(CALL, "deepspeed.runtime.engine", "DeepSpeedEngine", "backward"),
            Seam(CALL, "deepspeed.runtime.engine", "DeepSpeedEngine", "step"),
            Seam(CALL, "deepspeed.runtime.pipe.engine", "PipelineEngine", "train_batch"),
            Seam(EVALUATION, "deepspeed.runtime.pipe.engine", "PipelineEngine", "eval_batch"),
            Seam(CHECKPOINT, "deepspeed.runtime.engine", "DeepSpeedEngine", "save_checkpoint"),
            Seam(LOGGING, "deepspeed.monitor.monitor", "MonitorMaster", "write_events"),
        ),
        counter="global_steps",
    ),
    Framework(
        "Accelerate",
        "accelerate",
        ("1.15",),
        (
            Seam(CALL, "accelerate.accelerator", "Accelerator", "backward"),
            Seam(CHECKPOINT, "accelerate.accelerator", "Accelerator", "save_state"),
            Seam(CHECKPOINT, "accelerate.accelerator", "Accelerator", "save_model"),
            Seam(LOGGING, "accelerate.accelerator", "Accelerator", "log"),
        ),
    ),
)

# Distributions that work inside a framework's loop; named where the object that trains, or its model, is of them.
ON_TOP = ("trl", "peft", "accelerate", "deepspeed")
