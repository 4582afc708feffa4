"""Warnings that are logged only once per process, and lines about plans."""

from __future__ import annotations

import logging
import os
import sys

PLANS = logging.getLogger("hf_ckpt.plans")
"""Logs at level INFO when a run is measured, and every plan that is enabled on a model or made for a batch."""
_warned: set[tuple[str, ...]] = set()


def tell(message: str, *args: object) -> None:
    """Log a line about a plan. If nobody has set up logging for it, the first rank prints it to stderr.

    Python shows no messages below WARNING by default, but a run should say that it is measured and what was planned.
    `logging.getLogger("hf_ckpt").setLevel("WARNING")` turns that off.
    """
    # `hasHandlers` also sees the root's: a program that has set up logging decides by its own level.
    if PLANS.isEnabledFor(logging.INFO) and PLANS.hasHandlers():
        PLANS.info(message, *args)
    elif not (PLANS.level or logging.getLogger("hf_ckpt").level) and os.environ.get("RANK", "0") == "0":
        print(message % args, file=sys.stderr, flush=True)


def warn_once(log: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, unless it was logged before with the same arguments."""
    key = (log.name, message, *map(str, args))  # as text, because a list has no hash
    if key not in _warned:
        _warned.add(key)
        log.warning(message, *args)


def forget_warnings() -> None:
    """Forget which warnings were logged, so that they can be logged again. Tests use this."""
    _warned.clear()
