"""The states that torch's optimizers keep for a parameter, and the kernel that updates them.

A rule belongs to a class of optimizers, not to an object, and holds nothing. ``Rule.step`` reads a
param group, so that a scheduler may change the group while the step is still under way elsewhere.

An update does for every element, in this order:

1. cast the gradient to the master's dtype;
2. multiply the gradient by the factor, in the master's dtype;
3. run torch's own optimizer: its fused kernel where the group says ``fused=True``, its plain loop
   elsewhere;
4. cast the new parameter into the output.

The factor both unscales and clips. Without offload these are multiplications, too, and the first
is by a power of two, which is exact: so the bits are equal. The kernels' own ``grad_scale`` is not
used: a division may differ in the last bit, stores the gradient again, and costs 0.10 ns per
element, where a multiplication of the scratch in the cache costs 0.04 (AVX-512, one thread).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from typing_extensions import override

ParamGroup = Mapping[str, Any]
"""A param group of a torch optimizer."""
Kernel = Callable[[Tensor, Tensor, Mapping[str, Tensor]], None]
"""Updates (master, gradient, states) in place; all 1-D, of equal length and dtype."""


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One optimizer step of one param group, for any number of pieces of its shards.

    Attributes:
        kernel: updates a piece.
        states: the names of the state tensors that the kernel updates.
        factor: multiplies the gradient, after its cast.
    """

    kernel: Kernel
    states: frozenset[str]
    factor: float = 1.0


class Rule(ABC):
    """How one class of optimizers updates a flat shard.

    Attributes:
        counted: whether torch keeps the number of steps with a parameter, as ``step``.
    """

    counted: ClassVar[bool] = True

    @abstractmethod
    def states(self, group: ParamGroup) -> dict[str, float]:
        """Return the initial value of each state of a parameter in this group, by torch's key."""

    def taken(self, state: Mapping[str, Any]) -> float:
        """Return how many steps a parameter has taken, by its state as ``torch.optim`` keeps it."""
        return float(state.get("step", 0.0))

    def step(self, group: ParamGroup, taken: float, factor: float = 1.0) -> GroupStep:
        """Begin a step: read the group's hyperparameters; shards of equal counters may share it.

        Args:
            group: a param group; learning rate and betas may be tensors.
            taken: the steps before.
            factor: multiplies gradients: 1 / loss scale, times the clip factor.
        """
        kernel = self._kernel(group, torch.tensor(taken + 1, dtype=torch.float32))
        return GroupStep(kernel, frozenset(self.states(group)), factor)

    @abstractmethod
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        """Return the update of step ``number``, which is 1 in the first."""


class AdamRule(Rule):
    """Adam and AdamW, whose groups say how their weight decay is meant."""

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        return dict.fromkeys(names, 0.0)

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        amsgrad, betas = bool(group["amsgrad"]), group["betas"]
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "weight_decay", "eps"),
            beta1=float(betas[0]),
            beta2=float(betas[1]),
            amsgrad=amsgrad,
            maximize=group["maximize"],
        )
        decoupled, fused = group["decoupled_weight_decay"], is_fused(group)
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        # The loop computes in the dtype of a hyperparameter that is a tensor: it stays a tensor.
        names = ("lr", "beta1", "beta2")
        given = zip(names, map(_as_it_is, (group["lr"], *betas)), strict=True)
        loop = {**_LOOP, **settings, **dict(given), "decoupled_weight_decay": decoupled}

        def update(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            largest = [states["max_exp_avg_sq"]] if amsgrad else []
            tensors = [master], [gradient], [states["exp_avg"]], [states["exp_avg_sq"]], largest
            if fused:
                kernel(*tensors, [number], **settings)
            else:
                adam(*tensors, [number - 1], **loop)  # the loop itself adds the 1

        return update


class SgdRule(Rule):
    """SGD, which keeps no counter: a momentum buffer tells that a step was taken."""

    counted = False

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group["momentum"] else {}

    @override
    def taken(self, state: Mapping[str, Any]) -> float:
        # Only the first step differs from the others: it fills the buffer.
        return float(state.get("momentum_buffer") is not None)

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        momentum = float(group["momentum"])
        first = momentum != 0 and int(number) == 1
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "weight_decay", "dampening"),
            momentum=momentum,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )

        def fused(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            buffers = [states["momentum_buffer"]] if momentum else []
            torch._fused_sgd_([master], [gradient], buffers, is_first_step=first, **settings)

        def loop(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            kept = states["momentum_buffer"] if momentum else None
            buffers = [None if first else kept]  # torch's first step makes a buffer, copied below
            sgd([master], [gradient], buffers, **_LOOP, **settings)
            if first and kept is not None and buffers[0] is not None:
                kept.copy_(buffers[0])

        return fused if is_fused(group) else loop


class AdagradRule(Rule):
    """Adagrad."""

    @override
    def states(self, group: ParamGroup) -> dict[str, float]:
        return {"sum": float(group["initial_accumulator_value"])}

    @override
    def _kernel(self, group: ParamGroup, number: Tensor) -> Kernel:
        settings: dict[str, Any] = dict(
            **_numbers(group, "lr", "lr_decay", "weight_decay", "eps"),
            maximize=group["maximize"],
        )

        def fused(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            torch._fused_adagrad_([master], [gradient], [states["sum"]], [number], **settings)

        def loop(master: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> None:
            before = [number - 1]  # the loop itself adds the 1
            adagrad([master], [gradient], [states["sum"]], before, **_LOOP, **settings)

        return fused if is_fused(group) else loop


def update_rule(optimizer: Optimizer) -> Rule | None:
    """Return the rule of an optimizer, or None when only the optimizer itself can take its steps.

    Rules are for exactly ``torch.optim.AdamW``, ``Adam``, ``SGD`` and ``Adagrad``: a subclass may
    do something else. There is no rule for groups that are ``capturable`` or ``differentiable``,
    nor for groups with ``foreach=True``, whose results differ in the last bits.
    """
    rule = _RULES.get(type(optimizer))
    if rule is None or any(_wants_another(group) for group in optimizer.param_groups):
        return None
    return rule


_LOOP: Mapping[str, Any] = {"foreach": False, "fused": False}
"""Options for torch's plain implementation, operation by operation: its default on the CPU."""

_RULES: Mapping[type[Optimizer], Rule] = {
    AdamW: AdamRule(),
    Adam: AdamRule(),
    SGD: SgdRule(),
    Adagrad: AdagradRule(),
}


def _wants_another(group: ParamGroup) -> bool:
    special = group.get("capturable", False) or group["differentiable"]
    return bool(special or group["foreach"])


def is_fused(group: ParamGroup) -> bool:
    """Return whether torch's optimizers would take the fused kernel for a group, on the CPU."""
    return bool(group["fused"])


def _as_it_is(value: float | Tensor) -> float | Tensor:
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(group: ParamGroup, *names: str) -> dict[str, float]:
    return {name: float(group[name]) for name in names}
