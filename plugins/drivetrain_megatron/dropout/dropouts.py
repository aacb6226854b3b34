"""The places where a model drops elements, and how the ranks divide each dropout's input."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch import Tensor, nn

from drivetrain.collectives import Communicator
from drivetrain.collectives.solo import SoloCommunicator
from drivetrain.errors import UsageError
from drivetrain.model.look import Look
from drivetrain_megatron.dropout.functions import Dropping, drops_elements
from drivetrain_megatron.tensor.attention import attach_heads, keep_padded
from drivetrain_megatron.tensor.behavior import behavior_of
from drivetrain_megatron.tensor.partition import Partition
from drivetrain_megatron.tensor.sequence import Edges, TokenShards


@dataclass(frozen=True, slots=True)
class Site:
    """One place in the code that drops elements.

    Attributes:
        module: name of the innermost module that runs.
        index: how many dropouts the same call of the module had before.
    """

    module: str
    index: int


DropoutLayout: TypeAlias = Partition | TokenShards | None
"""What of a tensor a rank has: a share of heads or features, of tokens, or everything."""


@dataclass(slots=True)
class Layouts:
    """How the ranks divide the inputs of a model's dropouts.

    Attributes:
        blocks: names of the divided blocks; outside of them every rank has everything.
        found: by site inside of blocks.
    """

    blocks: tuple[str, ...] = ()
    found: dict[Site, DropoutLayout] = field(default_factory=dict)

    def add(self, block: str, found: Mapping[Site, DropoutLayout]) -> None:
        """Add the layouts of a block, whose sites have names inside of the block."""
        self.blocks = (*self.blocks, block)
        for site, layout in found.items():
            self.found[Site(f"{block}.{site.module}".strip("."), site.index)] = layout


def partition_of(site: Site, layouts: Layouts, ranks: Communicator) -> Partition | None:
    """Return how the ranks divide the input of a dropout at this moment.

    Raises:
        UsageError: the site is inside of a block and dropped nothing when the block was tried.
    """
    layout = layouts.found.get(site)
    if isinstance(layout, TokenShards):
        return layout.partition(ranks.size)
    if layout is None and site not in layouts.found and ranks.size > 1:
        inside = (b for b in layouts.blocks if f"{site.module}.".startswith(f"{b}." if b else ""))
        if (block := next(inside, None)) is not None:
            raise UsageError(
                f"expected dropout {site.index} of {site.module!r} to be one that was seen when "
                f"block {block!r} was tried, found a new one; let the example inputs reach it, and "
                "set its probability above 0 before prepare()"
            )
    return layout


class DropoutRecorder:
    """Notes the inputs of a module's dropouts, and drops nothing.

    Args:
        root: hooks stay on its modules until ``close``.
    """

    def __init__(self, root: nn.Module) -> None:
        self.seen: dict[Site, list[Tensor]] = defaultdict(list)
        self._running: list[tuple[str, Iterator[int]]] = []
        self._handles = []
        for name, module in root.named_modules():
            begin = module.register_forward_pre_hook(self._beginning(name), prepend=True)
            end = module.register_forward_hook(self._end, always_call=True)
            self._handles += [begin, end]

    def watching(self) -> Dropping:
        """Return the context in which dropouts are noted."""
        return Dropping(self._note)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _beginning(self, name: str) -> Any:
        def begin(module: nn.Module, args: Any) -> None:
            self._running.append((name, iter(range(1 << 30))))

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _note(self, x: Tensor, p: float) -> Tensor:
        name, count = self._running[-1]
        self.seen[Site(name, next(count))].append(x.detach().clone())
        return x


def dropping_modules(model: nn.Module, look: Look) -> frozenset[str]:
    """Return the names of modules that drop elements in training.

    Args:
        model: whole, as it was before it was compiled.
        look: at a forward of it in training.
    """
    inside = {name for name, m in model.named_modules() if _is_attention(m)}
    seen = {each.module for each in look.operations if drops_elements(each)}
    return frozenset(seen | inside)


def drops(module: nn.Module) -> bool:
    """Whether a module of torch drops elements in training."""
    return (isinstance(module, nn.Dropout) and module.p > 0.0) or _is_attention(module)


def open_attentions(model: nn.Module, ranks: Communicator) -> None:
    """Let attentions that drop weights, and are whole on this rank, compute where masks reach them.

    Torch's own function does everything inside. Attentions with options that ours has not stay.
    """
    solo = SoloCommunicator(_alone(ranks), ranks.traffic, ranks.timeout)
    found = [m for m in model.modules() if _is_attention(m) and behavior_of(m) is None]
    if found:
        keep_padded(model)
    for module in found:
        attach_heads(module, Edges(solo))


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is an attention of torch that drops weights, and that ours can replace."""
    return (
        isinstance(module, nn.MultiheadAttention)
        and module.dropout > 0.0
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _alone(ranks: Communicator) -> Any:
    axis = ranks.axis
    at = axis.rank
    return replace(
        axis, size=1, rank=0, ranks=axis.ranks[at : at + 1], hosts=axis.hosts[at : at + 1]
    )
