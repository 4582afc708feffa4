"""Counts of blocks' runs that do not come from hf_ckpt, and every message of a training."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from hf_ckpt.models.blocks import find_blocks

LOGGERS = ("", "transformers", "datasets", "sentence_transformers")
"""The root logger, and loggers that do not propagate to it."""


@contextlib.contextmanager
def counted_calls(model: nn.Module, *, only_training: bool = False) -> Iterator[dict[str, int]]:
    """Block -> how often its first inner module ran, recomputations included; perhaps only those with gradients."""
    calls, handles = {}, []
    for name, block in find_blocks(model).modules.items():

        def count(module: nn.Module, args: object, name: str = name) -> None:
            calls[name] += not only_training or (torch.is_grad_enabled() and module.training)

        calls[name] = 0
        first = next(module for module in block.modules() if not list(module.children()))
        handles.append(first.register_forward_pre_hook(count))
    yield calls
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def every_message() -> Iterator[list[str]]:
    """The texts of Python's warnings and of all loggers."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    with contextlib.ExitStack() as undo, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in map(logging.getLogger, LOGGERS):
            logger.addHandler(handler)
            undo.callback(logger.removeHandler, handler)
        yield texts
    texts.extend(str(warning.message) for warning in caught)
