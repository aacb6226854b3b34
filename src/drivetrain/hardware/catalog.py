"""The package's own descriptions of hardware, their published peaks, and files of a user."""

import difflib
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import yaml
from pydantic import ValidationError

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import Hardware

if TYPE_CHECKING:
    import torch

SUFFIX = ".yaml"
_BUILTIN = files("drivetrain.hardware") / "builtin"

_PRECISIONS: dict[str, Literal["fp16", "bf16", "no"]] = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "no",
}


def hardware_names() -> list[str]:
    """Return the names of the descriptions that come with the package."""
    return sorted(each.name.removesuffix(SUFFIX) for each in _BUILTIN.iterdir()
                  if each.name.endswith(SUFFIX))  # fmt: skip


def name_of_device(title: str) -> str | None:
    """Return the description of a device with this title, such as "NVIDIA H100 80GB HBM3".

    None where there is none: all parts of a description's name must be words of the title.
    """
    words = [word for word in re.split(r"[^a-z0-9]+", title.lower()) if word]
    known = {*words, *(one + other for one, other in pairwise(words))}
    fitting = [name for name in hardware_names() if set(name.split("-")) <= known]
    return max(fitting, key=len, default=None)


def names_a_device(source: str) -> bool:
    """Whether hardware is given by a name of the package, and not by a file."""
    return Path(source).suffix not in (SUFFIX, ".yml")


def hardware_text(source: str) -> str:
    """Return the text of a description, by its name or as a file.

    Raises:
        ConfigError: there is no such name and no such file.
    """
    if not names_a_device(source):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the hardware file {source!r}: {error}; check the path"
            ) from error
    names = hardware_names()
    if source.lower() not in names:
        near = difflib.get_close_matches(source.lower(), names, n=3, cutoff=0.3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ConfigError(
            f"unknown hardware {source!r}; {hint}known: {', '.join(names)}; or give a file that "
            f"ends with {SUFFIX}"
        )
    return (_BUILTIN / f"{source.lower()}{SUFFIX}").read_text(encoding="utf-8")


def load_hardware(source: str) -> Hardware:
    """Return a description, by its name or from a file.

    Raises:
        ConfigError: there is none, or the file is no description.
    """
    text = hardware_text(source)
    try:
        return Hardware.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: expected YAML, found {error}; mend the file") from error
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, each['loc'])) or 'file'}: {each['msg']}, found {each['input']!r}"
            for each in error.errors()
        )
        raise ConfigError(
            f"{source} is no description of hardware:\n  " + "\n  ".join(lines)
        ) from error


class Peak(NamedTuple):
    """The most operations per second that a device is said to do.

    Attributes:
        operations_per_second: of dense products.
        precision: of the factors: fp16, bf16 or fp32.
        source: who says so.
    """

    operations_per_second: float
    precision: str
    source: str


def device_name(device: "torch.device") -> str:
    """Return the name that the driver gives a device; CPU for the processor."""
    import torch

    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def published_peak(device: str, dtype: "torch.dtype") -> Peak | None:
    """Return the peak of a device in the hardware catalog; None where the catalog has none.

    Products of fp32 that torch may compute in TF32 have none: the catalog does not know TF32.

    Args:
        device: the name that the driver gives the device.
        dtype: of the factors.
    """
    import torch

    precision = _PRECISIONS.get(str(dtype))
    may_use_tf32 = torch.get_float32_matmul_precision() != "highest"
    if precision is None or (precision == "no" and may_use_tf32):
        return None
    for name in hardware_names():
        facts = load_hardware(name).device
        if facts.recognized_by and re.fullmatch(facts.recognized_by, device):
            teraflops = facts.teraflops.get(precision)
            word = "fp32" if precision == "no" else precision
            return None if teraflops is None else Peak(teraflops * 1e12, word, facts.source)
    return None
