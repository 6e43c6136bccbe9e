"""Names of modules that are no one's training code: first parts of the file names a trace commonly holds.

`FRAMEWORKS` run the training itself; below them nothing is worth naming. Other distributions may be, where a trace
shows no code of the user's at all. The standard library is taken from the running Python.
"""

from __future__ import annotations

import sys

_FRAMEWORKS = """
    torch torch_xla torchvision torchaudio torchtext torchdata functorch triton numpy scipy pandas PIL cv2 stepscope
    IPython ipykernel pydevd debugpy
"""
_DISTRIBUTIONS = """
    absl accelerate aiohttp aiter albumentations apex bitsandbytes boto3 causal_conv1d click colossalai
    compressed_tensors dask datasets deepspeed detectron2 diffusers einops fairscale fairseq fairseq2 fastai fastapi
    filelock fla flair flash_attn flash_attn_3 flash_attn_interface flashinfer fsspec gluonts gradio h5py
    huggingface_hub hydra ignite jinja2 joblib keras kornia librosa lightning lightning_fabric liger_kernel lmdb loguru
    mamba_ssm markupsafe matplotlib megatron mlflow mmcv mmdet mmengine monai mpmath msgpack networkx
    nltk omegaconf open_clip opt_einsum orjson packaging peft pkg_resources pluggy
    polars psutil pyarrow pydantic pytest pytorch_lightning ray requests rich
    safetensors sentence_transformers sentencepiece setuptools sgl_kernel sglang skimage sklearn soundfile spacy
    starlette submitit sympy tensorboard tensorboardX tensorflow timm tokenizers torch_geometric torchao torchmetrics
    torchrec torchtitan tqdm transformer_engine transformers trl typer typing_extensions urllib3 uvicorn uvloop vllm
    wandb webdataset xformers yacs yaml zarr zmq
"""
# Often built from a checkout, so that they lie in a folder of their name and not among installed packages.
_CHECKOUTS = """
    aiter apex deepspeed flash_attn flashinfer megatron sglang torch torchvision transformer_engine transformers triton
    vllm xformers
"""
# Whose functions call no operator of torch, also not in C, where a sampler would not see it.
_WITHOUT_TENSORS = """
    absl boto3 click cv2 dask fsspec h5py jinja2 joblib librosa lmdb loguru matplotlib mlflow msgpack networkx nltk
    numpy omegaconf orjson pandas PIL polars psutil pyarrow requests rich scipy sentencepiece skimage sklearn soundfile
    sympy tensorboard tensorboardX tokenizers tqdm urllib3 wandb yaml zarr
"""
_FORMER = "asynchat asyncore distutils imp sre_compile sre_constants sre_parse"  # of the standard library, once

FRAMEWORKS = frozenset(_FRAMEWORKS.split())
CHECKOUTS = frozenset(_CHECKOUTS.split())
STANDARD = frozenset(sys.stdlib_module_names) | frozenset(_FORMER.split())
WITHOUT_TENSORS = frozenset(_WITHOUT_TENSORS.split())
LIBRARY_PARTS = FRAMEWORKS | frozenset(_DISTRIBUTIONS.split()) | STANDARD
