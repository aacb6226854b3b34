"""``Fabric(strategy="drivetrain")``: the loops of Lightning Fabric under any strategy.

Importing this module registers the name with Fabric. ``drivetrain launch`` starts the ranks and
chooses the strategy; Fabric keeps its loop, its loaders and its files of weights. A checkpoint of
models and their optimizers is a directory, from which any strategy resumes.
"""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain import communication
from drivetrain.accelerator import Accelerator
from drivetrain.checkpoint.commit import is_checkpoint
from drivetrain.errors import CheckpointError, UsageError
from drivetrain.facade.settings import StrategyChoice
from drivetrain.facade.stepping import PreparedOptimizer

NAME = "drivetrain"
"""Name of the strategy in Fabric's registry."""

PACKAGES = ("lightning.fabric", "lightning_fabric")
"""Fabric is distributed inside of ``lightning``, and alone."""

MIXED = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""Our precision for each of Fabric's that the strategy computes in."""

KEPT = ("32-true", "64-true", "16-true", "bf16-true")
"""Precisions in which Fabric converts models and inputs, before a strategy sees them."""


class FabricCheckpoints:
    """Saves and loads the states of one run, which Fabric hands over unwrapped.

    Args:
        engine: has prepared the models and optimizers.
    """

    def __init__(self, engine: Accelerator) -> None:
        self._engine = engine
        self._values: dict[str, Any] = {}
        self._order: dict[str, list[str]] = {}
        engine.register_for_checkpointing(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the state at hand, and its keys of models and optimizers."""
        return {"order": self._order, "values": self._values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take both from a checkpoint."""
        self._order, self._values = dict(state["order"]), dict(state["values"])

    def save(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Save a state in a directory. Collective.

        Raises:
            UsageError: a model or optimizer of the run is missing.
            CheckpointError: a value is no plain one, or the disk is full; on every rank.
        """
        self._order = self._order_of(state)
        self._values = {
            key: value.state_dict() if _is_stateful(value) else value
            for key, value in self._others(state)
        }
        self._engine.save_state(path, overwrite=True)

    def load(self, path: str | Path, state: Any, strict: bool) -> dict[str, Any]:
        """Load a directory into the objects of a state; return the values it did not ask for.

        Raises:
            UsageError: a model or optimizer of the run is missing.
            CheckpointError: the checkpoint has other keys.
        """
        wanted = self._order_of(state if isinstance(state, dict) else {})
        self._engine.load_state(path)
        if self._order != wanted:
            raise CheckpointError(
                f"expected the keys {self._order} in the state to load, as {path} has them, found "
                f"{wanted}; use the same keys for the same objects"
            )
        left = dict(self._values)
        for key, value in self._others(state):
            if key in left and _is_stateful(value):
                value.load_state_dict(left.pop(key))
            elif key in left:
                state[key] = left.pop(key)
            elif strict:
                raise CheckpointError(
                    f"expected {key!r} in {path}, found {sorted(left)}; leave it out of the state, "
                    "or pass strict=False"
                )
        return left

    def _others(self, state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        known = {key for keys in self._order.values() for key in keys}
        return [(key, value) for key, value in state.items() if key not in known]

    def _order_of(self, state: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the keys of models and optimizers in the order of ``setup``."""
        prepared = self._engine._state
        return {
            "models": _keys("models", [entry.model for entry in prepared.models], state),
            "optimizers": _keys("optimizers", prepared.optimizers, state),
        }


def optimizers_in(state: Any) -> list[Optimizer]:
    """Return the optimizers of a state that the engine has prepared."""
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, PreparedOptimizer)]


