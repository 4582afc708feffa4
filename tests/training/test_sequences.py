"""Trainings under a budget that do what users do, in any order: gradients stay those of the plain model, no step needs
more than the budget, nothing raises, and nothing is left behind.

Hypothesis draws the sequences, and prints a failing one as a script of these rules.
"""

import copy
import functools
import gc
import weakref
from collections import Counter

import pytest
import torch
from helpers.adapters import with_lora
from helpers.installed import flags, forward_hooks
from helpers.micro_steps import (
    BETWEEN,
    LAYERS,
    LONGEST,
    MICRO_STEPS,
    SURPRISES,
    UNMEASURED,
    OperationClock,
    Run,
    alone,
    blocks_of,
    disable,
    early_exit,
    interrupted,
    nothing,
    one_forward,
    raises_in_backward,
)
from helpers.steps import enable
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

import hf_ckpt
from hf_ckpt.attach.record import installation
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch
from hf_ckpt.planner.planner import NEARLY
from hf_ckpt.training import recorder
from hf_ckpt.training.phases import Phase

MOST = 1.01
"""The largest ratio of a step's peak to what it may need: the budget, or what `full` needs where that is more."""
CHECK_EVERY = 4
FULL = {"policy": "full", "check_every": 0}
"""A check of a block takes memory that no budget limits."""
SHARES = st.sampled_from([0.25, 0.5, 0.75])
PLACES = st.integers(0, LAYERS - 1)
COUNTS = st.sampled_from([2, 5, 12])
"""Steps after a change: most need about ten until a plan is made."""
ANY = st.integers(8, LONGEST)
LENGTHS = st.one_of(
    st.just([LONGEST]),
    st.lists(st.integers(52, LONGEST), min_size=2, max_size=4),  # near
    st.lists(ANY, min_size=2, max_size=6),
    st.lists(ANY, min_size=2, max_size=6).map(sorted),
    st.lists(ANY, min_size=2, max_size=6).map(lambda lengths: sorted(lengths, reverse=True)),
)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
}


@functools.cache
def needed(family, dropout, optimizer, is_full):
    """The peak of a step of the longest batch once the optimizer has its state."""
    run = Run(family, dropout, OPTIMIZERS[optimizer], FULL if is_full else None)
    for seed in range(2):
        run.counted_step([(one_forward, LONGEST)], seed, nothing)
    return run.peak_bytes


def same(expected, got):
    return (expected is None) == (got is None) and (expected is None or torch.equal(expected, got))


def counts():
    """Counts of live tensors that are on."""
    return [mode for mode in dispatch_modes() if isinstance(mode, LiveBytes)]


def process_hooks():
    """Hooks of the process on optimizers."""
    return {*optimizers._global_optimizer_pre_hooks.values(), *optimizers._global_optimizer_post_hooks.values()}


