"""Whether an optimizer may step pieces of a parameter: asked of itself, by experiment.

An element-wise optimizer gives the same result for a matrix and for its pieces. Optimizers that
look at whole matrices (Muon, Shampoo, Adafactor, LAMB) do not, and optimizers that look at all
parameters at once (LBFGS) do not even for whole matrices. So a copy of the optimizer steps small
tensors both ways, and the results are compared. No list of names has to be kept.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.cost import TensorSpec

_SHAPE = (6, 4)
_CUT = 10
_ROWS = 2
_STEPS = 3
_RATE = 0.1


def steps_each_alone(optimizer: Optimizer) -> bool:
    """Return whether a step needs neither several parameters at once nor a closure."""
    return _agrees(optimizer, [[0], [1]])


def steps_pieces(optimizer: Optimizer) -> bool:
    """Return whether stepping ranges of a flattened matrix is stepping the matrix."""
    flat = _matrix(0).flatten()
    return _steps_as_whole(optimizer, [flat[:_CUT], flat[_CUT:]], _matrix(0))


def steps_rows(optimizer: Optimizer) -> bool:
    """Return whether stepping slices of its parameters is stepping the parameters.

    The slices are along the dim that is outermost in memory: rows of a matrix, and where the
    optimizer has such parameters, ranges of a vector, and columns of a transposed matrix or of a
    single row.
    """
    held = [TensorSpec.of("", p) for group in optimizer.param_groups for p in group["params"]]
    matrix = _matrix(0)
    cuts = [(matrix, 0)]
    if any(len(spec.shape) == 1 for spec in held):
        cuts.append((matrix.flatten(), 0))
    if any(spec.outer_dim for spec in held):
        cuts.append((matrix, 1))
    return all(
        _steps_as_whole(optimizer, torch.split(whole, _ROWS, dim), whole, dim)
        for whole, dim in cuts
    )


def _steps_as_whole(
    optimizer: Optimizer, parts: Sequence[Tensor], whole: Tensor, dim: int = 0
) -> bool:
    expected, pieces = _train(optimizer, [whole]), _train(optimizer, parts)
    if expected is None or pieces is None:
        return False
    stepped = torch.cat(pieces, dim).view(whole.shape)
    return torch.allclose(expected[0], stepped, rtol=1e-5)


def _agrees(optimizer: Optimizer, parts: Sequence[Sequence[int]]) -> bool:
    """Return whether stepping parameters in turn is stepping them together."""
    together = _train(optimizer, [_matrix(0), _matrix(1)])
    apart = [_train(optimizer, [_matrix(index) for index in part]) for part in parts]
    if together is None or any(result is None for result in apart):
        return False
    flat = [tensor for result in apart for tensor in result or ()]
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(together, flat, strict=True))


def _train(optimizer: Optimizer, values: Sequence[Tensor]) -> list[Tensor] | None:
    """Step a copy of the optimizer over these values; None when it cannot."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    probe: Any = _copy(optimizer, parameters)
    if callable(getattr(probe, "train", None)):  # a schedule-free one steps in training mode only
        probe.train()
    try:
        for step in range(_STEPS):
            for parameter in parameters:
                parameter.grad = torch.cos(parameter.detach() * 3.0 + step)
            probe.step()
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
        return None
    return [parameter.detach() for parameter in parameters]


def _copy(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer with the same attributes and options, other parameters, and no state."""
    probe = object.__new__(type(optimizer))
    probe.__dict__.update(optimizer.__dict__)
    for name in ("step", "train", "eval"):  # put there later, they act on the original
        probe.__dict__.pop(name, None)
    group = dict(optimizer.param_groups[0]) if optimizer.param_groups else {}
    if "lr" in group:
        group["lr"] = _RATE  # a warm-up may start at zero, which hides every difference
    probe.param_groups = [{**group, "params": list(parameters)}]
    probe.state = defaultdict(dict)
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    return probe


def _matrix(index: int) -> Tensor:
    """Return a small matrix whose rows and columns differ in size."""
    rows, columns = _SHAPE
    ramp = torch.arange(rows * columns, dtype=torch.float32, device="cpu").view(_SHAPE)
    return torch.sin(ramp * (0.7 + index)) * (1.0 + 10.0 * index)
