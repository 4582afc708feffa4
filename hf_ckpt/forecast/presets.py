"""The models whose configs come with hf_ckpt. Does not import torch."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_PRESETS = (_PACKAGE / "presets", _PACKAGE.parent / "configs" / "models")
"""Folders of the presets' configs: inside an installed package, or next to the package in a checkout."""


def presets() -> dict[str, Path]:
    """The models whose configs come with hf_ckpt: name -> path of the config."""
    folder = next((folder for folder in _PRESETS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.json"))}
