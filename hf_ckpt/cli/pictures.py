"""Loading matplotlib and saving figures, so that the pictures of all verbs have one style."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hf_ckpt.errors import MissingDependencyError


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
    """Save a figure without upper and right spines, and close it; folders are made as needed."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    import_pyplot().close(figure)
