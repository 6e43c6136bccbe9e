"""The table of the zoo: every script, what is planted in it, what a diagnosis should say first. Standard library only.

`expected` holds the finding categories that are right; None stands for a script in which nothing is planted. Two
categories stand where one loss has two true names: a rank that waits for its peer loses time in communication, and what
keeps its peer is input or compute.

The planted line is the one that ends with the comment `# planted`; the statement that begins there is what a diagnosis
should name, and where that statement lies in a function without the training loop, the function will do as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLAIN_PART = 0.4  # of a script's own steps make an unrecorded run: there are many of those


@dataclass(frozen=True)
class Entry:
    """One script. `arguments` make the planted form, `fixed` are added for its twin; `ranks` above 1 use torchrun.

    `plain_part`: of the steps that the recorded run has, in one without us; all of them where the cost depends on it.
    `needs`: the framework that it takes, which `make frameworks` installs; without it the script is not run.
    """

    name: str
    expected: tuple[str, ...] | None
    cost: str  # what is planted, in a few words; for clean ones what the script is
    arguments: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ("--fixed",)
    ranks: int = 1
    plain_part: float = PLAIN_PART
    needs: str | None = None

    @property
    def script(self) -> Path:
        return HERE / f"{self.name}.py"

    @property
    def clean(self) -> bool:
        return self.expected is None


ENTRIES = (
    Entry("decode_png", ("input",), "PNG files decoded in the training process"),
    Entry("few_workers", ("input",), "one loader worker for a store that answers late"),
    Entry("python_transform", ("input",), "a transform that goes through pixels in Python"),
    Entry("many_files", ("input",), "a small file opened for each item"),
    Entry("collate_singly", ("input",), "batches of one in `collate_fn`"),
    Entry("short_epochs", ("input",), "workers started anew for epochs of eight batches"),
    Entry("loop_in_forward", ("host",), "a loop over positions in `forward`"),
    Entry("json_records", ("host",), "lists and JSON made in every step"),
    Entry("item_metrics", ("host",), "`.item()` for each item of a batch"),
    Entry("validate_in_step", ("host",), "validation in every step, gradients recorded"),
    Entry("copy_of_model", ("host",), "a copy of the model kept in every step"),
    Entry("growing_history", ("host",), "a statistic over all steps so far, in every step", plain_part=1.0),
    Entry("log_every_step", ("io",), "a log forced to disk in every step"),
    Entry("save_often", ("io",), "a checkpoint every third step"),
    Entry("growing_shapes", ("compile",), "a function compiled again for each length"),
    Entry("collect_garbage", ("system",), "garbage collected every fourth step"),
    Entry("many_threads", ("system",), "more threads than cores, for small operators"),
    Entry("processes_beside", ("system",), "three processes of the script that fill the cores"),
    Entry("double_precision", ("compute",), "a layer computed in float64"),
    Entry("unfused_update", ("compute",), "AdamW that updates tensor by tensor"),
    Entry("distributed_shards", ("communication", "input"), "one rank's input takes longer", ranks=2),
    Entry("distributed_spectrum", ("communication", "compute"), "one rank computes more", ranks=2),
    Entry("distributed_split", ("communication", "compute"), "unequal batches", ranks=2),
    Entry("distributed_gradients", ("communication",), "a collective for each small gradient", ranks=2),
    Entry("hf_callback", ("host",), "weights kept as text in a callback of Trainer", needs="transformers"),
    Entry("hf_collator", ("input",), "a collator of Trainer that goes through tokens", needs="transformers"),
    Entry("lightning_metric", ("host",), "a metric of Lightning in Python", needs="lightning"),
    Entry("lightning_callback", ("io",), "a callback of Lightning that forces files to disk", needs="lightning"),
    Entry("accelerate_module", ("host",), "a loop over channels in a module under Accelerate", needs="accelerate"),
    Entry("ignite_dataset", ("input",), "text read in a data set under ignite", needs="ignite"),
    Entry("clean_cnn", None, "a convolutional network"),
    Entry("clean_transformer", None, "a transformer"),
    Entry("clean_loader", None, "an MLP with a healthy loader"),
    Entry("clean_compiled", None, "a compiled model"),
    Entry("clean_ranks", None, "two healthy ranks", ranks=2),
    Entry("clean_hf_trainer", None, "Hugging Face's Trainer", needs="transformers"),
    Entry("clean_lightning", None, "Lightning", needs="lightning"),
    Entry("clean_accelerate", None, "Accelerate", needs="accelerate"),
    Entry("clean_fabric", None, "Lightning Fabric", needs="lightning"),
    Entry("clean_ignite", None, "ignite", needs="ignite"),
    Entry("clean_skorch", None, "skorch", needs="skorch"),
)
