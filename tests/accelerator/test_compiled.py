"""Budgets for compiled blocks on the simulated device: they are measured, planned in shares, and held."""

import gc

import pytest
import torch
from helpers.adapters import with_lora
from helpers.steps import assert_same, planned, without_cache

import hf_ckpt
from accelerator import device
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import planned_actions
from hf_ckpt.training.measurements import TIMED_STEPS
from hf_ckpt.training.phases import RACE_STEPS, Phase

pytestmark = [
    pytest.mark.usefixtures("nothing_compiled"),
    pytest.mark.skipif(not compat.transformers.HOOKS_STAY_OUTSIDE, reason="compiled blocks are not measured"),
]
STEPS = 2 * len(planned_actions(compiled=True)) + TIMED_STEPS + 3 * RACE_STEPS + 2 + 2
"""Two of each share, of which the first compiles; the timed ones; a race of three plans at most; two checks; two more.
"""


def train(spec, graphs, family="llama", lora=False, steps=STEPS, entered=None):
    """Train for some steps; returns the plan's record, losses and gradients, and for each step its peak, its phase, and
    whether it compiled a graph. `entered` gets the shares of all plans that may have raced."""
    model = tiny_model(family, layers=8, hidden=64, attention="sdpa")
    model = device.moved_to(with_lora(model, family, lora_dropout=0.0) if lora else model, device.FIRST)
    planned(model, {"compile": "blocks", "check_every": 0, **spec})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    found, seen = {}, []
    for seed in range(steps):
        gc.collect()
        device.reset_peak(0)
        compiled = len(graphs)
        batch = tiny_batch(family, batch=4, tokens=32, seed=seed)
        batch = {name: value.to(device.FIRST) for name, value in batch.items()}
        optimizer.zero_grad()
        loss = model(**without_cache(model, batch)).loss
        loss.backward()
        optimizer.step()
        session = installation(model).session  # None without a budget
        seen.append((device.counted(0)["peak_bytes"], session and session.planned.phase, len(graphs) > compiled))
        found[f"loss {seed}"] = loss.detach().cpu()
        del loss, batch
    if entered is not None:
        entrants = installation(model).session.planning.entered.entrants
        entered.append([[action.share for _, action in entrant.plan.actions] for entrant in entrants])
    found |= {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    return hf_ckpt.describe(model), found, seen


@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("gpt2", False), ("llama", True)])
def test_a_budget_of_compiled_blocks_is_held_with_the_same_gradients(family, lora, graphs):
    """Peaks are those of the device's own count, and gradients those of share 1."""
    _, expected, none = train({"share": 1.0}, graphs, family, lora)
    full = train({"share": 0.0}, graphs, family, lora, steps=3)[2]
    budget = (none[-1][0] + full[-1][0]) // 2
    entered = []
    done, got, steps = train({"budget": f"{budget}B"}, graphs, family, lora, entered=entered)
    assert_same(expected, got)
    assert [phase for _, phase, _ in steps][-2:] == [Phase.PLAN, Phase.PLAN]
    assert done.measured_bytes == steps[-1][0]
    assert done.plan.prediction.peak_bytes == pytest.approx(done.measured_bytes, rel=0.02)
    assert max(peak for peak, *_ in steps) <= 1.01 * budget
    assert any(0 < sum(shares) < len(shares) for shares in entered[-1])  # whichever of them is the fastest
    assert [action.share for _, action in done.plan.actions] in entered[-1]
    assert len(done.in_graphs) == len(done.plan.actions)


def test_a_step_that_compiles_is_not_measured_and_blocks_keep_least_until_there_is_a_plan(graphs):
    entered = []
    _, _, steps = train({"budget": "1GiB"}, graphs, entered=entered)
    measured = [phase for _, phase, new in steps if not new]
    assert [phase for _, phase, new in steps if new][:3] == [Phase.MEASURE] * 3
    assert measured[:5] == [Phase.MEASURE] * 3 + [Phase.TIME] * 2
    assert [1.0] * 8 in entered[-1]


def test_what_cannot_be_measured_is_refused(graphs, monkeypatch):
    refused = r"cannot measure compiled blocks here: .* Give a `share`"
    with device.no_statistics(), pytest.raises(HfCkptError, match=refused):
        train({"budget": "1GiB"}, graphs)
    monkeypatch.setattr(compat.transformers, "HOOKS_STAY_OUTSIDE", False)
    with pytest.raises(HfCkptError, match=refused):
        train({"budget": "1GiB"}, graphs)
