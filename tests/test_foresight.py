"""`hf-ckpt plan`: from a name to a plan, a picture, and how far one can go."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt import compat, timings
from hf_ckpt.budgets import plan_within, usual_options
from hf_ckpt.cli import main
from hf_ckpt.cost import chunked_head, trace_costs
from hf_ckpt.devices import DEVICES, device_like, device_named
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.foresight import Questions, foresee, largest
from hf_ckpt.install import own_trial, trial
from hf_ckpt.measure import LiveBytes
from hf_ckpt.plan import KEEP, Action, Plan
from hf_ckpt.setups import Setup, blueprint_of_setup, real_inputs, real_model, step_of_setup
from hf_ckpt.timeline import step_nanoseconds
from hf_ckpt.timings import ShallowModels, depths_of, measured
from hf_ckpt.tiny import tiny_batch, tiny_model
from hf_ckpt.variants import all_variants, transformers_costs

SMALL = Setup("gpt2", batch=2, tokens=64)


@pytest.fixture(scope="module")
def tiny_config(tmp_path_factory):
    """The config of a tiny LLaMA in a folder, as a model is saved."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", layers=6).config.to_json_file(folder / "config.json", use_diff=False)
    return folder


# --- the command ------------------------------------------------------------------------------------------------------


def test_it_prints_a_plan(capsys):
    assert main(["plan", "gpt2", "--seq", "64", "--device", "t4"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "GPT2LMHeadModel",
        "weights",
        "optimizer state",
        "tokens/s",
        "none",
        "every_n_layers: 2",
        "full",
        "t4",
    ):
        assert part in shown, part
    assert "every_n_layers: 5" not in shown


def test_its_plan_is_installed_on_the_model(tiny_config, tmp_path, capsys):
    """What is planned from a config is a plan for the model of that config, and does what it says."""
    plan = tmp_path / "plan.yaml"
    words = ["plan", str(tiny_config), "--seq", "128", "--batch", "4", "--dtype", "float32", "--optimizer", "sgd"]
    assert main([*words, "--device", "cpu", "--budget", "3500KiB", "--out", str(plan)]) == 0
    model = tiny_model("llama", layers=6)
    result = hf_ckpt.verify(model, tiny_batch("llama", batch=4, tokens=128), {"plan": str(plan)})
    assert result, result
    assert sum(result.recomputed.values()) > 0
    assert Plan.load(plan).prediction.peak_bytes <= 3500 * 2**10


def test_json_holds_everything(capsys):
    words = ["plan", "gpt2", "--seq", "64", "--device", "a10", "--lora", "4", "--accum", "3", "--frontier", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setup"]["lora"] == 4
    assert found["plan"]["prediction"]["tokens"] == 3 * 64
    assert {row["name"] for row in found["usual"]} >= {
        "none",
        "full",
        "offload (transformers)",
        "every_n_layers: 2",
        "segments of 2",
    }
    assert [row["name"] for row in found["further"]] == [
        "offload",
        "selective, saved in host memory",
        "full, head in chunks",
        "offload, head in chunks",
    ]
    frontier = found["frontier"]
    assert len(frontier) > 3
    assert [row["peak_bytes"] for row in frontier] == sorted(row["peak_bytes"] for row in frontier)
    assert [row["step_seconds"] for row in frontier] == sorted((row["step_seconds"] for row in frontier), reverse=True)


def test_pictures_are_drawn(tmp_path, capsys):
    assert main(["plan", "gpt2", "--seq", "64", "--device", "a10", "--png", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_what_cannot_fit_says_which_batch_does(capsys):
    words = ["plan", "gpt2", "--seq", "128", "--batch", "16", "--device", "a10"]
    assert main([*words, "--budget", "1400MiB"]) == 2
    told = capsys.readouterr().err
    assert "no plan fits into 1.37 GiB" in told
    batch, steps = (int(word) for word in told.partition("--batch ")[2].split()[:3:2])
    assert batch * steps >= 16
    assert main(["plan", "gpt2", "--seq", "128", "--batch", str(batch), "--device", "a10", "--budget", "1400MiB"]) == 0
    assert (
        main(["plan", "gpt2", "--seq", "128", "--batch", str(batch + 1), "--device", "a10", "--budget", "1400MiB"]) == 2
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no-such-model-anywhere"], "cannot read a model's config"),
        (["gpt2", "--device", "abacus"], "device must be one of"),
        (["gpt2", "--seq", "2048"], "has positions for 1024 tokens"),
        (["gpt2", "--budget", "lots"], "a size must look like"),
        (["gpt2", "--budget", "120%"], "a share must be above 0%"),
        (["gpt2", "--dtype", "int3"], "dtype must be one of"),
        (["gpt2", "--optimizer", "magic"], "optimizer must be one of"),
    ],
)
def test_wrong_questions_are_refused(words, told, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


# --- how far one can go -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(0, 2000), st.integers(1, 100))
def test_the_largest_is_found(steps, budget, start):
    """For any growing function: the same as by trying every number."""
    peaks = [sum(steps[: number + 1]) for number in range(len(steps))]
    most = len(peaks)
    found = largest(lambda number: peaks[number - 1], budget, start, most)
    assert found == sum(peak <= budget for peak in peaks)


def test_what_fills_the_budget_is_searched_by_halves():
    """A plan's peak is the budget's, nearly, up to the number that no plan fits."""
    tried = []

    def peak_of(number):
        tried.append(number)
        return 990 + number // 100 if number <= 712 else 2000

    assert largest(peak_of, 1000, 128) == 712
    assert len(tried) <= 25  # instead of one for each number, on the last of the way


def test_largest_batch_and_sequence_fit_and_no_larger_ones_do():
    device, budget = "a10", "1400MiB"
    found = foresee(SMALL, Questions(device=device, budget=budget, max_batch=True, max_tokens=True))
    assert found.max_batch >= SMALL.batch
    assert SMALL.tokens <= found.max_tokens <= 1024
    blueprint = blueprint_of_setup(SMALL)

    def fits(**changes):
        setup = Setup("gpt2", **{"batch": 2, "tokens": 64, **changes})
        step = step_of_setup(setup, blueprint)
        costs = trace_costs(blueprint, step, DEVICES[device], trial)
        try:
            return (
                plan_within(
                    all_variants(costs, blueprint, step, DEVICES[device], trial, head="full"), 1400 * 2**20
                ).prediction.peak_bytes
                <= 1400 * 2**20
            )
        except InfeasibleError:
            return False

    assert fits(batch=found.max_batch)
    assert not fits(batch=found.max_batch + 1)
    assert fits(tokens=found.max_tokens)
    assert found.max_tokens == 1024 or not fits(tokens=found.max_tokens + 1)


@pytest.mark.parametrize("name", ["gpt2", "llama-3.1-8b", "bert-large", "t5-base"])
def test_never_slower_than_what_transformers_offers(name):
    """Wherever an option of transformers fits, what is planned for its peak is predicted to be as fast or faster."""
    setup = Setup(name, batch=2, tokens=256, lora=8)
    found = foresee(setup, Questions(device="a100-80", budget="100%"))
    for option in found.usual:
        if option.plan is not None:
            plan = plan_within(found.costs, option.peak_bytes)
            assert plan.prediction.step_seconds <= option.step_seconds, option.name
    faster = [o for o in found.usual if o.plan is not None and o.name.startswith("every_n_layers")]
    middle = plan_within(found.costs, faster[-1].peak_bytes).prediction.step_seconds
    assert middle < 0.95 * faster[-1].step_seconds


# --- times ------------------------------------------------------------------------------------------------------------


def test_measured_times_take_the_place_of_the_tables():
    """Blocks that take 1, 2, 3, 4 ms by action, and 10 ms around them, give steps of just that."""
    blueprint = blueprint_of_setup(SMALL)
    costs = trace_costs(blueprint, step_of_setup(SMALL, blueprint), DEVICES["cpu"], trial)
    block = {action: 0.001 * (number + 1) for number, action in enumerate(costs.actions)}
    found = measured(costs, lambda depth, action: 0.010 + depth * block[action])
    for number, action in enumerate(costs.actions):
        seconds = (step_nanoseconds(found, found.uniform(number)) - found.optimizer_nanoseconds) / 1e9
        assert seconds == pytest.approx(0.010 + 12 * block[action], rel=0.02)
    assert "measured" in found.notes[-1]
    assert found.optimizer_nanoseconds == costs.optimizer_nanoseconds


def test_of_all_turns_the_fastest_counts():
    """A machine that is busy for most turns makes blocks slower, and an action that it hits is not the slower one."""
    blueprint = blueprint_of_setup(SMALL)
    costs = trace_costs(blueprint, step_of_setup(SMALL, blueprint), DEVICES["cpu"], trial)
    busy = iter([7.0, 3.0, 1.0, 5.0, 9.0])
    speed = 1.0
    seconds = {}

    def step(depth, action):
        nonlocal speed
        if (depth, action) in seconds or not seconds:  # a new turn
            seconds.clear()
            speed = next(busy)
        seconds[depth, action] = speed * (0.010 + 0.004 * depth)
        return seconds[depth, action]

    found = measured(costs, step)
    quiet = measured(costs, lambda depth, action: 0.010 + 0.004 * depth)
    assert [step_nanoseconds(found, found.uniform(number)) for number in range(len(costs.actions))] == [
        step_nanoseconds(quiet, quiet.uniform(number)) for number in range(len(costs.actions))
    ]


def test_of_several_steps_the_fastest_counts(monkeypatch):
    """Behind one that is not timed."""
    taken, forwards = iter([3.0, 1.0, 2.0]), []

    @contextlib.contextmanager
    def stopwatch():
        seconds = []
        yield seconds
        seconds.append(next(taken))

    monkeypatch.setattr(timings, "stopwatch", stopwatch)
    model = tiny_model("llama", layers=2)
    model.register_forward_pre_hook(lambda *_: forwards.append(sum(hf_ckpt.describe(model).recomputed.values())))
    assert timings.timed_step(model, tiny_batch("llama"), Action("full"), steps=3) == 1.0
    assert forwards == [0, 2, 4, 6]  # blocks recomputed before each


@pytest.mark.parametrize(("wanted", "found"), [((1, 3), (1, 3)), ((1, 20), (1, 12)), ((12, 14), (11, 12))])
def test_no_model_is_timed_that_is_deeper_than_its_own(wanted, found):
    """A config's depth is never exceeded, so that the deeper model would not be as deep as it was taken for."""
    blueprint = blueprint_of_setup(SMALL)
    costs = trace_costs(blueprint, step_of_setup(SMALL, blueprint), DEVICES["cpu"], trial, actions=(KEEP,))
    assert depths_of(costs, wanted) == found
    one = [dataclasses.replace(stack, blocks=stack.blocks[:1]) for stack in costs.stacks]
    with pytest.raises(HfCkptError, match="has one block"):
        depths_of(dataclasses.replace(costs, stacks=tuple(one)))


def test_the_optimizer_is_timed_at_both_depths():
    """10 ms around the blocks and 2 ms a block, of which there are 12."""
    blueprint = blueprint_of_setup(SMALL)
    costs = trace_costs(blueprint, step_of_setup(SMALL, blueprint), DEVICES["cpu"], trial)
    found = measured(costs, lambda depth, action: 1.0 * depth, optimizer_seconds=lambda depth: 0.010 + 0.002 * depth)
    assert found.optimizer_nanoseconds == pytest.approx(34e6, rel=1e-6)


def test_a_head_in_chunks_is_as_fast_as_the_measured_one():
    """Its times come from the table, whose mistake about the plain head is taken for its own, too."""
    blueprint = blueprint_of_setup(SMALL)
    step = step_of_setup(SMALL, blueprint)
    costs = trace_costs(blueprint, step, DEVICES["cpu"], trial)
    head = {
        key: tuple(dataclasses.replace(phase, nanoseconds=3 * phase.nanoseconds) for phase in phases)
        for key, phases in costs.head.items()
    }
    slow = dataclasses.replace(costs, head=head)
    by_table, by_measure = (chunked_head(found, blueprint, step, DEVICES["cpu"], trial, 64) for found in (costs, slow))
    for key, phases in by_table.head.items():
        for phase, measured_phase in zip(phases, by_measure.head[key], strict=True):
            assert measured_phase.nanoseconds == pytest.approx(3 * phase.nanoseconds, rel=0.01)
            assert measured_phase.points == phase.points


def test_blocks_are_really_timed(tiny_config):
    models = ShallowModels(Setup(str(tiny_config), batch=1, tokens=16, dtype="float32"))
    taken = [models.step_seconds(depth, hf_ckpt.plan.Action("full")) for depth in (1, 6)]
    taken += [models.step_seconds(1, hf_ckpt.plan.Action("full"), apply=own_trial), models.optimizer_seconds(1)]
    assert all(seconds > 0 for seconds in taken)
    lion = ShallowModels(Setup(str(tiny_config), batch=1, tokens=16, optimizer="lion"))
    assert lion.optimizer_seconds(1) is None


# --- what transformers' own checkpointing costs -----------------------------------------------------------------------


def test_transformers_own_checkpointing_is_full_where_it_only_runs_blocks_again():
    blueprint = blueprint_of_setup(SMALL)
    step = step_of_setup(SMALL, blueprint)
    costs = trace_costs(blueprint, step, DEVICES["cpu"], trial)
    assert transformers_costs(costs, blueprint, step, DEVICES["cpu"], own_trial) is costs


@pytest.mark.parametrize("every", [1, 2, 3])
def test_transformers_own_checkpointing_of_t5(every):
    """Its attention computes gradients of its position bias, so that other kernels keep more."""
    setup = Setup("mini-t5", batch=1, tokens=128, optimizer="sgd")
    blueprint = blueprint_of_setup(setup)
    step = step_of_setup(setup, blueprint)
    costs = trace_costs(blueprint, step, DEVICES["cpu"], trial)
    own = transformers_costs(costs, blueprint, step, DEVICES["cpu"], own_trial)
    name = "full" if every == 1 else f"every_n_layers: {every}"
    with_own, without = (
        {option.name: option.peak_bytes for option in usual_options(costs, 1e9, found)}[name] for found in (own, None)
    )
    torch.manual_seed(0)
    model = real_model(setup).train()
    inputs = real_inputs(setup, model, "cpu")
    options = {} if every == 1 else {"every_n_layers": every}
    with compat.own_checkpointing(model, **options) as count:
        for _ in range(2):
            model.zero_grad()
            with LiveBytes(model, inputs) as live:
                model(**inputs).loss.backward()
    assert count() == 2 * -(-8 // every)
    assert with_own == pytest.approx(live.peak_bytes, rel=0.005)
    assert abs(without - live.peak_bytes) > abs(with_own - live.peak_bytes)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_are_known_by_their_own_names():
    for name, described in {
        "h200": "NVIDIA H200",
        "h100": "NVIDIA H100 80GB HBM3",
        "a100-80": "NVIDIA A100-SXM4-80GB",
        "a100-40": "NVIDIA A100-PCIE-40GB",
        "l40s": "NVIDIA L40S",
        "a10": "NVIDIA A10",
        "t4": "Tesla T4",
        "4090": "NVIDIA GeForce RTX 4090",
    }.items():
        assert device_like(described) is DEVICES[name], described
    assert device_like("NVIDIA A1000 Laptop GPU") is None
    with pytest.raises(HfCkptError, match="device must be one of h200, h100"):
        device_named("b300")


def test_operations_take_what_is_longest():
    device = DEVICES["a100-80"]
    assert device.nanoseconds(0, 0, 2) == device.launch_nanoseconds
    assert device.nanoseconds(10**13, 0, 2) < device.nanoseconds(10**13, 0, 4)
    assert device.nanoseconds(0, 10**10, 2) == device.nanoseconds(10**6, 10**10, 2)
