"""Caches the candidates of plans on disk, so that a second question about the same training is answered at once.

There is one small file per training, in `hf_ckpt` of the Hugging Face cache. Its name is a digest of everything
that the answer depends on: the question without its budget, the model's config, the device, the code of this package,
and the versions of the libraries that run the model. The files may be deleted at any time. Does not import torch.
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

from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.prediction.presets import presets
from hf_ckpt.prediction.question import Question

KEPT_FILES = 100
"""How many files are kept. The oldest are deleted first."""
_PACKAGES = ("torch", "transformers", "peft", "trl")


def load(asked: Question) -> Any:
    """The cached data for a question; None if there is none, or if it cannot be read."""
    path = _path(asked)
    try:
        return None if path is None else pickle.loads(zlib.decompress(path.read_bytes()))
    except Exception:  # no file, or not a whole one
        return None


def save(asked: Question, answers: Any) -> None:
    """Cache data for a question. Does nothing if the folder is not writable."""
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
    """The folder of the files: `$HF_HOME/hf_ckpt`, by default `~/.cache/huggingface/hf_ckpt`."""
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
    """The file with a model's config, if it is on this machine; else None."""
    path = presets().get(model, Path(model))
    try:
        if path.exists():
            path = path / "config.json" if path.is_dir() else path
            return path if path.is_file() and path.suffix == ".json" else None
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        return Path(found) if isinstance(found, str) else None
    except (OSError, ValueError):  # not a valid name of a file or model
        return None
