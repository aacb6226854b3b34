"""The names that drivers give devices, and the published peaks by these names."""

import re
from typing import Literal, NamedTuple

import torch

from drivetrain.hardware.catalog import hardware_names, load_hardware
from drivetrain.hardware.prices import TERA

_PRECISIONS: dict[torch.dtype, Literal["fp16", "bf16", "no"]] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "no",
}


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


def device_name(device: torch.device) -> str:
    """Return the name that the driver gives a device; CPU for the processor."""
    if device.type == "cpu":
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def published_peak(device: str, dtype: torch.dtype) -> Peak | None:
    """Return the peak of a device in the hardware catalog; None where the catalog has none.

    Products of fp32 that torch may compute in TF32 have none: the catalog does not know TF32.

    Args:
        device: the name that the driver gives the device.
        dtype: of the factors.
    """
    precision = _PRECISIONS.get(dtype)
    if precision is None or (precision == "no" and _may_use_tf32()):
        return None
    for name in hardware_names():
        facts = load_hardware(name).device
        if facts.recognized_by and re.fullmatch(facts.recognized_by, device):
            teraflops = facts.teraflops.get(precision)
            word = "fp32" if precision == "no" else precision
            return None if teraflops is None else Peak(teraflops * TERA, word, facts.source)
    return None


def _may_use_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"
