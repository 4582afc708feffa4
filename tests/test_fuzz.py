"""Random specs, plans and sequences of operations on random small models.

The same few examples on every run. `HF_CKPT_FUZZ=1000 pytest -n 0 -s tests/test_fuzz.py` runs about 1,000 other ones
over all parts, prints how many of each, and takes `--hypothesis-seed=N` to repeat a run.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import json
import logging
import os
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import enable, gradients, input_gradient_hooks, without_cache
from hypothesis import HealthCheck, assume, event, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from peft import LoraConfig, get_peft_model
from test_install import snapshot
from test_offload import Delayed, DeviceBytes, Eager
from test_rebuild import TARGETS
from test_spec import JSON, KEYS, WORDS, valid_specs

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.engines import head as head_engine
from hf_ckpt.engines import offload, rebuild, segments
from hf_ckpt.errors import HfCkptError, InfeasibleError, PlanMismatchError, SpecError
from hf_ckpt.families import base_model, blocks_of_known_code, find_blocks, vocabulary_head
from hf_ckpt.install import _warn_eval_mode, _warn_plain_head, installation
from hf_ckpt.plan import ACTIONS, KEEP, Action, Plan
from hf_ckpt.spec import Spec
from hf_ckpt.tiny import FAMILIES, VOCABULARY, tiny_batch, tiny_model

FUZZ = int(os.environ.get("HF_CKPT_FUZZ", "0"))
CASES: collections.Counter[str] = collections.Counter()
SAVES = (("linear", "attention"), ("attention",), ("linear",))
ROUNDING, ROUNDING_16 = 1e-5, 5e-2
CACHED_BYTES = 1024  # what transformers caches


def examples(count, share):
    """So many examples by default, and that share of those asked for."""
    return settings(
        max_examples=max(1, round(FUZZ * share)) if FUZZ else count,
        derandomize=not FUZZ,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(autouse=True, scope="module")
def say_how_many():
    yield
    if FUZZ:
        print("\ncases:", sum(CASES.values()), dict(CASES))


def unchanged(model, before):
    """Not as a bare comparison, whose failure pytest would explain for minutes."""
    return snapshot(model) == before


# --- comparing ------------------------------------------------------------------------------------------------------


def assert_equal(expected, got, what=""):
    """Bit-equal, NaN like NaN."""
    assert expected.keys() == got.keys(), what
    for name, value in expected.items():
        other = got[name]
        assert (value is None) == (other is None), f"{what}: only one side has {name}"
        assert value is None or value.dtype == other.dtype, f"{what}: {name}"
        assert value is None or torch.equal(value.nan_to_num(), other.nan_to_num()), f"{what}: {name} differs"


def assert_near(expected, got, most, *, together):
    """Relative norm of the difference: of all gradients `together`, or of each (of the largest, if it is tiny)."""
    assert expected.keys() == got.keys()
    assert [name for name in expected if expected[name] is None] == [name for name in got if got[name] is None]
    there = {name: value.double() for name, value in expected.items() if value is not None}
    gaps = {name: float((value - got[name].double()).norm()) for name, value in there.items()}
    norms = {name: float(value.norm()) for name, value in there.items()}
    assert gaps.pop("loss") <= most * max(norms.pop("loss"), 1e-2)
    if not gaps:
        return
    if together:
        assert sum(gap**2 for gap in gaps.values()) ** 0.5 <= most * sum(norm**2 for norm in norms.values()) ** 0.5
        return
    scale = max(norms.values())
    for name, gap in gaps.items():
        assert gap <= most * max(norms[name], 1e-2 * scale), (name, gap, norms[name])


class Said(logging.Handler):
    """Warnings of hf_ckpt's loggers, and Python's own."""

    ONCE = (
        *(offload._tell_no_lane, offload._tell_limit, offload._tell_unpinned, offload._tell_hooks),
        *(rebuild._warn_nothing_dropped, head_engine._tell, _warn_plain_head, _warn_eval_mode),
    )

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []
        self.caught = warnings.catch_warnings(record=True)

    def emit(self, record):
        self.messages.append(record.getMessage())

    def __enter__(self):
        for once in self.ONCE:
            once.cache_clear()
        self.recorded = self.caught.__enter__()
        warnings.simplefilter("always")
        logging.getLogger("hf_ckpt").addHandler(self)
        return self

    def __exit__(self, *raised):
        logging.getLogger("hf_ckpt").removeHandler(self)
        self.caught.__exit__(*raised)

    def python(self):
        """Texts of Python's warnings."""
        return {str(warning.message) for warning in self.recorded}

    def unexpected(self, *expected):
        """Messages that none of the texts is a part of."""
        return [message for message in self.messages if not any(text in message for text in expected)]


