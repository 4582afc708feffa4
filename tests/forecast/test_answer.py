"""What `hf-ckpt plan` says: whether it fits, what was assumed, what to write, and what would be better or fit."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import transformers
import yaml
from helpers.planned import saved_config
from helpers.sparing import sparing
from hypothesis import given
from hypothesis import strategies as st

import hf_ckpt
from hf_ckpt.cli.arguments import asked_of
from hf_ckpt.cli.main import _parser, main
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast.answer import Forecast
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.nearest import largest
from hf_ckpt.forecast.question import Workload, on_device, question
from hf_ckpt.forecast.words import NONE, assumed, headline, to_write
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"policy": "budget", "budget": "20GiB", "head": "auto"}
CARD, CPU = DEVICES["4090"], DEVICES["cpu"]
QLORA = {"lora": 8, "load_in_4bit": True}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((21.3, 22, CARD, 4100.0), "Fits: 21.3 of 23.5 GiB on an RTX 4090, 4,100 tokens a second."),
        ((21.3, 22, CARD, 10.0, 8), "Fits: 21.3 of 23.5 GiB on an RTX 4090, 10 tokens a second on each of 8 ranks."),
        ((0.25, 0.5, CPU, None), "Fits: 0.250 of 0.500 GiB on this CPU."),
        ((14, 16, DEVICES["t4"], None), "Fits: 14.0 of 14.6 GiB on a T4."),
        ((23, 22, CARD, None), "Does not fit: every plan needs 23.0 GiB or more. The budget is 22.0 GiB, and an RTX"),
        ((24, 90, CARD, None), "Does not fit: the plan needs 24.0 GiB or more. The budget is 90.0 GiB, and an RTX 40"),
    ],
)
def test_the_first_line_says_whether_it_fits(words, line):
    peak, budget, device, speed, *ranks = words
    assert headline(int(peak * GIB), int(budget * GIB), device, speed, *(ranks or [1])).startswith(line)


@pytest.mark.parametrize(
    ("workload", "device", "line"),
    [
        (
            Workload("g"),
            "4090",
            "every weight, weights bfloat16, no autocast, adamw, batch 1 x 512 tokens, sdpa; RTX 4090",
        ),
        (
            Workload("g", ranks=8, parallel="fsdp2"),  # what is trained is in float32, as accelerate casts it
            "h100",
            "every weight, weights float32, autocast bfloat16, adamw, batch 1 x 512 tokens, sdpa, 8 ranks (fsdp2); "
            "H100 SXM",
        ),
        (
            Workload("g", 2, **QLORA),
            "4090",
            "LoRA r=8 on every linear layer, base in 4 bits, the rest in float32, weights bfloat16, autocast bfloat16, "
            "adamw, batch 2 x 512 tokens, sdpa; RTX 4090",
        ),
        (
            Workload("g", **QLORA, trainer="sft", packing=True, ranks=4, accumulation=2),
            "t4",
            "LoRA r=8 on every linear layer, base in 4 bits, weights float16, autocast float16 (a T4 has no bfloat16), "
            "adamw, batch 1 x 512 tokens x 2 micro-steps, sdpa, SFT of TRL, packed, 4 ranks (ddp); T4",
        ),
    ],
)
def test_what_is_assumed_is_one_line(workload, device, line):
    said = assumed(on_device(workload, DEVICES[device]), "AModel", DEVICES[device], 2 * GIB)
    assert said == f"g (AModel): {line}, budget 2.00 GiB"


@pytest.mark.parametrize(
    ("workload", "program", "keys", "absent", "last_line"),
    [
        (Workload("g", 4), "", {"per_device_train_batch_size": 4}, "max_length", "hf_ckpt.install(model)"),
        (Workload("g", **QLORA, kbit_preparation=False), "", {"bf16": True}, "prepare_model_for", "hf_ckpt.install"),
        (Workload("g", packing=True), "Trainer", {"optim": "adamw_torch_fused"}, "packing", "hf_ckpt.install(model)"),
        (
            Workload("g", trainer="sft", packing=True),
            "",
            {"packing": True, "max_length": 512, "bf16": True},
            "lora",
            "hf_",
        ),
        (
            Workload("g", 4, trainer="sft", lora=8, packing=True, optimizer="adafactor"),
            "axolotl",
            {"micro_batch_size": 4, "sequence_len": 512, "sample_packing": True, "lora_r": 8, "optimizer": "adafactor"},
            "per_device_train_batch_size",
            None,
        ),
        (
            Workload("g", lora=8),
            "LLaMA-Factory",
            {"cutoff_len": 512, "lora_rank": 8},
            "gradient_checkpointing",
            "python -m",
        ),
    ],
)
def test_what_to_write_is_in_the_programs_own_keys_and_is_read_back(workload, program, keys, absent, last_line):
    forecast = Forecast(
        True, "", "", workload, "t4", 1, 1, 1, {}, write=to_write(workload, SPEC, program), program=program
    )
    texts = list(forecast.copies().values())
    written = yaml.safe_load(texts[0])
    assert keys.items() <= written.items()
    assert absent not in written
    assert (last_line is None) == (len(texts) == 1)
    assert last_line is None or texts[1].splitlines()[-1].startswith(last_line)
    if program != "LLaMA-Factory":
        assert Spec.parse(written["gradient_checkpointing_kwargs"]) == Spec.parse(SPEC)
        assert to_write(workload, NONE, program)["training_arguments"]["gradient_checkpointing"] is False
    assert ("DataCollatorWithFlattening" in texts[-1]) == (workload.packing and workload.trainer is None)


# --- the record -------------------------------------------------------------------------------------------------------

MINI = {"model": "mini-gpt2", "batch": 8, "tokens": 256, "device": "a10"}


@pytest.mark.parametrize(
    "fields",
    [
        {"budget": "400MiB", "frontier": True},
        {"lora": 4, "lora_targets": ("c_attn",), "accumulation": 3, "ranks": 2},
        {"model": "mini-llama", "ranks": 2, "parallel": "fsdp2"},
    ],
)
def test_the_record_adds_up_and_is_read_back(fields):
    asked = question(MINI | fields)
    found = Forecaster(asked).forecast()
    assert sum(found.parts.values()) == found.peak_bytes == found.plan.prediction.peak_bytes <= found.budget_bytes
    assert min(found.parts.values()) >= 0
    assert Forecast.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    own, *_ = found.rows
    assert (own.peak_bytes, own.step_seconds, own.spec) == (found.peak_bytes, found.step_seconds, found.write["spec"])
    assert {"none", "every_n_layers: 2", "full", "offload (transformers)"} <= {row.name for row in found.usual}
    assert all(row.step_seconds < own.step_seconds for row in found.rows if row.options.startswith("--head"))
    frontier = [row for row in found.rows if row.is_frontier]
    assert (len(frontier) > 3) == asked.frontier
    assert [row.peak_bytes for row in frontier] == sorted(row.peak_bytes for row in frontier)


def test_a_faster_plan_is_named_with_its_option():
    asked = question({"model": "gpt2", "batch": 8, "tokens": 1024, "device": "a10", "budget": "6GiB"})
    found = Forecaster(asked).forecast()
    faster = next(row for row in found.rows if row.options == "--head auto")
    assert found.notes[0].startswith("faster with --h")
    assert Forecaster(dataclasses.replace(asked, head="auto")).forecast().step_seconds == faster.step_seconds


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"parallel": "fsdp2"}, r"--parallel fsdp2 shares work between ranks: give their number \(--ranks\)"),
        ({"parallel": "fsdp2", "ranks": 2, "head": "auto"}, "the head in chunks needs whole weights"),
        ({"model": "no such model!"}, "cannot read a model's config"),
        ({"model": "gpt2", "tokens": 2048}, "has positions for 1024 tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused(fields, told):
    with pytest.raises(HfCkptError, match=told):
        Forecaster(question(MINI | fields)).forecast()


@pytest.mark.skipif(transformers.__version__ < "5", reason="experts are linear layers before transformers 5")
@pytest.mark.parametrize("prepared", [True, False])
def test_experts_that_keep_their_bits_are_told(prepared, tmp_path):
    """A note says that experts are stacked weights, which bitsandbytes does not quantise and PEFT casts to float32."""
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.MixtralConfig(**shape, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    fields = {"lora": 4, "lora_targets": ("q_proj",), "load_in_4bit": True, "kbit_preparation": prepared}
    notes = Forecaster(question({"model": str(tmp_path), "device": "t4", "tokens": 64, **fields})).forecast().notes
    assert any(note.startswith("MixtralForCausalLM is of no known family") for note in notes)
    experts = next(note for note in notes if " of the weights are experts" in note)
    assert ("PEFT's preparation casts them to float32" in experts) == prepared


# --- what fits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "budget", "part"), [(16, "240MiB", "--batch"), (4, "60MiB", "+")])
def test_what_fits_with_a_change_is_the_plan_of_its_options(batch, budget, part, capsys):
    """The batch is the largest divisor that fits. Where no change is enough, the fewest that have to come together."""
    words = ["plan", "mini-gpt2", "--batch", str(batch), "--seq", "128", "--budget", budget, "--device", "a10"]
    assert main(words) == 2
    printed = capsys.readouterr().out
    places = [printed.index(said) for said in ("Does not fit: ", "to lower it: ", "lowest peak: ", "what fits into ")]
    assert places == sorted(places)
    asked = question({**MINI, "batch": batch, "tokens": 128, "budget": budget})
    answer = Forecaster(asked).answer()
    assert (answer.fits, answer.plan, answer.peak_bytes) == (False, None, answer.floor_bytes)
    row = next(row for row in answer.rows if part in row.options + row.name)
    changes = asked_of(_parser().parse_args(["plan", "mini-gpt2", *row.options.split()]))
    again = Forecaster(dataclasses.replace(asked, **changes)).forecast()
    assert (again.peak_bytes, again.write["spec"]) == (row.peak_bytes, row.spec)
    if part == "--batch":
        twice = {"batch": 2 * changes["batch"], "accumulation": changes["accumulation"] // 2}
        with pytest.raises(InfeasibleError):
            Forecaster(dataclasses.replace(asked, **twice)).forecast()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(0, 2000), st.integers(1, 100))
def test_the_largest_is_found(steps, budget, start):
    """For any increasing function, the search agrees with trying every number, and tries few."""
    peaks, tried = [sum(steps[: number + 1]) for number in range(len(steps))], []
    found = largest(lambda number: tried.append(number) or peaks[number - 1], budget, start, len(peaks))
    assert found == sum(peak <= budget for peak in peaks)
    assert len(tried) <= 16


@pytest.mark.long
@pytest.mark.parametrize("name", ["batch", "tokens"])
def test_the_largest_size_has_a_row_of_its_own(name):
    asked = question({**MINI, "batch": 2, "tokens": 64, "budget": "400MiB"})
    found = Forecaster(dataclasses.replace(asked, **{f"max_{name}": True})).forecast()
    row = next(row for row in found.rows if row.name.startswith(("largest batch: ", "longest sequences: ")))
    assert row.peak_bytes <= found.budget_bytes
    with pytest.raises(InfeasibleError):
        Forecaster(dataclasses.replace(asked, **{name: int(row.options.split()[1]) + 1})).forecast()


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_installed_on_the_model(tmp_path):
    """A plan made from a config fits the model of that config and has its predicted effect."""
    plan = tmp_path / "plan.yaml"
    words = f"plan {saved_config(tmp_path)} --seq 128 --batch 4 --dtype float32 --optimizer sgd --device cpu".split()
    assert main([*words, "--budget", "3500KiB", "--out", str(plan)]) == 0
    model = tiny_model("llama", layers=6)
    result = hf_ckpt.verify(model, tiny_batch("llama", batch=4, tokens=128), {"plan": str(plan)})
    assert result, result
    assert sum(result.recomputed.values()) > 0


def cookbook():
    found = importlib.util.spec_from_file_location("cookbook", ROOT / "tests" / "scripts" / "cookbook.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


QUESTIONS = cookbook().QUESTIONS


@pytest.mark.slow
@sparing("name", list(QUESTIONS), "BERT-large with 512 tokens, a classifier, on 8 GB")
def test_answers_of_the_cookbook_are_those_of_the_commands(name, monkeypatch):
    """The cookbook shows the commands' current answers; `python tests/scripts/cookbook.py` rewrites it."""
    monkeypatch.chdir(ROOT)
    book = cookbook()
    section = book.section(name, QUESTIONS[name], book.answer_of(QUESTIONS[name]))
    assert section.strip() in (ROOT / "docs" / "cookbook.md").read_text()
