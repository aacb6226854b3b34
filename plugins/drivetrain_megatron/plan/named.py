"""Plans in words, of users and of models: how names are matched, and whether a plan was fulfilled.

Hugging Face models bring such plans (``base_model_tp_plan`` of their configuration); they load as
they are. A plan says which layers may be divided, and in which style. Which layers belong together,
and where heads begin, is found from the structure. A user's plan is fulfilled, or the run ends
(``check_fulfilled``); a model's own plan only allows.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from drivetrain.errors import ConfigError
from drivetrain.log import get_logger
from drivetrain.model.modules import clean_name, uncompiled
from drivetrain_megatron.plan.derive import Derivation, is_named
from drivetrain_megatron.tensor.linear import is_linear

logger = get_logger(__name__)

COLUMN = frozenset({"colwise", "packed_colwise"})

ROW = frozenset({"rowwise", "packed_rowwise"})

VOCABULARY = frozenset({"vocab", "embedding_rowwise", "colwise_gather_output", "colwise_rep"})
"""The rows of embeddings, and of the layer that makes logits, which stay divided until needed."""

WHOLE = frozenset(
    {
        "replicate",
        "sequence",
        "sequence_parallel",
        "replicated_with_grad_allreduce",
        "all_reduce",
    }
)
"""What stays whole on every rank. Whether gradients must be summed is found by the trial."""

ATTENTION = frozenset({"attention"})
"""``nn.MultiheadAttention``, by heads."""

STYLES = COLUMN | ROW | VOCABULARY | WHOLE | ATTENTION


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A plan by names of modules: a style for each, and who made the plan, for messages."""

    source: str
    styles: Mapping[str, str] = field(default_factory=dict)

    def named(self, styles: Iterable[str]) -> set[str]:
        """Return the modules of any of these styles."""
        wanted = set(styles)
        return {name for name, style in self.styles.items() if style in wanted}

    def allowed_in(self, block: str, *, strict: bool) -> set[str] | None:
        """Return the names, inside of a block, of the layers that may be divided; None for all.

        A model's plan forbids nothing where it is silent: that of a text model, in a vision tower.
        """
        prefix = f"{block}." if block else ""
        inside = {name: style for name, style in self.styles.items() if name.startswith(prefix)}
        if not inside and not strict:
            return None
        divided = COLUMN | ROW | ATTENTION
        return {name.removeprefix(prefix) for name, style in inside.items() if style in divided}


def users_plan(model: nn.Module, patterns: Mapping[str, str]) -> NamedPlan:
    """Return the user's plan by full names.

    Args:
        model: the user's.
        patterns: patterns of module names, ``*`` for any text, and a style for each; where several
            match, the last one counts.

    Raises:
        ConfigError: an unknown style, or a pattern that matches no module.
    """
    unknown = {pattern: style for pattern, style in patterns.items() if style not in STYLES}
    if unknown:
        pattern, style = next(iter(unknown.items()))
        raise ConfigError(
            f"plan: expected one of the styles {', '.join(sorted(STYLES))}, found {style!r} for "
            f"{pattern!r}{_nearest(style, STYLES)}"
        )
    names = _names(model)
    styles: dict[str, str] = {}
    for pattern, style in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"plan: expected a pattern of module names, found {pattern!r}, which matches none "
                f"of the {len(names)} modules of {type(model).__name__}"
                f"{_nearest(pattern, names)}; write * for any text"
            )
        styles.update(dict.fromkeys(matching, style))
    return NamedPlan("plan", styles)


def models_plan(model: nn.Module) -> NamedPlan | None:
    """Return the plan of the model itself; None without a readable plan.

    Hugging Face models carry it as ``_tp_plan``, by full names. A plan with styles that are not
    known here (experts, say) does not count, and a line says so.
    """
    patterns: Any = getattr(model, "_tp_plan", None)
    if not isinstance(patterns, Mapping) or not patterns:
        return None
    unknown = sorted({str(style) for style in patterns.values() if style not in STYLES})
    if unknown:
        logger.announce(
            f"the plan that {type(model).__name__} brings is not used, it has the styles "
            f"{', '.join(unknown)}: what can be divided is found from the structure"
        )
        return None
    names = _names(model)
    styles = {
        name: style
        for pattern, style in patterns.items()
        for name in names
        if fnmatchcase(name, pattern)
    }
    if not set(styles.values()) & (COLUMN | ROW | ATTENTION):
        return None  # the head alone: the plan is silent about blocks
    return NamedPlan(f"the plan of {type(model).__name__}", styles)


def _names(model: nn.Module) -> list[str]:
    """Return the names of all modules inside of a model, as before it was compiled."""
    return [clean_name(name) for name, _ in uncompiled(model).named_modules() if name]


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return the hint at the end of a message: the known word, or module, with the nearest end."""
    by_last = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(word.rpartition(".")[2], list(by_last), n=1, cutoff=0.5)
    return f"; the nearest is {by_last[near[0]]!r}" if near else ""


_KINDS = {"colwise": COLUMN, "rowwise": ROW, "vocab": VOCABULARY, "attention": ATTENTION}


def check_fulfilled(
    model: nn.Module,
    named: NamedPlan,
    vocabulary: Collection[str],
    blocks: Mapping[str, Derivation],
) -> None:
    """Refuse a user's plan of which something cannot be done.

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
        for each in derivation.plan.alone:
            done[_full(block, each.layer)] = "rowwise" if each.by_rows else "colwise"
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
