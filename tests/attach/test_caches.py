"""Key and value caches: recomputed blocks see none, nobody is warned of them, and configs stay as they are."""

from __future__ import annotations

import copy
import json
import logging
import warnings

import pytest
import torch
import transformers
from helpers.adapters import with_lora
from helpers.steps import assert_same, enable, outcome, step
from helpers.sweeping import step_of, trained
from transformers.utils import logging as transformers_logging

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model


@pytest.mark.compat
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_no_block_sees_a_cache(family):
    """The KV cache is written twice, and recomputed shapes differ."""
    model = tiny_model(family)
    expected = step(model, tiny_batch(family))
    seen = []

    def look(module, args, kwargs):
        seen.extend(value for value in (*args, *kwargs.values()) if compat.is_cache(value))

    for module in model.modules():
        if "Attention" in type(module).__name__:
            module.register_forward_pre_hook(look, with_kwargs=True)
    model.zero_grad()
    model(**tiny_batch(family), use_cache=True).loss.backward()
    assert seen  # without hf_ckpt there is a cache to see
    seen.clear()
    hf_ckpt.install(model)
    enable(model)
    for asked in ({}, {"use_cache": True}):
        model.zero_grad()
        loss = model(**tiny_batch(family), **asked).loss
        loss.backward()
        assert_same(expected, outcome(model, loss), str(asked))
    assert not seen
    assert set(hf_ckpt.describe(model).recomputed.values()) == {2}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_given_by_the_caller_is_not_written_twice(family):
    """Someone passes a cache of their own into a training step: planned blocks leave it alone."""
    model = tiny_model(family)
    expected = step(model, tiny_batch(family))
    hf_ckpt.install(model)
    enable(model)
    cache = transformers.DynamicCache()
    model.zero_grad()
    loss = model(**tiny_batch(family), past_key_values=cache, use_cache=True).loss
    loss.backward()
    assert_same(expected, outcome(model, loss))
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("model_type", ["diffusion_gemma", pytest.param("hrm_text", marks=pytest.mark.slow)])
def test_a_cache_of_the_model_itself_is_no_prefix(model_type):
    """The model around the stacks makes a cache, or its blocks only read one that another part has written."""
    model, batch, _ = trained(model_type)
    expected = step_of(model, batch)
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step_of(model, batch, plain=False))
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0


@pytest.mark.compat
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps_without_a_warning(family, wrapped, tmp_path, caplog, transformers_log):
    """`use_cache=True` is incompatible, every step; and the saved config keeps `use_cache=False`."""
    model = tiny_model(family, dropout=0.1)
    trained = with_lora(model, family, lora_dropout=0.0) if wrapped else model

    def two_steps(names):
        """What was said by Python's warnings and transformers' logger, each message as if for the first time."""
        transformers_logging.get_logger("transformers.any").warning_once.__func__.cache_clear()
        transformers_log.clear()
        optimizer = torch.optim.SGD([parameter for parameter in trained.parameters() if parameter.requires_grad])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in names:
                getattr(trained, name)({"policy": "full"})
            for _ in range(2):
                trained(**tiny_batch(family)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [str(warning.message) for warning in caught], [record.getMessage() for record in transformers_log]

    assert two_steps(()) == ([], [])  # without hf_ckpt; transformers also completes BERT's config here
    config, generation = model.config.to_dict(), copy.deepcopy(getattr(model, "generation_config", None))
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        hf_ckpt.install(trained)
        assert two_steps(compat.ENABLE_NAMES) == ([], [])
    assert not [record for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert set(hf_ckpt.describe(trained).recomputed.values()) == {2}
    assert model.config.to_dict() == config
    assert getattr(model, "generation_config", None) == generation
    if not wrapped:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        assert saved.get("use_cache", True) is True
        assert not [key for key in saved if "checkpoint" in key or "hf_ckpt" in key]
