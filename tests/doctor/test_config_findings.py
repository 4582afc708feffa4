"""Faults that doctor finds in configs alone: every one by a config that has it and its twin that has not."""

from __future__ import annotations

import pytest
from helpers.configs import (
    FULL,
    GPT2,
    KWARGS,
    LLAMA,
    PLAIN,
    ROOT,
    T5,
    asking,
    assert_complete,
    assert_told,
    facts_of,
    found,
    fsdp,
    launch,
    train,
    zero,
)
from transformers import TrainingArguments

from hf_ckpt import compat
from hf_ckpt.doctor import facts
from hf_ckpt.doctor.diagnose import diagnose
from hf_ckpt.doctor.facts import ADAPTER, DEEPSPEED, FSDP, ConfigFile
from hf_ckpt.models.tiny import tiny_model

OLD = {"transformers": "4.57.1"}
SAC_ATTENTION = {"policy": "selective", "engine": "sac", "save": ["attention"]}
LORA_ZERO3 = (asking(FULL, lora_r=8), zero(3))
OPEN_FSDP = {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}}

# code, severity, where it is, with the fault, without
CASES = [
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
        *("reentrant", "error", f"train.yaml: {KWARGS}.use_reentrant"),
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
        facts_of(asking({"every_n_layers": 2})),  # Trainer takes the key out, and transformers 5 says false
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
        ),  # the launcher's default is 1, which keeps random state
    ),
    (
        *("fsdp2-dropout", "warning", "train.yaml: fsdp_config.activation_checkpointing"),
        facts_of(train(**OPEN_FSDP), model=T5),  # which version is the default depends on transformers
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
        *("planned-sharded", "error", f"train.yaml: {KWARGS}.policy"),
        facts_of(asking({"policy": "auto"}), fsdp(version=1)),
        facts_of(asking({"policy": "auto"}), fsdp(version=2)),
    ),
    (
        *("planned-sharded", "error", f"train.yaml: {KWARGS}.policy"),
        facts_of(asking({"policy": "auto"}), zero(3)),
        facts_of(asking({"policy": "auto"}), zero(2)),
    ),
    (
        *("planned-sharded", "warning", f"train.yaml: {KWARGS}.policy"),
        facts_of(asking({"policy": "auto"}, fsdp="full_shard")),
        facts_of(asking({"policy": "auto"}, fsdp="")),
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
]


@pytest.mark.parametrize(("code", "severity", "where", "bad", "good"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_is_found_and_its_twin_is_not(code, severity, where, bad, good):
    assert_told(code, severity, where, bad, good)


def test_every_finding_has_a_case():
    assert_complete(("request", "distributed", "compiled"), CASES)


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
    """The version that renamed the flag, and what an enable call without kwargs means."""
    version = facts.installed()["transformers"]
    new_name = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    assert new_name == (
        not found(facts_of(train(activation_checkpointing=True), versions={"transformers": version}), "new-name")
    )
    model = tiny_model("llama", layers=1)
    getattr(model, compat.ENABLE_NAMES[-1])()
    reentrant = model.model.layers[0]._gradient_checkpointing_func.keywords["use_reentrant"]
    assert reentrant == bool(found(facts_of(asking(), versions={"transformers": version}), "reentrant-default"))
