"""What tensor parallelism does with tensors that have a shape but no values: it sends nothing.

A pipeline stage runs the model's own forward around its blocks; what other stages compute is a
proxy there, and only its shape counts.
"""

from torch import Tensor

from drivetrain_megatron.pipeline.proxy import StageProxy, proxy_like


def is_outline(*tensors: Tensor | None) -> bool:
    """Whether one of these has no values."""
    return any(type(tensor) is StageProxy for tensor in tensors)


def outlined(tensor: Tensor, dim: int | None = None, size: int = 0) -> Tensor:
    """Return a tensor without values, of another extent in one dim.

    Args:
        tensor: whose other facts it has.
        dim: which dim; None leaves the shape.
        size: its extent.
    """
    shape = list(tensor.shape)
    if dim is not None:
        shape[dim] = size
    return proxy_like(shape, tensor.dtype, tensor.device, tensor.requires_grad)
