"""What every engine leaves: nothing after a forward alone or an error, and copies and saved plans that work alone.
What `full` and `selective` cost the host.

`parity/test_matrix.py` compares their gradients.
"""

import collections
import copy
import functools
import pickle
import sys
from contextlib import nullcontext, suppress

import pytest
import torch
from helpers.adapters import with_lora
from helpers.lanes import DeviceBytes, mover
from helpers.sparing import in_turn
from helpers.steps import CACHED_BYTES, ENGINES, assert_frees_everything, assert_same, planned, step, without_collector
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

HEAD = {"head": 5}
TILES = {"policy": "full", "mlp": 5}
SPECS = ENGINES | {"tiles": TILES}
hooks_of_the_user = functools.partial(torch.autograd.graph.saved_tensors_hooks, torch.clone, torch.Tensor.detach)
pytestmark = pytest.mark.usefixtures("lanes")


@in_turn("engine, family, around", SPECS, [("llama", nullcontext), ("t5", nullcontext), ("llama", hooks_of_the_user)])
def test_a_graph_without_a_backward_frees_everything(family, around, engine):
    """A forward without a backward leaves nothing, with the garbage collector off: no cycle holds activations."""
    model = planned(tiny_model(family, layers=3, dropout=0.1, dtype=torch.bfloat16), SPECS[engine])
    with around():
        assert_frees_everything(model, tiny_batch(family), meter=DeviceBytes)
    described = hf_ckpt.describe(model)
    assert all(described.recomputed.values())
    assert bool(described.moved) == (engine in ("offload", "saved") and around is nullcontext)
    if described.moved:
        assert mover(model).held_bytes == 0


@in_turn("engine, place", SPECS, [0, 2])
def test_an_error_in_a_block_leaves_nothing(engine, place):
    """Training can continue after an error inside a block, such as running out of memory."""
    model, batch = planned(tiny_model("llama", layers=3), SPECS[engine]), {**tiny_batch("llama"), "use_cache": False}
    expected, before = step(model, batch), hf_ckpt.describe(model).recomputed
    raised = []

    def broken(hidden):
        raised.append(place)
        raise RuntimeError("out of memory")

    with without_collector(), DeviceBytes(model) as live:
        model.model.layers[place].mlp.down_proj.forward = broken
        with suppress(RuntimeError):
            model(**batch)
        del model.model.layers[place].mlp.down_proj.forward
        assert live.current_bytes - live.start_bytes <= CACHED_BYTES
    assert raised == [place]
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()  # no hooks are left behind
    assert_same(expected, step(model, batch))
    assert hf_ckpt.describe(model).recomputed == {name: 2 * times for name, times in before.items()}
    assert all(before.values())


@pytest.mark.compat
@pytest.mark.trap(19)
@pytest.mark.parametrize("engine", [*SPECS, "head", "adapters"])
def test_copies_and_saved_plans_work_by_themselves(engine, lanes, tmp_path):
    """Copies, and models with a plan from a file, have their own functions, weights and host memory."""

    def make(spec):
        model = planned(tiny_model("t5", layers=3), spec)
        return with_lora(model, "t5", lora_dropout=0.0) if engine == "adapters" else model

    model = make(SPECS.get(engine, {"policy": "full", "layers": "0,2", **HEAD}))
    expected = step(model, tiny_batch("t5"))
    before = hf_ckpt.describe(model)
    model.zero_grad(set_to_none=True)
    before.plan.save(tmp_path / "plan.json")
    loaded = make({"plan": str(tmp_path / "plan.json")})
    for twin, times in ((copy.deepcopy(model), 2), (pickle.loads(pickle.dumps(model)), 2), (loaded, 1)):
        regions, originals = installation(twin).regions, installation(model).regions
        assert regions.keys() == originals.keys()
        assert all(region is not originals[name] for name, region in regions.items())
        assert not before.moved or mover(twin) is not mover(model)
        assert_same(expected, step(twin, tiny_batch("t5")))
        described = hf_ckpt.describe(twin)
        assert (described.plan, described.moved) == (before.plan, before.moved)
        assert described.chunked_heads == times * before.chunked_heads == times * (engine not in SPECS)
        assert described.recomputed == {name: times * count for name, count in before.recomputed.items()}
        hf_ckpt.uninstall(twin)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert hf_ckpt.describe(model).recomputed == before.recomputed
    assert bool(before.moved) == (engine in ("offload", "saved"))
    assert len(lanes) == (4 if before.moved else 0)


