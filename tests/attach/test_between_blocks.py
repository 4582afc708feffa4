"""What blocks pass to each other and to the user: position biases, hidden states, attentions, and caches.

Planned blocks get no cache, filled ones are refused, and generation in train mode uses its own.
"""

import copy
import warnings

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.custom import CustomConfig, CustomModel, steps_of
from helpers.steps import ENGINES, assert_same, cache_argument, outcome, planned, recomputed, step, without_cache
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model


@pytest.mark.trap(22)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_hidden_states_and_attentions_in_the_loss(family):
    """They keep their order, values and gradients."""
    model, batch = tiny_model(family, dropout=0.1, attention="eager"), tiny_batch(family)
    plain = step(model, batch)
    encoder_decoder = family == "t5"
    states_of = ["encoder_hidden_states", "decoder_hidden_states"] if encoder_decoder else ["hidden_states"]
    weights_of = ["decoder_attentions", "cross_attentions"] if encoder_decoder else ["attentions"]

    def run():
        model.zero_grad()
        torch.manual_seed(7)
        out = model(**without_cache(model, batch), output_hidden_states=True, output_attentions=True)
        states = [state for name in states_of for state in out[name]]
        weights = [weight for name in weights_of for weight in out[name]]
        loss = out.loss + states[2].square().mean() + states[-2].sin().mean() + weights[1].square().sum()
        loss.backward()
        return outcome(model, loss) | {str(n): value.detach() for n, value in enumerate((*states, *weights))}

    expected = run()
    assert len(expected) - len(plain) == (10 + 8 if encoder_decoder else 5 + 4)
    with pytest.raises(AssertionError, match="differs"):  # they affect the loss
        assert_same({**expected, **plain}, expected)
    planned(model)
    assert_same(expected, run())
    assert set(hf_ckpt.describe(model).recomputed.values()) == {1}


# --- caches -----------------------------------------------------------------------------------------------------------

SPECS = {
    **{name: ENGINES[name] for name in ("full", "selective")},
    "rules": {"policy": "none", "rules": [{"layers": "1", "policy": "full"}, {"layers": "2", "policy": "selective"}]},
}
each_spec = pytest.mark.parametrize("spec", SPECS)


def filled_by(model, batch):
    """A cache that the model has filled from a batch."""
    names = ["input_ids", "decoder_input_ids"][: 1 + model.config.is_encoder_decoder]
    with torch.no_grad():
        out = model.eval()(**dict.fromkeys(names, batch["input_ids"]), use_cache=True)
    return out[cache_argument(model.train())]


def trained_with(model, batch, name, cache):
    """Loss and gradients of a step that gets a cache by `name` or by position."""
    model.zero_grad()
    args, kwargs = (), {**batch, name: cache, "use_cache": True}
    if name == "by position":
        kwargs[cache_argument(model)] = kwargs.pop(name)
        names = compat.transformers.forward_parameters(model)
        last = max(names.index(each) for each in (cache_argument(model), "use_cache"))
        args = [kwargs.pop(each, None) for each in names[: last + 1]]
    loss = model(*args, **kwargs).loss
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
    filled = filled_by(model, batch)
    planned(model, SPECS[spec])
    accepts = compat.transformers.BLOCKS_TAKE_CACHES and spec == "selective"
    for name in ("cache", "past_key_values", "by position"):
        if accepts:
            with hf_ckpt.paused(model):
                plain = trained_with(model, batch, name, copy.deepcopy(filled))
            assert_same(plain, trained_with(model, batch, name, copy.deepcopy(filled)), name)
        else:
            with pytest.raises(HfCkptError, match=r"was given \w+=\w+Cache, a cache that is not empty"):
                trained_with(model, batch, name, filled)
        if name == "cache" != cache_argument(model):
            continue  # older transformers lack the new name
        caches = [transformers.DynamicCache() for _ in range(2)]
        cache = transformers.EncoderDecoderCache(*caches) if family == "t5" else caches[0]
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
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_no_warning_about_use_cache(family, wrapped, caplog, transformers_log):
    """Two steps cause no warning about `use_cache`, and the config that is saved does not change."""
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
    assert not [record.getMessage() for record in (*transformers_log, *caplog.records)]
    assert set(hf_ckpt.describe(trained).recomputed.values()) == {2}
    assert model.config.to_dict() == config
    assert getattr(model, "generation_config", None) == generation


@pytest.mark.trap(7)
@pytest.mark.compat
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_generate_in_train_mode_gives_the_same_tokens(family, dropout):
    """generate() in train mode gives the same tokens with checkpointing enabled, because blocks keep their cache."""
    model = tiny_model(family, dropout=dropout)
    prompt = {"input_ids": tiny_batch(family)["input_ids"][:, :5]}
    keys = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}

    def logits():  # tokens could agree by chance
        torch.manual_seed(7)
        return torch.stack(model.generate(**prompt, **keys, output_logits=True, return_dict_in_generate=True).logits)

    expected = logits()
    planned(model)
    assert torch.equal(expected, logits())
    with hf_ckpt.paused(model):
        assert torch.equal(expected, logits())
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0
    step(model, tiny_batch(family))
    assert len(recomputed(model)) == len(hf_ckpt.describe(model).plan.actions)
