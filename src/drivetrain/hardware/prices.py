"""The prices of work on described hardware: seconds of products, passes over memory, messages.

Products: waves of tiles over the processors, and never faster than memory allows. Messages: rings
(Thakur et al. 2005), 2 (n-1)/n of the bytes at the slowest link of the ring, with a share of the
bandwidth that grows with the message, and a latency per hop.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drivetrain.errors import ConfigError
from drivetrain.hardware.description import Hardware, KernelFacts, LinkFacts
from drivetrain.simulator.step import (
    COMPUTE,
    FP8,
    AxisPlace,
    Collective,
    HostPass,
    MatrixProduct,
    MemoryPass,
    Operation,
    SimulatedTask,
    TierCopy,
    widest,
)

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


def _without_host(name: str) -> str:
    return (
        f"expected links.bus and host.memory in the description {name}, since state is offloaded, "
        "found none; add them, or leave offload out"
    )


def size_of(operation: Operation) -> float:
    """Return the size of a kernel: operations of a product, bytes that a pass reads and writes."""
    match operation:
        case MatrixProduct():
            return operation.flops
        case MemoryPass():
            return operation.nbytes / operation.launches
    return 0.0


def share_at(curve: Sequence[tuple[float, float]], size: float) -> float:
    """Return the share of the peak, or the factor, at a size: linear in the size's logarithm."""
    below = curve[0]
    if size <= below[0]:
        return below[1]
    for point in curve[1:]:
        if size <= point[0]:
            part = math.log(size / below[0]) / math.log(point[0] / below[0])
            return below[1] + part * (point[1] - below[1])
        below = point
    return below[1]