@pytest.mark.trap(41)
@pytest.mark.parametrize("spec", [TILES, {"policy": "none", **HEAD}], ids=str)
def test_a_copy_of_data_parallel_is_refused(spec):
    """A replica, whose weights are no parameters, is refused by name; the original still runs."""
    model = planned(tiny_model("llama"), spec)
    batch = {**tiny_batch("llama"), "use_cache": False}
    replica = model._replicate_for_data_parallel()
    replica._modules["model"] = model.model._replicate_for_data_parallel()
    with pytest.raises(HfCkptError, match="Use DistributedDataParallel"):
        replica(**batch)
    step(model, batch)
    assert hf_ckpt.describe(model).chunked_heads == (spec["policy"] == "none")


def python_calls(model):
    """Calls of Python and C functions in a steady step, which the settings of the first steps do not slow down."""
    batch, calls = tiny_batch("llama"), collections.Counter()
    for _ in range(3):
        model(**batch).loss.backward()
    with without_collector():  # finalizers are calls, too
        try:
            sys.setprofile(lambda frame, event, arg: calls.update([event]))
            model(**batch).loss.backward()
        finally:
            sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def eight_blocks(lora):
    model = tiny_model("llama", layers=8)
    return with_lora(model, "llama", targets="all-linear", lora_dropout=0.0) if lora else model


@functools.cache
def calls_without_us(lora):
    """Calls of a step without checkpointing, and with transformers' own."""
    of_transformers = eight_blocks(lora)
    of_transformers.gradient_checkpointing_enable({"use_reentrant": False})
    return python_calls(eight_blocks(lora)), python_calls(of_transformers)


@pytest.mark.parametrize(
    ("policy", "lora", "share"),
    [
        ("full", False, 0.66),
        ("selective", False, 0.45),
        ("full+selective", False, 1.02),
        ("full", True, 0.66),
        pytest.param("full", False, 0.78, marks=pytest.mark.compat),  # with torch 2.8
    ],
)
def test_a_steady_step_makes_at_most_a_share_of_the_calls_of_transformers_own(policy, lora, share):
    """What a step of a small model waits for: at most this share of the calls of transformers' own checkpointing.

    With torch 2.14, `full+selective` makes 1 % more.
    """
    ours = planned(eight_blocks(lora), {"policy": "full", "rules": [{"layers": "0-", "policy": policy}]})
    fewest, of_transformers = calls_without_us(lora)
    assert fewest < python_calls(ours) <= share * of_transformers  # fewer would mean that nothing runs again
    assert set(hf_ckpt.describe(ours).forwards.values()) == {4}
    assert all(hf_ckpt.describe(ours).recomputed.values())


@pytest.mark.compat
@pytest.mark.parametrize("is_known", [True, False])
def test_a_torch_whose_hook_does_something_else_runs_it(is_known, monkeypatch):
    """What does the same as the hook of torch's recomputation takes its place only if the hook is the known one."""
    checkpoint = compat.checkpoint
    plain, model = (tiny_model("llama", dropout=0.1) for _ in range(2))
    planned(model, "full")
    repacking_for = checkpoint._repacking_for
    used = []

    def noted(pack):
        used.append(repacking_for(pack))
        return used[-1]

    monkeypatch.setattr(checkpoint, "_repacking_for", noted)
    if not is_known:
        monkeypatch.setattr(checkpoint, "_REPACKING", checkpoint._REPACKING - {"detach"})
    assert_same(step(plain, tiny_batch("llama")), step(model, tiny_batch("llama")))
    assert [repack is not None for repack in used] == [is_known] * 4
    assert list(hf_ckpt.describe(model).recomputed.values()) == [1] * 4


@pytest.mark.parametrize("stops_early", [True, False])
def test_a_block_that_runs_a_backward_in_its_forward(stops_early):
    """That backward recomputes what the forward has saved so far, and later ones the whole block, without early stops
    as in trials, too."""

    def block(hidden, weight):
        energy = functional.dropout(hidden * weight, 0.5).sin()
        (slope,) = torch.autograd.grad(energy.square().sum(), hidden, create_graph=True)
        return functional.dropout((slope * weight).cos() * energy, 0.5)

    def run(function, *args):
        torch.manual_seed(0)
        return function(*args).sum()

    values = [torch.linspace(*ends, 8).requires_grad_() for ends in ((-1, 1), (1, 2))]
    region = FullRegion("block")
    with torch.utils.checkpoint.set_checkpoint_early_stop(stops_early):
        outputs = [run(block, *values), run(region, block, *values), run(region, block, *values)]
    assert outputs[0] == outputs[1] == outputs[2]
    expected, got, other = (torch.autograd.grad(output, values, retain_graph=True) for output in outputs)
    again = torch.autograd.grad(outputs[1], values)
    for gradients in (got, other, again):
        assert all(map(torch.equal, expected, gradients))
    assert all(gradient.any() for gradient in expected)
    assert region.recomputed == 5
