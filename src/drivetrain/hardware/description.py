"""Descriptions of hardware: devices, links, hosts, each number with its source.

The package's own descriptions of hardware, their published peaks, and files of a user.
"""

import difflib
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from drivetrain.config.schema import dtype_word
from drivetrain.errors import ConfigError, expected, refusing

if TYPE_CHECKING:
    import torch


# --- the file that describes hardware ---

Positive: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]


def _ascending(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    if any(one[0] >= other[0] for one, other in pairwise(points)):
        raise ValueError(f"expected sizes that ascend, found {[size for size, _ in points]}")
    return points


Curve: TypeAlias = Annotated[
    list[tuple[Positive, Share]], Field(min_length=1), AfterValidator(_ascending)
]
"""(size, share of the peak), sizes ascending; between them the share is linear in the logarithm."""

Factors: TypeAlias = Annotated[
    list[tuple[Positive, Positive]], Field(min_length=1), AfterValidator(_ascending)
]
"""(size, factor), sizes ascending, as above."""


UNMEASURED = "NOT MEASURED"
"""How the source of a link begins whose numbers stand there only because a file must have some."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(min_length=1)
    """Where the numbers come from: a data sheet, a measurement, a paper."""


class Products(_Section):
    """How near products of matrices come to the peak (waves of tiles over the processors).

    Attributes:
        processors: that compute tiles at the same time.
        tiles: (rows, columns, share of the peak of a long product) of the kernels to choose from.
        depth: inner size that the start and the end of a tile cost.
        shares: of the rate that tiles give, by floating-point operations of a product.
    """

    processors: Annotated[int, Field(gt=0)]
    tiles: Annotated[list[tuple[int, int, Share]], Field(min_length=1)]
    depth: Annotated[float, Field(ge=0)]
    shares: Curve = Field(default_factory=lambda: [(1.0, 1.0)])


class DeviceMemory(_Section):
    """The memory of a device.

    Attributes:
        gib: size.
        gigabytes_per_second: peak of reads and writes together.
        shares: of the peak, by bytes moved.
    """

    gib: Positive
    gigabytes_per_second: Positive
    shares: Curve


class KernelFacts(BaseModel):
    """Kernels of one kind, beside plain products or passes over memory of their size.

    Attributes:
        times: (size, how many times as long they take), sizes ascending: floating-point operations
            of a product, bytes of a pass; a file may have one number for all sizes.
        start_us: of the host's processor for each of them, in the place of ``dispatch_us``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    times: Factors
    start_us: Annotated[float, Field(ge=0)]

    @field_validator("times", mode="before")
    @classmethod
    def _for_all_sizes(cls, value: Any) -> Any:
        return [(1.0, value)] if isinstance(value, int | float) else value


class DeviceFacts(_Section):
    """One device.

    Attributes:
        teraflops: peak of dense products by precision: fp16, bf16, no for fp32, and fp8.
        recognized_by: regular expression for the whole name that the driver gives the device;
            empty where none tells it from other devices.
        products: see there.
        memory: see there.
        launch_us: seconds x 1e-6 from one kernel's start to the next, when the host is ahead.
        kernels: by kind, such as ``gelu`` and ``gelu backward``; other kinds are as plain ones.
    """

    teraflops: dict[Literal["fp16", "bf16", "no", "fp8"], Positive]
    recognized_by: str = ""
    products: Products
    memory: DeviceMemory
    launch_us: Positive
    kernels: dict[str, KernelFacts] = Field(default_factory=dict)


class LinkFacts(_Section):
    """The link between two places.

    Attributes:
        latency_us: of a message without content.
        gigabytes_per_second: in one direction, as a ring over it reaches with long messages:
            of one device, or of a whole host between hosts.
        hop_us: of each further rank in a ring.
        shares: of the bandwidth, by bytes per rank: those of a message, over the ranks of its ring.
        operations: how many times as long an operation takes as its steps of a ring.
    """

    latency_us: Positive
    gigabytes_per_second: Positive
    hop_us: Positive
    shares: Curve
    operations: dict[str, Positive] = Field(default_factory=dict)


class HostPairs(_Section):
    """Rates between hosts, two at a time.

    Attributes:
        hosts: names.
        gigabytes_per_second: a row for each host, with a rate to each host.
    """

    hosts: Annotated[list[str], Field(min_length=2)]
    gigabytes_per_second: list[list[Annotated[float, Field(ge=0)]]]

    def rate(self, one: str, other: str) -> float:
        """Return the rate between two hosts; the slowest one where a pair was not measured.

        Raises:
            KeyError: a host is not there.
        """
        places = {name: index for index, name in enumerate(self.hosts)}
        found = self.gigabytes_per_second[places[one]][places[other]]
        every = [rate for row in self.gigabytes_per_second for rate in row if rate]
        return found or min(every)

    @model_validator(mode="after")
    def _square(self) -> "HostPairs":
        rows = self.gigabytes_per_second
        if [len(row) for row in rows] != [len(self.hosts)] * len(self.hosts):
            raise ValueError("expected a row and a column for each host")
        if not any(rate for row in rows for rate in row):
            raise ValueError("expected a rate above 0")
        return self


class Links(_Section):
    """The levels of links.

    Attributes:
        inside: between the devices of a host.
        between: between hosts.
        disk: between a host and its disk.
        pairs: between hosts, two at a time; None where one host was measured.
        bus: between a device and its host, in one direction; None where the device is the host.
        reached: share of a data sheet's rate between hosts that rings reach.
        in_training: how much longer a message takes inside of a training step than alone.
        in_training_us: of each message between the ranks of a host more, however long it is: where
            ranks compute on the processors that also send, its threads wait for their turn.
        slowdown: seconds of compute lost per second beside a collective.
    """

    inside: LinkFacts
    between: LinkFacts
    disk: LinkFacts
    pairs: HostPairs | None = None
    bus: LinkFacts | None = None
    reached: Share
    in_training: Annotated[float, Field(ge=1)]
    in_training_us: Annotated[float, Field(ge=0)] = 0.0
    slowdown: Annotated[float, Field(ge=0, le=1)]


class HostMemory(_Section):
    """The memory of a host, where offloaded state lies.

    Attributes:
        gib: size.
        gigabytes_per_second: of reads and writes together, as updates of all devices reach it.
    """

    gib: Positive
    gigabytes_per_second: Positive


class HostFacts(_Section):
    """One host.

    Attributes:
        devices: of a host.
        dispatch_us: of the processor for each kernel of an eager step, autograd included.
        attention: which kernels are usual: one fused kernel, or scores in memory.
        runs_ahead: whether the processor starts kernels while earlier ones run; not where it
            computes itself.
        memory: None where the device computes in it.
    """

    devices: Annotated[int, Field(gt=0)]
    dispatch_us: Positive
    attention: Literal["fused", "scores"]
    runs_ahead: bool = True
    memory: HostMemory | None = None


class Hardware(BaseModel):
    """A description.

    Attributes:
        version: of the format.
        name: of the description.
        device: see there.
        links: see there.
        host: see there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1]
    name: str = Field(min_length=1)
    device: DeviceFacts
    links: Links
    host: HostFacts

    def check_measured(self, hosts: int, per_host: int) -> None:
        """Refuse to price a link that such a run needs and nobody measured.

        Args:
            hosts: of the run.
            per_host: its ranks on each of them.

        Raises:
            ConfigError: the numbers of the link are placeholders.
        """
        needed = [
            ("between hosts", self.links.between, hosts > 1, "on several hosts"),
            ("inside of a host", self.links.inside, per_host > 1, "with several ranks of a host"),
        ]
        for where, link, used, how in needed:
            if used and link.source.startswith(UNMEASURED):
                raise ConfigError(
                    f"the links {where} were not measured for {self.name}, found {hosts} hosts "
                    f"with {per_host} ranks each; run `drivetrain hardware measure` {how}, or "
                    "write the link's numbers and their source into the description"
                )


# --- the package's own descriptions of hardware, their published peaks, and files of a user ---

SUFFIX = ".yaml"
_BUILTIN = files("drivetrain.hardware") / "builtin"


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
        with refusing(f"cannot read the hardware file {source!r}", "check the path"):
            return Path(source).read_text(encoding="utf-8")
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
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{source}{line}: expected YAML; the parser says: {problem or error}; mend the file"
        ) from error
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, each['loc'])) or 'file'}: {expected([each['msg']])}, found "
            f"{'nothing' if each['type'] == 'missing' else repr(each['input'])}"
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


def published_peak(device: str, dtype: "torch.dtype") -> Peak | None:
    """Return the peak of a device in the hardware catalog; None where the catalog has none.

    Products of fp32 that torch may compute in TF32 have none: the catalog does not know TF32.

    Args:
        device: the name that the driver gives the device.
        dtype: of the factors.
    """
    import torch

    word = dtype_word(dtype)
    may_use_tf32 = torch.get_float32_matmul_precision() != "highest"
    if word == "fp32" and may_use_tf32:
        return None
    for name in hardware_names():
        facts = load_hardware(name).device
        if facts.recognized_by and re.fullmatch(facts.recognized_by, device):
            teraflops = facts.teraflops.get("no" if word == "fp32" else word)  # type: ignore[call-overload]
            return None if teraflops is None else Peak(teraflops * 1e12, word, facts.source)
    return None