GENERIC_SAID = "is of no known family"
NO_LANE_SAID = "there is no host memory to offload to"
LIMIT_SAID = "is used up; what does not fit stays on the device"
PLAIN_HEAD_SAID = "is not run in chunks, because"
NOTHING_SAID = "found nothing in a block that can be rebuilt"
EVAL_SAID = "runs in eval mode with gradients on"


@contextlib.contextmanager
def lanes_of(lane_class):
    """An accelerator's stream is played by this class, if one is given."""
    if lane_class is None:
        yield
        return
    with (
        mock.patch.object(offload, "lane_of", side_effect=lambda device: lane_class()),
        mock.patch.object(offload, "LEAST_BYTES", 0),
    ):
        yield


# --- specs ----------------------------------------------------------------------------------------------------------


def small_layers():
    """Texts that mostly fit three blocks."""
    return st.lists(st.sampled_from(["0", "1", "2", "-1", "-3", "0-1", "1-2", "-2--1", "0--1", "3"]), min_size=1).map(
        ",".join
    )


@st.composite
def fitting_specs(draw):
    """Valid specs whose numbers mostly fit models of three blocks; those that plan are left to a test of their own."""
    spec = draw(valid_specs().filter(lambda spec: spec["policy"] not in ("budget", "auto")))
    if draw(st.integers(0, 9)) == 0:
        return spec
    if isinstance(spec.get("layers"), dict):
        spec["layers"] = {stack: draw(small_layers()) for stack in spec["layers"]}
    elif "layers" in spec:
        spec["layers"] = draw(small_layers())
    if "rules" in spec:
        spec["rules"] = [{**rule, "layers": draw(small_layers())} for rule in spec["rules"]]
    if isinstance(spec.get("segments"), int):
        spec["segments"] = 1 + spec["segments"] % 3
    if isinstance(spec.get("head"), int):
        spec["head"] = 1 + spec["head"] % 17
    return spec


@st.composite
def nearly_specs(draw):
    """Valid specs with a key too many, too few, or of another value."""
    spec = draw(valid_specs())
    for _ in range(draw(st.integers(1, 3))):
        key = draw(KEYS | st.sampled_from(sorted(spec)) if spec else KEYS)
        if draw(st.booleans()):
            spec.pop(key, None)
        else:
            spec[key] = draw(WORDS | JSON | st.integers(-2, 9) | st.sampled_from(list(draw(valid_specs()).values())))
    return spec


YAML = ["!!int", "!!bool", "!!float", "!!timestamp", "!!binary", "!!null", "!!set", "!!merge", "&a", "*a", "<<", "---"]
YAML += ["{", "}", "[", "]", ":", ",", "'", '"', "|", ">", "%", "@", "`", "?", "- ", "0x", "0b", "1_", ".inf", ".nan"]
YAML += ["1:2", "2001-01-01", "~", "yes", "0.5", "9", "\t", "\\", "é", "\x85", "\ud800"]


@st.composite
def nearly_words(draw):
    """Texts like key=value words, with pieces of YAML for values."""
    piece = st.sampled_from(YAML) | WORDS | st.text(max_size=3)
    words = [f"{draw(KEYS)}={''.join(draw(st.lists(piece, max_size=4)))}" for _ in range(draw(st.integers(1, 3)))]
    return " ".join(words)


