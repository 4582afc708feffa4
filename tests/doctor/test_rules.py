"""Every rule of doctor: a config with the mistake, its twin without it, and what the engines do in such cases."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.configs import (
    FULL,
    GPT2,
    KWARGS,
    LLAMA,
    MIXTRAL,
    PLAIN,
    ROOT,
    T5,
    VERSIONS,
    asking,
    facts_of,
    found,
    fsdp,
    launch,
    train,
    zero,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.cli import main
from hf_ckpt.doctor import facts
from hf_ckpt.doctor.facts import ADAPTER, DEEPSPEED, FSDP, ConfigFile, Facts, ModelFacts
from hf_ckpt.doctor.rules import RULES, diagnose
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.models.tiny import tiny_batch, tiny_model

OLD = {"transformers": "4.57.1"}
SAC_ATTENTION = {"policy": "selective", "engine": "sac", "save": ["attention"]}
LORA_ZERO3 = (asking(FULL, lora_r=8), zero(3))
OPEN_FSDP = {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}

# code, severity, place, with the mistake, without it
CASES = [
    (
        *("fsdp-and-deepspeed", "error", "train.yaml: fsdp"),
        facts_of(train(fsdp=["full_shard"], deepspeed={"zero_optimization": {"stage": 2}})),
        facts_of(train(fsdp=[], deepspeed={"zero_optimization": {"stage": 2}})),
    ),
    (
        *("own-offloading", "warning", "train.yaml: activation_offloading"),
        facts_of(train(activation_offloading="legacy")),
        facts_of(train(activation_offloading="false")),
    ),
    (
        *("own-offloading", "warning", "train.yaml: gradient_checkpointing"),
        facts_of(train(gradient_checkpointing="unsloth")),
        facts_of(train(gradient_checkpointing="true")),
    ),
    (
        *("two-owners", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts_of(asking(PLAIN), fsdp(activation_checkpointing="true")),
        facts_of(asking(PLAIN), fsdp(activation_checkpointing=False)),
    ),
    (
        *("two-owners", "error", "train.yaml: fsdp_config.activation_checkpointing"),
        facts_of(train(activation_checkpointing="yes", fsdp=True, fsdp_config='{"activation_checkpointing": true}')),
        facts_of(train(activation_checkpointing=False, gradient_checkpointing=True, **OPEN_FSDP)),
    ),
    (
        *("two-owners", "error", "fsdp.json: activation_checkpointing"),
        facts_of(
            asking(PLAIN, fsdp="full_shard", fsdp_config="fsdp.json"),
            ConfigFile("fsdp.json", FSDP, {"activation_checkpointing": True}),
        ),
        facts_of(
            asking(PLAIN, fsdp="", fsdp_config="fsdp.json"),
            ConfigFile("fsdp.json", FSDP, {"activation_checkpointing": True}),
        ),
    ),
    (
        *("reentrant", "warning", f"train.yaml: {KWARGS}.use_reentrant"),
        facts_of(asking({"use_reentrant": True})),
        facts_of(asking(PLAIN)),
    ),
    (
        *("reentrant-default", "warning", f"train.yaml: {KWARGS}"),
        facts_of(asking({"preserve_rng_state": True})),
        facts_of(asking({"preserve_rng_state": True, "use_reentrant": False})),
    ),
    (*("reentrant-default", "warning", "train.yaml: "), facts_of(asking(), versions=OLD), facts_of(asking())),
    (*("reentrant-default", "warning", "train.yaml: "), facts_of(asking({}), versions=OLD), facts_of(asking({}))),
    (
        *("reentrant-default", "warning", "train.yaml: "),
        facts_of(asking({"every_n_layers": 2}), versions=OLD),
        facts_of(asking({"every_n_layers": 2})),  # Trainer drops the key, and transformers 5's value is false
    ),
    (*("spec", "error", f"train.yaml: {KWARGS}"), facts_of(asking({"polcy": "full"})), facts_of(asking(FULL))),
    (
        *("spec", "error", f"train.yaml: {KWARGS}"),
        facts_of(asking("{'policy': full}")),
        facts_of(asking('{"policy": "full"}')),
    ),
    (
        *("plan-file", "warning", f"train.yaml: {KWARGS}.plan"),
        facts_of(asking({"plan": "no-such-plan.yaml"})),
        facts_of(asking({"plan": str(ROOT / "pyproject.toml")})),
    ),
    (*("needs-hf-ckpt", "note", f"train.yaml: {KWARGS}"), facts_of(asking(FULL)), facts_of(asking(PLAIN))),
    (
        *("kwargs-without-flag", "warning", "train.yaml: activation_checkpointing_kwargs"),
        facts_of(train(activation_checkpointing_kwargs=FULL)),
        facts_of(train(activation_checkpointing_kwargs=FULL, activation_checkpointing=True)),
    ),
    (
        *("two-names", "warning", "train.yaml: gradient_checkpointing"),
        facts_of(train(gradient_checkpointing=True, activation_checkpointing=False)),
        facts_of(train(gradient_checkpointing=True, activation_checkpointing=True)),
    ),
    (
        *("new-name", "warning", "train.yaml: activation_checkpointing"),
        facts_of(train(activation_checkpointing=True), versions={"transformers": "5.22.0"}),
        facts_of(train(activation_checkpointing=True)),
    ),
    (
        *("fsdp2-dropout", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts_of(fsdp(version=2, activation_checkpointing=True), model=T5),
        facts_of(fsdp(version=2, activation_checkpointing=True), model=LLAMA),
    ),
    (
        *("fsdp2-dropout", "error", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts_of(fsdp(version=2, activation_checkpointing=True), train(lora_r=8, lora_dropout=0.05), model=GPT2),
        facts_of(fsdp(version=2, activation_checkpointing=True), train(lora_r=8, lora_dropout=0.0), model=GPT2),
    ),
    (
        *("fsdp2-dropout", "warning", "launch.yaml: fsdp_config.fsdp_activation_checkpointing"),
        facts_of(fsdp(version="2", activation_checkpointing=True)),
        facts_of(
            fsdp(activation_checkpointing=True), model=T5
        ),  # the launcher's default is 1, which preserves random state
    ),
    (
        *("fsdp2-dropout", "warning", "train.yaml: fsdp_config.activation_checkpointing"),
        facts_of(train(**OPEN_FSDP), model=T5),  # the default version depends on transformers
        facts_of(train(**OPEN_FSDP), model=GPT2),
    ),
    (
        *("random-state", "error", f"train.yaml: {KWARGS}.preserve_rng_state"),
        facts_of(asking({"policy": "full", "preserve_rng_state": False}), model=T5),
        facts_of(asking({"policy": "selective", "preserve_rng_state": False}), model=T5),
    ),
    (
        *("random-state", "error", f"train.yaml: {KWARGS}.preserve_rng_state"),
        facts_of(asking({"policy": "selective", "engine": "sac", "preserve_rng_state": False}), model=T5),
        facts_of(asking({"policy": "selective", "engine": "sac", "preserve_rng_state": False}), model=GPT2),
    ),
    (
        *("zero3-frozen", "error", "launch.yaml: deepspeed_config.zero_stage"),
        facts_of(*LORA_ZERO3, versions={"deepspeed": "0.19.2"}),
        facts_of(*LORA_ZERO3, versions={"deepspeed": "0.19.3"}),
    ),
    (
        *("zero3-frozen", "warning", "launch.yaml: deepspeed_config.zero_stage"),
        facts_of(*LORA_ZERO3),
        facts_of(asking(FULL, lora_r=8, use_peft=False), zero(3)),
    ),
    (
        *("zero3-frozen", "error", "ds.json: zero_optimization.stage"),
        facts_of(
            asking(FULL),
            ConfigFile("adapter_config.json", ADAPTER, {"peft_type": "LORA"}),
            ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 3}}),
            versions={"deepspeed": "0.16.4+cu"},
        ),
        facts_of(
            asking(FULL),
            ConfigFile("adapter_config.json", ADAPTER, {"peft_type": "LORA"}),
            ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 2}}),
            versions={"deepspeed": "0.16.4+cu"},
        ),
    ),
    (
        *("zero3-frozen", "warning", "launch.yaml: deepspeed_config.zero_stage"),
        facts_of(asking(FULL, adapter="qlora"), zero("3")),
        facts_of(asking(FULL, run_name="lora"), zero("3")),
    ),
    (
        *("deepspeed-block", "warning", "ds.json: activation_checkpointing"),
        facts_of(ConfigFile("ds.json", DEEPSPEED, {"activation_checkpointing": {"partition_activations": True}})),
        facts_of(ConfigFile("ds.json", DEEPSPEED, {"zero_optimization": {"stage": 2}})),
    ),
    (
        *("cuda-graphs", "warning", "train.yaml: torch_compile_mode"),
        facts_of(asking(FULL, torch_compile_mode="reduce-overhead")),
        facts_of(asking({**FULL, "preserve_rng_state": False}, torch_compile_mode="reduce-overhead")),
    ),
    (
        *("cuda-graphs", "warning", "launch.yaml: dynamo_config.dynamo_mode"),
        facts_of(asking(FULL), launch(dynamo_config={"dynamo_mode": "max-autotune"})),
        facts_of(asking(FULL), launch(dynamo_config={"dynamo_mode": "max-autotune-no-cudagraphs"})),
    ),
    (
        *("cuda-graphs", "warning", "train.yaml: torch_compile_options.triton.cudagraphs"),
        facts_of(asking(FULL, torch_compile_options={"triton.cudagraphs": True})),
        facts_of(asking(FULL, torch_compile_options={"triton.cudagraphs": False})),
    ),
    (
        *("rebuild-compiled", "error", f"train.yaml: {KWARGS}.engine"),
        facts_of(asking({"policy": "selective", "engine": "rebuild"}, torch_compile=True)),
        facts_of(asking({"policy": "selective", "engine": "rebuild"}), launch(dynamo_config={"dynamo_backend": "NO"})),
    ),
    (
        *("planned-compiled", "warning", f"train.yaml: {KWARGS}.policy"),
        facts_of(asking({"budget": "20GiB"}), launch(dynamo_config={"dynamo_backend": "INDUCTOR"})),
        facts_of(asking(FULL), launch(dynamo_config={"dynamo_backend": "INDUCTOR"})),
    ),
    (
        *("adapters-compiled", "warning", f"train.yaml: {KWARGS}.save"),
        facts_of(asking({"policy": "selective"}, torch_compile=True, lora_r=8)),
        facts_of(asking({"policy": "selective", "save": ["attention"]}, torch_compile=True, lora_r=8)),
    ),
    (
        *("adapters-compiled", "warning", f"train.yaml: {KWARGS}.save"),
        facts_of(asking({"policy": "selective"}, torch_compile=True, lora_r=8)),
        facts_of(asking({"policy": "selective"}, torch_compile=True)),
    ),
    (
        *("segments-sharded", "error", f"train.yaml: {KWARGS}.segments"),
        facts_of(asking({"segments": "sqrt"}), zero(3)),
        facts_of(asking({"segments": "sqrt"})),
    ),
    (
        *("head-sharded", "warning", f"train.yaml: {KWARGS}.head"),
        facts_of(asking({"head": 512}, fsdp="full_shard")),
        facts_of(asking({"head": 512}, fsdp="")),
    ),
    (
        *("prefix-tuning", "error", "train.yaml: peft_type"),
        facts_of(asking(FULL, peft_type="PREFIX_TUNING", num_virtual_tokens=8)),
        facts_of(asking(FULL, peft_type="PROMPT_TUNING", num_virtual_tokens=8)),
    ),
    (
        *("prefix-tuning", "error", "adapter_config.json: prefix_projection"),
        facts_of(asking(FULL), ConfigFile("adapter_config.json", ADAPTER, {"prefix_projection": False})),
        facts_of(ConfigFile("adapter_config.json", ADAPTER, {"prefix_projection": False})),
    ),
    (
        *("use-cache", "note", "train.yaml: use_cache"),
        facts_of(asking(PLAIN, use_cache=True)),
        facts_of(asking(FULL, use_cache=True)),
    ),
    (
        *("eager-attention", "warning", "train.yaml: attn_implementation"),
        facts_of(asking({"policy": "selective"}, attn_implementation="eager")),
        facts_of(asking({"policy": "selective"}, attn_implementation="sdpa")),
    ),
    (
        *("nothing-to-save", "warning", f"train.yaml: {KWARGS}.save"),
        facts_of(asking(SAC_ATTENTION, attn_implementation="flex_attention")),
        facts_of(asking(SAC_ATTENTION, attn_implementation="sdpa")),
    ),
    (
        *("logits", "note", "llama: vocab_size"),
        facts_of(asking(FULL, per_device_train_batch_size=2, max_length=2048, bf16=True), model=LLAMA),
        facts_of(asking(FULL | {"head": "auto"}, per_device_train_batch_size=2, max_length=2048), model=LLAMA),
    ),
    (
        *("logits", "note", "llama: vocab_size"),  # of 16 GB, 0.98 GiB is little and 15.65 GiB is much
        facts_of(asking(FULL), model=LLAMA, device=DEVICES["t4"], batch=1, tokens=8192),
        facts_of(asking(FULL), model=LLAMA, device=DEVICES["t4"], batch=1, tokens=512),
    ),
    (
        *("logits", "note", "llama: vocab_size"),
        facts_of(asking(PLAIN), fsdp(), model=LLAMA, batch=4, tokens=8192),
        facts_of(asking(PLAIN, use_liger_kernel=True), fsdp(), model=LLAMA, batch=4, tokens=8192),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts_of(asking({"layers": "30-32"}), model=LLAMA),
        facts_of(asking({"layers": "30-31"}), model=LLAMA),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts_of(asking({"layers": {"encoder": "0"}}), model=LLAMA),
        facts_of(asking({"layers": {"encoder": "0"}}), model=T5),
    ),
    (
        *("blocks", "error", f"train.yaml: {KWARGS}"),
        facts_of(asking({"segments": 5}), model=MIXTRAL),
        facts_of(asking({"rules": [{"stack": "encoder", "layers": "0", "policy": "full"}]}), model=MIXTRAL),
    ),
    (
        *("every-n-layers", "warning", f"train.yaml: {KWARGS}.every_n_layers"),
        facts_of(asking({"every_n_layers": 32}), model=LLAMA),
        facts_of(asking({"every_n_layers": 31}), model=LLAMA),
    ),
    (
        *("one-counter", "warning", f"train.yaml: {KWARGS}.every_n_layers"),
        facts_of(asking({"every_n_layers": 2}), model=T5),
        facts_of(asking({"every_n_layers": 2, "policy": "full"}), model=T5),
    ),
    (
        *("offload-nowhere", "warning", f"train.yaml: {KWARGS}"),
        facts_of(asking({"policy": "offload"}, use_cpu=True)),
        facts_of(asking({"policy": "offload"}, use_cpu=False), launch(use_cpu=False)),
    ),
    (
        *("offload-nowhere", "warning", f"train.yaml: {KWARGS}"),
        facts_of(asking({"policy": "selective", "offload": "saved"}), device=DEVICES["cpu"]),
        facts_of(asking({"policy": "selective", "offload": "saved"}), device=DEVICES["h100"]),
    ),
    (
        *("quantised", "note", "train.yaml: load_in_4bit"),
        facts_of(train(load_in_4bit=True)),
        facts_of(train(load_in_4bit=False)),
    ),
    (
        *("quantised", "note", "train.yaml: quantization_config.load_in_8bit"),
        facts_of(train(quantization_config={"load_in_8bit": True})),
        facts_of(train(quantization_config={"load_in_8bit": False})),
    ),
    (
        *("routers", "warning", "mixtral: text.num_local_experts"),
        facts_of(asking(FULL, torch_compile=True), model=MIXTRAL),
        facts_of(asking(FULL), model=MIXTRAL),
    ),
    (
        *("routers", "warning", "mixtral: text.num_local_experts"),
        facts_of(asking(SAC_ATTENTION), model=MIXTRAL),
        facts_of(asking({"policy": "selective", "engine": "sac"}), model=MIXTRAL),
    ),
    (*("version", "error", "transformers"), facts_of(versions={"transformers": "4.56.2"}), facts_of(versions=OLD)),
    (
        *("version", "error", "transformers"),
        facts_of(versions={"transformers": "6.0.0"}),
        facts_of(versions={"transformers": "5.99"}),
    ),
    (
        *("version", "error", "torch"),
        facts_of(versions={"torch": "2.7.1"}),
        facts_of(versions={"torch": "2.8.0+cu128"}),
    ),
    (*("version", "error", "accelerate"), Facts(versions={**VERSIONS, "accelerate": "0.34.2"}), facts_of()),
    (
        *("version", "error", "accelerate"),
        Facts(versions={name: version for name, version in VERSIONS.items() if name != "accelerate"}),
        facts_of(versions={"accelerate": "unknown"}),
    ),
    (
        *("deepspeed", "note", "deepspeed"),
        facts_of(versions={"deepspeed": "0.19.2"}),
        facts_of(versions={"deepspeed": "0.20.0"}),
    ),
]


@pytest.mark.parametrize(("code", "severity", "where", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_mistake_is_found_and_its_twin_is_not(code, severity, where, bad, good):
    findings = found(bad, code)
    assert [finding.severity for finding in findings] == [severity]
    assert findings[0].where.startswith(where)
    assert findings[0].what
    assert findings[0].fix
    assert found(good, code) == []


def test_every_rule_has_a_case():
    assert {rule.code for rule in RULES} == {code for code, *_ in CASES}
    assert diagnose(facts_of()) == ()


def test_fixes_name_the_key_as_it_is_written():
    (finding,) = found(facts_of(asking(PLAIN), fsdp(activation_checkpointing=True)), "two-owners")
    assert finding.fix.startswith("Set fsdp_config.fsdp_activation_checkpointing to false")


def test_every_problem_of_a_spec_is_told_with_near_matches():
    findings = found(facts_of(asking({"polcy": "full", "every_n_layers": 0, "determinism_chek": "none"})), "spec")
    assert len(findings) == 3
    assert "did you mean `policy`" in findings[0].what
    assert "did you mean `determinism_check`" in findings[2].what


def test_true_reentrant_is_told_once():
    findings = diagnose(facts_of(asking({"use_reentrant": True, "policy": "full"})))
    assert [finding.code for finding in findings] == ["reentrant", "needs-hf-ckpt"]


def test_errors_come_first():
    order = [finding.severity for finding in diagnose(facts_of(asking(FULL, use_cpu="on", load_in_4bit=True), fsdp()))]
    others = diagnose(facts_of(asking({"segments": 2, "head": "auto"}), fsdp(activation_checkpointing=True, version=2)))
    assert order == ["note", "note"]
    assert [finding.severity for finding in others] == ["error", "error", "warning", "warning", "note"]


@pytest.mark.compat
def test_facts_about_transformers_are_those_of_the_installed_one():
    """Doctor agrees with the installed transformers on the flag's name and on enable calls without kwargs."""
    version = facts.installed()["transformers"]
    new_name = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    assert new_name == (
        not found(facts_of(train(activation_checkpointing=True), versions={"transformers": version}), "new-name")
    )
    model = tiny_model("llama", layers=1)
    getattr(model, compat.ENABLE_NAMES[-1])()
    reentrant = model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"]
    assert reentrant == bool(found(facts_of(asking(), versions={"transformers": version}), "reentrant-default"))


