"""Shallow models on fake tensors: they describe the model of a config, or a live one, and change nothing of it."""

import collections
import contextlib
import math
import types

import pytest
import torch
import transformers
from helpers.snapshots import snapshot
from helpers.steps import assert_same, enable, step
from peft import IA3Config, LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensor

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.batches import _mean_square, micro_step
from hf_ckpt.forecast.model import load_config, model_of_workload, nbytes
from hf_ckpt.forecast.presets import presets
from hf_ckpt.forecast.question import Question
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.compat
PRESETS = {
    "bert-large": (335.2, [24]),
    "gpt2-xl": (1557.6, [48]),
    "llama-3.1-70b": (70553.7, [80]),
    "mixtral-8x7b": (46702.8, [32]),
    "qwen3-8b": (8190.7, [36]),
    "t5-3b": (2851.6, [24, 24]),
    "mini-llama": (2 * 0.524 + 8 * 3.163, [8]),  # by its formula, at hidden size 512
}
"""Name -> (millions of parameters, blocks per stack)."""


def depths_of(model):
    """For each stack of the real model, its number of blocks."""
    return [*collections.Counter(block.stack for block in model.likes).values()]


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_known_sizes_and_need_no_memory(name):
    with LiveBytes(device="cpu") as live:
        model, (millions, depths) = model_of_workload(Question(name)), PRESETS[name]
    assert live.peak_bytes <= 2**20
    elements = sum(math.prod(shape) for shape, *_ in model.tensors)
    assert [type(model.base).__name__] == load_config(name).architectures
    assert elements == pytest.approx(millions * 1e6, rel=0.01)
    assert nbytes(model.tensors) == 2 * elements  # bfloat16
    assert depths_of(model) == depths
    assert all(isinstance(parameter.data, FakeTensor) for parameter in model.base.parameters())
    assert len(find_blocks(model.base).blocks) == 4 * len(depths)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": null}', '{"model_type": "no such type"}', "\x00"])
