"""The cost of one rank of a cell: bytes held between steps, and bytes sent in a step.

The data-parallel strategy is asked about the part of the model that a rank holds; the messages
inside of the cell are added.

Exact, where ``ModelSpec.module`` is given:

- bytes held: they follow from the same plan and cut as training; a cut that is measured
  (``cut: profile``) is replaced by an estimated one;
- bytes over ``dp``;
- with ``ModelSpec.inputs``, bytes over ``tp`` and ``pp`` of a model of repeated blocks that trains
  all its parameters, without autocast and recomputation, with one input per group of layers, whose
  only loss is a cross entropy of as many targets as there are tokens. The formulas are in
  ``volumes``. Clipping adds one number per axis; the check of equal batches, twice, 16 bytes.

Estimates otherwise:

- without ``module``, tensors of two dims or more count as divided over tp along the first, others
  as whole, and stages as consecutive parameters of equal bytes;
- without ``inputs``, bytes over tp and pp are left out, since they grow with the batch:
  ``Cost.uncounted`` says so.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from drivetrain.collectives.volume import chunk_bounds
from drivetrain.cost import Cost, ModelSpec, TensorSpec
from drivetrain.strategy import Run
from drivetrain_megatron.cell import data_parallel
from drivetrain_megatron.config import MegatronConfig
from drivetrain_megatron.layout import CellLayout
from drivetrain_megatron.sent import StepVolumes


def estimate(config: MegatronConfig, model: ModelSpec, run: Run) -> Cost:
    """Return the bytes that this rank holds between steps, and the bytes sent in a step.

    Args:
        config: of the strategy.
        model: the whole model.
        run: the run, as one rank sees it.

    Raises:
        ConfigError: the model cannot be divided as configured.
    """
    kind, options = data_parallel(config)
    if config.tp * config.pp == 1:
        return kind.cost(options, model, run)
    if model.module is None:
        cost = kind.cost(options, _by_sizes(config, model, run), run)
        return replace(cost, uncounted=_uncounted(cost, run))
    layout = CellLayout.of(config, model.module, run)
    cost = kind.cost(options, _part(model, layout), run)
    held = dict(cost.held)
    if copies := layout.copies():
        held["copies"] = sum(layout.local(s).nbytes for s in model.parameters if s.name in copies)
    sent = Counter(cost.sent)
    if model.inputs is not None:
        sent += StepVolumes(config, model, layout, run).sent()
        return Cost(held=held, sent=dict(sent), uncounted=cost.uncounted)
    return Cost(held=held, sent=dict(sent), uncounted=_uncounted(cost, run))


def _uncounted(cost: Cost, run: Run) -> Mapping[str, str]:
    """Return which traffic is missing in a cost for which no inputs were given, by axis."""
    inside = [axis for axis in ("tp", "pp") if run.mesh[axis].size > 1]
    return {**cost.uncounted, **dict.fromkeys(inside, "activations")}


def _part(model: ModelSpec, layout: CellLayout) -> ModelSpec:
    """Return the part of a model that a rank holds."""
    return ModelSpec(
        tuple(layout.local(spec) for spec in model.parameters if layout.holds(spec.name)),
        tuple(spec for spec in model.buffers if layout.keeps(spec.name)),
        model.states,
    )


def _by_sizes(config: MegatronConfig, model: ModelSpec, run: Run) -> ModelSpec:
    """Return an estimate of the part that a rank holds, from the sizes of parameters alone."""
    total = sum(spec.nbytes for spec in model.parameters)
    stages = config.pp * config.chunks
    parameters, before = [], 0
    for spec in model.parameters:
        stage = min(stages * before // max(total, 1), stages - 1)
        before += spec.nbytes
        if stage % config.pp == run.mesh["pp"].rank:
            parameters.append(_share(spec, config.tp, run.mesh["tp"].rank))
    return ModelSpec(tuple(parameters), model.buffers, model.states)


def _share(spec: TensorSpec, ranks: int, rank: int) -> TensorSpec:
    if len(spec.shape) < 2:
        return spec
    start, stop = chunk_bounds(spec.shape[0], ranks)[rank]
    return replace(spec, shape=(stop - start, *spec.shape[1:]))
