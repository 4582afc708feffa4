"""`hf-ckpt doctor`: files are read as their owners read them, and each rule finds its fault and nothing else."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli.main import _parser, main
from hf_ckpt.doctor.rules import RULES, diagnose
from hf_ckpt.doctor.trainings import fields_of, read_training
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import Question, question

ROOT = Path(__file__).parent.parent.parent
TRL = """
{model_name_or_path: mini-llama, dtype: bfloat16, load_in_4bit: true, use_bnb_nested_quant: true, use_peft: true,
lora_r: 16, lora_alpha: 32, lora_dropout: 0.05, lora_target_modules: [all-linear], dataset_name: trl-lib/Capybara,
max_length: 512, per_device_train_batch_size: 2, gradient_accumulation_steps: 4, learning_rate: 2.0e-4, bf16: true,
optim: adamw_torch_fused, output_dir: out}
"""
AXOLOTL = """
{base_model: mini-llama, load_in_8bit: false, load_in_4bit: true, datasets: [{path: a, type: alpaca}], adapter: qlora,
val_set_size: 0.1, lora_model_dir: null, sequence_len: 512, sample_packing: false, lora_r: 16, lora_alpha: 32,
lora_dropout: 0.05, lora_target_linear: true, gradient_accumulation_steps: 4, micro_batch_size: 2, num_epochs: 1,
optimizer: adamw_torch_fused, learning_rate: 0.0002, bf16: auto, gradient_checkpointing: true}
"""
LLAMA_FACTORY = """
{model_name_or_path: mini-llama, quantization_bit: 4, stage: sft, do_train: true, finetuning_type: lora, lora_rank: 16,
lora_alpha: 32, lora_dropout: 0.05, lora_target: all, dataset: identity, template: llama3, cutoff_len: 512,
per_device_train_batch_size: 2, gradient_accumulation_steps: 4, optim: adamw_torch_fused, bf16: true}
"""
TRAINER = "{model_name_or_path: mini-gpt2, output_dir: out, bf16: true}"
FILES = {"TRL": TRL, "axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "Trainer": TRAINER}
QLORA = {"model": "mini-llama", "batch": 2, "tokens": 512, "lora": 16, "lora_dropout": 0.05, "load_in_4bit": True}
QLORA |= {"autocast": "bfloat16", "optimizer": "adamw_torch_fused", "accumulation": 4}
FSDP2 = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}


@pytest.fixture
def reading(tmp_path):
    """A function (program, its launcher's config, the model's config, changed keys) -> `Training`."""

    def read(program="Trainer", launch=None, model=None, **changed):
        if program == "TRL":
            pytest.importorskip("trl")
        values = {**yaml.safe_load(FILES[program]), **changed}
        paths = [tmp_path / "train.yaml"]
        paths[0].write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "left out"}))
        if launch is not None:
            paths.append(tmp_path / "launch.yaml")
            paths[1].write_text(yaml.safe_dump(launch))
        return read_training(paths, model)

    return read


# --- what a file asks for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["TRL", "axolotl", "LLaMA-Factory"])
def test_the_same_qlora_is_the_same_training_in_each_program(program, reading):
    training = reading(program)
    assert training.program.name == program
    fields = fields_of(training, {})
    assert fields.pop("trainer", None) == ("sft" if program == "TRL" else None)
    assert fields.pop("kbit_preparation", True) == (program == "TRL")
    assert Question(**fields) == Question(**QLORA)
    assert {finding.code for finding in diagnose(training)} <= {"unknown-keys"}


@pytest.mark.trap(53)
@pytest.mark.parametrize(
    ("program", "changed", "expected"),
    [
        ("Trainer", {}, {"batch": 8, "dtype": "float32", "autocast": "bfloat16", "optimizer": "adamw_torch_fused"}),
        ("Trainer", {"lora_r": 4}, {"lora": 4, "lora_targets": ("c_attn",)}),  # as PEFT does without names
        ("TRL", {"per_device_train_batch_size": "left out", "max_length": "left out"}, {"batch": 8, "tokens": 1024}),
        ("TRL", {"lora_target_modules": None}, {"lora": 16, "lora_targets": ("q_proj", "v_proj")}),
        ("TRL", {"dtype": "left out", "bf16": "left out"}, {"dtype": "float32", "autocast": "bfloat16"}),
        ("TRL", {"use_peft": False, "load_in_4bit": False}, {"lora": None, "lora_dropout": None}),
        ("TRL", {"beta": 0.1, "precompute_ref_log_probs": True}, {"trainer": "dpo"}),
        ("axolotl", {"bf16": False, "bfloat16": True}, {"dtype": "bfloat16", "autocast": "none"}),
        ("axolotl", {"adapter": None, "load_in_4bit": False}, {"lora": None, "dtype": "bfloat16"}),
        ("axolotl", {"sample_packing": True, "micro_batch_size": "left out"}, {"packing": True, "batch": 1}),
        ("LLaMA-Factory", {"stage": "dpo"}, {"trainer": "dpo"}),
        ("LLaMA-Factory", {"quantization_bit": 4, "flash_attn": "fa2"}, {"load_in_4bit": True}),
        ("LLaMA-Factory", {"quantization_bit": None, "finetuning_type": "full"}, {"lora": None, "dtype": "float32"}),
        ("LLaMA-Factory", {"bf16": None, "pure_bf16": True}, {"dtype": "bfloat16", "autocast": "none"}),
    ],
)
def test_keys_and_defaults_are_those_of_the_program(program, changed, expected, reading):
    fields = fields_of(reading(program, **changed), {})
    assert {name: fields.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("program", "launch", "changed", "told"),
    [
        ("LLaMA-Factory", None, {"stage": "rm"}, "`stage: rm` cannot be planned for, only sft, pt, dpo"),
        ("LLaMA-Factory", None, {"finetuning_type": "freeze"}, "`finetuning_type: freeze` cannot"),
        ("LLaMA-Factory", None, {"quantization_bit": 8}, "`quantization_bit: 8` cannot be planned for, only none, 4"),
        ("axolotl", None, {"load_in_8bit": True}, "`load_in_8bit: True` cannot be planned for"),
        ("axolotl", None, {"optimizer": "muon"}, "optimizer must be one of .* but is 'muon'"),
        ("TRL", None, {"center_rewards_coefficient": 0.1}, "RewardConfig` cannot"),
        ("Trainer", None, {"per_device_train_batch_size": "many"}, "train_batch_size must be a whole number"),
        ("Trainer", None, {"lora_r": 4, "lora_dropout": 7}, "lora_dropout must be between 0 and 1"),
        ("Trainer", {**FSDP2, "fsdp_config": {}}, {}, "fsdp1 cannot be planned for"),
        ("Trainer", None, {"deepspeed": "ds.json"}, "zero cannot be planned for"),
    ],
)
def test_what_cannot_be_planned_for_is_refused_by_name(program, launch, changed, told, reading):
    with pytest.raises(HfCkptError, match=told):
        question(fields_of(reading(program, launch, **changed), {}))


# --- rules ------------------------------------------------------------------------------------------------------------

KWARGS = "gradient_checkpointing_kwargs"
ON = {"gradient_checkpointing": True}
FULL = {**ON, KWARGS: {"policy": "full"}}
UNSAFE = {"preserve_rng_state": False}
SHARDED = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
LORA = {"lora_r": 8, "lora_target_modules": "all-linear"}
DROPOUT, SELECTIVE = {**LORA, "lora_dropout": 0.1, **ON}, {"policy": "selective", **UNSAFE}
# code, the file with the fault, without it; of each: keys, launcher's config, model's config
CASES = [
    ("spec", ({**ON, KWARGS: {"polcy": "full"}},), (FULL,)),
    ("spec", ({**ON, KWARGS: "full"},), ({**ON, KWARGS: '{"policy": "full"}'},)),
    ("spec-outside", ({**ON, KWARGS: None, "policy": "budget", "budget": "20GiB"},), (FULL,)),
    ("unknown-keys", ({"gradient_acumulation_steps": 4},), ({"gradient_accumulation_steps": 4},)),
    ("flag-off", ({KWARGS: {"policy": "full"}},), (FULL,)),
    ("flag-off", ({**FULL, "activation_checkpointing": False},), ({**FULL, "activation_checkpointing": True},)),
    ("own-offloading", ({"activation_offloading": "legacy"},), ({"activation_offloading": False},)),
    ("adapter-layers", ({"lora_r": 8},), (LORA,)),
    ("deepspeed-block", ({"deepspeed": {"activation_checkpointing": {}}},), ({"deepspeed": "no-such-file"},)),
    ("redrawn-dropout", ({**DROPOUT, KWARGS: {"policy": "full", **UNSAFE}},), ({**DROPOUT, KWARGS: SELECTIVE},)),
    ("redrawn-dropout", ({}, SHARDED, {"resid_pdrop": 0.1}), ({}, SHARDED, {"classifier_dropout": 0.1})),
    ("redrawn-dropout", ({}, SHARDED, {"resid_pdrop": 0.1}), ({}, FSDP2, {"resid_pdrop": 0.1})),
]


@pytest.mark.trap(32)
@pytest.mark.parametrize(("code", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_is_found_and_its_twin_is_not(code, bad, good, reading):
    assert {code for _, code, _ in RULES} == {code for code, *_ in CASES}
    for (keys, *rest), expected in ((bad, True), (good, False)):
        findings = [finding for finding in diagnose(reading("Trainer", *rest, **keys)) if finding.code == code]
        assert bool(findings) == expected
        assert all(finding.where and finding.what and finding.fix for finding in findings)


def test_keys_that_are_not_indented_and_keys_that_are_misspelt_are_named(reading):
    findings = diagnose(reading("axolotl", policy="budget", budget="20GiB", sequence_length=4096))
    assert [finding.where for finding in findings if finding.code == "spec-outside"] == ["budget", "policy"]
    assert "sequence_length (did you mean sequence_len?)" in findings[2].where


# --- the program ------------------------------------------------------------------------------------------------------


def shipped(folder):
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "configs" / folder).glob("*.yaml"))]


@pytest.mark.parametrize("launch", shipped("accelerate"))
def test_shipped_configs_have_no_fault_and_the_command_asks_what_they_say(launch, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    for recipe in shipped("recipes"):
        assert main(["doctor", launch, recipe, "--model", "mini-llama", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert {finding["severity"] for finding in found["findings"]} <= {"note"}
        if "deepspeed" in launch:
            assert found["plan"].startswith("not known: zero")
            continue
        words = shlex.split(found["plan"])
        arguments = vars(_parser().parse_args([*words[1:-1], "t4"]))
        names = ("model", "ranks", "parallel", "autocast", "dtype")
        given = {name: arguments[name] for name in names if name in arguments}
        alone = fields_of(read_training([recipe]), given)
        assert alone == fields_of(read_training([recipe, launch]), {"model": "mini-llama"})
        assert (alone.get("parallel") == "fsdp2") == ("fsdp2" in launch)
        assert alone["ranks"] == (1 if "single" in launch else 8)


@pytest.mark.parametrize(
    ("command", "text", "code", "told"),
    [
        ("doctor", "{gradient_checkpointing: true, gradient_checkpointing_kwargs: {policy: '[bold]'}}", 1, "[bold]"),
        ("doctor", "{gradient_checkpointing: true}", 0, "nothing found"),
        ("plan --config", "{output_dir: out, policy: full}", 2, "policy: it stands beside the checkpointing kwargs"),
        ("doctor", "a: [", 2, "not valid YAML"),
        ("plan --config", "[1]", 2, "must hold a mapping"),
        ("plan --config", "name: me", 2, "it has no training arguments"),
        ("doctor", "{distributed_type: FSDP, fsdp_verison: 2}", 2, "unknown keys"),
    ],
)
def test_exit_codes_and_what_is_printed(command, text, code, told, tmp_path, capsys):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    assert main([*command.split(), str(path)]) == code
    assert told in "".join(capsys.readouterr())  # keys and values are not read as markup
    assert code == 2 or main(["doctor", str(path), str(path)]) == 2
    assert code == 2 or "second config of its kind" in capsys.readouterr().err
