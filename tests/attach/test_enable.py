"""Enable and disable calls of scripts and libraries: the plans they apply, and the requests they refuse."""

import copy
import inspect
import logging
import pickle

import pytest
import torch
from helpers.adapters import with_lora
from helpers.installed import ALL, active, flags, forward_hooks
from helpers.steps import assert_same, enable, input_gradient_hooks, planned, recomputed, step
from helpers.tables import table

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.described import lost_blocks
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import SpecError
from hf_ckpt.models.tiny import tiny_batch, tiny_model

pytestmark = pytest.mark.compat
BATCH = tiny_batch("llama")
each_name = pytest.mark.parametrize("name", compat.transformers.ENABLE_NAMES)


def installed(spec=None):
    model = tiny_model("llama")
    hf_ckpt.install(model, spec)
    return model


def plan_of(spec):
    return hf_ckpt.install(tiny_model("llama"), spec).plan


CALLS = table(__file__, "calls.yaml")


@pytest.mark.trap(2)
@each_name
@pytest.mark.parametrize(("args", "kwargs", "blocks"), CALLS.values(), ids=CALLS.keys())
def test_enable_calls_that_select_nothing_keep_the_plan(name, args, kwargs, blocks):
    for spec in ({"layers": "1,-1"}, plan_of({"layers": "1,-1"})):
        model = installed(spec)
        getattr(model, name)(*args, **kwargs)
        assert active(model) == [ALL[index] for index in blocks]
        described = hf_ckpt.describe(model)
        getattr(model, name)()  # a bare call changes nothing
        assert (hf_ckpt.describe(model).spec, hf_ckpt.describe(model).plan) == (described.spec, described.plan)


def test_options_and_heads_are_put_on_beside_a_plan_that_was_given():
    model = installed(plan_of({"layers": "1"}))
    enable(model, {"preserve_rng_state": False, "determinism_check": "none"})
    region = installation(model).regions[ALL[1]]
    assert (region.preserve_rng_state, region.determinism_check) == (False, "none")
    for options, head in (({"head": 8}, 8), (None, 8), ({"head": "whole"}, "whole")):
        enable(model, options)
        assert hf_ckpt.describe(model).plan.head == head
        assert ("forward" in vars(model.lm_head)) == (head == 8)


def test_methods_have_the_parameters_of_transformers():
    """PEFT looks for their names. The methods return nothing."""
    model = installed()
    names = ["gradient_checkpointing_kwargs", "every_n_layers", "offload"]
    for name in compat.transformers.ENABLE_NAMES:
        assert list(inspect.signature(getattr(model, name)).parameters)[:3] == names
    for name in (*compat.transformers.ENABLE_NAMES, *compat.transformers.DISABLE_NAMES):
        assert getattr(model, name)() is None


@pytest.mark.trap(11, 52)
@pytest.mark.parametrize("options", [None, {}, {"use_reentrant": False}, {"use_reentrant": True}], ids=str)
def test_checkpointing_is_never_reentrant(caplog, options):
    """Checkpointing is never reentrant: torch's default for `{}` is, and gives no gradients if inputs are frozen."""
    model = installed()
    model.get_input_embeddings().requires_grad_(False)
    expected = step(model, BATCH)
    for _ in range(2):
        enable(model, options)
    assert_same(expected, step(model, BATCH))
    assert recomputed(model) == ALL
    warned = caplog.text.count("recomputes non-reentrantly: same gradients, fewer conditions")
    assert warned == (options == {"use_reentrant": True})


def test_a_step_beyond_the_stack_is_said(caplog):
    assert "full on block 0 of 4" in plan_of({"every_n_layers": 4}).summary()
    assert not caplog.records
    assert "full on block 0 of 4" in plan_of({"every_n_layers": 100}).summary()
    assert "`every_n_layers` is 100, but no stack of LlamaForCausalLM has more than 4 blocks" in caplog.text


def test_a_plan_does_not_name_blocks_that_were_deleted():
    model = installed({"layers": "1,-1"})
    enable(model)
    del model.model.layers[2:]
    plan = hf_ckpt.describe(model).plan
    assert [block.name for block, _ in plan.actions] == ALL[:2]
    assert hf_ckpt.install(model, plan).plan == plan  # it is refused if it names others


