"""Feed-forwards in chunks: equal gradients up to rounding, no extra runs, no extra memory."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.adapters import with_lora
from helpers.experts import experts
from helpers.heads import copy_for_a_thread
from helpers.others import other_model
from helpers.snapshots import snapshot
from helpers.sparing import sparing
from helpers.steps import (
    ROUNDING_16,
    assert_frees_everything,
    assert_near,
    assert_same,
    enable,
    outcome,
    step,
    without_cache,
)
from helpers.tiles import CHUNK, by_hand, calls, counted_tokens, on, owners

import hf_ckpt
from hf_ckpt.engines.tiles import AUTO_LEAST, AUTO_MOST, AUTO_MOST_FROZEN, tokens_per_tile
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import FAMILIES as TINY
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")

LAYERS = 2
SPECS = {
    "none": {"policy": "none"},
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "attention": {"policy": "selective", "save": ["attention"]},
    "offload": {"policy": "offload"},
    "mixed": {"rules": [{"layers": "0", "policy": "full"}, {"layers": "1", "policy": "selective"}]},
    "segments": {"segments": 1},
}


def model_of(family, **options):
    return tiny_model(family, layers=LAYERS, **options)


def batch_of(family):
    """Blocks see 46 tokens, and 92 in T5's encoder, so that the last chunk is shorter than the others."""
    return tiny_batch(family, batch=2, tokens=46 if family == "t5" else 23)


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("family", TINY)
def test_gradients_are_those_of_the_whole_up_to_rounding(family):
    """Under every action, gradients with chunks are those of whole feed-forwards up to rounding.

    With dropout, all actions give bit-equal gradients.
    """
    whole, drawn = step(model_of(family), batch_of(family)), None
    for name, spec in SPECS.items():
        model = on(model_of(family), **spec)
        assert_near(whole, step(model, batch_of(family)))
        planned = hf_ckpt.describe(model)
        assert all(planned.recomputed.values())
        assert len(planned.recomputed) == (0 if name == "none" else len(owners(model)))
        assert planned.chunked_mlps >= len(owners(model))
        found = step(on(model_of(family, dropout=0.1), **spec), batch_of(family))
        drawn = drawn or found
        assert_same(drawn, found, name)


@sparing(("family", "lora"), [(f, lora) for f in TINY for lora in (False, True)], ("gpt2", False), ("llama", True))
def test_backward_draws_what_the_forward_drew(family, lora):
    """With dropout in the feed-forward and its adapters, backward repeats the forward's draws."""
    model = model_of(family, dropout=0.2)
    model = with_lora(model, family, lora_dropout=0.3) if lora else model
    with by_hand(model):
        expected = step(model, batch_of(family))
    for spec in (SPECS["none"], SPECS["full"], SPECS["selective"]):
        got = step(on(model, **spec), batch_of(family))
        assert torch.equal(got["loss"], expected["loss"])
        assert_near(expected, got)
        hf_ckpt.uninstall(model)
    if family == "llama" and not lora:  # no dropout in its feed-forward
        return
    wrong = on(model, policy="none", preserve_rng_state=False)  # the check notices other draws
    with pytest.raises(AssertionError):
        assert_near(expected, step(wrong, batch_of(family)))


@pytest.mark.parametrize(
    ("name", "dtype"), [("none", torch.float16), *((name, torch.bfloat16) for name in ("none", "full", "selective"))]
)
def test_autocast(name, dtype):
    found = []
    for model in (model_of("llama"), on(model_of("llama"), **SPECS[name])):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**without_cache(model, batch_of("llama"))).loss
        loss.backward()
        found.append(outcome(model, loss))
    assert_near(*found, most=ROUNDING_16, together=True)
    assert all(value.dtype == torch.float32 for value in found[1].values())


