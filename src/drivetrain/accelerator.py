"""The facade: one small object that an ordinary training loop talks to.

It delegates every verb to the strategy of the model at hand and asks no strategy who it is. The
facets it is made of stand in ``drivetrain.facade``, one idea a file.
"""

import gc
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from drivetrain.errors import UsageError
from drivetrain.facade.agreement import agree
from drivetrain.facade.checkpointing import Checkpointing
from drivetrain.facade.exporting import Exporting
from drivetrain.facade.forward import restore_forward
from drivetrain.facade.gathering import Gathering
from drivetrain.facade.logging import Logging
from drivetrain.facade.options import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    Handlers,
    ProjectConfiguration,
)
from drivetrain.facade.recomputing import Recomputing
from drivetrain.facade.settings import Arguments, StrategyChoice, settle
from drivetrain.facade.whole import Whole
from drivetrain.log import get_logger
from drivetrain.runtime.gradient_state import GradientState
from drivetrain.runtime.world import World
from drivetrain.tracking import Trackers

logger = get_logger(__name__)


class Accelerator(Recomputing, Gathering, Checkpointing, Exporting, Whole, Logging):
    """Runs an ordinary PyTorch loop under any strategy.

    Names and arguments follow Hugging Face Accelerate. Nothing about it is global: several
    Accelerators, each with several models, live in one process.

    Args:
        strategy: name, or name and options, of the strategy; None takes the configuration's.
        config: a YAML file or a mapping with the configuration; values given here in code win.
        mixed_precision: ``no``, ``bf16`` or ``fp16``.
        gradient_accumulation_steps: micro-batches per optimizer step.
        cpu: compute on the CPU even when there is an accelerator.
        device_placement: move models and batches to the rank's device.
        split_batches: divide a loader's batch over the ranks instead of giving one to each.
        dataloader_config: all options of loaders.
        gradient_accumulation_plugin: all options of accumulation.
        rng_types: generators that follow rank 0 at the start of each epoch.
        log_with: names or objects of experiment trackers, or ``"all"``.
        project_dir: root folder of checkpoints and logs.
        project_config: all options of that folder.
        step_scheduler_with_optimizer: False steps schedulers on every call.
        kwargs_handlers: option objects, one of each class.

    Raises:
        ConfigError: a wrong configuration, or code and command line contradict each other.
        PreflightError: the ranks cannot find each other.
        RankMismatchError: the ranks have different configurations.
    """

    def __init__(  # noqa: PLR0913 - the arguments of Accelerate
        self,
        *,
        strategy: StrategyChoice | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
    ) -> None:
        handlers = Handlers.of(kwargs_handlers)
        arguments = Arguments(
            strategy=strategy,
            config=config,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            split_batches=split_batches,
            dataloader=dataloader_config,
            accumulation=gradient_accumulation_plugin,
        )
        resolved = settle(arguments, handlers)
        self._owns_group = not dist.is_initialized()
        world = World.discover(
            cpu=resolved.run.launch.device == "cpu",
            backend=handlers.process_group.backend,
            timeout=timedelta(seconds=resolved.run.launch.timeout_s),
        )
        shown = [f"{key} = {value}" for key, value, _ in resolved.rows()]
        agree(world, "the configuration", [line for line in shown if "node_rank" not in line])
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin()
        super().__init__(
            resolved,
            world,
            handlers,
            GradientState(
                resolved.run.accumulation,
                sync_with_dataloader=plugin.sync_with_dataloader,
                sync_each_batch=plugin.sync_each_batch,
            ),
            _project(project_config, project_dir),
            device_placement=device_placement,
        )
        self.even_batches = resolved.run.data.even_batches
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = tuple(rng_types) if rng_types is not None else ("generator",)
        self._trackers = Trackers(
            log_with, logging_dir=self.logging_dir, is_main=self.is_main_process
        )

    @property
    def mixed_precision(self) -> str:
        """The precision of the run: no, bf16 or fp16."""
        return self.precision.name

    @property
    def native_amp(self) -> bool:
        """Whether forward computes in another dtype than the parameters'."""
        return self.precision.compute is not None

    @property
    def state(self) -> "Accelerator":
        """The run's state; an Accelerator holds it itself."""
        return self

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is divided over the ranks."""
        return self.config.run.data.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 alone reads and sends."""
        return self.config.run.data.dispatch_batches

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders know their position: always."""
        return True

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the shuffle order derives from seed and epoch."""
        return self.config.run.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.config.run.data.non_blocking

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the user's own module.

        Args:
            model: a prepared model; another one comes back as it is.
            keep_fp32_wrapper: False gives forward back as it was before prepare().
            keep_torch_compile: False returns the module inside a compiled one.
        """
        for entry in self._entries:
            if entry.model is model:
                model = entry.strategy.unwrap(model)
        if not keep_fp32_wrapper:
            restore_forward(model)
        inner = getattr(model, "_orig_mod", None)
        return inner if isinstance(inner, nn.Module) and not keep_torch_compile else model

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything prepared and empty the device's cache.

        Returns:
            A None for each object, so that ``model, optimizer = accelerator.free_memory(model,
            optimizer)`` drops the script's references too.

        Raises:
            CheckpointError: the save in the background failed; all is forgotten even so.
        """
        try:
            self._background.close()
        finally:
            self._forget()
        return [None for _ in objects]

    def _forget(self) -> None:
        for entry in self._entries:
            entry.close()
        self._stop_recomputing()
        for kept in (
            self._entries,
            self._models,
            self._optimizers,
            self._schedulers,
            self._dataloaders,
            self._bound,
        ):
            kept.clear()
        self._constructions = ()
        self._last_run = None
        self.step = 0
        gc.collect()
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def clear(self, *objects: Any) -> list[None]:
        """Do what ``free_memory`` does."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """Finish the trackers, take the strategies off, and leave the process group.

        Raises:
            CheckpointError: the save in the background failed; all the rest is done.
        """
        try:
            self._trackers.finish()
            self.free_memory()
        finally:
            if self._owns_group and dist.is_initialized():
                dist.destroy_process_group()

    def __repr__(self) -> str:
        return (
            f"Accelerator(strategy={self.config.strategy!r}, {self.mesh!r}, "
            f"rank {self.process_index} of {self.num_processes} on {self.device}, "
            f"precision {self.precision})"
        )


def _project(
    config: ProjectConfiguration | None, project_dir: str | Path | None
) -> ProjectConfiguration:
    config = config or ProjectConfiguration()
    if project_dir is not None:
        if config.project_dir not in (None, project_dir):
            raise UsageError(
                f"expected one project_dir, found {project_dir} and {config.project_dir} in "
                "project_config; give it once"
            )
        config.project_dir = project_dir
    return config