def test_lost_blocks_are_named():
    """`lost_blocks` names blocks whose flags or functions someone else changed; the callback checks it at step 1."""
    model = installed({"layers": "0-2"})
    assert lost_blocks(model) == ()
    enable(model)
    assert lost_blocks(model) == ()
    model.model.layers[1].gradient_checkpointing = False
    model.model.layers[2]._gradient_checkpointing_func = lambda function, *args: function(*args)
    assert lost_blocks(model) == tuple(ALL[1:3])
    enable(model)
    assert lost_blocks(model) == ()
    assert active(model) == ALL[:3]
    model.model.layers[1] = copy.deepcopy(model.model.layers[3])
    assert lost_blocks(model) == ()  # the next forward puts the plan on it
    step(model, BATCH)
    assert recomputed(model) == ALL[:3]


def test_a_plan_that_replaces_an_enabled_one_is_said_and_counts_from_0(capsys):
    model = planned(tiny_model("llama"), {"head": 5})
    for _ in range(2):
        step(model, BATCH)
    assert capsys.readouterr().err == "hf_ckpt: LlamaForCausalLM: full on all 4 blocks; head in chunks\n"
    for _ in range(2):
        hf_ckpt.install(model, {"layers": "1", "head": 6})
    assert capsys.readouterr().err == "hf_ckpt: LlamaForCausalLM: full on block 1 of 4; head in chunks\n"
    assert hf_ckpt.describe(model).chunked_heads == 0
    step(model, BATCH)
    assert (recomputed(model), hf_ckpt.describe(model).chunked_heads) == ([ALL[1]], 1)


@pytest.mark.parametrize("spec", [{"head": "auto"}, {"policy": "budget", "budget": "1GiB", "head": "auto"}], ids=str)
def test_no_line_says_that_a_classifier_has_a_head_in_chunks(spec, caplog, capsys):
    model = tiny_model("bert", layers=1)
    for _ in range(2):
        planned(model, spec)
    step(model, tiny_batch("bert"))
    assert caplog.text.count("is not run in chunks, because it has no projection onto a vocabulary") == 1
    assert "in chunks" not in capsys.readouterr().err + str(hf_ckpt.describe(model))
    assert hf_ckpt.describe(model).spec["head"] == "auto"


def test_an_interrupted_forward_does_not_hide_later_batches():
    """After Ctrl-C torch calls no hook, so that the forward seems to go on. Some versions of PEFT pass the hooks of the
    model, but not those of the modules inside."""
    model = planned(tiny_model("llama"), {"policy": "budget", "budget": "1GiB"})

    def interrupt(*args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**BATCH)
    handle.remove()
    measured = installation(model).session.planning.measured_steps
    for _ in range(2):
        model.forward(**BATCH).loss.backward()
    assert installation(model).session.planning.measured_steps == measured + 2


# --- steps that do not train ------------------------------------------------------------------------------------------


@pytest.mark.trap(24)
def test_eval_mode_with_gradients_is_said_once(caplog):
    """Eval mode with gradients warns once: blocks are checkpointed in train mode only, so memory may run out."""
    expected = step(tiny_model("llama"), BATCH)
    model = planned(tiny_model("llama"))
    with caplog.at_level(logging.WARNING, "hf_ckpt"):
        step(model, BATCH)
        assert not caplog.records
        model.eval()
        for _ in range(2):
            assert_same(expected, step(model, BATCH))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "LlamaModel runs in eval mode with gradients on" in caplog.text
    assert recomputed(model) == ALL  # from the step in train mode


@pytest.mark.trap(24)
@pytest.mark.parametrize("training", [True, False])
def test_evaluation_neither_warns_nor_recomputes(caplog, training):
    model = planned(tiny_model("llama").train(training))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            model(**BATCH)
    model.requires_grad_(False).eval()(**BATCH)  # a frozen model does not train
    assert not caplog.records
    assert sum(hf_ckpt.describe(model).forwards.values()) == 0


THROUGH = {
    "plain": lambda model: model,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "copied": copy.deepcopy,
    "lora": lambda model: with_lora(model, "llama"),  # PEFT calls the forward of a model past its hooks
}