def test_the_size_of_logits():
    (finding,) = found(facts_of(asking(FULL, bf16=True), model=LLAMA, batch=2, tokens=2048), "logits")
    assert "6.85 GiB" in finding.what  # 2 x 2048 x 128256 x 14 bytes
    (finding,) = found(facts_of(asking(FULL), model=LLAMA, batch=2, tokens=2048, device=DEVICES["t4"]), "logits")
    assert "7.83 GiB, 53.8 % of the device" in finding.what
    classifier = ModelFacts("b", "bert", {"vocab_size": 128256, "architectures": ["BertForSequenceClassification"]})
    assert found(facts_of(asking(FULL), model=classifier, batch=64, tokens=2048), "logits") == []


def test_requirements_are_those_of_pyproject():
    project = (ROOT / "pyproject.toml").read_text()
    for package, (first, beyond) in facts.REQUIRED.items():
        assert f'"{package}>={first}{f",<{beyond}" if beyond else ""}"' in project


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_a_models_stacks_are_read_from_its_config(family, tmp_path):
    model = tiny_model(family, layers=3)
    model.config.save_pretrained(tmp_path)
    read = facts.read_model(str(tmp_path))
    assert read.named
    assert read.model_type == family
    plan = hf_ckpt.install(model).plan
    assert read.stacks == tuple((name, len(pairs)) for name, pairs in plan.stacks().items())
    for spec in ({"layers": "0,-3"}, {"layers": "0-3"}, {"layers": {"encoder": "2"}}, {"segments": 4}, {"segments": 3}):
        refused = found(facts_of(asking(spec), model=read), "blocks")
        if refused:
            with pytest.raises(HfCkptError, match=re.escape(refused[0].what.partition(": ")[2])):
                hf_ckpt.install(model, spec)
        else:
            hf_ckpt.install(model, spec)


