"""What install puts on a model, that it survives what others do to the model, and that it comes off without a trace."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import logging
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from conftest import assert_same, enable, input_gradient_hooks, recomputed, step
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hf_ckpt
from hf_ckpt import Plan, compat, install
from hf_ckpt.errors import HfCkptError, OwnerConflictError, PlanMismatchError, SpecError
from hf_ckpt.families import find_blocks
from hf_ckpt.install import enable_calls, installation, lost_blocks, trial
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

pytestmark = pytest.mark.compat

ALL = [f"model.layers.{index}" for index in range(4)]


def snapshot(model):
    """`vars()` of every module, with the contents of its dicts (parameters, buffers, hooks) as they are now."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def forward_hooks(model):
    """How many hooks of each kind every module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {name: [len(vars(module)[kind]) for kind in kinds] for name, module in model.named_modules()}


def flags(model):
    """Names of the modules whose checkpointing flag is on."""
    return [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]


def active(model):
    """Names of the planned blocks that a training step really recomputes now."""
    before = hf_ckpt.describe(model).recomputed
    step(model, tiny_batch("llama"))
    model.zero_grad()
    after = hf_ckpt.describe(model).recomputed
    return [name for name, times in after.items() if times == before[name] + 1]


# --- enabling and disabling -----------------------------------------------------------------------------------------


def test_install_enables_nothing_yet():
    model = tiny_model("llama")
    described = hf_ckpt.install(model, {"layers": "0"})
    assert not described.enabled
    assert "not enabled" in str(described)
    assert flags(model) == []
    assert active(model) == []
    enable(model)
    assert hf_ckpt.describe(model).enabled
    assert flags(model) == ["model.layers.0"]
    assert active(model) == ["model.layers.0"]


BARE = {
    "nothing": ((), {}),
    "None": ((None,), {}),
    "empty": (({},), {}),
    "use_reentrant": (({"use_reentrant": False},), {}),
    "defaults beside": ((), {"every_n_layers": 1, "offload": False}),
    "defaults by position": ((None, 1, False), {}),
    "defaults inside": (({"every_n_layers": 1, "offload": False, "use_reentrant": False},), {}),
    "by keyword": ((), {"gradient_checkpointing_kwargs": None}),
    "by the new keyword": ((), {"activation_checkpointing_kwargs": {"use_reentrant": False}}),
}


@pytest.mark.parametrize("name", compat.ENABLE_NAMES)
@pytest.mark.parametrize(("args", "kwargs"), BARE.values(), ids=BARE.keys())
def test_a_bare_enable_keeps_the_plan(name, args, kwargs):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1,-1"})
    getattr(model, name)(*args, **kwargs)
    assert active(model) == [ALL[1], ALL[3]]


@pytest.mark.parametrize("name", compat.ENABLE_NAMES)
@pytest.mark.parametrize("keyword", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", None])
def test_new_keys_replace_the_plan_and_stay(name, keyword):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    asked = {"layers": "2-3"}
    call = getattr(model, name)
    call(asked) if keyword is None else call(**{keyword: asked})
    assert active(model) == ALL[2:]
    call()
    assert active(model) == ALL[2:]
    call({"policy": "full", "every_n_layers": 2})
    assert active(model) == [ALL[0], ALL[2]]
    call(None, every_n_layers=3)
    assert active(model) == [ALL[0], ALL[3]]


def test_options_alone_keep_the_choice_of_blocks():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "1"})
    enable(model, {"preserve_rng_state": False, "determinism_check": "none"})
    assert active(model) == [ALL[1]]
    region = installation(model).regions[ALL[1]]
    assert (region.preserve_rng_state, region.determinism_check) == (False, "none")
    assert hf_ckpt.describe(model).spec == {
        "policy": "full",
        "layers": "1",
        "preserve_rng_state": False,
        "determinism_check": "none",
    }


@pytest.mark.parametrize(("on", "off"), [*zip(compat.ENABLE_NAMES, compat.DISABLE_NAMES, strict=True)])
def test_cycles_of_disable_and_enable(on, off):
    """TRL, PEFT and a second `train()` do this; the plan comes back, nothing piles up."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0,2"})
    getattr(model, on)()
    once = forward_hooks(model)
    for _ in range(3):
        getattr(model, off)()
        assert flags(model) == []
        assert active(model) == []
        assert not hf_ckpt.describe(model).enabled
        getattr(model, off)()
        getattr(model, on)()
        getattr(model, on)()
        assert active(model) == [ALL[0], ALL[2]]
        assert forward_hooks(model) == once