OTHER_SHAPES = {
    "t5, not gated": lambda: tiny_model("t5", layers=LAYERS, feed_forward_proj="relu"),
    "mistral": lambda: other_model("MistralForCausalLM"),
    "qwen3": lambda: other_model("Qwen3ForCausalLM"),
    "gemma2": lambda: other_model("Gemma2ForCausalLM", attention="eager"),
    "gpt_neox, parallel": lambda: other_model("GPTNeoXForCausalLM", dropout=0.0),
    "roberta": lambda: other_model("RobertaForMaskedLM", dropout=0.0, max_position_embeddings=64),
    "bert, chunks of its own": lambda: other_model("BertForMaskedLM", dropout=0.0, chunk_size_feed_forward=23),
    "granite, generic": lambda: other_model("GraniteForCausalLM"),  # LLaMA's shape, but no family row
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_other_models(name):
    batch = batch_of("t5" if name.startswith("t5") else "llama")
    model = OTHER_SHAPES[name]()
    expected = step(model, batch)
    for spec in ("none", "full"):
        assert_near(expected, step(on(model, **SPECS[spec]), batch))
        assert calls(model) >= LAYERS
        hf_ckpt.uninstall(model)


# --- number of runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize(
    ("name", "runs"), [("none", 2), ("full", 2), ("selective", 2), ("attention", 2), ("segments", 2.5)]
)
def test_no_feed_forward_runs_three_times(family, name, runs):
    """Feed-forwards run once in the forward and once in the backward, also in recomputed blocks.

    In a segment, all but the last block's run once more: the next block is recomputed from their output.
    """
    model, batch = on(model_of(family), **SPECS[name]), batch_of(family)
    with counted_tokens(model) as seen:
        step(model, batch)
    each = [92, 46] if family == "t5" else [46]  # tokens per block in each stack
    assert sum(seen) == runs * LAYERS * sum(each)
    assert max(seen) == CHUNK


def test_what_lies_behind_a_feed_forward_may_need_it():
    """Gemma 2's next norm saves the feed-forward's output, so recomputed blocks run the feed-forward once more."""
    model = on(other_model("Gemma2ForCausalLM", attention="eager"), policy="full")
    with counted_tokens(model) as seen:
        step(model, batch_of("llama"))
    assert sum(seen) == 3 * LAYERS * 46


@pytest.mark.parametrize(
    ("asked", "tokens", "trained", "expected"),
    [
        (7, 10_000, True, 7),
        ("auto", 100, True, AUTO_LEAST),
        ("auto", 8192, True, 1024),
        ("auto", 9000, False, 1152),
        ("auto", 10**6, True, AUTO_MOST),
        ("auto", 10**6, False, AUTO_MOST_FROZEN),
    ],
)
def test_sizes_of_chunks(asked, tokens, trained, expected):
    assert tokens_per_tile(asked, tokens, trained=trained) == expected


def test_hooks_see_each_parameter_once_per_backward():
    model = on(model_of("llama"), policy="full")
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
    step(model, batch_of("llama"))
    assert sorted(seen) == sorted(name for name, _ in model.named_parameters())


# --- memory -------------------------------------------------------------------------------------------------------


def peak_of(model, batch):
    """Peak live bytes of a step, above those before it."""
    model.zero_grad(set_to_none=True)
    with LiveBytes(model, batch) as live:
        model(**without_cache(model, batch)).logits[..., :1].sum().backward()
    return live.peak_bytes - live.start_bytes


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["none", "full", "selective"])
def test_the_peak_falls(name, lora):
    """With a wide feed-forward and many tokens, chunks remove most of the peak."""
    sizes = {"hidden_size": 32, "intermediate_size": 256, "vocab_size": 64, "max_position_embeddings": 4096}
    batch = tiny_batch("llama", batch=1, tokens=2048)
    batch = {"input_ids": batch["input_ids"] % 64}
    peaks = []
    for tokens in (None, 64):
        model = tiny_model("llama", layers=1, attention="sdpa", **sizes)
        model = with_lora(model, "llama", lora_dropout=0.0, targets=["q_proj", "up_proj"]) if lora else model
        if tokens is not None or name != "none":
            spec = SPECS[name] | ({} if tokens is None else {"mlp": tokens})
            hf_ckpt.install(model, spec)
            enable(model)
        peaks.append(peak_of(model, batch))
    inner = 2048 * 256 * 4
    assert peaks[0] > 3 * inner
    assert peaks[0] - peaks[1] > 2.5 * inner