def test_dropout_of_presets():
    for name, active in (("llama-3.1-8b", None), ("gpt2", "resid_pdrop"), ("t5-small", "dropout_rate")):
        dropout = facts_of(model=facts.read_model(name)).dropout
        assert (dropout and dropout.where) == (active and f"{name}: {active}")


def test_an_unknown_model_is_asked_wrongly(capsys, tmp_path):
    assert main.main(["doctor", "--model", str(ROOT / "pyproject.toml")]) == 2
    assert "cannot read a model's config" in capsys.readouterr().err
    deep = tmp_path / "config.json"
    deep.write_text('{"model_type": "llama", "more": ' + "[" * 60 + "]" * 60 + "}")
    assert main.main(["doctor", "--model", str(deep)]) == 2
    assert "levels deep" in capsys.readouterr().err


# --- doctor's claims about engines, checked on the engines ----------------------------------------------------------


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
    kept = "softmax" in hf_ckpt.describe(model).kept
    assert kept == bool(
        found(facts_of(asking({"policy": "selective"}, attn_implementation=attention)), "eager-attention")
    )


@pytest.mark.parametrize("spec", [FULL, {"policy": "selective"}, SAC_ATTENTION], ids=["full", "selective", "sac"])
def test_only_sac_routes_again_in_backward(spec, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = MixtralConfig(**shape, num_hidden_layers=2, num_local_experts=4, vocab_size=32)
    model = MixtralForCausalLM(config).train()
    hf_ckpt.install(model, spec)
    model.gradient_checkpointing_enable()
    ids = torch.arange(16)[None]
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Ran() as backward:
        loss.backward()
    routed = [name for name in backward.names if "topk" in name]
    assert len(routed) == (2 if spec is SAC_ATTENTION else 0)
    config.save_pretrained(tmp_path)
    read = facts.read_model(str(tmp_path))
    assert (read.stacks, read.named) == ((("decoder", 2),), False)
    assert bool(routed) == bool(found(facts_of(asking(spec), model=read), "routers"))
