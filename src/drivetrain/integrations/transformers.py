"""``transformers.Trainer`` under any strategy: the Trainer keeps its loop, the strategy trains.

The Trainer talks to an Accelerator of Hugging Face; here it gets one of ours. A checkpoint holds,
beside the Trainer's own files, the folder ``drivetrain`` with the sharded state of an exact resume.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader
from transformers.trainer import SCHEDULER_NAME

from drivetrain.accelerator import Accelerator
from drivetrain.data import PreparedLoader, skip_first_batches
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.options import DistributedDataParallelKwargs, ProjectConfiguration
from drivetrain.integrations.token_scores import score_by_modules
from drivetrain.integrations.training_arguments import (
    accumulation_of,
    engine_of,
    join,
    loader_options,
    refuse_other_engines,
)
from drivetrain.runtime.gradient_state import GradientState

STATE_FOLDER = "drivetrain"
"""Folder of the sharded state inside of a Trainer's checkpoint."""

OPTIMIZER_FILE = "optimizer.pt"
"""File of the optimizer in a checkpoint of the Trainer alone."""


class TrainerWindow(GradientState):
    """An accumulation window whose ends the Trainer announces.

    Attributes:
        plugin_kwargs: the Trainer's ``gradient_accumulation_kwargs``.
    """

    plugin_kwargs: Mapping[str, Any] = MappingProxyType({})

    def _set_sync_gradients(self, sync: bool) -> None:
        self.sync_gradients = sync


class TrainerAccelerator(Accelerator):
    """The Accelerator with the further members that a Trainer reads.

    Attributes:
        accumulation: micro-batches per step in the configuration.
        window: the accumulation window.
        parallelism_config: None: the strategy lays out the ranks.
    """

    parallelism_config = None

    def _assemble(self, project: ProjectConfiguration, log_with: Any) -> None:
        self.accumulation = self.gradient_state.num_steps
        self.gradient_state = self.window = TrainerWindow(1)  # the Trainer divides losses itself
        super()._assemble(project, log_with)

    @property
    def _models(self) -> list[nn.Module]:
        return [entry.model for entry in self._prepared.models]

    @property
    def cell_size(self) -> int:
        """Number of ranks that share a batch."""
        return self.num_processes // self.mesh["dp"].size

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> PreparedLoader:
        """Divide one loader; checkpoints leave it out, since the Trainer counts batches itself."""
        loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        self._prepared.loaders.clear()
        return loader


class StrategyTraining:
    """The methods of a Trainer that a strategy changes; mixed into a class of Trainer."""

    args: Any
    accelerator: TrainerAccelerator
    model: nn.Module
    lr_scheduler: Any
    save_model: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whole: Mapping[str, torch.Tensor] | None = None
        self.save_model = self._gathering(self.save_model)
        if self.accelerator.cell_size > 1:
            score_by_modules(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator from the launch configuration and the training arguments.

        Raises:
            UsageError: the arguments choose an engine or a compilation of their own, or
                accumulate otherwise than the launch configuration.
        """
        refuse_other_engines(self.args, self.model)
        self.accelerator = TrainerAccelerator(
            **engine_of(self.args),
            mixed_precision=None
            if self.args.mixed_precision == "no"
            else self.args.mixed_precision,
            cpu=self.args.use_cpu or None,
            dataloader_config=loader_options(self.args),
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    bucket_cap_mb=self.args.ddp_bucket_cap_mb,
                    broadcast_buffers=self.args.ddp_broadcast_buffers,
                )
            ],
        )
        steps, more = accumulation_of(self.args, self.accelerator.accumulation)
        self.args.gradient_accumulation_steps = steps
        self.accelerator.window.plugin_kwargs = more
        join(self.args, self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics
        self.is_deepspeed_enabled = self.is_fsdp_enabled = False

    def get_tp_size(self) -> int:
        """Return the number of ranks that share a batch."""
        return self.accelerator.cell_size

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # The Trainer sums over all ranks and divides by those that share a batch. Our ``gather``
        # has counted these once already.
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        return items * self.get_tp_size() if isinstance(items, torch.Tensor) else items

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if type(self).compute_loss is not transformers.Trainer.compute_loss:  # type: ignore[attr-defined]
            # Losses of TRL read the model's outputs, for metrics, before backward.
            for model in self.accelerator._models:
                self.accelerator.strategy_of(model).share_outputs()
        with skipping_ours():
            super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    # --- saving and loading ---

    def _gathering(self, save_model: Callable[..., None]) -> Callable[..., None]:
        """Return a ``save_model`` that gathers first: it may go on with rank 0 alone."""

        @functools.wraps(save_model)
        def gathered(*args: Any, **kwargs: Any) -> None:
            self._whole = self._whole_state()
            try:
                save_model(*args, **kwargs)
            finally:
                self._whole = None

        return gathered

    def _whole_state(self) -> Mapping[str, torch.Tensor] | None:
        return self.accelerator.get_state_dict(self.model) if self.accelerator._models else None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None:
            state_dict = self._whole_state() if self._whole is None else self._whole
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_state(Path(output_dir) / STATE_FOLDER, overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = Path(checkpoint) / STATE_FOLDER
        if not state.is_dir():
            if (Path(checkpoint) / OPTIMIZER_FILE).exists():
                raise CheckpointError(
                    f"expected the folder {STATE_FOLDER} in {checkpoint}, found {OPTIMIZER_FILE} "
                    "of another Trainer; load its weights with from_pretrained, and start anew"
                )
            return
        self.accelerator.load_state(state)
        schedule = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(schedule)

    def _save_scaler(self, output_dir: str) -> None:
        """Leave the loss scale to the state of the run."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Leave the loss scale to the state of the run."""

    def _load_best_model(self) -> None:
        whole = self.accelerator.gathered(self.model) if self.accelerator._models else nullcontext()
        with whole:
            super()._load_best_model()  # type: ignore[misc]


def use_drivetrain(kind: type = transformers.Trainer) -> Any:
    """Return a class of Trainer that trains under the launched strategy.

    Args:
        kind: ``transformers.Trainer`` or a subclass, such as ``trl.SFTTrainer``.

    Raises:
        UsageError: the class makes an Accelerator of its own.
    """
    name = StrategyTraining.create_accelerator_and_postprocess.__name__
    if getattr(kind, name) is not getattr(transformers.Trainer, name):
        raise UsageError(
            f"expected a Trainer that leaves {name} to transformers, found {kind.__name__}, which "
            "makes an Accelerator of its own; take that method out"
        )
    return type(kind.__name__, (StrategyTraining, kind), {"__module__": kind.__module__})


Trainer = use_drivetrain()
"""``transformers.Trainer`` under the launched strategy."""


@contextmanager
def skipping_ours() -> Iterator[None]:
    """Context in which the Trainer's ``skip_first_batches`` knows our loaders."""
    module: Any = transformers.trainer
    theirs = module.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        ours = isinstance(loader, PreparedLoader)
        return (skip_first_batches if ours else theirs)(loader, num_batches)

    module.skip_first_batches = skip
    try:
        yield
    finally:
        module.skip_first_batches = theirs