def test_files_that_are_no_configs_are_refused_by_name(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    for name in (str(path), str(tmp_path / "empty"), "no such model!", ""):
        with pytest.raises(HfCkptError, match=r"cannot read a model's config from") as raised:
            load_config(name)
        assert ", ".join(presets()) in str(raised.value)


@pytest.mark.parametrize(
    ("method", "bits", "fields", "said"),
    [
        ("gptq", 4, {}, "are quantised by gptq: this cannot be planned for"),
        ("bitsandbytes", 4, {}, "in 4 bits: give load_in_4bit"),
        ("bitsandbytes", 8, {"load_in_4bit": True, "lora": 2}, "by bitsandbytes: this"),
        ("bitsandbytes", 4, {"load_in_4bit": True, "lora": 2}, ""),
        ("mxfp4", 4, {}, ""),
    ],
)
def test_a_checkpoint_that_is_quantised_is_planned_as_it_is_or_refused(method, bits, fields, said):
    """Its config has a dict, or an object of transformers."""
    config = tiny_model("llama", layers=2).config
    config.architectures = ["LlamaForCausalLM"]
    keys = {"quant_method": method, f"load_in_{bits}bit": method == "bitsandbytes"}
    for form in (keys, types.SimpleNamespace(to_dict=lambda: keys)):
        config.quantization_config = form
        with pytest.raises(HfCkptError, match=said) if said else contextlib.nullcontext():
            assert hf_ckpt.predict(config, tokens=16, device="t4", **fields).plan.model == "LlamaForCausalLM"


# --- batches ----------------------------------------------------------------------------------------------------------

TASKS = [
    ("llama", None, {"labels": (3, 16)}),
    ("llama", "LlamaForSequenceClassification", {"labels": (3,)}),
    ("llama", "LlamaModel", {}),
    ("gpt2", "GPT2ForTokenClassification", {"labels": (3, 16)}),
    ("bert", "BertForMaskedLM", {"labels": (3, 16)}),
    ("bert", "BertForNextSentencePrediction", {"labels": (3,)}),
    ("bert", "BertForQuestionAnswering", {}),
    ("t5", None, {"labels": (3, 5)}),
    ("t5", "T5Model", {"decoder_input_ids": (3, 5)}),
    ("t5", "T5EncoderModel", {}),
]


@pytest.mark.parametrize(("family", "architecture", "shapes"), TASKS)
def test_every_task_gets_its_batch_and_runs(family, architecture, shapes):
    config = tiny_model(family, layers=3).config
    config.architectures = [architecture or type(tiny_model(family)).__name__]
    sizes = {"tokens": 16, "target_tokens": 5}
    workload = Question(config.model_type, 3, **sizes)
    batch = micro_step(workload, model_of_workload(workload, config).base)
    expected = {"input_ids": (3, 16), "attention_mask": (3, 16), **shapes}
    assert {name: tuple(value.shape) for name, value in batch.batch.items()} == expected
    assert (batch.loss is _mean_square) == ("labels" not in expected)
    forecast = hf_ckpt.predict(config, 3, device="cpu", **sizes)
    assert forecast.plan.model == config.architectures[0]
    assert forecast.tokens_per_second * forecast.step_seconds == pytest.approx(48)


# --- live models ------------------------------------------------------------------------------------------------------


def kinds_of(model):
    """For each block of the real model, which block of the shallow one stands for it."""
    likes = model_of_workload(Question("tiny", architecture=type(model).__name__), model.config).likes
    names = [*likes.values()]
    return [names.index(name) for name in names]


GEMMA = {"num_hidden_layers": 9, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_blocks_stand_for_blocks_of_their_kind():
    model = tiny_model("llama", layers=9)
    assert kinds_of(model) == [0, 1, 2, 2, 2, 2, 2, 2, 8]
    config = transformers.Gemma2Config(vocab_size=64, intermediate_size=64, sliding_window=8, **GEMMA)
    assert kinds_of(transformers.Gemma2ForCausalLM(config)) == [0, 1, 2, 3, 4, 3, 4, 3, 8]


def everything_about(model):
    """What a forecast must not change, in comparable form."""
    numbers = [(p.sum().item(), p.grad is not None and p.grad.sum().item()) for p in model.parameters()]
    return snapshot(model), numbers, model.config.to_dict(), torch.get_rng_state().tolist(), hf_ckpt.describe(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forecast_changes_nothing_of_a_live_model(family):
    """And the plan on the model changes nothing of the forecast."""
    model, calls, asked = tiny_model(family, layers=3, dropout=0.1), [], {"tokens": 16, "device": "h100"}
    plain = hf_ckpt.predict(model, 2, **asked).to_dict()
    hf_ckpt.install(model, {"policy": "selective", "rules": [{"layers": "1", "policy": "full"}]})
    enable(model)
    expected = step(model, tiny_batch(family))
    for module in find_blocks(model).modules.values():
        module.register_forward_hook(lambda *_: calls.append("forward"))
    before = everything_about(model)
    assert hf_ckpt.predict(model, 2, **asked).to_dict() == plain
    assert everything_about(model) == before
    assert not calls
    assert installation(model).enabled
    assert_same(expected, step(model, tiny_batch(family)))


class ReadsItsLogits(transformers.LlamaForCausalLM):
    """Reads a value, which fake tensors do not have."""

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if float(outputs.logits.detach().sum()) > 1e9:
            raise ValueError("too large")
        return outputs


def test_a_depth_that_the_config_computes_is_not_set():
    """ProphetNet's `num_hidden_layers` is a property that refuses to be set; the depths of its stacks are keys."""
    small = {"hidden_size": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64}
    config = transformers.ProphetNetConfig(num_encoder_layers=6, num_decoder_layers=7, **small)
    model = model_of_workload(Question("prophetnet", architecture="ProphetNetForConditionalGeneration"), config)
    assert depths_of(model) == [6, 7]
    encoder, decoder = (owner.config for owner in find_blocks(model.base).owners)
    assert (encoder.num_encoder_layers, decoder.num_decoder_layers) == (4, 4)


def one_frozen(model):
    """The model with one frozen weight."""
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    return model


def one_narrow(model):
    """The model with one block in another type."""
    model.model.layers[1].to(torch.bfloat16)
    return model


REFUSED = {
    "frozen": (
        one_frozen,
        r"^LlamaForCausalLM has [\d,]+ bytes of trainable parameters, but a model of its config, .* has \d",
    ),
    "two types": (one_narrow, " bytes of parameters, but a model of its config"),
    "some adapters": (lambda model: adapted(model, layers_to_transform=[1]), " parameters, but a model of its config"),
    "dora": (lambda model: adapted(model, use_dora=True), " parameters, but a model of its config"),
    "no LoRA": (
        lambda model: get_peft_model(model, IA3Config(task_type="CAUSAL_LM")),
        "parameters, but a model of its",
    ),
    "reads values": (lambda model: ReadsItsLogits(model.config), "how large its tensors are depends on their values"),
    "speech": (lambda model: transformers.Wav2Vec2ForCTC(SPEECH), "Wav2Vec2ForCTC takes input_values, and not text or"),
}
SPEECH = transformers.Wav2Vec2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def adapted(model, **how):
    """The model with LoRA on one kind of layers."""
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **how))


@pytest.mark.parametrize("name", REFUSED)
def test_live_models_that_cannot_be_planned_for_are_refused(name, monkeypatch):
    monkeypatch.setattr(transformers, "ReadsItsLogits", ReadsItsLogits, raising=False)
    change, said = REFUSED[name]
    with pytest.raises(HfCkptError, match=said) as raised:
        hf_ckpt.predict(change(tiny_model("llama")), tokens=16, device="h100")
    assert "work" in str(raised.value)


# --- accelerators -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_attention_with_dropout_keeps_no_weights_on_an_accelerator(device):
    """What blocks keep grows with the tokens; on a CPU also with their square, by the weights of attention."""
    config, fields = tiny_model("gpt2", layers=2, dropout=0.1).config, {"device": device, "budget": "1GiB"}
    forecasts = [hf_ckpt.predict(config, 2, tokens=tokens, **fields) for tokens in (128, 256, 384)]
    less, middle, most = (forecast.usual[0].peak_bytes for forecast in forecasts)
    weights = 2 * config.n_head * 2 * 128**2 * 2  # two sequences and two blocks, in bfloat16
    bend = most - 2 * middle + less
    assert bend == 0 if device == "h100" else bend > 2 * weights
