"""What a user of any accelerator meets: budgets, other devices than the current one, devices that lack something."""

import functools
import re

import pytest
import torch
from accelerate.utils import send_to_device
from helpers.planned import known, live_peak, raced
from helpers.steps import assert_same, planned, recomputed, step, without_cache
from helpers.trainers import metrics, trainer

import hf_ckpt
from accelerator import device
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.rebuild import ops
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure import memory
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.training import callback
from hf_ckpt.training.guard import OomGuard, tighten
from hf_ckpt.training.out_of_memory import REPORT_FILE
from hf_ckpt.training.phases import RACE_STEPS, Phase

DIVIDED = {"policy": "full+selective", "segments": "sqrt"}
CPU, FIRST, SECOND = "cpu", device.FIRST, device.SECOND
LAYERS, PLANNED = 6, 24
"""Blocks of the models, and a number of steps after which a budget has its plan."""


def model_and_batch(where=FIRST, family="llama", dropout=0.0, batch=4, tokens=128):
    """A model on a device, and a batch. An optimizer without a state is known, so that plans count none."""
    model = tiny_model(family, layers=LAYERS, hidden=128, dropout=dropout)
    if where != CPU:
        model = device.moved_to(model, where)
    known(torch.optim.SGD(model.parameters(), lr=0.0))
    return model, {name: value.to(where) for name, value in tiny_batch(family, batch=batch, tokens=tokens).items()}


def actions(model):
    return {str(action) for _, action in hf_ckpt.describe(model).plan.actions}


def train(model, batch, steps=1, optimizer=None):
    for _ in range(steps):
        model(**without_cache(model, batch)).loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)


def peak_of(model, batch, optimizer=None):
    """The peak of one step by the device's own statistics, or by a count of live bytes on a CPU."""
    where = next(model.parameters()).device
    if where.type == CPU:
        return live_peak(model, batch)
    torch.accelerator.reset_peak_memory_stats(where)
    train(model, batch, 1, optimizer)
    return torch.accelerator.max_memory_allocated(where)


@functools.cache
def budget_for(where, family="llama"):
    """A budget between the peaks of `full` and of no checkpointing, and the peak of `full`."""
    peaks = []
    for policy in ("full", "none"):
        model, batch = model_and_batch(where, family, dropout=0.1)
        planned(model, policy)
        train(model, batch)
        peaks.append(peak_of(model, batch))
        del model
    return sum(peaks) // 2, peaks[0]


# --- everything is asked of the devices of the model ------------------------------------------------------------------


SETTINGS = [(family, FIRST, device.pace) for family in TINY_FAMILIES]
SETTINGS += [("llama", CPU, device.pace), ("llama", SECOND, device.pace), ("llama", FIRST, device.no_event_times)]


@pytest.mark.parametrize(("family", "where", "setting"), SETTINGS)
def test_a_budget_is_one_of_the_model_s_own_device(family, where, setting):
    """Also on the CPU beside an accelerator, on a device that is not the current one, and where events have no times,
    so that measured steps wait for the device at each boundary."""
    device.needs(where)
    budget, least = budget_for(where, family)
    model, batch = model_and_batch(where, family, dropout=0.1)
    expected = step(model, batch)
    with setting():
        assert compat.devices.has_timed_events(torch.device(FIRST)) == (setting is device.pace)
        planned(model, {"policy": "budget", "budget": budget})
        train(model, batch, PLANNED)
    current = installation(model).session.planned
    assert not current.is_provisional
    assert not current.is_over
    assert current.plan.prediction.step_seconds > 0
    assert actions(model) != {"keep"}
    assert current.of_batch.measured_bytes > least // 2
    assert ("without other models" in str(hf_ckpt.describe(model))) == (where == CPU)
    assert peak_of(model, batch) <= budget
    assert_same(expected, step(model, batch))


def test_auto_uses_the_memory_of_the_device():
    budget, _ = budget_for(FIRST)
    model, batch = model_and_batch(dropout=0.1)
    expected = step(model, batch)
    planned(model, "auto")
    train(model, batch, PLANNED)
    assert {"keep"} in raced(model)
    hf_ckpt.uninstall(model)
    torch.accelerator.empty_cache()
    with device.memory_of(budget):
        planned(model, "auto")
        train(model, batch, PLANNED)
        assert {"keep"} not in raced(model)
        assert peak_of(model, batch) <= budget
        assert_same(expected, step(model, batch))


def test_an_optimizer_may_have_its_state_before_the_budget():
    """As after a resume. The allocator has counted this state from the first measured step on."""
    model, batch = model_and_batch(batch=2, tokens=32)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, batch, 2, optimizer)
    planned(model, {"policy": "budget", "budget": peak_of(model, batch, optimizer) + (1 << 16)})
    train(model, batch, PLANNED, optimizer)
    assert {"keep"} in raced(model)


