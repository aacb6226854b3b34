"""The differences between a checkpoint and a model, for the error of a load."""

from collections.abc import Mapping

from drivetrain.checkpoint.manifest import label

Shapes = Mapping[tuple[str, str], tuple[int, ...]]


def describe_difference(expected: Shapes, found: Shapes, *, first: int = 8) -> str:
    """Return a message with the first differing names and shapes, "" when nothing differs.

    Args:
        expected: what the model and its optimizers have: (name, state) -> global shape.
        found: what the checkpoint has.
        first: how many differences of each kind are listed.
    """
    missing = [label(*key) for key in expected if key not in found]
    surplus = [label(*key) for key in found if key not in expected]
    shapes = [
        f"{label(*key)}: expected {tuple(expected[key])}, found {tuple(found[key])}"
        for key in expected
        if key in found and tuple(expected[key]) != tuple(found[key])
    ]
    kinds = (
        ("missing from the checkpoint", missing),
        ("in the checkpoint only", surplus),
        ("of another shape", shapes),
    )
    texts = [f"{len(items)} {what}: {_some(items, first)}" for what, items in kinds if items]
    if not texts:
        return ""
    return (
        f"expected {len(expected)} tensors, found {len(found)} in the checkpoint; "
        f"{'; '.join(texts)}. Load it into the model and optimizers it was saved from"
    )


def _some(items: list[str], first: int) -> str:
    more = len(items) - first
    return ", ".join(items[:first]) + (f", and {more} more" if more > 0 else "")
