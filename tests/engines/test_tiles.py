"""Feed-forwards in tiles: how often they run, what they need, how exact they are, and which are refused.

`parity/test_matrix.py` compares their gradients with those of feed-forwards that are split by hand, bit for bit.
"""

import contextlib
import copy
import itertools
import types
from unittest import mock

import pytest
import torch
from helpers.adapters import lora_config, with_lora
from helpers.experts import experts
from helpers.others import other_model
from helpers.steps import assert_near, assert_same, enable, gradients, planned, step, without_cache
from peft import get_peft_model
from torch import nn

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.tiles import why_not_in_tiles
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.spec.actions import AUTO_TOKENS
from hf_ckpt.training.guard import tighten

TILED = {"policy": "full", "mlp": 5}


def batch_of(family):
    """Blocks see 46 tokens, so that the last tile is shorter than the others."""
    return tiny_batch(family, batch=2, tokens=23)


@contextlib.contextmanager
def counted_runs(model):
    """The number of tokens in each run of a feed-forward of a LLaMA."""
    seen, kind = [], type(model.model.layers[0].mlp)
    plain = kind.forward

    def counting(module, hidden):
        seen.append(hidden.shape[:-1].numel())
        return plain(module, hidden)

    with mock.patch.object(kind, "forward", counting):
        yield seen


NAMES = ["llama", "gpt2", "t5", "llama, lora"]
NAMES += [f"{name}ForCausalLM" for name in ("Qwen3", "Gemma2", "Phi3", "GPTNeoX", "Falcon")]


def named_model(name):
    if name.endswith("ForCausalLM"):
        return other_model(name, dropout=0.0)
    model = tiny_model(name.partition(",")[0], layers=2)
    return with_lora(model, "llama", lora_dropout=0.0) if "lora" in name else model


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_up_to_rounding(name):
    model, batch = named_model(name), batch_of("t5" if name == "t5" else "llama")
    whole = step(model, batch)
    planned(model, TILED)
    for times in (1, 2):
        assert_near(whole, step(model, batch))
        for region in installation(model).regions.values():
            (part,) = region.parts.values()
            tokens = 22 if region.block.startswith("decoder.block.") else 46
            assert part.recomputed == times * -(-tokens // 5)


# --- how often --------------------------------------------------------------------------------------------------------


def test_each_tile_runs_twice():
    """In the forward and in backward, and not while the block is recomputed. The trial is of a half of its tokens."""
    model = planned(tiny_model("llama", layers=2), TILED)
    step(model, batch_of("llama"))
    with counted_runs(model) as seen:
        step(model, batch_of("llama"))
    tiles = [*[5] * 9, 1]
    assert seen[:20] == 2 * tiles
    assert sorted(seen[20:]) == sorted(2 * tiles)


def test_few_tokens_run_as_a_whole_and_are_bit_equal():
    assert AUTO_TOKENS > 46
    model = tiny_model("llama", layers=2)
    expected = step(model, batch_of("llama"))
    for mlp in ("auto", 46):
        planned(model, {"mlp": mlp})
        with counted_runs(model) as seen:
            assert_same(expected, step(model, batch_of("llama")))
        assert seen == [46] * 4


def test_hooks_see_each_gradient_once_and_as_a_whole():
    model = planned(tiny_model("llama", layers=2), TILED)
    parameters, seen = dict(model.named_parameters()), {}
    for name, parameter in parameters.items():
        parameter.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
        parameter.register_post_accumulate_grad_hook(lambda tensor, name=name: seen[name].append(tensor.grad.clone()))
    found = step(model, batch_of("llama"))
    assert seen.keys() == parameters.keys()
    for name, values in seen.items():
        assert len(values) == 2
        assert all(torch.equal(value, found[name]) for value in values)


# --- what they need ---------------------------------------------------------------------------------------------------

TOKENS, WIDE = 2048, 1024


def long_model(name, lora):
    sizes = {"hidden_size": 256, "intermediate_size": WIDE, "max_position_embeddings": TOKENS}
    torch.manual_seed(0)
    model = other_model(name, attention="sdpa", dtype=torch.bfloat16, **sizes)
    return with_lora(model, "llama", targets="all-linear", lora_dropout=0.05) if lora else model


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("Qwen3ForCausalLM", False),
        pytest.param("MistralForCausalLM", True, marks=pytest.mark.long),
        pytest.param("Qwen3ForCausalLM", True, marks=pytest.mark.long),
        pytest.param("MistralForCausalLM", False, marks=pytest.mark.long),
    ],
)
def test_the_peak_of_a_long_sequence_falls(name, lora):
    """By most of what the feed-forward computes for all tokens: five results with LoRA in float32, or three."""
    peaks = {}
    batch = {"input_ids": torch.randint(8, 300, (1, TOKENS))}
    for mlp in ("whole", 256):
        model = planned(long_model(name, lora), {"mlp": mlp, "check_every": 0})
        for _ in range(2):  # in the first step, settings are collected and tiles are tried
            model.zero_grad(set_to_none=True)
            with LiveBytes(model, batch) as live:
                model(**without_cache(model, batch)).logits[..., :1].sum().backward()
            peaks[mlp] = live.peak_bytes - live.start_bytes
    print(f"{name} {'lora' if lora else 'full'}: {peaks['whole'] / 2**20:.1f} -> {peaks[256] / 2**20:.1f} MiB")
    assert peaks["whole"] - peaks[256] > (5 * 4 if lora else 3 * 2) * TOKENS * WIDE


