"""Random draws of a model whose ranks share layers: all of them draw the same numbers.

Stochastic depth, LayerDrop, noise: a rank that draws other numbers takes another path, or computes
a share of another activation. So a forward begins with the generators of the axis's first rank, as
long as forwards draw something. A model that draws nothing costs a comparison of states, and in the
first forward a broadcast.
"""

import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.errors import UsageError
from drivetrain.parts.naming import uncompiled
from drivetrain.runtime import rng
from drivetrain_megatron.tensor.behavior import Surrounding, release, surround


class AlikeDraws:
    """Keeps the random generators of one axis alike in the forwards of a model."""

    def __init__(self, ranks: Communicator, device: torch.device) -> None:
        self._ranks = ranks
        self._device = device
        self._drew = {True: True, False: True}  # in training, in evaluation
        self._model: nn.Module | None = None

    def attach(self, model: nn.Module) -> None:
        """Begin, with the forwards of a model; on one rank alone there is nothing to do."""
        if self._ranks.size > 1:
            self._model = uncompiled(model)
            surround(self._model, partial(_Alike, draws=self))

    def close(self) -> None:
        """End."""
        if self._model is not None:
            release(self._model)
            self._model = None

    def during(self, compute: Callable[[], Any], *, training: bool) -> Any:
        """Return the result of a forward that all ranks of the axis run.

        Raises:
            UsageError: ranks drew different numbers, in a forward after one in the same mode that
                drew nothing.
        """
        shared = self._drew[training]
        if shared:
            self._share()
        before = _states()
        result = compute()
        drew = self._drew[training] = not _equal(before, _states())
        if drew and not shared:
            self._check()
        return result

    def _share(self) -> None:
        """Give every rank the states of the first one."""
        states = dict(sorted(rng.capture().items()))
        held = [state.flatten().view(torch.uint8) for state in states.values()]
        joined = torch.cat(held).to(self._device)
        self._ranks.broadcast(joined, 0, label="states of random generators").wait()
        parts = torch.split(joined.cpu(), [each.numel() for each in held])
        rng.restore(
            {
                key: part.clone().view(state.dtype).view_as(state)
                for (key, state), part in zip(states.items(), parts, strict=True)
            }
        )

    def _check(self) -> None:
        digests = [_digest(state) for _, state in sorted(rng.capture().items())]
        mine = torch.tensor(digests, dtype=torch.int64, device=self._device)
        low, high = -mine, mine.clone()
        for each in (low, high):
            self._ranks.all_reduce(each, reduction="max", label="random generators").wait()
        if not torch.equal(-low, high):
            raise UsageError(
                "expected the ranks that share layers to draw the same random numbers in a "
                "forward, found generators in different states: this forward drew and the one "
                "before did not; seed the ranks of a cell alike (set_seed without "
                "device_specific), or draw in every forward"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "AlikeDraws":
        return self  # copies of the model run on the same ranks


def _digest(state: Tensor) -> int:
    return zlib.crc32(repr(state.tolist()).encode())


@dataclass(frozen=True)
class _Alike(Surrounding):
    """A model whose forwards draw the same numbers on all ranks of an axis."""

    draws: AlikeDraws

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute as the model does."""
        return self.draws.during(
            lambda: self.inner.forward(module, *args, **kwargs), training=module.training
        )


def _states() -> list[Any]:
    """Return the states of all generators as they are, which is cheaper than ``rng.capture``."""
    numpy = sys.modules.get("numpy")
    numbers = () if numpy is None else numpy.random.get_state()
    found = [random.getstate(), torch.get_rng_state(), *numbers]
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        found.append(torch.get_device_module(device).get_rng_state())
    return found


def _equal(before: list[Any], after: list[Any]) -> bool:
    """Whether nothing was drawn; NumPy may have been imported meanwhile."""
    return len(before) == len(after) and all(
        bool((a == b).all()) if hasattr(a, "all") else a == b
        for a, b in zip(before, after, strict=True)
    )
