"""Lets an optimizer's ``state_dict`` and ``load_state_dict`` reach the state that a store keeps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from drivetrain.sharding.kept import Kept
from drivetrain.sharding.slot import Slot

Slots = Callable[[], Mapping[Tensor, Slot]]
"""Gives the parameters that lie in units by what an optimizer holds in their places."""


class KeptState:
    """The state of one optimizer that stores keep; its own ``state`` has nothing of it.

    Args:
        slots: its parameters.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def connect(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Register the hooks, and return their handles."""
        return [
            optimizer.register_state_dict_pre_hook(self._show),
            optimizer.register_state_dict_post_hook(self._hide),
            optimizer.register_load_state_dict_pre_hook(self._divert),
        ]

    def _kept(self) -> Iterator[tuple[Tensor, Slot, Kept]]:
        for fragment, slot in self._slots().items():
            if slot.kept is not None:
                yield fragment, slot, slot.kept

    def _show(self, optimizer: Optimizer) -> None:
        for fragment, slot, kept in self._kept():
            states = {key: _shaped(slot, value) for key, value in kept.states()}
            if states:
                optimizer.state[fragment] = states

    def _hide(self, optimizer: Optimizer, state_dict: Any) -> None:
        for fragment, _, _ in self._kept():
            optimizer.state.pop(fragment, None)

    def _divert(self, optimizer: Optimizer, state_dict: Any) -> dict[str, Any]:
        """Give stores what is theirs: torch would cast it to the dtype of what stands in."""
        rest = dict(state_dict["state"])
        numbers = _numbers(optimizer, state_dict)
        for fragment, slot, kept in self._kept():
            if fragment in numbers:  # otherwise torch is about to refuse it
                kept.set_states(flat_state(slot, rest.pop(numbers[fragment], {})))
        return {**state_dict, "state": rest}


def _numbers(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, int]:
    """Return the numbers in a saved state of what an optimizer holds; none if these differ."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    return dict(zip(held, saved, strict=True)) if len(held) == len(saved) else {}


def flat_state(slot: Slot, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state as stores keep it: tensors of its fragment's shape are 1-D."""
    return {
        key: slot.share_in_order(value)
        if isinstance(value, Tensor) and value.shape == slot.fragment_shape and value.dim()
        else value
        for key, value in state.items()
    }


def _shaped(slot: Slot, value: Tensor) -> Tensor:
    if value.dim() != 1 or value.numel() != slot.owned_numel:
        return value
    return value.as_strided(slot.fragment_shape, slot.fragment_strides)
