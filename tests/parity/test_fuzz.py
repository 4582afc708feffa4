"""Random specs, plans and sequences of operations on a model: each works as promised or is refused.

By default, the same few examples run every time. `HF_CKPT_FUZZ=1000 pytest -n 0 -m slow tests/parity` runs about 1,000
others; add `--hypothesis-seed=N` to repeat a run, and `--hypothesis-show-statistics` for statistics.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import logging
import os
import pickle
import string
from typing import Any

import pytest
import torch
import yaml
from helpers.adapters import with_lora
from helpers.installed import flags
from helpers.lanes import Delayed, DeviceBytes, Eager, lanes_of
from helpers.snapshots import snapshot
from helpers.steps import (
    CACHED_BYTES,
    ROUNDING,
    assert_near,
    enable,
    gradients,
    input_gradient_hooks,
    step,
    without_cache,
)
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.head.logits import tokens_per_chunk
from hf_ckpt.engines.rebuild import tape
from hf_ckpt.errors import HfCkptError, PlanMismatchError, SpecError
from hf_ckpt.logs import forget_warnings
from hf_ckpt.models.blocks import base_model, find_blocks, vocabulary_head
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import ACTIONS, KEEP, SAVE_CLASSES, Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.reading import POLICIES
from hf_ckpt.spec.spec import Spec

FUZZ = int(os.environ.get("HF_CKPT_FUZZ", "0"))


def examples(count, share=0.0):
    """By default, `count` examples, the same each time; with HF_CKPT_FUZZ and a share, that share of its examples."""
    other = bool(FUZZ and share)
    return settings(
        max_examples=max(1, round(FUZZ * share)) if other else count,
        derandomize=not other,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


def assert_equal(expected, got):
    """Check bit-equality; NaN equals NaN."""
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), f"only one side has {name}"
        assert value is None or value.dtype == other.dtype, name
        assert value is None or torch.equal(value.nan_to_num(), other.nan_to_num()), f"{name} differs"


def unchanged(model, before):
    """Whether the model's snapshot is the same. A bare comparison would keep pytest busy for minutes if it failed."""
    return snapshot(model) == before


def train(model, batch):
    """Loss and gradients of a step that leaves no gradients behind."""
    found = step(model, batch)
    model.zero_grad(set_to_none=True)
    return found


NO_LANE_SAID = "there is no host memory to offload to"
PLAIN_HEAD_SAID = "is not run in chunks, because"
NOTHING_SAID = "found nothing in a block that can be rebuilt"
EVAL_SAID = "runs in eval mode with gradients on"


