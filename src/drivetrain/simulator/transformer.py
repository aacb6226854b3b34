"""A GPT by its sizes alone: the work, activations and parameters of its units.

Activations follow Korthikanti et al. 2022 (arXiv 2205.05198), section 4: a layer keeps
``s b h (34 + 5 a s / h)`` bytes in half precision. Products follow Narayanan et al. 2021
(arXiv 2104.04473), appendix: a forward has ``24 B s h^2 (1 + s / 6h)`` operations per layer.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from drivetrain.errors import ConfigError
from drivetrain.simulator.step import (
    Boundary,
    MatrixProduct,
    MemoryPass,
    Operation,
    Recompute,
    Saved,
    SimulatedUnit,
    attention,
    widened,
)

if TYPE_CHECKING:
    from drivetrain.simulator.traced import TracedModel  # loads torch

LOSS_BYTES = (42, 18)
"""Bytes per logit that a cross entropy in fp32 reads and writes, in forward and backward: a cast
(2 + 4), the maximum (4), subtraction, exponential and division (8 each), the sum (4), a transposed
copy (4); in backward
one product (8), the cast back (6) and the copy (4)."""


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """The sizes of a GPT.

    Attributes:
        layers: blocks.
        hidden: width of the residual stream.
        heads: query heads.
        seq: tokens of a sequence.
        vocab: tokens of the vocabulary.
        ffn: inner width of the feed-forward layer; 0 means four times ``hidden``.
        kv_heads: heads of keys and values; 0 means ``heads``.
        gated: whether the feed-forward layer has a gate, as Llama's.
        tied: whether the head's matrix is the embedding's.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int = 51200
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--gpt: expected {name} above 0, found {getattr(self, name)}")
        for name, total in (("heads", self.hidden), ("kv_heads", self.heads)):
            parts = getattr(self, name) or self.heads
            if total % parts:
                raise ConfigError(
                    f"--gpt: expected {name} that divide {total}, found {parts}; change {name}"
                )

    @classmethod
    def keys(cls) -> list[str]:
        """Return the names of the sizes."""
        return [field.name for field in fields(cls)]

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden

    @property
    def keys_width(self) -> int:
        """Width of all keys, and of all values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @cached_property
    def parameters(self) -> int:
        """Distinct parameters, biases and norms included."""
        return sum(unit.elements for unit in self.units(1, "none", fused=True))

    def model_flops(self, batch: int) -> float:
        """Return the operations of a step, without recomputation."""
        h, s = self.hidden, self.seq
        linear = h * (h + 2 * self.keys_width) + h * h + h * self.inner * (3 if self.gated else 2)
        layer = 2 * linear + 4 * s * h
        return 3.0 * batch * s * (self.layers * layer + 2 * h * self.vocab)

    def units(
        self, micro_batch: int, recompute: Recompute, *, fused: bool, width: int = 2
    ) -> list[SimulatedUnit]:
        """Return embedding, blocks and head for a micro-batch; equal units are the same object.

        Args:
            micro_batch: sequences.
            recompute: what blocks compute again in backward.
            fused: whether attention is one kernel that keeps no scores.
            width: bytes of a number; the loss computes in four either way.
        """
        tokens = micro_batch * self.seq
        stream = 2 * tokens * self.hidden
        block = SimulatedUnit(
            "block",
            (*self._attention(micro_batch, fused), *self._feed_forward(tokens)),
            (*self._saved_by_attention(micro_batch, fused), *self._saved_by_feed_forward(tokens)),
            self._block_parameters(),
            enters=stream,
            recompute=recompute,
            heads=self.heads,
        )
        block, first, last = (
            widened(unit, width / 2)
            for unit in (block, self._embedding(tokens), self._head(tokens))
        )
        forward, backward = LOSS_BYTES
        logits = tokens * self.vocab
        loss = MemoryPass(forward * logits, backward * logits, 8, "features")
        last = replace(
            last,
            forward=(*last.forward, loss),
            # Megatron-LM's loss writes the gradient over the softmax.
            saved=(*last.saved, Saved(4 * logits, "features", gradients=1)),
        )
        return [first, *[block] * self.layers, last]

    # --- a block ---

    def _attention(self, batch: int, fused: bool) -> tuple[Operation, ...]:
        s, h, tokens = self.seq, self.hidden, batch * self.seq
        stream, wide = 2 * tokens * h, 2 * tokens * (h + 2 * self.keys_width)
        return (
            MemoryPass(2 * stream, 3 * stream, 2, "tokens"),
            Boundary(True, stream),
            MatrixProduct(tokens, h, h + 2 * self.keys_width, divided="columns"),
            MemoryPass(2 * wide, 2 * wide, 4, "features"),
            *attention(batch * self.heads, s, s, h // self.heads, fused=fused),
            MemoryPass(2 * stream, 2 * stream, 2, "features"),
            MatrixProduct(tokens, h, h, divided="inner"),
            Boundary(False, stream),
            MemoryPass(3.5 * stream, 2.5 * stream, 1, "tokens"),
        )

    def _feed_forward(self, tokens: int) -> tuple[Operation, ...]:
        stream, gates = 2 * tokens * self.hidden, 2 if self.gated else 1
        wide = 2 * tokens * self.inner
        return (
            MemoryPass(2 * stream, 3 * stream, 2, "tokens"),
            Boundary(True, stream),
            MatrixProduct(tokens, self.hidden, gates * self.inner, divided="columns"),
            MemoryPass((1 + gates) * wide, (1 + 2 * gates) * wide, gates, "features"),
            MatrixProduct(tokens, self.inner, self.hidden, divided="inner"),
            Boundary(False, stream),
            MemoryPass(3.5 * stream, 2.5 * stream, 1, "tokens"),
        )

    def _saved_by_attention(self, batch: int, fused: bool) -> tuple[Saved, ...]:
        tokens = batch * self.seq
        stream = 2 * tokens * self.hidden
        scores = 5 * batch * self.heads * self.seq**2
        return (
            Saved(2 * stream, "tokens"),  # the norm's input and output
            Saved(2 * tokens * (self.hidden + 2 * self.keys_width), "features"),
            *(() if fused else (Saved(scores, "features", True),)),
            Saved(stream, "features"),
            Saved(stream / 2, "tokens"),  # the dropout's mask
        )

    def _saved_by_feed_forward(self, tokens: int) -> tuple[Saved, ...]:
        stream, wide = 2 * tokens * self.hidden, 2 * tokens * self.inner
        return (
            Saved(2 * stream, "tokens"),
            *[Saved(wide, "features")] * (3 if self.gated else 2),
            Saved(stream / 2, "tokens"),
        )

    def _block_parameters(self) -> tuple[tuple[int, bool], ...]:
        h, gates = self.hidden, 2 if self.gated else 1
        wide = h + 2 * self.keys_width
        divided = h * wide + wide + h * h + gates * (h * self.inner + self.inner) + self.inner * h
        return ((divided, True), (6 * h, False))

    # --- the ends ---

    def _embedding(self, tokens: int) -> SimulatedUnit:
        stream, table = 2 * tokens * self.hidden, 2 * self.vocab * self.hidden
        return SimulatedUnit(
            "embedding",
            (
                MemoryPass(2 * stream, 3 * stream + table, 2, "features"),
                Boundary(False, stream),
                MemoryPass(4.5 * stream, 2.5 * stream, 4, "tokens"),
            ),
            (Saved(stream / 2, "tokens"),),
            ((self.vocab * self.hidden, True), (self.seq * self.hidden, False)),
            repeated=False,
        )

    def _head(self, tokens: int) -> SimulatedUnit:
        """Return the norm and the product of the head; the loss is not among them."""
        stream = 2 * tokens * self.hidden
        own = 0 if self.tied else self.vocab * self.hidden
        return SimulatedUnit(
            "head",
            (
                MemoryPass(2 * stream, 3 * stream, 2, "tokens"),
                Boundary(True, stream),
                MatrixProduct(tokens, self.hidden, self.vocab, divided="columns"),
            ),
            (Saved(2 * stream, "tokens"),),
            ((own, True), (2 * self.hidden, False)),
            repeated=False,
            borrowed=self.vocab * self.hidden - own,
        )


# --- the model of a plan ---


SimulatedModel: TypeAlias = "GptShape | TracedModel"
"""A simulated model: sizes alone, or a module that was looked at."""
