"""The one style of all pictures: sizes, colours of policies, labels that do not overlap, and how figures are saved."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.spec.actions import FULL, KEEP, OFFLOAD, SELECTIVE, Action, colour_of
from hf_ckpt.spec.files import refuse_unwritable, replacing

PICTURES = (".png", ".svg", ".pdf")
"""What the path of a picture may end in."""
DPI = 130
"""Pixels of an inch in a saved picture. With letters of `STYLE`'s size it can still be read at half its width."""
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
PLANNED = "#c44e52"
"""Colour of plans that were made for a budget, which mix actions."""
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
"""How the name of a way to train may begin -> its colour, that of its action. The first that fits counts."""
_PLACES = (
    (1, 1, "left", "bottom"),
    (1, -1, "left", "top"),
    (-1, 1, "right", "bottom"),
    (-1, -1, "right", "top"),
    (1.4, 0, "left", "center"),
    (-1.4, 0, "right", "center"),
    (0, 1.4, "center", "bottom"),
    (0, -1.4, "center", "top"),
)
"""Where a label may lie beside its point: directions to the right and up, and its alignment."""
_DISTANCES = (4, 10, 18, 28, 40, 54)
"""How far a label may lie from its point, in points."""


def colour_of_policy(name: str) -> str:
    """Return the colour of a way to train, by its name in tables; grey where it has none."""
    begins = name.lower()
    return next((colour for starts, colour in _COLOURS if begins.startswith(starts)), "0.5")


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`, set to draw files only. Raises `MissingDependencyError` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install 'hf-ckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextlib.contextmanager
def drawing() -> Iterator[Any]:
    """As a context: `matplotlib.pyplot` with the style of all pictures. Raises as `import_pyplot`."""
    pyplot = import_pyplot()
    with pyplot.rc_context(STYLE):
        yield pyplot


def label_points(
    axes: Any, labels: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]], size: float = 10
) -> None:
    """Write labels beside their points, where they cover neither a point nor each other, with a line to those far away.

    To be called last, because the places depend on everything else.

    Args:
        axes: of matplotlib.
        labels: (x, y, text), in the units of the axes.
        points: what else must stay visible, in the units of the axes.
        size: of letters, in points.
    """
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.draw_without_rendering()  # the layout is known then
    pixels = [axes.transData.transform(point) for point in [*points, *((x, y) for x, y, _ in labels)]]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
    for x, y, text in labels:
        tries: list[tuple[float, int, Any, Any]] = []
        for distance, (right, up, across, along) in ((d, place) for d in _DISTANCES for place in _PLACES):
            note = axes.annotate(
                text,
                (x, y),
                xytext=(right * distance, up * distance),
                textcoords="offset points",
                ha=across,
                va=along,
                fontsize=size,
                color="0.2",
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.8} if distance > _DISTANCES[1] else None,
            )
            box = _box(note)
            covers = sum(_common(box, other) for other in taken) + 10 * (
                box.width * box.height - _common(box, axes.bbox)
            )
            tries.append((covers, len(tries), note, box))
            if covers <= 0:
                break
        covers, _, chosen, box = min(tries, key=lambda found: found[:2])
        for _, _, note, _ in tries:
            if note is not chosen:
                note.remove()
        taken.append(box)


def _box(note: Any) -> Any:
    """Return where the text of an annotation lies, in pixels, without the line to its point."""
    from matplotlib.text import Text

    note.update_positions(note.figure.canvas.get_renderer())
    return Text.get_window_extent(note)


def _common(box: Any, other: Any) -> float:
    """Return the area that two boxes have in common, in pixels."""
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return float(width * height) if width > 0 and height > 0 else 0.0


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure, whole or not at all, and close it; no folder is made for it.

    Raises `FileError` where it cannot be written.
    """
    refuse_unwritable(path, PICTURES)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=DPI, format=path.suffix[1:].lower())
    import_pyplot().close(figure)
