"""Shallow models on fake tensors: they describe the model of a config, and change nothing of a live one."""

import collections
import contextlib
import math
import types

import peft
import pytest
import torch
import transformers
from helpers.snapshots import snapshot
from helpers.sparing import sparing
from helpers.steps import assert_same, planned, step
from helpers.tables import keyed, table
from torch._subclasses.fake_tensor import FakeTensor

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast import run
from hf_ckpt.forecast.batches import mean_square, micro_step
from hf_ckpt.forecast.devices import device_named
from hf_ckpt.forecast.model import load_config, nbytes, shallow_model
from hf_ckpt.forecast.question import PRESETS, Question
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat
ROWS = table(__file__, "models.yaml")


def depths_of(model):
    """For each stack of the real model, its number of blocks."""
    return [*collections.Counter(block.stack for block in model.likes).values()]


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS["presets"])
def test_presets_have_their_known_sizes_and_need_no_memory(name):
    millions, depths = ROWS["presets"][name]
    with LiveBytes(device="cpu") as live:
        model = shallow_model(Question(name))
    assert live.peak_bytes <= 2**20
    elements = sum(math.prod(shape) for shape, *_ in model.tensors)
    assert [type(model.base).__name__] == load_config(name).architectures
    assert elements == pytest.approx(millions * 1e6, rel=0.01)
    assert nbytes(model.tensors) == 2 * elements  # bfloat16
    assert depths_of(model) == depths
    assert all(isinstance(parameter.data, FakeTensor) for parameter in model.base.parameters())
    assert len(find_blocks(model.base).blocks) == 4 * len(depths)


def test_a_config_that_names_no_class_is_that_of_a_causal_lm():
    """Also one without SDPA, such as BLOOM."""
    config = transformers.BloomConfig(n_layer=2, n_head=2, hidden_size=16, vocab_size=32)
    model = shallow_model(Question("bloom"), config).base
    assert (type(model).__name__, model.config._attn_implementation) == ("BloomForCausalLM", "eager")
    vit = transformers.ViTConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1)
    with pytest.raises(HfCkptError, match="vit cannot be made from its config, which names no class: give its `arch"):
        shallow_model(Question("vit"), vit)
    assert shallow_model(Question("vit", architecture="ViTForImageClassification"), vit)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": null}', '{"model_type": "no such type"}', "\x00"])
def test_files_that_are_no_configs_are_refused_by_name(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    for name in (str(path), str(tmp_path / "empty"), "no such model!", ""):
        with pytest.raises(HfCkptError, match=r"cannot read a model's config from") as raised:
            load_config(name)
        assert ", ".join(PRESETS) in str(raised.value)


@pytest.mark.parametrize(*keyed(ROWS["quantised"], "method", "bits", "fields", "said"))
def test_a_checkpoint_that_is_quantised_is_planned_as_it_is_or_refused(method, bits, fields, said):
    """Its config has a dict, or an object of transformers."""
    config = tiny_model("llama", layers=2).config
    config.architectures = ["LlamaForCausalLM"]
    keys = {"quant_method": method, **bits}
    for form in (keys, types.SimpleNamespace(to_dict=lambda: keys)):
        config.quantization_config = form
        with pytest.raises(HfCkptError, match=said) if said else contextlib.nullcontext():
            assert hf_ckpt.predict(config, tokens=16, device="t4", **fields).plan.model == "LlamaForCausalLM"


# --- batches ----------------------------------------------------------------------------------------------------------


TASKS = [tuple(row) for row in ROWS["tasks"]]
QUICK = ("LlamaForSequenceClassification", "BertForQuestionAnswering", "T5ForConditionalGeneration")


@sparing("family, architecture, shapes", TASKS, *(row for row in TASKS if row[1] in QUICK))
def test_every_task_gets_its_batch_and_runs(family, architecture, shapes):
    config = tiny_model(family, layers=3).config
    config.architectures = [architecture]
    sizes = {"tokens": 16, "target_tokens": 5}
    training = Question(config.model_type, 3, **sizes)
    batch = micro_step(training, shallow_model(training, config).base)
    expected = {"input_ids": [3, 16], "attention_mask": [3, 16], **shapes}
    assert {name: [*value.shape] for name, value in batch.batch.items()} == expected
    assert (batch.loss is mean_square) == ("labels" not in expected)
    forecast = hf_ckpt.predict(config, 3, device="cpu", **sizes)
    assert forecast.plan.model == architecture
    assert forecast.tokens_per_second * forecast.step_seconds == pytest.approx(48)


WIDE = {"num_hidden_layers": 4, "num_attention_heads": 4, "attn_implementation": "sdpa"}
SIDES = ("encoder", "decoder")
OF_SPEECH = {f"{side}_{name}": size for side in SIDES for name, size in (("layers", 4), ("ffn_dim", 128))}
OF_SPEECH |= {f"{side}_attention_heads": 4 for side in SIDES} | dict.fromkeys(("bos_token_id", "eos_token_id"), 1)
OF_SPEECH |= {"max_source_positions": 100, "num_mel_bins": 16, "pad_token_id": 0, "decoder_start_token_id": 1}
CONVOLUTIONS = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
OF_SOUND = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 40, "layerdrop": 0.1, **CONVOLUTIONS, **WIDE}
SOUND = transformers.Wav2Vec2Config(**OF_SOUND)


