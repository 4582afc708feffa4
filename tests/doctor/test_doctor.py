"""`hf-ckpt doctor`: files are read as their owners read them, and each rule finds its fault and nothing else."""

import collections
import json
import shlex
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli.main import _parser, main
from hf_ckpt.doctor.owners import OWNERS
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
MS_SWIFT = """
{model: mini-llama, tuner_type: lora, torch_dtype: bfloat16, quant_method: bnb, quant_bits: 4, lora_rank: 16,
lora_alpha: 32, dataset: [a], max_length: 512, per_device_train_batch_size: 2, gradient_accumulation_steps: 4,
optim: adamw_torch_fused}
"""
NEMO = """
{step_scheduler: {local_batch_size: 2}, model: {pretrained_model_name_or_path: mini-llama, torch_dtype: bf16},
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, target_modules: '*_proj', dim: 16, dropout: 0.05},
quantization: {load_in_4bit: true}, distributed: {strategy: ddp, dp_size: none}, dataset: {seq_length: 512}}
"""
TRAINER = "{model_name_or_path: mini-gpt2, output_dir: out, bf16: true}"
FILES = {"TRL": TRL, "axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "Trainer": TRAINER}
FILES |= {"ms-swift": MS_SWIFT, "NeMo Automodel": NEMO}
QLORA = {"model": "mini-llama", "batch": 2, "tokens": 512, "lora": 16, "lora_dropout": 0.05, "load_in_4bit": True}
QLORA |= {"autocast": "bfloat16", "optimizer": "adamw_torch_fused", "accumulation": 4}
PEFT = {"_target_": "nemo_automodel.components._peft.lora.PeftConfig"}
QV = ("q_proj", "v_proj")
FSDP2 = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2}}


@pytest.fixture
def reading(tmp_path):
    """A function (program, its launcher's config, the model's config, changed keys) -> `Training`."""

    def read(program="Trainer", launch=None, config=None, **changed):
        if program == "TRL":
            pytest.importorskip("trl")
        values = {**yaml.safe_load(FILES[program]), **changed}
        paths = [tmp_path / "train.yaml"]
        paths[0].write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "left out"}))
        if launch is not None:
            paths.append(tmp_path / "launch.yaml")
            paths[1].write_text(yaml.safe_dump(launch))
        return read_training(paths, config)

    return read


# --- what a file asks for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["TRL", "axolotl", "LLaMA-Factory", "ms-swift"])
def test_the_same_qlora_is_the_same_training_in_each_program(program, reading):
    training = reading(program)
    assert training.owner.name == program
    fields = fields_of(training, {})
    assert fields.pop("trainer", None) == ("sft" if program == "TRL" else None)
    assert fields.pop("kbit_preparation", True) == (program == "TRL")
    assert Question(**fields) == Question(**QLORA)
    assert not diagnose(training)


@pytest.mark.trap(53)
@pytest.mark.parametrize(
    ("program", "changed", "expected"),
    [
        ("Trainer", {}, {"batch": 8, "dtype": "float32", "autocast": "bfloat16", "optimizer": "adamw_torch_fused"}),
        ("Trainer", {"lora_r": 4}, {"lora": 4, "lora_targets": ("c_attn",)}),  # as PEFT does without names
        ("TRL", {"per_device_train_batch_size": "left out", "max_length": "left out"}, {"batch": 8, "tokens": 1024}),
        ("TRL", {"lora_target_modules": None}, {"lora": 16, "lora_targets": ("q_proj", "v_proj")}),
        ("TRL", {"lora_target_modules": "q_proj, v_proj,"}, {"lora": 16, "lora_targets": QV}),
        ("TRL", {"dtype": "left out", "bf16": "left out"}, {"dtype": "float32", "autocast": "bfloat16"}),
        ("TRL", {"use_peft": False, "load_in_4bit": False}, {"lora": None, "lora_dropout": None}),
        ("TRL", {"beta": 0.1, "precompute_ref_log_probs": True}, {"trainer": "dpo"}),
        ("axolotl", {"bf16": False, "bfloat16": True}, {"dtype": "bfloat16", "autocast": "none"}),
        ("axolotl", {"adapter": None, "load_in_4bit": False}, {"lora": None, "dtype": "bfloat16"}),
        ("axolotl", {"sample_packing": True, "micro_batch_size": "left out"}, {"packing": True, "batch": 1}),
        ("LLaMA-Factory", {"stage": "dpo"}, {"trainer": "dpo"}),
        ("LLaMA-Factory", {"quantization_bit": 4, "flash_attn": "fa2"}, {"load_in_4bit": True}),
        ("LLaMA-Factory", {"quantization_bit": None, "finetuning_type": "full"}, {"lora": None, "dtype": "float32"}),
        ("LLaMA-Factory", {"hyper_parallel_cp_size": 4, "cutoff_len": 1023}, {"tokens": 256}),
        ("ms-swift", {"tuner_type": None, "train_type": "full"}, {"lora": None, "lora_targets": None}),
        ("ms-swift", {"tuner_type": None, "quant_bits": None}, {"lora": 16, "lora_targets": "all-linear"}),
        ("ms-swift", {"torch_dtype": "float32"}, {"dtype": "float32", "autocast": "float16"}),
        ("ms-swift", {"attn_impl": "flash_attn", "rlhf_type": "dpo"}, {"attention": "flash_attention_2"}),
        ("ms-swift", {"per_device_train_batch_size": None, "sequence_parallel_size": 2}, {"batch": 1, "tokens": 256}),
        ("NeMo Automodel", {}, {"lora": 16, "batch": 2, "dtype": "bfloat16", "autocast": "none"}),
        ("NeMo Automodel", {"model": {"torch_dtype": "torch.float32"}}, {"dtype": "float32", "autocast": "bfloat16"}),
        ("NeMo Automodel", {"peft": None, "distributed": {}}, {"lora": None, "parallel": "fsdp2"}),
        ("NeMo Automodel", {"peft": {**PEFT, "target_modules": ["*q_proj", "*.v_proj"]}}, {"lora_targets": QV}),
        ("NeMo Automodel", {"peft": {**PEFT, "target_modules": "*"}}, {"lora_targets": "all-linear", "lora": 8}),
        ("NeMo Automodel", {"packed_sequence": {"packed_sequence_size": 64}}, {"tokens": 64, "packing": True}),
        ("NeMo Automodel", {"packed_sequence": {"packed_sequence_size": 0}}, {"tokens": 512, "packing": None}),
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
        ("Trainer", {**FSDP2, "fsdp_config": {}}, {}, "fsdp1 cannot be planned for"),
        ("Trainer", None, {"deepspeed": "ds.json"}, "zero cannot be planned for"),
        ("Trainer", None, {"deepspeed": {"zero_optimization": {"stage": 2}}}, "zero2 cannot be planned for"),
        ("ms-swift", None, {"quant_method": "hqq"}, "`quant_method: hqq` cannot be planned for, only none, bnb"),
        ("NeMo Automodel", None, {"peft": {"target_modules": "*.mlp.*"}}, "has a pattern, .*: name the layers"),
        ("NeMo Automodel", None, {"optimizer": {"_target_": "dion.Muon"}}, "`optimizer._target_: dion.Muon` cannot"),
    ],
)
def test_what_cannot_be_planned_for_is_refused_by_name(program, launch, changed, told, reading):
    with pytest.raises(HfCkptError, match=told):
        question(fields_of(reading(program, launch, **changed), {}))


