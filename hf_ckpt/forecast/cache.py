"""Keeps on disk what plans are chosen from, so that a second question about the same training is answered at once.

There is one small file for each training, in `hf_ckpt` of the Hugging Face cache. Its name is a digest of everything
that the answer depends on: the question without its budget, the model's config, the device, the code of this package,
and the versions of what runs the model. All of them may be deleted at any time. Free of torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import pickle
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.presets import presets
from hf_ckpt.prediction.question import Question

KEPT_FILES = 100
"""How many files are kept; those that were written first go first."""
_PACKAGES = ("torch", "transformers", "peft", "trl")


def load(asked: Question) -> Any:
    """What was kept of the training that is asked about; None if nothing was, or it cannot be read."""
    path = _path(asked)
    try:
        return None if path is None else pickle.loads(zlib.decompress(path.read_bytes()))
    except Exception:  # no file, or not a whole one
        return None


def save(asked: Question, answers: Any) -> None:
    """Keep what was found of a training. Nothing is kept where the folder cannot be written."""
    path = _path(asked)
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(zlib.compress(pickle.dumps(answers)))
        os.replace(name, path)  # other processes see the old file or the new one, and never a part of it
        by_age = sorted(path.parent.iterdir(), key=lambda kept: kept.stat().st_mtime)
        for old in by_age[:-KEPT_FILES]:
            old.unlink(missing_ok=True)


def folder() -> Path:
    """Where the files lie: `$HF_HOME/hf_ckpt`, as a rule `~/.cache/huggingface/hf_ckpt`."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"))
    return Path(os.environ.get("HF_HOME", caches / "huggingface")).expanduser() / "hf_ckpt"


def _path(asked: Question) -> Path | None:
    """The file for a question; None for one whose answer depends on this machine, or whose config is not on disk."""
    config = _config(asked.model)
    if config is None or asked.device in (None, "cpu") or asked.max_batch or asked.max_tokens:
        return None
    same = dataclasses.replace(asked, budget=None, frontier=False)
    parts = [repr((same, DEVICES[str(asked.device)], sys.version)).encode(), config.read_bytes()]
    parts += [path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            parts.append(f"{name} {importlib.metadata.version(name)}".encode())
    return folder() / hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _config(model: str) -> Path | None:
    """The file with a model's config, where it is on this machine."""
    path = presets().get(model, Path(model))
    try:
        if path.exists():
            path = path / "config.json" if path.is_dir() else path
            return path if path.is_file() and path.suffix == ".json" else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        return Path(found) if isinstance(found, str) else None
    except (OSError, ValueError):  # not a name of a file, or of a model
        return None
