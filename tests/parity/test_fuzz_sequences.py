"""Random sequences of all that can be done with a model: hf_ckpt makes no difference but in what is recomputed."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from helpers.adapters import with_lora
from helpers.fuzzing import EVAL_SAID, NO_LANE_SAID, Said, assert_equal, examples, unchanged
from helpers.installed import flags
from helpers.lanes import Delayed, Eager, lanes_of
from helpers.snapshots import snapshot
from helpers.steps import enable, gradients, input_gradient_hooks, without_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines import segments
from hf_ckpt.engines.rebuild import tape
from hf_ckpt.errors import SpecError
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import FAMILIES, tiny_batch, tiny_model

CHOICES = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "attention": {"policy": "selective", "save": ["attention"]},
    "sac": {"policy": "selective", "engine": "sac"},
    "every 2": {"every_n_layers": 2},
    "first": {"layers": "0"},
    "last": {"policy": "selective", "layers": "-1"},
    "segments": {"segments": 1},
    "offload": {"policy": "offload"},
    "saved": {"policy": "selective", "offload": "saved"},
    "none": {"policy": "none"},
    "mixed": {"policy": "full", "rules": [{"layers": "1", "policy": "selective"}]},
}
SEQUENCE_LAYERS = 3
CHOSEN = {"every 2": [0, 2], "first": [0], "last": [2], "none": []}
BAD = [{"policy": "ful"}, {"layers": "7"}, {"use_reentrant": True}, {"policy": "full", "every_n_layers": 0}]
OPTIONS = [None, {}, {"use_reentrant": False}, {"determinism_check": "none"}, {"preserve_rng_state": True}]


def shape_of(value):
    """What can be compared of an attribute of two models that went through the same."""
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.dtype, value.requires_grad, hash(value.detach().float().numpy().tobytes())
    if isinstance(value, dict):
        if all(isinstance(key, int) for key in value):  # hooks, by the number of their handle
            return [getattr(hook, "__qualname__", type(hook).__name__) for hook in value.values()]
        return {key: shape_of(inner) for key, inner in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__, len(value) if isinstance(value, (list, tuple, set)) else 0


def shape_of_all(model):
    """`vars()` of every module, without the loose handles of transformers' embedding hooks."""
    handles = ("_require_grads_hook", "_require_grads_hooks")
    return {
        name: {key: shape_of(value) for key, value in vars(module).items() if key not in handles}
        for name, module in model.named_modules()
    }


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(vars(module)[kind]) for module in model.modules() for kind in kinds)


