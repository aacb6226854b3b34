"""Compares a user's plan with what was possible: what it names is divided so, or the run ends."""

from collections.abc import Collection, Mapping

from torch import nn

from drivetrain.errors import ConfigError
from drivetrain_megatron.tensor.derive import Derivation, is_named
from drivetrain_megatron.tensor.layers import is_linear
from drivetrain_megatron.tensor.plan import ATTENTION, COLUMN, ROW, VOCABULARY, NamedPlan

_KINDS = {"colwise": COLUMN, "rowwise": ROW, "vocab": VOCABULARY, "attention": ATTENTION}


def check_fulfilled(
    model: nn.Module,
    named: NamedPlan,
    vocabulary: Collection[str],
    blocks: Mapping[str, Derivation],
) -> None:
    """Refuse a plan of which something cannot be done.

    Args:
        model: the user's.
        named: what the user wants, by names of modules.
        vocabulary: names of the layers that are divided by words.
        blocks: what came of each block, by its name.

    Raises:
        ConfigError: names the first layer that is not divided as the plan says, and why.
    """
    done = _done(vocabulary, blocks)
    for name, style in named.styles.items():
        wanted = next((kind for kind, styles in _KINDS.items() if style in styles), None)
        if wanted is None or wanted in {done.get(n) for n in done if is_named(n, {name})}:
            continue
        if name in done:
            reason = f"its place in the model makes it {done[name]}"
        elif wanted == "vocab":
            reason = _no_vocabulary(model.get_submodule(name))
        else:
            reason = _whole(name, model.get_submodule(name), named, blocks)
        raise ConfigError(
            f"plan: expected {name!r} to be {style}, found that it cannot be: {reason}; change "
            "the plan, or leave this layer out of it"
        )


def _done(vocabulary: Collection[str], blocks: Mapping[str, Derivation]) -> dict[str, str]:
    """Return how each divided layer is divided, by its name."""
    done = dict.fromkeys(vocabulary, "vocab")
    for block, derivation in blocks.items():
        for group in derivation.plan.groups:
            done.update({_full(block, name): "colwise" for name in group.columns})
            done[_full(block, group.row)] = "rowwise"
        done.update({_full(block, name): "attention" for name in derivation.plan.attentions})
    return done


def _no_vocabulary(module: nn.Module) -> str:
    kind = type(module).__name__
    if not is_linear(module) and not isinstance(module, nn.Embedding):
        return f"it is of class {kind}, neither an embedding nor a linear layer"
    return (
        "it is no head that makes logits, nor an embedding of the same words, used by nothing "
        "else; where both share a weight, the plan must name both"
    )


def _whole(name: str, module: nn.Module, named: NamedPlan, blocks: Mapping[str, Derivation]) -> str:
    """Return why a layer stayed whole."""
    if not any(is_linear(m) or isinstance(m, nn.MultiheadAttention) for m in module.modules()):
        return f"it is of class {type(module).__name__}, which is no linear layer"
    layers = named.named(COLUMN | ROW)
    for block, derivation in blocks.items():
        if derivation.untried and f"{name}.".startswith(_full(block, "")):
            return derivation.untried
        if name in {_full(block, refused) for refused in derivation.refused}:
            return derivation.refused[name.removeprefix(_full(block, ""))]
        for group in derivation.groups:
            members = [_full(block, member) for member in (*group.columns, group.row)]
            if any(is_named(member, {name}) for member in members):
                missing = [member for member in members if not is_named(member, layers)]
                if missing:
                    return (
                        f"the plan leaves out {', '.join(map(repr, missing))}, and only together "
                        "can they be divided"
                    )
                return derivation.refused.get(group.row, "its group stays whole")
    return "it is in no block, or no other linear layer feeds it or is fed by it alone"


def _full(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name
