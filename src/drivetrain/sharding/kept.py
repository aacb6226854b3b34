"""Optimizer state that a store keeps and steps, parameter by parameter; and what stands in for it.

Where the store keeps a parameter's master, too, the optimizer's groups hold a parameter without
values, so that schedulers, weight decay and names go on working. Its own step finds no gradients.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.errors import UsageError
from drivetrain.parts.guard import guard
from drivetrain.store import ShardStepper

if TYPE_CHECKING:
    from drivetrain.sharding.slot import Slot


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store keeps for one parameter.

    Attributes:
        stepper: steps it.
        block: the block that it is part of.
        index: its place there.
        master: whether the master is kept, too.
        in_memory: whether it lies in memory; otherwise what is read is a copy.
    """

    stepper: ShardStepper
    block: str
    index: int
    master: bool
    in_memory: bool

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the states as torch names them; nothing before the first step."""
        return self.stepper.states(self.block, self.index)

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace the states."""
        self.stepper.set_states(self.block, self.index, states)


class StandInGuard:
    """Guards what stands in an optimizer's group for a master that a store keeps.

    Args:
        name: of the parameter.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"expected values, found what an offloaded optimizer holds in the place of "
            f"{self._name!r}: a store keeps them; read the parameter of the model, or take "
            "accelerator.get_state_dict(model)"
        )


def stand_in(slot: "Slot", dtype: torch.dtype) -> None:
    """Take the values of a parameter's fragment away; its gradients are to have this dtype."""
    fragment = slot.fragment
    if fragment is None:
        return
    empty = torch.empty_strided(slot.fragment_shape, slot.fragment_strides, dtype=dtype)
    empty.untyped_storage().resize_(0)
    grad, fragment.grad = fragment.grad, None
    with torch._C.DisableTorchFunctionSubclass():
        fragment.data = empty
    if grad is not None and grad.dtype is dtype:
        fragment.grad = grad
    guard(fragment, StandInGuard(slot.name))


def master_of(slot: "Slot") -> Tensor:
    """Return what this rank owns of a parameter as the optimizer updates it, 1-D."""
    if slot.kept is not None and slot.kept.master:
        return slot.kept.stepper.master(slot.kept.block, slot.kept.index)
    return slot.flat.share.read(slot).detach()


def is_copied(slot: "Slot") -> bool:
    """Whether ``master_of`` returns a copy that nobody else holds."""
    if slot.kept is not None and slot.kept.master:
        return not slot.kept.in_memory
    return slot.flat.share.in_store


def set_master(slot: "Slot", values: Tensor) -> None:
    """Replace what this rank owns of a parameter.

    Args:
        slot: the parameter.
        values: 1-D, of the dtype that the optimizer updates.
    """
    if slot.kept is not None and slot.kept.master:
        slot.kept.stepper.set_master(slot.kept.block, slot.kept.index, values)
    slot.flat.share.write(slot, values)


def take_master(slot: "Slot") -> None:
    """Let the master that a store keeps follow the parameter's values where those changed.

    What nobody changed keeps the digits that the dtype of forward has no room for.
    """
    kept = slot.kept
    if kept is None or not kept.master or not slot.owned_numel:
        return
    master = kept.stepper.master(kept.block, kept.index)
    own = slot.flat.values[slot.own].detach().to(master.device)
    values = torch.where(master.to(own.dtype) == own, master, own.to(master.dtype))
    kept.stepper.set_master(kept.block, kept.index, values)
