"""Cases of training on two ranks, for the tests and for the worker that runs them, `scripts/ranks.py`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import distributed as dist

LAYERS = 4  # of each stack of a tiny model
STACKS = {"llama": ["model.layers"], "bert": ["bert.encoder.layer"], "t5": ["encoder.block", "decoder.block"]}
MIXED = {"rules": [{"layers": "0", "policy": "full"}, {"layers": "2", "policy": "selective"}]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how ranks share it, and a few steps."""

    by: str
    """`ddp`, `fsdp1`, `fsdp2`, `trainer` (with DDP), `zero2` or `zero3` (the Trainer with DeepSpeed), `accelerate`
    (its own FSDP2), `engine` (ZeRO-3 of DeepSpeed's engine), `marked` (alone, with parameters that look as under
    ZeRO-3), or `alone` (only the first rank trains)."""
    family: str = "llama"
    specs: tuple[dict[str, Any], ...] = ({"policy": "full"},)
    """One for each rank, or one for all."""
    share: float | None = None
    """In place of `specs`, a budget at this position between the peaks under `full` and without checkpointing."""
    model: str = ""
    """A change made to the model first, see `build` in the worker."""
    passing: str = ""
    """The last digits of blocks that backward runs once more for the next one."""
    steps: int = 1
    accumulate: int = 1
    """Micro-steps of a step; only the last one exchanges gradients."""
    more: int = 0
    """Micro-steps that ranks have more in turn."""
    pair: bool = False
    """Whether a micro-step is two forwards and one backward."""
    order: str = "before"
    """Enabled `before` or `after` the model is wrapped; `stock`: transformers' reentrant checkpointing."""
    owner: str = "ours"
    """Who is asked to checkpoint under accelerate: hf_ckpt, or accelerate, too (`both`)."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of DistributedDataParallel."""
    half: bool = False
    """FSDP2 runs forward and backward in bfloat16."""
    dropout: float = 0.0
    tokens: tuple[int, ...] = (16,)
    """The sequence length for each rank, or for all."""
    turns: bool = False
    """Whether lengths go on to the next rank after each forward."""
    later: int = 0
    """Tokens that the last rank has more in the second half of the steps."""
    fails: bool = False
    """Whether the last rank cannot plan."""

    @property
    def forwards(self) -> int:
        """How often each block runs, without recomputations."""
        return self.steps * self.accumulate * (2 if self.pair else 1)

    @property
    def compiled(self) -> bool:
        """Whether hf_ckpt compiles blocks. Compiled kernels round differently, so gradients are not bit-equal."""
        return any("compile" in spec for spec in self.specs)

    @property
    def budget(self) -> bool:
        """Whether ranks measure and plan."""
        return any("budget" in spec for spec in self.specs)

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


def assert_as_planned(case: Case, rank: int, found: dict[str, Any]) -> None:
    """Check forwards and recomputations of each planned block, by hf_ckpt's count and by a count inside each block."""
    planned = case.planned(rank)
    assert found["forwards"] == dict.fromkeys(planned, case.forwards)
    whole = [name for name, kind in planned.items() if kind == "full"]
    again = {name: case.forwards * (2 if name[-1] in case.passing else 1) for name in whole}
    counts = {name: found["recomputed"][name] for name in planned}
    assert {name: counts[name] for name in whole} == again
    assert found["calls"] == {name: case.forwards + again.get(name, 0) for name in case.blocks()}
    rebuilt = [counts[name] for name, kind in planned.items() if kind == "selective"]
    if rebuilt and case.by == "zero3":  # a block may have nothing that can be rebuilt, which a warning says
        assert any(rebuilt) != ("that can be rebuilt" in found["messages"])
    else:
        assert all(rebuilt)


@contextlib.contextmanager
def one_rank():
    """A process group of this process alone. What takes two ranks is in `test_ranks.py`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
