"""A plan can be paused, tried, and removed without a trace, whatever others did to the model. With a plan, models are
freed, copied, pickled and saved like models without one; copies have their own plans."""

import contextlib
import copy
import weakref

import pytest
from accelerate.hooks import ModelHook, add_hook_to_module
from helpers.installed import ALL, active, flags, forward_hooks
from helpers.snapshots import snapshot
from helpers.steps import assert_near, assert_same, enable, planned, recomputed, step, without_collector
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach import enable as enabling
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import OwnerConflictError, SpecError
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.training.install import installed_temporarily

pytestmark = pytest.mark.compat
BATCH = tiny_batch("llama")


def disable(model):
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()


def checkpointed(model):
    enable(model, {"use_reentrant": False})


def one_block_off(model):
    checkpointed(model)
    next(iter(find_blocks(model).modules.values())).gradient_checkpointing = False


def off_again(model):
    enable(model)
    disable(model)


BEFORE = [lambda model: None, checkpointed, one_block_off, off_again, lambda model: model.enable_input_require_grads()]


def comparable(model):
    """`snapshot` with the number of forward hooks only: transformers creates those on embeddings in each call."""
    modules = snapshot(model)
    for values in modules.values():
        values["_forward_hooks"] = len(values["_forward_hooks"])
        for name in ("_require_grads_hooks", "_require_grads_hook"):
            values.pop(name, None)
    return modules


@pytest.mark.parametrize("before_it", BEFORE)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_uninstall_leaves_no_trace(family, before_it):
    """Uninstalling restores `vars()` of every module and the number of hooks, whatever happened in between.

    Names of modules and keys of the state dict never change: a prefix would break loading.
    """
    model, batch = tiny_model(family), tiny_batch(family)
    before_it(model)
    before, hooks, keys = comparable(model), forward_hooks(model), list(model.state_dict())
    expected = step(model, batch)
    planned(model)
    assert_same(expected, step(model, batch))
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks]
    assert (list(model.state_dict()), list(snapshot(model))) == (keys, list(before))
    enable(model, {"layers": "0"})
    disable(model)
    enable(model)
    with hf_ckpt.paused(model):
        step(model, batch)
    model.zero_grad()
    for _ in range(2):  # a second call does nothing
        hf_ckpt.uninstall(model)
        assert comparable(model) == before
        assert forward_hooks(model) == hooks
    assert_same(expected, step(model, batch))


def test_uninstall_after_someone_wrapped_a_block():
    """Uninstalling also cleans a block that someone wrapped in torch's checkpoint wrapper."""
    model = planned(tiny_model("llama"))
    block = model.model.layers[0]
    model.model.layers[0] = checkpoint_wrapper(block)
    with pytest.raises(OwnerConflictError):
        enable(model)
    hf_ckpt.uninstall(model)
    assert not block.gradient_checkpointing
    assert "_gradient_checkpointing_func" not in vars(block)


@pytest.mark.parametrize("first_on", ["outer", "inner"])
@pytest.mark.parametrize("first_off", ["outer", "inner"])
def test_blocks_have_one_owner(first_on, first_off):
    """The whole model takes over blocks of an inner one, and a part of an enabled model is refused."""
    model = tiny_model("llama")
    before = snapshot(model)
    if first_on == "inner":
        hf_ckpt.install(model.model, {"layers": "0"})
        enable(model.model)
        assert hf_ckpt.install(model, {"layers": "1"}).enabled
    else:
        planned(model, {"layers": "1"})
        with pytest.raises(OwnerConflictError):
            hf_ckpt.install(model.model, {"layers": "0"})
    assert active(model) == [ALL[1]]
    for owner in (model, model.model) if first_off == "outer" else (model.model, model):
        hf_ckpt.uninstall(owner)
    model.zero_grad()
    assert snapshot(model) == before