def check_parsed(given_spec):
    """It is refused by `SpecError`, or comes back from everything it is written to."""
    CASES["texts and dicts"] += 1
    try:
        spec = Spec.parse(given_spec)
    except SpecError:
        return
    short = spec.to_dict()
    assert Spec.parse(short) == spec
    assert Spec.parse(spec.to_json()) == spec
    assert Spec.parse(short).to_dict() == short
    hash(spec)
    words = {key: json.dumps(value, separators=(",", ":")) for key, value in short.items()}
    text = " ".join(f"{key}={value}" for key, value in words.items())
    if not any(character.isspace() for value in words.values() for character in value):
        assert Spec.parse(text) == spec, text


@examples(150, 0.1)
@given(nearly_specs())
def test_what_is_nearly_a_spec(given_spec):
    check_parsed(given_spec)


@examples(100, 0.05)
@given(valid_specs())
def test_every_valid_spec_comes_back_from_words_too(given_spec):
    check_parsed(given_spec)


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
    """As words (or JSON), and as a file."""
    path = tmp_path / "spec.yaml"
    path.write_text(text if text.startswith("{") else text.replace("=", ": ", 1), encoding="utf-8")
    for given_spec in (text, path):
        try:
            Spec.parse(given_spec)
        except SpecError:
            continue
        except ValueError as error:  # which `SpecError` is, too
            raise AssertionError(f"not a SpecError: {error!r}") from error


@examples(150, 0.1)
@given(nearly_words())
def test_what_are_nearly_words(text):
    check_parsed(text)


@st.composite
def nearly_plans(draw):
    """A saved plan with something in it replaced."""
    saved = PLAN.to_dict()
    for _ in range(draw(st.integers(1, 2))):
        place, path = saved, []
        while isinstance(place, (dict, list)) and place and (not path or draw(st.integers(0, 3))):
            path.append((place, draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))))
            place = path[-1][0][path[-1][1]]
        holder, key = path[-1]
        holder[key] = draw(JSON | st.sampled_from([*ACTIONS, "attention", ["linear"], ["conv"], 0, 1, True, "auto"]))
    return saved


PLAN = hf_ckpt.install(tiny_model("llama", layers=3), {"policy": "selective", "layers": "0-1", "head": 7}).plan
PREDICTION = {"peak_bytes": 9, "step_seconds": 0.5, "tokens": 8, "parts": {"blocks": 4}, "budget_bytes": 10}


def check_plan(saved):
    """A damaged plan is refused by `PlanMismatchError`, before a model is touched; any other does what it says."""
    CASES["saved plans"] += 1
    model = tiny_model("llama", layers=3)
    before = snapshot(model)
    try:
        plan = Plan.from_dict(saved)
        hf_ckpt.install(model, plan)
    except PlanMismatchError:
        assert unchanged(model, before)
        return
    assert {name for action in plan.active().values() for name in action.save} <= {"linear", "attention"}
    assert str(hf_ckpt.describe(model))
    if plan.prediction is not None:
        assert plan.prediction.tokens_per_second == 16
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    enable(model)
    train(model, tiny_batch("llama"))
    hf_ckpt.uninstall(model)
    assert unchanged(model, before)


def damaged(*path, value):
    """A saved plan with `value` at a place."""
    saved: Any = {**PLAN.to_dict(), "prediction": copy.deepcopy(PREDICTION)}
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return saved


ROW = ("stacks", "decoder", 0)


@pytest.mark.parametrize(
    "saved",
    [
        damaged(*ROW, "save", value="linear"),
        damaged(*ROW, "save", value=["conv"]),
        damaged(*ROW, "save", value=[1]),
        damaged(*ROW, "save", value=[["linear"]]),
        damaged("prediction", "parts", value={"blocks": float("inf")}),
        damaged("prediction", "step_seconds", value=10**400),
        damaged("prediction", "peak_bytes", value="many"),
        damaged("prediction", "tokens", value="many"),
    ],
    ids=["text", "unknown", "number", "list", "inf", "huge", "peak", "tokens"],
)
def test_damaged_plans(saved):
    check_plan(saved)


@examples(40, 0.05)
@given(nearly_plans())
def test_what_is_nearly_a_plan(saved):
    rows = [row for rows in saved["stacks"].values() for row in rows] if _has_rows(saved) else []
    known = (("linear", "attention"), ["linear", "attention"], ["linear"], ["attention"], [])
    assume(all(row.get("save", []) in known for row in rows))  # see `test_damaged_plans`
    check_plan(saved)