def test_disable_keeps_gradients_and_counts():
    model = tiny_model("llama")
    expected = step(model, tiny_batch("llama"))
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch("llama"))
    getattr(model, compat.DISABLE_NAMES[-1])()
    assert_same(expected, step(model, tiny_batch("llama")))
    assert recomputed(model) == ALL


def test_install_again_without_a_spec_changes_nothing():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    before = snapshot(model)
    assert list(hf_ckpt.install(model).plan.active()) == [ALL[0]]
    assert snapshot(model) == before


def test_install_again_with_a_spec_takes_over_at_once():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    assert hf_ckpt.install(model, {"layers": "1"}).enabled
    assert active(model) == [ALL[1]]


def test_hooks_answer_as_transformers_methods_do():
    """Callers find the parameter by name, and expect no result."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    for name in compat.ENABLE_NAMES:
        hook = getattr(model, name)
        assert list(inspect.signature(hook).parameters)[:3] == [
            "gradient_checkpointing_kwargs",
            "every_n_layers",
            "offload",
        ]
        assert hook() is None
    for name in compat.DISABLE_NAMES:
        assert getattr(model, name)() is None


# --- refused requests -----------------------------------------------------------------------------------------------

REFUSED = [
    {"polcy": "full"},
    {"layers": "9"},
    {"layers": "2-1"},
    {"layers": {"encoder": "0"}},
    {"use_reentrant": True},
    {"every_n_layers": 0},
    {"every_n_layers": -1},
    {"every_n_layers": 1.5},
    {"every_n_layers": True},
    {"context_fn": print},
]


@pytest.mark.parametrize("asked", REFUSED, ids=str)
@pytest.mark.parametrize("was", ["absent", "installed", "enabled"])
def test_a_refused_spec_leaves_everything_as_it_was(asked, was):
    model = tiny_model("llama")
    if was != "absent":
        hf_ckpt.install(model, {"layers": "1"})
    if was == "enabled":
        enable(model)
    before = snapshot(model)
    with pytest.raises(SpecError) as caught:
        hf_ckpt.install(model, asked)
    assert len(caught.value.problems) == 1
    if was != "absent":
        with pytest.raises(SpecError):
            enable(model, asked)
        assert active(model) == ([ALL[1]] if was == "enabled" else [])
        assert hf_ckpt.describe(model).spec == {"policy": "full", "layers": "1"}
    assert snapshot(model) == before


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_arguments_beside_the_kwargs_are_validated_too(every):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    with pytest.raises(SpecError, match="`every_n_layers` must be a whole number of at least 1"):
        getattr(model, compat.ENABLE_NAMES[-1])(None, every_n_layers=every)
    assert flags(model) == []


@pytest.mark.parametrize("asked", ["full", ["layers"], 3], ids=repr)
def test_kwargs_that_are_no_dict_are_a_spec_error(asked):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    with pytest.raises(SpecError):
        enable(model, asked)
    assert flags(model) == []


def test_describe_without_an_installation():
    with pytest.raises(HfCkptError, match=r"call hf_ckpt.install\(model\) first"):
        hf_ckpt.describe(tiny_model("llama"))


# --- uninstall ------------------------------------------------------------------------------------------------------


def checkpointed_before(model, how):
    """Give a model a past: what someone did to it before hf_ckpt came."""
    if how == "hf":
        enable(model, {"use_reentrant": False})
    if how == "hf, one block off":
        enable(model, {"use_reentrant": False})
        next(iter(find_blocks(model).modules.values())).gradient_checkpointing = False
    if how == "input gradients":
        model.enable_input_require_grads()
    if how == "hf, off again":
        enable(model)
        getattr(model, compat.DISABLE_NAMES[-1])()
    return model


def comparable(model):
    """`snapshot` without what transformers makes anew on each call: the embedding hook and its handle."""
    return {
        name: {
            key: value for key, value in values.items() if key not in ("_require_grads_hooks", "_require_grads_hook")
        }
        | {"_forward_hooks": len(values["_forward_hooks"])}
        for name, values in snapshot(model).items()
    }


@pytest.mark.parametrize("how", ["nothing", "hf", "hf, one block off", "hf, off again", "input gradients"])
@pytest.mark.parametrize("family", FAMILIES)
def test_uninstall_leaves_no_trace(family, how):
    """`vars()` of every module and all hook counts, whatever happened in between."""
    model = checkpointed_before(tiny_model(family), how)
    batch = tiny_batch(family)
    before, hooks, input_hooks = comparable(model), forward_hooks(model), input_gradient_hooks(model)
    expected = step(model, batch)
    model.zero_grad()
    hf_ckpt.install(model)
    enable(model)
    assert_same(expected, step(model, batch))
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks]
    enable(model, {"layers": "0"})
    getattr(model, compat.DISABLE_NAMES[-1])()
    enable(model)
    with hf_ckpt.paused(model):
        step(model, batch)
    model.zero_grad()
    hf_ckpt.uninstall(model)
    assert comparable(model) == before
    assert forward_hooks(model) == hooks
    assert input_gradient_hooks(model) == input_hooks
    hf_ckpt.uninstall(model)  # nothing there any more: nothing happens
    assert comparable(model) == before
    assert_same(expected, step(model, batch))


def test_install_on_an_enabled_model_takes_over_at_once():
    model = checkpointed_before(tiny_model("llama"), "hf")
    theirs = model.model.layers[0]._gradient_checkpointing_func
    assert hf_ckpt.install(model, {"layers": "1"}).enabled
    assert active(model) == [ALL[1]]
    assert flags(model) == [ALL[1]]
    hf_ckpt.uninstall(model)
    assert set(flags(model)) >= set(ALL)
    assert model.model.layers[0]._gradient_checkpointing_func is theirs


@pytest.mark.parametrize("when", ["before", "after"])
def test_uninstall_after_adapters_came(when):
    """The base model is the same object; the modules PEFT put in have never been touched."""
    model = tiny_model("llama")
    if when == "before":
        hf_ckpt.install(model)
        enable(model)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    if when == "after":
        hf_ckpt.install(wrapped)
        enable(wrapped)
    assert input_gradient_hooks(model) == 0
    hf_ckpt.uninstall(wrapped)
    assert flags(wrapped) == []
    ours = {"_hf_ckpt", *compat.ENABLE_NAMES, *compat.DISABLE_NAMES, "enable_input_require_grads"}
    assert not [name for name, module in wrapped.named_modules() if vars(module).keys() & ours]


def test_layers_dropped_since():
    """Pruning shortens the list of blocks: the next enable plans the ones that are left."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model)
    model.model.layers = model.model.layers[:3]
    before = snapshot(model)
    enable(model)
    assert active(model) == ALL[:3]
    assert list(hf_ckpt.describe(model).plan.active()) == ALL[:3]
    hf_ckpt.uninstall(model)
    assert flags(model) == []
    assert forward_hooks(model).keys() == before.keys()