def names(model):
    """Names of the attributes of every module."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("place", ["head", "feed-forward"])
def test_what_others_put_around_a_replaced_forward_outlives_the_plan(place):
    """accelerate's hooks keep the forward that they find, and call it for ever."""
    model = planned(tiny_model("llama"), {"head": 5, "mlp": 1000})
    part = model.lm_head if place == "head" else model.model.layers[0].mlp
    expected = step(model, BATCH)
    add_hook_to_module(part, ModelHook())
    calls = hf_ckpt.describe(model).chunked_heads
    assert_near(expected, step(model, BATCH))
    assert hf_ckpt.describe(model).chunked_heads == calls + 1
    disable(model)
    step(model, BATCH)
    assert hf_ckpt.describe(model).chunked_heads == calls + 1
    hf_ckpt.uninstall(model)
    assert_near(expected, step(model, BATCH))


def test_what_others_put_around_an_enable_method_outlives_the_plan():
    model = tiny_model("llama")
    hf_ckpt.install(model)
    name = compat.transformers.ENABLE_NAMES[-1]
    calls = []
    method = getattr(model, name)
    setattr(model, name, lambda *args: calls.append(args) or method(*args))
    enable(model)
    assert active(model) == ALL
    hf_ckpt.uninstall(model)
    enable(model, {"use_reentrant": False})  # transformers' own
    assert len(calls) == 2
    assert set(ALL) <= set(flags(model))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_plan_that_cannot_be_put_on_leaves_nothing_on_the_model(error, monkeypatch, caplog):
    model = tiny_model("llama")
    before = names(model)
    hf_ckpt.install(model, {"head": 5, "mlp": 1000})
    installed = names(model)
    hooks = forward_hooks(model)

    def fails(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(enabling, "PassHook", fails)
        with pytest.raises(error):
            enable(model)
    assert (names(model), flags(model)) == (installed, [])
    assert sum(map(sum, forward_hooks(model).values())) < sum(map(sum, hooks.values()))  # nor a reminder
    enable(model)
    assert active(model) == ALL
    assert hf_ckpt.describe(model).chunked_heads == 1
    assert not caplog.records
    hf_ckpt.uninstall(model)
    assert names(model) == before


def test_a_layer_that_was_taken_out_keeps_nothing_of_the_plan():
    model = planned(tiny_model("llama"), {"mlp": 1000})
    layer = model.model.layers[2]
    model.model.layers[2] = tiny_model("llama").model.layers[2]
    step(model, BATCH)
    assert names(layer) == names(tiny_model("llama").model.layers[2])


def test_a_layer_that_was_moved_is_left_to_its_new_model():
    """It may be enabled by transformers there, or have a plan, whose hooks have the numbers of the old ones."""
    first, second = planned(tiny_model("llama"), "selective"), tiny_model("llama", seed=1)
    second.model.layers[0] = first.model.layers[1]
    first.model.layers[1] = tiny_model("llama").model.layers[1]
    step(first, BATCH)
    enable(second, {"use_reentrant": False})
    hf_ckpt.uninstall(first)
    assert set(ALL) <= set(flags(second))
    for model in (first, second):
        planned(model, "selective")
    second.model.layers[0] = first.model.layers[1]
    step(second, BATCH)
    hooks = forward_hooks(second)
    hf_ckpt.uninstall(first)
    assert forward_hooks(second) == hooks
    step(second, BATCH)
    assert set(recomputed(second)) == set(ALL)


def test_two_models_share_a_head():
    """It runs in chunks for the one that has asked first, until that one is uninstalled."""
    first, second = planned(tiny_model("llama"), {"head": 5}), tiny_model("llama", seed=1)
    second.lm_head = first.lm_head
    for _ in range(2):
        planned(second)
    step(first, BATCH)
    assert hf_ckpt.describe(first).chunked_heads == 1
    hf_ckpt.uninstall(first)
    planned(second, {"head": 5})
    step(second, BATCH)
    assert hf_ckpt.describe(second).chunked_heads == 1


def test_a_copy_of_a_part_has_the_methods_of_its_class():
    model = planned(tiny_model("llama"))
    part = copy.deepcopy(model.model)
    disable(part)
    assert flags(part) == []
    enable(part, {"use_reentrant": False})
    assert {name.removeprefix("model.") for name in ALL} <= set(flags(part))
    assert active(model) == ALL


@pytest.mark.parametrize("inner", ["full", {"policy": "budget", "budget": "1GiB"}], ids=str)
def test_a_model_that_is_enabled_takes_the_blocks_of_one_inside(inner):
    """Also of one that was enabled after it was installed: the last call counts."""
    model = tiny_model("llama")
    before = names(model)
    hf_ckpt.install(model, {"preserve_rng_state": False})
    planned(model.model, inner)
    step(model, BATCH)
    enable(model)
    assert installation(model.model) is None
    disable(model.model)
    enable(model)
    assert active(model) == ALL
    hf_ckpt.uninstall(model)
    assert names(model) == before


def test_the_watch_leaves_blocks_alone_that_another_model_has_taken():
    first, second = (tiny_model("llama", seed=seed) for seed in range(2))
    planned(first, {"check_every": 1})
    planned(second)
    second.model.layers[0] = first.model.layers[0]
    step(second, BATCH)
    assert recomputed(second) == ALL
    hf_ckpt.uninstall(second)
    for _ in range(2 * len(ALL)):
        step(first, BATCH)
    assert hf_ckpt.describe(first).recomputed == dict.fromkeys(ALL[1:], 2 * len(ALL)) | {ALL[0]: 0}


# --- pausing and trying -----------------------------------------------------------------------------------------------


def test_paused_ends_with_an_exception_too():
    model = planned(tiny_model("llama"))
    with contextlib.suppress(ZeroDivisionError), hf_ckpt.paused(model):
        assert flags(model) == []
        1 / 0  # noqa: B018
    assert active(model) == ALL


@pytest.mark.parametrize("was", ["absent", "installed", "enabled"])
def test_a_trial_leaves_model_and_counts_as_they_were(was):
    model = tiny_model("llama")
    if was != "absent":
        hf_ckpt.install(model, {"layers": "0"})
    if was == "enabled":
        enable(model)
        assert active(model) == [ALL[0]]
    before = flags(model), forward_hooks(model)
    with installed_temporarily(model, {"layers": "1-2"}):
        assert active(model) == ALL[1:3]
    with installed_temporarily(model):
        assert active(model) == (ALL if was == "absent" else [ALL[0]])
    with pytest.raises(SpecError), installed_temporarily(model, {"layers": "99"}):
        pytest.fail("a refused spec is tried")
    assert (flags(model), forward_hooks(model)) == before
    if was == "absent":
        assert installation(model) is None
    else:
        assert hf_ckpt.describe(model).recomputed == {ALL[0]: int(was == "enabled")}


@pytest.mark.parametrize("was", ["installed", "enabled"])
def test_a_trial_of_a_model_gives_the_one_inside_its_plan_back(was):
    model = tiny_model("llama")
    hf_ckpt.install(model.model, {"layers": "0"})
    if was == "enabled":
        enable(model.model)
        step(model, BATCH)
    model.zero_grad()
    before = snapshot(model), hf_ckpt.describe(model.model)
    assert hf_ckpt.verify(model, BATCH, "selective")
    with pytest.raises(SpecError), installed_temporarily(model, {"layers": "99"}):
        pytest.fail("a refused spec is tried")
    assert installation(model) is None
    assert hf_ckpt.describe(model.model) == before[1]
    assert list(snapshot(model)) == list(before[0])
    enable(model.model)
    step(model, BATCH)
    assert recomputed(model.model) == ["layers.0"] * (1 + (was == "enabled"))


# --- freeing, copying, pickling ---------------------------------------------------------------------------------------


def trained(model):
    planned(model)
    step(model, BATCH)
    with hf_ckpt.paused(model):
        step(model, BATCH)


def uninstalled(model):
    trained(model)
    hf_ckpt.uninstall(model)


def graph_dropped(model):
    """Run a forward and drop its graph without a backward."""
    planned(model)
    model(**BATCH)


def enabled_by_the_process(model):
    hf_ckpt.install()
    enable(model)
    step(model, BATCH)


@pytest.mark.parametrize("prepare", [hf_ckpt.install, trained, uninstalled, graph_dropped, enabled_by_the_process])
def test_no_reference_cycles(prepare, everywhere):
    """hf_ckpt adds no reference cycles: its models are freed with the last name, without the garbage collector."""
    with without_collector():
        for run in (lambda model: step(model, BATCH), prepare):  # without hf_ckpt, there are none
            model = tiny_model("llama", layers=2)
            gone, block = weakref.ref(model), weakref.ref(model.model.layers[0])
            run(model)
            del model
            assert (gone(), block()) == (None, None)
