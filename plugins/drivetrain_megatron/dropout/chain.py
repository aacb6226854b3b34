"""Dropout of a model that ranks share: equal masks where activations are equal.

Every module that drops gets masks that count (``masks``) in place of torch's. The key of a call
comes from the state of a chain: a forward starts it from (seed, data-parallel rank, number of the
forward), every dropout and every block moves it on. The chain is kept as the seed of torch's
default CPU generator. Whoever computes a block again in backward (our recompute, torch's
checkpoint) brings back the state of this generator, and so the masks. After a block the chain does
not depend on the dropouts inside: pipeline stages, which skip the blocks of others, agree.

Everything else that a forward draws comes from generators that are seeded alike on all ranks of a
cell; afterwards they are as before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from drivetrain.collectives import Communicator
from drivetrain.data.examples import ExampleBatch
from drivetrain.errors import UsageError
from drivetrain.log import get_logger
from drivetrain.parts.blocks import NamedModule
from drivetrain.parts.naming import clean_name, uncompiled
from drivetrain.runtime import rng
from drivetrain_megatron.dropout.dropouts import (
    Dropping,
    Layouts,
    Site,
    dropping_modules,
    drops,
    open_attentions,
    partition_of,
)
from drivetrain_megatron.dropout.masks import combine, keep_mask, mix
from drivetrain_megatron.recording.calls import (
    ExampleInputs,
    example_inputs,
    inputs_of_user,
    uncalled_blocks,
)
from drivetrain_megatron.recording.proxy import StageProxy
from drivetrain_megatron.tensor.behavior import Surrounding, release, surround

logger = get_logger(__name__)

_CHECK_BITS = 16


_AFTER_SITE, _AFTER_BLOCK = 1, 2


class MaskSource(NamedTuple):
    """Tells the masks of different runs (seed) and replicas (data-parallel rank) apart."""

    seed: int
    replica: int


class Dropout:
    """The masks of one prepared model.

    Attributes:
        layouts: how the ranks divide the inputs of dropouts in blocks; all else is whole on each.
        forwards: how many have dropped elements so far.
    """

    def __init__(self, source: MaskSource, ranks: Communicator) -> None:
        self.layouts = Layouts()
        self._source = source
        self._ranks = ranks
        self._names: frozenset[str] = frozenset()
        self.forwards = 0
        self._counting = True
        self._numbered = False
        self._dropped = False
        self._left_out = False
        self._modules: list[nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._entered: dict[nn.Module, int] = {}

    def find(
        self,
        model: nn.Module,
        inputs: ExampleInputs | None,
        examples: Sequence[ExampleBatch] = (),
    ) -> None:
        """Note which modules drop; the model is whole yet, and is not changed.

        Without inputs, batches of loaders are tried, and guesses. If none is accepted, functional
        dropout remains torch's on one rank, and counts in the whole model on several.
        """
        model = uncompiled(model)
        try:
            given = example_inputs(model, examples) if inputs is None else inputs
        except UsageError:
            if inputs_of_user(model) is not None:
                raise
            self._names = frozenset(name for name, m in model.named_modules() if drops(m))
            if self._ranks.size > 1:
                self._names |= {""}  # whatever is random in it must be equal on all of them
            else:
                logger.announce(
                    "dropout: only nn.Dropout takes masks that count: no inputs were found with "
                    f"which {type(model).__name__} can be called; prepare it together with its "
                    "loader, or set model.example_inputs"
                )
        else:
            self._names = dropping_modules(model, given.look)
            for block, like in uncalled_blocks(given.look, model).items():
                inside = (name for name in self._names if f"{name}.".startswith(f"{like}."))
                self._names |= {block + name.removeprefix(like) for name in inside}

    def attach(self, model: nn.Module, *, counting: bool = True) -> None:
        """Let modules of a model drop by these masks; a model that drops nothing is left alone.

        Args:
            model: divided; its forward is one forward of the chain.
            counting: whether forwards are counted here; if not, whoever runs them numbers them.
        """
        self._counting = counting
        if not self._names:
            return
        model = uncompiled(model)
        open_attentions(model, self._ranks)
        for name, module in model.named_modules():
            if name in self._names or isinstance(module, nn.Dropout):
                surround(module, partial(_Masked, name=clean_name(name), dropout=self))
                self._modules.append(module)
        surround(model, partial(_Chained, dropout=self))
        self._modules.append(model)

    def follow(self, blocks: Iterable[NamedModule]) -> None:
        """Make the chain independent of the dropouts inside of these blocks."""
        for _, block in blocks if self._names else ():
            self._handles.append(block.register_forward_pre_hook(self._enter_block))
            self._handles.append(block.register_forward_hook(self._leave_block))

    @contextmanager
    def forward(self, number: int | None = None) -> Iterator[None]:
        """Context of one forward of the model, which begins a chain.

        Without a number from ``take`` the number is that of the forward around, else the next. The
        next number is used up by a forward that drops something, so not in evaluation.
        """
        if self._numbered or not self._trains():
            yield
            return
        self._numbered, self._dropped = number is not None, False
        own = self.forwards if number is None else number
        state = combine(self._source.seed, self._source.replica, own)
        try:
            with rng.fork(_packed(state)):
                yield
        finally:
            self._numbered = False
            self.forwards += self._counting and self._dropped and not self._left_out

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of forwards in which nothing is dropped; they are not counted."""
        self._left_out, before = True, self._left_out
        try:
            yield
        finally:
            self._left_out = before

    def take(self, count: int) -> int:
        """Return the number of the first of some forwards; in evaluation they do not count."""
        first = self.forwards
        self.forwards += count * self._trains()
        return first

    def _trains(self) -> bool:
        return any(module.training for module in self._modules)

    def key(self) -> int:
        """Return the key of the next dropout.

        Raises:
            UsageError: ranks could draw different masks, because no forward of the model runs.
        """
        state = torch.initial_seed()
        if not _is_ours(state):
            if self._ranks.size > 1:
                raise UsageError(
                    "expected dropout inside of a forward of the prepared model, or where it is "
                    "computed again in backward from the same random state, found another state "
                    f"of torch's CPU generator on rank {self._ranks.rank}; call the model itself, "
                    "not one of its modules, do not seed inside of it, and leave checkpoint's "
                    "preserve_rng_state=True"
                )
            return int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        _set(combine(state, _AFTER_SITE))
        return mix(state)

    def drop(self, site: Site, x: Tensor, p: float) -> Tensor:
        """Return this rank's tensor without the elements dropped with probability p, others scaled.

        Raises:
            UsageError: nothing is known of how the ranks divide ``x``.
        """
        key = self.key()
        if isinstance(x, StageProxy) or self._left_out:
            return x  # its values are on another stage, or a trial is under way
        self._dropped = True
        if p == 1.0:
            return x * 0.0
        partition = partition_of(site, self.layouts, self._ranks)
        rank = self._ranks.rank
        with torch.no_grad():
            keep = keep_mask(key, x.shape, p, partition=partition, rank=rank, device=x.device)
        return x * keep * (1.0 / (1.0 - p))

    def close(self) -> None:
        """Give modules their own dropout back."""
        for handle in self._handles:
            handle.remove()
        for module in self._modules:
            release(module)
        self._handles, self._modules = [], []

    def _enter_block(self, module: nn.Module, args: Any) -> None:
        self._entered[module] = torch.initial_seed()

    def _leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self._entered.pop(module, 0)
        if _is_ours(state):
            _set(combine(state, _AFTER_BLOCK))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Dropout":
        return self  # copies of the model drop as it does


