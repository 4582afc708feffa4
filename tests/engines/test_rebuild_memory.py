"""What the rebuild engine saves of the memory that no checkpointing takes, and that nothing is left afterwards."""

import weakref

import pytest
import torch
from helpers.adapters import with_lora
from helpers.custom import same_under
from helpers.steps import assert_same, planned, step, without_cache, without_collector
from helpers.tables import keyed, table
from helpers.toys import SAVES, SCALE, WEIGHT, each_family, plain_and_ours, rebuilt, same_toys, toy
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hf_ckpt
from hf_ckpt.engines.rebuild import names
from hf_ckpt.engines.rebuild.graph import Graph
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.usefixtures("unwatched")


def model_of(family, spec=None, *, lora=False, dropout=0.0, attention="sdpa"):
    """A model in 16 bits; adapters are in float32."""
    model = tiny_model(family, layers=3, hidden=64, dropout=dropout, dtype=torch.bfloat16, attention=attention)
    model = with_lora(model, family, lora_dropout=dropout) if lora else model
    return model if spec is None else planned(model, spec)


def held_by(model, batch):
    """Bytes alive at the end of a forward, and the result of a step."""
    step(model, batch)
    with LiveBytes(model) as live:
        loss = model(**without_cache(model, batch)).loss
        held = live.current_bytes - live.start_bytes
        del loss
    return held, step(model, batch)


@pytest.mark.parametrize(*keyed(table(__file__, "shares.yaml"), "family", "lora", "dropout", "shares"))
def test_selective_holds_a_share_of_what_no_checkpointing_holds(family, lora, dropout, shares, fused_dropout):
    """Masks are bits, float32 copies of 16 bits are 16 bits, and an adapter's input is that of its frozen layer."""
    batch = tiny_batch(family, batch=4, tokens=64)
    held, expected = held_by(model_of(family, lora=lora, dropout=dropout), batch)
    for save, share in zip(SAVES, shares, strict=True):
        model = model_of(family, {"policy": "selective", "save": save}, lora=lora, dropout=dropout)
        ours, outcome = held_by(model, batch)
        assert_same(expected, outcome)
        assert rebuilt(model) > 0
        assert ours / held == pytest.approx(share, abs=0.01), save


NAMES = """
post_attention_layernorm  8.12 KiB dropped
input_layernorm  8.12 KiB dropped
softmax  8.00 KiB kept
gate_proj  8.00 KiB kept
up_proj  8.00 KiB kept
gate_proj * up_proj  8.00 KiB dropped
silu(gate_proj)  8.00 KiB dropped
hidden_states  4.00 KiB kept
k_proj  4.00 KiB kept
q_proj  4.00 KiB kept
v_proj  4.00 KiB kept
matmul  4.00 KiB kept
hidden_states + o_proj  4.00 KiB kept
"""
"""Of a block with 32 tokens of 32 float32 numbers, eager attention with 4 heads, and a feed-forward of 64. A norm also
drops a number for each token."""


def test_what_selective_kept_and_dropped_has_the_names_of_the_models_code():
    model = planned(tiny_model("llama", layers=1), "selective")
    model(**tiny_batch("llama")).loss.backward()
    described = hf_ckpt.describe(model)
    assert "\n".join(map(str, described.saved)) == NAMES.strip()
    assert f"    {NAMES.split(chr(10))[1]}\n" in str(described)
    assert "\n    5 others  20.00 KiB" in str(described)
    step(model, tiny_batch("llama", tokens=8))
    assert hf_ckpt.describe(model).saved == described.saved  # only the first forward is looked at


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "q_proj.lora_A"),
        ("gpt2", "c_fc"),
        ("bert", "intermediate.dense"),
        ("t5", "EncDecAttention.q.lora_A"),
    ],
)
def test_names_of_adapters_and_of_modules_that_share_a_name(family, name):
    model = planned(model_of(family, lora=True, dropout=0.1), "selective")
    step(model, tiny_batch(family))
    names = {row.name for row in hf_ckpt.describe(model).saved}
    assert name in names
    assert not any("base_layer" in each or "default" in each for each in names)


def test_a_parameter_that_is_written_with_a_graph_is_freed():
    """A frozen parameter that a block fills in place, and that gets a graph by that, is freed."""
    region = RebuildRegion("toy", save=("linear", "attention"))
    with without_collector():
        slots = [nn.Parameter(torch.zeros(4, 16), requires_grad=False)]
        region(lambda x: slots[0].copy_(x).exp_(), torch.randn(4, 16, requires_grad=True) * 1)
        left = weakref.ref(slots.pop())
        assert left() is None
        assert region.saved_tensors


@each_family
def test_hidden_states_that_the_user_keeps_hold_nothing_else(family):
    """Hidden states that the user holds after backward keep no other tensors alive."""
    alive = []
    for model in plain_and_ours(family, layers=4):
        batch = without_cache(model, tiny_batch(family))
        step(model, batch)
        model.zero_grad(set_to_none=True)
        with LiveBytes(model) as live:
            outputs = model(**batch, output_hidden_states=True)
            outputs.loss.backward()
            model.zero_grad(set_to_none=True)
            states = outputs.get("hidden_states") or outputs.get("decoder_hidden_states")
            del outputs
            alive.append(live.current_bytes - live.start_bytes)
            assert states
    assert alive[1] <= alive[0]


def test_selective_warns_once_if_nothing_can_be_dropped(caplog):
    for _ in range(2):
        same_toys(lambda x: torch.cumprod(x, -1), save=["linear"], parameters=(), rebuilds=False)
    assert caplog.text.count("found nothing in blocks like toy that can be rebuilt") == 1


