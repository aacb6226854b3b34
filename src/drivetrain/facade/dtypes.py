"""Which dtypes a prepared model really has: checked against the policy, and said in one line."""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from drivetrain.cost import ModelSpec, TensorSpec
from drivetrain.errors import ConfigError
from drivetrain.facade.core import ModelEntry
from drivetrain.parts.naming import clean_name, named_parameters
from drivetrain.runtime.precision import Precision, dtype_word


def given_parameters(model: nn.Module) -> list[TensorSpec]:
    """Describe a model's parameters as the user gave them."""
    return list(ModelSpec.of(model).parameters)


def check_dtypes(entry: ModelEntry, given: Sequence[TensorSpec], precision: Precision) -> None:
    """Raise when a strategy did not do what the policy says.

    Args:
        entry: the prepared model.
        given: its parameters before.
        precision: the policy.

    Raises:
        ConfigError: names the first parameter that forward reads, or an optimizer updates, in
            another dtype.
    """
    specs = {clean_name(spec.name): spec for spec in given}
    for name, parameter in named_parameters(entry.strategy.unwrap(entry.model)).items():
        if name in specs:
            expected = precision.forward_dtype(specs[name].dtype, specs[name].shape)
            _refuse(entry, "param", name, expected, parameter.dtype)
    names = entry.held_names()
    for group in (group for optimizer in entry.optimizers for group in optimizer.param_groups):
        for parameter in group["params"]:
            spec = specs.get(names.get(id(parameter), ""))
            if spec is not None:
                expected = precision.master_dtype(spec.dtype, spec.shape)
                _refuse(entry, "master", spec.name, expected, parameter.dtype)


def describe_dtypes(
    model: nn.Module, given: Sequence[TensorSpec], precision: Precision, *, autocast: bool
) -> str:
    """Return one line with the dtypes of a model, and how many parameters have each.

    Args:
        model: for its name.
        given: its parameters as the user gave them.
        precision: the policy.
        autocast: whether forward computes in the policy's dtype.
    """
    elements: Counter[torch.dtype] = Counter()
    tensors: Counter[torch.dtype] = Counter()
    for spec in given:
        dtype = precision.forward_dtype(spec.dtype, spec.shape)
        elements[dtype] += spec.numel
        tensors[dtype] += 1
    order = [dtype for dtype, _ in elements.most_common()]
    param = " and ".join(
        f"{dtype_word(dtype)} ({elements[dtype]:,} in {tensors[dtype]:,})" for dtype in order
    )
    compute = [precision.compute] if autocast and precision.compute else order
    trained = [spec for spec in given if spec.trainable]
    reduce = (
        precision.reduce_dtype(precision.forward_dtype(spec.dtype, spec.shape)) for spec in trained
    )
    master = (precision.master_dtype(spec.dtype, spec.shape) for spec in trained)
    return (
        f"precision of {type(model).__name__}: param {param}, compute {_words(compute)}, "
        f"reduce {_words(reduce)}, master {_words(master)}"
    )


def _words(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(dict.fromkeys(map(dtype_word, dtypes))) or "none"


def _refuse(
    entry: ModelEntry, key: str, name: str, expected: torch.dtype, found: torch.dtype
) -> None:
    if found is not expected:
        raise ConfigError(
            f"{type(entry.strategy).__name__}: expected {dtype_word(expected)} for {name}, as "
            f"dtypes.{key} says, found {dtype_word(found)}; the strategy does not honour it: take "
            f"another strategy, or leave dtypes.{key} out"
        )
