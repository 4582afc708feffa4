"""The models whose configs come with hf_ckpt, and errors for unknown model names. Does not import torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from hf_ckpt.errors import HfCkptError, reason_of, shown

_PACKAGE = Path(__file__).parent.parent
_PRESETS = (_PACKAGE / "presets", _PACKAGE.parent / "configs" / "models")
"""Folders of the presets' configs: inside an installed package, or next to the package in a checkout."""


def presets() -> dict[str, Path]:
    """The models whose configs come with hf_ckpt: name -> path of the config."""
    folder = next((folder for folder in _PRESETS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.json"))}


def no_model(name: str, error: Exception) -> HfCkptError:
    """Return the error for a name without a readable config, with the names that would work."""
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], presets(), n=2)
    hint = f"Did you mean {' or '.join(near)}? Else give" if near else "Give"
    known = "a preset" if near else f"one of {', '.join(presets())}"
    return HfCkptError(
        f"cannot read a model's config from {shown(name)}: {reason_of(error)}.\n{hint} a folder, a config.json, "
        f"a hub id, or {known}."
    )


def refuse_missing_model(name: str) -> None:
    """Raise `HfCkptError` if a name is not a preset, not a path, and not a reachable model of the hub.

    Transformers would raise, too, but takes seconds to import. A name that passes may still have no config.
    """
    if name in presets():
        return
    try:
        if Path(name).exists():
            return
    except (OSError, ValueError):
        return
    from huggingface_hub import constants, file_download, hf_hub_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        hf_hub_download(name, "config.json")
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise no_model(name, error) from error
    except LocalEntryNotFoundError as error:  # offline; parts of the model may be in the cache
        folder = file_download.repo_folder_name(repo_id=name, repo_type="model")
        if not Path(constants.HF_HUB_CACHE, folder).exists():
            raise no_model(name, error) from error
    except Exception:  # no such file, or the hub does not answer: transformers knows more ways
        return
