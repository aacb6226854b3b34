"""``Fabric(strategy="drivetrain")``: the loops of Lightning Fabric under any strategy.

Importing this module registers the name with Fabric. ``drivetrain launch`` starts the ranks and
chooses the strategy; Fabric keeps its loop, its loaders and its files of weights. A checkpoint of
models and their optimizers is a directory, from which any strategy resumes.
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.settings import StrategyChoice
from drivetrain.integrations.fabric_checkpoints import (
    FabricCheckpoints,
    is_checkpoint,
    optimizers_in,
)
from drivetrain.integrations.fabric_run import FabricRun

NAME = "drivetrain"
"""Name of the strategy in Fabric's registry."""

PACKAGES = ("lightning.fabric", "lightning_fabric")
"""Fabric is distributed inside of ``lightning``, and alone."""

MIXED = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""Our precision for each of Fabric's that the strategy computes in."""

KEPT = ("32-true", "64-true", "16-true", "bf16-true")
"""Precisions in which Fabric converts models and inputs, before a strategy sees them."""


class FabricTraining(FabricRun):
    """The methods of a Fabric strategy that train, save and load; mixed into Fabric's base class.

    Args and attributes are those of ``FabricRun``.
    """

    def __init__(
        self,
        strategy: StrategyChoice | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        self._plugin: Any = self._helper("plugins.precision", "Precision")()
        self._checkpoints: FabricCheckpoints | None = None
        super().__init__(strategy, config)
        # Fabric asks this object to hold back the synchronisation of gradients.
        self._backward_sync_control = self

    @property
    def precision(self) -> Any:
        """The plugin that converts models and inputs; mixed precision is the engine's work."""
        return self._plugin

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is None:  # Fabric has not chosen yet
            return
        if plugin.precision in MIXED:
            self._mixed = MIXED[plugin.precision]
            self._plugin.forward_context = self._autocast
        elif plugin.precision in KEPT and "Bitsandbytes" not in type(plugin).__name__:
            self._plugin = plugin
        else:
            raise UsageError(
                f"expected a precision of {', '.join((*MIXED, *KEPT))} for Fabric, found "
                f"{type(plugin).__name__}; choose one of these"
            )

    def _autocast(self) -> AbstractContextManager[None]:
        """Return the context of ``fabric.autocast()``; the engine is made when it is entered."""
        return self.engine.autocast()

    # --- the training step ---

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Hand a model to the strategy."""
        prepared: nn.Module = self.engine.prepare(module)
        return prepared

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Hand an optimizer to the strategy of its model.

        Raises:
            UsageError: the strategy must know both together: ``fabric.setup(model, optimizer)``.
        """
        return self.engine.prepare_optimizer(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Hand a model and its optimizers to the strategy; the loop steps the schedule itself."""
        prepared = self.engine.prepare(module, *optimizers)
        return prepared[0], list(prepared[1:]), scheduler

    def backward(
        self, tensor: Tensor, module: nn.Module | None, *args: Any, **options: Any
    ) -> None:
        """Run backward from a 0-d loss; gradients are means over the data-parallel ranks.

        Raises:
            UsageError: there are positional arguments; a loss needs no gradient of its own.
        """
        if args:
            raise UsageError(
                f"expected fabric.backward(loss) with a 0-d loss, found {len(args)} further "
                "arguments; reduce the tensor to a loss before"
            )
        self.engine.backward(tensor, **options)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        """Context in which gradients of a model stay local, and optimizers do nothing."""
        if not enabled:
            yield
            return
        window = self.engine.gradient_state
        with self.engine.no_sync(module):
            window.sync_gradients = False
            try:
                yield
            finally:
                window.sync_gradients = True

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Scale a model's gradients to a global norm of at most ``max_norm``.

        Returns:
            The norm before, 0-d, alike on all ranks.

        Raises:
            UsageError: the model has several optimizers, whose gradients have norms of their own.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
        """
        self._check_single(module)
        norm = self.engine.clip_grad_norm_(module.parameters(), max_norm, norm_type)
        if norm is None:
            raise UsageError(
                "expected clip_gradients() outside of no_backward_sync(), found it inside, where "
                "gradients are not complete; clip before the step"
            )
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"expected a finite norm of gradients, found {norm}; lower the learning rate, or "
                "pass error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clamp each element of a model's gradients to [-clip_val, clip_val].

        Raises:
            UsageError: the model has several optimizers.
        """
        self._check_single(module)
        self.engine.clip_grad_value_(module.parameters(), clip_val)

    def _check_single(self, module: nn.Module) -> None:
        count = len(self.engine._prepared.model(module).optimizers)
        if count > 1:
            raise UsageError(
                f"expected one optimizer of the model for clip_gradients(), found {count}; clip "
                "with fabric.strategy.engine.clip_grad_norm_(parameters, max_norm)"
            )

    # --- checkpoints ---

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Save a state: a directory if optimizers are in it, else a file as Fabric's own.

        Raises:
            UsageError: optimizers without all models and optimizers of the run, or options that
                need a file.
        """
        if not optimizers_in(state):
            super().save_checkpoint(path, state, storage_options, filter)  # type: ignore[misc]
            return
        if filter or storage_options is not None:
            raise UsageError(
                "expected no filter and no storage_options for a state with optimizers, found "
                f"{filter or storage_options}; leave them out, or save the model alone"
            )
        self._states_of_run().save(path, state)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a state from a directory of ``save_checkpoint``, or from a file of Fabric.

        Returns:
            The values that ``state`` did not ask for.

        Raises:
            CheckpointError: the checkpoint holds other keys, or a file the state of optimizers.
        """
        if is_checkpoint(path):
            return self._states_of_run().load(path, state, strict)
        if isinstance(state, Optimizer) or optimizers_in(state):
            raise CheckpointError(
                f"expected a checkpoint directory for the state of optimizers, found {path}; load "
                'the weights alone, fabric.load(path, {"model": model}), and start anew'
            )
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
        return rest

    def _states_of_run(self) -> FabricCheckpoints:
        if self._checkpoints is None:
            self._checkpoints = FabricCheckpoints(self.engine)
        return self._checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Return a model's whole state, on the CPU. Collective."""
        return self.engine.get_state_dict(module)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load whole weights into a model. Collective.

        Raises:
            CheckpointError: ``strict``, and the names are others than the whole model's.
        """
        if not self.engine._prepared.has(module):
            module.load_state_dict(state_dict, strict=strict)
            return
        facts = self.engine.strategy_of(module).state_facts(self.engine.unwrap_model(module))
        if strict and (wrong := {each.name for each in facts} ^ state_dict.keys()):
            raise CheckpointError(
                f"expected the {len(facts)} names of the whole {type(module).__name__}, found "
                f"{len(wrong)} missing or further ones, such as {min(wrong)}; pass strict=False to "
                "load the others"
            )
        with self.engine.gathered(module):
            # Each stage of a pipeline has a part of these names.
            module.load_state_dict(state_dict, strict=False)


def register() -> list[type]:
    """Register the strategy with each installed Fabric; return its classes.

    Raises:
        ImportError: Fabric is not installed.
    """
    found = [name for name in PACKAGES if find_spec(name.partition(".")[0])]
    if not found:
        raise ImportError("Lightning Fabric is not installed; run: pip install lightning-fabric")
    kinds = []
    for package in found:
        strategies = importlib.import_module(f"{package}.strategies")
        bases = (FabricTraining, strategies.ParallelStrategy)
        kind = type("DrivetrainStrategy", bases, {"package": package, "__module__": __name__})
        strategies.STRATEGY_REGISTRY.register(NAME, kind, "the launched strategy", override=True)
        kinds.append(kind)
    return kinds


DrivetrainStrategy: Any = register()[0]
"""The class, for options in code: ``Fabric(strategy=DrivetrainStrategy("fsdp"))``."""
