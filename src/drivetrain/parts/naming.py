"""The names of the training state outside of a run, as in the user's own model."""

from collections.abc import Iterator

from torch import Tensor, nn

from drivetrain.parts.guard import Elsewhere

_COMPILED = "_orig_mod."
"""The prefix that ``torch.compile`` puts before the names of a wrapped module."""


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes of ``torch.compile``."""
    return name.replace(_COMPILED, "")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the distinct parameters in registration order; tied ones under their first name.

    Those that other ranks hold are left out.
    """
    named = model.named_parameters()
    return {clean_name(name): p for name, p in named if not isinstance(p, Elsewhere)}


def held_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the distinct parameters but those that other ranks hold.

    Also those that a model leaves out of ``parameters()``, as one that is trained beside it.
    """
    yield from named_parameters(model).values()


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each distinct parameter and buffer, by the first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            kept = first.setdefault(id(tensor), clean_name(name))
            names.setdefault(kept, []).append(clean_name(name))
    return names


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the distinct buffers that a state dict would hold."""
    fleeting = set(_fleeting(model))
    return {
        clean_name(name): buffer for name, buffer in model.named_buffers() if name not in fleeting
    }


def _fleeting(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{prefix}.{name}" if prefix else name


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` has wrapped, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module
