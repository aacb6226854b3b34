"""The layout of a unit: where each parameter lies, and which range of it each rank owns.

A unit is a set of parameters that are gathered and freed together. Parameters of one kind (dtypes,
trainable or frozen) lie side by side in one flat tensor, each in the order of its memory, so that a
parameter is a view of the flat tensor. Of every parameter a rank owns one range, its shard::

    | p0 | p1      | p2   | p3         |
    | rank 0     | rank 1    | rank 2  |      flat: the tensor is cut into equal ranges
    | rank 0       | rank 1| rank 2    |      whole: parameters belong to ranks
    |0|1|2| 0| 1| 2| 0|1|2 |  0| 1|  2 |      rows: every parameter is cut along its outermost dim

All of it is arithmetic. Strategy and cost estimate read the same layout, so the estimate is exact.
"""

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from drivetrain.collectives.volume import FlatSlice, ParameterRow, SlicesByRank
from drivetrain.cost import TensorSpec
from drivetrain.runtime.precision import Precision
from drivetrain.shards import is_dense

ROOT = ""
"""The key of the rest of the model: parameters outside of repeated blocks and large layers."""

CutStyle: TypeAlias = Literal["flat", "whole", "rows"]
"""How parameters are divided among ranks."""

Range: TypeAlias = tuple[int, int]
"""A half-open range of elements."""

ALIGNMENT = 64
"""Bytes to which flat tensors are aligned in a common buffer: a cache line."""

_BLOCK = re.compile(r"^(?:.*?\.)??\d+(?=\.)")
"""The shortest prefix of a parameter's name that ends in a number: a member of a list of blocks."""


