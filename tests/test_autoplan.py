"""`budget` and `auto` in training: planned on the first batch, again for a larger one, within the budget."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle

import pytest
import torch
from conftest import assert_same, enable, step, without_cache
from processes import torchrun

import hf_ckpt
from hf_ckpt import autoplan, compat, measure
from hf_ckpt.autoplan import Situation, limit_bytes
from hf_ckpt.budgets import plan_within
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.install import installation, tighten
from hf_ckpt.measure import DeviceMemory, LiveBytes
from hf_ckpt.setups import add_lora
from hf_ckpt.spec import Spec
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.compat
SIZES = {"batch": 4, "tokens": 128}


def model_of(family="llama", *, lora=False, dropout=0.0, layers=6):
    model = tiny_model(family, layers=layers, hidden=128, attention=attention_of(family), dropout=dropout)
    return add_lora(model, rank=4, init_lora_weights=False) if lora else model


def attention_of(family):
    """T5 of transformers 4 has none but its own."""
    return "sdpa" if family != "t5" or "activation_checkpointing_enable" in compat.ENABLE_NAMES else "eager"


def live_peak(model, batch, **options):
    """Peak of one step by an exact count, with an optimizer that keeps nothing."""
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch), **options).loss.backward()
    model.zero_grad(set_to_none=True)
    return live.peak_bytes


def budgeted(model, budget, **more):
    hf_ckpt.install(model)
    enable(model, {"policy": "budget", "budget": budget, **more})


@pytest.fixture
def without_state():
    """An optimizer that keeps no state, so that a plan counts none."""
    kept = []

    def make(model):
        kept.append(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
        return model

    return make


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_fits_and_gives_the_same_gradients(family, lora, without_state):
    """The measured peak is within the budget and within 3 % of the prediction; gradients are those without a plan."""
    model = without_state(model_of(family, lora=lora, dropout=0.1))
    batch = tiny_batch(family, **SIZES)
    expected = step(model, batch)
    none = live_peak(model, batch)
    for share in (0.85, 0.65):
        budgeted(model, int(none * share))
        assert_same(expected, step(model, batch), f"{family} within {share}")
        done = hf_ckpt.describe(model)
        assert sum(done.recomputed.values()) > 0
        measured, predicted = live_peak(model, batch), done.plan.prediction.peak_bytes
        assert measured <= none * share
        assert abs(measured / predicted - 1) <= 0.03, (family, measured, predicted)
        hf_ckpt.uninstall(model)


def test_a_head_in_chunks_where_it_is_allowed_and_nothing_else_fits(without_state):
    """The peak is the head's: with chunks the budget is kept, without them it cannot be."""
    model = without_state(tiny_model("llama", layers=3, hidden=64, attention="sdpa", vocab_size=4000))
    batch = tiny_batch("llama", batch=4, tokens=256)
    expected = step(model, batch)
    budgeted(model, "1MiB")
    with pytest.raises(InfeasibleError, match='the head in chunks \\("head": "auto"\\)') as refused:
        step(model, batch)
    budget = int(refused.value.floor_bytes * 0.8)
    budgeted(model, budget, head="auto")
    found = step(model, batch)
    done = hf_ckpt.describe(model)
    assert done.plan.head == "auto"
    assert done.chunked_heads == 1
    assert live_peak(model, batch) <= budget
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=0.05 * float(gradient.abs().max())), name


def test_verify_plans_too():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    result = hf_ckpt.verify(model, batch, {"policy": "budget", "budget": "36MiB"})
    assert result, result
    assert result.plan.prediction is not None
    assert sum(result.recomputed.values()) > 0


def test_until_the_first_batch_every_block_is_recomputed():
    model = model_of()
    budgeted(model, "1GiB")
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} == {"full"}
    assert installation(model).planned is None
    step(model, tiny_batch("llama"))
    assert {action.kind for _, action in hf_ckpt.describe(model).plan.actions} == {"keep"}


