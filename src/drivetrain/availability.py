"""The packages and devices of this machine, found without an import; a patched environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch


def is_installed(module: str) -> bool:
    """Whether a module can be imported, without importing it.

    A folder without code does not count: trackers leave folders of their own name in the working
    directory, and Python takes such a folder for a package.
    """
    try:
        spec = find_spec(module)
    except ValueError:  # already imported, and made without a specification
        return True
    return spec is not None and spec.origin is not None


def is_cuda_available() -> bool:
    """Whether a CUDA device can be used."""
    return torch.cuda.is_available()


def is_mps_available() -> bool:
    """Whether Apple's GPU can be used."""
    return torch.backends.mps.is_available()


def is_xpu_available() -> bool:
    """Whether an Intel GPU can be used."""
    return torch.xpu.is_available()


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether bf16 computes on this machine's accelerator, or on the CPU without one.

    Args:
        ignore_tpu: accepted for scripts that pass it; there is no TPU here.
    """
    del ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_tensorboard_available() -> bool:
    """Whether TensorBoard files can be written."""
    return is_installed("tensorboardX") or is_installed("tensorboard")


def is_wandb_available() -> bool:
    """Whether wandb is installed."""
    return is_installed("wandb")


def is_mlflow_available() -> bool:
    """Whether mlflow is installed."""
    return is_installed("mlflow")


def is_trackio_available() -> bool:
    """Whether trackio is installed."""
    return is_installed("trackio")


def is_rich_available() -> bool:
    """Whether rich is installed."""
    return is_installed("rich")


def is_tqdm_available() -> bool:
    """Whether tqdm is installed."""
    return is_installed("tqdm")


def is_datasets_available() -> bool:
    """Whether Hugging Face datasets is installed."""
    return is_installed("datasets")


def is_transformers_available() -> bool:
    """Whether Hugging Face transformers is installed."""
    return is_installed("transformers")


def is_peft_available() -> bool:
    """Whether peft is installed."""
    return is_installed("peft")


def is_deepspeed_available() -> bool:
    """Whether deepspeed is installed; nothing here needs it."""
    return is_installed("deepspeed")


@contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Context with environment variables set; afterwards they are exactly as before.

    Args:
        variables: values by name; names are upper-cased, values become text.
    """
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
