"""Guesses of a model's inputs: by its class, by the names of its arguments, by its layers.

An embedding takes tokens; a transformer takes sequences of its width; a convolution takes images of
its channels; a linear layer takes rows, or sequences of rows for models of sequences.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_ROWS, _LENGTH = 2, 8
_SIDE = 64
"""Pixels of an image whose model takes any size: five halvings leave two."""

_SAMPLES = 4000
"""Samples of a wave: a quarter of a second at the 16 kHz of speech models."""


def guessed_inputs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield descriptions, and inputs on the CPU: 2 rows, sequences of length 8."""
    given = getattr(model, "dummy_inputs", None)
    if given is not None:
        yield f"dummy_inputs of {type(model).__name__}", given
    named = dict(_by_names(model))
    main = getattr(model, "main_input_name", None)
    if main in named:
        yield f"{main} by its name", {main: named[main]}
    if named and set(named) != {main}:
        yield f"{', '.join(named)} by their names", named
    yield from _by_layers(model)


def _by_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the arguments of forward whose names say their kind, as in Hugging Face's models."""
    config = getattr(model, "config", None)
    if config is None:
        return
    arguments = inspect.signature(type(model).forward).parameters
    tokens = torch.arange(_ROWS * _LENGTH).view(_ROWS, _LENGTH)
    for name in ("input_ids", "decoder_input_ids"):
        if name in arguments and (words := _of(config, "text_config", "vocab_size")):
            yield name, tokens % words
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if "pixel_values" in arguments:
        channels = _of(config, "vision_config", "num_channels") or 3
        size = _of(config, "vision_config", "image_size") or _SIDE
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        yield "pixel_values", torch.zeros(_ROWS, channels, *sides, dtype=dtype)
    if "input_features" in arguments and (bins := _of(config, "audio_config", "num_mel_bins")):
        frames = 2 * (_of(config, "audio_config", "max_source_positions") or _SIDE)
        yield "input_features", torch.zeros(_ROWS, bins, frames, dtype=dtype)
    if "input_values" in arguments:
        yield "input_values", torch.zeros(_ROWS, _SAMPLES, dtype=dtype)


def _of(config: Any, part: str, name: str) -> Any:
    """Return an option of a configuration, or of its part for one kind of input."""
    return getattr(config, name, None) or getattr(getattr(config, part, None), name, None)


def _by_layers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield guesses for the layers that inputs may go into, first layers first."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        for what, guess in _for_layer(module):
            if what not in seen:
                seen.add(what)
                yield f"{what} for {name!r}", guess


def _for_layer(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    if isinstance(module, nn.Embedding):
        count = torch.arange(_ROWS * _LENGTH) % module.num_embeddings
        yield f"tokens below {module.num_embeddings}", count.view(_ROWS, _LENGTH)
    elif isinstance(module, nn.TransformerEncoderLayer):
        yield from _numbers(module.linear1.weight, (_ROWS, _LENGTH, module.linear1.in_features))
    elif isinstance(module, nn.MultiheadAttention):
        yield from _numbers(module.out_proj.weight, (_ROWS, _LENGTH, module.embed_dim))
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        space = (32,) * len(module.kernel_size)
        yield from _numbers(module.weight, (_ROWS, module.in_channels, *space))
    elif isinstance(module, nn.Linear):
        yield from _numbers(module.weight, (_ROWS, module.in_features))
        yield from _numbers(module.weight, (_ROWS, _LENGTH, module.in_features))


def _numbers(weight: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    yield f"{weight.dtype} of shape {shape}", torch.zeros(shape, dtype=weight.dtype)
