"""The norm of many tensors as one number, on one rank or over the axes that hold the pieces."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError


def global_norm(
    pieces: Iterable[Tensor],
    norm_type: float = 2.0,
    *,
    over: Sequence[Communicator] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Return the p-norm of all elements of all pieces, as if they were one vector.

    Norms of pieces are taken in fp32, of fp64 pieces in fp64; no value leaves the device.

    Args:
        pieces: tensors of any shape and dtype.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: axes over which distinct pieces lie: one scalar all-reduce each. Without any, the
            pieces are all there is.
        device: where the result lies; needed when a rank may hold no piece at all, or pieces lie
            elsewhere. None: where the first piece does.

    Returns:
        0-d, fp32 or, with fp64 pieces on this rank or on others, fp64.

    Raises:
        UsageError: norm_type is not positive.
    """
    if not norm_type > 0:
        raise UsageError(f"expected a positive norm_type, or inf, found {norm_type}")
    norms = _norms(pieces, norm_type)
    if norms:
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    else:
        total = torch.zeros((), device=device)
    if device is not None:
        total = total.to(device)  # pieces that wait in host memory do not decide where it crosses
    if not over:
        return total
    return combine_norms(total, norm_type, over)


def norms_of_each(
    pieces: Sequence[Tensor | None],
    norm_type: float,
    *,
    over: Sequence[Communicator],
    device: torch.device,
) -> Tensor:
    """Return the p-norm of each of several tensors whose pieces lie on ranks.

    Args:
        pieces: this rank's piece of each tensor; None: it has none.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: axes over which distinct pieces lie: one all-reduce each.
        device: where the result lies.

    Returns:
        1-D, fp64 (fp32 on a device without fp64), the same on every rank of the axes.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    norms = torch.zeros(len(pieces), dtype=wide, device=device)
    places = [i for i, piece in enumerate(pieces) if piece is not None and piece.numel()]
    if places:
        found = _norms([piece for piece in pieces if piece is not None], norm_type)
        norms[torch.tensor(places, device=device)] = torch.stack(found).to(norms)
    return combine_norms(norms, norm_type, over) if over else norms


def clip_(pieces: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors in place so that their norm, which is given, becomes at most max_norm.

    The factor is ``max_norm / (norm + 1e-6)``, at most 1, as in ``torch.nn.utils``.
    """
    factor = clip_factor(norm, max_norm)
    for (device, dtype), group in _grouped(pieces).items():
        # A factor of fp64 would scale 0-d gradients, and these alone, in fp64; and on a GPU one
        # kernel scales a whole group only if the factor is no wider than that.
        wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        torch._foreach_mul_(group, factor.to(device, wide))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that clips tensors with this norm, 0-d."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _norms(pieces: Iterable[Tensor], norm_type: float) -> list[Tensor]:
    filled = [piece.detach() for piece in pieces if piece.numel()]
    if not filled:
        return []
    found: dict[int, Tensor] = {}
    for group in _grouped(filled).values():
        found.update(zip(map(id, group), _norms_of(group, norm_type), strict=True))
    norms = [found[id(piece)] for piece in filled]  # whatever their dtypes, summed in this order
    device = norms[0].device
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return [norm.to(device, widest) for norm in norms]


def _norms_of(group: list[Tensor], norm_type: float) -> Sequence[Tensor]:
    """Return the norms of tensors of one device and dtype, in fp32 or fp64."""
    dtype = group[0].dtype
    wide = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    if dtype in (torch.float32, torch.float64, torch.complex64, torch.complex128):
        return torch._foreach_norm(group, norm_type)
    if group[0].device.type != "cpu":
        return torch._foreach_norm(group, norm_type, wide)
    # As if they were kept in that dtype, to the last bit, and one after the other.
    return [torch._foreach_norm([piece.to(wide)], norm_type)[0] for piece in group]


def combine_norms(total: Tensor, norm_type: float, over: Sequence[Communicator]) -> Tensor:
    """Return the norm over all ranks of some axes, given the norm of this rank's tensors.

    Args:
        total: 0-d, this rank's norm.
        norm_type: p, positive; ``inf`` for the largest absolute value.
        over: the axes, one after the other: one scalar all-reduce each.

    Returns:
        0-d, fp64 (fp32 on a device without fp64), the same on every rank of the axes.
    """
    # One dtype on every rank, whatever pieces each of them has.
    total = total.to(torch.float32 if total.device.type == "mps" else torch.float64)
    if math.isinf(norm_type):
        for communicator in over:
            communicator.all_reduce(total, reduction="max", label="gradient norm").wait()
        return total
    total.pow_(norm_type)
    for communicator in over:
        communicator.all_reduce(total, label="gradient norm").wait()
    total.pow_(1.0 / norm_type)
    return total


def _grouped(pieces: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for piece in pieces:
        if piece.numel():
            groups[piece.device, piece.dtype].append(piece)
    return groups
