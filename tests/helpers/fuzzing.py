"""How many examples fuzz tests run, how their steps are compared, and what may be logged while they run.

The same few examples are run every time. `HF_CKPT_FUZZ=1000 pytest -n 0 -m slow tests/parity` runs about 1,000 other
ones over all fuzz tests, and takes `--hypothesis-seed=N` to repeat a run and `--hypothesis-show-statistics`.
"""

from __future__ import annotations

import logging
import os
import warnings

import torch
from hypothesis import HealthCheck, settings

from helpers.snapshots import snapshot
from helpers.steps import step
from hf_ckpt.engines.head.logits import tokens_per_chunk
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import base_model, vocabulary_head

FUZZ = int(os.environ.get("HF_CKPT_FUZZ", "0"))


def examples(count, share=0.0):
    """So many examples by default, always the same; or that share of those asked for, if it has one."""
    other = bool(FUZZ and share)
    return settings(
        max_examples=max(1, round(FUZZ * share)) if other else count,
        derandomize=not other,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def unchanged(model, before):
    """Whether a model's snapshot is what it was: no bare comparison, whose failure pytest would explain for minutes."""
    return snapshot(model) == before


def assert_equal(expected, got, what=""):
    """Bit-equal, NaN like NaN."""
    assert expected.keys() == got.keys(), what
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), f"{what}: only one side has {name}"
        assert value is None or value.dtype == other.dtype, f"{what}: {name}"
        assert value is None or torch.equal(value.nan_to_num(), other.nan_to_num()), f"{what}: {name} differs"


def train(model, batch):
    """Loss and gradients of a step that leaves no gradients behind."""
    found = step(model, batch)
    model.zero_grad(set_to_none=True)
    return found


def is_chunked(model, asked, batch):
    """Whether the head runs in chunks; a single one is the plain head."""
    if vocabulary_head(base_model(model)) is None:
        return False
    tokens = batch["labels"].numel()
    return asked != "full" and tokens > tokens_per_chunk(asked, tokens, trained=True)


# --- what is logged -------------------------------------------------------------------------------------------------

GENERIC_SAID = "is of no known family"
NO_LANE_SAID = "there is no host memory to offload to"
LIMIT_SAID = "is used up; what does not fit stays on the device"
PLAIN_HEAD_SAID = "is not run in chunks, because"
NOTHING_SAID = "found nothing in a block that can be rebuilt"
EVAL_SAID = "runs in eval mode with gradients on"


class Said(logging.Handler):
    """Warnings of hf_ckpt's loggers, and Python's own, while it is entered."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []
        self.caught = warnings.catch_warnings(record=True)

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        forget_warnings()
        self.recorded = self.caught.__enter__()
        warnings.simplefilter("always")
        logging.getLogger("hf_ckpt").addHandler(self)
        return self

    def __exit__(self, *raised):
        logging.getLogger("hf_ckpt").removeHandler(self)
        self.caught.__exit__(*raised)

    def python(self):
        """Texts of Python's warnings."""
        return {str(warning.message) for warning in self.recorded}

    def unexpected(self, *expected):
        """Messages that none of the texts is a part of."""
        return [message for message in self.messages if not any(text in message for text in expected)]
