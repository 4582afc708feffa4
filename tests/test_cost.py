"""Predicted bytes against those that are really held, and what tracing needs and leaves."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import signal
from unittest import mock

import pytest
import torch
import transformers
from conftest import assert_same, enable, step
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker
from transformers.utils import import_utils

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.blueprint import Weights, blueprint_from_config, blueprint_of
from hf_ckpt.cost import ACTIONS, Answers, Step, actions_for, optimizer_state, trace_costs, walks_of
from hf_ckpt.devices import DEVICES
from hf_ckpt.errors import HfCkptError
from hf_ckpt.families import base_model, find_blocks
from hf_ckpt.install import installation, trial
from hf_ckpt.measure import LiveBytes
from hf_ckpt.plan import KEEP, Action, Plan
from hf_ckpt.setups import add_lora
from hf_ckpt.timeline import timeline, worst_timeline
from hf_ckpt.tiny import FAMILIES, tiny_batch, tiny_model

CPU = DEVICES["cpu"]
_, SELECTIVE, _, FULL = ACTIONS
LINEAR = Action("selective", ("linear",))
SAVED = (*ACTIONS, LINEAR)
TUNINGS = ("everything", "lora")
each_family = pytest.mark.parametrize("family", FAMILIES)
each_tuning = pytest.mark.parametrize("tuning", TUNINGS)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def model_of(family, tuning="everything", *, attention="sdpa", **options):
    """A tiny model to train; T5 of transformers 4 has no attention but its own."""
    if attention == "sdpa" and family == "t5" and not transformers.T5ForConditionalGeneration._supports_sdpa:
        attention = "eager"
    model = tiny_model(family, attention=attention, **options)
    return add_lora(model, rank=4).train() if tuning == "lora" else model


def inputs_of(model, batch):
    return {**batch, "use_cache": False} if compat.wants_use_cache(base_model(model)) else dict(batch)


def loss_of(model, inputs):
    """In a function of its own: the outputs are gone before the backward, as in a Trainer."""
    return model(**inputs).loss


def plan_of(model, actions):
    found = find_blocks(model)
    return Plan(found.family, found.model, tuple(zip(found.blocks, actions, strict=True)))


def chosen(costs, choice):
    """The actions of a choice, block after block."""
    return [costs.actions[action] for stack in choice for action in stack]


# --- what a block holds, to the byte --------------------------------------------------------------------------------

PEAK = {"layers": 6, "hidden": 256}


def mixed(costs):
    """Every action in every stack, in no order."""
    order = (2, 0, 3, 1, 1, 3, 0, 2)

    def one(stack, place):
        choices = stack.choices[stack.kinds[place]]
        return choices[order[place % len(order)] % len(choices)]

    return tuple(tuple(one(stack, place) for place in range(len(stack.kinds))) for stack in costs.stacks)


def plans_of(costs):
    """One for each action, and a mixed one."""
    plans = {str(action): costs.uniform(number) for number, action in enumerate(costs.actions)}
    return {**plans, "mixed": mixed(costs)}


@functools.cache
def subject(family, tuning):
    """(blueprint, batch, costs, plans by name) of a model in bfloat16, to be made again by `model_of`."""
    batch = tiny_batch(family, batch=4, tokens=128)
    blueprint = blueprint_of(model_of(family, tuning, dtype=torch.bfloat16, **PEAK))
    costs = trace_costs(blueprint, Step(batch, accumulation=2, optimizer="sgd"), CPU, trial)
    return blueprint, batch, costs, plans_of(costs)


def held(model, batch, action):
    """Bytes at the end of the forward that were not there before, under one action for every block."""
    with trial(model, plan_of(model, [action] * len(find_blocks(model).blocks))):
        inputs = inputs_of(model, batch)
        with LiveBytes(model, inputs) as live:
            loss = loss_of(model, inputs)
            left = live.current_bytes - live.start_bytes
            loss.backward()
        told = hf_ckpt.describe(model)
    assert set(told.forwards.values()) == (set() if action == KEEP else {1})
    assert all(told.recomputed.values()), action
    assert (sum(told.dropped.values()) > 0) == (action.kind == "selective")
    return left


def by_one_more_block(family, tuning, batch, actions, **options):
    """Action -> stack by stack, bytes that one more block in it really holds at the end of the forward."""
    depths = [{"layers": 3}, {"layers": 4}]
    if family == "t5":
        depths = [{"layers": n, "num_decoder_layers": m} for n, m in ((3, 3), (4, 3), (3, 4))]
    models = [model_of(family, tuning, **{**options, **depth}) for depth in depths]
    found = {}
    for action in actions:
        first, *others = (held(model, batch, action) for model in models)
        found[action] = [other - first for other in others]
    return found


def by_the_costs(costs, action):
    """The same as predicted: by a block behind one of its kind, under the same action."""
    number = costs.actions.index(action)
    keys = [(stack.kinds[-1], number) for stack in costs.stacks]
    return [stack.costs[key, key].forward.net for stack, key in zip(costs.stacks, keys, strict=True)]


def assert_same_bytes(real, costs_of):
    """Predicted and real bytes agree; and what drops or recomputes holds less than `keep`."""
    for action, expected in real.items():
        assert by_the_costs(costs_of(action), action) == expected, str(action)
        assert action == KEEP or all(less < kept for less, kept in zip(expected, real[KEEP], strict=True)), str(action)


def same_bytes_traced_one_by_one(family, tuning, actions, **options):
    options = {"hidden": 64, **options}
    batch = tiny_batch(family, tokens=32)
    blueprint = blueprint_of(model_of(family, tuning, layers=3, **options))
    real = by_one_more_block(family, tuning, batch, actions, **options)
    assert_same_bytes(real, lambda action: trace_costs(blueprint, Step(batch), CPU, trial, actions=(action,)))


@pytest.mark.compat
@each_tuning
@each_family
def test_saved_bytes_to_the_byte(family, tuning):
    """In bfloat16; those of `linear` by a trace of their own, so that others do not depend on what else is traced."""
    blueprint, batch, costs, _ = subject(family, tuning)
    real = by_one_more_block(family, tuning, batch, SAVED, dtype=torch.bfloat16, **PEAK)
    alone = trace_costs(blueprint, Step(batch), CPU, trial, actions=(LINEAR,))
    assert_same_bytes(real, lambda action: alone if action == LINEAR else costs)


@pytest.mark.compat
@each_family
def test_saved_bytes_in_float32(family):
    same_bytes_traced_one_by_one(family, "everything", SAVED)


@each_family
def test_saved_bytes_of_adapters_in_float32(family):
    same_bytes_traced_one_by_one(family, "lora", (KEEP, SELECTIVE, FULL))


@each_family
def test_saved_bytes_of_eager_attention_with_dropout(family):
    options = {"attention": "eager", "dropout": 0.1}
    same_bytes_traced_one_by_one(family, "everything", (KEEP, SELECTIVE, FULL), **options)


def test_saved_bytes_of_eager_attention_without_dropout():
    same_bytes_traced_one_by_one("llama", "everything", SAVED, attention="eager")


# --- the peak -------------------------------------------------------------------------------------------------------

TOLERANCE = 0.03
HIDDEN_STATE = 4 * 128 * 256 * 2
"""Bytes of one, in bfloat16."""


def micro_steps(model, batch, padded=False, autocast=None, tracker=None, around=contextlib.nullcontext):
    """Peaks of the first and the second micro-step: by `LiveBytes`, or by `tracker` if given."""
    peaks = []
    for parameter in model.parameters():
        parameter.grad = None
    for _ in range(2):
        inputs = inputs_of(model, batch)
        counter = (tracker or LiveBytes)(model, inputs)
        with counter, around():
            with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
                loss = loss_of(model, inputs)
            loss.backward()
        del loss
        peaks.append(counter.peak_bytes if tracker is None else _peak_of(counter))
    for parameter in model.parameters():
        parameter.grad = None
    return peaks


def _peak_of(tracker):
    return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def _mem_tracker(model, inputs):
    """Without its figures of modules: the hooks for them fail on frozen parameters, and let T5 and BERT hold tensors
    for longer than without."""
    tracker = MemTracker()
    tracker._mod_tracker = mock.MagicMock(is_bw=False, parents={"Global"})
    tracker.track_external(model, *(value for value in inputs.values() if isinstance(value, torch.Tensor)))
    return tracker


def tracked(blueprint, actions, batch, padded=False):
    """Peaks by `MemTracker`, of the whole model on fake tensors."""
    with (
        blueprint.assembled([stack.row for stack in blueprint.stacks]) as model,
        trial(model, plan_of(model, actions)),
        blueprint.fake,
        compat.fake_values_count(),
    ):
        inputs = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in batch.items()}
        answers = functools.partial(Answers, padded=padded, casts=True)
        return micro_steps(model, inputs, tracker=_mem_tracker, around=answers)


def real_peaks(model, actions, batch, autocast=None):
    """Peaks by `LiveBytes`, of the model itself."""
    with trial(model, plan_of(model, actions)):
        peaks = micro_steps(model, batch, autocast=autocast)
        told = hf_ckpt.describe(model)
    wanted = {block.name for block, action in told.plan.actions if action != KEEP}
    assert {name for name, times in told.recomputed.items() if times} == wanted
    return peaks


def deviations(costs, choice, peaks):
    """Predicted against found, of both micro-steps."""
    predicted = [timeline(costs, choice, accumulated).peak_bytes for accumulated in (False, True)]
    assert worst_timeline(costs, choice).peak_bytes == max(predicted)
    return [ours / theirs - 1 for ours, theirs in zip(predicted, peaks, strict=True)]


def assert_near(found):
    """`found`: name -> deviations."""
    worst = max(found, key=lambda name: max(map(abs, found[name])))
    told = ", ".join(f"{deviation:+.2%}" for deviation in found[worst])
    print(f"largest deviation: {told} under {worst}")
    assert max(map(abs, found[worst])) <= TOLERANCE, f"largest deviation: {told} under {worst}; all: {found}"


GRID = (str(KEEP), str(SELECTIVE), str(FULL), "mixed")


@each_tuning
@each_family
def test_peaks_as_the_memory_tracker_of_torch_finds_them(family, tuning):
    blueprint, batch, costs, plans = subject(family, tuning)
    names = GRID if tuning == "everything" else (str(KEEP), "mixed")  # fake tensors are slow; below are all plans
    peaks = {name: tracked(blueprint, chosen(costs, plans[name]), batch) for name in names}
    assert_near({name: deviations(costs, plans[name], found) for name, found in peaks.items()})
    assert max(found[1] for name, found in peaks.items() if name != str(KEEP)) < peaks[str(KEEP)][1]


@pytest.mark.compat
@each_tuning
@each_family
def test_peaks_of_real_tensors(family, tuning):
    _, batch, costs, plans = subject(family, tuning)
    model = model_of(family, tuning, dtype=torch.bfloat16, **PEAK)
    peaks = {name: real_peaks(model, chosen(costs, choice), batch) for name, choice in plans.items()}
    assert_near({name: deviations(costs, choice, peaks[name]) for name, choice in plans.items()})
    assert peaks[str(FULL)][1] < peaks[str(SELECTIVE)][1] < peaks[str(KEEP)][1]


# --- other ways to run ----------------------------------------------------------------------------------------------


def near_real(model, batch, actions=(KEEP, SELECTIVE, FULL), **keys):
    """Uniform plans and a mixed one, both micro-steps, against real tensors. Returns the costs."""
    around = Step(batch, accumulation=2, optimizer="sgd", **keys)
    costs = trace_costs(blueprint_of(model), around, CPU, trial, actions=actions)
    plans, autocast = plans_of(costs), keys.get("autocast")
    peaks = {name: real_peaks(model, chosen(costs, choice), batch, autocast) for name, choice in plans.items()}
    assert_near({name: deviations(costs, choice, peaks[name]) for name, choice in plans.items()})
    return costs


def padded_batch(family):
    """Each sequence is shorter than the one before."""
    batch = tiny_batch(family, batch=4, tokens=128)
    for place, mask in enumerate(batch["attention_mask"]):
        mask[128 - 16 * place :] = 0
    return batch


def test_peaks_of_deeper_models_are_put_together_from_the_same_parts():
    model = model_of("llama", layers=16, hidden=256, dtype=torch.bfloat16)
    near_real(model, tiny_batch("llama", batch=4, tokens=128))


@pytest.mark.compat
@each_family
def test_peak_under_autocast(family):
    model = model_of(family, **PEAK)
    near_real(model, tiny_batch(family, batch=4, tokens=128), autocast=torch.bfloat16)


@each_family
def test_peak_with_dropout(family):
    model = model_of(family, dropout=0.1, dtype=torch.bfloat16, **PEAK)
    near_real(model, tiny_batch(family, batch=4, tokens=128), (KEEP, FULL))


@pytest.mark.compat
@each_family
def test_peak_of_a_padded_batch(family):
    model = model_of(family, dtype=torch.bfloat16, **PEAK)
    near_real(model, padded_batch(family), (KEEP, SELECTIVE), padded=True)


@pytest.mark.compat
@each_family
def test_peak_above_a_frozen_prefix(family):
    """Three frozen blocks save nothing, so they have no action but `keep`."""
    model = model_of(family, dtype=torch.bfloat16, **PEAK)
    inside = [f"{block.name}." for block in find_blocks(model).blocks]
    for name, parameter in model.named_parameters():
        outside = not name.startswith(tuple(inside))
        if name.startswith(tuple(inside[:3])) or (outside and ("emb" in name or "wte" in name or "wpe" in name)):
            parameter.requires_grad_(False)
        if name == "shared.weight":
            parameter.requires_grad_(False)
    costs = near_real(model, tiny_batch(family, batch=4, tokens=128))
    first, *others = costs.stacks
    assert [first.choices[kind] for kind in first.kinds] == [(0,)] * 3 + [(0, 1, 2)] * (len(first.kinds) - 3)
    assert all(choices == (0, 1, 2) for stack in others for choices in stack.choices)
    assert set(costs.uniform(2)[0][:3]) == {0}


WIDE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "pad_token_id": 0,
}
OTHERS = {
    "Gemma2ForCausalLM": {**WIDE, "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 16},
    # These hold every hidden state until their stack has run, or let go of more than others then.
    "DebertaV2ForMaskedLM": WIDE,
    "BartForConditionalGeneration": {
        "vocab_size": 320,
        "d_model": 256,
        "pad_token_id": 0,
        "encoder_layers": 6,
        "decoder_layers": 4,
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_peak_of_other_models(name):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**OTHERS[name])).train().to(torch.bfloat16)
    near_real(model, tiny_batch("llama", batch=4, tokens=128))


@pytest.mark.compat
def test_actions_to_choose_from():
    """Attention is run again only where it holds weights."""
    for attention, expected in (("sdpa", ACTIONS), ("eager", (*ACTIONS[:-1], LINEAR, FULL))):
        blueprint = blueprint_of(tiny_model("llama", attention=attention))
        assert actions_for(blueprint) == expected
        assert trace_costs(blueprint, Step(tiny_batch("llama")), CPU, trial).actions == expected


# --- which blocks are run -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def within(seconds):
    """Fail instead of hanging."""

    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except TimeoutError:
        raise AssertionError(f"no end after {seconds} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@st.composite
def rows(draw):
    """(kind of every block, kind -> its actions). Kinds are numbered as they first come."""
    given_kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(given_kinds))}
    actions = st.sampled_from([(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])
    return [numbers[kind] for kind in given_kinds], draw(
        st.lists(actions, min_size=len(numbers), max_size=len(numbers))
    )


def keys_of(kind, choices):
    return {(kind, action) for action in choices[kind]}


def assert_shows_everything(row, choices):
    with within(2):
        walks = walks_of(row, choices)
    pairs = set(itertools.pairwise(row))
    steps = {pair for walk in walks for pair in itertools.pairwise(walk)}
    assert {walk[0] for walk in walks} == keys_of(row[0], choices)
    assert {walk[-1] for walk in walks} == keys_of(row[-1], choices)
    assert all((here[0], there[0]) in pairs for here, there in steps)
    assert {key for walk in walks for key in walk} == {key for kind in row for key in keys_of(kind, choices)}
    assert len(row) == 1 or all(len(walk) > 1 for walk in walks)
    for kind, following in pairs:
        here, there = keys_of(kind, choices), keys_of(following, choices)
        seen = {(a, b) for a, b in steps if (a[0], b[0]) == (kind, following)}
        if kind == following:
            assert seen == set(itertools.product(here, there))
        assert {a for a, _ in seen} == here
        assert {b for _, b in seen} == there
    return walks


@given(rows())
def test_walks_show_everything(found):
    assert_shows_everything(*found)


FOUR = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("row", "choices"),
    [
        ([0], [FOUR]),
        ([0, 0], [FOUR]),
        ([0, 1], [FOUR, FOUR]),  # T5 of two blocks
        ([0, 1, 1], [FOUR, FOUR]),
        ([0, 0, 1], [FOUR, FOUR]),  # adapters on the last block only
        ([0, 1, 1], [(0, 1), FOUR]),
        ([0, 0, 1, 1], [(0,), FOUR]),  # frozen below
        ([0, 0, 1], [(0,), FOUR]),
        ([0, 1, 0, 1], [FOUR, FOUR]),  # sliding and full attention
        ([0, 0, 0, 1, 0, 0], [FOUR, FOUR]),
        ([0, 1, 2], [(0,), FOUR, FOUR]),
        ([0, 1, 0, 2], [FOUR, FOUR, FOUR]),
    ],
    ids=str,
)
def test_walks_of_common_models(row, choices):
    assert_shows_everything(row, choices)


@given(rows(), st.integers(1, 50))
def test_walks_do_not_grow_with_depth(found, more):
    """More blocks of a kind that follows itself already change nothing."""
    row, choices = found
    row = [row[0], *row]
    with within(2):
        walks = walks_of(row, choices)
    with within(2):
        assert walks_of([row[0]] * more + row, choices) == walks


@pytest.mark.compat
@each_family
def test_as_many_blocks_are_traced_at_any_depth(family):
    """What planning takes does not depend on how deep a model is."""
    counts, lasts = [], []
    for depth in (32, 128):
        traced = []

        def counting(model, plan, traced=traced):
            traced.append(len(plan.actions))
            return trial(model, plan)

        config = copy.deepcopy(tiny_model(family, layers=1).config)
        config.update({name: depth for name in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(config, name)})
        if family == "t5":
            config.update({"num_decoder_layers": depth})
        model_class = type(tiny_model(family, layers=1))
        blueprint = blueprint_from_config(config, model_class._from_config)
        costs = trace_costs(blueprint, Step(tiny_batch(family)), CPU, counting, actions=(KEEP, FULL))
        assert [len(stack.blocks) for stack in costs.stacks] == [depth] * len(costs.stacks)
        counts.append(traced)
        lasts.append([(stack.costs, stack.last_backward) for stack in costs.stacks])
        walks = [walks_of(stack.row, [(0, 1)] * len(stack.kinds)) for stack in blueprint.stacks]
        longest = max(map(len, walks))
        padded = [[*found, *[found[-1]] * (longest - len(found))] for found in walks]
        assert traced == [sum(map(len, together)) for together in zip(*padded, strict=True)]
    assert counts[0] == counts[1]
    assert lasts[0] == lasts[1]
    assert sum(counts[0]) <= 40


@pytest.mark.compat
@pytest.mark.parametrize("layers", [1, 2])
@each_family
def test_models_of_one_and_two_blocks(family, layers):
    """What is taken to be held and is not is a few hidden states at any depth, or for T5 as much as its scores."""
    model = model_of(family, layers=layers, hidden=256, dtype=torch.bfloat16)
    batch = tiny_batch(family, batch=4, tokens=128)
    with within(60):
        around = Step(batch, accumulation=2, optimizer="sgd")
        costs = trace_costs(blueprint_of(model), around, CPU, trial, actions=(KEEP, SELECTIVE, FULL))
    most = (6 if family == "t5" else 2) * HIDDEN_STATE
    for name, choice in plans_of(costs).items():
        for accumulated, peak in enumerate(real_peaks(model, chosen(costs, choice), batch)):
            over = timeline(costs, choice, bool(accumulated)).peak_bytes - peak
            assert 0 <= over <= most, (name, accumulated, over / HIDDEN_STATE)


# --- tracing leaves nothing -----------------------------------------------------------------------------------------


def everything_about(model):
    """What tracing must not change, in a form that can be compared."""
    record = installation(model)
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "objects": {name: (id(parameter), parameter.data_ptr()) for name, parameter in model.named_parameters()},
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "hooks": {
            (name, kind): [type(hook).__qualname__ for hook in getattr(module, kind).values()]
            for name, module in model.named_modules()
            for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "config": base_model(model).config.to_dict(),
        "random": torch.get_rng_state(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients are on": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "is_fake_tensor": getattr(import_utils, "is_fake_tensor", None),
        "record": None if record is None else (id(record), record.enabled, record.plan, dict(record.regions)),
        "counts": None if record is None else hf_ckpt.describe(model),
    }


def assert_equal_trees(before, after, where=""):
    assert type(before) is type(after), where
    if isinstance(before, dict):
        assert before.keys() == after.keys(), where
        for key, value in before.items():
            assert_equal_trees(value, after[key], f"{where}/{key}")
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after), where
    elif isinstance(before, tuple):
        for place, (one, other) in enumerate(zip(before, after, strict=True)):
            assert_equal_trees(one, other, f"{where}/{place}")
    else:
        assert before == after, where


@pytest.mark.compat
@pytest.mark.parametrize(
    ("family", "installed"),
    [("llama", "nothing"), ("llama", "disabled"), *((family, "enabled") for family in FAMILIES)],
)
def test_tracing_changes_nothing(family, installed):
    model = model_of(family, "lora" if family == "gpt2" else "everything", hidden=32, layers=3, dropout=0.1)
    next(model.parameters()).requires_grad_(False)
    found = find_blocks(model)
    found.modules[found.blocks[0].name].register_forward_hook(lambda *_: None)
    if installed != "nothing":
        hf_ckpt.install(model, {"policy": "selective", "rules": [{"layers": "1", "policy": "full"}]})
        enable(model)
        step(model, tiny_batch(family))
        if installed == "disabled":
            getattr(base_model(model), compat.DISABLE_NAMES[-1])()
    expected = step(model, tiny_batch(family))
    before = everything_about(model)
    with hf_ckpt.paused(model):
        costs = trace_costs(blueprint_of(model), Step(tiny_batch(family)), CPU, trial, actions=(KEEP, SELECTIVE, FULL))
    assert_equal_trees(before, everything_about(model))
    assert len(costs.stacks[0].blocks) == 3
    assert_same(expected, step(model, tiny_batch(family)))
    if installed == "enabled":
        times = set(hf_ckpt.describe(model).forwards.values())
        assert times == {3}  # of the three steps here, and of none that was traced


# --- errors ---------------------------------------------------------------------------------------------------------


class ReadsItsLogits(transformers.LlamaForCausalLM):
    """Looks at a number, which a fake tensor has none of."""

    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        if float(found.logits.detach().sum()) > 1e9:
            raise ValueError("too large")
        return found


@pytest.mark.compat
def test_a_model_that_cannot_run_on_fake_tensors():
    torch.manual_seed(0)
    model = ReadsItsLogits(tiny_model("llama").config).train()
    hf_ckpt.install(model, "full")
    enable(model)
    step(model, tiny_batch("llama"))
    before = everything_about(model)
    with hf_ckpt.paused(model):
        blueprint = blueprint_of(model)
    for _ in range(2):
        with pytest.raises(
            HfCkptError,
            match="ReadsItsLogits cannot be planned for, because how large its tensors are depends on their values",
        ):
            trace_costs(blueprint, Step(tiny_batch("llama")), CPU, trial)
        assert_equal_trees(before, everything_about(model))
        assert not len(blueprint.base.model.layers)
    assert step(model, tiny_batch("llama"))["loss"] > 0


def test_an_error_of_the_plan_is_told_as_it_is():
    def refusing(model, plan):
        raise HfCkptError("not today")

    with pytest.raises(HfCkptError, match=r"^not today$"):
        trace_costs(blueprint_of(tiny_model("llama")), Step(tiny_batch("llama")), CPU, refusing)


# --- what is there all the time -------------------------------------------------------------------------------------

FEW = Weights(((10, 4, True), (5000, 2, True), (7, 2, False)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", 0),
        ("momentum", 10 * 4 + 5000 * 2),
        ("lion", 10 * 4 + 5000 * 2),
        ("adam", 2 * (10 * 4 + 5000 * 2)),
        ("adamw", 2 * (10 * 4 + 5000 * 2)),
        ("adamw8bit", 2 * (10 * 4 + 5000 + 20 * 4)),
    ],
)
def test_optimizer_state(name, expected):
    assert optimizer_state(FEW, name) == expected


def test_small_parameters_are_not_quantised():
    """Below 4096 elements bitsandbytes keeps float32."""
    assert optimizer_state(Weights(((4095, 2, True),)), "adamw8bit") == 2 * 4 * 4095
    assert optimizer_state(Weights(((4096, 2, True),)), "adamw8bit") == 2 * (4096 + 4 * 16)
    assert optimizer_state(Weights(((4097, 2, True),)), "adamw8bit") == 2 * (4097 + 4 * 17)


def test_optimizer_without_a_rule():
    with pytest.raises(HfCkptError, match=r"optimizer must be one of adamw, .*, but is 'shampoo' instead"):
        optimizer_state(FEW, "shampoo")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("sgd", functools.partial(torch.optim.SGD, lr=0.1)),
        ("momentum", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ],
)
@each_dtype
def test_optimizer_state_as_torch_keeps_it(name, make, dtype):
    model = model_of("bert", dtype=dtype)
    next(model.parameters()).requires_grad_(False)
    optimizer = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    step(model, tiny_batch("bert"))
    optimizer.step()
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    assert optimizer_state(blueprint_of(model).weights, name) == sum(s.nbytes for s in states if s.dim())


@pytest.mark.compat
@each_tuning
@each_family
def test_bytes_that_are_always_there(family, tuning):
    model = model_of(family, tuning, hidden=32, layers=3)
    batch = tiny_batch(family)
    costs = trace_costs(blueprint_of(model), Step(batch, accumulation=3), CPU, trial, actions=(FULL,))
    static = costs.static
    assert static.parameters == sum(parameter.nbytes for parameter in model.parameters())
    assert static.buffers == sum(buffer.nbytes for buffer in model.buffers())
    assert static.gradients == sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert static.optimizer == 2 * static.gradients
    assert static.batch == sum(value.nbytes for value in batch.values())
    assert (costs.tokens, costs.accumulation) == (batch["input_ids"].numel(), 3)
    assert costs.modes == (False, True)


@pytest.mark.compat
def test_state_of_an_optimizer_that_is_known():
    """Of one that exists, whatever its name."""
    blueprint = blueprint_of(tiny_model("llama"))
    found = Step(tiny_batch("llama"), optimizer="none of ours", optimizer_bytes=17)
    assert trace_costs(blueprint, found, CPU, trial, actions=(KEEP,)).static.optimizer == 17


@pytest.mark.compat
@each_tuning
@each_family
def test_gradients_of_all_parts_are_those_of_the_model(family, tuning):
    """Finished in the head, in the blocks and before them: in the end all are there."""
    _, _, costs, plans = subject(family, tuning)
    for choice in plans.values():
        found = timeline(costs, choice)
        assert found.moments[-1].gradient_bytes == costs.static.gradients
        assert found.moments[-2].gradient_bytes + costs.stacks[0].before_gradients == costs.static.gradients
