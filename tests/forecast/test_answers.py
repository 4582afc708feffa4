"""Forecasts in words, the settings to copy, and settings to try if nothing fits."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
import yaml
from helpers.sparing import sparing
from rich.console import Console

from hf_ckpt.cli import plan as plan_verb
from hf_ckpt.cli.main import main
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast.answers import misfit_of
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.forecast.forecast import Forecaster, forecast
from hf_ckpt.forecast.nearest import Setting
from hf_ckpt.forecast.words import (
    arguments_of,
    article,
    assumed,
    headline,
    model_lines,
    notes_of,
    spec_of,
    task_of,
    yaml_lines,
)
from hf_ckpt.prediction.question import Question, Workload
from hf_ckpt.prediction.workload import on_device, skeleton_of_workload
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB, format_bytes

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"policy": "budget", "budget": "20GiB", "head": "auto"}


def test_the_first_line_says_whether_it_fits():
    device = DEVICES["4090"]
    fits = headline(int(21.3 * GIB), 22 * GIB, device, 4100.0)
    assert fits == "Fits: 21.3 of 23.5 GiB on an RTX 4090, 4,100 tokens a second."
    assert headline(23 * GIB, 22 * GIB, device, None).startswith(
        "Does not fit: 23.0 of 23.5 GiB on an RTX 4090, of which"
    )
    assert [article(DEVICES[name].title) for name in ("t4", "a100-80", "h100", "b200", "l4")] == [
        "a",
        "an",
        "an",
        "a",
        "an",
    ]


def test_the_lines_to_write_are_read_back():
    workload = Workload("gpt2", tokens=64, lora=8, lora_targets=("c_attn",), load_in_4bit=True, trainer="sft")
    written = yaml.safe_load("\n".join(yaml_lines(arguments_of(workload, SPEC))))
    assert written["optim"] == "adamw_torch_fused"
    assert written["bf16"] is True
    assert Spec.parse(written["gradient_checkpointing_kwargs"]) == Spec.parse(SPEC)
    lines = model_lines(workload, SPEC)
    assert 'target_modules=["c_attn"]' in lines[-2]
    assert lines[-1].startswith("hf_ckpt.install(model)")
    assert model_lines(workload, {"policy": "none"}) == lines[:-1]
    assert "bnb_4bit_use_double_quant=True" in lines[1]
    assert arguments_of(workload, {"policy": "none"})["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("workload", "device", "line"),
    [
        (
            Workload("gpt2"),
            "4090",
            "gpt2: every weight, weights bfloat16, no autocast, adamw, batch 1 x 512 tokens, sdpa; RTX 4090",
        ),
        (
            Workload("gpt2", 2, lora=8, load_in_4bit=True),
            "4090",
            "gpt2: LoRA r=8 on every linear layer, base in 4 bits, the rest in float32, weights bfloat16, autocast "
            "bfloat16, adamw, batch 2 x 512 tokens, sdpa; RTX 4090",
        ),
        (
            Workload("gpt2", lora=8, load_in_4bit=True, trainer="sft", packing=True, ranks=4, accumulation=2),
            "t4",
            "gpt2: LoRA r=8 on every linear layer, base in 4 bits, weights float16, autocast float16 (a T4 has no "
            "bfloat16), adamw, batch 1 x 512 tokens x 2 micro-steps, sdpa, SFT of TRL, packed, 4 ranks (ddp); T4",
        ),
    ],
)
def test_what_is_assumed_is_one_line(workload, device, line):
    assert assumed(on_device(workload, DEVICES[device]), DEVICES[device]) == line


def test_the_first_line_names_the_task_of_a_model_that_may_have_another():
    device = DEVICES["3060"]
    assert task_of("GPT2LMHeadModel") is task_of("T5ForConditionalGeneration") is None
    said = headline(GIB, 2 * GIB, device, 10.0, task_of("BertForMaskedLM"))
    assert said.endswith("10 tokens a second. The task is masked language modelling (BertForMaskedLM).")
    assert headline(3 * GIB, 2 * GIB, device, None, task_of("BertForSequenceClassification")).endswith(
        "as low as a plan can go. The task is sequence classification (BertForSequenceClassification)."
    )


@pytest.mark.parametrize(("changed", "said"), [({}, 1), ({"kbit_preparation": False}, 0), ({"trainer": "sft"}, 0)])
def test_qlora_prints_the_preparation_that_it_assumes(changed, said):
    workload = Workload("gpt2", lora=8, load_in_4bit=True, **changed)
    lines = [line for line in model_lines(workload, SPEC) if "prepare_model_for_kbit_training(model" in line]
    assert len(lines) == said
    assert all("--no-kbit-preparation" in line for line in lines)
    assert ("the rest in float32" in assumed(workload, DEVICES["4090"])) == bool(said)


def test_what_does_not_fit_is_told_with_what_was_assumed():
    workload, device = Workload("gpt2", lora=8), DEVICES["4090"]
    error = InfeasibleError(2 * GIB, 3 * GIB, {"weights": 3 * GIB, "kept": 0}, ["fewer tokens"], "no")
    error.notes, error.model = ("half of it are experts",), "GPT2LMHeadModel"
    answer = misfit_of(error, workload, device)
    assert answer.headline.startswith("Does not fit: 3.0 of 23.5 GiB")
    assert answer.assumed == f"{assumed(workload, device)}, budget 2.00 GiB"
    assert answer.remarks == ("3.00 GiB weights", "note: half of it are experts")


@pytest.mark.parametrize("found", [[], [Setting("head in [chunks]", "--head auto", 2 * GIB, 10.0, {"policy": "full"})]])
def test_that_nothing_fits_is_printed_before_what_does_is_looked_for(found, capsys, monkeypatch):
    printed_before = []
    monkeypatch.setattr(
        "hf_ckpt.forecast.forecast.nearest_settings",
        lambda *_, **__: printed_before.append(capsys.readouterr().out) or found,
    )
    words = ["plan", "mini-gpt2", "--device", "4090", "--budget", "10MiB"]
    assert main(words) == 2
    assert printed_before[0].startswith("Does not fit: ")
    assert "weights and optimizer state" in printed_before[0]
    after = capsys.readouterr().out
    if found:
        assert after.startswith(
            "\nWhat fits, with one change or two. Each is the fastest plan that fits into 10.00 MiB"
        )
        assert "head in [chunks]" in after
        assert 'for the first: {"policy": "full"}' in after
    else:
        assert after.startswith("Nothing near it fits, either:\n  - ")
    assert main([*words, "--json"]) == 2
    assert printed_before[1:] == [""]
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"]
    assert [setting["options"] for setting in told["nearest"]] == [setting.options for setting in found]


def test_a_plan_that_is_larger_than_the_card_does_not_fit(capsys, monkeypatch):
    found = forecast(Question("mini-gpt2", device="4090"))
    console = Console(file=io.StringIO(), width=200)
    plan_verb.print_forecast(found, console)
    said = f"{assumed(found.workload, found.device)}, budget "
    for part in (found.answer, said, str(found.plan), "every_n_layers: 2"):
        assert part in console.file.getvalue()
    small = dataclasses.replace(found, device=dataclasses.replace(found.device, memory_gib=0.1), budget_bytes=2 * GIB)
    for given, code in ((found, 0), (small, 2)):
        monkeypatch.setattr(Forecaster, "forecast", lambda _, given=given: given)
        assert main(["plan", "mini-gpt2", "--device", "4090", "--budget", "30GiB", "--json"]) == code
        told = json.loads(capsys.readouterr().out)
        assert told["fits"] == (code == 0)
        assert told["assumed"] == assumed(found.workload, found.device)
    assert "though a budget of 2.0 GiB would allow it" in told["answer"]


@pytest.mark.skipif(transformers.__version__ < "5", reason="experts are linear layers before transformers 5")
@pytest.mark.parametrize("prepared", [True, False])
def test_experts_that_keep_their_bits_are_told(prepared, tmp_path):
    """A note says that experts are stacked weights, which bitsandbytes does not quantise and PEFT casts to float32."""
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.MixtralConfig(**shape, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    workload = Workload(str(tmp_path), lora=4, lora_targets=("q_proj",), load_in_4bit=True, kbit_preparation=prepared)
    skeleton = skeleton_of_workload(workload)
    size = 2 * 8 * 3 * 512 * 64 * (4 if prepared else 2)
    costs = SimpleNamespace(family="generic", model="MixtralForCausalLM", static=SimpleNamespace(parameters=size))
    family, experts = notes_of(costs, skeleton, workload)
    assert family.startswith("MixtralForCausalLM is of no known family")
    assert experts.startswith(f"{format_bytes(size)} of the weights are experts.")
    assert ("PEFT's preparation casts them to float32" in experts) == prepared
    plain = dataclasses.replace(workload, load_in_4bit=False)
    assert list(notes_of(costs, skeleton_of_workload(plain), plain)) == [family]


def test_the_spec_has_what_the_plan_runs_in_chunks():
    blocks = [(Block(f"model.layers.{number}", "decoder", number, "LlamaDecoderLayer"), KEEP) for number in range(2)]
    plan = Plan("llama", "LlamaForCausalLM", tuple(blocks))
    assert spec_of(plan, 2**30, None) == {"policy": "none"}
    found = spec_of(dataclasses.replace(plan, mlp="auto", head=64), 2**30, None)
    assert found == {"policy": "budget", "budget": "1024MiB", "head": 64, "mlp": "auto"}
    assert Spec.parse(found).mlp == "auto"


def cookbook():
    found = importlib.util.spec_from_file_location("cookbook", ROOT / "tests" / "scripts" / "cookbook.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


QUESTIONS = cookbook().QUESTIONS


def test_the_cookbook_has_every_question():
    page = (ROOT / "docs" / "cookbook.md").read_text()
    for question, command in QUESTIONS.items():
        assert f"## {question}\n\n```bash\n{command}\n```" in page


@pytest.mark.slow
@sparing("question", list(QUESTIONS), "BERT-large with 512 tokens, a classifier, on 8 GB")
def test_answers_of_the_cookbook_are_those_of_the_commands(question, monkeypatch):
    """The cookbook shows the commands' current answers; `python tests/scripts/cookbook.py` rewrites it."""
    monkeypatch.chdir(ROOT)
    book = cookbook()
    section = book.section(question, QUESTIONS[question], book.answer_of(QUESTIONS[question]))
    assert section.strip() in (ROOT / "docs" / "cookbook.md").read_text()
