"""Finds the layers outside of blocks that are divided by words: embeddings and heads."""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from drivetrain.model.look import Look
from drivetrain.parts.blocks import NamedModule
from drivetrain_megatron.recording.calls import Calls
from drivetrain_megatron.tensor.linear import (
    computes_as_linear,
    features_of,
    is_linear,
    is_transposed,
)
from drivetrain_megatron.tensor.vocabulary import reason_against


def words_of(module: nn.Module) -> int:
    """Return how many words an embedding, or a layer that makes logits, is about."""
    return module.num_embeddings if isinstance(module, nn.Embedding) else features_of(module)[1]


def by_words(module: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters of such a module and their dims that count words."""
    for name, parameter in module.named_parameters(recurse=False):
        yield parameter, 1 if name == "weight" and is_transposed(module) else 0


def find_vocabulary(
    model: nn.Module,
    look: Look,
    calls: Calls,
    allowed: Callable[[str], bool],
    *,
    strict: bool,
) -> list[str]:
    """Return the layers outside of blocks that make logits, and the embeddings of the same words.

    A weight that something else uses, too, stays whole. So does an embedding that needs the whole
    weight, unless a strict plan names it: then dividing it is an error.
    """
    inside = tuple(f"{name}." for name, _ in calls.blocks)
    outer = [
        (name, module)
        for name, module in model.named_modules()
        if not f"{name}.".startswith(inside) and any(True for _ in module.parameters(False))
    ]
    embeddings = [(name, m) for name, m in outer if isinstance(m, nn.Embedding)]
    heads = [
        (name, m)
        for name, m in outer
        if is_linear(m) and any(features_of(m)[1] == e.num_embeddings for _, e in embeddings)
        if _ends_in_loss(look, name)
    ]
    rows = {features_of(module)[1] for _, module in heads}
    found = [*[(n, e) for n, e in embeddings if e.num_embeddings in rows], *heads]
    chosen = [(n, m) for n, m in found if allowed(n) and (strict or _can_be_cut(m))]
    return [name for name, module in chosen if _is_only_used_by(module, model, chosen, calls)]


def _can_be_cut(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return not reason_against(module)
    return not isinstance(module, nn.Linear) or computes_as_linear(module)


def _ends_in_loss(look: Look, name: str) -> bool:
    """Return whether neither a block nor a product uses the results of a layer's output.

    A layer in front of them is a projection, even if it has as many features as there are words.
    """
    ends = [call for call in look.modules if call.name == name]
    follows = {number for call in ends for number in call.outputs}
    first = min((call.operations.stop for call in ends), default=0)
    for operation in look.operations[first:]:
        if not follows.isdisjoint(operation.inputs):
            if operation.block is not None or operation.work:
                return False
            follows.update(operation.outputs)
    return True


def _is_only_used_by(
    module: nn.Module, model: nn.Module, chosen: Iterable[NamedModule], calls: Calls
) -> bool:
    """Whether a weight is used once by each of its chosen modules, and by nothing else."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    weight = module.weight
    owners = sum(1 for _, m in chosen if m.weight is weight)
    places = sum(1 for m in model.modules() for p in m.parameters(False) if p is weight)
    name = first[id(weight)]
    return owners == places and calls.uses[name] <= owners