def samples_and_text(ids):
    return {"input_values": torch.randn(2, 16_000), "labels": ids[:, 0] % 30 + 1}


OTHERS = {
    "BertForMultipleChoice": (
        transformers.BertConfig(hidden_size=64, intermediate_size=128, vocab_size=100, **WIDE),
        lambda ids: {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0, 0] % 4},
    ),
    "Wav2Vec2ForCTC": (SOUND, samples_and_text),
    "HubertForCTC": (transformers.HubertConfig(**OF_SOUND), samples_and_text),
    "WavLMForCTC": (transformers.WavLMConfig(**{**OF_SOUND, "attn_implementation": "eager"}), samples_and_text),
    "Wav2Vec2ForSequenceClassification": (
        SOUND,
        lambda ids: {"input_values": torch.randn(2, 16_000), "labels": ids[:, 0, 0] % 2},
    ),
    "WhisperForConditionalGeneration": (
        transformers.WhisperConfig(vocab_size=100, d_model=64, **OF_SPEECH, attn_implementation="sdpa"),
        lambda ids: {"input_features": torch.randn(2, 16, 200), "labels": ids[:, 0], "use_cache": False},
    ),
}


@sparing("architecture", OTHERS, "BertForMultipleChoice", "HubertForCTC")
def test_multiple_choice_and_speech_need_what_is_predicted(architecture):
    """Four sequences of 32 tokens for a label; recordings of 200 frames or 16,000 samples, and 32 tokens of text.

    Layers are not dropped, and recordings not masked at random.
    """
    if architecture.startswith("Whisper") and not hasattr(
        transformers.PreTrainedModel, "activation_checkpointing_enable"
    ):
        pytest.skip("with older transformers, Whisper is refused by name before a run")
    config, batch_of = OTHERS[architecture]
    batch = batch_of(torch.randint(3, 90, (2, 4, 32)))
    asked = {"device": "cpu", "budget": "8GiB", "optimizer": "sgd", "dtype": "float32", "tokens": 32}
    if "input_values" in batch:
        asked["seconds"] = 1
    model = getattr(transformers, architecture)(config).train()
    for module in model.modules():  # what a forecast turns off
        settings = getattr(module, "config", None)
        if hasattr(settings, "apply_spec_augment"):
            settings.apply_spec_augment, settings.layerdrop = False, 0.0
    forecast = hf_ckpt.predict(config, 2, architecture=architecture, **asked)
    optimizer = torch.optim.SGD(model.parameters())
    for policy, row in zip(("none", "full"), forecast.usual, strict=True):
        planned(model, {"policy": policy, "check_every": 0})
        for _ in range(2):
            with LiveBytes(model, optimizer, batch) as live:
                model(**batch).loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        assert row.peak_bytes == pytest.approx(live.peak_bytes, rel=0.005)


# --- live models ------------------------------------------------------------------------------------------------------


def kinds_of(model):
    """For each block of the real model, which block of the shallow one stands for it."""
    likes = shallow_model(Question("tiny", architecture=type(model).__name__), model.config).likes
    names = [*likes.values()]
    return [names.index(name) for name in names]