@dataclass(frozen=True, slots=True)
class OwnedRanges:
    """The range of a parameter that each rank owns, as an even cut of elements around it says.

    Attributes:
        cut: how many elements are cut evenly.
        size: into how many ranges, one for each rank.
        offset: where the parameter begins among them.
        numel: its elements.
    """

    cut: int
    size: int
    offset: int
    numel: int

    def __len__(self) -> int:
        """Return how many ranks there are."""
        return self.size

    def __getitem__(self, rank: int) -> Range:
        """Return the range of a rank."""
        if not 0 <= rank < self.size:
            raise IndexError(rank)
        first, stop = (self.cut * edge // self.size - self.offset for edge in (rank, rank + 1))
        return min(max(first, 0), self.numel), min(max(stop, 0), self.numel)

    def lengths(self) -> Tensor:
        """Return how many elements each rank owns: int64, 1-D."""
        edges = torch.arange(self.size + 1, device="cpu") * self.cut // self.size - self.offset
        return edges.clamp(0, self.numel).diff()


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """One parameter's place in its flat tensor.

    Attributes:
        name: the parameter's name.
        shape: its shape.
        outer_dim: the dim that is outermost in memory.
        offset: where it begins in the flat tensor.
        shares: the range that each rank owns of it, in the order of its memory.
    """

    name: str
    shape: tuple[int, ...]
    outer_dim: int
    offset: int
    shares: OwnedRanges

    @property
    def numel(self) -> int:
        """How many elements the parameter has."""
        return prod(self.shape)

    def rows(self, rank: int) -> Range:
        """Return a rank's indices along the outermost dim, for a cut by rows."""
        length = row_length(self.shape, self.outer_dim)
        start, stop = self.shares[rank]
        return (start // length, stop // length) if length else (0, 0)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The parameters of one kind in a unit, side by side.

    Attributes:
        places: its parameters, in order of offset.
        dtype: what forward reads.
        master: what the optimizer updates.
        trainable: whether its parameters require gradients.
        cut: how they are divided.
    """

    places: tuple[ParameterPlace, ...]
    dtype: torch.dtype
    master: torch.dtype
    trainable: bool
    cut: CutStyle

    @property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        last = self.places[-1]
        return last.offset + last.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor."""
        return self.numel * self.dtype.itemsize

    def owned(self, rank: int) -> int:
        """Return how many elements a rank owns."""
        shares = [place.shares[rank] for place in self.places]
        return sum(stop - start for start, stop in shares)

    def pieces(self, rank: int) -> list[Range]:
        """Return a rank's share as ranges of the flat tensor: as few ranges as possible."""
        merged: list[Range] = []
        for place in self.places:
            start, stop = (place.offset + edge for edge in place.shares[rank])
            if start == stop:
                continue
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return merged

    def flat_slices(self, dtype: torch.dtype) -> list[list[FlatSlice]]:
        """Describe the ranges of each rank, in a flat tensor of some dtype."""
        rows = [ParameterRow(p.name, p.shape, p.outer_dim, p.offset) for p in self.places]
        whole = FlatSlice.of(self.numel, dtype, rows)
        ranks = range(len(self.places[0].shares))
        return [[whole.cut(*piece) for piece in self.pieces(rank)] for rank in ranks]


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit.

    Attributes:
        key: the module it belongs to, as its name begins; a bucket's is that of the root.
        flats: its parameters by kind.
        sharded: whether the flat tensors are freed between uses.
    """

    key: str
    flats: tuple[FlatLayout, ...]
    sharded: bool

    @property
    def places(self) -> Iterable[ParameterPlace]:
        """The places of all its parameters."""
        return itertools.chain.from_iterable(flat.places for flat in self.flats)

    @property
    def trainable(self) -> list[FlatLayout]:
        """The flats whose parameters require gradients."""
        return [flat for flat in self.flats if flat.trainable]

    @property
    def nbytes(self) -> int:
        """Bytes of its flat tensors."""
        return sum(flat.nbytes for flat in self.flats)


def owned_by_all(
    flats: Iterable[FlatLayout],
    width: Callable[[FlatLayout], int],
    in_bytes: Collection[str] = (),
) -> Sequence[int]:
    """Return the bytes that each rank owns of flat tensors.

    Args:
        flats: the tensors.
        width: bytes of an element of one.
        in_bytes: names of parameters whose elements count as one byte each.
    """
    places = (
        (place, 1 if place.name in in_bytes else width(f)) for f in flats for place in f.places
    )
    return _owned_by_all(tuple((place.shares, nbytes) for place, nbytes in places))


@lru_cache(maxsize=8)  # blocks are alike
def _owned_by_all(shares: tuple[tuple[OwnedRanges, int], ...]) -> Sequence[int]:
    total = torch.zeros(shares[0][0].size, dtype=torch.int64, device="cpu")
    for each, width in shares:
        total += each.lengths() * width
    found: list[int] = total.tolist()
    return found


def flat_slices_of(flats: Sequence[FlatLayout], dtypes: Sequence[torch.dtype]) -> SlicesByRank:
    """Describe each rank's ranges of several flat tensors.

    Args:
        flats: their layouts; at least one.
        dtypes: of the flat tensors.
    """
    each = [flat.flat_slices(dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
    return [list(itertools.chain.from_iterable(parts)) for parts in zip(*each, strict=True)]


def arrange(
    specs: Sequence[TensorSpec], precision: Precision, size: int, cut: CutStyle
) -> FlatLayout:
    """Put parameters of one kind side by side, and cut them for the ranks that share them.

    Args:
        specs: the parameters, in order; not for cut ``whole``, see ``arrange_whole``.
        precision: which dtypes they get.
        size: number of ranks.
        cut: ``flat`` or ``rows``.
    """
    offsets = list(itertools.accumulate((spec.numel for spec in specs), initial=0))
    places = []
    for spec, offset in zip(specs, offsets, strict=False):
        shares = (
            OwnedRanges(_most_rows(spec, size) * size, size, 0, spec.numel)
            if cut == "rows"
            else OwnedRanges(offsets[-1], size, offset, spec.numel)
        )
        places.append(ParameterPlace(spec.name, spec.shape, spec.outer_dim, offset, shares))
    return _flat(specs[0], places, precision, cut)


def arrange_whole(
    specs: Sequence[TensorSpec], precision: Precision, loads: list[int]
) -> FlatLayout:
    """Give whole parameters of one kind to the ranks that own the least so far.

    Args:
        specs: the parameters.
        precision: which dtypes they get.
        loads: how many elements each rank owns so far; updated.
    """
    owners: list[list[TensorSpec]] = [[] for _ in loads]
    for spec in sorted(specs, key=lambda spec: -spec.numel):
        owner = loads.index(min(loads))
        loads[owner] += spec.numel
        owners[owner].append(spec)
    places, offset = [], 0
    for owner, owned in enumerate(owners):
        for spec in owned:
            size, count = len(loads), spec.numel
            shares = OwnedRanges(count * size, size, count * owner, count)
            places.append(ParameterPlace(spec.name, spec.shape, spec.outer_dim, offset, shares))
            offset += spec.numel
    return _flat(specs[0], places, precision, "whole")


def kind_of(spec: TensorSpec, precision: Precision) -> tuple[torch.dtype, torch.dtype, bool]:
    """Return the dtype of forward, the dtype of the update, and whether a parameter is trained."""
    return (
        precision.forward_dtype(spec.dtype, spec.shape),
        precision.master_dtype(spec.dtype, spec.shape),
        spec.trainable,
    )


def units_of_keys(
    specs: Sequence[TensorSpec],
    members: Iterable[int],
    keys: Sequence[str],
    precision: Precision,
    devices: Sequence[Hashable] | None = None,
) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the key of each unit, and its members: those of one kind share a flat tensor.

    Args:
        specs: the parameters in registration order.
        members: indices of those that are cut, in the order in which they lie in their units.
        keys: of the unit of each parameter.
        precision: which dtypes they get.
        devices: device of each parameter; only equal ones share a unit.
    """
    units: dict[tuple[str, Hashable], dict[Hashable, list[int]]] = {}
    for index in members:
        place = keys[index], None if devices is None else devices[index]
        kind = kind_of(specs[index], precision)
        units.setdefault(place, {}).setdefault(kind, []).append(index)
    for (key, _), kinds in units.items():
        yield key, list(kinds.values())


def in_order_of_backward(
    units: Iterable[UnitLayout], specs: Sequence[TensorSpec]
) -> list[UnitLayout]:
    """Return units sorted: complete first is the one whose earliest parameter comes last."""
    index = {spec.name: number for number, spec in enumerate(specs)}
    return sorted(units, key=lambda unit: -min(index[place.name] for place in unit.places))


def block_of(name: str) -> str | None:
    """Return the member of a list of blocks that a parameter lies in, by its name; or None."""
    block = _BLOCK.match(name)
    return block.group() if block else None


def is_block(key: str) -> bool:
    """Return whether a unit's key names a member of a list of blocks."""
    return key.rpartition(".")[2].isdecimal()


def offsets_in_bytes(sizes: Iterable[int]) -> list[int]:
    """Return where buffers of these sizes begin, each aligned, and where the last one ends."""
    rounded = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    return list(itertools.accumulate(rounded, initial=0))


def row_length(shape: Sequence[int], outer_dim: int) -> int:
    """Return the elements of one slice along the outermost dim; of a 0-d tensor, its one."""
    return prod(size for dim, size in enumerate(shape) if dim != outer_dim)


def _most_rows(spec: TensorSpec, size: int) -> int:
    """Return the elements of the rows that ``torch.chunk`` gives the first ranks, the most."""
    rows = spec.shape[spec.outer_dim] if spec.shape else 1
    return -(-rows // size) * row_length(spec.shape, spec.outer_dim)


def _flat(
    spec: TensorSpec, places: Sequence[ParameterPlace], precision: Precision, cut: CutStyle
) -> FlatLayout:
    dtype, master, trainable = kind_of(spec, precision)
    return FlatLayout(tuple(places), dtype, master, trainable, cut)


# --- one parameter in its flat tensor: its place, and this rank's share ---


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, weakref_slot=True)
class ParameterSlot:
    """One parameter in its flat tensor. Nothing of it changes while the model trains.

    Attributes:
        name: the parameter's name.
        parameter: the user's own object.
        shape: the parameter's shape.
        outer_dim: the dim that is outermost in memory.
        strides: its strides; the flat tensor holds it in this order.
        contiguous: whether the order of memory is that of the flattened parameter.
        numel: its elements.
        master: the dtype that the optimizer updates.
        divided: whether ranks own parts of it; otherwise one of them owns it whole.
        span: where it lies in the flat tensor.
        owned: the (start, stop) of the parameter, in the order of its memory, that this rank owns.
        owned_numel: elements that this rank owns.
        own: where the owned range lies in the flat tensor.
        local: where the owned range lies in this rank's shard of the flat tensor.
        fragment_shape: shape of what the optimizer holds: 1-D, rows, or the parameter's own.
        fragment_strides: its strides.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    outer_dim: int
    strides: tuple[int, ...]
    contiguous: bool
    numel: int
    master: torch.dtype
    divided: bool
    span: slice
    owned: tuple[int, int]
    owned_numel: int
    own: slice
    local: slice
    fragment_shape: tuple[int, ...]
    fragment_strides: tuple[int, ...]

    @classmethod
    def of(
        cls,
        place: ParameterPlace,
        parameter: nn.Parameter,
        flat: FlatLayout,
        rank: int,
        first: int,
    ) -> "ParameterSlot":
        """Return the slot of a parameter.

        Args:
            place: where it lies in its flat tensor.
            parameter: the user's own object.
            flat: the layout of the flat tensor.
            rank: this rank among those that share the unit.
            first: where the owned range begins in the rank's shard.
        """
        plain = torch.empty(place.shape, device="meta").stride()
        strides = parameter.stride() if is_dense(parameter) else plain
        owned = place.shares[rank]
        numel = owned[1] - owned[0]
        shape, inner = _fragment_geometry(place, strides, flat, numel)
        return cls(
            name=place.name,
            parameter=parameter,
            shape=place.shape,
            outer_dim=place.outer_dim,
            strides=strides,
            contiguous=all(
                mine == usual or size == 1
                for mine, usual, size in zip(strides, plain, place.shape, strict=True)
            ),
            numel=place.numel,
            master=flat.master,
            divided=flat.cut != "whole",
            span=slice(place.offset, place.offset + place.numel),
            owned=owned,
            owned_numel=numel,
            own=slice(place.offset + owned[0], place.offset + owned[1]),
            local=slice(first, first + numel),
            fragment_shape=shape,
            fragment_strides=inner,
        )

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter's place in a flat tensor, in the parameter's shape."""
        start = flat.storage_offset() + self.span.start
        return flat.as_strided(self.shape, self.strides, start)

    def piece(self, shard: Tensor) -> Tensor:
        """Return the owned range's place in a tensor like the rank's shard, in fragment shape."""
        start = shard.storage_offset() + self.local.start
        return shard.as_strided(self.fragment_shape, self.fragment_strides, start)

    def in_memory_order(self, values: Tensor) -> Tensor:
        """Return a parameter-shaped tensor's elements in the order of the parameter's memory.

        Args:
            values: of the parameter's shape and any strides.

        Returns:
            1-D, a copy.
        """
        return _ordered(values, self.strides)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a parameter-shaped tensor, a copy in fragment shape.

        A rank that owns nothing gets no elements.
        """
        if not self.owned_numel:
            return whole.new_empty(0)
        owned = self.in_memory_order(whole)[slice(*self.owned)].clone()
        return owned.as_strided(self.fragment_shape, self.fragment_strides)

    def fragment_in_order(self, values: Tensor) -> Tensor:
        """Return a fragment-shaped tensor's elements in the parameter's order of memory, 1-D."""
        if self.contiguous:
            return values.reshape(-1)
        return _ordered(values, self.fragment_strides)


def _fragment_geometry(
    place: ParameterPlace, strides: tuple[int, ...], flat: FlatLayout, owned_numel: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a parameter's fragment."""
    if flat.cut == "flat":
        return (owned_numel,), (1,)
    if flat.cut == "whole" or not place.shape:
        return place.shape, strides
    # Dims inside of the outermost keep their strides, so these rows are dense, too.
    rows = owned_numel // max(row_length(place.shape, place.outer_dim), 1)
    shape = [rows if dim == place.outer_dim else n for dim, n in enumerate(place.shape)]
    return tuple(shape), strides


def _ordered(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    ordered = values.new_empty(values.numel())
    ordered.as_strided(values.shape, strides).copy_(values)
    return ordered