def test_larger_batches_are_planned_for_smaller_ones_not(without_state):
    model = without_state(model_of())
    budgeted(model, "30MiB")
    kinds = []
    for batch, tokens in ((2, 64), (1, 32), (4, 64), (2, 128), (4, 96)):
        before = installation(model).planned
        step(model, tiny_batch("llama", batch=batch, tokens=tokens))
        kinds.append("same" if installation(model).planned is before else "planned")
        assert live_peak(model, tiny_batch("llama", batch=batch, tokens=tokens)) <= 30 * 2**20
    assert kinds == ["planned", "same", "planned", "planned", "same"]
    assert installation(model).planned.situation == Situation({"decoder": (4, 128)})


def test_padding_is_planned_for_once_it_comes():
    model = model_of()
    budgeted(model, "1GiB")
    batch = tiny_batch("llama")
    step(model, batch)
    assert not installation(model).planned.situation.padded
    batch["attention_mask"][0, :3] = 0
    step(model, batch)
    padded = installation(model).planned
    assert padded.situation.padded
    step(model, batch)
    assert installation(model).planned is padded


def test_accumulated_gradients_are_planned_for_once_they_are_there(without_state):
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    budgeted(model, "1GiB")
    model(**without_cache(model, batch)).loss.backward()
    assert installation(model).planned.situation.accumulation == 1
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).loss.backward()
    planned = installation(model).planned
    assert planned.situation.accumulation == 2
    assert abs(live.peak_bytes / planned.plan.prediction.peak_bytes - 1) <= 0.03


def test_accelerate_says_how_many_steps_are_accumulated():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        Accelerator(gradient_accumulation_steps=4, cpu=True)
        model = model_of()
        budgeted(model, "1GiB")
        step(model, tiny_batch("llama"))
        assert installation(model).planned.situation.accumulation == 2
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def test_autocast_is_planned_for(without_state):
    """Casts of weights are kept by linear layers; the plan knows them."""
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    budgeted(model, "1GiB")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**without_cache(model, batch)).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**without_cache(model, batch)).loss
        loss.backward()
    planned = installation(model).planned
    assert planned.situation.autocast == torch.bfloat16
    assert abs(live.peak_bytes / planned.plan.prediction.peak_bytes - 1) <= 0.03


def test_optimizer_state_counts_by_its_kind():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    peaks = []
    for make in (lambda p: torch.optim.SGD(p, lr=0.0), torch.optim.AdamW):
        optimizer = make(model.parameters())
        budgeted(model, "1GiB")
        step(model, batch)
        peaks.append(installation(model).planned.costs[0].static.optimizer)
        hf_ckpt.uninstall(model)
        del optimizer
    assert peaks == [0, 2 * sum(parameter.nbytes for parameter in model.parameters())]


def test_state_that_is_there_is_counted_as_it_is():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step(model, batch)
    optimizer.step()
    budgeted(model, "1GiB")
    step(model, batch)
    assert installation(model).planned.costs[0].static.optimizer == autoplan.state_bytes(optimizer)


def test_what_cannot_fit_says_what_fills_it():
    model = model_of()
    budgeted(model, "1MiB")
    with pytest.raises(InfeasibleError, match=r"no plan fits into 1\.00 MiB") as raised:
        step(model, tiny_batch("llama", **SIZES))
    assert raised.value.floor_bytes == sum(raised.value.parts.values())
    assert "LoRA" in str(raised.value)
    assert hf_ckpt.describe(model).enabled  # what was there before is still there
    enable(model, {"policy": "budget", "budget": raised.value.floor_bytes})
    step(model, tiny_batch("llama", **SIZES))


