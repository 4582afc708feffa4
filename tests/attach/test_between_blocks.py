"""What blocks pass to each other and to the user: position biases, hidden states, attentions, and caches.

Planned blocks get no cache, filled ones are refused, and generation in train mode uses its own.
"""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.custom import CustomConfig, CustomModel, steps_of
from helpers.steps import assert_same, cache_argument, outcome, planned, recomputed, step, without_cache
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model


@pytest.mark.trap(21)
@pytest.mark.parametrize("layers", [{"decoder": "1-3"}, {"encoder": "1-3"}, {"encoder": "0"}], ids=str)
def test_the_shared_position_bias_crosses_the_plan(layers):
    """Block 0 returns the position bias and others add it: its gradient passes through planned and kept blocks."""
    model, batch = tiny_model("t5", dropout=0.1), tiny_batch("t5")
    expected = step(model, batch)
    assert all(gradient.any() for name, gradient in expected.items() if "relative_attention_bias" in name)
    planned(model, {"layers": layers})
    # Attention modules inside the blocks carry the flag, too.
    assert {type(m).__name__ for m in model.modules() if getattr(m, "gradient_checkpointing", False)} == {"T5Block"}
    assert_same(expected, step(model, batch))
    assert {name.partition(".")[0] for name in recomputed(model)} == set(layers)


@pytest.mark.trap(22)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_attentions_in_the_loss(family):
    """They keep their order, values and gradients."""
    model, batch = tiny_model(family, dropout=0.1, attention="eager"), tiny_batch(family)
    plain = step(model, batch)

    def run():
        model.zero_grad()
        torch.manual_seed(7)
        out = model(**without_cache(model, batch), output_hidden_states=True, output_attentions=True)
        names = ("encoder_hidden_states", "decoder_hidden_states") if family == "t5" else ("hidden_states",)
        states = [state for name in names for state in out[name]]
        weights = (*out.decoder_attentions, *out.cross_attentions) if family == "t5" else out.attentions
        loss = out.loss + states[2].square().mean() + states[-2].sin().mean() + weights[1].square().sum()
        loss.backward()
        found = {str(number): value.detach() for number, value in enumerate((*states, *weights))}
        return {**outcome(model, loss), **found}

    expected = run()
    assert len(expected) - len(plain) == (10 + 8 if family == "t5" else 5 + 4)
    with pytest.raises(AssertionError, match="differs"):  # they affect the loss
        assert_same({**expected, **plain}, expected)
    planned(model)
    assert_same(expected, run())
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


# --- caches -----------------------------------------------------------------------------------------------------------

SPECS = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "rules": {"policy": "none", "rules": [{"layers": "1", "policy": "full"}, {"layers": "2", "policy": "selective"}]},
}
each_spec = pytest.mark.parametrize("spec", SPECS)


def filled_by(model, batch):
    """A cache that the model has filled from a batch."""
    ids = {"input_ids": batch["input_ids"]}
    if model.config.is_encoder_decoder:
        ids["decoder_input_ids"] = ids["input_ids"]
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


@pytest.mark.trap(43)
@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@each_spec
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_a_cache_of_the_caller_is_left_out_or_refused(family, spec):
    """A caller's empty cache is ignored, a filled one is refused, under the old and the new name of the argument.

    Blocks take a filled one under `selective`. transformers 5.24 renames `past_key_values`.
    """
    model = tiny_model(family, attention="eager")
    ids = tiny_batch("llama")["input_ids"]
    batch = {"input_ids": ids, "labels": ids}
    expected = step(model, batch)
    filled, empty = filled_by(model, batch), transformers.DynamicCache
    planned(model, SPECS[spec])
    accepts = compat.transformers.BLOCKS_TAKE_CACHES and spec == "selective"
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
        cache = transformers.EncoderDecoderCache(empty(), empty()) if family == "t5" else empty()
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


@pytest.mark.trap(10)
@pytest.mark.compat
@each_spec
def test_blocks_get_no_cache_under_any_name(spec):
    """Blocks get no cache under any argument name: a recomputed block would write to it twice."""
    torch.manual_seed(0)
    model = MakesACache(CustomConfig()).train()
    for index, layer in enumerate(model.layers):
        layer.index, layer.work = index, attends
    expected = steps_of(model, 2)
    planned(model, SPECS[spec])
    for one, other in zip(expected, steps_of(model, 2), strict=True):
        assert_same(one, other)
    assert len(recomputed(model)) >= 2


@pytest.mark.trap(39)
def test_a_cache_of_the_model_itself_is_no_prefix():
    """A cache that the model itself creates, and that blocks only read, does not count as filled by the caller."""
    small = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}
    small |= {"num_attention_heads": 2, "head_dim": 8}
    text = {**small, "vocab_size": 320, "num_key_value_heads": 1}
    text |= {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    config = transformers.AutoConfig.for_model("diffusion_gemma", text_config=text, vision_config=small)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).train()

    def run():
        model.zero_grad()
        torch.manual_seed(3)  # it draws tokens to denoise
        loss = model(input_ids=tiny_batch("llama")["input_ids"]).last_hidden_state.sigmoid().mean()
        loss.backward()
        return outcome(model, loss)

    expected = run()
    planned(model)
    assert_same(expected, run())
    assert len(recomputed(model)) > 0


@pytest.mark.trap(25)
@pytest.mark.compat
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_warning_about_use_cache(family, wrapped, tmp_path, caplog, transformers_log):
    """Two steps cause no warning about `use_cache`, and the saved config does not change."""
    model = tiny_model(family, dropout=0.1)
    trained = with_lora(model, family, lora_dropout=0.0) if wrapped else model

    trained(**tiny_batch(family))  # transformers completes BERT's config
    config, generation = model.config.to_dict(), copy.deepcopy(getattr(model, "generation_config", None))
    transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
    transformers_log.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        planned(trained)
        for _ in range(2):
            trained(**tiny_batch(family)).loss.backward()
    assert not [str(warning.message) for warning in caught]
    said = [record for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert not [record.getMessage() for record in (*transformers_log, *said)]
    assert set(hf_ckpt.describe(trained).recomputed.values()) == {2}
    assert model.config.to_dict() == config
    assert getattr(model, "generation_config", None) == generation
    if not wrapped:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert saved.get("use_cache", True) is True
        assert not [key for key in saved if "checkpoint" in key or "hf_ckpt" in key]


@pytest.mark.trap(7)
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
    planned(model)
    got_sequences, got_logits = tokens_and_logits()
    assert torch.equal(sequences, got_sequences)
    assert torch.equal(logits, got_logits)  # tokens could agree by chance
    with hf_ckpt.paused(model):
        assert torch.equal(sequences, tokens_and_logits()[0])
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
    step(model, tiny_batch(family))
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)
