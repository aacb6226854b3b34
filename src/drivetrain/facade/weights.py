"""A model's whole weights, however a strategy divides them: in place, as a state dict, as files."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedObjects
from drivetrain.parts.naming import uncompiled
from drivetrain.runtime.world import World
from drivetrain.shards import Readable, TensorFacts

GATHERED_BYTES = 32 * 2**20
"""Parameters are gathered together while they fit into this: small ones share a collective."""


class WholeWeights:
    """The whole weights of one Accelerator's prepared models."""

    def __init__(self, prepared: PreparedObjects, world: World) -> None:
        self._prepared = prepared
        self._world = world

    @contextmanager
    def gathered(
        self,
        owner: nn.Module | Tensor | Iterable[Tensor],
        parameters: Sequence[nn.Parameter] | None,
    ) -> Iterator[None]:
        """Context in which parameters are whole, and may be changed. Collective."""
        if isinstance(owner, nn.Module):
            entry = self._prepared.model(owner)
            chosen = list(owner.parameters()) if parameters is None else list(parameters)
            with entry.strategy.gathered(chosen):
                yield
            return
        given = [owner] if isinstance(owner, Tensor) else list(owner)
        known = {key for entry in self._prepared.models for key in entry.names}
        if any(id(parameter) not in known for parameter in given):
            raise UsageError(
                "expected parameters of prepared models, found another tensor; take them from "
                "the model that prepare() returned"
            )
        with ExitStack() as stack:
            for entry in self._prepared.models:
                own = [p for p in given if id(p) in entry.names and isinstance(p, nn.Parameter)]
                if own:
                    stack.enter_context(entry.strategy.gathered(own))
            yield

    @contextmanager
    def inference(self, model: nn.Module) -> Iterator[nn.Module]:
        """Context in which the user's own module evaluates without gradients. Collective."""
        entry = self._prepared.model(model)
        inner = entry.module
        training = [module for module in inner.modules() if module.training]
        with entry.strategy.inference(inner), torch.no_grad():
            inner.eval()
            try:
                yield inner
            finally:
                for module in training:
                    module.training = True

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state on every rank's CPU, by the user's names. Collective."""
        module, owner = self._readable(model)
        facts = owner.state_facts(module)
        copies: dict[Hashable, Tensor] = {}
        for batch in _batches({one.identity: one for one in facts}.values()):
            with owner.whole_state(module, [one.name for one in batch]) as state:
                for one in batch:
                    copies[one.identity] = state[one.name].to("cpu", copy=True)
        return {one.name: copies[one.identity] for one in facts}

    def save(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str,
        safe_serialization: bool,
        only_trainable: bool,
    ) -> None:
        """Write a model's weights in Hugging Face's layout; see ``save_model``. Collective."""
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; no pickles are written"
            )
        module, owner = self._readable(model)
        facts = {one.name: one for one in owner.state_facts(module)}
        if only_trainable:
            facts = {name: one for name, one in facts.items() if one.trainable}
            if not facts:
                raise UsageError(
                    f"expected trainable parameters in {type(module).__name__} for "
                    "only_trainable=True, found none; export all of it without"
                )
        plan = checkpoint.plan_export(facts.values(), max_shard_size)

        def fetch(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for batch in _batches(facts[name] for name in names):
                wanted = [one.name for one in batch]
                with owner.whole_state(module, wanted) as state:
                    for name in wanted:
                        yield name, state[name]

        checkpoint.write_export(Path(save_directory), plan, fetch, world=self._world)

    def _readable(self, model: nn.Module) -> tuple[nn.Module, Readable]:
        """Return the user's uncompiled module, and who reads whole tensors of it.

        Every rank has all of a model that was not prepared, an average of weights for example.

        Raises:
            UsageError: the model has parameters of a prepared one, which may be divided.
        """
        known = {key for entry in self._prepared.models for key in entry.names}
        if self._prepared.has(model) or any(id(one) in known for one in model.parameters()):
            entry = self._prepared.model(model)
            return uncompiled(entry.module), entry.strategy
        return uncompiled(model), Readable()


def _batches(facts: Iterable[TensorFacts]) -> Iterator[list[TensorFacts]]:
    """Yield tensors in order, as many at a time as fit into ``GATHERED_BYTES``."""
    batch: list[TensorFacts] = []
    filled = 0
    for one in facts:
        if batch and filled + one.nbytes > GATHERED_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(one)
        filled += one.nbytes
    if batch:
        yield batch