def test_it_plans_through_peft_and_keeps_the_plan_over_disable_and_enable():
    model, batch = model_of(lora=True), tiny_batch("llama", **SIZES)
    base = model.get_base_model()
    budgeted(model, "1GiB")
    step(model, batch)
    planned = installation(model).planned
    base.gradient_checkpointing_disable()
    enable(model)
    step(model, batch)
    assert installation(model).planned is planned
    enable(model, {"policy": "budget", "budget": "2GiB"})
    step(model, batch)
    assert installation(model).planned is not planned


def test_nothing_is_planned_without_gradients_or_in_eval_mode():
    model, batch = model_of(), tiny_batch("llama")
    budgeted(model, "1GiB")
    with torch.no_grad():
        model(**batch)
    model.eval()(**batch)
    assert installation(model).planned is None


def test_random_state_and_the_model_are_as_before_planning():
    model, batch = model_of(dropout=0.1), tiny_batch("llama", **SIZES)
    names = {name for name, _ in model.named_parameters()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    situation = Situation({"decoder": (4, 128)})
    autoplan.plan_for(model, Spec.parse({"policy": "budget", "budget": "1GiB"}), situation, trial())
    assert torch.equal(torch.get_rng_state(), before)
    assert {name for name, _ in model.named_parameters()} == names
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "_hf_ckpt" not in vars(model)
    step(model, batch)


def trial():
    from hf_ckpt.install import trial

    return trial


def test_saved_tensor_hooks_of_the_user_see_nothing_of_the_planning():
    model, batch = model_of(), tiny_batch("llama")
    budgeted(model, "1GiB")
    seen = []

    def pack(tensor):
        seen.append(type(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**without_cache(model, batch)).loss.backward()
    assert seen
    assert not [kind for kind in seen if "Fake" in kind.__name__]


def test_a_planned_model_copies_and_pickles():
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    budgeted(model, "36MiB")
    step(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hf_ckpt.describe(twin).enabled
        step(twin, tiny_batch("llama", batch=8, tokens=128))
        assert installation(twin).planned.situation.sizes == {"decoder": (8, 128)}
    assert installation(model).planned.situation.sizes == {"decoder": (4, 128)}


def test_split_parameters_are_refused(monkeypatch):
    model = model_of()
    budgeted(model, "1GiB")
    monkeypatch.setattr(compat, "is_sharded", lambda model: True)
    with pytest.raises(HfCkptError, match="split over ranks by FSDP1 or ZeRO-3"):
        step(model, tiny_batch("llama"))


def test_a_saved_plan_of_a_budget_is_installed_without_planning(tmp_path):
    model, batch = model_of(), tiny_batch("llama", **SIZES)
    budgeted(model, "36MiB")
    step(model, batch)
    hf_ckpt.describe(model).save(tmp_path / "plan.yaml")
    other = model_of()
    hf_ckpt.install(other, {"plan": str(tmp_path / "plan.yaml")})
    assert hf_ckpt.describe(other).plan == hf_ckpt.describe(model).plan
    assert hf_ckpt.describe(other).plan.prediction == hf_ckpt.describe(model).plan.prediction


# --- tightening -------------------------------------------------------------------------------------------------------


def test_tightening_drops_more_and_stays_tight_for_larger_batches(without_state):
    model, batch = without_state(model_of()), tiny_batch("llama", **SIZES)
    assert tighten(model, 2**20) is None  # nothing is planned
    budgeted(model, "32MiB")
    step(model, batch)
    before = installation(model).planned
    plan = tighten(model, 8 * 2**20)
    assert plan.prediction.peak_bytes <= 24 * 2**20 < before.plan.prediction.peak_bytes
    assert plan == hf_ckpt.describe(model).plan
    assert live_peak(model, batch) <= 24 * 2**20
    step(model, tiny_batch("llama", batch=5, tokens=128))
    assert installation(model).planned.plan.prediction.peak_bytes <= 24 * 2**20


def test_tightening_beyond_what_is_possible_takes_the_least_and_says_so(caplog):
    model = model_of()
    budgeted(model, "1GiB")
    step(model, tiny_batch("llama", **SIZES))
    with caplog.at_level(logging.WARNING):
        plan = tighten(model, 2**40)
    floor = plan.prediction.peak_bytes
    assert "the tightest is taken" in caplog.text
    with pytest.raises(InfeasibleError):
        plan_within(installation(model).planned.costs, floor - 1)


# --- how much there is ------------------------------------------------------------------------------------------------


def test_limits():
    memory = DeviceMemory(total_bytes=1000, available_bytes=700, outside_bytes=None)
    for spec, limit in (
        ({"policy": "budget", "budget": 123}, 123),
        ({"policy": "budget", "budget": "1KiB"}, 1024),
        ({"policy": "budget", "budget": 0.5}, 500),
        ({"policy": "budget", "budget": "80%"}, 800),
        ("auto", 650),
    ):
        assert limit_bytes(Spec.parse(spec), memory) == limit


def test_auto_reads_the_machine(monkeypatch):
    model = model_of()
    hf_ckpt.install(model)
    enable(model, {"policy": "auto"})
    step(model, tiny_batch("llama"))
    planned = installation(model).planned
    assert 2**28 < planned.limit_bytes < planned.memory.total_bytes
    assert {action.kind for _, action in planned.plan.actions} == {"keep"}

    small = DeviceMemory(total_bytes=48 * 2**20, available_bytes=38 * 2**20, outside_bytes=0)
    monkeypatch.setattr(autoplan, "device_memory", lambda held: small)
    hf_ckpt.uninstall(model)
    hf_ckpt.install(model)
    enable(model, {"policy": "auto"})
    step(model, tiny_batch("llama", **SIZES))
    assert installation(model).planned.limit_bytes == 38 * 2**20 - round(0.05 * 48 * 2**20)
    assert hf_ckpt.describe(model).plan.active()


def test_the_container_is_what_counts(tmp_path, monkeypatch):
    """A cgroup's limit, less what it uses and cannot drop, where it is smaller than the machine."""
    files = {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "anon 1\ninactive_file 100000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    real = measure.Path
    monkeypatch.setattr(measure, "Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else real(path))
    memory = measure.device_memory(50)
    assert memory.total_bytes == 1000000
    assert memory.available_bytes == 1000000 - 300000 + 50


# --- the callback -----------------------------------------------------------------------------------------------------


def trained(tmp_path, spec, callback, steps=4):
    from transformers import Trainer, TrainingArguments

    model = model_of()
    hf_ckpt.install(model)
    name = "activation" if "activation_checkpointing_enable" in compat.ENABLE_NAMES else "gradient"
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=steps,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **{f"{name}_checkpointing": True, f"{name}_checkpointing_kwargs": spec},
    )
    row = {key: value[0] for key, value in tiny_batch("llama", batch=1, tokens=128).items()}
    Trainer(model=model, args=arguments, train_dataset=[row] * 64, callbacks=[callback]).train()
    lines = (tmp_path / "hf_ckpt_metrics.jsonl").read_text().splitlines()
    return model, [json.loads(line) for line in lines]


def test_plan_and_prediction_are_logged(tmp_path, capsys):
    model, rows = trained(tmp_path, {"policy": "budget", "budget": "60MiB"}, hf_ckpt.MemoryTimeCallback())
    plans = [row for row in rows if row["event"] == "plan"]
    assert len(plans) == 1
    assert plans[0]["limit_bytes"] == 60 * 2**20
    assert plans[0]["situation"] == "4 x 128 tokens"
    assert hf_ckpt.Plan.from_dict(plans[0]["plan"]) == hf_ckpt.describe(model).plan
    predicted = plans[0]["plan"]["prediction"]["peak_bytes"]
    logs = [row for row in rows if row["event"] == "log"]
    assert all(row["memory/predicted_gib"] == predicted / 2**30 for row in logs)
    assert all(isinstance(row["memory/prediction_error"], float) for row in logs)
    assert "predicted" in capsys.readouterr().err


class FakeAllocator:
    """A meter that counts exactly, and finds 8 MiB more than was predicted."""

    source, exact = "test allocator", True

    def __init__(self):
        self.model = None

    def reset(self):
        pass

    def peak_bytes(self):
        record = installation(self.model)
        return record.plan.prediction.peak_bytes + (8 * 2**20 if record.planned.limit_bytes == 60 * 2**20 else 0)

    def reserved_bytes(self):
        return None


def test_a_peak_above_its_prediction_tightens_the_plan_once(tmp_path, monkeypatch, caplog):
    meter = FakeAllocator()
    monkeypatch.setattr("hf_ckpt.callback.peak_meter", lambda: meter)
    real = autoplan.device_memory
    monkeypatch.setattr(autoplan, "device_memory", lambda held: dataclasses.replace(real(held), outside_bytes=None))
    install = hf_ckpt.install

    def remember(model, *rest):
        meter.model = model
        return install(model, *rest)

    monkeypatch.setattr(hf_ckpt, "install", remember)
    with caplog.at_level(logging.WARNING):
        model, rows = trained(tmp_path, {"policy": "budget", "budget": "60MiB"}, hf_ckpt.MemoryTimeCallback())
    limits = [row["limit_bytes"] for row in rows if row["event"] == "plan"]
    assert limits == [60 * 2**20, 52 * 2**20]
    assert "8.00 MiB above its prediction" in caplog.text
    assert hf_ckpt.describe(model).plan.prediction.peak_bytes <= 52 * 2**20


# --- several ranks ----------------------------------------------------------------------------------------------------


UNEQUAL = {
    "budget": [{"policy": "budget", "budget": "3500KiB"}],
    "auto": [{"policy": "auto"}],
    "offload": [{"policy": "offload"}],
    "segments": [{"policy": "full", "segments": 2}],
    "segments beside none": [{"policy": "full", "segments": 2}, {"policy": "none"}],
}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Two processes under DDP, rank 1 with longer sequences, then with one longer still."""
    folder = tmp_path_factory.mktemp("unequal")
    case = {"family": "llama", "tokens": [[16, 16, 16], [32, 32, 48]]}
    (folder / "cases.json").write_text(json.dumps({name: {**case, "specs": specs} for name, specs in UNEQUAL.items()}))
    torchrun("budget_worker.py", folder / "cases.json", folder, timeout=150)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", UNEQUAL)
def test_ranks_with_batches_of_their_own_train_as_without(unequal, name):
    for rank, found in enumerate(results[name] for results in unequal):
        assert "error" not in found, found["error"]
        assert found["different"] == [[], [], []]
        nothing = name == "auto" or (name == "segments beside none" and rank == 1)  # tiny models fit anywhere
        assert [count > 0 for count in found["recomputed"]] == [not nothing] * 3


def test_ranks_agree_though_their_batches_differ(unequal):
    """The first plan is the same on both; a later one is each rank's own."""
    for name in ("budget", "auto"):
        ranks = [results[name] for results in unequal]
        assert [found["situations"][0] for found in ranks] == ["2 x 32 tokens"] * 2
        assert ranks[0]["plans"][0] == ranks[1]["plans"][0]
        assert [found["situations"][2] for found in ranks] == ["2 x 32 tokens", "2 x 48 tokens"]
    assert unequal[0]["budget"]["limits"] == unequal[1]["budget"]["limits"]
    assert unequal[0]["auto"]["limits"][0] == unequal[1]["auto"]["limits"][0]


def test_optimizer_state_in_host_memory_is_no_part_of_an_accelerators_peak(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert autoplan.state_bytes(optimizer) == 2 * weight.nbytes + 4  # and the number of steps
    monkeypatch.setattr(compat, "accelerator_type", lambda: "cuda")
    assert autoplan.state_bytes(optimizer) == 0
