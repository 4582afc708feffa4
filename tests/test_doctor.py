"""What doctor says of configs: every finding by a config that has the fault and its twin that has not."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

import hf_ckpt
from hf_ckpt import cli, compat, doctor
from hf_ckpt import facts as reading
from hf_ckpt.devices import DEVICES
from hf_ckpt.doctor import diagnose
from hf_ckpt.errors import HfCkptError
from hf_ckpt.facts import ACCELERATE, ADAPTER, DEEPSPEED, FSDP, TRAINING, ConfigFile, Facts, ModelFacts
from hf_ckpt.tiny import tiny_batch, tiny_model

ROOT = Path(__file__).parent.parent
SHIPPED = [*sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), *(ROOT / "configs" / "recipes").glob("*.yaml")]
VERSIONS = {"torch": "2.13.0+cpu", "transformers": "5.23.0", "accelerate": "1.15.0"}
KWARGS = "gradient_checkpointing_kwargs"

LLAMA = ModelFacts("llama", "llama", {"vocab_size": 128256, "attention_dropout": 0.0}, (("decoder", 32),))
T5 = ModelFacts("t5", "t5", {"dropout_rate": 0.1, "classifier_dropout": 0.0}, (("encoder", 3), ("decoder", 3)))
GPT2 = ModelFacts("gpt2", "gpt2", {"attn_pdrop": 0.0, "summary_first_dropout": 0.1}, (("decoder", 12),))
MIXTRAL = ModelFacts("mixtral", "mixtral", {"text": {"num_local_experts": 8}}, (("decoder", 4),), named=False)


def train(**values):
    return ConfigFile("train.yaml", TRAINING, values)


def asking(spec=None, **values):
    """Training arguments that ask for checkpointing."""
    return train(gradient_checkpointing=True, **({} if spec is None else {KWARGS: spec}), **values)


def launch(**values):
    return ConfigFile("launch.yaml", ACCELERATE, values)


def fsdp(**options):
    return launch(distributed_type="FSDP", fsdp_config={f"fsdp_{name}": value for name, value in options.items()})


def zero(stage):
    return launch(distributed_type="DEEPSPEED", deepspeed_config={"zero_stage": stage})


def facts(*files, versions=None, **others):
    return Facts(tuple(files), VERSIONS | (versions or {}), **others)


def found(given, code):
    return [finding for finding in diagnose(given) if finding.code == code]


FULL, PLAIN = {"policy": "full"}, {"use_reentrant": False}
OLD = {"transformers": "4.57.1"}
SAC_ATTENTION = {"policy": "selective", "engine": "sac", "save": ["attention"]}
LORA_ZERO3 = (asking(FULL, lora_r=8), zero(3))
OPEN_FSDP = {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}

# code, severity, where it is, with the fault, without
CASES = [
    (
        *("two-owners", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts(asking(PLAIN), fsdp(activation_checkpointing="true")),
        facts(asking(PLAIN), fsdp(activation_checkpointing=False)),
    ),
    (
        *("two-owners", "error", "train.yaml: fsdp_config.activation_checkpointing"),
        facts(train(activation_checkpointing="yes", fsdp=True, fsdp_config='{"activation_checkpointing": true}')),
        facts(train(activation_checkpointing=False, gradient_checkpointing=True, **OPEN_FSDP)),
    ),
    (
        *("two-owners", "error", "fsdp.json: activation_checkpointing"),
        facts(
            asking(PLAIN, fsdp="full_shard", fsdp_config="fsdp.json"),
            ConfigFile("fsdp.json", FSDP, {"activation_checkpointing": True}),
        ),
        facts(
            asking(PLAIN, fsdp="", fsdp_config="fsdp.json"),
            ConfigFile("fsdp.json", FSDP, {"activation_checkpointing": True}),
        ),
    ),
    (
        *("reentrant", "error", f"train.yaml: {KWARGS}.use_reentrant"),
        facts(asking({"use_reentrant": True})),
        facts(asking(PLAIN)),
    ),
    (
        *("reentrant-default", "warning", f"train.yaml: {KWARGS}"),
        facts(asking({"preserve_rng_state": True})),
        facts(asking({"preserve_rng_state": True, "use_reentrant": False})),
    ),
    (*("reentrant-default", "warning", "train.yaml: "), facts(asking(), versions=OLD), facts(asking())),
    (*("reentrant-default", "warning", "train.yaml: "), facts(asking({}), versions=OLD), facts(asking({}))),
    (
        *("reentrant-default", "warning", "train.yaml: "),
        facts(asking({"every_n_layers": 2}), versions=OLD),
        facts(asking({"every_n_layers": 2})),  # Trainer takes the key out, and transformers 5 says false
    ),
    (
        *("spec", "error", f"train.yaml: {KWARGS}"),
        facts(asking({"polcy": "full"})),
        facts(asking(FULL)),
    ),
    (
        *("spec", "error", f"train.yaml: {KWARGS}"),
        facts(asking("{'policy': full}")),
        facts(asking('{"policy": "full"}')),
    ),
    (
        *("plan-file", "warning", f"train.yaml: {KWARGS}.plan"),
        facts(asking({"plan": "no-such-plan.yaml"})),
        facts(asking({"plan": str(ROOT / "pyproject.toml")})),
    ),
    (*("needs-hf-ckpt", "note", f"train.yaml: {KWARGS}"), facts(asking(FULL)), facts(asking(PLAIN))),
    (
        *("kwargs-without-flag", "warning", "train.yaml: activation_checkpointing_kwargs"),
        facts(train(activation_checkpointing_kwargs=FULL)),
        facts(train(activation_checkpointing_kwargs=FULL, activation_checkpointing=True)),
    ),
    (
        *("two-names", "warning", "train.yaml: gradient_checkpointing"),
        facts(train(gradient_checkpointing=True, activation_checkpointing=False)),
        facts(train(gradient_checkpointing=True, activation_checkpointing=True)),
    ),
    (
        *("new-name", "warning", "train.yaml: activation_checkpointing"),
        facts(train(activation_checkpointing=True), versions={"transformers": "5.22.0"}),
        facts(train(activation_checkpointing=True)),
    ),
    (
        *("fsdp2-dropout", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts(fsdp(version=2, activation_checkpointing=True), model=T5),
        facts(fsdp(version=2, activation_checkpointing=True), model=LLAMA),
    ),
    (
        *("fsdp2-dropout", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts(fsdp(version=2, activation_checkpointing=True), train(lora_r=8, lora_dropout=0.05), model=GPT2),
        facts(fsdp(version=2, activation_checkpointing=True), train(lora_r=8, lora_dropout=0.0), model=GPT2),
    ),
    (
        *("fsdp2-dropout", "warning", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts(fsdp(version="2", activation_checkpointing=True)),
        facts(fsdp(activation_checkpointing=True), model=T5),  # the launcher's default is 1, which keeps random state
    ),
    (
        *("fsdp2-dropout", "warning", "train.yaml: fsdp_config.activation_checkpointing"),
        facts(train(**OPEN_FSDP), model=T5),  # which version is the default depends on transformers
        facts(train(**OPEN_FSDP), model=GPT2),
    ),
    (
        *("random-state", "error", f"train.yaml: {KWARGS}.preserve_rng_state"),
        facts(asking({"policy": "full", "preserve_rng_state": False}), model=T5),
        facts(asking({"policy": "selective", "preserve_rng_state": False}), model=T5),
    ),
    (
        *("random-state", "error", f"train.yaml: {KWARGS}.preserve_rng_state"),
        facts(asking({"policy": "selective", "engine": "sac", "preserve_rng_state": False}), model=T5),
        facts(asking({"policy": "selective", "engine": "sac", "preserve_rng_state": False}), model=GPT2),
    ),
    (
        *("zero3-frozen", "error", "launch.yaml: deepspeed_config.zero_stage"),
        facts(*LORA_ZERO3, versions={"deepspeed": "0.19.2"}),
        facts(*LORA_ZERO3, versions={"deepspeed": "0.19.3"}),
    ),
    (
        *("zero3-frozen", "warning", "launch.yaml: deepspeed_config.zero_stage"),
        facts(*LORA_ZERO3),
        facts(asking(FULL, lora_r=8, use_peft=False), zero(3)),
    ),
    (
        *("zero3-frozen", "error", "ds.json: zero_optimization.stage"),
        facts(
            asking(FULL),
            ConfigFile("adapter_config.json", ADAPTER, {"peft_type": "LORA"}),
            ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 3}}),
            versions={"deepspeed": "0.16.4+cu"},
        ),
        facts(
            asking(FULL),
            ConfigFile("adapter_config.json", ADAPTER, {"peft_type": "LORA"}),
            ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 2}}),
            versions={"deepspeed": "0.16.4+cu"},
        ),
    ),
    (
        *("zero3-frozen", "warning", "launch.yaml: deepspeed_config.zero_stage"),
        facts(asking(FULL, adapter="qlora"), zero("3")),
        facts(asking(FULL, run_name="lora"), zero("3")),
    ),
    (
        *("deepspeed-block", "warning", "ds.json: activation_checkpointing"),
        facts(ConfigFile("ds.json", DEEPSPEED, {"activation_checkpointing": {"partition_activations": True}})),
        facts(ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 2}})),
    ),
    (
        *("cuda-graphs", "warning", "train.yaml: torch_compile_mode"),
        facts(asking(FULL, torch_compile_mode="reduce-overhead")),
        facts(asking({**FULL, "preserve_rng_state": False}, torch_compile_mode="reduce-overhead")),
    ),
    (
        *("cuda-graphs", "warning", "launch.yaml: dynamo_config.dynamo_mode"),
        facts(asking(FULL), launch(dynamo_config={"dynamo_mode": "max-autotune"})),
        facts(asking(FULL), launch(dynamo_config={"dynamo_mode": "max-autotune-no-cudagraphs"})),
    ),
    (
        *("cuda-graphs", "warning", "train.yaml: torch_compile_options.triton.cudagraphs"),
        facts(asking(FULL, torch_compile_options={"triton.cudagraphs": True})),
        facts(asking(FULL, torch_compile_options={"triton.cudagraphs": False})),
    ),
    (
        *("rebuild-compiled", "error", f"train.yaml: {KWARGS}.engine"),
        facts(asking({"policy": "selective", "engine": "rebuild"}, torch_compile=True)),
        facts(asking({"policy": "selective", "engine": "rebuild"}), launch(dynamo_config={"dynamo_backend": "NO"})),
    ),
    (
        *("planned-compiled", "warning", f"train.yaml: {KWARGS}.policy"),
        facts(asking({"budget": "20GiB"}), launch(dynamo_config={"dynamo_backend": "INDUCTOR"})),
        facts(asking(FULL), launch(dynamo_config={"dynamo_backend": "INDUCTOR"})),
    ),
    (
        *("adapters-compiled", "warning", f"train.yaml: {KWARGS}.save"),
        facts(asking({"policy": "selective"}, torch_compile=True, lora_r=8)),
        facts(asking({"policy": "selective", "save": ["attention"]}, torch_compile=True, lora_r=8)),
    ),
    (
        *("adapters-compiled", "warning", f"train.yaml: {KWARGS}.save"),
        facts(asking({"policy": "selective"}, torch_compile=True, lora_r=8)),
        facts(asking({"policy": "selective"}, torch_compile=True)),
    ),
    (
        *("prefix-tuning", "error", "train.yaml: peft_type"),
        facts(asking(FULL, peft_type="PREFIX_TUNING", num_virtual_tokens=8)),
        facts(asking(FULL, peft_type="PROMPT_TUNING", num_virtual_tokens=8)),
    ),
    (
        *("prefix-tuning", "error", "adapter_config.json: prefix_projection"),
        facts(asking(FULL), ConfigFile("adapter_config.json", ADAPTER, {"prefix_projection": False})),
        facts(ConfigFile("adapter_config.json", ADAPTER, {"prefix_projection": False})),
    ),
    (
        *("use-cache", "note", "train.yaml: use_cache"),
        facts(asking(PLAIN, use_cache=True)),
        facts(asking(FULL, use_cache=True)),
    ),
    (
        *("eager-attention", "warning", "train.yaml: attn_implementation"),
        facts(asking({"policy": "selective"}, attn_implementation="eager")),
        facts(asking({"policy": "selective"}, attn_implementation="sdpa")),
    ),
    (
        *("nothing-to-save", "warning", f"train.yaml: {KWARGS}.save"),
        facts(asking(SAC_ATTENTION, attn_implementation="flex_attention")),
        facts(asking(SAC_ATTENTION, attn_implementation="sdpa")),
    ),
    (
        *("logits", "note", "llama: vocab_size"),
        facts(asking(FULL, per_device_train_batch_size=2, max_length=2048, bf16=True), model=LLAMA),
        facts(asking(FULL | {"head": "auto"}, per_device_train_batch_size=2, max_length=2048), model=LLAMA),
    ),
    (
        *("logits", "note", "llama: vocab_size"),  # 0.98 GiB of 16 GB is little, 15.65 GiB much
        facts(asking(FULL), model=LLAMA, device=DEVICES["t4"], batch=1, tokens=8192),
        facts(asking(FULL), model=LLAMA, device=DEVICES["t4"], batch=1, tokens=512),
    ),
    (
        *("logits", "note", "llama: vocab_size"),
        facts(asking(PLAIN), fsdp(), model=LLAMA, batch=4, tokens=8192),
        facts(asking(PLAIN, use_liger_kernel=True), fsdp(), model=LLAMA, batch=4, tokens=8192),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts(asking({"layers": "30-32"}), model=LLAMA),
        facts(asking({"layers": "30-31"}), model=LLAMA),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts(asking({"layers": {"encoder": "0"}}), model=LLAMA),
        facts(asking({"layers": {"encoder": "0"}}), model=T5),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts(asking({"segments": 5}), model=MIXTRAL),
        facts(asking({"rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]}), model=MIXTRAL),
    ),
    (
        *("every-n-layers", "warning", f"train.yaml: {KWARGS}.every_n_layers"),
        facts(asking({"every_n_layers": 32}), model=LLAMA),
        facts(asking({"every_n_layers": 31}), model=LLAMA),
    ),
    (
        *("one-counter", "warning", f"train.yaml: {KWARGS}.every_n_layers"),
        facts(asking({"every_n_layers": 2}), model=T5),
        facts(asking({"every_n_layers": 2, "policy": "full"}), model=T5),
    ),
    (
        *("planned-sharded", "error", f"train.yaml: {KWARGS}.policy"),
        facts(asking({"policy": "auto"}), fsdp(version=1)),
        facts(asking({"policy": "auto"}), fsdp(version=2)),
    ),
    (
        *("planned-sharded", "error", f"train.yaml: {KWARGS}.policy"),
        facts(asking({"policy": "auto"}), zero(3)),
        facts(asking({"policy": "auto"}), zero(2)),
    ),
    (
        *("planned-sharded", "warning", f"train.yaml: {KWARGS}.policy"),
        facts(asking({"policy": "auto"}, fsdp="full_shard")),
        facts(asking({"policy": "auto"}, fsdp="")),
    ),
    (
        *("segments-sharded", "error", f"train.yaml: {KWARGS}.segments"),
        facts(asking({"segments": "sqrt"}), zero(3)),
        facts(asking({"segments": "sqrt"})),
    ),
    (
        *("head-sharded", "warning", f"train.yaml: {KWARGS}.head"),
        facts(asking({"head": 512}, fsdp="full_shard")),
        facts(asking({"head": 512}, fsdp="")),
    ),
    (
        *("offload-nowhere", "warning", f"train.yaml: {KWARGS}"),
        facts(asking({"policy": "offload"}, use_cpu=True)),
        facts(asking({"policy": "offload"}, use_cpu=False), launch(use_cpu=False)),
    ),
    (
        *("offload-nowhere", "warning", f"train.yaml: {KWARGS}"),
        facts(asking({"policy": "selective", "offload": "saved"}), device=DEVICES["cpu"]),
        facts(asking({"policy": "selective", "offload": "saved"}), device=DEVICES["h100"]),
    ),
    (
        *("quantised", "note", "train.yaml: load_in_4bit"),
        facts(train(load_in_4bit=True)),
        facts(train(load_in_4bit=False)),
    ),
    (
        *("quantised", "note", "train.yaml: quantization_config.load_in_8bit"),
        facts(train(quantization_config={"load_in_8bit": True})),
        facts(train(quantization_config={"load_in_8bit": False})),
    ),
    (
        *("routers", "warning", "mixtral: text.num_local_experts"),
        facts(asking(FULL), model=MIXTRAL),
        facts(asking({"policy": "selective"}), model=MIXTRAL),
    ),
    (
        *("routers", "warning", "mixtral: text.num_local_experts"),
        facts(asking({"policy": "selective", "save": ["attention"]}), model=MIXTRAL),
        facts(asking(FULL), model=LLAMA),
    ),
    (*("version", "error", "transformers"), facts(versions={"transformers": "4.56.2"}), facts(versions=OLD)),
    (
        *("version", "error", "transformers"),
        facts(versions={"transformers": "6.0.0"}),
        facts(versions={"transformers": "5.99"}),
    ),
    (*("version", "error", "torch"), facts(versions={"torch": "2.3.1"}), facts(versions={"torch": "2.4.0+cu124"})),
    (*("version", "error", "accelerate"), Facts(versions={**VERSIONS, "accelerate": "0.34.2"}), facts()),
    (
        *("version", "error", "accelerate"),
        Facts(versions={name: version for name, version in VERSIONS.items() if name != "accelerate"}),
        facts(versions={"accelerate": "unknown"}),
    ),
    (
        *("deepspeed", "note", "deepspeed"),
        facts(versions={"deepspeed": "0.19.2"}),
        facts(versions={"deepspeed": "0.20.0"}),
    ),
]


@pytest.mark.parametrize(("code", "severity", "where", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_is_found_and_its_twin_is_not(code, severity, where, bad, good):
    findings = found(bad, code)
    assert [finding.severity for finding in findings] == [severity]
    assert findings[0].where.startswith(where)
    assert findings[0].what
    assert findings[0].fix
    assert found(good, code) == []


def test_every_finding_has_a_case():
    """None that cannot come out, none that always does."""
    tree = ast.parse(Path(doctor.__file__).read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding"]
    assert {node.args[1].value for node in made} == {code for code, *_ in CASES}
    assert diagnose(facts()) == ()
    covered = {check.__name__ for check in doctor.CHECKS for case in CASES if list(check(case[3]))}
    assert covered == {check.__name__ for check in doctor.CHECKS}


def test_fixes_name_the_key_as_it_is_written():
    (finding,) = found(facts(asking(PLAIN), fsdp(activation_checkpointing=True)), "two-owners")
    assert finding.fix.startswith("Set fsdp_config.fsdp_activation_checkpointing to false")


def test_every_problem_of_a_spec_is_told_with_near_matches():
    findings = found(facts(asking({"polcy": "full", "every_n_layers": 0, "determinism_chek": "none"})), "spec")
    assert len(findings) == 3
    assert "did you mean `policy`" in findings[0].what
    assert "did you mean `determinism_check`" in findings[2].what


def test_true_reentrant_is_told_once():
    findings = diagnose(facts(asking({"use_reentrant": True, "policy": "full"})))
    assert [finding.code for finding in findings] == ["reentrant", "needs-hf-ckpt"]


def test_errors_come_first():
    order = [finding.severity for finding in diagnose(facts(asking(FULL, use_cpu="on", load_in_4bit=True), fsdp()))]
    given = diagnose(facts(asking({"segments": 2, "head": "auto"}), fsdp(activation_checkpointing=True, version=2)))
    assert order == ["note", "note"]
    assert [finding.severity for finding in given] == ["error", "error", "warning", "warning", "note"]


def test_the_size_of_logits():
    (finding,) = found(facts(asking(FULL, bf16=True), model=LLAMA, batch=2, tokens=2048), "logits")
    assert "6.85 GiB" in finding.what  # 2 x 2048 x 128256 x 14 bytes
    (finding,) = found(facts(asking(FULL), model=LLAMA, batch=2, tokens=2048, device=DEVICES["t4"]), "logits")
    assert "7.83 GiB, 52.5 % of the device" in finding.what
    classifier = ModelFacts("b", "bert", {"vocab_size": 128256, "architectures": ["BertForSequenceClassification"]})
    assert found(facts(asking(FULL), model=classifier, batch=64, tokens=2048), "logits") == []


def test_requirements_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text()
    for package, (first, beyond) in reading.REQUIRED.items():
        assert f'"{package}>={first}{f",<{beyond}" if beyond else ""}"' in project


@pytest.mark.compat
def test_facts_about_transformers_are_those_of_the_installed_one():
    """The version that renamed the flag, and what an enable call without kwargs means."""
    version = reading.installed()["transformers"]
    new_name = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    assert new_name == (
        not found(facts(train(activation_checkpointing=True), versions={"transformers": version}), "new-name")
    )
    model = tiny_model("llama", layers=1)
    getattr(model, compat.ENABLE_NAMES[-1])()
    reentrant = model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"]
    assert reentrant == bool(found(facts(asking(), versions={"transformers": version}), "reentrant-default"))


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_a_models_stacks_are_read_from_its_config(family, tmp_path):
    model = tiny_model(family, layers=3)
    model.config.save_pretrained(tmp_path)
    read = reading.read_model(str(tmp_path))
    assert read.named
    assert read.model_type == family
    plan = hf_ckpt.install(model).plan
    assert read.stacks == tuple((name, len(pairs)) for name, pairs in plan.stacks().items())
    for spec in ({"layers": "0,-3"}, {"layers": "0-3"}, {"layers": {"encoder": "2"}}, {"segments": 4}, {"segments": 3}):
        refused = found(facts(asking(spec), model=read), "blocks")
        if refused:
            with pytest.raises(HfCkptError, match=re.escape(refused[0].what.partition(": ")[2])):
                hf_ckpt.install(model, spec)
        else:
            hf_ckpt.install(model, spec)


def test_dropout_of_presets():
    for name, active in (("llama-3.1-8b", None), ("gpt2", "resid_pdrop"), ("t5-small", "dropout_rate")):
        dropout = facts(model=reading.read_model(name)).dropout
        assert (dropout and dropout.where) == (active and f"{name}: {active}")


def test_an_unknown_model_is_asked_wrongly(capsys, tmp_path):
    assert cli.main(["doctor", "--model", str(ROOT / "pyproject.toml")]) == 2
    assert "cannot read a model's config" in capsys.readouterr().err
    deep = tmp_path / "config.json"
    deep.write_text('{"model_type": "llama", "more": ' + "[" * 60 + "]" * 60 + "}")
    assert cli.main(["doctor", "--model", str(deep)]) == 2
    assert "levels deep" in capsys.readouterr().err


# --- what doctor says of the engines, on the engines ----------------------------------------------------------------


class Ran(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_only_eager_attention_keeps_its_scores(attention):
    model = tiny_model("llama", attention=attention)
    hf_ckpt.install(model, {"policy": "selective"})
    model.gradient_checkpointing_enable()
    model(**tiny_batch("llama"), use_cache=False).loss.backward()
    kept = "SoftmaxBackward0" in hf_ckpt.describe(model).kept
    assert kept == bool(found(facts(asking({"policy": "selective"}, attn_implementation=attention)), "eager-attention"))


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_only_full_routes_again_in_backward(policy, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**shape, num_hidden_layers=2, num_local_experts=4, vocab_size=32)
    model = MixtralForCausalLM(config).train()
    hf_ckpt.install(model, policy)
    model.gradient_checkpointing_enable()
    ids = torch.arange(16)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Ran() as backward:
        loss.backward()
    routed = [name for name in backward.names if "topk" in name]
    assert len(routed) == (2 if policy == "full" else 0)
    config.save_pretrained(tmp_path)
    read = reading.read_model(str(tmp_path))
    assert (read.stacks, read.named) == ((("decoder", 2),), False)
    assert bool(routed) == bool(found(facts(asking({"policy": policy}), model=read), "routers"))


# --- files ----------------------------------------------------------------------------------------------------------


def write(path, values):
    path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values))
    return str(path)


def codes(*words, capsys):
    """(exit code, {code: severity}) of the program with --json."""
    code = cli.main(["doctor", "--json", *words])
    return code, {row["code"]: row["severity"] for row in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_have_no_error(path):
    files = reading.read_files([path])
    expected = ACCELERATE if path.parent.name == "accelerate" else TRAINING
    assert [file.kind for file in files] == [expected]
    for versions in (VERSIONS, {**VERSIONS, "deepspeed": "0.19.3"}):
        assert {finding.severity for finding in diagnose(Facts(files, versions))} <= {"note"}


def test_every_recipe_goes_with_every_launch_config():
    launches = [path for path in SHIPPED if path.parent.name == "accelerate"]
    pairs = [(how, what) for how in launches for what in SHIPPED if what not in launches]
    assert len(pairs) == 20
    for pair in pairs:
        findings = diagnose(Facts(reading.read_files(pair), {**VERSIONS, "deepspeed": "0.19.3"}))
        assert {finding.code for finding in findings} == {"needs-hf-ckpt"}


def test_what_training_arguments_write_is_read(tmp_path):
    name = compat.ENABLE_NAMES[-1].removesuffix("_enable")
    options = {name: True, f"{name}_kwargs": {"policy": "ful"}}
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    files = reading.read_files([path])
    assert files[0].kind == TRAINING
    assert {finding.code for finding in diagnose(Facts(files, VERSIONS))} == {"spec", "needs-hf-ckpt"}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TRAINING, {"gradient_checkpointing": True}),
        (TRAINING, {"bf16": True, "activation_checkpointing": True}),
        (TRAINING, {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}),
        (ACCELERATE, {"distributed_type": "FSDP", "fsdp_config": {}, "mixed_precision": "bf16"}),
        (DEEPSPEED, {"bf16": {"enabled": True}, "activation_checkpointing": {"cpu_checkpointing": True}}),
        (DEEPSPEED, {"zero_optimization": {"stage": 3}, "optimizer": {}, "fp16": {"enabled": "auto"}}),
        (ADAPTER, {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}),
    ],
)
@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_kinds_are_recognised_by_their_keys(kind, values, suffix, tmp_path):
    (file,) = reading.read_files([write(tmp_path / f"config.{suffix}", values)])
    assert file.kind == kind


def test_named_files_are_read_too(tmp_path, capsys):
    block = {"activation_checkpointing": {}, "zero_optimization": {"stage": 3}}
    write(tmp_path / "ds.json", block)
    deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    by_launcher = write(tmp_path / "launch.yaml", {**deepspeed, "num_processes": 2})
    by_training = write(tmp_path / "train.yaml", {"output_dir": "x", "deepspeed": str(tmp_path / "ds.json")})
    inline = write(tmp_path / "inline.json", {"output_dir": "x", "deepspeed": block})
    for path in (by_launcher, by_training, inline):
        assert codes(path, capsys=capsys) == (0, {"deepspeed-block": "warning"})
    assert len(reading.read_files([by_launcher, by_training])) == 3
    write(tmp_path / "fsdp.json", {"activation_checkpointing": True})
    asked = {"output_dir": "x", "gradient_checkpointing": True, "fsdp": "full_shard", "fsdp_config": "fsdp.json"}
    code, seen = codes(write(tmp_path / "fsdp-train.yaml", asked), "--model", "llama-3.1-8b", capsys=capsys)
    assert (code, seen["two-owners"]) == (1, "error")


def test_all_unreadable_files_are_told_at_once(tmp_path, capsys):
    contents = {
        "broken.json": "{",
        "broken.yaml": "a: [",
        "tag.yaml": "a: !!bool maybe",
        "date.yaml": "a: 2026-99-99",
        "latin.yaml": b"a: \xff",
        "list.json": "[1]",
        "empty.yaml": "",
        "deep.json": "[" * 100_000,
        "deep.yaml": '{"a": ' * 45 + "1" + "}" * 45,
        "cycle.yaml": "output_dir: &a [*a]",
        "other.yaml": "name: me",
        "model.json": '{"model_type": "llama", "vocab_size": 3}',
        "names.yaml": "{output_dir: x, deepspeed: gone.json}",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    paths = [str(tmp_path / name) for name in contents]
    assert cli.main(["doctor", *paths, str(tmp_path / "missing.yaml"), str(tmp_path), "nul\0.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == len(contents) + 3
    said = (
        *(
            "not valid JSON",
            "not valid YAML",
            "not valid YAML",
            "not valid YAML",
            "utf-8",
            "must hold a mapping of keys",
        ),
        *(
            "is empty",
            "levels deep",
            "levels deep",
            "levels deep",
            "is no config that doctor knows",
            "give it as `--model",
        ),
        *("names it as `deepspeed`", "No such file", "directory", "null"),
    )
    for line, words in zip(lines, said, strict=True):
        assert words in line


# --- the program ----------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reading, "installed", lambda: VERSIONS)
    note = write(tmp_path / "note.yaml", {"gradient_checkpointing": True, KWARGS: FULL})
    warning = write(tmp_path / "warning.yaml", {KWARGS: FULL})
    error = write(tmp_path / "error.yaml", {"gradient_checkpointing": True, KWARGS: {"policy": "ful"}})
    assert codes(capsys=capsys) == (0, {})
    assert codes(note, "--strict", capsys=capsys) == (0, {"needs-hf-ckpt": "note"})
    assert codes(warning, capsys=capsys) == (0, {"kwargs-without-flag": "warning"})
    assert codes(warning, "--strict", capsys=capsys)[0] == 1
    assert codes(error, capsys=capsys)[0] == 1
    assert cli.main(["doctor", "--device", "abacus"]) == 2
    capsys.readouterr()
    cli.main(["doctor", "--json", error, "--model", "gpt2"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["files"] == {error: TRAINING}
    assert printed["versions"] == VERSIONS
    assert printed["model"] == "gpt2"
    assert set(printed["findings"][0]) == {"severity", "code", "where", "what", "fix"}


def test_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reading, "installed", lambda: VERSIONS)
    rules = {"rules": [{"layers": "0", "policy": "[bold]"}]}
    assert cli.main(["doctor", write(tmp_path / "t.yaml", {"gradient_checkpointing": True, KWARGS: rules})]) == 1
    printed = capsys.readouterr().out
    assert "transformers 5.23.0" in printed
    assert "[bold]" in printed  # not taken for markup
    assert cli.main(["doctor"]) == 0
    assert "nothing found that would go wrong" in capsys.readouterr().out


def test_the_environment_alone_is_that_of_this_python(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    versions = json.loads(capsys.readouterr().out)["versions"]
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["transformers"] == importlib.metadata.version("transformers")


@pytest.mark.parametrize("words", [["--help"], ["configs/accelerate/fsdp2.yaml", "configs/recipes/full_gpt2.yaml"]])
def test_nothing_heavy_is_imported(words):
    command = [sys.executable, "-X", "importtime", "-m", "hf_ckpt.cli", "doctor", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "hf_ckpt.errors" in imported
    assert not imported & {"torch", "transformers", "accelerate", "matplotlib"}
    if words == ["--help"]:
        assert "hf-ckpt doctor" in done.stdout
        assert not imported & {"yaml", "rich", "hf_ckpt.doctor"}


# --- anything at all ------------------------------------------------------------------------------------------------

NAMES = sorted(
    {re.sub(r"\W", "", word) for word in re.findall(r'"([a-z_.]+)"', Path(doctor.__file__).read_text())}
    | set(reading.OUR_KEYS | reading._THEIR_KEYS)
    | {"fsdp_version", "triton.cudagraphs"}
)
WORDS = ("FSDP", "DEEPSPEED", "eager", "selective", "full", "budget", "sac", "3", "true", '{"policy": "auto"}', '{"')
LEAVES = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=5),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8)


@settings(max_examples=150)
@given(
    given_files=st.lists(
        st.tuples(st.sampled_from([TRAINING, ACCELERATE, DEEPSPEED, ADAPTER, FSDP]), MAPPINGS), max_size=3
    ),
    kwargs=JSON,
    config=MAPPINGS,
)
def test_no_config_crashes_the_checks(given_files, kwargs, config):
    files = [ConfigFile(f"{number}", kind, values) for number, (kind, values) in enumerate(given_files)]
    model = ModelFacts("m", "t5", config, (("encoder", 2), ("decoder", 3)))
    facts_given = Facts((*files, asking(kwargs)), {"deepspeed": "x", "torch": ""}, model, DEVICES["t4"], 1, 9)
    findings = diagnose(facts_given)
    assert json.loads(json.dumps(doctor.to_dict(facts_given, findings)))["findings"]
    assert {finding.severity for finding in findings} <= set(reading.SEVERITIES)
    assert findings == diagnose(facts_given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


def refused(path):
    """What is said of a file that cannot be used; None if it can, and was diagnosed."""
    try:
        files = reading.read_files([path])
    except HfCkptError as error:
        return str(error)
    assert files
    diagnose(Facts(files))
    return None


@settings(max_examples=60)
@given(JSON, st.sampled_from(["json", "yaml"]))
def test_no_file_crashes_the_reading(folder, values, suffix):
    path = folder / f"any.{suffix}"
    path.write_text(json.dumps(values))
    refusal = refused(path)
    assert refusal is None or str(path) in refusal


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_text_crashes_the_reading(folder, content):
    path = folder / "text.yaml"
    path.write_bytes(content)
    refusal = refused(path)
    assert refusal is None or str(path) in refusal