def test_gradients_of_weights_are_held_once():
    """Whatever the number of chunks, there is one sum per weight, and one weight's gradient of the current chunk."""
    model = tiny_model("llama", layers=1, hidden_size=128, intermediate_size=1024, vocab_size=64)
    size = model.model.layers[0].mlp.up_proj.weight.nbytes
    batch = {"input_ids": tiny_batch("llama", batch=1, tokens=32)["input_ids"] % 64}
    peaks = {tokens: peak_of(on(copy.deepcopy(model), tokens), batch) for tokens in (2, 32)}
    assert peaks[2] <= peaks[32] + size


def test_frozen_weights_cost_nothing():
    """Gradients of frozen weights and chunks of frozen blocks are never computed."""
    model = tiny_model("llama", layers=LAYERS)
    model.requires_grad_(False)
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    expected = step(model, batch_of("llama"))
    on(model)
    with counted_tokens(model) as seen:
        got = step(model, batch_of("llama"))
    assert_near(expected, got)
    assert list(got) == ["loss", "model.layers.1.mlp.up_proj.weight"]
    assert sum(seen) == (LAYERS + 1) * 46  # backward runs only the last block's


@pytest.mark.parametrize("name", ["none", "full", "selective"])
def test_nothing_stays_alive(name):
    assert_frees_everything(on(model_of("llama"), **SPECS[name]), batch_of("llama"))


# --- models that change or do not train ---------------------------------------------------------------------------


def test_parameters_of_functional_call():
    model, batch = model_of("llama"), without_cache(model_of("llama"), batch_of("llama"))
    found = []
    for tokens in (None, CHUNK):
        model = model_of("llama") if tokens is None else on(model_of("llama"), policy="full")
        fast = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, kwargs=batch).loss
        loss.backward()
        assert all(p.grad is None for p in model.parameters())
        found.append({name: value.grad for name, value in fast.items()})
    assert_near(*found)


@pytest.mark.compat
def test_generation_and_evaluation_are_as_without():
    model, prompt = model_of("llama"), tiny_batch("llama", tokens=6)
    prompt.pop("labels")
    plain = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        logits = model(**prompt).logits
    on(model, policy="full")
    assert torch.equal(model.generate(**prompt, max_new_tokens=8, do_sample=False), plain)
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, logits)
    model.eval()
    model(**prompt).logits.sum().backward()
    assert calls(model) == 0


# --- unsupported cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: experts("mixtral"), "'model.layers.0' .*it sends tokens to experts"),
        (lambda: other_model("OPTForCausalLM"), "no modules of gate_proj, up_proj and down_proj"),
        (lambda: other_model("Phi3ForCausalLM"), "no modules of gate_proj"),
    ],
    ids=["experts", "opt", "phi3"],
)
def test_models_whose_feed_forward_is_not_known_are_refused(make, reason):
    model = make()
    before = snapshot(model)
    with pytest.raises(SpecError, match=reason):
        hf_ckpt.install(model, {"policy": "full", "mlp": "auto"})
    assert snapshot(model) == before


@pytest.mark.parametrize("change", ["hook", "forward"])
def test_it_runs_as_a_whole_where_chunks_would_show(change, caplog):
    model = model_of("llama")
    mlp = model.model.layers[0].mlp
    seen = []
    if change == "hook":
        mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
        reason = "a hook lies on one of its modules"
    else:
        mlp.forward = lambda hidden: type(mlp).forward(mlp, hidden)
        reason = "something else has replaced its forward"
    expected = step(model, batch_of("llama"))
    on(model)
    assert_near(expected, step(model, batch_of("llama")))
    assert calls(model) == LAYERS - 1
    assert f"model.layers.0.mlp is not run in chunks, because {reason}" in caplog.text
    assert seen == ([46, 46] if change == "hook" else [])


def test_a_copy_of_data_parallel_is_an_error():
    model = on(model_of("bert"))
    with pytest.raises(HfCkptError, match="Use DistributedDataParallel"):
        copy_for_a_thread(model)(**batch_of("bert"))


def test_under_torch_compile_it_runs_as_a_whole():
    model = on(model_of("llama"))
    torch.compile(model.model.layers[0].mlp, backend="eager")(
        torch.randn(1, 7, 32, requires_grad=True)
    ).sum().backward()
    assert calls(model) == 0
    described = hf_ckpt.describe(model)
    assert described.mlp_in_graph
    assert "in a graph of torch.compile, where they run as a whole: feed-forwards" in str(described)
