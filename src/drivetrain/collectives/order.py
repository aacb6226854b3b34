"""Headers: before each operation, ranks of a ring name the operation to their neighbors.

Ranks that take different paths through a model submit different operations. Unchecked, this is a
hang, values in the wrong place or, where a message is longer than its buffer, the end of the
process. Checked, an operation starts with one small message::

    start      my header to the right, one from the left, the first data in both directions
    first wait the left neighbor's header; compare it with mine
    then       wait for data as ever

A rank whose left neighbor is about to do something else raises and closes its connections, which
ends the wait of every other rank.
"""

import struct
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.collectives.communicator import Request
from drivetrain.collectives.neighbors import Neighbors, Tag
from drivetrain.runtime.mesh import Axis

GRACE = timedelta(seconds=5)
"""After a disagreement, a rank waits so long for its right neighbor to notice too."""

LINGER_S = 0.1
"""A rank then keeps its connections so long: its neighbor must wake up to read the header."""

PARTS = "bytes"
"""The dtype of parts in a header, because parts of many dtypes are counted in bytes."""

TAG_MASK, LANE_SHIFT = (1 << 31) - 1, 12
"""A tag has 31 bits; the upper 19 are for the header's checksum, the rest for 1024 rings."""


class Disagreement(Exception):  # noqa: N818 - turned into a CollectiveError by the communicator
    """Two neighbors are about to do different things; the text names both."""


@dataclass(frozen=True, slots=True)
class Header:
    """A rank's next operation, in 120 bytes.

    Attributes:
        number: the operation's sequence number on its communicator, from 1.
        elements: how many the tensor has; of parts, their bytes.
        plan: checksum of chunks, source, reduction, and lengths and dtypes of parts.
        name: checksum of the label that the caller gave; 0 without a label: the path of the code
            may differ between hosts.
        operation: which collective.
        dtype: the tensor's, as in "float32"; of parts, "bytes".
        label: the end of the label, for the error's text; not compared.
    """

    number: int
    elements: int
    plan: int
    name: int
    operation: str
    dtype: str
    label: str

    _LAYOUT: ClassVar[struct.Struct] = struct.Struct("<QQII16s16s64s")
    SIZE: ClassVar[int] = _LAYOUT.size

    @classmethod
    def of(cls, request: Request, number: int, label: str, flat: Tensor | None) -> "Header":
        """Return the header of a request; label is the caller's, or the line of the call.

        There is no flat tensor where the request is about parts.
        """
        chunks = [tuple(chunk) for chunk in request.chunks or ()]
        plan = (chunks, request.source, request.reduction, request.layout)
        return cls(
            number=number,
            elements=request.elements(flat),
            plan=zlib.crc32(repr(plan).encode()),
            name=zlib.crc32(request.label.encode()),
            operation=request.operation,
            dtype=PARTS if flat is None else str(flat.dtype).removeprefix("torch."),
            label=label,
        )

    def pack(self) -> Tensor:
        """Return the header as bytes, shape (SIZE,)."""
        data = self._LAYOUT.pack(
            self.number,
            self.elements,
            self.plan,
            self.name,
            self.operation.encode(),
            self.dtype.encode(),
            self.label.encode()[-64:],  # names and lines of code differ at their ends
        )
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: Tensor) -> "Header":
        """Return the header that ``pack`` wrote."""
        *numbers, operation, dtype, label = cls._LAYOUT.unpack(data.numpy().tobytes())
        texts = (text.rstrip(b"\0").decode(errors="ignore") for text in (operation, dtype, label))
        return cls(*numbers, *texts)

    def checksum(self) -> int:
        """Return a number that differs for different headers, but for the rarest chance."""
        key = (self.number, self.elements, self.plan, self.name, self.operation, self.dtype)
        return zlib.crc32(repr(key).encode())

    def differences(self, other: "Header") -> list[str]:
        """Return the difference between two headers that should be equal, in words."""
        pairs = {
            "sequence number": (self.number, other.number),
            "operation": (self.operation, other.operation),
            "elements": (self.elements, other.elements),
            "dtype": (self.dtype, other.dtype),
            "label": (self.name, other.name),
        }
        found = [words for words, (mine, theirs) in pairs.items() if mine != theirs]
        if not found and self.plan != other.plan:  # other sizes have other chunks anyway
            parts = self.dtype == PARTS
            return ["lengths or dtypes of parts" if parts else "chunks, source or reduction"]
        return found

    def __str__(self) -> str:
        return f"{self.operation} #{self.number} of {self.elements} {self.dtype} ({self.label})"


class CheckedNeighbors(Neighbors):
    """Neighbors that compare their next operations while the first data is on its way.

    The data's tags depend on the header, so those who differ never take each other's data.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup, timeout: timedelta) -> None:
        super().__init__(axis, group, timeout)
        self._lane = 0
        self._mine: Header | None = None
        self._arriving = torch.empty(Header.SIZE, dtype=torch.uint8, device="cpu")
        self._heard: Any = None
        self._told: Any = None

    def number(self, tag: Tag) -> int:
        """Return the backend's tag: the header's checksum is in that of data."""
        return (super().number(tag) + (self._lane << LANE_SHIFT)) & TAG_MASK

    def begin(self, request: Request, number: int, label: str, flat: Tensor | None) -> None:
        """Tell the right neighbor which operation comes next, and listen to the left one."""
        mine = Header.of(request, number, label, flat)
        data = mine.pack()
        self._lane = 0
        self._heard = self.receive(self._arriving, Tag.HEADER)
        self._told = self.send(data, Tag.HEADER)
        self._lane = mine.checksum()
        self._mine = mine

    def wait(self, message: Any) -> None:
        """Compare headers, if this is the operation's first wait, then wait for a message.

        Raises:
            Disagreement: the left neighbor is about to do something else.
            RuntimeError: a message failed or timed out.
        """
        if self._mine is not None:
            self._compare(self._mine)
        super().wait(message)

    def end(self) -> None:
        """Return when the right neighbor has got the header."""
        self.wait(self._told)

    def _compare(self, mine: Header) -> None:
        self._mine = None
        super().wait(self._heard)
        theirs = Header.unpack(self._arriving)
        if differences := mine.differences(theirs):
            with suppress(RuntimeError):
                self._told.wait(min(GRACE, self.timeout))
            time.sleep(LINGER_S)
            raise Disagreement(self._explain(mine, theirs, differences))

    def _explain(self, mine: Header, theirs: Header, differences: list[str]) -> str:
        axis = self.axis
        me, other = axis.ranks[axis.rank], axis.ranks[self.left]
        return (
            f"ranks must run the same operations in the same order on axis {axis.name!r}; found "
            f"{mine} on rank {me}, this one, but {theirs} on rank {other}: they differ in "
            f"{', '.join(differences)}; the ranks took different paths through the model or the "
            "training loop: let every rank run the same modules in the same order, whatever its "
            "data or rank says"
        )
