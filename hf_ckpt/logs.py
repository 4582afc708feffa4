"""Warnings that are logged only once per process, and the logger of plans."""

from __future__ import annotations

import logging

PLANS = logging.getLogger("hf_ckpt.plans")
"""Logs every plan that is enabled on a model or made for a batch, at level INFO.

`python -m hf_ckpt` prints these messages.
"""
_given: set[tuple[str, ...]] = set()


def warn_once(log: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless it was logged before with the same arguments."""
    key = (log.name, message, *map(str, args))  # as text, because a list has no hash
    if key not in _given:
        _given.add(key)
        log.warning(message, *args)


def forget_warnings() -> None:
    """Forget which warnings were logged, so that they can be logged again. Tests use this."""
    _given.clear()