def _has_rows(saved):
    stacks = saved.get("stacks")
    lists = isinstance(stacks, dict) and all(isinstance(rows, list) for rows in stacks.values())
    return lists and all(isinstance(row, dict) for rows in stacks.values() for row in rows)


def is_chunked(model, asked, batch):
    """Whether the head runs in chunks; a single one is the plain head."""
    if vocabulary_head(base_model(model)) is None:
        return False
    tokens = batch["labels"].numel()
    return asked != "full" and tokens > head_engine.tokens_per_chunk(asked, tokens, trained=True)


# --- specs on models ------------------------------------------------------------------------------------------------


def train(model, batch, seed=7):
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**without_cache(model, batch)).loss
    loss.backward()
    found = {"loss": loss.detach(), **gradients(model)}
    model.zero_grad(set_to_none=True)
    return found


def flags(model):
    """Modules whose checkpointing flag is on while gradients are recorded."""
    return [name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)]


def check_on(family, given_spec, through_enable):
    """Install, enable, one step, disable, uninstall: each works or says a typed error, and leaves no trace."""
    CASES["specs on models"] += 1
    keeps_random_state = given_spec.get("preserve_rng_state", "auto") is not False
    model = tiny_model(family, layers=3, dropout=0.1 if keeps_random_state else 0.0)
    batch = tiny_batch(family, tokens=8)
    expected = train(model, batch)
    before = snapshot(model)
    with Said() as said:
        try:
            if through_enable:
                hf_ckpt.install(model)
                enable(model, given_spec)
            else:
                hf_ckpt.install(model, given_spec)
                assert flags(model) == []
                assert not hf_ckpt.describe(model).enabled
                enable(model)
        except HfCkptError as error:
            event(f"refused: {type(error).__name__}")
            assert through_enable or unchanged(model, before)
            hf_ckpt.uninstall(model)
            assert unchanged(model, before)
            return
        assert hf_ckpt.describe(model).spec == Spec.parse(given_spec).to_dict()
        try:
            got = train(model, batch)
        except HfCkptError as error:
            event(f"refused in the forward: {type(error).__name__}")
        else:
            event("trained")
            described = hf_ckpt.describe(model)
            assert set(described.forwards) == set(described.plan.active())
            if is_chunked(model, described.plan.head, batch):
                assert described.chunked_heads == 1
                assert_near(expected, got, ROUNDING, together=False)
            else:
                assert_equal(expected, got, str(given_spec))
            for name, action in described.plan.active().items():
                assert described.forwards[name] == 1, name
                assert described.recomputed[name] > 0, name
                assert described.recomputed[name] == 1 or action.kind == "selective", name
        model.zero_grad(set_to_none=True)
        getattr(model, compat.DISABLE_NAMES[-1])()
        assert flags(model) == []
        assert_equal(expected, train(model, batch))
        hf_ckpt.uninstall(model)
        assert unchanged(model, before)
        assert_equal(expected, train(model, batch))
    assert not said.unexpected(NO_LANE_SAID, PLAIN_HEAD_SAID)


@examples(16, 0.2 / len(FAMILIES))
@given(fitting_specs(), st.booleans())
@example({"policy": "selective", "save": ["attention"], "engine": "sac"}, False)  # finds no attention to save
def test_a_spec_works_on_every_family_or_is_refused(given_spec, through_enable):
    for family in FAMILIES:
        check_on(family, given_spec, through_enable)


PLANNED = [{"budget": "1GiB"}, {"budget": 4096}, {"budget": "1GiB", "save": ["attention"]}, {"policy": "auto"}]
PLANNED += [{"budget": "600KiB", "host_budget": "1MiB"}, {"budget": "1TiB", "engine": "sac"}, {"budget": "50%"}]


