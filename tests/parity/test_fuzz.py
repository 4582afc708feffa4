"""Random specs and sequences of operations on a model: each works as promised or is refused.

A seed makes a case. To repeat a failing one, call its test with the seed.
"""

import contextlib
import copy
import itertools
import json
import pickle
import random

import pytest
import torch
import yaml
from helpers.adapters import with_lora
from helpers.installed import flags, forward_hooks
from helpers.lanes import Delayed, Eager, lanes_of
from helpers.snapshots import snapshot
from helpers.steps import enable, gradients, without_cache
from helpers.tables import table

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.running import running
from hf_ckpt.errors import HfCkptError, SpecError
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.reading import POLICIES
from hf_ckpt.spec.spec import Spec

# --- specs ------------------------------------------------------------------------------------------------------------


VALUES = table(__file__, "values.yaml")


def layers_of(draw, least, most):
    """Text that selects layers, such as "0-15,-1"."""
    one = draw.randint(least, most)
    other = draw.randint(least, most)
    return ",".join(draw.choice([f"{one}", f"{one}-", f"{one}-{other}"]) for _ in range(draw.randint(1, 3)))


def random_spec(draw, least=-9, most=99):
    """A valid spec: a policy, and other keys in any order as far as they go together."""
    layers = [layers_of(draw, least, most) for _ in range(3)]
    policy, stack = draw.choice(["none", "full", "selective", "offload"]), draw.choice(["encoder", "decoder"])
    values = VALUES | {
        "layers": [layers[0], {stack: layers[1]}],
        "rules": [[{"layers": layers[2], "policy": policy}], [{"layers": "0", "policy": "full", "stack": stack}]],
    }
    spec = {"policy": draw.choice(POLICIES)}
    if spec["policy"] == "budget":
        spec["budget"] = draw.choice(values["budget"])
    for key in draw.sample(sorted(values), draw.randrange(len(values))):
        tried = {**spec, key: draw.choice(values[key])}
        with contextlib.suppress(SpecError):
            spec = Spec.parse(tried) and tried
    return spec


def test_a_spec_comes_back_from_every_form():
    for seed in range(250):
        spec = Spec.parse(random_spec(random.Random(seed)))
        short = spec.to_dict()
        for form in (short, spec.to_json(), yaml.safe_load(yaml.safe_dump(short, sort_keys=False))):
            assert Spec.parse(form) == spec
            assert Spec.parse(form).to_dict() == short
            assert hash(Spec.parse(form)) == hash(spec)
        words = {key: json.dumps(value, separators=(",", ":")) for key, value in short.items()}
        if not any(character.isspace() for value in words.values() for character in value):
            assert Spec.parse(" ".join(f"{key}={value}" for key, value in words.items())) == spec


# --- sequences --------------------------------------------------------------------------------------------------------

LAYERS = 3
OPTIONS = [None, {"use_reentrant": False}, {"preserve_rng_state": True}]
SAVES = [("linear",), ("linear", "attention")]
ACTIONS = [Action("keep"), Action("full"), Action("offload")]
ACTIONS += [Action("selective", save, moved=moved) for save, moved in itertools.product(SAVES, (False, True))]


def shape_of(model):
    """Attributes of every module, but for hooks on embeddings, and how many hooks it has."""
    ignored = {"_require_grads_hook", "_require_grads_hooks"}
    return {name: vars(module).keys() - ignored for name, module in model.named_modules()}, forward_hooks(model)


def freeze_below_block_1(model):
    """Freeze all parameters before the second block."""
    first = f"{find_blocks(model).blocks[1].name}."
    for name, parameter in model.named_parameters():
        if name.startswith(first):
            break
        parameter.requires_grad_(False)


