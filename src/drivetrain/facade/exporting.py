"""One model's weights as the script sees them: a state dict, or files that others can read."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.errors import UsageError
from drivetrain.facade.core import Core, ModelEntry
from drivetrain.shards import TensorFacts

GATHERED_BYTES = 32 * 2**20
"""Parameters are gathered together while they fit into this: small ones share a collective."""


class Exporting(Core):
    """The exports of the Accelerator."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state on every rank's CPU, with the user's names. Collective.

        Every rank needs host memory for the whole model; ``save_model`` needs room for one tensor.
        Beyond that, sharded parameters are gathered a few at a time. Tied names share one tensor.
        """
        del unwrap  # names are the user's own either way
        entry = self._entry_of(model)
        module = _inner(entry)
        facts = entry.strategy.state_facts(module)
        copies: dict[Hashable, Tensor] = {}
        for batch in _batches({one.identity: one for one in facts}.values()):
            with entry.strategy.whole_state(module, [one.name for one in batch]) as state:
                for one in batch:
                    copies[one.identity] = state[one.name].to("cpu", copy=True)
        return {one.name: copies[one.identity] for one in facts}

    def dtensors(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the shards of a model's parameters as torch's DTensors, by name. Collective.

        For torch's distributed checkpoints and other tools that read them. They share the shards'
        memory: what is loaded into them is what the model computes with next.

        Raises:
            UsageError: the model's strategy does not keep rows of each parameter.
        """
        return self._entry_of(model).strategy.dtensors()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
        *,
        only_trainable: bool = False,
    ) -> None:
        """Write a model's weights in Hugging Face's layout: safetensors with an index. Collective.

        Tied weights are written once. Sharded parameters are gathered a few at a time: no process
        holds more than the largest of them, or ``GATHERED_BYTES``.

        Args:
            model: a prepared model.
            save_directory: gets ``model.safetensors``, or numbered files and their index.
            max_shard_size: bytes per file, as a number or a text such as ``"5GB"``.
            safe_serialization: must be True.
            only_trainable: leave out frozen parameters and buffers, as for an adapter.

        Raises:
            UsageError: nothing is left to write.
            CheckpointError: weights on the meta device, or the directory cannot be written.
        """
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; no pickles are written"
            )
        entry = self._entry_of(model)
        module = _inner(entry)
        facts = {one.name: one for one in entry.strategy.state_facts(module)}
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
                with entry.strategy.whole_state(module, wanted) as state:
                    for name in wanted:
                        yield name, state[name]

        checkpoint.write_export(Path(save_directory), plan, fetch, world=self.world)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object from the main process only.

        Args:
            obj: a mapping of tensors for safetensors, or anything for ``torch.save``.
            f: the file.
            safe_serialization: write safetensors.
        """
        if self.is_main_process:
            checkpoint.save(obj, f, safe_serialization=safe_serialization)


def _batches(facts: Iterable[TensorFacts]) -> Iterator[list[TensorFacts]]:
    """Yield them in order, as many at a time as may be gathered together."""
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


def _inner(entry: ModelEntry) -> nn.Module:
    """Return the module whose names are those of the user's own class."""
    module = entry.strategy.unwrap(entry.model)
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module