def test_segments_race_with_a_plan_that_offloads_within_the_budget():
    """Where only these two fit. Both run whole steps in turn, and each step has the gradients of no checkpointing."""

    def model_under(spec):
        model = device.moved_to(tiny_model("llama", layers=16), FIRST)
        known(torch.optim.SGD(model.parameters(), lr=0.0))
        return planned(model, {**spec, "check_every": 0})

    def gradients(model):
        model.zero_grad(set_to_none=True)
        model(**without_cache(model, batch)).loss.backward()
        return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}

    _, batch = model_and_batch()
    expected = gradients(model_under({"policy": "none"}))
    budget = round(1.02 * max(peak_of(model_under(spec), batch) for spec in (DIVIDED, {"policy": "offload"})))
    assert peak_of(model_under({"policy": "full+selective"}), batch) > budget
    model = model_under({"policy": "budget", "budget": budget, "segments": "sqrt", "host_budget": "1GiB"})
    raced = []
    phase = None
    while phase is not Phase.PLAN:
        torch.accelerator.reset_peak_memory_stats(FIRST)
        assert_same(expected, gradients(model))
        assert torch.accelerator.max_memory_allocated(FIRST) <= budget
        phase = installation(model).session.planned.phase
        if phase is Phase.RACE:
            described = hf_ckpt.describe(model)
            made = any(action.made for _, action in described.plan.actions)
            raced.append((made, sum(described.moved.values()) > 0))
    assert raced == [(False, True), (True, False)] * RACE_STEPS


@pytest.mark.parametrize("policy", ["full", "full+selective"])
def test_the_plan_that_follows_segments_on_the_ladder_of_the_guard_needs_less(policy):
    model = device.moved_to(tiny_model("llama", layers=16), FIRST)
    _, batch = model_and_batch(tokens=256)
    planned(model, {**DIVIDED, "policy": policy, "check_every": 0})
    peaks = []
    for _ in range(2):
        train(model, batch)
        peaks.append(peak_of(model, batch))
        tightened = tighten(model, exact=True)
    assert peaks[1] < peaks[0]
    assert actions(model) == {"offload"}
    assert tightened is None


def test_memory_of_an_evaluation_between_two_steps_is_no_part_of_them():
    """An accelerator's peak since the end of a step includes the evaluation that followed."""
    budget, _ = budget_for(FIRST)
    model, batch = model_and_batch(dropout=0.1)
    planned(model, {"policy": "budget", "budget": budget})
    for _ in range(2):
        train(model, batch)
        with torch.no_grad():
            model.eval()(**without_cache(model, model_and_batch(batch=64)[1]))
        model.train()
    train(model, batch, PLANNED)
    assert not installation(model).session.planned.is_over
    assert peak_of(model, batch) <= budget


def test_each_step_under_a_plan_is_watched_by_one_read_of_the_statistics(monkeypatch, capsys):
    """One step above the budget voids its plan, whatever has changed, and blocks are measured again. An evaluation
    between two steps is no step. The peak that users read is that of all steps."""
    budget, _ = budget_for(FIRST)
    model, batch = model_and_batch()

    def holds_more(module, args, output):
        for _ in range(model.config.more):
            output = output.exp().log1p()
        return output

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(holds_more)
    model.config.more = 0
    planned(model, {"policy": "budget", "budget": budget, "check_every": 0})
    train(model, batch, PLANNED)
    session = installation(model).session
    with torch.no_grad():
        model.eval()(**without_cache(model, model_and_batch(batch=64)[1]))
    model.train()
    train(model, batch, 2)
    reads, resets = [], []
    read, reset = compat.devices.allocator_bytes, compat.devices.reset_peak
    monkeypatch.setattr(compat.devices, "allocator_bytes", lambda where: reads.append(where) or read(where))
    monkeypatch.setattr(compat.devices, "reset_peak", lambda where: resets.append(where) or reset(where))
    train(model, batch, 5)
    assert (len(reads), len(resets)) == (5, 0)
    assert (session.planned.phase, hf_ckpt.describe(model).voided) == (Phase.PLAN, 0)
    model.config.more = 4
    train(model, batch)
    assert torch.accelerator.max_memory_allocated(FIRST) > budget
    train(model, batch)
    assert (session.planned.phase, hf_ckpt.describe(model).voided) == (Phase.MEASURE, 1)
    assert "above the budget of" in capsys.readouterr().err
    train(model, batch, PLANNED)
    assert session.planned.phase is Phase.PLAN
    assert peak_of(model, batch) <= budget


def training_on(where, folder, monkeypatch, **options):
    """A Trainer of a model on a device that accelerate does not know; a map keeps it from moving the model."""
    model, _ = model_and_batch(where)
    if where != CPU:
        model.hf_device_map = {"model": where, "lm_head": where}
    hf_ckpt.install(model)
    run = trainer(folder, model, **options)
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda **batch: forward(**send_to_device(batch, where)))
    monkeypatch.setattr(type(run.args), "device", torch.device(where))  # of the sum of losses
    return run


