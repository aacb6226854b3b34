"""The run of a Fabric script: the Accelerator behind it, its place among the ranks, their words."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain import communication
from drivetrain.accelerator import Accelerator
from drivetrain.errors import UsageError
from drivetrain.facade.settings import StrategyChoice


class FabricRun:
    """The methods of a Fabric strategy about ranks.

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
        super().__init__()
        self._chosen: dict[str, Any] = {"strategy": strategy, "config": config}
        self._engine: Accelerator | None = None
        self._mixed: str | None = None

    def _helper(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{self.package}.{module}"), name)

    @property
    def engine(self) -> Accelerator:
        """The Accelerator of the run, made on first use.

        Raises:
            UsageError: Fabric was to start several processes, asks for another device, or the
                configuration accumulates.
        """
        if self._engine is None:
            wanted = self.parallel_devices[0].type
            engine = Accelerator(
                **self._chosen,
                mixed_precision=self._mixed,
                cpu=True if wanted == "cpu" else None,
            )
            self._check_run(engine, wanted)
            self._engine = engine
        return self._engine

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
