"""Copies a model for a trial: random values, and thin matrices where the model's are large.

A division decides about one dim of a matrix: a layer cut by columns keeps all of its input, one cut
by rows all of its output, an embedding all features of a word. In that other dim a trial needs no
thousands of features. So a large matrix becomes thin there, and a fixed random matrix stands before
or behind the layer: activations keep their shapes, and the code of the model does not notice. The
trial of a block with 200 M parameters then takes megabytes.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drivetrain_megatron.tensor.linear import is_linear, is_transposed

FEATURES = 16
"""Of a thin matrix. More make a trial slower; with fewer, an error could hide in the others."""

LARGE = 1 << 16
"""Elements of a matrix that becomes thin. Smaller ones are tried as they are."""


class _Thin(NamedTuple):
    """A layer with a thin matrix.

    Attributes:
        module: its name.
        parameters: the names of its parameters, each with the dim that becomes thin.
        before: features of the input that become fewer; 0 if the output's do.
        behind: features of the output, likewise.
    """

    module: str
    parameters: Mapping[str, int]
    before: int = 0
    behind: int = 0


def random_copy(
    model: nn.Module,
    generator: torch.Generator,
    rows: Collection[str] | None,
    dtype: torch.dtype,
) -> nn.Module:
    """Return a copy on the CPU in evaluation mode, with random values.

    Args:
        model: its values do not matter; it may be on the meta device.
        generator: of the values.
        rows: names of the layers that may be cut by rows; None leaves all matrices as they are.
        dtype: of the values.
    """
    layers = [] if rows is None else _thin_layers(model, rows)
    shapes = _shapes(model, layers)
    known: dict[int, Any] = {}
    for _, parameter in model.named_parameters():
        # Also what is frozen now: it may be trained later.
        values = _values(parameter, shapes[id(parameter)], generator)
        known[id(parameter)] = nn.Parameter(values, _floats(parameter))
    for buffer in model.buffers():
        if buffer.is_meta:
            known[id(buffer)] = _values(buffer, buffer.shape, generator)
    copied: nn.Module = copy.deepcopy(model, known).to("cpu", dtype).eval()
    before: dict[int, _Narrow] = {}
    for layer in layers:
        module = copied.get_submodule(layer.module)
        if layer.before:
            size = layer.before
            matrix = randn((size, FEATURES), generator).to(dtype) * size**-0.5
            before.setdefault(size, _Narrow(matrix))
            module.register_forward_pre_hook(before[size])
        else:
            size = layer.behind
            matrix = randn((FEATURES, size), generator).to(dtype) * FEATURES**-0.5
            module.register_forward_hook(_Widen(matrix))
            if is_transposed(module):
                vars(module)["nf"] = FEATURES
    return copied


def thin_shapes(model: nn.Module, rows: Collection[str] | None) -> dict[int, Sequence[int]]:
    """Return the shapes that parameters have in such a copy, by ``id`` of the model's own."""
    return _shapes(model, [] if rows is None else _thin_layers(model, rows))


def randn(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return random fp64 numbers on the CPU."""
    return torch.randn(tuple(shape), dtype=torch.float64, device="cpu", generator=generator)


def _shapes(model: nn.Module, layers: Iterable[_Thin]) -> dict[int, Sequence[int]]:
    shapes: dict[int, Sequence[int]] = {id(p): tuple(p.shape) for _, p in model.named_parameters()}
    for layer in layers:
        for name, dim in layer.parameters.items():
            parameter = model.get_parameter(f"{layer.module}.{name}".strip("."))
            shape = list(parameter.shape)
            shape[dim] = FEATURES
            shapes[id(parameter)] = shape
    return shapes


def _values(like: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    if not _floats(like):
        return torch.zeros(tuple(shape), dtype=like.dtype) if like.is_meta else like.detach().cpu()
    spread = max(shape[-1], 1) ** -0.5 if len(shape) > 1 else 0.5
    return randn(shape, generator) * spread + (len(shape) < 2)


def _floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point()


def _thin_layers(model: nn.Module, rows: Collection[str]) -> list[_Thin]:
    """Return the layers whose matrices become thin: all that share a weight, or none of them."""

    def weight_of(layer: _Thin) -> int:
        return id(model.get_submodule(layer.module)._parameters["weight"])

    found = list(_candidates(model, rows))
    uses = Counter((weight_of(layer), layer.parameters["weight"]) for layer in found)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(False))
    return [
        layer
        for layer in found
        if uses[weight_of(layer), layer.parameters["weight"]] == owners[weight_of(layer)]
    ]


def _candidates(model: nn.Module, rows: Collection[str]) -> Iterator[_Thin]:
    inside = tuple(  # which read the weights of their layers themselves
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    )
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or weight.numel() < LARGE or not _floats(weight):
            continue
        if min(weight.shape) <= FEATURES or name.startswith(inside):
            continue
        if isinstance(module, nn.Embedding):
            yield _Thin(name, {"weight": 1}, behind=weight.shape[1])
        elif is_linear(module):
            transposed = is_transposed(module)
            features, outputs = weight.shape if transposed else reversed(weight.shape)
            if name not in rows:
                yield _Thin(name, {"weight": 0 if transposed else 1}, before=features)
                continue
            dims = {"weight": 1 if transposed else 0}
            bias = module._parameters.get("bias")
            yield _Thin(name, dims if bias is None else {**dims, "bias": 0}, behind=outputs)


class _Narrow:
    """A forward pre-hook: the input is multiplied by a fixed matrix.

    Layers with one input get one result: they may be a group.
    """

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix
        self._given: tuple[Tensor, int] | None = None
        self._made: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any) -> Any:
        x, *rest = args
        same = self._given is not None and self._given[0] is x and self._given[1] == x._version
        if not same or self._made is None:
            self._given, self._made = (x, x._version), x @ self._matrix
        return (self._made, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Narrow":
        return _Narrow(self._matrix)


class _Widen:
    """A forward hook: the output is multiplied by a fixed matrix."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output @ self._matrix

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Widen":
        return self