@dataclass(frozen=True)
class _Chained(Surrounding):
    """A model whose forward is one forward of a ``Dropout``; a stage's, of each micro-batch."""

    dropout: Dropout

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute as the model does."""
        with self.dropout.forward():
            return self.inner.forward(module, *args, **kwargs)


@dataclass(frozen=True)
class _Masked(Surrounding):
    """A module that drops by masks of a ``Dropout``."""

    name: str
    dropout: Dropout

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute as the module does; evaluation costs nothing."""
        if not module.training:
            return self.inner.forward(module, *args, **kwargs)
        with Dropping(self._counted()):
            return self.inner.forward(module, *args, **kwargs)

    def _counted(self) -> Callable[[Tensor, float], Tensor]:
        """Return the function that drops at the first, second, … site of this call."""
        sites = 0

        def drop(x: Tensor, p: float) -> Tensor:
            nonlocal sites
            sites += 1
            return self.dropout.drop(Site(self.name, sites - 1), x, p)

        return drop


def _packed(state: int) -> int:
    """Return a seed with the upper bits of a state, and check bits below."""
    upper = state >> _CHECK_BITS
    return upper << _CHECK_BITS | _check(upper)


def _is_ours(seed: int) -> bool:
    return _check(seed >> _CHECK_BITS) == seed % (1 << _CHECK_BITS)


def _check(upper: int) -> int:
    return combine(upper, _CHECK_BITS) % (1 << _CHECK_BITS)


def _set(state: int) -> None:
    torch.default_generator.manual_seed(_packed(state))
