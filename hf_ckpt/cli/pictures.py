"""Loading matplotlib and saving figures, so that the pictures of all verbs have one style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.spec.files import refuse_unwritable, replacing

PICTURES = (".png", ".svg", ".pdf")
"""What the path of a picture may end in."""


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`, set to draw files only. Raises `MissingDependencyError` without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("matplotlib", "drawing a picture", "pip install 'hf-ckpt[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Save a figure without upper and right spines, whole or not at all, and close it; no folder is made for it.

    Raises `FileError` where it cannot be written.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    refuse_unwritable(path, PICTURES)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=130, format=path.suffix[1:].lower())
    import_pyplot().close(figure)
