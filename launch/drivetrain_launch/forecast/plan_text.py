"""The words of ``drivetrain plan``: one layout in detail, the table of a search, the files."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from drivetrain.hardware.sizes import size_text
from drivetrain.links.compressor import Honesty

if TYPE_CHECKING:
    from drivetrain.planner.predict import Prediction, Predictor, Task
    from drivetrain.planner.search import Found

SHOWN = 10
"""Rows of the table of a search."""

SMALL = 0.002
"""Shares of a step that are not shown."""


def file_of(task: "Task", prediction: "Prediction") -> str:
    """Return the configuration file of a layout."""
    from drivetrain.planner.layout import run_file

    return run_file(prediction.planned, prediction.micro_batches, task.hosts, task.per_host)


def explained(predictor: "Predictor", prediction: "Prediction") -> Iterator[str]:
    """Yield lines about one layout: its time by parts, its memory by kinds, its messages."""
    from drivetrain.planner.fit import remedies, room_of

    task = predictor.task
    yield prediction.layout
    yield f"step     {prediction.step_seconds:.4g} s, idle {prediction.idle:.1%}"
    unit = "tokens/s" if task.model.seq > 1 else "samples/s"
    yield (
        f"speed    {prediction.tokens_per_second:,.0f} {unit}, MFU {prediction.mfu:.1%} of the "
        "devices' peak"
    )
    parts = sorted(prediction.parts.items(), key=lambda each: -each[1])
    for name, seconds in parts:
        share = seconds / prediction.step_seconds
        if share > SMALL:
            yield f"  {share:6.1%}  {seconds:.4g} s  {name}"
    room, needed = room_of(task), prediction.needed()
    yield f"memory   {size_text(round(needed))} of {size_text(round(room))}" + (
        "" if needed <= room else f": {size_text(round(needed - room))} too much"
    )
    for kind, nbytes in prediction.held.items():
        yield f"  held   {kind}: {size_text(round(nbytes))}"
    rest = prediction.peak_bytes - sum(prediction.held.values())
    yield f"  for a while   activations and what is gathered: {size_text(round(rest))}"
    if len(prediction.peaks) > 1:
        peaks = ", ".join(size_text(round(each)) for each in prediction.peaks)
        yield f"  at the peak, by stage: {peaks}"
    for tier in ("host", "disk"):
        if there := prediction.stored_most(tier):
            yield f"  on the {tier}, of a rank: {size_text(round(there))}"
    for (axis, operation), nbytes in prediction.sent.items():
        yield f"  sent   {operation} over {axis}: {size_text(round(nbytes))}"
    yield f"  a host sends to others: {size_text(round(prediction.leaving))}"
    if prediction.planned.honesty is not Honesty.EXACT:
        yield f"  approximate between hosts: {prediction.planned.methods()}"
    if needed > room:
        yield f"would fit with any of: {'; '.join(remedies(predictor, prediction.planned))}"


def found_rows(found: "Found", *, methods: bool) -> Sequence[Sequence[str]]:
    """Return the rows of the table of a search, with the methods between hosts or without."""
    best = found.best[0]
    return [
        [
            each.layout,
            f"{each.step_seconds:.4g} s",
            f"{each.tokens_per_second:,.0f}",
            f"{each.mfu:.1%}",
            size_text(round(each.needed())),
            size_text(round(each.leaving)),
            *([each.planned.methods()] if methods else []),
            f"{each.idle:.1%}",
            each.against(best),
        ]
        for each in found.best[:SHOWN]
    ]
