"""The style of all pictures: sizes, colours of policies, labels that do not overlap, and how to save figures."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.forecast.report import PLANNED
from hf_ckpt.spec.actions import FULL, KEEP, OFFLOAD, SELECTIVE, Action, colour_of
from hf_ckpt.spec.files import refuse_unwritable, replacing

PICTURES = (".png", ".svg", ".pdf")
"""Suffixes of pictures."""
DPI = 130
"""Pixels per inch of a saved picture. With the font sizes of `STYLE`, it is readable at half its width."""
STYLE = {
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 11,
    "legend.handlelength": 1.2,
    "lines.linewidth": 1.8,
    "figure.titlesize": 13,
}
"""Settings of matplotlib that all pictures share."""
_ATTENTION, _LINEAR = Action("selective", ("attention",)), Action("selective", ("linear",))
_ACTIONS: tuple[tuple[tuple[str, ...], Action], ...] = (
    (("none", "keep", "head in chunks"), KEEP),
    (("compiled",), Action("compiled", share=1.0)),
    (("offload", "activation offloading", "full, activation offloading"), OFFLOAD),
    (("full", "segments"), FULL),
    (("selective, save attention", "rebuild, save attention", "sac, attention"), _ATTENTION),
    (("selective, save linear",), _LINEAR),
    (("selective, saved",), dataclasses.replace(SELECTIVE, moved=True)),
    (("selective", "rebuild", "sac"), SELECTIVE),
)
_COLOURS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("budget", "planned", "this plan"), PLANNED),
    (("every",), "#f0bd97"),
    (("guard",), "#333333"),
    *((names, colour_of(action)) for names, action in _ACTIONS),
)
"""Beginning of the name of a policy -> colour of its action. The first match counts."""
_SIDES = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1.4, 0), (-1.4, 0), (0, 1.4), (0, -1.4))
"""Directions from a point to its label: (right, up)."""
_DISTANCES = (4, 10, 18, 28, 40, 54)
"""Distances from a point to its label, in typographic points."""


def colour_of_policy(name: str) -> str:
    """Return the colour of a policy by its name in tables; grey if it has none."""
    begins = name.lower()
    return next((colour for starts, colour in _COLOURS if begins.startswith(starts)), "0.5")


def import_pyplot() -> Any:
    """Import `matplotlib.pyplot` for drawing to files. Raises `MissingDependencyError` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextlib.contextmanager
def drawing() -> Iterator[Any]:
    """Context manager that yields `matplotlib.pyplot` with the style. Raises the errors of `import_pyplot`."""
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        yield pyplot


def label_points(
    axes: Any, labels: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]], size: float = 10
) -> None:
    """Write labels beside their points so that they cover neither points nor each other.

    Call it last, because the positions depend on everything else.

    Args:
        axes: of a matplotlib figure.
        labels: (x, y, text), in the units of the axes.
        points: other points that must stay visible, in the units of the axes.
        size: font size in typographic points.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # computes the layout
    pixels = [axes.transData.transform(point) for point in [*points, *((x, y) for x, y, _ in labels)]]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    for x, y, text in labels:
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.8}
        note = axes.annotate(
            text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=size, color="0.2", arrowprops=line
        )
        tries = []
        for number, (distance, (right, up)) in enumerate(itertools.product(_DISTANCES, _SIDES)):
            place = {
                "position": (right * distance, up * distance),
                "ha": "center" if right == 0 else "left" if right > 0 else "right",
                "va": "center" if up == 0 else "bottom" if up > 0 else "top",
            }
            note.set(**place)
            box = text_box(note)
            outside = box.width * box.height - common_area(box, axes.bbox)
            covered = sum(common_area(box, other) for other in taken) + 10 * outside
            tries.append((covered, number, distance, place, box))
            if covered <= 0:
                break
        _, _, distance, place, box = min(tries, key=lambda found: found[:2])
        note.set(**place)
        note.arrow_patch.set_visible(distance > _DISTANCES[1])
        taken.append(box)


def text_box(note: Any) -> Any:
    """Return the box of an annotation's text in pixels, without the line to its point."""
    from matplotlib.text import Text

    note.update_positions(note.figure.canvas.get_renderer())
    return Text.get_window_extent(note)


def common_area(box: Any, other: Any) -> float:
    """Return the common area of two boxes, in square pixels."""
    common = type(box).intersection(box, other)
    return 0.0 if common is None else float(common.width * common.height)


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure to an existing folder, and close it. If this fails, an existing file is unchanged.

    Raises `FileError` if it cannot be written.
    """
    refuse_unwritable(path, PICTURES)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=DPI, format=path.suffix[1:].lower())
    import_pyplot().close(figure)
