"""The mark of a gradient that backward does not make, in the tensor of a message.

A gradient of zeros would not do: in one process a parameter without a gradient is left alone, one
with zeros decays.
"""

import torch
from torch import Tensor

_ABSENT = 0x7FFD
"""Two bytes; repeated over an element, a NaN of every floating point format of torch whose payload
no computation makes."""


def absent_like(tensor: Tensor) -> Tensor:
    """Return a message in a tensor's size for a gradient that backward does not make."""
    message = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
    _first_element(message).fill_(_ABSENT)
    return message


def is_absent(message: Tensor) -> bool:
    """Whether a message stands for no gradient. On a GPU this waits until the message is there."""
    pieces = _first_element(message.detach())
    return bool(pieces.numel()) and bool((pieces == _ABSENT).all())


def converted(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous message in another dtype of two bytes or more; a mark stays a mark.

    A conversion makes an ordinary NaN of the mark's, so the mark is set anew: by the device, and
    nobody waits for the answer.
    """
    made = message.to(dtype)
    is_marked = (_first_element(message) == _ABSENT).all()
    _first_element(made).masked_fill_(is_marked, _ABSENT)
    return made


def _first_element(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor's first element, in pieces of two bytes."""
    return tensor.reshape(-1)[:1].view(torch.int16)