NOTHING = "found nothing in blocks like model.layers.0 that can be rebuilt"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"policy": "selective"}, ["`selective` with save ['linear', 'attention'] " + NOTHING]),
        ({"policy": "full+selective"}, ["`full+selective` with save ['linear', 'attention'] " + NOTHING]),
        ({"policy": "full", "mlp": 8}, []),
        ({"policy": "budget", "budget": "1GiB"}, []),
    ],
    ids=str,
)
def test_a_warning_that_nothing_can_be_rebuilt_names_what_was_asked_for(spec, says, caplog):
    """With one adapter at its end, the first block saves a single tensor, which nothing rebuilds."""
    model = planned(with_lora(tiny_model("llama", layers=2), "llama", targets=["down_proj"], lora_dropout=0.0), spec)
    for number in range(2):
        step(model, tiny_batch("llama"), seed=number)
    assert sum(hf_ckpt.describe(model).recomputed.values()) > 0
    found = [text for record in caplog.records if "can be rebuilt" in (text := record.getMessage())]
    assert [text[: len(said)] for text, said in zip(found, says, strict=True)] == says


@pytest.mark.parametrize("save", SAVES, ids=str)
def test_a_forward_that_raises_teaches_nothing(save, caplog):
    """The next one drops as many tensors as without it, and nobody is told that nothing can be rebuilt."""
    kinds = (None, ValueError, RuntimeError, KeyboardInterrupt)
    counts = []
    errors = []

    def block(x):
        y = torch.cumprod(x, -1)
        for error in errors:
            raise error
        return functional.silu(y @ WEIGHT) * SCALE

    for kind in kinds:
        region = RebuildRegion("toy", save=tuple(save))
        errors += [kind] * (kind is not None)
        if errors:
            with pytest.raises(kind):
                toy(block, region)
            assert not region.hopeless
            errors.clear()
        toy(block, region)
        counts.append((region.saved_tensors, region.dropped_tensors, region.recomputed))
    assert counts == counts[:1] * len(kinds)
    assert counts[0][1]
    assert "can be rebuilt" not in caplog.text


def test_selective_warns_once_inside_another_checkpoint(caplog):
    for _ in range(2):
        toy(lambda x: checkpoint(RebuildRegion("toy", save=()), torch.tanh, x, use_reentrant=False), parameters=())
    assert caplog.text.count("`selective` has no effect in blocks that another checkpoint recomputes") == 1


@pytest.mark.parametrize("policy", ["full", "full+selective", "selective"])
def test_blocks_that_share_their_weights(policy):
    """Autocast casts a shared weight once for all blocks in the forward, and once per recomputed block."""

    def make():
        model = tiny_model("llama", layers=3)
        for layer in model.model.layers[1:]:
            layer.mlp = model.model.layers[0].mlp
        return model

    @torch.autocast("cpu", torch.bfloat16)
    def run(model):
        return step(model, tiny_batch("llama"))

    same_under({"policy": policy}, run, make)


@each_family
def test_what_full_selective_leaves_is_what_full_leaves(family):
    """`full+selective` keeps what `full` keeps, except for a few scalars, and the peak of its backward is lower."""
    batch = tiny_batch(family, batch=2, tokens=64)
    held, peaks = {}, {}
    for name in ("full", "full+selective"):
        model = model_of(family, {"policy": name}, dropout=0.1, attention="eager")
        held[name], outcome = held_by(model, batch)
        assert_same(step(model_of(family, dropout=0.1, attention="eager"), batch), outcome)
        with LiveBytes(model, batch) as live:
            loss = model(**without_cache(model, batch)).loss
            live.peak_bytes = live.current_bytes
            loss.backward()
        peaks[name] = live.peak_bytes - live.start_bytes
    assert 0 <= held["full+selective"] - held["full"] < 100 < held["full"]
    assert peaks["full+selective"] < peaks["full"]


@each_family
def test_what_was_learned_of_a_block_ends_with_its_structure(family, monkeypatch):
    """Later forwards do not retry what could not be rebuilt. A changed block drops as much as a fresh one."""
    make, failed = Graph.make, []
    monkeypatch.setattr(Graph, "make", lambda *args: make(*args) or failed.append(args))
    (_, model), (_, fresh) = plain_and_ours(family), plain_and_ours(family)
    step(model, tiny_batch(family))
    assert failed
    failed.clear()
    step(model, tiny_batch(family))
    assert not failed
    for each in (model, fresh):
        for block in find_blocks(each).modules.values():
            for number, parameter in enumerate(block.parameters()):
                parameter.requires_grad_(number % 2 == 0)
    assert held_by(model, tiny_batch(family))[0] == held_by(fresh, tiny_batch(family))[0]
    assert hf_ckpt.describe(model).dropped_tensors == hf_ckpt.describe(fresh).dropped_tensors > 0


@pytest.mark.parametrize("error", [AttributeError, KeyError])
@pytest.mark.parametrize("where", ["_add", "_sizes"])
def test_tensors_that_cannot_be_named_end_no_run(where, error, monkeypatch, caplog):
    """A warning says so, once, and the forward is that of every other one."""

    def fail(*_):
        raise error("no name")

    monkeypatch.setattr(names.Recording, where, fail)
    model = planned(tiny_model("llama"), "selective")
    step(model, tiny_batch("llama"))
    assert hf_ckpt.describe(model).dropped_tensors
    step(model, tiny_batch("llama"))
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "cannot name what `selective` keeps" in message]
    assert len(said) == 1
    assert f"{error.__name__}: " in said[0]
