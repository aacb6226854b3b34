"""Lets a model run once without values: its parameters have none until the context ends."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drivetrain.model.untouched import untouched
from drivetrain.model.valueless import ValuelessTensor


@dataclass(frozen=True, slots=True)
class Substitutes:
    """The tensors in the place of a model's own.

    Attributes:
        device: where the model's values are, or would be: the CPU for the meta device.
        parameters: in place of the distinct parameters, by their first name.
        aliases: all names of each, by its first name.
        buffers: copies of the buffers by name; some without values.
    """

    device: torch.device
    parameters: dict[str, ValuelessTensor]
    aliases: dict[str, tuple[str, ...]]
    buffers: dict[str, Tensor]

    def buffers_at(self, tensor: Tensor) -> set[str]:
        """Return the names of the buffers with values that a real tensor shares memory with."""
        memory = tensor.untyped_storage().data_ptr()
        valued = {n: b for n, b in self.buffers.items() if not isinstance(b, ValuelessTensor)}
        return {name for name, b in valued.items() if b.untyped_storage().data_ptr() == memory}


@contextmanager
def without_values(
    model: nn.Module,
    kind: type[ValuelessTensor] = ValuelessTensor,
    unknown: Collection[str] = (),
) -> Iterator[Substitutes]:
    """Context in which a model runs without values, of this kind; afterwards it is as before.

    Parameters lose their values, and so do the buffers named in ``unknown``, and those on the meta
    device; all else that a forward may change is a copy (``untouched``).
    """
    with untouched(model):
        keep_padding(model)
        with _uncompiled(list(model.modules())):
            yield _substitute(model, kind, unknown)


def keep_padding(model: nn.Module) -> None:
    """Let encoders of torch compute padded positions, too, in eval mode, as they do in training.

    Left to themselves they look at the values of the mask and the input and send ragged tensors
    through the blocks; at padded positions the output is then zero instead of some number.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _uncompiled(modules: Sequence[nn.Module]) -> AbstractContextManager[object]:
    """Run compiled modules eagerly: tensors without values cannot be compiled."""
    compiled = any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules
    )
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()


def _substitute(
    model: nn.Module, kind: type[ValuelessTensor], unknown: Collection[str]
) -> Substitutes:
    device = _device(model)
    by_identity: dict[int, str] = {}
    parameters: dict[str, ValuelessTensor] = {}
    aliases: dict[str, list[str]] = {}
    buffers: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            first = by_identity.setdefault(id(parameter), full)
            if first not in parameters:
                parameters[first] = kind.of(parameter, _real(parameter.device))
            module._parameters[name] = parameters[first]
            aliases.setdefault(first, []).append(full)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                full = f"{prefix}.{name}" if prefix else name
                is_valued = not buffer.is_meta and full not in unknown
                found = buffer if is_valued else kind.of(buffer, _real(buffer.device))
                module._buffers[name] = buffers[full] = found
    names = {first: tuple(all_names) for first, all_names in aliases.items()}
    return Substitutes(device, parameters, names, buffers)


def _device(model: nn.Module) -> torch.device:
    first = next(iter(model.parameters()), None)
    return _real(first.device) if first is not None else torch.device("cpu")


def _real(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device