def test_uninstall_after_someone_wrapped_a_block():
    """torch's checkpoint wrapper around a block after install: nothing of ours stays inside it."""
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model)
    block = model.model.layers[0]
    model.model.layers[0] = checkpoint_wrapper(block)
    with pytest.raises(OwnerConflictError):
        enable(model)
    hf_ckpt.uninstall(model)
    assert not block.gradient_checkpointing
    assert "_gradient_checkpointing_func" not in vars(block)


@pytest.mark.parametrize("first_off", ["outer", "inner"])
def test_an_inner_model_enabled_first_gives_way(first_off):
    """Scripts enable `model.model` or a language tower, then the whole: one owner is left, and it comes off whole."""
    model = tiny_model("llama")
    before = snapshot(model)
    hf_ckpt.install(model.model, {"layers": "0"})
    enable(model.model)
    assert hf_ckpt.install(model, {"layers": "1"}).enabled
    assert active(model) == [ALL[1]]
    for owner in (model, model.model) if first_off == "outer" else (model.model, model):
        hf_ckpt.uninstall(owner)
    model.zero_grad()
    assert snapshot(model) == before


@pytest.mark.parametrize("first_off", ["outer", "inner"])
def test_a_part_of_an_installed_model(first_off):
    """Refused, or it takes the blocks over: in both cases nothing of ours is left in the end, in whatever order."""
    model = tiny_model("llama")
    before = snapshot(model)
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    with contextlib.suppress(OwnerConflictError):
        hf_ckpt.install(model.model, {"layers": "1"})
    for owner in (model, model.model) if first_off == "outer" else (model.model, model):
        hf_ckpt.uninstall(owner)
    assert snapshot(model) == before


