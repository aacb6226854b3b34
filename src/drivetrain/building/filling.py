"""Gives tensors of the meta device their values while they stay the same Python objects.

Optimizers, lists and other modules that hold such a tensor see the values too.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drivetrain.errors import UsageError
from drivetrain.model.look import tensors_in
from drivetrain.parts.naming import clean_name
from drivetrain.shards import WeightSource


def meta_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct parameters and buffers without values, by name."""
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {clean_name(name): tensor for name, tensor in held.items() if tensor.is_meta}


def stray_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors without values that modules hold as plain attributes, by name.

    Elements of lists, tuples and dicts in attributes count.

    Raises:
        UsageError: one shares memory with a parameter or buffer.
    """
    without_values = [
        (f"{prefix}.{key}" if prefix else key, tensor)
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        for tensor in tensors_in(value)
        if tensor.is_meta
    ]
    if not without_values:
        return {}
    held = {id(t) for t in [*model.parameters(), *model.buffers()]}
    owned = {t.untyped_storage()._cdata for t in meta_tensors(model).values()}
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in without_values:
        if id(tensor) in held:
            continue
        if tensor.untyped_storage()._cdata in owned:
            raise UsageError(
                f"expected the attribute {name!r} to have memory of its own, found a view "
                "of a parameter or buffer; make the view in forward(), or clone() it"
            )
        found.setdefault(id(tensor), (name, tensor))
    return {f"{name}#{i}": tensor for i, (name, tensor) in enumerate(found.values())}


@torch.no_grad()
def fill(
    module: nn.Module, names: Iterable[str], source: WeightSource, device: torch.device
) -> None:
    """Give parameters and buffers on the meta device their values, the largest first.

    Tensors of one call with common memory, but of several objects, have common memory afterwards.

    Args:
        module: the whole model; names count from here.
        names: of parameters and buffers; tensors with values are left alone.
        source: knows the values.
        device: of the values.

    Raises:
        UsageError: memory is shared in a way that cannot be kept.
    """
    wanted = {clean_name(name) for name in names}
    chosen = [(name, tensor) for name, tensor in meta_tensors(module).items() if name in wanted]
    filled: dict[int, tuple[Tensor, Tensor]] = {}  # by storage: without and with values
    for name, tensor in sorted(chosen, key=lambda item: -item[1].numel()):
        empty, storage = tensor.detach(), tensor.untyped_storage()._cdata
        if storage in filled:
            values = _shared(name, empty, *filled[storage])
        else:
            values = _laid_out(name, source.value(name, tensor), empty, device)
            filled[storage] = empty, values
        become(tensor, values, name)


def become(tensor: Tensor, values: Tensor, name: str) -> None:
    """Make a tensor of the meta device one with values; the Python object stays the same.

    Its class, attributes, hooks and ``requires_grad`` stay too; earlier graphs and views of the
    tensor do not follow.

    Args:
        tensor: a parameter or buffer.
        values: of the same shape; the tensor uses this memory from now on.
        name: of the tensor, for errors.

    Raises:
        UsageError: the values have another shape.
    """
    _check_shape(name, values, tensor)
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    twin = values.detach().requires_grad_(tensor.requires_grad)
    # Not torch.utils.swap_tensors, which makes the same call: it refuses tensors that weak
    # references (those of nn.LSTM) or views know, since these would follow the object. They shall.
    torch._C._swap_tensor_impl(tensor, twin)
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def _laid_out(name: str, values: Tensor, like: Tensor, device: torch.device) -> Tensor:
    """Return values on a device, with the dtype and strides of a tensor."""
    _check_shape(name, values, like)
    if values.stride() == like.stride():
        return values.to(device=device, dtype=like.dtype)
    laid = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    return laid.copy_(values)


def _shared(name: str, like: Tensor, empty: Tensor, values: Tensor) -> Tensor:
    """Return a view of ``values`` that lies there as ``like`` lies in the memory of ``empty``."""
    size = empty.untyped_storage().nbytes()
    if values.untyped_storage().nbytes() != size or like.dtype is not values.dtype:
        raise UsageError(
            f"expected {name!r} to be the same object as what it shares memory with, or a view of "
            f"a whole tensor, found one of {like.numel() * like.element_size()} bytes in a memory "
            f"of {size}; make one of them a clone()"
        )
    view = values.as_strided(like.shape, like.stride(), like.storage_offset())
    return view if like.is_conj() == empty.is_conj() else view.conj()


def _check_shape(name: str, values: Tensor, like: Tensor) -> None:
    if values.shape != like.shape:
        raise UsageError(
            f"expected values of shape {tuple(like.shape)} for {name!r}, found "
            f"{tuple(values.shape)}; the source of weights is of another model"
        )
