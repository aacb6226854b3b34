"""The record of one optimizer step of one rank, as a line of JSON holds it.

Records add up: a line of a long run stands for several steps.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from drivetrain.errors import ConfigError

SECTIONS = ("data", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
"""Where the time of a step goes, besides waiting; ``other`` is the script's own work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """The figures of one rank over an optimizer step, or over several steps in a row.

    All times are of the host: where a device computes, the host waits for the device only where
    the script reads a value.

    Attributes:
        step: number of the last optimizer step, from 1; a resumed run goes on counting.
        steps: how many steps the record stands for.
        time: when it ended, in seconds since 1970.
        seconds: wall time, from the end of the step before.
        sections: seconds by name, see ``SECTIONS``; together with ``waiting`` they are ``seconds``.
        waiting: seconds that the rank stood still for collectives, by mesh axis.
        loss: mean over the rank's micro-batches, weighted as ``backward`` was told; None without a
            backward.
        lr: learning rate of the first parameter group.
        grad_norm: global norm before clipping; None where the script does not clip.
        loss_scale: of fp16; None without one.
        samples: rows of the rank's batches.
        tokens: elements of ``input_ids`` in the rank's batches, padding included; 0 where batches
            have none.
        skipped: steps that were left out because a gradient was not finite.
        memory: bytes by kind: ``resident`` of the process; on an accelerator ``device``, allocated
            now, and ``device_peak``, the most so far.
        sent: bytes that the rank sent, by ``AXIS/OPERATION``.
        own: the script's own figures.
    """

    step: int
    steps: int = 1
    time: float = 0.0
    seconds: float = 0.0
    sections: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    samples: int = 0
    tokens: int = 0
    skipped: int = 0
    memory: Mapping[str, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Rows of this rank per second of wall time."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> str:
        """Return one line of JSON: no NaN, which JSON does not know, and nothing empty."""
        named = ((name, getattr(self, name)) for name in _NAMES)
        values = {name: value for name, value in named if _says(value)}
        try:
            return _ENCODER.encode(values)
        except (
            TypeError,
            ValueError,
        ):  # rare: a number that is not finite, another kind of mapping
            return json.dumps({name: _plain(value) for name, value in values.items()})

    @classmethod
    def from_json(cls, line: str) -> "StepFigures":
        """Return the record of a line.

        Raises:
            ConfigError: the line is no record.
        """
        try:
            values = json.loads(line)
            known = {name: _number(value) for name, value in values.items() if name in _NAMES}
            return cls(**known)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"expected a record of a step, found {line[:80]!r}: {error}"
            ) from None


_ENCODER = json.JSONEncoder(allow_nan=False)
_NAMES = tuple(each.name for each in fields(StepFigures))


def merged(first: StepFigures, second: StepFigures) -> StepFigures:
    """Return one record for the steps of two, the second after the first.

    Times, counts and bytes are summed, memory is the larger one, values are means over steps.
    """
    whole = first.steps + second.steps
    share = second.steps / whole
    return StepFigures(
        step=second.step,
        steps=whole,
        time=second.time,
        seconds=first.seconds + second.seconds,
        sections=_summed(first.sections, second.sections),
        waiting=_summed(first.waiting, second.waiting),
        loss=_mean(first.loss, second.loss, share),
        lr=second.lr,
        grad_norm=_mean(first.grad_norm, second.grad_norm, share),
        loss_scale=second.loss_scale,
        samples=first.samples + second.samples,
        tokens=first.tokens + second.tokens,
        skipped=first.skipped + second.skipped,
        memory=_largest(first.memory, second.memory),
        sent=_summed(first.sent, second.sent),
        own={
            name: value
            for name in {**first.own, **second.own}
            if (value := _mean(first.own.get(name), second.own.get(name), share)) is not None
        },
    )


def _summed(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in {**first, **second}}


def _largest(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: max(first.get(name, 0), second.get(name, 0)) for name in {**first, **second}}


def _mean(first: float | None, second: float | None, share: float) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return first * (1 - share) + second * share


def _says(value: Any) -> bool:
    """Whether a value is worth its bytes: it is neither None nor empty nor a count of zero."""
    return isinstance(value, float) or bool(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    """Return numbers that JSON cannot hold, which lines hold as words, as numbers again."""
    if isinstance(value, str):
        return float(value)
    if isinstance(value, dict):
        return {name: _number(each) for name, each in value.items()}
    return value
