"""The models whose configs come with hf_ckpt, and names of models that lead nowhere. Imports no torch."""

from __future__ import annotations

import difflib
from pathlib import Path

from hf_ckpt.errors import HfCkptError, reason_of, shown

_PACKAGE = Path(__file__).parent.parent
_PRESETS = (_PACKAGE / "presets", _PACKAGE.parent / "configs" / "models")
"""Where the configs of presets lie: inside an installed package, or beside the package in a checkout."""


def presets() -> dict[str, Path]:
    """The models whose configs come with hf_ckpt: name -> path of the config."""
    folder = next((folder for folder in _PRESETS if folder.is_dir()), None)
    return {} if folder is None else {path.stem: path for path in sorted(folder.glob("*.json"))}


def no_model(name: str, error: Exception) -> HfCkptError:
    """Return the error for a name from which no model's config can be read, with what may be given instead."""
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], presets(), n=2)
    hint = f"Did you mean {' or '.join(near)}? Else give" if near else "Give"
    known = "a preset" if near else f"one of {', '.join(presets())}"
    return HfCkptError(
        f"cannot read a model's config from {shown(name)}: {reason_of(error)}.\n{hint} a folder, a config.json, "
        f"a hub id, or {known}."
    )


def refuse_missing_model(name: str) -> None:
    """Raise `HfCkptError` where a name is no preset, nothing on disk, and no model of the hub that can be reached.

    Transformers says so as well, but takes seconds to import. What this lets through may still hold no config.
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
    except LocalEntryNotFoundError as error:  # without a connection; a part of it may have been downloaded before
        folder = file_download.repo_folder_name(repo_id=name, repo_type="model")
        if not Path(constants.HF_HUB_CACHE, folder).exists():
            raise no_model(name, error) from error
    except Exception:  # a model without this file, or a hub that does not answer: transformers knows more ways
        return