@examples(1, 0.005)
@given(st.sampled_from(PLANNED), st.sampled_from(FAMILIES), st.integers(3, 17))
@example({"budget": 4096}, "t5", 8)
def test_planned_specs(given_spec, family, tokens):
    CASES["planned specs"] += 1
    model = tiny_model(family, layers=2, dropout=0.1)
    batch = tiny_batch(family, tokens=tokens)
    expected = train(model, batch)
    before = snapshot(model)
    with Said() as said:
        hf_ckpt.install(model, given_spec)
        enable(model)
        may_be_refused = InfeasibleError if given_spec.get("engine") != "sac" else HfCkptError
        with contextlib.suppress(may_be_refused):
            assert_equal(expected, train(model, batch))
            event("trained")
        model.zero_grad(set_to_none=True)
        getattr(model, compat.DISABLE_NAMES[-1])()
        assert flags(model) == []
        hf_ckpt.uninstall(model)
        assert unchanged(model, before)
    assert not said.unexpected(NO_LANE_SAID)


# --- plans on models ------------------------------------------------------------------------------------------------


def _generic(model_class, config, dtype, attention):
    config._attn_implementation = attention
    torch.manual_seed(0)
    return model_class(config).to(dtype).train()


def opt(layers, dropout, attention, dtype):
    """Of no known family; learned positions."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        dropout=dropout,
        attention_dropout=dropout,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return _generic(transformers.OPTForCausalLM, config, dtype, attention)


def gemma2(layers, dropout, attention, dtype):
    """Four norms a block, sliding windows on every other one, logits capped."""
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=5,
        attention_dropout=dropout,
        final_logit_softcapping=3.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    )
    return _generic(transformers.Gemma2ForCausalLM, config, dtype, attention)


def masked_lm(layers, dropout, attention, dtype):
    """BERT with a head onto the vocabulary."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return _generic(transformers.BertForMaskedLM, config, dtype, attention)


