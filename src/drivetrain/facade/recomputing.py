"""Activation recompute: the configuration's for models that are prepared, or as the script says."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from drivetrain.collectives import Communicator, connect
from drivetrain.config import RecomputeConfig, options_of
from drivetrain.errors import UsageError
from drivetrain.facade.core import ModelEntry
from drivetrain.facade.preparing import Preparing
from drivetrain.facade.settings import StrategyChoice, settle_strategy
from drivetrain.log import get_logger
from drivetrain.recompute import Inputs, attach, choose_blocks, is_attached, restore
from drivetrain.runtime.mesh import Axis, Mesh

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Recomputation:
    """One model whose blocks are recomputed, or which the script wants as it is.

    Attributes:
        model: the module that the script passed.
        communicator: of the axis over which inputs are split; None keeps them whole.
    """

    model: nn.Module
    communicator: Communicator | None = None

    def close(self) -> None:
        """Give the blocks back their own forward."""
        restore(self.model)
        if self.communicator is not None:
            self.communicator.close()


class Recomputing(Preparing):
    """The activation recompute of the Accelerator."""

    _recomputations: tuple[Recomputation, ...] = ()

    def recompute(
        self,
        model: nn.Module,
        *,
        mode: Literal["none", "full", "selective"] = "full",
        blocks: Sequence[str] | str = (),
        every: int = 1,
        keep: Literal["device", "cpu"] = "device",
        partition: str | None = None,
    ) -> nn.Module:
        """Let blocks of a model forget what they computed and compute it again in backward.

        For this model it takes the place of the configuration's ``recompute``, also when it is
        called before ``prepare``; the last call counts.

        Args:
            model: the user's module or a prepared one; changed in place.
            mode: ``full`` keeps a block's inputs; ``selective`` also the results of its
                projections; ``none`` recomputes nothing.
            blocks: names of modules, in which ``*`` stands for any text; none for the blocks that
                the model repeats.
            every: recompute the first of each ``every`` blocks.
            keep: where inputs wait for backward.
            partition: mesh axis over which inputs are split; its ranks must hold equal inputs.

        Returns:
            The model.

        Raises:
            UsageError: an unknown mode, place or axis; nothing repeats, or a name matches nothing;
                a block that is compiled in a way in which it cannot be recomputed.
        """
        entry = next((entry for entry in self._entries if _is_of(entry, model)), None)
        inner = model if entry is None else entry.strategy.unwrap(entry.model)
        options = RecomputeConfig(
            mode=mode,
            blocks=blocks if isinstance(blocks, str) else ",".join(blocks),
            every=every,
            keep=keep,
            partition=partition or "",
        )
        self._recompute_by(options, inner, self.mesh if entry is None else entry.strategy.run.mesh)
        return model

    def _prepare_model(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        device_placement: bool | None,
        choice: StrategyChoice | None,
    ) -> nn.Module:
        """Attach the configured recompute before the strategy sees the model."""
        options = self.config.run.recompute
        told = is_attached(model) or any(known.model is model for known in self._recomputations)
        prepared = any(entry.model is model for entry in self._entries)
        if options.mode != "none" and not told and not prepared:
            resolved = self.config if choice is None else settle_strategy(choice, self.config)
            run = self.run if choice is None else self._make_run(resolved)
            self._recompute_by(options, model, run.mesh)
        return super()._prepare_model(model, optimizers, device_placement, choice)

    def _recompute_by(self, options: RecomputeConfig, model: nn.Module, mesh: Mesh) -> None:
        """Attach what the options say, in place of what was attached before."""
        _check("mode", options.mode, RecomputeConfig)
        _check("keep", options.keep, RecomputeConfig)
        axis = _axis_of_replicas(mesh, options.partition) if options.partition else None
        patterns = [name for name in map(str.strip, options.blocks.split(",")) if name]
        chosen = []
        if options.mode != "none":
            chosen = choose_blocks(model, patterns, every=options.every)
        self._forget_recomputation(model)
        recomputation = Recomputation(model)
        if options.mode != "none":
            if axis is not None:
                recomputation.communicator = connect(
                    axis, self.traffic, self.device, self.world.timeout
                )
            attach(chosen, options.mode, Inputs(options.keep, recomputation.communicator))
            logger.info("recompute %s: %d blocks", options.mode, len(chosen))
        self._recomputations = (*self._recomputations, recomputation)

    def _forget_recomputation(self, model: nn.Module) -> None:
        for known in self._recomputations:
            if known.model is model:
                known.close()
        self._recomputations = tuple(k for k in self._recomputations if k.model is not model)

    def _stop_recomputing(self) -> None:
        """Give every model back its own forwards."""
        for known in self._recomputations:
            known.close()
        self._recomputations = ()


def _is_of(entry: ModelEntry, model: nn.Module) -> bool:
    return entry.model is model or entry.strategy.unwrap(entry.model) is model


def _check(name: str, value: str, config: type) -> None:
    (knob,) = (knob for knob in options_of(config) if knob.name == name)
    if value not in knob.choices:
        raise UsageError(
            f"expected recompute's {name} to be one of {', '.join(knob.choices)}, found {value!r}"
        )


def _axis_of_replicas(mesh: Mesh, name: str) -> Axis:
    """Return the axis over which inputs are split.

    Raises:
        UsageError: the mesh has no such axis, or its ranks hold different batches.
    """
    axes = [axis for axis in mesh if axis != "dp"]
    if name not in axes:
        has = ", ".join(axes) or "no axis but dp"
        raise UsageError(
            "expected recompute's partition to be an axis whose ranks hold equal inputs, found "
            f"{name!r}; the mesh has {has}, and the ranks of dp hold different batches; leave "
            "partition empty to keep inputs whole"
        )
    return mesh[name]