# --- pausing and trying ---------------------------------------------------------------------------------------------


def test_paused_turns_the_plan_off_and_on():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    before = forward_hooks(model)
    with hf_ckpt.paused(model):
        assert flags(model) == []
        assert active(model) == []
        with hf_ckpt.paused(model):
            assert active(model) == []
        assert active(model) == []  # the inner block does not turn on what the outer turned off
    assert active(model) == [ALL[0]]
    assert forward_hooks(model) == before


def test_paused_ends_with_an_exception_too():
    model = tiny_model("llama")
    hf_ckpt.install(model)
    enable(model)
    with pytest.raises(ZeroDivisionError), hf_ckpt.paused(model):
        1 / 0  # noqa: B018
    assert active(model) == ALL


def test_paused_leaves_a_disabled_plan_disabled():
    model = tiny_model("llama")
    with hf_ckpt.paused(model):  # not even installed
        assert installation(model) is None
    hf_ckpt.install(model)
    with hf_ckpt.paused(model):
        assert flags(model) == []
    assert flags(model) == []


def test_uninstall_inside_paused_stays_uninstalled():
    model = tiny_model("llama")
    before = snapshot(model)
    hf_ckpt.install(model)
    enable(model)
    with hf_ckpt.paused(model):
        hf_ckpt.uninstall(model)
    assert snapshot(model) == before


def test_a_plan_chosen_inside_paused_is_the_one_that_comes_back():
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    with hf_ckpt.paused(model):
        hf_ckpt.install(model, {"layers": "2"})
    assert active(model) == [ALL[2]]


@pytest.mark.parametrize("was", ["absent", "installed", "enabled"])
def test_a_trial_leaves_model_and_counts_as_they_were(was):
    model = tiny_model("llama")
    if was != "absent":
        hf_ckpt.install(model, {"layers": "0"})
    if was == "enabled":
        enable(model)
        assert active(model) == [ALL[0]]
    before = flags(model), forward_hooks(model)
    with trial(model, {"layers": "1-2"}):
        assert active(model) == ALL[1:3]
    with trial(model):
        assert active(model) == (ALL if was == "absent" else [ALL[0]])
    with pytest.raises(SpecError), trial(model, {"layers": "99"}):
        pytest.fail("a refused spec is tried")
    assert (flags(model), forward_hooks(model)) == before
    if was == "absent":
        assert installation(model) is None
    else:
        assert hf_ckpt.describe(model).recomputed == {ALL[0]: int(was == "enabled")}


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_described_plan_installs_elsewhere(tmp_path, suffix):
    """`describe(model).save(path)`, then `{"plan": path}`: through install and through enable."""
    path = tmp_path / f"plan.{suffix}"
    source = tiny_model("llama")
    hf_ckpt.install(source, {"layers": "0,2"}).save(path)
    by_install, by_enable = tiny_model("llama"), tiny_model("llama")
    hf_ckpt.install(by_install, {"plan": str(path)})
    enable(by_install)
    hf_ckpt.install(by_enable)
    enable(by_enable, {"plan": str(path)})
    for model in (by_install, by_enable):
        assert active(model) == [ALL[0], ALL[2]]
        assert hf_ckpt.describe(model).plan == hf_ckpt.describe(source).plan == Plan.load(path)
        assert hf_ckpt.describe(model).spec == {"plan": str(path)}
        enable(model)
        assert active(model) == [ALL[0], ALL[2]]


def plan_of(family, spec, **keys):
    return hf_ckpt.install(tiny_model(family, **keys), spec).plan


def test_a_plan_object_installs_and_stays():
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    for bare in (None, {}, {"use_reentrant": False}, {"every_n_layers": 1, "offload": False}):
        enable(model, bare)
        assert active(model) == [ALL[0], ALL[2]]


def test_options_keep_a_plan_object():
    """An enable call that selects nothing keeps the plan, wherever the plan came from."""
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    enable(model, {"preserve_rng_state": False})
    assert active(model) == [ALL[0], ALL[2]]
    assert not installation(model).regions[ALL[0]].preserve_rng_state


def test_a_policy_replaces_a_plan_object():
    model = tiny_model("llama")
    hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"}))
    enable(model, {"policy": "full"})
    assert active(model) == ALL