@pytest.mark.long
@pytest.mark.parametrize("spec", ["none", {"mlp": "auto"}], ids=["blocks", "tiles"])
def test_each_tighter_plan_of_the_guard_needs_less(spec):
    """Everything kept, `selective` and `full`; or tiles of 2048, 512 and 128 tokens. Nothing is offloaded on a CPU."""
    model, batch = long_model("MistralForCausalLM", lora=False), {"input_ids": torch.randint(8, 300, (1, TOKENS))}
    planned(model, spec)
    peaks = []
    while True:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with LiveBytes(model, batch) as live:
                model(**without_cache(model, batch)).logits[..., :1].sum().backward()
        peaks.append(live.peak_bytes - live.start_bytes)
        if tighten(model, exact=True) is None:
            break
    assert len(peaks) == 3
    assert all(less < 0.97 * more for more, less in itertools.pairwise(peaks)), peaks


# --- how exact --------------------------------------------------------------------------------------------------------


PRECISIONS = [(dtype, False, lora) for dtype in (torch.float32, torch.bfloat16) for lora in (False, True)]


@pytest.mark.parametrize(("dtype", "autocast", "lora"), [*PRECISIONS, (torch.float32, True, False)])
def test_gradients_are_no_further_from_float64_than_those_of_the_whole(dtype, autocast, lora):
    """The relative norm of the error of all gradients together, with 32 tiles.

    With sums in bfloat16 it would be 1.24 times that of the whole with LoRA, and 1.03 times under autocast.
    """
    batch = tiny_batch("llama", batch=4, tokens=64)

    def model_of(dtype):
        model = tiny_model("llama", layers=2, hidden=64, dtype=torch.bfloat16)
        return (with_lora(model, "llama", lora_dropout=0.0) if lora else model).to(dtype)

    def error(spec):
        model = planned(model_of(dtype), spec)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**without_cache(model, batch)).loss
        loss.backward()
        gaps = [(value.double() - exact[name]).flatten() for name, value in gradients(model).items()]
        return float(torch.cat(gaps).norm() / torch.cat([value.flatten() for value in exact.values()]).norm())

    precise = model_of(torch.float64)
    step(precise, batch)
    exact = gradients(precise)
    whole = error({"policy": "full"})
    tiled = error({"policy": "full", "mlp": 8})
    print(f"{dtype}, autocast {autocast}, LoRA {lora}: {whole:.3g}, in tiles {tiled / whole:.3f} times that")
    assert 0 < tiled <= 1.025 * whole


# --- what is replaced, refused and left out ---------------------------------------------------------------------------


def test_a_replaced_forward_runs_in_tiles_and_is_put_back():
    """As Liger's kernels are put into a module."""
    model = tiny_model("llama", layers=2)
    mlp = model.model.layers[0].mlp
    kind, seen = type(mlp), []

    def kernel(module, hidden):
        seen.append(hidden.shape[1])
        return kind.forward(module, hidden)

    replaced = mlp.forward = types.MethodType(kernel, mlp)
    expected = step(model, batch_of("llama"))
    planned(model, TILED)
    assert_near(expected, step(copy.deepcopy(model), batch_of("llama")))
    seen.clear()
    assert_near(expected, step(model, batch_of("llama")))
    assert seen.count(5) == 2 * 9
    hf_ckpt.uninstall(model)
    assert vars(mlp)["forward"] is replaced
    assert "forward" not in vars(model.model.layers[1].mlp)


class Shift(nn.Module):
    """Adds the token before."""

    def forward(self, x):
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Scale(nn.Module):
    """Divides by the largest value, as quantisation of a whole tensor does."""

    def forward(self, x):
        return x / x.detach().abs().max()


