"""Faults that doctor finds with a model, a batch or an environment in view, and what the engines really do there."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.configs import (
    FULL,
    KWARGS,
    LLAMA,
    MIXTRAL,
    PLAIN,
    ROOT,
    T5,
    VERSIONS,
    asking,
    assert_complete,
    assert_told,
    facts_of,
    found,
    fsdp,
    launch,
    train,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

import hf_ckpt
from hf_ckpt.cli import main
from hf_ckpt.doctor import facts
from hf_ckpt.doctor.facts import ADAPTER, ConfigFile, Facts, ModelFacts
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.prediction.devices import DEVICES

OLD = {"transformers": "4.57.1"}
SAC_ATTENTION = {"policy": "selective", "engine": "sac", "save": ["attention"]}

# code, severity, where it is, with the fault, without
CASES = [
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
        *("logits", "note", "llama: vocab_size"),  # 0.98 GiB of 16 GB is little, 15.65 GiB much
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
def test_a_fault_is_found_and_its_twin_is_not(code, severity, where, bad, good):
    assert_told(code, severity, where, bad, good)


def test_every_finding_has_a_case():
    assert_complete(("model", "machine"), CASES)


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
