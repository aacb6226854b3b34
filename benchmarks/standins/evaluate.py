"""Stands in for ``evaluate``: accuracy and F1 of two classes."""

from typing import Any


class Metric:
    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        pairs = zip(predictions, references, strict=True)
        self._pairs += [(int(prediction), int(reference)) for prediction, reference in pairs]

    def compute(self, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions, references)
        pairs, self._pairs = self._pairs, []
        right = sum(prediction == reference for prediction, reference in pairs)
        found = sum(prediction and reference for prediction, reference in pairs)
        ones = sum(prediction + reference for prediction, reference in pairs)
        return {"accuracy": right / len(pairs), "f1": 2 * found / ones if ones else 0.0}


def load(*names: str, **options: Any) -> Metric:
    return Metric()