class Batch(nn.Module):
    """Normalises over the batch in train mode, behind a dropout."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.1)

    def forward(self, x):
        return self.norm(self.drop(x).transpose(1, 2)).transpose(1, 2)


class Long(nn.Module):
    """Takes inputs of several tokens only. The last tile has one."""

    def forward(self, x):
        if x.shape[1] == 1:
            raise ValueError("one token")
        return x


class Fixed(nn.Module):
    """A product over tokens, as in models that take a fixed number of patches."""

    def forward(self, x):
        return torch.einsum("bth,ts->bsh", x, torch.ones(23, 23))


AS_A_WHOLE = {
    Shift: "it does not process each token by itself",
    Scale: "it does not process each token by itself",
    Batch: "it does not process each token by itself",
    Long: "a tile raised one token",
    Fixed: "some of its tokens alone raised RuntimeError: einsum",
}


@pytest.mark.parametrize("kind", AS_A_WHOLE)
def test_a_feed_forward_that_needs_all_tokens_runs_as_a_whole(kind, caplog):
    """And that is said once, and by `describe`. A step in which a tile fails goes on."""
    model = tiny_model("llama", layers=3)
    for layer in model.model.layers[1:]:
        layer.mlp.act_fn = kind()
    expected = step(model, batch_of("llama"))
    planned(model, TILED)
    assert_near(expected, step(model, batch_of("llama")))
    with counted_runs(model) as seen:
        assert_near(expected, step(model, batch_of("llama")))
    assert seen.count(46) == 2 * 2
    assert seen.count(5) == 2 * 9
    assert caplog.text.count("runs as a whole") == 1
    assert f"LlamaMLP runs as a whole, not in tiles: {AS_A_WHOLE[kind]}" in caplog.text
    assert hf_ckpt.describe(model).not_in_tiles == ("model.layers.1", "model.layers.2")


@pytest.mark.compat
def test_a_budget_goes_on_if_a_tile_fails(caplog):
    model = tiny_model("llama", layers=2)
    model.model.layers[1].mlp.act_fn = Long()
    planned(model, {"policy": "budget", "budget": "3MiB", "mlp": 5, "check_every": 0})
    for _ in range(20):  # measured times decide how many plans race
        step(model, batch_of("llama"))
    assert installation(model).measuring is None
    assert caplog.text.count("a tile raised one token") == 1


def test_activated_lora_runs_as_a_whole(caplog):
    """PEFT gives its layers the lengths of all rows."""
    config = lora_config("llama", alora_invocation_tokens=[5, 6], lora_dropout=0.0, task_type="CAUSAL_LM")
    model, batch = get_peft_model(tiny_model("llama", layers=2), config).train(), batch_of("llama")
    batch["input_ids"][:, 15:17] = torch.tensor([5, 6])
    expected = step(model, batch)
    planned(model, TILED)
    assert_same(expected, step(model, batch))
    assert caplog.text.count("its activated LoRA counts tokens") == 1


class Dropped(nn.Module):
    """Drops by a function, as Seed-OSS, and everything at once, as adapters do. Neither is an `nn.Dropout`."""

    def forward(self, x):
        x = nn.functional.dropout(x, 0.2, self.training)
        return x * (torch.rand(()) > 0.5) if self.training else x


def test_dropout_is_no_mix_of_tokens_but_drawn_for_each_tile(caplog):
    model = tiny_model("llama", layers=2)
    for layer in model.model.layers:
        layer.mlp.act_fn = Dropped()
    planned(model, TILED)
    with counted_runs(model) as seen:
        step(model, batch_of("llama"))
    assert seen.count(5) == 2 * 2 * 9
    assert caplog.text.count("LlamaMLP draws its dropout for each tile") == 1
    assert hf_ckpt.describe(model).not_in_tiles == ()


class Draws(nn.Module):
    """Draws a number, and counts its runs in a buffer and in a parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))
        self.writes = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        self.runs += 1
        with torch.no_grad():
            self.writes += 1
        return x + 0 * torch.rand(())


def counts_tokens(module):
    """A hook that counts in attributes of a module."""

    def count(inner, args, output):
        module.tokens += output.shape[1]
        module.sizes.append(output.shape)
        module.mean = module.mean + output.mean()

    return count


def test_the_trial_leaves_nothing():
    """Buffers, parameters, attributes, modes and random state are as without it."""
    module = tiny_model("gpt2", layers=1, dropout=0.2).transformer.h[0].mlp
    module.act = Draws()
    module.tokens, module.sizes, module.mean = 0, [], torch.zeros(())
    module.c_fc.register_forward_hook(counts_tokens(module))
    hidden = torch.randn(1, 8, module.c_fc.nx)
    state = torch.get_rng_state()
    assert why_not_in_tiles(module, module.forward, hidden) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not module.act.runs
    assert not module.act.writes
    assert (module.tokens, module.sizes, float(module.mean)) == (0, [], 0)
    assert all(inner.training for inner in module.modules())


def test_experts_are_left_out_and_that_is_said_once(caplog):
    model = experts("qwen2_moe")
    expected = step(model, batch_of("llama"))
    planned(model, TILED)
    assert_same(expected, step(model, batch_of("llama")))
    said = "no part of Qwen2MoeDecoderLayer (model.layers.0, model.layers.1) runs in tiles, because none of its modules"
    assert caplog.text.count(said) == 1
    assert not any(region.parts for region in installation(model).regions.values())


def test_a_plan_that_is_taken_off_before_the_backward():
    model, batch = tiny_model("llama", layers=2), batch_of("llama")
    planned(model, TILED)
    expected = step(model, batch)
    enable(model)
    model.zero_grad()
    torch.manual_seed(7)
    loss = model(**without_cache(model, batch)).loss
    hf_ckpt.uninstall(model)
    loss.backward()
    assert_same(expected, {"loss": loss.detach(), **gradients(model)})
