"""The cost of data parallelism: all is held whole, gradients go once around the ring."""

from collections import Counter

from drivetrain.collectives import Route
from drivetrain.cost import Cost, ModelSpec
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.config import DdpConfig

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per parameter."""


def estimate(config: DdpConfig, model: ModelSpec, precision: Precision, route: Route) -> Cost:
    """Return the bytes that a rank holds, and the bytes that rank 0 sends in one optimizer step.

    The step has one synchronised backward and, for the buffers, one training forward before it.
    Buckets are laid out in reverse registration order; the observed order changes no more than the
    rounding of the ring's chunks. PowerSGD counts as started.

    Args:
        config: the knobs.
        model: parameters, buffers and states.
        precision: the dtype of gradients on the wire.
        route: the way of data over the data-parallel axis.
    """
    trainable = [spec for spec in model.parameters if spec.trainable]
    names = [spec.name for spec in trainable]
    shapes, kinds = [spec.shape for spec in trainable], [(spec.dtype, None) for spec in trainable]
    size = route.axis.size
    order = range(len(trainable))[::-1]
    layouts = config.buckets(shapes, kinds, order) if size > 1 else []
    hook = config.compression(precision)
    steps = 4 * len(trainable) if model.states >= _ADAM_STATES else 0
    whole = sum(spec.nbytes for spec in trainable)
    buffers = sum(spec.nbytes for spec in model.buffers)
    gradients = sum(layout.nbytes + hook.held(layout, names, route) for layout in layouts)
    broadcast = buffers if config.buffers == "broadcast" else 0
    sent = sum((hook.sent(layout, names, route) for layout in layouts), Counter[tuple[str, str]]())
    sent += route.broadcast(broadcast)
    return Cost(
        held={
            "parameters": sum(spec.nbytes for spec in model.parameters),
            "gradients": gradients if size > 1 else whole,
            "optimizer": model.states * whole + steps,
            "buffers": buffers,
        },
        sent={key: nbytes for key, nbytes in sent.items() if nbytes},
    )
