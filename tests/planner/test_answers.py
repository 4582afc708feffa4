"""What `hf-ckpt plan` tells first, and the settings that it finds where nothing fits."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from helpers.sparing import sparing

from hf_ckpt.cli.main import main
from hf_ckpt.doctor.facts import gather
from hf_ckpt.doctor.trainings import workload_fields
from hf_ckpt.errors import HfCkptError
from hf_ckpt.planner.answers import arguments_of, article, headline, model_lines, shares_of, spec_of, yaml_lines
from hf_ckpt.prediction.devices import DEVICES
from hf_ckpt.prediction.workload import Workload
from hf_ckpt.spec.actions import KEEP
from hf_ckpt.spec.plan import Block, Plan
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB

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


def test_the_spec_has_what_the_plan_runs_in_chunks():
    blocks = [(Block(f"model.layers.{number}", "decoder", number, "LlamaDecoderLayer"), KEEP) for number in range(2)]
    plan = Plan("llama", "LlamaForCausalLM", tuple(blocks))
    assert spec_of(plan, 2**30, None) == {"policy": "none"}
    found = spec_of(dataclasses.replace(plan, mlp="auto", head=64), 2**30, None)
    assert found == {"policy": "budget", "budget": "1024MiB", "head": 64, "mlp": "auto"}
    assert Spec.parse(found).mlp == "auto"


def test_a_training_file_tells_the_workload(tmp_path):
    file = tmp_path / "train.yaml"
    options = {"model_name_or_path": "gpt2", "per_device_train_batch_size": 4, "max_length": 64, "lora_r": 8}
    more = {
        "lora_target_modules": ["c_attn"],
        "load_in_4bit": True,
        "optim": "adafactor",
        "bf16": True,
        "packing": True,
    }
    file.write_text(json.dumps({**options, **more}))
    workload = Workload(**workload_fields(gather([file])))
    assert workload == Workload(
        "gpt2",
        4,
        64,
        lora=8,
        lora_targets=("c_attn",),
        load_in_4bit=True,
        optimizer="adafactor",
        autocast="bfloat16",
        packing=True,
    )
    file.write_text(json.dumps({**options, "device_map": {"transformer": 0, "lm_head": "cpu"}}))
    with pytest.raises(HfCkptError, match="device_map keeps weights in host memory"):
        workload_fields(gather([file]))


def test_batches_of_a_file_are_as_long_as_their_longest():
    assert shares_of([3, 9, 4, 5, 7], 2) == [9, 5, 7]


@pytest.mark.slow
def test_what_fits_instead_is_found_by_plans(capsys):
    words = ["plan", "mini-llama", "--seq", "256", "--batch", "4", "--device", "t4", "--budget", "110MiB", "--json"]
    assert main(words) == 2
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["peak_bytes"] > found["budget_bytes"]
    assert found["nearest"]
    for setting in found["nearest"]:
        assert setting["peak_bytes"] <= found["budget_bytes"]
        assert Spec.parse(setting["spec"])


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
    """`python tests/scripts/cookbook.py` writes them anew."""
    monkeypatch.chdir(ROOT)
    book = cookbook()
    section = book.section(question, QUESTIONS[question], book.answer_of(QUESTIONS[question]))
    assert section.strip() in (ROOT / "docs" / "cookbook.md").read_text()
