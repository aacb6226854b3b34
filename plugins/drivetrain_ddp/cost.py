"""The cost of data parallelism: all is held whole, gradients go once around the ring."""

from drivetrain.collectives import sent_elements
from drivetrain.cost import Cost, ModelSpec
from drivetrain.parts.buckets import MIB, BucketLayout, plan_buckets
from drivetrain.runtime.precision import Precision
from drivetrain_ddp.compression import CommunicationHook
from drivetrain_ddp.config import DdpConfig

_ADAM_STATES = 2
"""An optimizer with this many states is Adam, which also counts steps per parameter."""


def estimate(config: DdpConfig, model: ModelSpec, precision: Precision, size: int) -> Cost:
    """Return the bytes that a rank holds, and the bytes that rank 0 sends in one optimizer step.

    The step has one synchronised backward and, for the buffers, one training forward before it.
    Buckets are laid out in reverse registration order; the observed order changes no more than the
    rounding of the ring's chunks. PowerSGD counts as started.

    Args:
        config: the knobs.
        model: parameters, buffers and states.
        precision: the dtype of gradients on the wire.
        size: ranks of the data-parallel axis.
    """
    layouts = _layouts(config, model) if size > 1 else []
    hook = config.compression(precision)
    trainable = [spec for spec in model.parameters if spec.trainable]
    steps = 4 * len(trainable) if model.states >= _ADAM_STATES else 0
    buffers = sum(spec.nbytes for spec in model.buffers)
    gradients = _gradients(hook, layouts) if size > 1 else sum(spec.nbytes for spec in trainable)
    broadcast = buffers if config.buffers == "broadcast" else 0
    sent = {
        ("dp", "all_reduce"): sum(hook.sent(layout, size) for layout in layouts),
        ("dp", "broadcast"): sent_elements("broadcast", broadcast, size=size),
    }
    return Cost(
        held={
            "parameters": sum(spec.nbytes for spec in model.parameters),
            "gradients": gradients,
            "optimizer": model.states * sum(spec.nbytes for spec in trainable) + steps,
            "buffers": buffers,
        },
        sent={key: nbytes for key, nbytes in sent.items() if nbytes},
    )


def _gradients(hook: CommunicationHook, layouts: list[BucketLayout]) -> int:
    return sum(layout.nbytes + hook.held(layout) for layout in layouts)


def _layouts(config: DdpConfig, model: ModelSpec) -> list[BucketLayout]:
    trainable = [spec for spec in model.parameters if spec.trainable]
    return plan_buckets(
        [spec.shape for spec in trainable],
        [(spec.dtype, None) for spec in trainable],
        list(reversed(range(len(trainable)))),
        bucket_bytes=int(config.bucket_mib * MIB),
        first_bytes=int(config.first_bucket_mib * MIB),
    )
