"""Which files are the user's own code, and which file a name in a trace means.

A file is the user's when it lies under one of the run's roots and is no installed package, standard library, torch or
this package. torch.profiler shortens file names by the entries of `sys.path`, so `train.py` in a trace has to be found
again among the files other sources name in full; one that none names is the user's only when its first part is no known
module. Nothing here touches the file system.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from stepscope.tables.schema import Tables

# Folders of installed code. A virtual environment may lie below the project, so they win over the roots.
_INSTALLED = re.compile(r"/(site-packages|dist-packages|lib(64)?/python\d+(\.\d+)?t?)/|/lib/python\d+\.zip/")
_OWN_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + "/"  # this package itself
# First parts of names a training trace commonly holds; the standard library is added from `sys`.
_DISTRIBUTIONS = frozenset(
    [
        "torch",
        "torchvision",
        "torchaudio",
        "torchtext",
        "torch_xla",
        "functorch",
        "numpy",
        "scipy",
        "pandas",
        "PIL",
        "cv2",
        "sklearn",
        "skimage",
        "matplotlib",
        "transformers",
        "datasets",
        "accelerate",
        "tokenizers",
        "huggingface_hub",
        "diffusers",
        "peft",
        "timm",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "torchmetrics",
        "deepspeed",
        "megatron",
        "apex",
        "fairscale",
        "fairseq",
        "xformers",
        "flash_attn",
        "triton",
        "einops",
        "albumentations",
        "kornia",
        "monai",
        "wandb",
        "tensorboard",
        "tensorboardX",
        "mlflow",
        "tqdm",
        "yaml",
        "requests",
        "urllib3",
        "fsspec",
        "pyarrow",
        "polars",
        "h5py",
        "zarr",
        "lmdb",
        "webdataset",
        "joblib",
        "dask",
        "ray",
        "hydra",
        "omegaconf",
        "click",
        "rich",
        "sympy",
        "networkx",
        "jinja2",
        "packaging",
        "filelock",
        "setuptools",
        "pkg_resources",
        "IPython",
        "ipykernel",
        "psutil",
        "safetensors",
        "sentencepiece",
        "soundfile",
        "librosa",
        "stepscope",
    ]
)
_LIBRARY_PARTS = _DISTRIBUTIONS | frozenset(sys.stdlib_module_names)


class UserCode:
    """Answers "is this the user's?" for file names of stacks and traces; remembers its answers."""

    def __init__(self, roots: Iterable[str], known_files: Iterable[str], main_file: str | None = None) -> None:
        """`known_files` are absolute paths other sources name; `main_file` is the started script."""
        self._roots = tuple(_with_slash(root) for root in roots if root)
        self._main_folder = posixpath.dirname(main_file) if main_file else None
        self._by_name: dict[str, list[str]] = {}
        for path in sorted(set(known_files) | ({main_file} if main_file else set())):
            if path.startswith("/") and self._below_root(path):
                self._by_name.setdefault(posixpath.basename(path), []).append(path)
        self._answers: dict[str, str | None] = {}

    def resolve(self, file: str | None) -> str | None:
        """The absolute path of a user's file, given its name in a stack or a trace; None for all other code."""
        if not file:
            return None
        if file not in self._answers:
            self._answers[file] = self._resolve(file)
        return self._answers[file]

    def mapping(self, files: pl.Series) -> dict[str, str | None]:
        """`resolve` for the distinct names of a column."""
        return {file: self.resolve(file) for file in files.unique().drop_nulls().to_list()}

    def _below_root(self, path: str) -> bool:
        if _INSTALLED.search(path) or path.startswith(_OWN_PACKAGE):
            return False
        return not self._roots or path.startswith(self._roots)

    def _resolve(self, file: str) -> str | None:
        if file.startswith("<"):
            return None
        if file.startswith("/"):
            return file if self._below_root(file) else None
        relative = file[2:] if file.startswith("./") else file
        for path in self._by_name.get(posixpath.basename(relative), ()):
            if path.endswith("/" + relative):
                return path
        first = relative.split("/", 1)[0].removesuffix(".py")
        if first in _LIBRARY_PARTS or _INSTALLED.search("/" + relative):
            return None
        # A guess: the folder of the started script comes first on `sys.path`.
        folder = self._main_folder or (self._roots[0].rstrip("/") if self._roots else None)
        return posixpath.join(folder, relative) if folder else relative


def is_torch(file: pl.Expr) -> pl.Expr:
    """Whether a column of file names, full or shortened, points into torch itself."""
    return file.str.contains(r"(^|/)(torch|torch_xla|functorch|triton)/")


def user_code(tables: Tables, sources: Mapping[str, str]) -> UserCode:
    """The run's user code, from its roots and every full name its stacks and journals hold."""
    main_file = next((rank.main_file for rank in tables.ranks if rank.main_file), None)
    return UserCode(tables.run.user_roots, [*_named_files(tables), *sources], main_file)


def user_files(tables: Tables) -> tuple[str, ...]:
    """Files of the user's whose text would sharpen the analysis; some may not exist. Sorted, absolute paths."""
    code = user_code(tables, {})
    found = {path for path in _named_files(tables) if code.resolve(path)}
    names = (
        tables.events.lazy()
        .filter(pl.col("category") == "python_function")
        .select(pl.col("name").str.extract(r"^(.*)\(\d+\): ").alias("file"))
        .unique()
        .drop_nulls()
        .collect()["file"]
        .to_list()
    )
    for name in names:
        path = code.resolve(name)
        if path is None:
            continue
        found.add(path)
        if not name.startswith("/"):
            found.update(posixpath.join(root, name) for root in tables.run.user_roots)
    return tuple(sorted(path for path in found if path.startswith("/") and ".." not in path.split("/")))


def _named_files(tables: Tables) -> set[str]:
    files: set[str] = set()
    if tables.stacks.height:
        names = tables.stacks["frames"].explode().struct.field("file").unique().drop_nulls().to_list()
        files.update(name for name in names if name.startswith("/"))
    if tables.journal.height:
        texts = tables.journal.filter(pl.col("kind").is_in(["site", "save", "gc"]))["data"].drop_nulls().to_list()
        for text in texts:
            data = parse_json(text)
            if isinstance(data, dict) and isinstance(data.get("file"), str):
                files.add(data["file"])
    files.update(rank.main_file for rank in tables.ranks if rank.main_file)
    return {file for file in files if file.startswith("/")}


def parse_json(text: str | None) -> object:
    """The value of a JSON text, None where it is absent or broken (the run folder is untrusted input)."""
    if not text:
        return None
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value


def _with_slash(root: str) -> str:
    return root if root.endswith("/") else root + "/"