def _keys(kind: str, objects: Sequence[Any], state: Mapping[str, Any]) -> list[str]:
    """Return the key of each object in a state."""
    found = [next((k for k, value in state.items() if value is each), None) for each in objects]
    keys = [key for key in found if key is not None]
    if len(keys) < len(objects):
        raise UsageError(
            f"expected all {len(objects)} {kind} of setup() in the state, found {len(keys)}: a "
            "checkpoint holds the whole run; add the others, or save models alone for their weights"
        )
    return keys


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class FabricTraining:
    """The methods of a Fabric strategy; mixed into Fabric's base class.

    Args:
        strategy: name, or name and options; None takes the launch configuration's.
        config: a YAML file or a mapping with the configuration.

    Attributes:
        package: of Fabric, for its helpers.
    """

    package: str
    parallel_devices: Sequence[torch.device]

    def __init__(
        self,
        strategy: StrategyChoice | None = None,
        config: str | Path | Mapping[str, Any] | None = None,
    ) -> None:
        self._chosen: dict[str, Any] = {"strategy": strategy, "config": config}
        self._mixed: str | None = None
        self._plugin: Any = self._helper("plugins.precision", "Precision")()
        super().__init__()
        # Fabric asks this object to hold back the synchronisation of gradients.
        self._backward_sync_control = self

    def _helper(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.package}.{module}"), name)

    @cached_property
    def engine(self) -> Accelerator:
        """The Accelerator of the run, made on first use.

        Raises:
            UsageError: Fabric was to start several processes, asks for another device, or the
                configuration accumulates.
        """
        wanted = self.parallel_devices[0].type
        engine = Accelerator(
            **self._chosen,
            mixed_precision=self._mixed,
            cpu=True if wanted == "cpu" else None,
        )
        self._check_run(engine, wanted)
        return engine

    def _check_run(self, engine: Accelerator, wanted: str) -> None:
        asked = len(self.parallel_devices)
        if asked > 1 and engine.num_processes == 1:
            raise UsageError(
                f"expected {asked} ranks for the {asked} devices of Fabric, found one process; "
                f"start the script with 'drivetrain launch --nproc-per-node {asked}', or pass "
                "Fabric(devices=1)"
            )
        if engine.gradient_accumulation_steps > 1:
            raise UsageError(
                "expected one micro-batch per step in the configuration, found accumulation: "
                f"{engine.gradient_accumulation_steps}; a loop of Fabric accumulates itself, with "
                "no_backward_sync()"
            )
        if wanted != engine.device.type:
            raise UsageError(
                f"expected Fabric(accelerator={engine.device.type!r}) as the run is configured, "
                f"found {wanted!r}; pass the same to both"
            )

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

    # --- the place among the ranks ---

    def setup_environment(self) -> None:
        """Join the other ranks, and tell Fabric's log which rank this is."""
        rank_zero_only = self._helper("utilities.rank_zero", "rank_zero_only")
        rank_zero_only.rank = self.global_rank
        super().setup_environment()  # type: ignore[misc]

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        return self.engine.device

    @property
    def global_rank(self) -> int:
        """Index of this rank among all."""
        return self.engine.process_index

    @property
    def local_rank(self) -> int:
        """Index of this rank on its host."""
        return self.engine.local_process_index

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.engine.num_processes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self.engine.is_main_process

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of Fabric's sampler: ranks that share a batch get the same samples."""
        data = self.engine.mesh["dp"]
        return {"num_replicas": data.size, "rank": data.rank}

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Stack tensors of equal shapes of the data-parallel ranks: (ranks, ...); one is as is."""
        data = self.engine.mesh["dp"]
        if data.size == 1:
            return tensor
        gather = self._helper("utilities.distributed", "_all_gather_ddp_if_available")
        gathered: Tensor = gather(tensor, group=data.group, sync_grads=sync_grads)
        return gathered

    def all_reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Combine tensors of the data-parallel ranks in place, and return them."""
        data = self.engine.mesh["dp"]
        if data.size > 1:
            reduce = self._helper("utilities.distributed", "_sync_ddp_if_available")
            reduce(tensor, group=data.group, reduce_op=reduce_op)
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return whether all ranks, or any, decided for it."""
        votes = torch.tensor(int(decision), device=self.root_device)
        total = int(communication.reduce(votes, "sum"))
        return total == self.world_size if all else total > 0

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has come here."""
        self.engine.wait_for_everyone()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return one rank's object on every rank."""
        return communication.broadcast_object_list([obj], src)[0]

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
        count = len(self.engine._state.model(module).optimizers)
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
        self._checkpoints.save(path, state)

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
        if is_checkpoint(Path(path)):
            return self._checkpoints.load(path, state, strict)
        if isinstance(state, Optimizer) or optimizers_in(state):
            raise CheckpointError(
                f"expected a checkpoint directory for the state of optimizers, found {path}; load "
                'the weights alone, fabric.load(path, {"model": model}), and start anew'
            )
        rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)  # type: ignore[misc]
        return rest

    @cached_property
    def _checkpoints(self) -> FabricCheckpoints:
        return FabricCheckpoints(self.engine)

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
        if not self.engine._state.has(module):
            module.load_state_dict(state_dict, strict=strict)
            return
        facts = self.engine.strategy_of(module).state.facts(self.engine.unwrap_model(module))
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