def test_a_described_plan_object_is_not_called_full():
    """The spec shown must not claim what the plan does not do."""
    model = tiny_model("llama")
    assert hf_ckpt.install(model, plan_of("llama", {"layers": "0,2"})).spec != {"policy": "full"}


@pytest.mark.parametrize(
    "other",
    [("llama", {"layers": 3}), ("gpt2", {}), ("bert", {})],
    ids=["fewer layers", "gpt2", "bert"],
)
def test_a_plan_for_another_model_installs_nothing(other, tmp_path):
    family, keys = other
    plan = plan_of(family, "full", **keys)
    plan.save(tmp_path / "plan.json")
    model = tiny_model("llama")
    before = snapshot(model)
    for given in (plan, {"plan": str(tmp_path / "plan.json")}):
        with pytest.raises(PlanMismatchError, match="is for another model"):
            hf_ckpt.install(model, given)
        assert snapshot(model) == before
    hf_ckpt.install(model, {"layers": "1"})
    enable(model)
    with pytest.raises(PlanMismatchError):
        enable(model, {"plan": str(tmp_path / "plan.json")})
    assert active(model) == [ALL[1]]


@pytest.mark.parametrize("content", [None, "{broken", "{}", '{"hf_ckpt_plan": 1}'])
def test_a_plan_that_cannot_be_read_installs_nothing(content, tmp_path):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(PlanMismatchError, match=str(path)):
        hf_ckpt.install(model, {"plan": str(path)})
    assert snapshot(model) == before


def test_spec_files_install(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("policy: full\nlayers: 1-2\n", encoding="utf-8")
    model = tiny_model("llama")
    hf_ckpt.install(model, str(path))
    enable(model)
    assert active(model) == ALL[1:3]


def test_describe_counts_and_prints():
    model = tiny_model("t5")
    hf_ckpt.install(model, {"layers": {"encoder": "0", "decoder": "-1"}})
    enable(model)
    for _ in range(2):
        step(model, tiny_batch("t5"))
    found = hf_ckpt.describe(model)
    assert found.recomputed == found.forwards == {"encoder.block.0": 2, "decoder.block.3": 2}
    text = str(found)
    assert "encoder (4 x T5Block): full 0; keep 1-3" in text
    assert "decoder (4 x T5Block): keep 0-2; full 3" in text
    assert "4 checkpointed block calls, 4 recomputations" in text


def test_lost_blocks_are_named():
    """Someone set the flags directly; the callback asks this at step 1."""
    model = tiny_model("llama")
    assert lost_blocks(model) == ()
    hf_ckpt.install(model, {"layers": "0-2"})
    assert lost_blocks(model) == ()
    enable(model)
    assert lost_blocks(model) == ()
    model.model.layers[1].gradient_checkpointing = False
    model.model.layers[2]._gradient_checkpointing_func = lambda function, *args: function(*args)
    assert lost_blocks(model) == tuple(ALL[1:3])
    enable(model)
    assert lost_blocks(model) == ()
    assert active(model) == ALL[:3]


# --- every model of the process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", compat.ENABLE_NAMES)
def test_install_for_the_process_answers_every_enable(everywhere, name):
    everywhere(spec={"layers": "0"})
    early = tiny_model("llama")
    assert enable_calls() == 0
    getattr(early, name)()
    assert active(early) == [ALL[0]]
    late = tiny_model("llama")
    getattr(late, name)({"layers": "1"})
    assert active(late) == [ALL[1]]
    getattr(late, name)()
    assert active(late) == [ALL[1]]
    assert enable_calls() == 3


def test_uninstall_for_the_process_gives_everything_back(everywhere):
    names = (*compat.ENABLE_NAMES, *compat.DISABLE_NAMES)
    originals = {name: vars(compat.PreTrainedModel)[name] for name in names}
    model = tiny_model("llama")
    before = snapshot(model)
    everywhere()
    assert vars(compat.PreTrainedModel)[compat.ENABLE_NAMES[0]] is not originals[compat.ENABLE_NAMES[0]]
    enable(model)
    step(model, tiny_batch("llama"))
    model.zero_grad()
    hf_ckpt.uninstall()
    assert {name: vars(compat.PreTrainedModel)[name] for name in names} == originals
    assert snapshot(model) == before
    hf_ckpt.uninstall()
    enable(model, {"use_reentrant": False})  # transformers' own again
    assert installation(model) is None
    assert model.model.layers[0].gradient_checkpointing is True


def test_installing_twice_for_the_process_undoes_once(everywhere):
    original = vars(compat.PreTrainedModel)[compat.ENABLE_NAMES[0]]
    everywhere(spec={"layers": "0"})
    everywhere(spec={"layers": "1"})
    model = tiny_model("llama")
    enable(model)
    assert active(model) == [ALL[1]]
    hf_ckpt.uninstall()
    assert vars(compat.PreTrainedModel)[compat.ENABLE_NAMES[0]] is original


def test_a_model_installed_by_hand_keeps_its_plan(everywhere):
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "3"})
    everywhere(spec={"layers": "0"})
    enable(model)
    assert active(model) == [ALL[3]]
    hf_ckpt.uninstall()
    assert active(model) == [ALL[3]]