OTHERS = {"opt": opt, "gemma2": gemma2, "masked_lm": masked_lm}
KINDS = (*FAMILIES, *OTHERS)
LORA = TARGETS | {"opt": ["q_proj", "fc1"], "gemma2": ["q_proj", "up_proj"], "masked_lm": ["query", "dense"]}
BATCHES = {"bert": "bert", "t5": "t5"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a plan for it, and how it is trained."""

    kind: str
    layers: int
    dropout: float
    attention: str
    dtype: str
    tuning: str
    cut: int
    """Of `prefix` and `suffix`: the first block that is not, or is, frozen."""
    batch: int
    tokens: int
    padding: str
    micro: str
    through: str
    """What the gradient comes from."""
    state: int
    """Of `hidden`: which of them."""
    actions: tuple[Action, ...]
    head: int | str
    lane: type | None
    by: str
    """How the plan is given."""
    host_budget: int | None
    adapters_first: bool

    def model(self):
        """A new one, always the same."""
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32
        if self.kind in OTHERS:
            model = OTHERS[self.kind](self.layers, self.dropout, self.attention, dtype)
        else:
            options = {"layers": self.layers, "dropout": self.dropout, "attention": self.attention, "dtype": dtype}
            model = tiny_model(self.kind, **options)
        if self.tuning in ("prefix", "suffix"):
            names = list(find_blocks(model).modules)
            named = list(model.named_parameters())
            first = next(n for n, (name, _) in enumerate(named) if name.startswith(f"{names[self.cut % len(names)]}."))
            for _, parameter in named[:first] if self.tuning == "prefix" else named[first:]:
                parameter.requires_grad_(False)
        return model

    def adapted(self, model):
        """With adapters, where it has some."""
        if self.tuning != "lora":
            return model
        torch.manual_seed(1)
        config = LoraConfig(
            r=4,
            lora_dropout=self.dropout,
            init_lora_weights=False,
            target_modules=LORA[self.kind],
            fan_in_fan_out=self.kind == "gpt2",
        )
        return get_peft_model(model, config)

    def batches(self):
        """Those of the micro-steps."""
        found = []
        for seed in range(1 if self.micro == "one" else 2):
            family = BATCHES.get(self.kind, "llama")
            batch = tiny_batch(family, batch=self.batch, tokens=self.tokens, seed=seed)
            if self.padding != "none":
                pads = max(1, self.tokens // 3)
                here = (-1, slice(0, pads) if self.padding == "left" else slice(self.tokens - pads, None))
                batch["attention_mask"][here] = 0
                if batch["labels"].shape == batch["input_ids"].shape and self.batch > 1:
                    batch["labels"][here] = -100
            found.append(batch)
        return found

    def loss(self, model, batch):
        """Of one micro-step."""
        inputs = dict(without_cache(model, batch))
        if self.through == "tuple":
            return model(**inputs, return_dict=False)[0]
        if self.through == "loss":
            return model(**inputs).loss
        outputs = model(**inputs, output_hidden_states=True)
        name = (
            "hidden_states" if self.kind != "t5" else ("encoder_hidden_states", "decoder_hidden_states")[self.cut % 2]
        )
        states = outputs[name]
        if self.through == "states":
            return outputs.loss + sum(state.float().square().mean() for state in states[1:])
        return states[self.state % len(states)].float().square().mean()

    def needed(self, blocks):
        """Names of the blocks that the gradient comes through."""
        if self.through != "hidden":
            return set(blocks)
        state = self.state % (self.layers + 1)
        stack = "" if self.kind != "t5" else ("encoder.", "decoder.")[self.cut % 2]
        found = {name for name in blocks if name.startswith(stack) and int(name.rpartition(".")[2]) < state}
        return found | (
            {name for name in blocks if name.startswith("encoder.")} if stack == "decoder." and state else set()
        )

    def step(self, model):
        """Losses and gradients, or None where nothing needs any."""
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        losses = []
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "autocast"):
            for batch in self.batches():
                losses.append(self.loss(model, batch))
                if not losses[-1].requires_grad:
                    return None
                if self.micro != "together":
                    losses[-1].backward()
        if self.micro == "together":
            sum(losses).backward()
        return {"loss": torch.stack([loss.detach() for loss in losses]), **gradients(model)}

    def plan(self, model):
        """Its actions, for the blocks of this model."""
        found = find_blocks(model)
        pairs = []
        for block in found.blocks:
            action = self.actions[len(pairs)]
            earlier = pairs[-1][0].stack if pairs else None
            if action.segment is not None and earlier == block.stack and pairs[-1][1].segment is not None:
                # 1 joins the segment before, 0 begins a new one
                number = pairs[-1][1].segment + (action.segment == 0)
                action = dataclasses.replace(action, segment=number)
            elif action.segment is not None:
                used = [other.segment for other_block, other in pairs if other_block.stack == block.stack]
                action = dataclasses.replace(action, segment=max([n for n in used if n is not None], default=-1) + 1)
            pairs.append((block, action))
        return Plan(found.family, found.model, tuple(pairs), head=self.head)

    def install(self, model):
        """Put the plan on."""
        plan = self.plan(model)
        if self.by == "install":
            hf_ckpt.install(model, plan)
            enable(model)
            return plan
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / self.by
            plan.save(path)
            spec = {"plan": str(path)} | ({"host_budget": self.host_budget} if self.host_budget else {})
            hf_ckpt.install(model)
            enable(model, spec)
        return plan


ACTION = st.one_of(
    st.just(KEEP),
    st.builds(Action, st.just("selective"), st.sampled_from(SAVES), moved=st.booleans()),
    st.just(Action("full")),
    st.just(Action("offload")),
    st.builds(Action, st.just("full"), segment=st.integers(0, 1)),
)


@st.composite
def cases(draw):
    """Anything that goes together."""
    kind = draw(st.sampled_from(KINDS))
    layers = draw(st.integers(1, 4))
    whole = draw(st.sampled_from([None, None, None, "full", "selective", "offload", "segments"]))
    if whole is None:
        actions = draw(st.lists(ACTION, min_size=2 * layers, max_size=2 * layers))
    elif whole == "segments":
        actions = [Action("full", segment=int(draw(st.integers(0, 3)) > 0)) for _ in range(2 * layers)]
    elif whole == "selective":
        save, moved = draw(st.sampled_from(SAVES)), draw(st.booleans())
        actions = [Action("selective", save, moved=moved)] * (2 * layers)
    else:
        actions = [Action(whole)] * (2 * layers)
    return Case(
        kind=kind,
        layers=layers,
        dropout=draw(st.sampled_from([0.0, 0.1])),
        attention=draw(st.sampled_from(["eager", "sdpa"])) if kind != "gemma2" else "eager",
        dtype=draw(st.sampled_from(["fp32", "bf16", "autocast"])),
        tuning=draw(st.sampled_from(["all", "lora", "prefix", "suffix"])),
        cut=draw(st.integers(0, 7)),
        batch=draw(st.integers(1, 3)),
        tokens=draw(st.integers(3, 40)),
        padding=draw(st.sampled_from(["none", "right", "left"])),
        micro=draw(st.sampled_from(["one", "two", "together"])),
        through=draw(st.sampled_from(["loss", "loss", "tuple", "hidden", "states"])),
        state=draw(st.integers(0, 4)),
        actions=tuple(actions),
        head=draw(st.sampled_from(["full", "full", "auto", 1, 5, 16, 100])),
        lane=draw(st.sampled_from([None, Delayed, Eager])),
        by=draw(st.sampled_from(["install", "plan.json", "plan.yaml"])),
        host_budget=draw(st.sampled_from([None, None, 2048, 2**20])),
        adapters_first=draw(st.booleans()),
    )


def check_case(case):
    """What is promised of every plan."""
    CASES["plans"] += 1
    plain = case.adapted(case.model())
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        expected = case.step(plain)
    plain_said = {str(warning.message) for warning in recorded}
    if expected is None:
        event("nothing needs a gradient")
    else:
        assume(all(bool(value.isfinite().all()) for value in expected.values() if value is not None))
    with lanes_of(case.lane), Said() as said:
        model = case.model()
        if case.adapters_first:
            model = case.adapted(model)
        plan = case.install(model)
        if not case.adapters_first:
            model = case.adapted(model)
        assert hf_ckpt.describe(model).plan == plan
        got = case.step(model)
        described = hf_ckpt.describe(model)
        assert (got is None) == (expected is None)
        if got is not None:
            check_gradients(case, model, expected, got, described)
            check_counts(case, model, plan, described)
        check_memory(case, model)
        unexpected = said.unexpected(*expected_to_be_said(case, model, described))
    assert not unexpected
    assert not {text for text in said.python() - plain_said if "is_gradient_checkpointing` is deprecated" not in text}
    assert rebuild._running.tape is None
    assert segments._open.run is None
    hf_ckpt.uninstall(model)
    assert flags(model) == []


def check_gradients(case, model, expected, got, described):
    uses_head = case.through != "hidden"
    in_chunks = described.chunked_heads > 0
    assert in_chunks == is_chunked(model, case.head, case.batches()[0]), "the head"
    if in_chunks and uses_head:
        fp32 = case.dtype == "fp32"
        assert_near(expected, got, ROUNDING if fp32 else ROUNDING_16, together=not fp32)
    else:
        assert_equal(expected, got)


def check_counts(case, model, plan, described):
    """Every planned block ran, and those that the gradient comes through were recomputed, once a micro-step."""
    active = plan.active()
    micro = 1 if case.micro == "one" else 2
    needed = case.needed(list(find_blocks(model).modules))
    assert described.forwards == dict.fromkeys(active, micro)
    frozen = set(described.frozen)
    together = {name: set(names) for _, names in plan.segments() for name in names}
    for name, action in active.items():
        times = described.recomputed[name]
        if name in frozen:  # a segment begins above
            assert times == 0, f"{name} is frozen, but was recomputed"
        elif together.get(name, {name}) & needed - frozen:
            assert times > 0, f"{name} was not recomputed"
            assert times == micro or action.kind == "selective", name
    last = {pairs[-1][0].name for pairs in plan.stacks().values()}
    moving = {name for name, action in active.items() if action.kind == "offload" or action.moved} - last
    assert described.moved.keys() <= moving
    if case.lane and (case.by == "install" or case.host_budget is None):
        sure = {name for name in moving if active[name].kind == "offload"} - frozen
        if micro == 1:  # the first forward of unknown code shows whether it works in place on what would be moved
            sure &= blocks_of_known_code(find_blocks(model))
        assert sure <= described.moved.keys()
    if case.lane is None:
        assert not described.moved


def check_memory(case, model):
    """A step leaves nothing, nor does a forward alone; with the garbage collector off."""
    model.zero_grad(set_to_none=True)
    batches = case.batches()
    gc.collect()
    gc.disable()
    try:
        with DeviceBytes(model, *batches) as live:
            case.step(model)
            model.zero_grad(set_to_none=True)
            after = live.current_bytes - live.start_bytes
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "autocast"):
                loss = case.loss(model, batches[0])
            held = live.current_bytes - live.start_bytes
            del loss
            assert after <= CACHED_BYTES
            left = live.current_bytes - live.start_bytes
            assert left <= CACHED_BYTES
            assert held > left
    finally:
        gc.enable()
    for region in installation(model).regions.values():
        mover = getattr(region, "mover", None)
        assert mover is None or mover._in_use == 0


@pytest.mark.parametrize("how", ["no room", "too small"])
def test_what_finds_no_room_in_host_memory_is_freed(how):
    """After a forward without a backward, as of an evaluation with gradients on, or one that ran out of memory."""
    model = tiny_model("llama", layers=2)
    batch = without_cache(model, tiny_batch("llama"))
    with mock.patch.object(offload, "lane_of", side_effect=lambda device: Eager()):
        with mock.patch.object(offload, "LEAST_BYTES", 0 if how == "no room" else offload.LEAST_BYTES):
            limit = {"host_budget": 2048} if how == "no room" else {}
            hf_ckpt.install(model, {"policy": "selective", "offload": "saved", **limit})
            enable(model)
            train(model, batch)
        gc.collect()
        with DeviceBytes(model, batch) as live:
            for _ in range(3):
                model(**batch)
            gc.collect()
            left = live.current_bytes - live.start_bytes
    assert left <= CACHED_BYTES


@pytest.mark.parametrize("kind", ["masked_lm", "opt"])
def test_verify_of_a_head_in_chunks_where_gradients_are_zero_in_theory(kind):
    """The bias of an attention's keys moves all scores of a query alike, so its gradient is 0 but for rounding."""
    model = OTHERS[kind](2, 0.0, "eager", torch.float32)
    result = hf_ckpt.verify(model, tiny_batch("llama"), {"policy": "none", "head": 5})
    assert result, result


def expected_to_be_said(case, model, described):
    kinds = {action.kind for _, action in described.plan.actions}
    yield from [GENERIC_SAID] if case.kind == "opt" else []
    moving = any(action.kind == "offload" or action.moved for _, action in described.plan.actions)
    yield from [NO_LANE_SAID] if moving and case.lane is None else []
    yield from [LIMIT_SAID] if moving and case.by != "install" and case.host_budget else []
    yield from [PLAIN_HEAD_SAID] if case.head != "full" and vocabulary_head(base_model(model)) is None else []
    yield from [NOTHING_SAID] if "selective" in kinds and case.tuning in ("prefix", "suffix") else []


@examples(50, 0.33)
@given(cases())
def test_any_plan_on_any_model(case):
    check_case(case)


# --- sequences of operations ----------------------------------------------------------------------------------------

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
    """Two models that go through the same, but for hf_ckpt, which only one of them meets."""

    @initialize(
        family=st.sampled_from(FAMILIES),
        dropout=st.sampled_from([0.0, 0.1]),
        lane=st.sampled_from([None, Delayed, Eager]),
        theirs=st.sampled_from([False, False, True]),
    )
    def begin(self, family, dropout, lane, theirs):
        CASES["sequences"] += 1
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
        config = LoraConfig(
            r=4,
            target_modules=TARGETS[self.family],
            lora_dropout=0.1,
            init_lora_weights=False,
            fan_in_fan_out=self.family == "gpt2",
        )

        def work(model):
            training = model.training
            torch.manual_seed(1)
            if adapter == "hub":
                model.add_adapter(copy.deepcopy(config))
            else:
                model = get_peft_model(model, copy.deepcopy(config))
            return model.train(training)

        self.both(lambda model: model.zero_grad(set_to_none=True))
        self.plain, self.ours = self.both(work)
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
        assert rebuild._running.tape is None
        assert segments._open.run is None
        if hasattr(self, "undo"):
            assert not self.said.unexpected(EVAL_SAID, *([] if self.lane else [NO_LANE_SAID]))


class TestSequences(Sequences.TestCase):
    settings = settings(examples(16, 0.15), stateful_step_count=25)
