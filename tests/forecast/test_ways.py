"""How ranks share a training: what `forecast/ways.py` says is what is counted, and what is written chooses it."""

import pytest
import yaml

import hf_ckpt
from hf_ckpt.doctor.files import fields_of, read_files
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.model import shallow_model
from hf_ckpt.forecast.question import Question, question
from hf_ckpt.forecast.ways import WAYS
from hf_ckpt.models.tiny import tiny_model

CONFIG = tiny_model("llama", layers=2).config
CONFIG.architectures = ["LlamaForCausalLM"]
RANKS = 4
SHARING = [way for way in WAYS if way != "ddp"]


def asked(way, **fields):
    ranks = {"ranks": RANKS, "parallel": way} if way else {}
    return {"tokens": 16, "device": "a10", "budget": "1GiB", **ranks, **fields}


@pytest.mark.parametrize(("way", "whole", "shared"), [("zero1", 4, 14), ("zero2", 2, 20), ("zero3", 0, 22)])
def test_states_are_those_of_deepspeed(way, whole, shared):
    """Bytes a parameter with Adam, at most in the optimizer's step.

    Estimators of DeepSpeed have 2 + 18 / N for ZeRO-2 and 18 / N for ZeRO-3, and leave out what `test_peaks.py` counts:
    a second copy of the 16-bit shards of gradients, and under ZeRO-3 the first one. Before the step of ZeRO-1, shards
    are copied out of the whole gradients.
    """
    forecaster = Forecaster(question({"model": "a llama", **asked(way)}), config=CONFIG)
    static = forecaster.estimator.costs_of(forecaster.training).static
    model = shallow_model(Question("a llama"), CONFIG)
    parameters = sum(tensor.shape[0] * (tensor.shape[1:] or (1,))[0] for tensor in model.tensors)
    expected = whole * parameters + shared * parameters / RANKS
    assert static.optimizer_peak_bytes - static.buffers == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_each_way_has_its_parts_and_shares_no_less_than_the_one_before(accumulation):
    """Parts add up. Of DeepSpeed's stages, each needs no more than the one before it."""
    peaks = {}
    alone = hf_ckpt.predict(CONFIG, **asked("")).parts["weights"]
    for way in WAYS:
        found = hf_ckpt.predict(CONFIG, **asked(way), accumulation=accumulation, autocast="none")
        assert sum(found.parts.values()) == found.peak_bytes
        assert min(found.parts.values()) >= 0
        said = [note for note in found.notes if note.startswith("the figures leave out")]
        assert bool(said) == bool(WAYS[way].left_out)
        whole = found.parts["weights"] if not WAYS[way].weights else RANKS * found.parts["weights"]
        assert whole == pytest.approx(alone, rel=0.001)
        peaks[way] = found.peak_bytes
    assert peaks["zero3"] < peaks["zero2"] <= peaks["zero1"]


def test_zero_trains_weights_in_the_type_that_is_computed_in():
    """Adapters, too; autocast is off, and their float32 copies are a part of their own."""
    found = hf_ckpt.predict(CONFIG, **asked("zero2", lora=4, dtype="float32", autocast="bfloat16"))
    plain = hf_ckpt.predict(CONFIG, **asked("", lora=4, autocast="none"))
    trained = RANKS * found.parts["the optimizer's copy of the weights in float32"]
    assert found.parts["weights"] == plain.parts["weights"] - trained // 2  # PEFT's adapters are in float32
    assert "--dtype bfloat16 --autocast none" in found.assumed
    half = Forecaster(question({"model": "a llama", **asked("zero2", device="t4")}), config=CONFIG).training
    assert (half.dtype, half.autocast) == ("float16", "none")


@pytest.mark.parametrize("way", SHARING)
def test_what_is_written_chooses_the_way(way, tmp_path):
    """A file with the arguments is read as the question, and starts on as many ranks."""
    budget = hf_ckpt.predict(CONFIG, 8, **asked(way, tokens=128)).usual[1].peak_bytes + 2**16
    found = hf_ckpt.predict(CONFIG, 8, **asked(way, tokens=128, budget=budget))
    arguments, lines = found.write.values()
    assert f"torchrun --nproc-per-node {RANKS} -m hf_ckpt" in lines
    path = tmp_path / "train.yaml"
    path.write_text(arguments)
    fields = fields_of(read_files([path]), {"ranks": RANKS})
    assert (fields["parallel"], fields["autocast"]) == (way, "bfloat16")
    written = yaml.safe_load(arguments)
    assert written["bf16"]
    assert written.get("deepspeed", {}).get("zero_optimization", {"stage": 0})["stage"] == int(way[-1]) * (
        "zero" in way
    )


@pytest.mark.parametrize("way", ["fsdp1", "fsdp2", "zero3"])
def test_the_reference_of_dpo_is_shared_like_the_model(way):
    weights = [
        hf_ckpt.predict(CONFIG, **asked(way, autocast="none", trainer=t)).parts["weights"] for t in (None, "dpo")
    ]
    assert weights[1] == pytest.approx(2 * weights[0], rel=0.001)


@pytest.mark.parametrize(
    ("way", "advice"), [("ddp", "or shard them"), ("zero2", "more ranks"), ("fsdp1", "more ranks")]
)
def test_what_is_shared_is_not_advised_to_be_shared(way, advice):
    with pytest.raises(InfeasibleError) as refused:
        hf_ckpt.predict(CONFIG, **asked(way, budget="100KiB"))
    assert any(hint.endswith(advice) for hint in refused.value.hints)


def test_ways_are_read_as_people_spell_them():
    for text, name in (("fsdp", "fsdp1"), ("FSDP-2", "fsdp2"), ("ZeRO-3", "zero3"), ("zero_2", "zero2")):
        assert Question("gpt2", ranks=2, parallel=text).parallel == name


def test_under_zero3_plans_keep_or_recompute_whole_blocks():
    """What `selective` rebuilds there differs from what it rebuilds on one rank."""
    found = hf_ckpt.predict(CONFIG, 8, **asked("zero3"))
    plans = found.plan, found.within(f"{found.floor_bytes}B").plan
    kinds = {action.kind for plan in plans for _, action in plan.actions}
    assert kinds <= {"keep", "full"}
    with pytest.raises(hf_ckpt.HfCkptError, match="zero3 is planned for with `keep` and `full` only"):
        hf_ckpt.predict(CONFIG, 8, **asked("zero3", spec={"policy": "selective", "save": ["linear"]}))
