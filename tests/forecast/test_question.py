"""`Question`: its options, its command, its checks, and the page's fields."""

from __future__ import annotations

import shlex

import pytest
from helpers.processes import python

from hf_ckpt.cli import app, main
from hf_ckpt.cli.arguments import asked_of
from hf_ckpt.errors import HfCkptError
from hf_ckpt.prediction.question import FIELDS, Question, Workload, command_of, option_of, question

OTHER = {
    "batch": 3,
    "tokens": 9,
    "target_tokens": 7,
    "accumulation": 2,
    "padded": True,
    "packing": True,
    "ranks": 2,
    "lora": 8,
    "lora_targets": ("q", "v"),
    "lora_dropout": 0.05,
    "double_quant": False,
    "kbit_preparation": False,
    "load_in_4bit": True,
    "load_in_8bit": True,
    "dtype": "float32",
    "autocast": "none",
    "optimizer": "lion",
    "attention": "eager",
    "trainer": "dpo",
    "reference": "model",
    "parallel": "fsdp2",
    "architecture": "AClass",
    "device": "t4",
    "budget": "5MiB",
    "host_budget": "8GiB",
    "head": 64,
    "mlp": "auto",
    "frontier": True,
    "max_batch": True,
    "max_tokens": True,
}
"""A non-default value for each field."""
BESIDE = {"load_in_4bit": {"lora": 8}, "load_in_8bit": {"lora": 8}, "reference": {"trainer": "dpo"}}
OPTIONS = """
--accum --architecture --attention --autocast --batch --budget --config --device --dtype --frontier --head
--help --host-budget --html --json --load-in-4bit --load-in-8bit --lora --lora-dropout --lora-targets --max-batch
--max-seq --mlp --no-double-quant --no-kbit-preparation --optimizer --out --packing --padded --parallel
--ranks --reference --seq --target-seq --trainer -h
"""


def parsed(words):
    return question(asked_of(main._parser().parse_args(shlex.split(words)[1:])))


def test_the_options_of_plan_grow_by_decision_only():
    plan = main._parser()._subparsers._group_actions[0].choices["plan"]
    assert sorted(plan._option_string_actions) == OPTIONS.split()
    assert {option_of(field) for field in list(FIELDS.values())[1:]} < {*OPTIONS.split()}


@pytest.mark.parametrize("name", [None, *OTHER])
def test_the_command_to_copy_asks_the_same(name):
    assert FIELDS.keys() == {"model", *OTHER}
    changed = {} if name is None else {name: OTHER[name], **BESIDE.get(name, {})}
    asked = Question("a model", **changed)
    assert parsed(command_of(asked)) == asked
    assert question({"model": "a model", **changed}) == asked


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(
            ({name: value}, f"^{name} must be at least 1, but is {value} instead")
            for name in ("batch", "tokens", "accumulation", "target_tokens", "lora", "ranks")
            for value in (0, -1)
        ),
        ({"dtype": "torch.bfloat16"}, "^dtype must be one of float32, bfloat16, float16, but is 'torch.bfloat16' inst"),
        ({"autocast": "float64"}, "^autocast must be one of float32, bfloat16, float16, none, but is"),
        ({"lora_dropout": 7}, "lora_dropout must be between 0 and 1"),
        ({"trainer": "ppo"}, "trainer must be one of sft, dpo, grpo"),
        ({"optimizer": "magic"}, "optimizer must be one of adamw, "),
        ({"load_in_4bit": True}, "stays frozen"),
        ({"load_in_4bit": True, "load_in_8bit": True, "lora": 4}, "cannot both"),
        ({"load_in_4bit": True, "lora": 4, "ranks": 2, "parallel": "fsdp2"}, "under fsdp2"),
        ({"reference": "model"}, "goes with the trainer dpo"),
        ({"trainer": "dpo", "reference": "adapters-off"}, "needs adapters"),
        ({"batch": 2**24}, "4294967296 tokens at most"),
        ({"device": "abacus"}, "is not a known device"),
        ({"budget": "lots"}, "a size must look like"),
        ({"budget": 1.5}, "a share must be above 0 and at most 1"),
        ({"head": -1}, "must be a whole number of at least 1"),
        ({"tokns": 3}, "'tokns' cannot be asked; did you mean 'tokens'"),
        ({"model": ""}, "a model is needed"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused(fields, told):
    with pytest.raises(HfCkptError, match=told):
        question({"model": "gpt2", **fields})


def test_what_is_usual_is_taken():
    assert Workload("gpt2").autocast_name is None
    assert Workload("gpt2", trainer="sft").autocast_name == "bfloat16"
    assert Workload("gpt2", lora=4, load_in_8bit=True).autocast_name == "bfloat16"
    assert Workload("gpt2", trainer="sft", autocast="none").autocast_name is None
    assert Workload("gpt2", trainer="dpo").reference_name == "model"
    assert Workload("gpt2", trainer="dpo", lora=4).reference_name == "adapters-off"
    assert (Workload("gpt2", 3, trainer="dpo").rows, Workload("gpt2", 3).rows) == (6, 3)


# --- the page -------------------------------------------------------------------------------------------------------

FIRST = {"model": "mini-gpt2", "batch": 8, "tokens": 512, "device": "t4", "dtype": "bfloat16", "head": "full"}


def asked_on_page(paths=True, **changes):
    """The question of the page with these values; other fields have their initial values."""
    empty = {name: FIELDS[name].default for name in app.ASKED} | FIRST
    assert changes.keys() <= empty.keys()
    return app.question_of(*({**empty, **changes}).values(), paths=paths)


def test_the_fields_of_the_page_ask_a_question():
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks():
        fields = app._fields(gradio, "mini-gpt2")
    assert app.question_of(*(field.value for field in fields)) == Question("mini-gpt2", 16, 1024, device="4080")


def test_fields_that_are_left_empty_have_their_defaults():
    plain = Question("mini-gpt2", 8, 512, device="t4")
    assert asked_on_page() == asked_on_page(lora=0, budget="  ", trainer="", lora_dropout=None) == plain
    assert asked_on_page(device="").device is None
    given = {"lora": 8.0, "load_in_4bit": True, "ranks": 4.0, "head": "auto", "budget": " 20GiB ", "trainer": "dpo"}
    expected = {**given, "lora": 8, "ranks": 4, "budget": "20GiB"}
    assert asked_on_page(**given) == Question("mini-gpt2", 8, 512, device="t4", **expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": None}, "batch must be at least 1, but is 0 instead"),
        ({"tokens": -3}, "tokens must be at least 1, but is -3 instead"),
        ({"lora": -1}, "lora must be at least 1, but is -1 instead"),
        ({"load_in_4bit": True}, "a base in 4 bits stays frozen"),
        ({"model": "no such model"}, "cannot read a model's config from 'no such model'"),
        ({"model": " "}, "a model is needed"),
        ({"model": None}, "a model is needed"),
        ({"model": __file__, "paths": False}, "files of this machine are not read"),
        ({"model": "../secret", "paths": False}, "files of this machine are not read"),
    ],
)
def test_wrong_fields_are_refused_in_the_words_of_the_command_line(changes, message):
    with pytest.raises(HfCkptError, match=message):
        asked_on_page(**changes)


def test_a_question_needs_no_torch(tmp_path):
    code = "import sys, hf_ckpt.cli.app, hf_ckpt.cli.plan; print({'torch', 'transformers'} & set(sys.modules))"
    assert python("-c", code, cwd=tmp_path).stdout.strip() == "set()"
