"""`hf-ckpt plan`: from a name to a plan, and to the largest batch and sequence."""

from __future__ import annotations

import dataclasses
import json

import pytest
from helpers.planned import saved_config
from helpers.sparing import sparing
from hypothesis import given
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt.cli.main import main
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.forecast import Forecaster, forecast
from hf_ckpt.forecast.nearest import largest
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.budgets import peak_of_least, plan_within
from hf_ckpt.prediction.question import Question
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

# --- the command ------------------------------------------------------------------------------------------------------


def test_no_part_of_a_peak_is_negative():
    """Parts of a peak are not negative, even if autocast's weight copies are freed before the head's backward."""
    with pytest.raises(InfeasibleError) as raised:
        hf_ckpt.predict("gpt2", 8, tokens=256, device="t4", dtype="float32", autocast="float16", budget="2.5GiB")
    assert min(raised.value.parts.values()) >= 0
    assert sum(raised.value.parts.values()) == raised.value.floor_bytes


def test_its_plan_is_installed_on_the_model(tmp_path, capsys):
    """A plan made from a config fits the model of that config and has its predicted effect."""
    plan = tmp_path / "plan.yaml"
    words = [
        "plan",
        str(saved_config(tmp_path)),
        "--seq",
        "128",
        "--batch",
        "4",
        "--dtype",
        "float32",
        "--optimizer",
        "sgd",
    ]
    assert main([*words, "--device", "cpu", "--budget", "3500KiB", "--out", str(plan)]) == 0
    model = tiny_model("llama", layers=6)
    result = hf_ckpt.verify(model, tiny_batch("llama", batch=4, tokens=128), {"plan": str(plan)})
    assert result, result
    assert sum(result.recomputed.values()) > 0
    assert Plan.load(plan).prediction.peak_bytes <= 3500 * 2**10


@pytest.mark.long
def test_json_holds_everything(capsys):
    words = ["plan", "gpt2", "--seq", "64", "--device", "a10", "--lora", "4", "--accum", "3", "--frontier", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"]["lora"] == 4
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


@pytest.mark.slow
def test_what_cannot_fit_says_which_batch_does(capsys):
    """If nothing fits, the suggested batch is the largest divisor of the batch that fits."""
    question = ["mini-gpt2", "--seq", "128", "--device", "a10", "--budget", "240MiB"]
    assert main(["plan", *question, "--batch", "16", "--json"]) == 2
    settings = json.loads(capsys.readouterr().out)["nearest"]
    peaks = [setting["peak_bytes"] for setting in settings]
    assert max(peaks) <= 240 * 2**20
    assert all(Spec.parse(setting["spec"]) for setting in settings)
    assert len(set(peaks)) == len(peaks), "a setting that changes nothing beside another"
    words = next(setting["options"] for setting in settings if "--batch " in setting["options"]).split()
    batch, steps = int(words[1]), int(words[3])
    assert batch * steps == 16
    assert batch > 1
    assert main(["plan", *question, "--batch", str(batch), "--accum", str(steps)]) == 0
    assert main(["plan", *question, "--batch", str(batch * 2), "--accum", str(steps // 2)]) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["no such model!"], "cannot read a model's config"),
        (["gpt2", "--seq", "2048"], "has positions for 1024 tokens"),
        (["gpt2", "--batch", "99999999999"], "a micro-step may have 4294967296 tokens at most"),
    ],
)
def test_wrong_questions_are_refused(words, told, capsys):
    assert main(["plan", *words]) == 2
    assert told in capsys.readouterr().err


# --- largest sizes ----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(0, 2000), st.integers(1, 100))
def test_the_largest_is_found(steps, budget, start):
    """For any increasing function, the search agrees with trying every number."""
    peaks = [sum(steps[: number + 1]) for number in range(len(steps))]
    most = len(peaks)
    found = largest(lambda number: peaks[number - 1], budget, start, most)
    assert found == sum(peak <= budget for peak in peaks)


def test_what_fills_the_budget_is_searched_by_halves():
    """If plans fill the budget up to the last number that fits, the search halves instead of counting up."""
    tried = []

    def peak_of(number):
        tried.append(number)
        return 990 + number // 100 if number <= 712 else 2000

    assert largest(peak_of, 1000, 128) == 712
    assert len(tried) <= 25  # instead of every number near the end


@pytest.mark.long
def test_largest_batch_and_sequence_fit_and_no_larger_ones_do():
    asked = Question("mini-gpt2", batch=2, tokens=64, device="a10", budget="400MiB", max_batch=True, max_tokens=True)
    found = forecast(asked)
    assert found.max_batch >= asked.batch
    assert found.max_tokens >= asked.tokens

    def fits(**changes):
        """Whether these sizes fit, by their own trace."""
        changed = dataclasses.replace(asked, **changes)
        return peak_of_least(Forecaster(changed).candidates(changed)) <= 400 * 2**20

    assert fits(batch=found.max_batch)
    assert not fits(batch=found.max_batch + 1)
    assert fits(tokens=found.max_tokens)
    assert not fits(tokens=found.max_tokens + 1)


@pytest.mark.long
@sparing("name", ["gpt2", "llama-3.1-8b", "bert-large", "t5-base"], "gpt2")
def test_never_slower_than_what_transformers_offers(name):
    """For the peak of any option of transformers, a plan is predicted to be at least as fast."""
    # Fewer tokens would take only the time to launch kernels.
    found = forecast(Question(name, batch=8, tokens=512, lora=8, device="a100-80", budget="100%"))
    for option in found.usual:
        if option.plan is not None:
            plan = plan_within(found.costs, option.peak_bytes)
            assert plan.prediction.step_seconds <= option.step_seconds, option.name
    faster = [o for o in found.usual if o.plan is not None and o.name.startswith("every_n_layers")]
    middle = plan_within(found.costs, faster[-1].peak_bytes).prediction.step_seconds
    assert middle < 0.95 * faster[-1].step_seconds
