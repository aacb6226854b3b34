"""The dtypes of a precision policy, and the loss scale of fp16 that all ranks agree on.

The dynamic loss scale of fp16, agreed by all ranks.

The loss is multiplied by a scale so that small gradients survive fp16. Before a step the gradients
are divided by the scale they were made with; when any of them is infinite or NaN on any rank, the
step is skipped on all, and the scale shrinks. (Micikevicius et al., "Mixed Precision Training",
2018, section 3.2.)
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from drivetrain.config.schema import WORDS, Policy
from drivetrain.errors import UsageError

# --- the precision policy ---

LOW = (torch.bfloat16, torch.float16)
"""Dtypes too coarse to add up gradients or updates in."""

DTYPES: Mapping[str, torch.dtype] = {word: getattr(torch, name) for name, word in WORDS.items()}
"""The dtypes by their words."""


class Precision(Policy):
    """The dtypes of one run: those that its policy gives to a tensor."""

    __slots__ = ()

    def forward_dtype(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.dtype:
        """Return the dtype in which forward reads a parameter of this shape, given in this dtype.

        Norm weights, biases and other vectors keep their dtype, and so do parameters in anything
        but fp32.
        """
        if self.param is None or dtype is not torch.float32 or len(shape) < 2:
            return dtype
        return DTYPES[self.param]

    def master_dtype(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.dtype:
        """Return the dtype in which the optimizer updates a parameter given in this dtype.

        Without a master copy the optimizer updates the parameter as forward reads it.
        """
        read = self.forward_dtype(dtype, shape)
        given_low = read is dtype
        if self.master is None or read not in LOW or (given_low and not self.master_of_given):
            return read
        return DTYPES[self.master]

    def reduce_dtype(self, forward_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients cross ranks, by the dtype in which forward reads.

        Those of fp64, complex numbers and integers are sent as they are.
        """
        if self.reduce is None or forward_dtype not in (torch.float32, *LOW):
            return forward_dtype
        return DTYPES[self.reduce]

    def accumulate_dtype(self, forward_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that sums gradients of parameters that forward reads in a dtype."""
        return torch.float32 if forward_dtype in LOW else forward_dtype

    def autocast(
        self, device: torch.device, *, enabled: bool = True, cache_enabled: bool = True
    ) -> AbstractContextManager[object]:
        """Return the context in which forward computes."""
        if self.compute is None or not enabled:
            return nullcontext()
        dtype = DTYPES[self.compute]
        return torch.autocast(device.type, dtype=dtype, cache_enabled=cache_enabled)


# --- the dynamic loss scale of fp16, agreed by all ranks ---


@dataclass(kw_only=True, slots=True)
class ScaleRule:
    """How the scale moves.

    Attributes:
        init_scale: first scale.
        growth_factor: factor after ``growth_interval`` steps in a row without an infinite gradient.
        backoff_factor: factor after a step with one.
        growth_interval: steps between growths.
        hysteresis: steps in a row with an infinite gradient before the scale shrinks.
        min_scale: the scale never falls below it.
        max_skipped: steps in a row that may be skipped at ``min_scale``; then an error says so.

    Raises:
        UsageError: a number out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        ranges = {
            "min_scale": (self.min_scale > 0, "above 0"),
            "init_scale": (
                self.init_scale >= self.min_scale,
                f"at least min_scale ({self.min_scale:g})",
            ),
            "growth_factor": (self.growth_factor >= 1, "at least 1"),
            "backoff_factor": (0 < self.backoff_factor < 1, "between 0 and 1"),
            "growth_interval": (self.growth_interval >= 1, "at least 1"),
            "hysteresis": (self.hysteresis >= 1, "at least 1"),
            "max_skipped": (self.max_skipped >= 1, "at least 1"),
        }
        for name, (fits, allowed) in ranges.items():
            if not fits:
                found = getattr(self, name)
                raise UsageError(
                    f"loss scale: expected {name} {allowed}, found {found}; change {name}"
                )


class LossScaler:
    """A scale that grows after many good steps and shrinks after bad ones.

    Steps are recorded per optimizer. The steps of several optimizers make up one round, until one
    of them steps again; growth counts rounds.

    Args:
        rule: how the scale moves.
        enabled: False makes the scale one and checks nothing.

    Attributes:
        enabled: whether losses are scaled.
    """

    def __init__(self, rule: ScaleRule, *, enabled: bool) -> None:
        self._rule = rule
        self.enabled = enabled
        self._scale = rule.init_scale if enabled else 1.0
        self._good_steps = 0
        self._bad_steps: dict[int, int] = {}
        self._at_minimum: dict[int, int] = {}
        self._round: set[int] = set()
        self._pending: dict[int, float | None] = {}

    def is_enabled(self) -> bool:
        """Whether losses are scaled."""
        return self.enabled

    def get_scale(self) -> float:
        """Return the factor of the next loss."""
        return self._scale

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self._scale if self.enabled else loss

    def unscale(
        self, pieces: Sequence[Tensor], scale: float, *, ranks: int, device: torch.device
    ) -> bool:
        """Divide gradients in place by their scale. Collective when ranks > 1.

        Args:
            pieces: gradients, on any devices.
            scale: of the losses in their backward.
            ranks: how many ranks must agree.
            device: the device that ranks communicate from.

        Returns:
            Whether any gradient on any rank is infinite or NaN.

        Raises:
            UsageError: a gradient in fp16: the division would lose the digits saved by the scale.
        """
        _refuse_fp16(pieces)
        found = torch.zeros((), device=device)
        for where, dtype in {(piece.device, piece.dtype) for piece in pieces}:
            same = [p for p in pieces if p.device == where and p.dtype is dtype]
            here = torch.zeros((), device=where)
            inverse = torch.full((), 1.0 / scale, device=where)
            torch._amp_foreach_non_finite_check_and_unscale_(same, here, inverse)
            found += here.to(device)
        if ranks > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def record(self, optimizer: int, *, overflow: bool, made_with: float) -> None:
        """Remember whether a step was skipped, and the scale of its gradients, until ``update``.

        The number of the optimizer is the same on every rank.
        """
        before = self._pending.get(optimizer)
        self._pending[optimizer] = made_with if overflow else before

    def update(self) -> None:
        """Change the scale by the steps recorded since the last update.

        Raises:
            UsageError: at its minimum the scale is still too large, ``max_skipped`` steps in a row.
        """
        self._change_scale()
        skipped = max(self._at_minimum.values(), default=0)
        if skipped >= self._rule.max_skipped:
            raise UsageError(
                f"expected finite gradients at the smallest loss scale ({self._rule.min_scale:g}), "
                f"found infinite or NaN ones in the last {skipped} steps, which were skipped; "
                "the model diverged or computes NaN in fp16: lower the learning rate, take "
                "precision bf16, or allow a smaller min_scale in GradScalerKwargs"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counts, as they are after the next update; empty when disabled."""
        if not self.enabled:
            return {}
        after = copy.deepcopy(self)
        after._change_scale()
        bad = {str(optimizer): count for optimizer, count in after._bad_steps.items()}
        at_minimum = {str(optimizer): count for optimizer, count in after._at_minimum.items()}
        return {
            "scale": after._scale,
            "good_steps": after._good_steps,
            "bad_steps": bad,
            "at_minimum": at_minimum,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved scale; if the checkpoint has no scale, nothing changes."""
        if not self.enabled or not state:
            return
        self._scale = float(state["scale"])
        self._good_steps = int(state["good_steps"])
        self._bad_steps = {int(key): int(value) for key, value in state["bad_steps"].items()}
        self._at_minimum = {int(key): int(value) for key, value in state["at_minimum"].items()}
        self._round, self._pending = set(), {}

    def _change_scale(self) -> None:
        """Change the scale, and forget the records."""
        if not self._pending or not self.enabled:
            return
        if self._round & self._pending.keys():
            self._round = set()
        first = not self._round
        self._round |= self._pending.keys()
        for optimizer, made_with in self._pending.items():
            self._count(optimizer, made_with)
        bad = [made_with for made_with in self._pending.values() if made_with is not None]
        self._pending = {}
        if bad:
            self._good_steps = 0
        elif first:
            self._good_steps += 1
        if self._good_steps == self._rule.growth_interval:
            self._scale *= self._rule.growth_factor
            self._good_steps = 0

    def _count(self, optimizer: int, made_with: float | None) -> None:
        if made_with is None:
            self._bad_steps[optimizer] = self._at_minimum[optimizer] = 0
            return
        self._bad_steps[optimizer] = self._bad_steps.get(optimizer, 0) + 1
        if made_with <= self._rule.min_scale:
            self._at_minimum[optimizer] = self._at_minimum.get(optimizer, 0) + 1
        if self._bad_steps[optimizer] >= self._rule.hysteresis:
            # From the scale that was too large, which may have shrunk already for another optimizer
            # whose gradients were made with it, or have grown since.
            smaller = max(self._rule.min_scale, made_with * self._rule.backoff_factor)
            self._scale = min(self._scale, smaller)


def _refuse_fp16(pieces: Sequence[Tensor]) -> None:
    found = sum(piece.dtype is torch.float16 for piece in pieces)
    if found:
        raise UsageError(
            f"expected gradients in fp32 under a loss scale, found {found} of {len(pieces)} in "
            "fp16; give the model in fp32 (model.float()), or keep fp32 masters: "
            "dtypes.master: fp32 under a strategy that has them"
        )