class Sequences(RuleBasedStateMachine):
    """Two equal models that go through the same operations, of which only one gets hf_ckpt."""

    @initialize(
        family=st.sampled_from(FAMILIES),
        dropout=st.sampled_from([0.0, 0.1]),
        lane=st.sampled_from([None, Delayed, Eager]),
        theirs=st.sampled_from([False, False, True]),
    )
    def begin(self, family, dropout, lane, theirs):
        self.undo = contextlib.ExitStack()
        self.undo.enter_context(lanes_of(lane))
        self.said = self.undo.enter_context(Said())
        self.family, self.lane = family, lane
        self.ours, self.plain = (tiny_model(family, layers=SEQUENCE_LAYERS, dropout=dropout) for _ in range(2))
        self.theirs = theirs
        """Transformers' own checkpointing was on before hf_ckpt came."""
        if theirs:
            self.both(lambda model: enable(model, {"use_reentrant": False}))
        self.installed = self.enabled = self.wrapped = self.hooked = False
        self.active = set()
        self.pauses = []
        self.pending = []
        self.steps = 0

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

    def names(self, which):
        kept = CHOSEN.get(which, range(SEQUENCE_LAYERS))
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

    def drop_pending(self):
        self.pending.clear()

    # --- hf_ckpt ---

    @rule(which=st.sampled_from(sorted(CHOICES)))
    def install(self, which):
        hf_ckpt.install(self.ours, CHOICES[which])
        self.enabled = self.enabled if self.installed else self.theirs
        self.installed, self.active = True, self.names(which)

    @rule()
    def install_again(self):
        if not self.installed:
            self.enabled, self.active = self.theirs, self.names("full")
        hf_ckpt.install(self.ours)
        self.installed = True

    @rule(bad=st.sampled_from(BAD), through_enable=st.booleans())
    def refused(self, bad, through_enable):
        before = snapshot(self.ours)
        ask = enable if through_enable and self.installed else hf_ckpt.install
        with pytest.raises(SpecError):
            ask(self.ours, bad)
        assert unchanged(self.ours, before)

    @precondition(lambda self: self.installed)
    @rule(name=st.sampled_from(compat.ENABLE_NAMES), options=st.sampled_from(OPTIONS))
    def enable_bare(self, name, options):
        getattr(base_model(self.ours), name)(options)
        self.enabled = True

    @precondition(lambda self: self.installed)
    @rule(which=st.sampled_from(sorted(CHOICES)))
    def enable_anew(self, which):
        enable(self.ours, CHOICES[which])
        self.enabled, self.active = True, self.names(which)

    @precondition(lambda self: self.installed)
    @rule(name=st.sampled_from(compat.DISABLE_NAMES))
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

    # --- what others do ---

    @rule(through=st.sampled_from(["deepcopy", "pickle", "plain pickle"]))
    def copied(self, through):
        whole = through == "deepcopy" or self.theirs or self.hooked  # transformers' embedding hook does not pickle
        work = copy.deepcopy if whole else lambda model: pickle.loads(pickle.dumps(model))
        self.both(lambda model: model.zero_grad(set_to_none=True))
        plain, ours = self.both(work)
        enabled = self.enabled
        self.resume_all()
        self.drop_pending()
        self.flags_and_hooks_are_as_the_state_says()  # of the original
        if self.installed and through != "plain pickle":  # what happens to it is no matter to the copy
            hf_ckpt.uninstall(self.ours)
        self.plain, self.ours, self.enabled = plain, ours, enabled

    @precondition(lambda self: not self.wrapped and not self.theirs and not self.hooked)
    @rule(adapter=st.sampled_from(["peft", "hub"]))
    def adapt(self, adapter):
        self.drop_pending()
        self.both(lambda model: model.zero_grad(set_to_none=True))
        self.plain, self.ours = self.both(lambda model: with_lora(model, self.family, hub=adapter == "hub"))
        self.wrapped = True

    @precondition(lambda self: not self.enabled and not self.pauses and not self.theirs and not self.hooked)
    @rule()
    def hook_embeddings(self):
        self.both(lambda model: base_model(model).enable_input_require_grads())
        self.hooked = True

    @rule(training=st.booleans())
    def train_or_eval(self, training):
        self.drop_pending()
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

    @rule(seed=st.integers(0, 2))
    def step(self, seed):
        before = hf_ckpt.describe(self.ours) if self.installed else None

        def work(model):
            torch.manual_seed(seed)
            loss = model(**self.batch(seed)).loss
            loss.backward()
            return loss.detach()

        expected, got = self.both(work)
        assert torch.equal(expected, got)
        self.steps += 1
        if before is None:
            return
        after = hf_ckpt.describe(self.ours)
        acts = self.enabled and self.ours.training
        for name in self.active:
            assert after.forwards[name] - before.forwards[name] == acts, name
            again = after.recomputed[name] - before.recomputed[name]
            assert (again > 0) == acts, name

    @precondition(lambda self: len(self.pending) < 3)
    @rule(seed=st.integers(0, 2))
    def forward(self, seed):
        def work(model):
            torch.manual_seed(seed)
            return model(**self.batch(seed)).loss

        expected, got = self.both(work)
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

    @rule()
    def without_gradients(self):
        with torch.no_grad():
            expected, got = self.both(lambda model: torch.manual_seed(0) and model(**self.batch()).loss)
        assert torch.equal(expected, got)

    @rule()
    def zero(self):
        self.both(lambda model: model.zero_grad(set_to_none=True))

    # --- always ---

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
        assert segments._open.run is None
        if hasattr(self, "undo"):
            assert not self.said.unexpected(EVAL_SAID, *([] if self.lane else [NO_LANE_SAID]))


class TestSequences(Sequences.TestCase):
    settings = settings(examples(5), stateful_step_count=25)


@pytest.mark.slow
class TestManySequences(Sequences.TestCase):
    settings = settings(examples(20, 0.15), stateful_step_count=25)
