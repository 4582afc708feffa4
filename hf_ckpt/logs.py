"""Warnings that are logged once per process, however often their cause comes back; and the logger of plans."""

from __future__ import annotations

import logging

PLANS = logging.getLogger("hf_ckpt.plans")
"""Gets one message, of level INFO, for every plan that a model gets, and for each that is made for a batch.

`python -m hf_ckpt` prints these messages.
"""
_given: set[tuple[str, ...]] = set()


def warn_once(log: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless the same one, with the same arguments, was logged before."""
    key = (log.name, message, *map(str, args))  # as text, because a list has no hash
    if key not in _given:
        _given.add(key)
        log.warning(message, *args)


def forget_warnings() -> None:
    """Forget which warnings were given, so that each may be given once more, as tests need it."""
    _given.clear()