GEMMA = {"num_hidden_layers": 9, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_blocks_stand_for_blocks_of_their_kind():
    model = tiny_model("llama", layers=9)
    assert kinds_of(model) == [0, 1, 2, 2, 2, 2, 2, 2, 8]
    config = transformers.Gemma2Config(vocab_size=64, intermediate_size=64, sliding_window=8, **GEMMA)
    assert kinds_of(transformers.Gemma2ForCausalLM(config)) == [0, 1, 2, 3, 4, 3, 4, 3, 8]


@pytest.mark.long
@pytest.mark.parametrize(("name", "tried"), [("t5-small", 5), ("mini-llama", 2)])
def test_actions_that_one_block_of_each_kind_tries_cost_what_all_blocks_show(name, tried, monkeypatch):
    """T5's last decoder block tries them, too: it adds no gradient to that of the position bias."""
    training = Question(model=name, tokens=32, lora=4, autocast="bfloat16", dtype="float32", device="a10")

    def costs():
        return run.costs_of_model(shallow_model(training), run.inputs_of(training, device_named("a10")))

    few = costs()
    shown_by = run._shown_by
    names = []

    def all_blocks(model, step):
        names.append(len({*shown_by(model, step).values()}))
        return {call.name[0]: call.name[0] for call in step.calls}

    monkeypatch.setattr(run, "_shown_by", all_blocks)
    every = costs()
    assert few.calls == every.calls
    assert names == [tried]


def everything_about(model):
    """What a forecast must not change, in comparable form."""
    numbers = [(p.sum().item(), p.grad is not None and p.grad.sum().item()) for p in model.parameters()]
    return snapshot(model), numbers, model.config.to_dict(), torch.get_rng_state().tolist(), hf_ckpt.describe(model)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_forecast_changes_nothing_of_a_live_model(family):
    """And the plan on the model changes nothing of the forecast."""
    model, calls = tiny_model(family, layers=3, dropout=0.1), []
    asked = {"tokens": 16, "device": "h100"}
    plain = hf_ckpt.predict(model, 2, **asked).to_dict()
    planned(model, {"policy": "selective", "rules": [{"layers": "1", "policy": "full"}]})
    expected = step(model, tiny_batch(family))
    for module in find_blocks(model).modules.values():
        module.register_forward_hook(lambda *_: calls.append("forward"))
    before = everything_about(model)
    assert hf_ckpt.predict(model, 2, **asked).to_dict() == plain
    assert everything_about(model) == before
    assert not calls
    assert installation(model).enabled
    assert_same(expected, step(model, tiny_batch(family)))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_live_model_and_its_config_have_one_answer(family):
    model = tiny_model(family, layers=5)
    asked = {"tokens": 16, "device": "a10", "budget": "1GiB"}
    fields = {"dtype": "float32", "architecture": type(model).__name__}
    fields["attention"] = model.config._attn_implementation
    found, same = hf_ckpt.predict(model, 2, **asked), hf_ckpt.predict(model.config, 2, **asked, **fields)
    assert (found.rows, found.parts, found.frontier) == (same.rows, same.parts, same.frontier)


def frozen(model):
    """The first blocks and what is before them are frozen: they keep nothing."""
    for part in (model.model.embed_tokens, *model.model.layers[:5]):
        part.requires_grad_(False)
    return model


def adapted(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[5, 6]))


@pytest.mark.parametrize("change", [frozen, adapted, lambda model: model.to(torch.bfloat16)])
def test_what_is_frozen_adapted_or_cast_in_a_live_model_is_read_from_it(change):
    """Predicted and counted peaks are equal, and the plan is one for that model."""
    model = tiny_model("llama", layers=8)
    model.set_attn_implementation("sdpa")
    model = change(model)
    forecast = hf_ckpt.predict(model, 4, tokens=64, device="cpu", optimizer="sgd", budget="1GiB")
    assert forecast.parts["weights"] == sum(parameter.nbytes for parameter in model.parameters())
    batch = tiny_batch("llama", batch=4, tokens=64)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    none, full = (row.peak_bytes for row in forecast.usual)
    for policy, predicted in (("none", none), ("full", full)):
        planned(model, {"policy": policy, "check_every": 0})
        for _ in range(2):
            with LiveBytes(model, optimizer, batch) as live:
                model(**batch, use_cache=False).loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        assert predicted == pytest.approx(live.peak_bytes, rel=0.01)
    assert full <= none


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 8])
def test_a_live_model_with_a_quantised_base_is_planned_as_its_options(bits, tmp_path):
    pytest.importorskip("bitsandbytes")  # of the extra `test`, which the oldest releases are tested without
    tiny_model("llama").save_pretrained(tmp_path)
    of_bits = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    option = {f"load_in_{bits}bit": True}
    config = transformers.BitsAndBytesConfig(**option, **of_bits)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=config)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    asked = {"tokens": 32, "device": "a10", "budget": "1GiB"}
    attention = model.config._attn_implementation
    live = hf_ckpt.predict(model, 2, **asked)
    same = hf_ckpt.predict(str(tmp_path), 2, **asked, **option, lora=4, attention=attention)
    assert (live.rows, live.parts) == (same.rows, same.parts)


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
    model = shallow_model(Question("prophetnet", architecture="ProphetNetForConditionalGeneration"), config)
    assert depths_of(model) == [6, 7]
    encoder, decoder = (runner.config for runner in find_blocks(model.base).runners.values())
    assert (encoder.num_encoder_layers, decoder.num_decoder_layers) == (4, 4)


REFUSED = {
    "ReadsItsLogits": (tiny_model("llama").config, {}, "how large its tensors are depends on their values"),
    "Wav2Vec2ForCTC": (SOUND, {}, r"Wav2Vec2ForCTC takes recordings: give their length \(seconds\)"),
    "ASTForAudioClassification": (transformers.ASTConfig(), {}, "takes input_values, and not text, images or sound"),
    "WhisperForConditionalGeneration": (
        transformers.WhisperConfig(),
        {"seconds": 31},
        "30 seconds, but 31 are asked for",
    ),
    "LlamaForCausalLM": (tiny_model("llama").config, {"seconds": 2}, "LlamaForCausalLM takes no recordings"),
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_models_that_cannot_be_planned_for_are_refused(architecture, monkeypatch):
    monkeypatch.setattr(transformers, "ReadsItsLogits", ReadsItsLogits, raising=False)
    config, asked, said = REFUSED[architecture]
    with pytest.raises(HfCkptError, match=said) as raised:
        hf_ckpt.predict(config, tokens=16, device="h100", architecture=architecture, **asked)
    assert asked or "give" in str(raised.value) or "work" in str(raised.value)


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
