"""The packages and devices of this machine, found without an import; a patched environment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion


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


is_cuda_available = torch.cuda.is_available
"""Whether CUDA devices are there."""
is_xpu_available = torch.xpu.is_available
"""Whether Intel's XPU devices are there."""
is_wandb_available = partial(is_installed, "wandb")
"""Whether wandb is installed."""
is_mlflow_available = partial(is_installed, "mlflow")
"""Whether mlflow is installed."""
is_trackio_available = partial(is_installed, "trackio")
"""Whether trackio is installed."""
is_rich_available = partial(is_installed, "rich")
"""Whether rich is installed."""
is_tqdm_available = partial(is_installed, "tqdm")
"""Whether tqdm is installed."""
is_datasets_available = partial(is_installed, "datasets")
"""Whether datasets is installed."""
is_transformers_available = partial(is_installed, "transformers")
"""Whether transformers is installed."""
is_schedulefree_available = partial(is_installed, "schedulefree")
"""Whether schedulefree is installed."""
is_peft_available = partial(is_installed, "peft")
"""Whether peft is installed."""
is_deepspeed_available = partial(is_installed, "deepspeed")
"""Whether deepspeed is installed."""


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is a GPU of Apple, and torch has at least this version."""
    return (
        bool(TorchVersion(torch.__version__) >= min_version) and torch.backends.mps.is_available()
    )


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether bf16 computes on this machine's accelerator, or on the CPU without one.

    Args:
        ignore_tpu: without effect, since there is no TPU here.
    """
    del ignore_tpu
    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def is_tensorboard_available() -> bool:
    """Whether TensorBoard files can be written."""
    return is_installed("tensorboardX") or is_installed("tensorboard")


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