class Trainings(RuleBasedStateMachine):
    """One training three times: without checkpointing, under `full`, and under a budget. Each rule changes something,
    and then all go on."""

    recomputed = 0
    """Runs of blocks that budgets have repeated, in all sequences."""

    @initialize(
        family=st.sampled_from(TINY_FAMILIES),
        dropout=st.sampled_from([0.0, 0.1]),
        optimizer=st.sampled_from(sorted(OPTIMIZERS)),
        share=SHARES,
        mlp=st.sampled_from([None, "auto"]),
        lengths=LENGTHS,
        count=st.sampled_from([2, 16]),
    )
    def begin(self, family, dropout, optimizer, share, mlp, lengths, count):
        self.kind = family, dropout, optimizer
        self.more = {"check_every": CHECK_EVERY} if mlp is None else {"mlp": mlp, "check_every": CHECK_EVERY}
        self.budget = self.budget_of(share)
        self.before = process_hooks()
        specs = None, FULL, self.spec()
        self.plain, self.full, self.ours = self.runs = [
            Run(family, dropout, OPTIMIZERS[optimizer], spec) for spec in specs
        ]
        self.seed = 0
        self.has_lora = False
        self.is_enabled = True
        self.lengths, self.works, self.between = lengths, [one_forward], nothing
        self.seen = set()
        self.go_on(count)

    def budget_of(self, share):
        least, most = (needed(*self.kind, is_full) for is_full in (True, False))
        return round(least + share * (most - least))

    def spec(self):
        return {"policy": "budget", "budget": f"{self.budget}B", **self.more}

    # --- steps ---

    def go_on(self, count):
        """Train for some steps."""
        needs_of_full = {}
        times = Counter()
        for number in range(count):
            micro_steps = [
                (work, self.lengths[(number + place) % len(self.lengths)]) for place, work in enumerate(self.works)
            ]
            step = micro_steps, self.seed, self.between
            key = str(micro_steps)
            times[key] += 1
            with alone():
                expected = self.plain.step(*step)
                if times[key] <= 2:  # an optimizer's state is there in the second one; all later ones are alike
                    self.full.counted_step(*step)
                    needs_of_full[key] = self.full.peak_bytes
            got = self.ours.counted_step(*step)
            self.seed += len(micro_steps)
            # Nothing can tell before the first of such steps that it goes on in another way than others did.
            is_surprise = key not in self.seen and not SURPRISES.isdisjoint(self.works)
            self.seen.add(key)
            # Nor whether steps with equal forwards have another backward, until their plan is checked.
            is_surprise |= early_exit in self.works and not self.is_checked()
            may_exceed = is_surprise or not UNMEASURED.isdisjoint(self.works) or not self.is_enabled
            self.check(f"step {number + 1} of {count}", expected, got, needs_of_full[key], may_exceed)

    def is_checked(self):
        """Whether the last step ran under a plan whose own first step had been measured."""
        session = installation(self.ours.model).session
        return session is None or session.planned.phase is Phase.PLAN

    def check(self, step, expected, got, full_bytes, may_exceed):
        assert expected.keys() == got.keys()
        differing = [name for name in expected if not same(expected[name], got[name])]
        assert not differing, f"{step}: other gradients: {differing}"
        # torch calls no hook then, and what holds the error may hold the graph, so that the next forward ends a count.
        if self.works[-1] not in (interrupted, raises_in_backward):
            assert not counts(), f"{step}: a count of live tensors is on"
        # If not even `full` fits, a plan near the lowest peak is taken.
        least_bytes = full_bytes * (NEARLY if full_bytes > self.budget else 1)
        ratio = self.ours.peak_bytes / max(self.budget, least_bytes)
        assert ratio <= MOST or may_exceed, f"{step}: {ratio:.3f} of what it may need"

    @rule(count=COUNTS)
    def train(self, count):
        self.go_on(count)

    @rule(lengths=LENGTHS, count=COUNTS)
    def other_lengths(self, lengths, count):
        self.lengths = lengths
        self.go_on(count)

    @rule(works=st.lists(st.sampled_from(MICRO_STEPS), min_size=1, max_size=3), count=COUNTS)
    def other_works(self, works, count):
        self.works = works
        self.seen.clear()
        self.go_on(count)

    @rule(between=st.sampled_from(BETWEEN), count=COUNTS)
    def other_between(self, between, count):
        self.between = between
        self.go_on(count)

    @rule(forwards=st.integers(1, 9), count=COUNTS)
    def read_features(self, forwards, count):
        """Forwards in a row that nothing follows."""
        for run in self.runs:
            for _ in range(forwards):
                run.loss(LONGEST)
        self.go_on(count)

    # --- the model ---

    @rule(below=st.integers(0, LAYERS), embeddings=st.booleans(), count=COUNTS)
    def freeze(self, below, embeddings, count):
        for run in self.runs:
            run.model.get_input_embeddings().requires_grad_(not embeddings)
            for place, block in enumerate(blocks_of(run.model)):
                if not self.has_lora:
                    block.requires_grad_(place >= below)
        self.go_on(count)

    @rule(below=st.integers(0, LAYERS), count=COUNTS)
    def lower_blocks_in_eval_mode(self, below, count):
        for run in self.runs:
            for place, block in enumerate(blocks_of(run.model)):
                block.train(place >= below)
        self.go_on(count)

    @rule(name=st.sampled_from(["eager", "sdpa"]), count=COUNTS)
    def attention(self, name, count):
        for run in self.runs:
            base_model(run.model).set_attn_implementation(name)
        self.go_on(count)

    @rule(depth=st.integers(1, LAYERS), count=COUNTS)
    @precondition(lambda self: self.kind[0] == "llama")
    def depth(self, depth, count):
        """Call the first blocks only."""
        for run in self.runs:
            base_model(run.model).config.num_hidden_layers = depth
        self.go_on(count)

    @rule(place=PLACES, count=COUNTS)
    @precondition(lambda self: not self.has_lora)
    def replace_a_block(self, place, count):
        family, dropout, optimizer = self.kind
        new = blocks_of(Run(family, dropout, OPTIMIZERS[optimizer]).model)[place]
        for run in self.runs:
            layers, index = self.list_of(run, place)
            layers[index] = copy.deepcopy(new)
            run.make_optimizer()
        self.go_on(count)

    @rule(count=COUNTS)
    @precondition(lambda self: not self.has_lora)
    def append_a_copy(self, count):
        for run in self.runs:
            layers, _ = self.list_of(run, -1)
            layers.append(copy.deepcopy(layers[-1]))
            if run.family == "llama":
                base_model(run.model).config.num_hidden_layers = len(layers)
            run.make_optimizer()
        self.go_on(count)

    def list_of(self, run, place):
        """The list that holds a block, and its place there."""
        parent, _, index = find_blocks(run.model).blocks[place].name.rpartition(".")
        return base_model(run.model).get_submodule(parent), int(index)

    @rule(count=COUNTS)
    @precondition(lambda self: not self.has_lora)
    def add_lora(self, count):
        self.has_lora = True
        for run in self.runs:
            run.model = with_lora(run.model, run.family)
            run.make_optimizer()
        self.go_on(count)

    @rule(count=COUNTS)
    def add_a_draft(self, count):
        """A second stack of the family, which the forward does not run."""
        draft = copy.deepcopy(base_model(self.plain.model).base_model)
        for run in self.runs:
            base_model(run.model).draft = copy.deepcopy(draft)
        self.go_on(count)

    @rule(count=COUNTS)
    def go_on_with_copies(self, count):
        for run in self.runs:
            run.model = copy.deepcopy(run.model)
            run.make_optimizer()
        self.go_on(count)

    # --- optimizers ---

    @rule(whole=st.booleans(), count=COUNTS)
    def new_optimizer(self, whole, count):
        for run in self.runs:
            run.make_optimizer(whole)
        self.go_on(count)

    @rule(count=COUNTS)
    def add_the_rest_to_the_optimizer(self, count):
        for run in self.runs:
            if run.apart:
                run.optimizer.add_param_group({"params": run.apart})
                run.apart = []
        self.go_on(count)

    @rule(count=COUNTS)
    @precondition(lambda self: self.kind[2] == "sgd")
    def add_momentum(self, count):
        for run in self.runs:
            for group in run.optimizer.param_groups:
                group["momentum"] = 0.9
        self.go_on(count)

    # --- hf_ckpt ---

    @rule(count=COUNTS)
    def disable_or_enable(self, count):
        (disable if self.is_enabled else enable)(self.ours.model)
        self.is_enabled = not self.is_enabled
        self.go_on(count)

    @rule(share=SHARES, count=COUNTS)
    def another_budget(self, share, count):
        self.budget = self.budget_of(share)
        hf_ckpt.install(self.ours.model, self.spec())
        self.go_on(count)

    @rule(count=COUNTS)
    def another_spec_meanwhile(self, count):
        hf_ckpt.install(self.ours.model, FULL)
        self.go_on(3)
        hf_ckpt.install(self.ours.model, self.spec())
        self.go_on(count)

    @rule(count=COUNTS)
    def verify(self, count):
        hf_ckpt.verify(self.ours.model, tiny_batch(self.ours.family), "full")
        self.go_on(count)

    def teardown(self):
        if not hasattr(self, "seen"):
            return
        Trainings.recomputed += sum(hf_ckpt.describe(self.ours.model).recomputed.values())
        hf_ckpt.uninstall(self.ours.model)
        assert flags(self.ours.model) == flags(self.plain.model)
        assert forward_hooks(self.ours.model) == forward_hooks(self.plain.model)
        expected, got = (
            {name: vars(module).keys() for name, module in run.model.named_modules()} for run in (self.plain, self.ours)
        )
        assert got == expected
        model = weakref.ref(self.ours.model)
        del self.ours, self.runs
        gc.collect()
        assert model() is None, "the model is alive"
        assert not counts()
        assert not process_hooks() - self.before


@pytest.mark.parametrize(
    ("count", "steps"), [pytest.param(3, 4, marks=pytest.mark.long), pytest.param(6, 6, marks=pytest.mark.slow)]
)
def test_any_sequence(count, steps, monkeypatch):
    monkeypatch.setattr(recorder, "DeviceClock", OperationClock)  # no plan depends on how busy the machine is
    Trainings.recomputed = 0
    checks = settings(max_examples=count, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(Trainings, settings=checks)
    assert Trainings.recomputed
