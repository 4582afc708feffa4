"""How ranks choose one plan where each recomputation gathers parameters.

`tests/parity/test_ranks.py` runs two ranks, and `tests/users/test_deepspeed.py` two ranks of ZeRO-3.
"""

import contextlib
import types

import pytest
import torch
from helpers.planned import budgeted
from helpers.steps import planned, step
from torch import nn

from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import FULL, KEEP
from hf_ckpt.training.phases import MOST_FAILURES, Phase
from hf_ckpt.training.ranks import Judged, all_of, fitting

OPTIONS = [{}, {"b0": KEEP}, {"b0": KEEP, "b1": KEEP}]
FIRST = [Judged(0, 3.0), Judged(0, 2.0), Judged(0, 1.0)]
SECOND = [Judged(0, 3.0), Judged(0, 3.5), Judged(9, 1.0)]


@pytest.mark.parametrize(
    ("judged", "expected"),
    [
        ([FIRST, SECOND], (OPTIONS[:2], True)),
        ([FIRST, FIRST], (OPTIONS[::-1], True)),
        ([FIRST, [judged._replace(excess_bytes=judged.excess_bytes + 5) for judged in SECOND]], (OPTIONS[:1], False)),
    ],
    ids=["one fits on one rank only", "all fit", "none fits"],
)
def test_a_plan_fits_if_it_fits_on_every_rank(judged, expected):
    """The slowest rank counts. If none fits, the one that needs least beyond the limit is taken."""
    assert fitting(OPTIONS, judged) == expected


def test_a_rank_that_cannot_plan_ends_all():
    assert all_of([(1, ""), (2, "")]) == [1, 2]
    with pytest.raises(HfCkptError, match="rank 1 cannot plan for its steps, and all ranks need one plan: it is"):
        all_of([(1, ""), (None, "it is"), (3, "")])


def trained(model, optimizer, steps, unusable=False):
    """Train, also in steps that cannot be measured; returns the phases of the steps."""
    phases = []
    for _ in range(steps):
        step(model, tiny_batch("llama"))
        session = installation(model).session
        phases.append(session.planned.phase)
        if unusable:
            session.planning.failures = MOST_FAILURES
        optimizer.step()
        optimizer.zero_grad()
    return phases


@pytest.mark.parametrize("unusable", [False, True])
def test_what_is_agreed_on_holds_until_the_next_optimizer_step(unusable):
    model = tiny_model("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.ds_id = id(parameter)
        parameter._z3_optimizer = types.SimpleNamespace(optimizer=optimizer)
    budgeted(model, "16GiB")
    expected = [Phase.WARM_UP, Phase.GIVEN_UP] if unusable else [Phase.WARM_UP, Phase.MEASURE, Phase.TIME]
    assert trained(model, optimizer, len(expected), unusable) == expected
    step(model, tiny_batch("llama"))
    session = installation(model).session
    agreed = session.planning.agreed
    step(model, tiny_batch("llama", tokens=24))  # another micro-step, before the optimizer's step
    assert session.planning.agreed is agreed
    if unusable:
        assert {action for _, action in installation(model).plan.actions} == {FULL}


class FullyShardedDataParallel(nn.Module):
    """As FSDP1 wraps a module."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._fsdp_wrapped_module(*args, **kwargs)


@pytest.mark.parametrize("policy", ["full", "auto", "selective"])
def test_parts_of_blocks_in_fsdp1_are_not_recomputed(policy):
    """There, recomputation fails on weights that are freed, and gathers more than a rank that does not recompute."""
    model = tiny_model("llama")
    planned(model, policy)
    layer = model.model.layers[1]
    layer.mlp = FullyShardedDataParallel(layer.mlp)
    refused = pytest.raises(HfCkptError, match=r"FSDP1 shards parts of block 'model\.layers\.1' one by one")
    with contextlib.nullcontext() if policy == "selective" else refused:
        step(model, tiny_batch("llama"))


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({}, "no optimizer of torch's kind"),
        ({"torch_autocast_gradscaler": 1}, "float16 skips steps on some ranks only"),
        ({"zenflow": True}, "ZenFlow steps in other threads"),
    ],
)
def test_ranks_without_a_common_step_are_refused(zero, said):
    model = tiny_model("llama")
    inner = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0)} if zero else {}
    for parameter in model.parameters():
        parameter.ds_id = id(parameter)
        parameter._z3_optimizer = types.SimpleNamespace(**inner, **zero)
    budgeted(model, "16GiB")
    with pytest.raises(HfCkptError, match=f"under ZeRO-3 all ranks must recompute the same blocks.*{said}"):
        step(model, tiny_batch("llama"))