@dataclass
class HardwarePrices:
    """The prices of work on some hardware, for ranks laid out in a certain way.

    Attributes:
        hardware: the description.
        axes: how each axis lies on the hosts.
        precision: fp16, bf16, no or fp8.
        latency: whether messages have one.
    """

    hardware: Hardware
    axes: Mapping[str, AxisPlace]
    precision: str
    latency: bool = True
    _known: dict[int, tuple[tuple[Operation, ...], float]] = field(default_factory=dict, repr=False)

    def without_latency(self) -> "HardwarePrices":
        """Return the prices of messages that are parts of one long message, however many."""
        return HardwarePrices(self.hardware, self.axes, self.precision, latency=False)

    @property
    def slowdown(self) -> float:
        """Seconds of compute lost per second beside a collective."""
        return self.hardware.links.slowdown

    def seconds(self, task: SimulatedTask) -> float:
        """Return how long a task runs alone, its repetitions included."""
        known = self._known.get(id(task.operations))
        if known is None:
            # The tuple is kept, so that its identity stays its own.
            known = self._known[id(task.operations)] = (
                task.operations,
                self._all(task.operations, task.lane),
            )
        return known[1] * task.repeat

    def _all(self, operations: tuple[Operation, ...], lane: str) -> float:
        device = math.fsum(map(self.price, operations))
        if lane != COMPUTE:
            return device
        starts = math.fsum(map(self.start, operations))
        if not self.hardware.host.runs_ahead:
            return device + starts
        # The processor runs ahead of the device, or the device waits for it.
        return max(device, starts)

    def start(self, operation: Operation) -> float:
        """Return the seconds in which the host's processor starts the kernels of an operation."""
        launches = operation.launches if isinstance(operation, MemoryPass) else 1
        facts = self._kernels(operation)
        if facts is None:
            return launches * self.hardware.host.dispatch_us * MICRO
        starts = operation.starts if isinstance(operation, MemoryPass) else 0
        return (starts or launches) * facts.start_us * MICRO

    def _kernels(self, operation: Operation) -> KernelFacts | None:
        return self.hardware.device.kernels.get(getattr(operation, "kind", ""))

    def price(self, operation: Operation) -> float:
        """Return the seconds of one operation on the device."""
        facts = self._kernels(operation)
        times = share_at(facts.times, size_of(operation)) if facts else 1.0
        return self.plain(operation) * times

    def plain(self, operation: Operation) -> float:
        """Return the seconds that an operation takes whose kernels are of no kind."""
        match operation:
            case MatrixProduct():
                return self._product(operation)
            case MemoryPass():
                count = operation.launches
                start = count * self.hardware.device.launch_us * MICRO
                return self._memory(operation.nbytes / count) * count + start
            case Collective():
                return self._message(operation)
            case TierCopy():
                return self._transfer(operation)
            case HostPass():
                host = self.hardware.host
                if host.memory is None:
                    raise ConfigError(_without_host(self.hardware.name))
                return operation.nbytes * host.devices / (host.memory.gigabytes_per_second * GIGA)
        return 0.0

    def _transfer(self, transfer: TierCopy) -> float:
        """Return the seconds of a copy; the devices of a host share its disk."""
        links, sharers = self.hardware.links, 1
        link = links.bus
        if transfer.link == "disk":
            link, sharers = links.disk, self.hardware.host.devices
        if link is None:
            raise ConfigError(_without_host(self.hardware.name))
        rate = link.gigabytes_per_second * GIGA * share_at(link.shares, transfer.nbytes) / sharers
        return link.latency_us * MICRO + transfer.nbytes / rate

    def _memory(self, nbytes: float) -> float:
        memory = self.hardware.device.memory
        if not nbytes:
            return 0.0
        return nbytes / (memory.gigabytes_per_second * GIGA * share_at(memory.shares, nbytes))

    def _product(self, product: MatrixProduct) -> float:
        device, facts = self.hardware.device, self.hardware.device.products
        narrow = product.narrow and FP8 in device.teraflops
        peak = device.teraflops[FP8 if narrow else widest(self.precision)] * TERA  # type: ignore[index]
        each = peak / facts.processors
        width = 4 if self.precision == "no" else 2
        best = math.inf
        for rows, columns, share in facts.tiles:
            tiles = -(-product.rows // rows) * -(-product.columns // columns) * product.copies
            waves = -(-tiles // facts.processors)
            work = 2.0 * rows * columns * (product.inner + facts.depth) * waves
            best = min(best, work / (each * share))
        best *= product.work / share_at(device.products.shares, product.flops)
        memory = self._memory(product.elements() * width)
        if narrow:  # both factors are read for their largest magnitude, read again, and written
            factors = product.inner * (product.rows + product.columns)
            best += self._memory(factors * (2 * width + 1))
        # A device loads the next tiles meanwhile; a processor first copies factors into its caches.
        seconds = max(best, memory) if self.hardware.host.runs_ahead else best + memory
        return seconds + device.launch_us * MICRO

    def _message(self, message: Collective) -> float:
        place = self.axes.get(message.axis, AxisPlace(1, 1, 1))
        if place.ranks == 1 or not message.nbytes:
            return 0.0
        inside, between = self.hardware.links.inside, self.hardware.links.between
        steps = {"all_reduce": 2 * (place.ranks - 1), "send": 1}.get(
            message.operation, place.ranks - 1
        )
        part = 1.0 if message.operation == "send" else 1 / place.ranks
        link = between if place.spans_hosts else inside
        bandwidth = inside.gigabytes_per_second
        if place.spans_hosts:
            bandwidth = min(bandwidth, between.gigabytes_per_second / place.beside)
        share = share_at(link.shares, part * message.nbytes)
        if not self.latency:
            share = max(each for _, each in link.shares)
        links, times = self.hardware.links, link.operations.get(message.operation, 1.0)
        moving = steps * part * message.nbytes / (bandwidth * GIGA * share)
        moving *= times * links.in_training
        if not self.latency:
            return moving
        waiting = self._latency(link, inside, place, steps) * times * links.in_training
        if not place.spans_hosts:
            waiting += links.in_training_us * MICRO
        return moving + waiting

    @staticmethod
    def _latency(link: LinkFacts, inside: LinkFacts, place: AxisPlace, steps: int) -> float:
        """Return the base latency, and one hop per step: over the network where it is crossed."""
        if not place.spans_hosts:
            return (link.latency_us + inside.hop_us * steps) * MICRO
        hosts = place.ranks / place.together
        crossing = steps * min(1.0, hosts / place.ranks)
        return (
            link.latency_us + link.hop_us * crossing + inside.hop_us * (steps - crossing)
        ) * MICRO