def test_a_refused_process_spec_hooks_nothing(everywhere):
    originals = [vars(compat.PreTrainedModel)[name] for name in compat.ENABLE_NAMES]
    with pytest.raises(SpecError):
        everywhere(spec={"layrs": "0"})
    assert [vars(compat.PreTrainedModel)[name] for name in compat.ENABLE_NAMES] == originals
    everywhere(spec={"layers": "7"})  # a good spec that this model is too short for
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises(SpecError, match="names 7"):
        enable(model)
    assert snapshot(model) == before
    everywhere()
    with pytest.raises(SpecError):
        enable(model, {"layrs": "0"})
    assert snapshot(model) == before


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "peft"])
def test_enable_when_prepared(everywhere, wrapped):
    """For scripts that never ask for checkpointing: `Accelerator.prepare` does."""
    prepare = vars(Accelerator)["prepare"]
    everywhere(spec={"layers": "0"}, enable_when_prepared=True)
    model = tiny_model("llama")
    if wrapped:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    frozen = tiny_model("llama").requires_grad_(False)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad])
    prepared, other, _ = Accelerator(cpu=True).prepare(model, frozen, optimizer)
    assert active(prepared) == [ALL[0]]
    assert installation(other) is None  # a reference model is not trained
    assert enable_calls() == 1
    hf_ckpt.uninstall()
    assert vars(Accelerator)["prepare"] is prepare


def test_a_call_on_a_part_keeps_the_plan_of_the_whole(everywhere):
    """Scripts enable the model, then its backbone or language tower once more: the plan is not replaced in silence."""
    everywhere()
    model = tiny_model("llama")
    before = snapshot(model)
    enable(model, {"layers": "0"})
    enable(model.model)
    assert active(model) == [ALL[0]]
    model.zero_grad()
    hf_ckpt.uninstall()
    assert snapshot(model) == before


@pytest.mark.compat
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_call_on_every_part_keeps_the_plan_of_a_model_installed_by_hand(family):
    """sentence-transformers enables every model inside a model, from the outside in."""
    asked = {"rules": [{"layers": "0", "policy": "full"}]}
    model, plain = tiny_model(family), tiny_model(family)
    before = snapshot(model)
    hf_ckpt.install(model)
    parts = [part for part in model.modules() if isinstance(part, compat.PreTrainedModel)]
    assert len(parts) == {"bert": 2, "t5": 3}[family]
    for part in parts:
        enable(part, asked)
    assert lost_blocks(model) == ()
    batch = tiny_batch(family)
    assert_same(step(plain, batch), step(model, batch))
    assert recomputed(model) == [block.name for block in find_blocks(model).blocks if block.index == 0]
    enable(model, {"policy": "none"})
    enable(parts[-1], {"policy": "none"})  # transformers would hand it on to torch
    assert_same(step(plain, batch), step(model, batch))
    model.zero_grad()
    hf_ckpt.uninstall(model)
    assert snapshot(model) == before


@pytest.mark.compat
def test_a_part_answers_for_itself_once_the_plan_is_off_or_it_is_a_copy():
    model = tiny_model("bert")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    copied, pickled = copy.deepcopy(model.bert), pickle.loads(pickle.dumps(model.bert))
    again = copy.deepcopy(model)
    getattr(model, compat.DISABLE_NAMES[-1])()
    for part in (model.bert, copied, pickled):
        enable(part, {"use_reentrant": False})
        assert {layer.gradient_checkpointing for layer in part.encoder.layer} == {True}
        assert not [name for name in vars(part) if name in compat.ENABLE_NAMES]
    enable(again.bert, {"policy": "full"})  # a copy of the whole has parts of its own
    assert lost_blocks(again) == ()
    assert [*hf_ckpt.describe(again).forwards] == ["bert.encoder.layer.0"]


