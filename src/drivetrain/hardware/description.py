"""The file that describes hardware: devices, links by level, hosts, each number with its source."""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive: TypeAlias = Annotated[float, Field(gt=0)]
Share: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Curve: TypeAlias = Annotated[list[tuple[Positive, Share]], Field(min_length=1)]
"""(size, share of the peak), sizes ascending; between them the share is linear in the logarithm."""


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
    """

    processors: Annotated[int, Field(gt=0)]
    tiles: Annotated[list[tuple[int, int, Share]], Field(min_length=1)]
    depth: Annotated[float, Field(ge=0)]


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


class DeviceFacts(_Section):
    """One device.

    Attributes:
        teraflops: peak of products by precision: fp16, bf16, and no for fp32.
        products: see there.
        memory: see there.
        launch_us: seconds x 1e-6 from one kernel's start to the next, when the host is ahead.
    """

    teraflops: dict[Literal["fp16", "bf16", "no"], Positive]
    products: Products
    memory: DeviceMemory
    launch_us: Positive


class LinkFacts(_Section):
    """The link between two places.

    Attributes:
        latency_us: of a message without content.
        gigabytes_per_second: in one direction, as a ring over it reaches with long messages:
            of one device, or of a whole host between hosts.
        hop_us: of each further rank in a ring.
        shares: of the bandwidth, by bytes per rank: those of a message, over the ranks of its ring.
    """

    latency_us: Positive
    gigabytes_per_second: Positive
    hop_us: Positive
    shares: Curve


class Links(_Section):
    """The levels of links.

    Attributes:
        inside: between the devices of a host.
        between: between hosts.
        disk: between a host and its disk.
        reached: share of a data sheet's rate between hosts that rings reach.
        in_training: how much longer a message takes inside of a training step than alone.
        slowdown: seconds of compute lost per second beside a collective.
    """

    inside: LinkFacts
    between: LinkFacts
    disk: LinkFacts
    reached: Share
    in_training: Annotated[float, Field(ge=1)]
    slowdown: Annotated[float, Field(ge=0, lt=1)]


class HostFacts(_Section):
    """One host.

    Attributes:
        devices: of a host.
        dispatch_us: of the processor for each kernel of an eager step, autograd included.
        attention: which kernels are usual: one fused kernel, or scores in memory.
    """

    devices: Annotated[int, Field(gt=0)]
    dispatch_us: Positive
    attention: Literal["fused", "scores"]


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

    @model_validator(mode="after")
    def _ascending(self) -> "Hardware":
        levels = (self.links.inside, self.links.between, self.links.disk)
        for curve in (self.device.memory.shares, *(level.shares for level in levels)):
            sizes = [size for size, _ in curve]
            if sizes != sorted(set(sizes)):
                raise ValueError(f"expected shares by ascending sizes, found {sizes}")
        return self
