"""The models whose configs come with hf_ckpt. Does not import torch."""

from __future__ import annotations

from pathlib import Path

_PRESETS = (Path(__file__).parents[1] / "presets", Path(__file__).parents[2] / "configs" / "models")
"""Folders of the presets' configs: inside an installed package, or next to the package in a checkout."""


def presets() -> dict[str, Path]:
    """The models whose configs come with hf_ckpt: name -> path of the config."""
    return {path.stem: path for folder in _PRESETS for path in sorted(folder.glob("*.json"))}
