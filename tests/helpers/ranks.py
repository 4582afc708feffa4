"""Cases of training on two ranks, for the tests and for the worker that runs them."""

from __future__ import annotations

import dataclasses
from typing import Any

LAYERS = 4  # of each stack of a tiny model
STACKS = {"llama": ["model.layers"], "bert": ["bert.encoder.layer"], "t5": ["encoder.block", "decoder.block"]}
MIXED = {"rules": [{"layers": "0", "policy": "full"}, {"layers": "2", "policy": "selective"}]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how ranks share it, and a few backward passes."""

    by: str
    """`ddp`, `fsdp2`, `trainer` or `zero2`."""
    family: str = "llama"
    specs: tuple[dict[str, Any] | None, ...] = ({"policy": "full"},)
    """One for each rank, or one for all."""
    model: str = ""
    """A change made to the model first, see `build` in the worker."""
    steps: str = "one"
    """`one`, `pair` (two forwards, one backward), `accumulate` (two without reduction, then one), `repeat` (twice)."""
    order: str = "before"
    """Enabled `before` or `after` the model is wrapped; `stock`: transformers' reentrant checkpointing."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of DistributedDataParallel."""
    half: bool = False
    """FSDP2 runs forward and backward in bfloat16."""
    dropout: float = 0.0
    tokens: tuple[int, ...] = (16,)
    """The sequence length for each rank, or for all."""

    @property
    def forwards(self) -> int:
        """How often each block runs, without recomputations."""
        return {"one": 1, "pair": 2, "accumulate": 3, "repeat": 2}[self.steps]

    @property
    def compiled(self) -> bool:
        """Whether hf_ckpt compiles blocks. Compiled kernels round differently, so gradients are not bit-equal."""
        return any("compile" in (spec or {}) for spec in self.specs)

    def blocks(self) -> list[str]:
        """Names of all blocks."""
        named = [f"{stack}.{index}" for stack in STACKS[self.family] for index in range(LAYERS)]
        return [name.removeprefix("bert.") for name in named] if self.model == "headless" else named

    def planned(self, rank: int) -> dict[str, str]:
        """Block -> `full` or `selective`, written out by hand."""
        spec = self.specs[rank % len(self.specs)]
        kind = {"selective": "selective", "none": ""}.get(spec.get("policy"), "full")
        kinds = {"0": "full", "2": "selective"} if spec == MIXED else dict.fromkeys("0123", kind)
        every = spec.get("every_n_layers", 1)
        chosen = {name: kinds.get(name[-1], "") for name in self.blocks() if int(name[-1]) % every == 0}
        return {name: kind for name, kind in chosen.items() if kind}
