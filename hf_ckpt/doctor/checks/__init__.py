"""The checks of `hf-ckpt doctor`: each is a small function from `Facts` to findings, in a file by its subject.

`request.py` looks at the flag and its kwargs, `distributed.py` at FSDP and DeepSpeed, `compiled.py` at torch.compile,
`model.py` at the model, and `machine.py` at the device and the installed versions. A new check is a function in one of
these files and an entry in `CHECKS`.
"""

from __future__ import annotations

from hf_ckpt.doctor.checks.compiled import compiled_engine, cuda_graphs
from hf_ckpt.doctor.checks.distributed import deepspeed_block, fsdp2_dropout, sharded, zero3_frozen
from hf_ckpt.doctor.checks.machine import environment, offload_nowhere
from hf_ckpt.doctor.checks.model import (
    attention,
    blocks,
    cache,
    logits,
    one_counter,
    prefix_tuning,
    quantised,
    routers,
)
from hf_ckpt.doctor.checks.request import (
    flag_names,
    kwargs_without_flag,
    needs_hf_ckpt,
    random_state_off,
    reentrant,
    spec_problems,
    two_owners,
)
from hf_ckpt.doctor.findings import Check

CHECKS: tuple[Check, ...] = (
    *(two_owners, reentrant, spec_problems, needs_hf_ckpt, kwargs_without_flag, flag_names),
    *(fsdp2_dropout, random_state_off, zero3_frozen, deepspeed_block),
    *(cuda_graphs, compiled_engine, prefix_tuning, cache, attention, logits),
    *(blocks, one_counter, sharded, offload_nowhere, quantised, routers, environment),
)
"""Every check, in the order that findings of one severity are reported in."""