def test_models_enabled_while_they_are_built_come_off_whole(everywhere):
    """An old config key makes transformers enable checkpointing in the inner model's constructor."""
    everywhere()
    models = [tiny_model("llama", gradient_checkpointing=True) for _ in range(4)]
    for model in models:
        enable(model, {"layers": "1"})
        assert active(model) == [ALL[1]]
    hf_ckpt.uninstall()
    ours = {"_hf_ckpt", *compat.ENABLE_NAMES}
    for model in models:
        assert flags(model) == []
        assert not [name for name, module in model.named_modules() if vars(module).keys() & ours]


# --- copies and memory ----------------------------------------------------------------------------------------------


def test_copies_are_independent():
    """A copy carries its own plan: what is done to one is not done to the other."""
    model = tiny_model("llama")
    hf_ckpt.install(model, {"layers": "0"})
    enable(model)
    twin = copy.deepcopy(model)
    enable(twin, {"layers": "1"})
    assert active(twin) == [ALL[1]]
    assert active(model) == [ALL[0]]
    hf_ckpt.uninstall(model)
    assert active(twin) == [ALL[1]]
    assert flags(model) == []


def freed_after(prepare):
    """Whether a model is gone as soon as its last name is, without the garbage collector's help."""
    model = tiny_model("llama", layers=2)
    gone = weakref.ref(model)
    block = weakref.ref(model.model.layers[0])
    prepare(model)
    del model
    return gone() is None, block() is None


def trained(model):
    hf_ckpt.install(model)
    enable(model)
    step(model, tiny_batch("llama"))


def uninstalled(model):
    trained(model)
    hf_ckpt.uninstall(model)


def paused_once(model):
    trained(model)
    with hf_ckpt.paused(model):
        step(model, tiny_batch("llama"))


def graph_dropped(model):
    """A forward whose graph is thrown away without backward."""
    hf_ckpt.install(model)
    enable(model)
    model(**tiny_batch("llama"))


def enabled_by_the_process(model):
    hf_ckpt.install()
    enable(model)
    step(model, tiny_batch("llama"))


@pytest.mark.parametrize(
    "prepare", [hf_ckpt.install, trained, uninstalled, paused_once, graph_dropped, enabled_by_the_process]
)
def test_no_reference_cycles(prepare, everywhere):
    """A model that hf_ckpt was on is freed exactly when one that it never saw is."""
    gc.collect()
    gc.disable()
    try:
        stock = freed_after(lambda model: step(model, tiny_batch("llama")))
        ours = freed_after(prepare)
    finally:
        gc.enable()
    assert stock == (True, True)  # else this transformers has cycles of its own, and the test needs another model
    assert ours == stock


def test_nothing_is_logged_but_at_debug_level(caplog):
    model = tiny_model("llama")
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        hf_ckpt.install(model)
        enable(model)
        step(model, tiny_batch("llama"))
        hf_ckpt.uninstall(model)
    assert not caplog.records


def test_the_function_and_the_module_share_a_name():
    """`hf_ckpt.install` is the function, also after the module was imported."""
    module = importlib.import_module("hf_ckpt.install")
    assert hf_ckpt.install is install is module.install
    assert hf_ckpt.describe is module.describe


def test_the_head_can_be_asked_for_beside_a_plan_that_was_given():
    """It selects no blocks, so the plan stays; and it stays itself over bare enables."""
    model = tiny_model("llama")
    given = hf_ckpt.install(model, {"layers": "1-2"}).plan
    hf_ckpt.uninstall(model)
    hf_ckpt.install(model, given)
    enable(model, {"head": 8})
    assert (active(model), hf_ckpt.describe(model).plan.head) == ([ALL[1], ALL[2]], 8)
    enable(model)
    assert (active(model), hf_ckpt.describe(model).plan.head) == ([ALL[1], ALL[2]], 8)
    enable(model, {"head": "full"})
    assert hf_ckpt.describe(model).plan.head == "full"
    assert "forward" not in vars(model.lm_head)
