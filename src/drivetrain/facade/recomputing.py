"""Activation recompute of models: as the configuration says, unless the script says otherwise."""

from dataclasses import dataclass

from torch import nn

from drivetrain.collectives import Communicator, connect
from drivetrain.config import RecomputeConfig, options_of
from drivetrain.errors import UsageError
from drivetrain.facade.prepared import PreparedObjects
from drivetrain.facade.settings import Runs, StrategyChoice
from drivetrain.log import get_logger
from drivetrain.recompute import KeptInputs, attach, choose_blocks, is_attached, restore
from drivetrain.runtime.mesh import Axis
from drivetrain.strategy import Run

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Recomputation:
    """One model whose blocks are recomputed, or are not because the script said so.

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


class Recomputations:
    """The activation recompute of one Accelerator's models.

    Args:
        prepared: the models that were prepared; others may be recomputed too.
        runs: their configuration and meshes.
    """

    def __init__(self, prepared: PreparedObjects, runs: Runs) -> None:
        self._prepared = prepared
        self._runs = runs
        self._recomputations: list[Recomputation] = []

    def recompute(self, model: nn.Module, options: RecomputeConfig) -> None:
        """Attach recompute to a model as the script says; see ``Accelerator.recompute``."""
        for entry in self._prepared.models:
            if entry.model is model or entry.module is model:
                self._attach(options, entry.module, entry.strategy.run)
                return
        self._attach(options, model, self._runs.default)

    def before_prepare(self, model: nn.Module, choice: StrategyChoice | None) -> None:
        """Attach the configured recompute, unless the script has told its own for this model."""
        options = self._runs.config.run.recompute
        told = is_attached(model) or any(known.model is model for known in self._recomputations)
        if options.mode != "none" and not told:
            _, run = self._runs.of(choice)
            self._attach(options, model, run)

    def stop(self) -> None:
        """Give every model back its own forwards."""
        for known in self._recomputations:
            known.close()
        self._recomputations.clear()

    def _attach(self, options: RecomputeConfig, model: nn.Module, run: Run) -> None:
        """Attach recompute with these options, in place of the one attached before."""
        _check("mode", options.mode)
        _check("keep", options.keep)
        axis = _axis_of_replicas(run, options.partition) if options.partition else None
        patterns = [name for name in map(str.strip, options.blocks.split(",")) if name]
        chosen = []
        if options.mode != "none":
            chosen = choose_blocks(model, patterns, every=options.every)
        self._stop(model)
        recomputation = Recomputation(model)
        if options.mode != "none":
            if axis is not None:
                recomputation.communicator = connect(
                    axis, run.traffic, run.world.device, run.world.timeout
                )
            attach(chosen, options.mode, KeptInputs(options.keep, recomputation.communicator))
            logger.info("recompute %s: %d blocks", options.mode, len(chosen))
        self._recomputations.append(recomputation)

    def _stop(self, model: nn.Module) -> None:
        for known in self._recomputations:
            if known.model is model:
                known.close()
        self._recomputations = [k for k in self._recomputations if k.model is not model]


def _check(name: str, value: str) -> None:
    (knob,) = (knob for knob in options_of(RecomputeConfig) if knob.name == name)
    if value not in knob.choices:
        raise UsageError(
            f"expected recompute's {name} to be one of {', '.join(knob.choices)}, found {value!r}"
        )


def _axis_of_replicas(run: Run, name: str) -> Axis:
    """Return the axis over which inputs are split; its ranks must hold equal batches."""
    axes = [axis for axis in run.mesh if axis != "dp"]
    if name not in axes:
        has = ", ".join(axes) or "no axis but dp"
        raise UsageError(
            "expected recompute's partition to be an axis whose ranks hold equal inputs, found "
            f"{name!r}; the mesh has {has}, and the ranks of dp hold different batches; leave "
            "partition empty to keep inputs whole"
        )
    return run.mesh[name]
