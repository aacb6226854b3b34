"""What this installation and machine offer, asked without importing it; a patched environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch


def is_cuda_available() -> bool:
    """Whether a CUDA device can be used."""
    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Whether Apple's GPU can be used."""
    return torch.backends.mps.is_available()


def is_xpu_available() -> bool:
    """Whether an Intel GPU can be used."""
    return torch.xpu.is_available()


def is_bf16_available() -> bool:
    """Whether bf16 computes on this machine's accelerator, or on the CPU without one."""
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_tensorboard_available() -> bool:
    """Whether TensorBoard files can be written."""
    return find_spec("tensorboardX") is not None or find_spec("tensorboard") is not None


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return find_spec("wandb") is not None


def is_mlflow_available() -> bool:
    """Whether mlflow is installed."""
    return find_spec("mlflow") is not None


def is_rich_available() -> bool:
    """Whether rich is installed."""
    return find_spec("rich") is not None


def is_tqdm_available() -> bool:
    """Whether tqdm is installed."""
    return find_spec("tqdm") is not None


def is_datasets_available() -> bool:
    """Whether Hugging Face datasets is installed."""
    return find_spec("datasets") is not None


def is_transformers_available() -> bool:
    """Whether Hugging Face transformers is installed."""
    return find_spec("transformers") is not None


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return find_spec("peft") is not None


def is_deepspeed_available() -> bool:
    """Whether deepspeed is installed; nothing here needs it."""
    return find_spec("deepspeed") is not None


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Context with environment variables set; names are upper-cased, values become text."""
    wanted = {name.upper(): str(value) for name, value in variables.items()}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
