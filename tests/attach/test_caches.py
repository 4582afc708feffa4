"""Caches: planned blocks get none, filled ones are refused, and generation in train mode uses its own."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.custom import CustomConfig, CustomModel, steps_of
from helpers.steps import assert_same, cache_argument, enable, outcome, recomputed, step
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

CONFIGS = {
    "gpt2": {"n_layer": 3, "n_embd": 16, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3": {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1},
    "t5": {"num_layers": 3, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "dropout_rate": 0.0},
}
"""Model type -> a config with three blocks per stack."""
SPECS = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "rules": {"policy": "none", "rules": [{"layers": "1", "policy": "full"}, {"layers": "2", "policy": "selective"}]},
}
each_spec = pytest.mark.parametrize("spec", SPECS)


def decoder(model_type):
    """A random model in train mode, and a batch."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type], **tokens, vocab_size=64)
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if model_type == "t5" else transformers.AutoModelForCausalLM
    ids = torch.randint(3, 64, (2, 6))
    return auto.from_config(config, attn_implementation="eager").train(), {"input_ids": ids, "labels": ids}


def filled_by(model, batch):
    """A cache that the model has filled from a batch."""
    ids = {"input_ids": batch["input_ids"]}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = batch["labels"]
    with torch.no_grad():
        return model.eval()(**ids, use_cache=True)[cache_argument(model.train())]


def trained_with(model, batch, name, cache):
    """Loss and gradients of a step that gets a cache by `name` or by position."""
    model.zero_grad()
    if name == "its place":
        taken = compat.transformers.forward_parameters(model)
        upto = taken[: max(taken.index(each) for each in (cache_argument(model), "use_cache")) + 1]
        placed = {**batch, cache_argument(model): cache, "use_cache": True}
        rest = {key: value for key, value in batch.items() if key not in upto}
        loss = model(*(placed.get(each) for each in upto), **rest).loss
    else:
        loss = model(**batch, **{name: cache, "use_cache": True}).loss
    loss.backward()
    return outcome(model, loss)


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@each_spec
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_cache_of_the_caller_is_left_out_or_refused(model_type, spec):
    """A caller's empty cache is ignored, a filled one is refused, under the old and the new name of the argument.

    Blocks of known code take a filled one under `selective`. transformers 5.24 renames `past_key_values`.
    """
    model, batch = decoder(model_type)
    expected = step(model, batch)
    filled, empty = filled_by(model, batch), transformers.DynamicCache
    hf_ckpt.install(model, SPECS[spec])
    enable(model)
    known = hf_ckpt.find_blocks(model).family != "generic"
    accepts = compat.transformers.BLOCKS_TAKE_CACHES and spec == "selective" and known
    for name in ("cache", "past_key_values", "its place"):
        if accepts:
            with hf_ckpt.paused(model):
                plain = trained_with(model, batch, name, copy.deepcopy(filled))
            assert_same(plain, trained_with(model, batch, name, copy.deepcopy(filled)), name)
        else:
            with pytest.raises(HfCkptError, match=r"was given \w+=\w+Cache, a cache that is not empty"):
                trained_with(model, batch, name, filled)
        if name == "cache" != cache_argument(model):
            continue  # older transformers lack the new name
        cache = transformers.EncoderDecoderCache(empty(), empty()) if model_type == "t5" else empty()
        before = len(recomputed(model))
        for _ in range(2):
            assert_same(expected, trained_with(model, batch, name, cache), name)
            assert not compat.transformers.is_filled(cache)
        assert len(recomputed(model)) >= before + 2


class MakesACache(CustomModel):
    """Code from the hub: its name for the cache, `shift`, is unknown to transformers' layer."""

    def forward(self, hidden_states, shift):
        return super().forward(hidden_states, transformers.DynamicCache())


def attends(block, hidden, cache):
    keys, values = block.one(hidden)[:, None], block.two(hidden)[:, None]
    if cache is not None:
        keys, values = cache.update(keys, values, block.index)
    return block.norm(torch.nn.functional.scaled_dot_product_attention(hidden[:, None], keys, values)[:, 0])


@pytest.mark.compat
@each_spec
def test_blocks_get_no_cache_under_any_name(spec):
    """Blocks get no cache under any argument name: a recomputed block would write to it twice."""
    torch.manual_seed(0)
    model = MakesACache(CustomConfig()).train()
    for index, layer in enumerate(model.layers):
        layer.index, layer.work = index, attends
    expected = steps_of(model, 2)
    hf_ckpt.install(model, SPECS[spec])
    enable(model)
    for one, other in zip(expected, steps_of(model, 2), strict=True):
        assert_same(one, other)
    assert len(recomputed(model)) >= 2


def test_a_cache_of_the_model_itself_is_no_prefix():
    """A cache that the model itself creates, and that blocks only read, does not count as filled by the caller."""
    small = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}
    small |= {"num_attention_heads": 2, "head_dim": 8}
    text = {**small, "vocab_size": 320, "num_key_value_heads": 1}
    text |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    keys = {"text_config": text, "vision_config": small}
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("diffusion_gemma", **keys)).train()

    def run():
        model.zero_grad()
        torch.manual_seed(3)  # it draws tokens to denoise
        loss = model(input_ids=tiny_batch("llama")["input_ids"]).last_hidden_state.sigmoid().mean()
        loss.backward()
        return outcome(model, loss)

    expected = run()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, run())
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0


@pytest.mark.compat
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_without_a_warning(family, wrapped, tmp_path, caplog, transformers_log):
    """Two steps cause no warning about `use_cache`, and the saved config does not change."""
    model = tiny_model(family, dropout=0.1)
    trained = with_lora(model, family, lora_dropout=0.0) if wrapped else model

    def two_steps():
        """Messages of Python's warnings and transformers' logger, including those given once per process."""
        transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
        transformers_log.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                trained(**tiny_batch(family)).loss.backward()
        return [str(warning.message) for warning in caught], [record.getMessage() for record in transformers_log]

    assert two_steps() == ([], [])  # without hf_ckpt; transformers also completes BERT's config
    config, generation = model.config.to_dict(), copy.deepcopy(getattr(model, "generation_config", None))
    hf_ckpt.install(trained)
    for name in compat.transformers.ENABLE_NAMES:
        getattr(trained, name)({"policy": "full"})
    assert two_steps() == ([], [])
    assert not [record for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert set(hf_ckpt.describe(trained).recomputed.values()) == {2}
    assert model.config.to_dict() == config
    assert getattr(model, "generation_config", None) == generation
    if not wrapped:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert saved.get("use_cache", True) is True
        assert not [key for key in saved if "checkpoint" in key or "hf_ckpt" in key]


@pytest.mark.compat
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_generate_in_train_mode_gives_the_same_tokens(family, dropout):
    """generate() in train mode gives the same tokens with checkpointing enabled, because blocks keep their cache."""
    model = tiny_model(family, dropout=dropout)
    prompt = {"input_ids": tiny_batch(family)["input_ids"][:, :5]}
    keys = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}

    def tokens_and_logits():
        torch.manual_seed(7)
        done = model.generate(**prompt, **keys, output_logits=True, return_dict_in_generate=True)
        return done.sequences, torch.stack(done.logits)

    sequences, logits = tokens_and_logits()
    hf_ckpt.install(model)
    enable(model)
    got_sequences, got_logits = tokens_and_logits()
    assert torch.equal(sequences, got_sequences)
    assert torch.equal(logits, got_logits)  # tokens could agree by chance
    with hf_ckpt.paused(model):
        assert torch.equal(sequences, tokens_and_logits()[0])
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
    step(model, tiny_batch(family))
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)