@pytest.mark.parametrize("computing", ["eager", "late"])
def test_the_callback_says_once_that_the_device_waits_for_the_host(computing, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(callback, "LAG_STEPS", 3)
    run = training_on(FIRST, tmp_path, monkeypatch)
    with device.pace(computing=computing):
        run.train()
    assert ("the device waits for the host" in capsys.readouterr().err) == (computing == "eager")


def test_the_report_has_the_allocator_s_figures(tmp_path, monkeypatch):
    run = training_on(FIRST, tmp_path, monkeypatch)
    compat.devices.release_memory()
    with device.memory_of(6 << 20), pytest.raises(RuntimeError, match="out of memory"):
        run.train()
    report = (tmp_path / REPORT_FILE).read_text()
    used, reserved = map(float, re.search(rf"\n  {FIRST}: (\S+) MiB used, (\S+) MiB reserved\n", report).groups())
    assert 3 < used <= reserved <= 6


@pytest.mark.parametrize("where", [CPU, SECOND])
def test_the_callback_reads_the_model_s_own_device(where, tmp_path, monkeypatch):
    device.needs(SECOND)
    elsewhere = torch.zeros(1 << 20, device=FIRST)  # what another device holds counts nowhere
    reset, peaks = torch.accelerator.reset_peak_memory_stats, []

    def note_and_reset(of):
        peaks.append(torch.accelerator.max_memory_allocated(SECOND))
        reset(of)

    run = training_on(where, tmp_path, monkeypatch, max_steps=2)
    reset(SECOND)
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", note_and_reset)
    run.train()
    rows = metrics(tmp_path)
    logged = [round(row["memory/peak_gib"] * 2**30) for row in rows]
    assert min(logged) > 10**6
    if where == SECOND:
        assert max(logged) == max(peaks)
        assert rows[0]["memory/reserved_gib"] > 0
    assert elsewhere.sum() == 0


@pytest.mark.parametrize("spec", ["auto", {"policy": "budget", "budget": 0.8}], ids=str)
def test_a_share_of_several_cards_is_refused_by_name(spec):
    """Their memory together says nothing about the fuller one."""
    device.needs(SECOND)
    model, batch = model_and_batch()
    model.model.layers[3:].to(SECOND)
    planned(model, spec)
    with pytest.raises(HfCkptError, match=f"for one card, but the model is on {FIRST} and {SECOND}. Give bytes"):
        train(model, batch)


# --- devices that lack something --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["selective", "offload", "budget", "auto"])
def test_an_allocator_without_statistics_ends_no_run(policy, caplog):
    budget, _ = budget_for(FIRST)
    model, batch = model_and_batch(dropout=0.1)
    expected = step(model, batch)
    with device.no_statistics():
        planned(model, {"policy": policy, **({"budget": budget} if policy == "budget" else {})})
        for _ in range(PLANNED):
            assert_same(expected, step(model, batch))
        assert memory.spare_bytes([torch.device(FIRST)]) is None
    plans = policy in ("budget", "auto")
    assert caplog.text.count("reports no peaks") == plans
    if plans:  # live tensors were counted
        assert installation(model).session.planned.plan.prediction is not None
        assert policy == "auto" or peak_of(model, batch) <= budget
    else:
        assert recomputed(model)
        why = f"torch does not report how much memory the model leaves on {device.NAME}"
        assert hf_ckpt.describe(model).watched.not_checked == {"blocks": why}
    assert caplog.text.count("blocks are not checked") == (not plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounding", [device.pace, device.other_rounding])
def test_dropout_is_rebuilt_by_a_rule_that_was_tried(rounding, dtype, monkeypatch):
    """Where no known rule gives dropout's bits, its result is kept."""
    monkeypatch.setattr(ops, "_rules_of_dropout", {})
    with rounding():
        model, batch = model_and_batch(dropout=0.1)
        model = model.to(dtype)
        expected = step(model, batch)
        planned(model, "selective")
        for _ in range(2):
            assert_same(expected, step(model, batch))
    assert hf_ckpt.describe(model).dropped_tensors
    assert {key[0] for key in ops._rules_of_dropout} <= {device.NAME}


def idle_bytes():
    return torch.accelerator.memory_reserved(FIRST) - torch.accelerator.memory_allocated(FIRST)


def test_the_guard_frees_the_cache_of_the_accelerator():
    tight, _ = budget_for(FIRST)
    model, batch = model_and_batch()
    expected = step(model, batch)
    train(model, batch)
    idle = idle_bytes()
    compat.devices.release_memory()
    assert idle_bytes() == 0 if device.IS_SIMULATED else idle_bytes() < idle  # a real one also holds rests of segments
    guard = OomGuard(model)
    for words in (None, "NPU out of memory. Tried to allocate 2 MiB"):
        with device.memory_of(tight, words=words):
            guard(lambda: step(model, batch))
    assert guard.attempts
    assert guard.taken
    assert_same(expected, step(model, batch))
