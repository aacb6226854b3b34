"""Copies of a model's whole state, for exports and for the model's own ``save_pretrained``.

The ``save_pretrained`` of transformers, diffusers and peft asks the model for its ``state_dict``,
where a strategy may have a rank's part alone, or nothing. A prepared model gives it whole tensors.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from drivetrain.parts.naming import clean_name
from drivetrain.parts.wrapping import UninheritedMethod
from drivetrain.shards import Readable, TensorFacts

SAVE, STATE = "save_pretrained", "state_dict"

GATHERED_BYTES = 32 * 2**20
"""Parameters are gathered together while they fit into this: small ones share a collective."""


def copied_state(module: nn.Module, owner: Readable) -> dict[str, Tensor]:
    """Return a module's whole state on every rank's CPU; tied names share a tensor. Collective."""
    facts = owner.state_facts(module)
    copies: dict[Hashable, Tensor] = {}
    for batch in batched({one.identity: one for one in facts}.values()):
        with owner.whole_state(module, [one.name for one in batch]) as state:
            for one in batch:
                copies[one.identity] = state[one.name].to("cpu", copy=True)
    return {one.name: copies[one.identity] for one in facts}


def batched(facts: Iterable[TensorFacts]) -> Iterator[list[TensorFacts]]:
    """Yield tensors in order, as many at a time as fit into ``GATHERED_BYTES``."""
    batch: list[TensorFacts] = []
    filled = 0
    for one in facts:
        if batch and filled + one.nbytes > GATHERED_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(one)
        filled += one.nbytes
    if batch:
        yield batch


def saving_methods(module: nn.Module, owner: Readable) -> list[UninheritedMethod]:
    """Return a ``save_pretrained`` that writes whole weights, for each module that has one.

    Args:
        module: the user's model.
        owner: reads its whole tensors.
    """
    found = []
    for name, part in module.named_modules():
        given = getattr(part, SAVE, None)
        if callable(given):
            prefix = f"{clean_name(name)}." if name else ""
            save = partial(_save, part, given, partial(_state_below, prefix, module, owner))
            found.append(UninheritedMethod(part, SAVE, save))
    return found


def _state_below(prefix: str, module: nn.Module, owner: Readable) -> dict[str, Tensor]:
    whole = copied_state(module, owner)
    return {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}


def _save(
    part: nn.Module,
    given: Callable[..., Any],
    read: Callable[[], Mapping[str, Tensor]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let a module save itself, with whole tensors in all its state dicts. Collective."""
    if kwargs.get(STATE) is not None or STATE in part.__dict__:  # given, or within another's save
        return given(*args, **kwargs)
    whole = read()
    shown = [
        UninheritedMethod(
            module, STATE, partial(_shown, whole, clean_name(f"{name}.") if name else "")
        )
        for name, module in part.named_modules()
    ]
    try:
        for method in shown:
            method.put()
        return given(*args, **kwargs)
    finally:
        for method in shown:
            method.take_off()


def _shown(
    whole: Mapping[str, Tensor],
    below: str,
    destination: dict[str, Tensor] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Tensor]:
    """Return what ``Module.state_dict`` would, of the module whose names begin with ``below``."""
    del keep_vars  # they are copies
    found: dict[str, Tensor] = OrderedDict() if destination is None else destination
    for name, tensor in whole.items():
        if name.startswith(below):
            found[prefix + name.removeprefix(below)] = tensor
    return found
