"""What every engine leaves: nothing after a forward alone or an error, and copies and saved plans that work alone.
What `full` and `selective` cost the host.

`parity/test_matrix.py` compares their gradients.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import pickle
import sys

import pytest
import torch
from helpers.adapters import with_lora
from helpers.lanes import DeviceBytes, mover
from helpers.steps import CACHED_BYTES, assert_frees_everything, assert_same, planned, step

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.models.tiny import tiny_batch, tiny_model

SPECS = {
    "full": {"policy": "full"},
    "full+selective": {"policy": "full+selective"},
    "selective": {"policy": "selective"},
    "save attention": {"policy": "selective", "save": ["attention"]},
    "segments": {"segments": 2},
    "tiles": {"policy": "full", "mlp": 5},
    "offload": {"policy": "offload"},
    "saved": {"policy": "selective", "offload": "saved"},
}
each_engine = pytest.mark.parametrize("engine", SPECS)
pytestmark = pytest.mark.usefixtures("lanes")


@each_engine
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_graph_without_a_backward_frees_everything(family, engine):
    """A forward without a backward leaves nothing, with the garbage collector off: no cycle holds activations."""
    model = planned(tiny_model(family, layers=3, dropout=0.1, dtype=torch.bfloat16), SPECS[engine])
    assert_frees_everything(model, tiny_batch(family), meter=DeviceBytes)
    found = hf_ckpt.describe(model)
    assert all(found.recomputed.values())
    assert bool(found.moved) == (engine in ("offload", "saved"))
    if found.moved:
        assert mover(model).held_bytes == 0


@pytest.mark.parametrize("engine", ["selective", "save attention", "full+selective"])
def test_a_graph_inside_hooks_of_the_user_frees_everything(engine):
    model = planned(tiny_model("llama", layers=3, dropout=0.1, dtype=torch.bfloat16), SPECS[engine])
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda held: held):
        assert_frees_everything(model, tiny_batch("llama"), meter=DeviceBytes)
    assert all(hf_ckpt.describe(model).recomputed.values())


@each_engine
@pytest.mark.parametrize("place", [0, 2])
def test_an_error_in_a_block_leaves_nothing(engine, place):
    """Training can continue after an error inside a block, such as running out of memory."""
    model, batch = planned(tiny_model("llama", layers=3), SPECS[engine]), {**tiny_batch("llama"), "use_cache": False}
    expected, before = step(model, batch), hf_ckpt.describe(model).recomputed
    raised = []

    def broken(hidden):
        raised.append(place)
        raise RuntimeError("out of memory")

    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(model) as live:
            model.model.layers[place].mlp.down_proj.forward = broken
            with contextlib.suppress(RuntimeError):
                model(**batch)
            del model.model.layers[place].mlp.down_proj.forward
            assert live.current_bytes - live.start_bytes <= CACHED_BYTES
    finally:
        gc.enable()
    assert raised == [place]
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()  # no hooks are left behind
    assert_same(expected, step(model, batch))
    assert hf_ckpt.describe(model).recomputed == {name: 2 * times for name, times in before.items()}
    assert all(before.values())


@pytest.mark.compat
@pytest.mark.parametrize("engine", [*SPECS, "head"])
def test_copies_and_saved_plans_work_by_themselves(engine, lanes, tmp_path):
    """Copies, and models with a plan from a file, have their own functions, weights and host memory."""
    model = planned(tiny_model("t5", layers=3), {**SPECS, "head": {"policy": "full", "head": 5}}[engine])
    expected = step(model, tiny_batch("t5"))
    before = hf_ckpt.describe(model)
    model.zero_grad(set_to_none=True)
    before.plan.save(tmp_path / "plan.json")
    loaded = planned(tiny_model("t5", layers=3), {"plan": str(tmp_path / "plan.json")})
    for twin, times in ((copy.deepcopy(model), 2), (pickle.loads(pickle.dumps(model)), 2), (loaded, 1)):
        regions, originals = installation(twin).regions, installation(model).regions
        assert regions.keys() == originals.keys()
        assert all(region is not originals[name] for name, region in regions.items())
        assert not before.moved or mover(twin) is not mover(model)
        assert_same(expected, step(twin, tiny_batch("t5")))
        found = hf_ckpt.describe(twin)
        assert (found.plan, found.moved) == (before.plan, before.moved)
        assert found.chunked_heads == times * before.chunked_heads == times * (engine == "head")
        assert found.recomputed == {name: times * count for name, count in before.recomputed.items()}
        hf_ckpt.uninstall(twin)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert hf_ckpt.describe(model).recomputed == before.recomputed
    assert bool(before.moved) == (engine in ("offload", "saved"))
    assert len(lanes) == (4 if before.moved else 0)


MOST_CALLS = 1.02
"""Python calls of a step, relative to transformers' own checkpointing: what a step of a small model waits for."""


def python_calls(model):
    """Calls of Python and C functions in a steady step, which the settings of the first steps do not slow down."""
    batch, calls = tiny_batch("llama"), collections.Counter()
    for _ in range(3):
        model(**batch).loss.backward()
    gc.collect()
    gc.disable()  # finalizers are calls, too
    try:
        sys.setprofile(lambda frame, event, arg: calls.update([event]))
        model(**batch).loss.backward()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls["call"] + calls["c_call"]


@pytest.mark.parametrize(
    ("spec", "lora"),
    [({"policy": "full"}, False), ({"policy": "selective"}, False), ({"policy": "full"}, True)],
    ids=["full", "selective", "LoRA full"],
)
def test_a_steady_step_makes_hardly_more_calls_than_transformers_own(spec, lora):
    def model():
        blocks = tiny_model("llama", layers=8)
        return with_lora(blocks, "llama", targets="all-linear", lora_dropout=0.0) if lora else blocks

    theirs = model()
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    ours = planned(model(), spec)
    most = MOST_CALLS * python_calls(theirs)
    assert python_calls(model()) < python_calls(ours) <= most  # fewer would mean that nothing runs again
    assert set(hf_ckpt.describe(ours).forwards.values()) == {4}
    assert all(hf_ckpt.describe(ours).recomputed.values())
