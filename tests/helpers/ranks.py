"""Names of what two ranks train, for tests that compare what they did."""

from __future__ import annotations

LAYERS = 4  # of each stack of a tiny model
STACKS = {"llama": ["model.layers"], "bert": ["bert.encoder.layer"], "t5": ["encoder.block", "decoder.block"]}


def blocks(family: str, every: int = 1) -> list[str]:
    """Names of the blocks of a small model, or of every second one of each stack."""
    return [f"{stack}.{index}" for stack in STACKS[family] for index in range(0, LAYERS, every)]


MIXED = {"rules": [{"layers": "0", "policy": "full"}, {"layers": "2", "policy": "selective"}]}
"""Blocks 0 are recomputed, blocks 2 rebuilt, and the others kept."""
