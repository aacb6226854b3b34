"""One model's weights as the script sees them: a state dict, or files that others can read."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from drivetrain import checkpoint
from drivetrain.errors import UsageError
from drivetrain.facade.core import Core, ModelEntry


class Exporting(Core):
    """The exports of the Accelerator."""

    @contextmanager
    def gathered(
        self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None
    ) -> Iterator[None]:
        """Context in which parameters are whole on every rank, for reading and surgery. Collective.

        Args:
            model: a prepared model.
            parameters: which of its parameters; None means all.
        """
        entry = self._entry_of(model)
        chosen = list(model.parameters()) if parameters is None else list(parameters)
        with entry.strategy.gathered(chosen):
            yield

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the whole model's state on the CPU, with the user's names. Collective."""
        del unwrap  # names are the user's own either way
        entry = self._entry_of(model)
        inner = _inner(entry)
        with entry.strategy.gathered(list(inner.parameters())):
            return {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in inner.state_dict().items()
                if isinstance(tensor, Tensor)
            }

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights in Hugging Face's layout: safetensors with an index. Collective.

        Tied weights are written once; no process holds more than one file's weights at a time.

        Args:
            model: a prepared model.
            save_directory: gets ``model.safetensors``, or numbered files and their index.
            max_shard_size: bytes per file, as a number or a text such as ``"5GB"``.
            safe_serialization: must be True.

        Raises:
            CheckpointError: weights on the meta device, or the directory cannot be written.
        """
        if not safe_serialization:
            raise UsageError(
                "expected safe_serialization=True, found False; no pickles are written"
            )
        entry = self._entry_of(model)
        inner = _inner(entry)
        state = inner.state_dict(keep_vars=True)
        described = [
            checkpoint.ExportTensor.of(name, tensor)
            for name, tensor in state.items()
            if isinstance(tensor, Tensor)
        ]
        plan = checkpoint.plan_export(described, max_shard_size)

        def fetch(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            held = [state[name] for name in names if isinstance(state[name], nn.Parameter)]
            with entry.strategy.gathered(held):
                for name in names:
                    yield name, state[name].detach()

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


def _inner(entry: ModelEntry) -> nn.Module:
    """Return the module whose names are those of the user's own class."""
    module = entry.strategy.unwrap(entry.model)
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module