# --- rules ------------------------------------------------------------------------------------------------------------

OF_FILES = yaml.safe_load((Path(__file__).parent / "files.yaml").read_text(encoding="utf-8"))


@pytest.mark.trap(32)
@pytest.mark.parametrize("row", OF_FILES, ids=["+".join(row["files"]) for row in OF_FILES])
def test_what_is_said_of_a_file(row, tmp_path, monkeypatch, capsys):
    if "TRL" in row["files"]:
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names = {f"{owner}.yaml".replace(" ", "-"): owner for owner in row["files"]}
    for name, owner in names.items():
        Path(name).write_text(yaml.safe_dump(row["files"][owner]), encoding="utf-8")
    model = ["--model", row["model"]] if "model" in row else []
    code = main(["doctor", *names, *model, "--json"])
    printed = capsys.readouterr()
    if "refused" in row:
        assert (code, printed.err.splitlines()[-1]) == (2, row["refused"])
        return
    answer = json.loads(printed.out)
    says = ["{severity} {code}: {where}: {what} {fix}".format(**finding) for finding in answer["findings"]]
    assert (answer["files"], says, answer["plan"]) == (names, row["says"], row["plan"])
    assert code == any(line.startswith("error") for line in says)


def test_files_of_every_owner_and_faults_of_every_rule_are_in_the_table():
    counts = collections.Counter(owner for row in OF_FILES for owner in row["files"])
    assert counts.keys() == {owner.name for owner in OWNERS}
    assert all(counts[owner.name] >= (1 if owner.refused else 4) for owner in OWNERS)
    assert {line.split()[1].rstrip(":") for row in OF_FILES for line in row.get("says", ())} == {
        row[1] for row in RULES
    }


@pytest.mark.parametrize(
    ("owner", "keys"), yaml.safe_load((Path(__file__).parent / "keys.yaml").read_text(encoding="utf-8")).items()
)
def test_no_key_of_an_owner_is_called_misspelt_or_taken_for_one_of_a_spec(owner, keys, reading):
    sections = {}
    for key in keys.split():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = False
    training = reading(owner, **sections)
    assert training.owner.name == owner
    assert len(keys.split()) > 200
    assert not {"misspelt", "spec-outside"} & {finding.code for finding in diagnose(training)}


def test_dropout_outside_the_blocks_is_not_redrawn(reading):
    sharded = {**FSDP2, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    for key, expected in (("classifier_dropout", False), ("resid_pdrop", True)):
        findings = diagnose(reading("Trainer", sharded, {key: 0.1}))
        assert ("redrawn-dropout" in {finding.code for finding in findings}) == expected


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
        (
            "doctor",
            "{gradient_checkpointing: true, gradient_checkpointing_kwargs: full}",
            1,
            "is not a key of the spec",
        ),
        ("doctor", "{gradient_checkpointing: true}", 0, "train.yaml: a file of Trainer\nnothing found"),
        ("plan --config", "{output_dir: out}", 2, "train.yaml: a file of Trainer\n"),
        ("plan --config", "{zero_optimization: {stage: 2}}", 2, "zero2 cannot be planned for"),
        ("plan --config", "{output_dir: out, policy: full}", 2, "policy: it stands beside the checkpointing kwargs"),
        ("doctor", "a: [", 2, "not valid YAML"),
        ("plan --config", "[1]", 2, "must hold a mapping"),
        ("plan --config", "name: me", 2, "it has no key of a file of Trainer, TRL, axolotl,"),
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