@pytest.mark.trap(74)
@pytest.mark.parametrize(
    ("family", "through", "spec"),
    [*(("llama", through, None) for through in THROUGH), ("t5", "plain", None), ("llama", "plain", {"policy": "none"})],
)
def test_training_under_a_plan_that_nobody_enabled_is_said_once(caplog, family, through, spec):
    """In the first training forward, not in evaluation. Nothing is left on the model then. No plan, no reminder."""
    model, batch = tiny_model(family), tiny_batch(family)
    hooks = forward_hooks(model)
    hf_ckpt.install(model, spec)
    assert all(hf_ckpt.verify(model, batch, "full") for _ in range(2))
    trained = THROUGH[through](model)
    trained.eval()(**batch)
    with torch.no_grad():
        trained.train()(**batch)
    assert not caplog.records
    for _ in range(2):
        step(trained, batch)
    name = compat.transformers.ENABLE_NAMES[-1]
    text = f"hf_ckpt is installed on {type(model).__name__}, but not enabled: call model.{name}(), or pass "
    text += f"{name.removesuffix('_enable')}=True to TrainingArguments."
    assert [record.getMessage() for record in caplog.records] == ([text] if spec is None else [])
    if spec is None and through in ("plain", "lora"):
        hooks_after = forward_hooks(model)
        assert {name: hooks_after[name] for name in hooks} == hooks


@pytest.mark.parametrize("off", ["paused", "disabled", "uninstalled", "guarded"])
def test_a_plan_that_is_off_on_purpose_is_not_reminded_of(caplog, off):
    model = installed()
    if off == "guarded":
        hf_ckpt.OomGuard(model)
    elif off == "uninstalled":
        hf_ckpt.uninstall(model)
    else:
        enable(model)
    if off == "disabled":
        getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    with hf_ckpt.paused(model):
        step(model, BATCH)
    assert not caplog.records


def test_disabling_a_model_inside_the_planned_one_is_said_once(caplog):
    """Its class switches the flags of blocks off, which are those of the plan."""
    model = planned(tiny_model("llama"))
    for _ in range(2):
        getattr(model.model, compat.transformers.DISABLE_NAMES[-1])()
        step(model, BATCH)
    assert caplog.text.count("LlamaModel was disabled, and with it blocks of LlamaForCausalLM") == 1
    assert recomputed(model) == []
    enable(model)
    step(model, BATCH)
    assert recomputed(model) == ALL


# --- refused requests -------------------------------------------------------------------------------------------------


WHOLE = "`every_n_layers` must be a whole number of at least 1"
REFUSED = [({"every_n_layers": 0}, WHOLE), ({"determinism_chek": "none"}, "did you mean `determinism_check`")]


@pytest.mark.trap(35)
@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_invalid_enable_arguments_are_refused_with_the_reason(options, said):
    """Every call refuses invalid values and keys, which otherwise do nothing, or crash late (0 layers)."""
    model = tiny_model("llama")
    with pytest.raises(SpecError, match=said):
        hf_ckpt.install(model, options)
    hf_ckpt.install(model)
    for name in compat.transformers.ENABLE_NAMES:
        with pytest.raises(SpecError, match=said):
            getattr(model, name)(options)
        for no_dict in ("full", ["layers"], 3):
            with pytest.raises(SpecError, match="must be a dict"):
                getattr(model, name)(no_dict)
    assert flags(model) == []
    assert not hf_ckpt.describe(model).enabled


def test_hooks_on_embeddings_are_off_while_a_plan_is_on():
    """Repeated enable calls do not pile them up; those of before come back, even those without a handle."""
    model = tiny_model("llama")
    for _ in range(2):
        model.enable_input_require_grads()
    before = input_gradient_hooks(model)
    assert before > 0
    hf_ckpt.install(model)
    for _ in range(3):
        enable(model)
        model.enable_input_require_grads()  # as TRL does
        with_lora(model, "llama")  # PEFT calls it if checkpointing is on
        assert input_gradient_hooks(model) == 0
    getattr(model, compat.transformers.DISABLE_NAMES[-1])()
    assert input_gradient_hooks(model) == before
    hf_ckpt.uninstall(model)
    assert input_gradient_hooks(model) == before


def test_conflicts_and_missing_blocks_are_named_beside_wrong_keys():
    model = tiny_model("llama")
    wrong = {"zzz": 1, "layers": "9", "host_budget": "1GiB"}
    expected = ["`zzz` is not a key", "`host_budget` goes with", "`layers` names 9, but stack"]
    for ask in (lambda: hf_ckpt.install(model, wrong), lambda: enable(planned(model), wrong)):
        with pytest.raises(SpecError) as caught:
            ask()
        assert [text for text in expected if text not in str(caught.value)] == [], caught.value
        assert len(caught.value.problems) == len(expected)