class Said(logging.Handler):
    """Collects warnings of hf_ckpt's loggers while active."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        forget_warnings()
        logging.getLogger("hf_ckpt").addHandler(self)
        return self

    def __exit__(self, *raised):
        logging.getLogger("hf_ckpt").removeHandler(self)

    def unexpected(self, *expected):
        """Messages that contain none of these texts."""
        return [message for message in self.messages if not any(text in message for text in expected)]


# --- specs ------------------------------------------------------------------------------------------------------------


def layer_text(least=-9, most=99):
    """Texts that select layers, such as "0-15,-1"."""
    index = st.integers(least, most)
    span = st.tuples(index, index).map(lambda pair: f"{pair[0]}-{pair[1]}")
    return st.lists(index.map(str) | index.map("{}-".format) | span, min_size=1, max_size=4).map(",".join)


SIZE = st.integers(2**20, 2**45) | st.integers(1, 2**20).map("{}B".format) | st.sampled_from(["20GiB", "1.5 GB", "64k"])
SAVE = st.lists(st.sampled_from(SAVE_CLASSES), min_size=1, max_size=2)
STACK = st.sampled_from(["encoder", "decoder"])
CHUNK = st.integers(1, 4096) | st.sampled_from(["auto", "full"])


def rules(layers):
    """Rules of a spec."""
    policy = st.sampled_from(["none", "full", "selective", "offload"])
    return st.fixed_dictionaries({"layers": layers, "policy": policy}, optional={"stack": STACK, "save": SAVE})


def values(layers):
    """Key of a spec -> its possible values."""
    return {
        "policy": st.sampled_from(POLICIES),
        "budget": SIZE | st.floats(0.01, 1.0) | st.sampled_from(["80%", "12.5%"]),
        "every_n_layers": st.integers(1, 9),
        "layers": layers | st.dictionaries(STACK, layers, min_size=1),
        "segments": st.integers(1, 9) | st.just("sqrt"),
        "rules": st.lists(rules(layers), min_size=1, max_size=3),
        "save": SAVE,
        "offload": st.sampled_from([True, False, "saved"]),
        "host_budget": SIZE,
        "preserve_rng_state": st.booleans(),
        "determinism_check": st.sampled_from(["default", "none"]),
        "use_reentrant": st.just(False),
        "head": CHUNK,
    }


@st.composite
def valid_specs(draw, least=-9, most=99):
    """Valid specs: a policy, and other keys in any order as far as they go together."""
    every = values(layer_text(least, most))
    spec = {"policy": draw(every.pop("policy"))}
    if spec["policy"] == "budget":
        spec["budget"] = draw(every["budget"])
    for key in draw(st.lists(st.sampled_from(sorted(every)), unique=True)):
        tried = {**spec, key: draw(every[key])}
        spec = tried if accepted(tried) else spec
    return spec


def accepted(given_dict):
    """Whether the dictionary is a valid spec."""
    try:
        Spec.parse(given_dict)
    except SpecError:
        return False
    return True


def check_forms(spec):
    """Check that a spec survives dict, JSON, YAML and words exactly, and that its short form is minimal."""
    short = spec.to_dict()
    assert Spec.parse(short).to_dict() == short
    written = yaml.safe_dump(short, sort_keys=False)
    for form in (short, spec.to_json(), json.loads(json.dumps(short)), yaml.safe_load(written)):
        assert Spec.parse(form) == spec
    assert hash(spec) == hash(Spec.parse(short))
    words = {key: json.dumps(value, separators=(",", ":")) for key, value in short.items()}
    if not any(character.isspace() for value in words.values() for character in value):
        text = " ".join(f"{key}={value}" for key, value in words.items())
        assert Spec.parse(text) == spec, text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*(field.name for field in dataclasses.fields(Spec)), "polcy", "context_fn"])
WORDS = st.sampled_from([*POLICIES, *SAVE_CLASSES, "saved", "sqrt", "20GiB", "80%", "0-3,-1", "1-", "-", ","])
YAML = ["!!int", "!!bool", "!!float", "!!timestamp", "!!binary", "!!null", "!!set", "!!merge", "&a", "*a", "<<", "---"]
YAML += ["{", "}", "[", "]", ":", ",", "'", '"', "|", ">", "%", "@", "`", "?", "- ", "0x", "0b", "1_", ".inf", ".nan"]
YAML += ["1:2", "2001-01-01", "~", "yes", "0.5", "9", "\t", "\\", "é", "\x85", "\ud800"]


@st.composite
def nearly_specs(draw):
    """Valid specs with keys added, removed or changed."""
    spec = draw(valid_specs())
    for _ in range(draw(st.integers(1, 3))):
        key = draw(KEYS | st.sampled_from(sorted(spec)) if spec else KEYS)
        if draw(st.booleans()):
            spec.pop(key, None)
        else:
            spec[key] = draw(WORDS | JSON | st.integers(-2, 9))
    return spec


@st.composite
def nearly_words(draw):
    """Texts such as key=value words, with pieces of YAML as values."""
    piece = st.sampled_from(YAML) | WORDS | st.text(max_size=3)
    words = [f"{draw(KEYS)}={''.join(draw(st.lists(piece, max_size=4)))}" for _ in range(draw(st.integers(1, 3)))]
    return " ".join(words)


ANY_DICT = st.dictionaries(KEYS | st.text(max_size=6), WORDS | JSON | layer_text())
ANY_TEXT = st.text(max_size=40) | st.text(alphabet=string.ascii_letters + "=:{}[]-, 0123456789", max_size=40)


@examples(150, 0.1)
@given(valid_specs())
def test_every_spec_comes_back_from_every_form(given_dict):
    check_forms(Spec.parse(given_dict))


@examples(400, 0.3)
@given(nearly_specs() | nearly_words() | ANY_DICT | ANY_TEXT)
@example({"policy": "budget", "budget": "9" * 400 + ".5"})  # exceeds a float
@example({"budget": float("nan")})
@example({"every_n_layers": 10**400})
@example({"layers": {"encoder": []}})
@example({"save": [["linear"]]})
@example("a\0b")  # invalid in a path
@example("\0=1")
@example("budget=2001-99-99")  # YAML reads a date and then fails
@example("policy=full layers=" + ",".join(["1"] * 400))  # longer than file names may be
@example('{"budget": ' + "9" * 400 + "}")
@example("!!python/object:os.system")
@example('{"a":' * 100_000)  # too deep for any parser
def test_anything_is_a_spec_or_a_spec_error(given_spec):
    with contextlib.suppress(SpecError):
        check_forms(Spec.parse(given_spec))


@pytest.mark.parametrize(
    "text",
    [
        "every_n_layers=!!int",
        "policy=!!bool",
        "budget=!!timestamp",
        "layers=" + "[" * 20_000,
        '{"every_n_layers": ' + "9" * 5_000 + "}",
    ],
    ids=["int", "bool", "timestamp", "nesting", "digits"],
)
def test_hostile_texts(text, tmp_path):
    """Hostile texts raise only SpecError, as words or JSON and as the content of a file."""
    path = tmp_path / "spec.yaml"
    path.write_text(text if text.startswith("{") else text.replace("=", ": ", 1), encoding="utf-8")
    for given_spec in (text, path):
        with contextlib.suppress(SpecError):
            Spec.parse(given_spec)


@pytest.mark.long
@examples(60, 0.2)
@given(valid_specs(-3, 3), st.booleans(), st.sampled_from(FAMILIES))
@example({"policy": "none", "head": 5}, True, "t5")
def test_a_spec_works_on_every_family_or_is_refused(given_spec, through_enable, family):
    """Install, enable, step, disable, uninstall: each works or raises a typed error, and leaves no trace."""
    assume(given_spec["policy"] not in ("budget", "auto"))
    same_masks = given_spec.get("preserve_rng_state", True)
    model = tiny_model(family, layers=3, dropout=0.1 if same_masks else 0.0)
    batch = tiny_batch(family, tokens=8)
    expected = train(model, batch)
    before = snapshot(model)
    with Said() as said:
        try:
            hf_ckpt.install(model, None if through_enable else given_spec)
            assert flags(model) == []
            enable(model, given_spec if through_enable else None)
            assert hf_ckpt.describe(model).spec == Spec.parse(given_spec).to_dict()
            got = train(model, batch)
            check_trained(model, batch, expected, got)
            event("trained")
        except HfCkptError as error:
            event(f"refused: {type(error).__name__}")
        model.zero_grad(set_to_none=True)
        hf_ckpt.uninstall(model)
        assert unchanged(model, before)
        assert_equal(expected, train(model, batch))
    assert not said.unexpected(NO_LANE_SAID, PLAIN_HEAD_SAID)


def check_trained(model, batch, expected, got):
    """Check that gradients are the same and that every planned block was recomputed."""
    described = hf_ckpt.describe(model)
    active = described.plan.active()
    assert described.forwards == dict.fromkeys(active, 1)
    for name, action in active.items():
        assert described.recomputed[name] > 0, name
        assert described.recomputed[name] == 1 or action.kind == "selective", name
    asked, tokens = described.plan.head, batch["labels"].numel()
    has_head = vocabulary_head(base_model(model)) is not None and asked != "full"
    assert described.chunked_heads == (has_head and tokens > tokens_per_chunk(asked, tokens, trained=True))
    if described.chunked_heads:
        assert_near(expected, got, 5 * ROUNDING)
    else:
        assert_equal(expected, got)


# --- saved plans ------------------------------------------------------------------------------------------------------

PLAN = hf_ckpt.install(tiny_model("llama", layers=3), {"policy": "selective", "layers": "0-1", "head": 7}).plan
PREDICTION = {"peak_bytes": 9, "step_seconds": 0.5, "tokens": 8, "parts": {"blocks": 4}, "budget_bytes": 10}


def damaged(*path, value):
    """A saved plan with `value` at this path."""
    saved: Any = {**PLAN.to_dict(), "prediction": copy.deepcopy(PREDICTION)}
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return saved


@st.composite
def nearly_plans(draw):
    """A saved plan with some parts replaced."""
    saved = PLAN.to_dict()
    for _ in range(draw(st.integers(1, 2))):
        place, path = saved, []
        while isinstance(place, (dict, list)) and place and (not path or draw(st.integers(0, 3))):
            path.append((place, draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))))
            place = path[-1][0][path[-1][1]]
        holder, key = path[-1]
        holder[key] = draw(JSON | st.sampled_from([*ACTIONS, "attention", ["linear"], ["conv"], 0, 1, True, "auto"]))
    return saved


ROW = ("stacks", "decoder", 0)


@examples(40, 0.05)
@given(nearly_plans())
@example(damaged(*ROW, "save", value="linear"))
@example(damaged(*ROW, "save", value=["conv"]))
@example(damaged(*ROW, "save", value=[["linear"]]))
@example(damaged("prediction", "parts", value={"blocks": float("inf")}))
@example(damaged("prediction", "step_seconds", value=10**400))
@example(damaged("prediction", "peak_bytes", value="many"))
@example(damaged("prediction", "tokens", value="many"))
def test_a_damaged_plan_is_refused_or_does_what_it_says(saved):
    model = tiny_model("llama", layers=3)
    before = snapshot(model)
    try:
        plan = Plan.from_dict(saved)
        hf_ckpt.install(model, plan)
    except PlanMismatchError:
        assert unchanged(model, before)
        return
    assert {name for action in plan.active().values() for name in action.save} <= set(SAVE_CLASSES)
    assert str(hf_ckpt.describe(model))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    enable(model)
    train(model, tiny_batch("llama"))
    hf_ckpt.uninstall(model)
    assert unchanged(model, before)


# --- sequences --------------------------------------------------------------------------------------------------------

LAYERS = 3
CHOICES = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "attention": {"policy": "selective", "save": ["attention"]},
    "every 2": {"every_n_layers": 2},
    "first": {"layers": "0"},
    "last": {"policy": "selective", "layers": "-1"},
    "segments": {"segments": 1},
    "offload": {"policy": "offload"},
    "saved": {"policy": "selective", "offload": "saved"},
    "none": {"policy": "none"},
    "mixed": {"policy": "full", "rules": [{"layers": "1", "policy": "selective"}]},
}
CHOSEN = {"every 2": [0, 2], "first": [0], "last": [2], "none": []}
BAD = [{"policy": "ful"}, {"layers": "7"}, {"use_reentrant": 1}, {"policy": "full", "every_n_layers": 0}]
OPTIONS = [None, {}, {"use_reentrant": False}, {"determinism_check": "none"}, {"preserve_rng_state": True}]
SAVES = st.sampled_from([("linear", "attention"), ("attention",), ("linear",)])
SEGMENT = st.builds(Action, st.just("full"), segment=st.integers(0, 1))
"""1 joins the previous segment, 0 begins a new one."""
ACTION = st.one_of(
    st.just(KEEP),
    st.builds(Action, st.just("selective"), SAVES, moved=st.booleans()),
    st.just(Action("full")),
    st.just(Action("offload")),
    SEGMENT,
)


def plan_of(model, actions):
    """The plan that gives the model's blocks these actions."""
    found = find_blocks(model)
    pairs = []
    for block, action in zip(found.blocks, actions, strict=False):
        if action.segment is not None:
            numbers = [each.segment for other, each in pairs if other.stack == block.stack and each.segment is not None]
            above = pairs[-1] if pairs and pairs[-1][0].stack == block.stack else None
            joins = above is not None and above[1].segment is not None and action.segment == 1
            action = dataclasses.replace(action, segment=max(numbers, default=-1) + (not joins))
        pairs.append((block, action))
    return Plan(found.family, found.model, tuple(pairs))


