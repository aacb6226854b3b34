"""One chart of a report: its figure, as a part of a page and as a PNG.

Figures are matplotlib's own objects, without its global state: a script may plot at the same time.
"""

import io
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

COLORS = ("#3366cc", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#0987a0", "#975a16", "#4a5568")
"""One for each run, or each rank, in turn."""

STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#a0aec0",
    "axes.labelcolor": "#4a5568",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#edf2f7",
    "xtick.color": "#718096",
    "ytick.color": "#718096",
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "svg.fonttype": "path",
    "figure.constrained_layout.use": True,
}


def style(**more: Any) -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws as reports look."""
    return mpl.rc_context(STYLE | more)


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure of a report.

    Attributes:
        name: of its file.
        title: above it.
        text: a sentence below the title; "" for none.
        figure: matplotlib's.
    """

    name: str
    title: str
    text: str
    figure: Figure

    def svg(self) -> str:
        """Return the drawing as an element of a page, without a reference to anything else."""
        out = io.StringIO()
        with style(**{"svg.hashsalt": self.name}):
            self.figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        drawing = out.getvalue()
        drawing = drawing[drawing.index("<svg") :]
        drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
        # Names are of one page: those of two drawings must not meet.
        drawing = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", drawing)
        return re.sub(r'\b(width|height)="[\d.]+pt"', "", drawing, count=2)

    def save(self, folder: Path) -> Path:
        """Write ``NAME.png`` into a folder.

        Raises:
            OSError: the file cannot be written.
        """
        path = folder / f"{self.name}.png"
        with style():
            self.figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
        return path
