"""The facts for drawing a step on paper: sizes of axes, micro-batches, bytes, methods of links."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from drivetrain.errors import ConfigError
from drivetrain.paper.work import Collective, MemoryPass, Operation

PASSES = 4.5
"""Bytes that an encoding reads and writes per byte of gradients: gradient and kept error read, the
error written, codes written and read, and the sum of the others' numbers; an estimate."""


@dataclass(frozen=True, slots=True)
class FarMethod:
    """A method for gradients between hosts.

    Attributes:
        name: of the method.
        sent: bytes that a rank sends per exact byte of its part, where all ranks get the sum.
        sent_divided: the same where each rank gets a share.
        held: bytes that are kept from step to step, likewise.
    """

    name: str
    sent: float
    sent_divided: float
    held: float

    def messages(
        self, axis: str, nbytes: float, together: int, hosts: int, *, divided: bool
    ) -> Iterator[tuple[str, tuple[Operation, ...]]]:
        """Yield (axis, operations) of one sum.

        Args:
            axis: over which gradients are summed.
            nbytes: of the gradients.
            together: ranks of the axis on one host.
            hosts: that the axis is over.
            divided: whether each rank gets a share of the sum alone.
        """
        part = nbytes / together
        near = f"{axis}.near"
        if together > 1:
            yield near, (Collective(near, "reduce_scatter", nbytes),)
        # An exchange of m bytes sends m (hosts - 1) / hosts.
        ratio = self.sent_divided if divided else self.sent
        exchange = Collective(f"{axis}.far", "all_to_all", part * ratio * hosts / (hosts - 1))
        encoding = MemoryPass(PASSES * part, 0, kind=f"encode {self.name}")
        yield f"{axis}.far", (encoding, exchange)
        if together > 1 and not divided:
            yield near, (Collective(near, "all_gather", nbytes),)


# --- the facts of a run ---


@dataclass(frozen=True, slots=True)
class BytesPerElement:
    """Bytes of the state of one parameter under a policy.

    Attributes:
        parameter: as forward reads it.
        gradient: as it is summed and sent.
        optimizer: masters, moments, and gradients that are kept in the master's dtype.
        update: read and written by the optimizer for one element, with the check for infinities,
            the norm and the cast to the parameter.
    """

    parameter: int
    gradient: int
    optimizer: int
    update: int


BYTES: Mapping[str, BytesPerElement] = {
    "fp16": BytesPerElement(2, 2, 16, 40),
    "bf16": BytesPerElement(2, 4, 12, 36),
    "no": BytesPerElement(4, 4, 8, 32),
}
"""By precision. fp16: gradients of 2 bytes, copied to 4 beside the master's 4 and the moments' 8;
bf16: gradients summed in 4 bytes (Megatron-LM, docs of the distributed optimizer: 20 and 18 bytes
per parameter). An update reads gradient, master and moments and writes master, moments and
parameter (28 + 2 with fp16), and reads gradients for the norm."""


BF16_BYTES = 2
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True, slots=True)
class PaperRun:
    """The run of which a step is drawn.

    Attributes:
        axes: the size of each axis, the closest first.
        micro_batches: of one step.
        precision: a key of ``BYTES``.
        per_host: ranks of a host.
        far: approximates sums of gradients between hosts; None: they are exact.
        on_host: whether ranks compute in the host's memory: sums then go through receive buffers,
            and an optimizer that is not fused steps one parameter after the other.
        rounds_activations: whether activations between stages on different hosts, and their
            gradients, are sent in bfloat16.
    """

    axes: Mapping[str, int]
    micro_batches: int
    precision: str
    per_host: int = 8
    far: FarMethod | None = None
    on_host: bool = False
    rounds_activations: bool = False

    def together(self, axis: str) -> int:
        """Return how many ranks of an axis lie on one host."""
        stride = 1
        for name, size in self.axes.items():
            if name == axis:
                return max(1, min(size, self.per_host // stride))
            stride *= size
        return 1

    def between_hosts(self, activation: float) -> float:
        """Return the bytes that an activation of so many bytes takes between hosts."""
        if not self.rounds_activations:
            return activation
        return activation * min(1.0, BF16_BYTES / self.bytes.parameter)

    @property
    def bytes(self) -> BytesPerElement:
        """Bytes of the state of one element.

        Raises:
            ConfigError: the precision is unknown.
        """
        if self.precision not in BYTES:
            raise ConfigError(
                f"expected a precision of {', '.join(BYTES)}, found {self.precision!r}"
            )
        return BYTES[self.precision]
