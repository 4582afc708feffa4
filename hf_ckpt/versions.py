"""Versions at which other packages changed their behaviour. `doctor` reads them, so this file does not import torch."""

from __future__ import annotations

LAST_DEEPSPEED_WITH_EMPTY_SHAPES = "0.19.2"
"""The last DeepSpeed in which frozen parameters have no shape while a block is recomputed under ZeRO-3.
https://github.com/huggingface/transformers/issues/47254"""
NON_REENTRANT_SINCE = "5.0"
"""The first transformers whose checkpointing is non-reentrant by default (read in 4.57.1 and 5.0.0)."""
NEW_NAME_SINCE = "5.23"
"""The first transformers with the name `activation_checkpointing` (read in 5.22.0 and 5.23.0)."""
