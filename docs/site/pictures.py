"""The pictures of the docs, as SVG: ``python docs/site/pictures.py`` writes them to docs/pictures.

The numbers of the pictures are those of the product: ``cost()`` of each strategy, and the simulated
schedules of pipelines.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.config.resolve import resolve
from drivetrain.registry import strategies
from drivetrain_launch.commands.preview import example_model
from drivetrain_launch.forecast import promises_for
from drivetrain_megatron.pipeline.command import COLORS, MEANINGS, simulate
from drivetrain_megatron.pipeline.schedules import SCHEDULES, ActionKind, make_schedule

FOLDER = Path(__file__).parents[1] / "pictures"
GIB = 2**30
RANKS = 8
SHOWN = ("ddp", "zero1", "zero2", "zero3", "fsdp")
FILLS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "lent buffers": "#999999",
    "sent": "#cc79a7",
}
"""Told apart by people who see fewer colors (after Okabe and Ito)."""

ROW, BAR = 30, 18
"""Pixels from row to row, and of a bar's height."""


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)


def pictures() -> dict[str, str]:
    """Return the text of each picture by the name of its file."""
    return {"held-and-sent.svg": held_and_sent(), "pipelines.svg": pipelines()}


def held_and_sent() -> str:
    """Draw the bytes that a rank holds, and sends in a step, under each strategy."""
    resolved = resolve(find_config=strategies().find_config)
    promises = {p.form: p for p in promises_for(example_model(), resolved, RANKS)}
    scale = 22.0  # pixels for a GiB
    body = [_label(80, 20, "held by a rank (GiB)", "start"), _label(500, 20, "sent", "start")]
    for number, name in enumerate(SHOWN):
        y = 36 + number * ROW
        cost = promises[name].cost
        assert cost is not None
        body.append(_label(70, y + 13, name, "end"))
        x = 80.0
        for kind, count in _kinds(cost.held):
            width = count / GIB * scale
            body.append(_bar(x, y, width, FILLS[kind]))
            x += width
        body.append(_label(x + 5, y + 13, f"{cost.total_held / GIB:.1f}", "start"))
        width = cost.total_sent / GIB * scale
        body.append(_bar(500, y, width, FILLS["sent"]))
        body.append(_label(505 + width, y + 13, f"{cost.total_sent / GIB:.1f}", "start"))
    y = 46 + len(SHOWN) * ROW
    body += _legend(80, y, FILLS)
    title = f"1e9 parameters in fp32 with Adam on {RANKS} ranks: bytes by strategy"
    return _svg(760, y + 34, title, body)


def pipelines() -> str:
    """Draw who computes when under each schedule: 4 ranks, 8 micro-batches."""
    ranks, micro_batches, scale = 4, 8, 18.0
    body, y = [], 6
    for name in SCHEDULES:
        chunks = 2 if name == "interleaved" else 1
        whole = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
        halves = {ActionKind.INPUT: 1.0, ActionKind.WEIGHT: 1.0}
        times = {kind: time / chunks for kind, time in (whole | halves).items()}
        timeline = simulate(make_schedule(name, ranks, micro_batches, chunks), times)
        idle = f"{timeline.idle:.0%} idle"
        body.append(_label(60, y + 14, f"{name}: {timeline.makespan:g} units, {idle}", "start"))
        y += 22
        for rank, spans in enumerate(timeline.ranks):
            body.append(_label(52, y + 13, f"rank {rank}", "end"))
            for span in spans:
                shade = span.action.stage // ranks % 2
                width = (span.stop - span.start) * scale
                fill = COLORS[span.action.kind][shade]
                body.append(_bar(60 + span.start * scale, y, width, fill, 'stroke="#fff"'))
            y += BAR + 2
        y += 10
    legend = {meaning: COLORS[kind][0] for kind, meaning in MEANINGS.items()}
    body += _legend(60, y, legend)
    return _svg(700, y + 34, "Pipelines of 4 ranks with 8 micro-batches, by schedule", body)


def _kinds(held: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each kind that has a color; all other kinds are lent buffers."""
    known = [kind for kind in FILLS if kind in held]
    known_bytes = 0
    for kind in known:
        known_bytes += held[kind]
        yield kind, held[kind]
    if rest := sum(held.values()) - known_bytes:
        yield "lent buffers", rest


def _svg(width: int, height: int, title: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="13" role="img">',
            f"<title>{title}</title>",
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def _bar(x: float, y: float, width: float, fill: str, more: str = "") -> str:
    extra = f" {more}" if more else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{BAR}" fill="{fill}"{extra}/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.4g}" y="{y:g}" text-anchor="{anchor}" fill="#222">{text}</text>'


def _legend(x: float, y: float, fills: dict[str, str]) -> Iterator[str]:
    for meaning, fill in fills.items():
        yield _bar(x, y, BAR, fill)
        yield _label(x + 24, y + 13, meaning, "start")
        x += 44 + 7 * len(meaning)


if __name__ == "__main__":
    main()