class Twins:
    """Two equal models to which the same operations are applied; only one has hf_ckpt.

    Each public method is an operation. It does nothing if it cannot be applied now.
    """

    def __init__(self, draw, family, lane):
        self._draw, self._family, self._lane = draw, family, lane
        sizes = {"dropout": draw.choice([0.0, 0.1]), "dtype": draw.choice([torch.float32, torch.bfloat16])}
        self._ours, self._plain = (tiny_model(family, layers=LAYERS, **sizes) for _ in range(2))
        state = draw.randrange(4)
        self._theirs, self._frozen = state == 0, state == 1
        """Whether transformers' own checkpointing is on; whether parameters below block 1 are frozen."""
        if self._theirs:
            self._both(lambda model: enable(model, {"use_reentrant": False}))
        if self._frozen:
            self._both(freeze_below_block_1)
        self._installed = self._enabled = self._wrapped = False
        self._active = set()
        self._pauses, self._pending = [], []

    def _both(self, work):
        return [work(model) for model in (self._plain, self._ours)]

    def _same(self, work):
        """Check that some work has the same result on both models."""
        expected, got = self._both(work)
        assert torch.equal(expected, got)
        return expected, got

    def _loss(self, model, seed):
        torch.manual_seed(seed)
        return model(**without_cache(model, tiny_batch(self._family, tokens=6, seed=seed))).loss

    def _spec(self):
        """A random spec under which a step on this model has the same gradients; or nonsense."""
        if self._draw.randrange(8) == 0:
            return {"policy": "ful", "layers": "7", "use_reentrant": 1}
        spec = random_spec(self._draw, -LAYERS, LAYERS - 1)
        for key in ("head", "preserve_rng_state"):
            spec.pop(key, None)
        return spec if spec["policy"] not in ("budget", "auto") else {"policy": "full"}

    def _change(self, work):
        """Call a function of hf_ckpt that puts a plan on the model, or refuses and changes nothing."""
        before = snapshot(self._ours)
        try:
            work()
        except HfCkptError:
            assert snapshot(self._ours) == before
            return False
        self._active = set(hf_ckpt.describe(self._ours).plan.active())
        return True

    # --- hf_ckpt ---

    def install(self):
        spec = self._draw.choice([None, self._spec(), self._spec()])  # None: the plan that is there, or the default
        if self._change(lambda: hf_ckpt.install(self._ours, spec)):
            self._enabled = self._enabled if self._installed else self._theirs
            self._installed = True
            assert spec is None or hf_ckpt.describe(self._ours).spec == Spec.parse(spec).to_dict()

    def install_a_plan(self):
        blocks = find_blocks(self._ours)
        pairs = tuple((block, self._draw.choice(ACTIONS)) for block in blocks.blocks)
        plan = Plan(blocks.family, blocks.class_name, pairs)
        assert self._change(lambda: hf_ckpt.install(self._ours, Plan.from_dict(json.loads(json.dumps(plan.to_dict())))))
        assert hf_ckpt.describe(self._ours).plan == plan
        self._enabled = self._enabled if self._installed else self._theirs
        self._installed = True

    def enable(self):
        if self._installed:
            name = self._draw.choice(compat.transformers.ENABLE_NAMES)
            options = self._draw.choice([*OPTIONS, self._spec(), self._spec()])
            self._enabled |= self._change(lambda: getattr(base_model(self._ours), name)(options))

    def disable(self):
        if self._installed:
            getattr(base_model(self._ours), self._draw.choice(compat.transformers.DISABLE_NAMES))()
            self._enabled = False

    def uninstall(self):
        hf_ckpt.uninstall(self._ours)
        self._installed = self._enabled = False
        self._active = set()

    def pause(self):
        pause = hf_ckpt.paused(self._ours)
        pause.__enter__()
        self._pauses.append((pause, installation(self._ours) if self._enabled else None))
        self._enabled = False

    def resume(self):
        if self._pauses:
            pause, record = self._pauses.pop()
            pause.__exit__(None, None, None)
            self._enabled |= record is not None and installation(self._ours) is record

    # --- other libraries ---

    def copy(self):
        through = self._draw.choice(["deepcopy", "pickle", "plain pickle"])
        whole = through == "deepcopy" or self._theirs  # its hooks do not pickle
        self._both(lambda model: model.zero_grad(set_to_none=True))
        plain, ours = self._both(copy.deepcopy if whole else lambda model: pickle.loads(pickle.dumps(model)))
        enabled = self._enabled
        while self._pauses:
            self.resume()
        self._pending.clear()
        self.check()  # of the original
        if self._installed and through != "plain pickle":  # the copy must not depend on it
            hf_ckpt.uninstall(self._ours)
        self._plain, self._ours, self._enabled = plain, ours, enabled

    def adapt(self):
        if not (self._wrapped or self._theirs):
            hub = self._draw.choice([False, True])
            self._pending.clear()
            self._both(lambda model: model.zero_grad(set_to_none=True))
            self._plain, self._ours = self._both(lambda model: with_lora(model, self._family, hub=hub))
            self._wrapped, self._frozen = True, False

    def train_or_eval(self):
        training = self._draw.choice([True, False])
        self._pending.clear()
        self._both(lambda model: model.train(training))

    def forward_without_gradients(self):
        with torch.no_grad():
            self._same(lambda model: self._loss(model, 0))

    def step(self):
        before = hf_ckpt.describe(self._ours) if self._installed else None
        seed, autocast = self._draw.randrange(3), self._draw.choice([True, False])

        def work(model):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = self._loss(model, seed)
            loss.backward()
            return loss.detach()

        self._same(work)
        if before is None:
            return
        after = hf_ckpt.describe(self._ours)
        acts = self._enabled and self._ours.training
        frozen = find_blocks(self._ours).blocks[0].name if self._frozen else None
        for name in self._active:
            assert after.forwards[name] - before.forwards[name] == acts, name
            assert (after.recomputed[name] > before.recomputed[name]) == (acts and name != frozen), name
        assert not (acts and self._lane is None and after.moved)

    def forward(self):
        if len(self._pending) < 3:
            seed = self._draw.randrange(3)
            self._pending.append(self._same(lambda model: self._loss(model, seed)))

    def backward(self):
        if self._pending:
            for loss in self._pending.pop(self._draw.randrange(len(self._pending))):
                loss.backward()

    def drop(self):
        del self._pending[1:]

    # --- invariants ---

    def check(self):
        """Flags are as the state says, hooks go with the plan, gradients and names are those of the plain model."""
        assert running.tape is None
        assert (installation(self._ours) is not None) == self._installed
        expected, got = self._both(gradients)
        assert expected.keys() == got.keys()
        for name, value in expected.items():
            assert (value is None) == (got[name] is None), name
            assert value is None or torch.equal(value.nan_to_num(), got[name].nan_to_num()), name
        assert list(self._plain.state_dict()) == list(self._ours.state_dict())
        if not self._installed:
            assert flags(self._ours) == flags(self._plain)
            assert shape_of(self._ours) == shape_of(self._plain)
            return
        described = hf_ckpt.describe(self._ours)
        assert described.enabled == self._enabled
        assert set(described.plan.active()) == self._active
        on = {name for name, module in find_blocks(self._ours).modules.items() if module.gradient_checkpointing}
        assert on == (self._active if self._enabled else set())
        assert len(flags(self._ours)) == len(on)


OPERATIONS = [name for name in vars(Twins) if not name.startswith("_") and name != "check"]


@pytest.mark.trap(30)
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))])
def test_sequences_of_operations(seed, caplog):
    draw = random.Random(seed)
    lane = draw.choice([None, Delayed, Eager])
    with lanes_of(lane):
        twins = Twins(draw, TINY_FAMILIES[seed % 4], lane)
        for _ in range(30):
            operation = draw.choice(["step", "install", *OPERATIONS])
            print(operation)  # pytest shows what led to a failure
            getattr(twins, operation)()
            twins.check()
        while twins._pauses:
            twins.resume()
        twins.uninstall()
    expected = ["runs in eval mode with gradients on", "found nothing in a block that can be rebuilt"]
    expected += ["is installed on", "`every_n_layers` is 9, but no stack of"]
    expected += [] if lane else ["there is no host memory to offload to"]
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert not [text for text in warned if not any(said in text for said in expected)]