def shape_of(value):
    """The comparable part of an attribute, for two models with the same history."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.dtype, value.requires_grad, hash(value.detach().float().numpy().tobytes())
    if isinstance(value, dict):
        if all(isinstance(key, int) for key in value):  # hooks, by handle number
            return [getattr(hook, "__qualname__", type(hook).__name__) for hook in value.values()]
        return {key: shape_of(inner) for key, inner in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__, len(value) if isinstance(value, (list, tuple, set)) else 0


def shape_of_all(model):
    """`vars()` of every module, except handles of transformers' embedding hooks."""
    handles = ("_require_grads_hook", "_require_grads_hooks")
    return {
        name: {key: shape_of(value) for key, value in vars(module).items() if key not in handles}
        for name, module in model.named_modules()
    }


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(vars(module)[kind]) for module in model.modules() for kind in kinds)


class Sequences(RuleBasedStateMachine):
    """Applies the same operations to two equal models; only one has hf_ckpt."""

    @initialize(
        family=st.sampled_from(FAMILIES),
        dropout=st.sampled_from([0.0, 0.1]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        lane=st.sampled_from([None, Delayed, Eager]),
        state=st.sampled_from(["", "", "transformers checkpoints", "frozen below block 1"]),
    )
    def begin(self, family, dropout, dtype, lane, state):
        self.undo = contextlib.ExitStack()
        self.undo.enter_context(lanes_of(lane))
        self.said = self.undo.enter_context(Said())
        self.family, self.lane = family, lane
        sizes = {"layers": LAYERS, "dropout": dropout, "dtype": dtype}
        self.ours, self.plain = (tiny_model(family, **sizes) for _ in range(2))
        self.theirs, self.frozen = state.startswith("transformers"), state.startswith("frozen")
        if self.theirs:
            self.both(lambda model: enable(model, {"use_reentrant": False}))
        if self.frozen:
            self.both(freeze_below_block_1)
        self.installed = self.enabled = self.wrapped = self.hooked = self.captured = False
        self.active = set()
        self.pauses, self.pending = [], []

    def teardown(self):
        if hasattr(self, "undo"):
            self.resume_all()
            self.pending.clear()
            hf_ckpt.uninstall(self.ours)
            self.check_uninstalled()
            self.undo.close()

    # --- helpers ---

    def both(self, work):
        return [work(model) for model in (self.plain, self.ours)]

    def batch(self, seed=0):
        return without_cache(self.ours, tiny_batch(self.family, tokens=6, seed=seed))

    def loss(self, model, seed, through="loss"):
        torch.manual_seed(seed)
        if through == "tuple":
            return model(**self.batch(seed), return_dict=False)[0]
        outputs = model(**self.batch(seed), output_hidden_states=through == "states")
        states = outputs.get("hidden_states" if self.family != "t5" else "decoder_hidden_states") or ()
        return outputs.loss + sum(state.float().square().mean() for state in states[1:])

    def names(self, which):
        kept = CHOSEN.get(which, range(LAYERS))
        return {block.name for block in find_blocks(self.ours).blocks if block.index in kept}

    def check_uninstalled(self):
        expected, got = shape_of_all(self.plain), shape_of_all(self.ours)
        assert expected.keys() == got.keys()
        for name, values in expected.items():
            assert values.keys() == got[name].keys(), name
            differing = [key for key in values if values[key] != got[name][key]]
            assert not differing, name

    def resume_all(self):
        while self.pauses:
            self.resume()

    # --- hf_ckpt ---

    def put_on(self, given_plan, active):
        hf_ckpt.install(self.ours, given_plan)
        self.enabled = self.enabled if self.installed else self.theirs
        self.installed, self.active = True, active

    @rule(which=st.sampled_from(sorted(CHOICES)))
    def install(self, which):
        self.put_on(CHOICES[which], self.names(which))

    @rule(actions=st.lists(ACTION, min_size=2 * LAYERS, max_size=2 * LAYERS))
    def install_a_plan(self, actions):
        plan = plan_of(self.ours, actions)
        self.put_on(Plan.from_dict(json.loads(json.dumps(plan.to_dict()))), set(plan.active()))
        assert hf_ckpt.describe(self.ours).plan == plan

    @rule()
    def install_again(self):
        self.put_on(None, self.active if self.installed else self.names("full"))

    @rule(bad=st.sampled_from(BAD), through_enable=st.booleans())
    def refused(self, bad, through_enable):
        before = snapshot(self.ours)
        ask = enable if through_enable and self.installed else hf_ckpt.install
        with pytest.raises(SpecError):
            ask(self.ours, bad)
        assert unchanged(self.ours, before)

    @precondition(lambda self: self.installed)
    @rule(name=st.sampled_from(compat.transformers.ENABLE_NAMES), options=st.sampled_from(OPTIONS))
    def enable_bare(self, name, options):
        getattr(base_model(self.ours), name)(options)
        self.enabled = True

    @precondition(lambda self: self.installed)
    @rule(which=st.sampled_from(sorted(CHOICES)))
    def enable_anew(self, which):
        enable(self.ours, CHOICES[which])
        self.enabled, self.active = True, self.names(which)

    @precondition(lambda self: self.installed)
    @rule(name=st.sampled_from(compat.transformers.DISABLE_NAMES))
    def disable(self, name):
        getattr(base_model(self.ours), name)()
        self.enabled = False

    @rule()
    def uninstall(self):
        hf_ckpt.uninstall(self.ours)
        self.installed = self.enabled = False
        self.active = set()
        self.check_uninstalled()

    @precondition(lambda self: len(self.pauses) < 2)
    @rule()
    def pause(self):
        pause = hf_ckpt.paused(self.ours)
        pause.__enter__()
        self.pauses.append((pause, installation(self.ours) if self.enabled else None))
        self.enabled = False

    @precondition(lambda self: self.pauses)
    @rule()
    def resume(self):
        pause, record = self.pauses.pop()
        pause.__exit__(None, None, None)
        if record is not None and installation(self.ours) is record:
            self.enabled = True

    # --- other libraries ---

    @rule(through=st.sampled_from(["deepcopy", "pickle", "plain pickle"]))
    def copied(self, through):
        whole = through == "deepcopy" or self.theirs or self.hooked or self.captured  # these hooks do not pickle
        work = copy.deepcopy if whole else lambda model: pickle.loads(pickle.dumps(model))
        self.both(lambda model: model.zero_grad(set_to_none=True))
        plain, ours = self.both(work)
        enabled = self.enabled
        self.resume_all()
        self.pending.clear()
        self.flags_and_hooks_are_as_the_state_says()  # of the original
        if self.installed and through != "plain pickle":  # the copy must not depend on it
            hf_ckpt.uninstall(self.ours)
        self.plain, self.ours, self.enabled = plain, ours, enabled

    @precondition(lambda self: not self.wrapped and not self.theirs and not self.hooked)
    @rule(adapter=st.sampled_from(["peft", "hub"]))
    def adapt(self, adapter):
        self.pending.clear()
        self.both(lambda model: model.zero_grad(set_to_none=True))
        self.plain, self.ours = self.both(lambda model: with_lora(model, self.family, hub=adapter == "hub"))
        self.wrapped, self.frozen = True, False

    @precondition(lambda self: not self.enabled and not self.pauses and not self.theirs and not self.hooked)
    @rule()
    def hook_embeddings(self):
        self.both(lambda model: base_model(model).enable_input_require_grads())
        self.hooked = True

    @rule(training=st.booleans())
    def train_or_eval(self, training):
        self.pending.clear()
        self.both(lambda model: model.train(training))

    @precondition(lambda self: self.family != "bert" and not self.theirs)
    @rule()
    def generate(self):
        inputs = tiny_batch(self.family, tokens=4)
        inputs.pop("labels")

        def work(model):
            torch.manual_seed(3)
            return model.generate(**inputs, max_new_tokens=3, do_sample=False)

        expected, got = self.both(work)
        assert torch.equal(expected, got)

    @rule(seed=st.integers(0, 2), autocast=st.booleans(), through=st.sampled_from(["loss", "tuple", "states"]))
    def step(self, seed, autocast, through):
        before = hf_ckpt.describe(self.ours) if self.installed else None
        self.captured |= through == "states"  # by transformers' hook

        def work(model):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = self.loss(model, seed, through)
            loss.backward()
            return loss.detach()

        expected, got = self.both(work)
        assert torch.equal(expected, got)
        if before is None:
            return
        after = hf_ckpt.describe(self.ours)
        acts = self.enabled and self.ours.training
        first = find_blocks(self.ours).blocks[0].name if self.frozen and not self.hooked else None
        for name in self.active:
            assert after.forwards[name] - before.forwards[name] == acts, name
            again = after.recomputed[name] - before.recomputed[name]
            assert (again > 0) == (acts and name != first), name
        if acts and self.lane is None:
            assert not after.moved

    @precondition(lambda self: len(self.pending) < 3)
    @rule(seed=st.integers(0, 2))
    def forward(self, seed):
        expected, got = self.both(lambda model: self.loss(model, seed))
        assert torch.equal(expected, got)
        self.pending.append((expected, got))

    @precondition(lambda self: self.pending)
    @rule(place=st.integers(0, 2))
    def backward(self, place):
        for loss in self.pending.pop(place % len(self.pending)):
            loss.backward()

    @precondition(lambda self: self.pending)
    @rule()
    def drop(self):
        self.pending.pop()

    @precondition(lambda self: not self.pending)
    @rule()
    def a_forward_alone_leaves_nothing(self):
        """A forward without a backward leaves nothing, with the garbage collector off: no cycle holds activations."""
        batch = self.batch()
        self.ours(**batch)
        gc.collect()
        gc.disable()
        try:
            with DeviceBytes(self.ours, batch) as live:
                loss = self.ours(**batch).loss
                held = live.current_bytes - live.start_bytes
                del loss
                assert live.current_bytes - live.start_bytes <= CACHED_BYTES < held
        finally:
            gc.enable()

    @rule()
    def without_gradients(self):
        with torch.no_grad():
            expected, got = self.both(lambda model: self.loss(model, 0))
        assert torch.equal(expected, got)

    @rule()
    def zero(self):
        self.both(lambda model: model.zero_grad(set_to_none=True))

    # --- invariants ---

    @invariant()
    def flags_and_hooks_are_as_the_state_says(self):
        if not hasattr(self, "undo"):
            return
        assert (installation(self.ours) is not None) == self.installed
        if not self.installed:
            assert flags(self.ours) == flags(self.plain)
            assert hooks_of(self.ours) == hooks_of(self.plain)
            return
        described = hf_ckpt.describe(self.ours)
        assert described.enabled == self.enabled
        assert set(described.plan.active()) == self.active
        on = {name for name, module in find_blocks(self.ours).modules.items() if module.gradient_checkpointing}
        assert on == (self.active if self.enabled else set())
        assert len(flags(self.ours)) == len(on)
        record = installation(self.ours)
        removed = input_gradient_hooks(self.plain) if record.input_gradient_hooks else 0
        assert bool(removed) <= (self.hooked or self.theirs)
        assert hooks_of(self.ours) == hooks_of(self.plain) - removed + len(record.handles)
        assert self.enabled or not record.handles

    @invariant()
    def gradients_and_names_are_those_of_the_plain_model(self):
        if hasattr(self, "undo"):
            expected, got = self.both(gradients)
            assert_equal(expected, got)
            names = self.both(lambda model: list(model.state_dict()))
            assert names[0] == names[1]

    @invariant()
    def nothing_is_left_open_or_said(self):
        assert tape.running.tape is None
        if hasattr(self, "undo"):
            assert not self.said.unexpected(EVAL_SAID, NOTHING_SAID, *([] if self.lane else [NO_LANE_SAID]))


def freeze_below_block_1(model):
    """Freeze all parameters before the second block."""
    first = f"{find_blocks(model).blocks[1].name}."
    for name, parameter in model.named_parameters():
        if name.startswith(first):
            break
        parameter.requires_grad_(False)


class TestSequences(Sequences.TestCase):
    settings = settings(examples(2), stateful_step_count=25)


@pytest.mark.slow
class TestManySequences(Sequences.TestCase):
    settings = settings(examples(20, 0.3), stateful_step_count=25)
