"""`Question`: its options, its command, its checks, and the page's fields."""

from __future__ import annotations

import shlex

import pytest
from helpers.processes import python

from hf_ckpt.cli import app, main
from hf_ckpt.cli.arguments import asked_of
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.question import FIELDS, Question, Workload, command_of, option_of, question

OTHER = {
    "batch": 3,
    "tokens": 9,
    "target_tokens": 7,
    "accumulation": 2,
    "padded": True,
    "images": 2,
    "image_size": 224,
    "seconds": 4.0,
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
--accum --architecture --attention --autocast --batch --budget --config --device --dtype --frontier --head --help
--host-budget --html --image-size --images --json --load-in-4bit --load-in-8bit --lora --lora-dropout --lora-targets
--max-batch --max-seq --mlp --no-double-quant --no-kbit-preparation --optimizer --out --packing --padded --parallel
--ranks --reference --seconds --seq --target-seq --trainer -h
"""


def test_the_options_of_plan_grow_by_decision_only():
    plan = main._parser()._subparsers._group_actions[0].choices["plan"]
    assert sorted(plan._option_string_actions) == OPTIONS.split()
    assert {option_of(field) for field in list(FIELDS.values())[1:]} < {*OPTIONS.split()}


@pytest.mark.parametrize("name", [None, *OTHER])
def test_the_command_to_copy_asks_the_same(name):
    assert FIELDS.keys() == {"model", *OTHER}
    changed = {} if name is None else {name: OTHER[name], **BESIDE.get(name, {})}
    asked = Question("a model", **changed)
    words = main._parser().parse_args(shlex.split(command_of(asked))[1:])
    assert question(asked_of(words)) == asked == question({"model": "a model", **changed})


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(
            ({name: value}, f"^{name} must be at least 1, but is {value} instead")
            for name, value in (("batch", 0), ("tokens", -1), ("target_tokens", 0), ("lora", -1), ("ranks", 0))
        ),
        ({"dtype": "torch.bfloat16"}, "^dtype must be one of float32, bfloat16, float16, but is 'torch.bfloat16' inst"),
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
        ({"head": -1}, "must be a whole number of at least 1"),
        ({"tokns": 3}, "'tokns' cannot be asked; did you mean 'tokens'"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_refused(fields, told):
    with pytest.raises(HfCkptError, match=told):
        question({"model": "gpt2", **fields})


@pytest.mark.parametrize(
    ("fields", "autocast", "reference", "rows"),
    [
        ({}, None, None, 3),
        ({"trainer": "sft"}, "bfloat16", None, 3),
        ({"lora": 4, "load_in_8bit": True}, "bfloat16", None, 3),
        ({"trainer": "dpo", "autocast": "none"}, None, "model", 6),
        ({"trainer": "dpo", "lora": 4}, "bfloat16", "adapters-off", 6),
    ],
)
def test_what_is_usual_is_taken(fields, autocast, reference, rows):
    workload = Workload("gpt2", 3, **fields)
    assert (workload.autocast_name, workload.reference_name, workload.rows) == (autocast, reference, rows)


# --- the page ---------------------------------------------------------------------------------------------------------


def asked_on_page(paths=True, **changes):
    """The question of the page with these values; other fields are empty."""
    return app.question_of(*({**dict.fromkeys(app.ASKED, ""), "model": "mini-gpt2", **changes}).values(), paths=paths)


def test_fields_of_the_page_that_are_left_empty_have_their_defaults():
    plain = Question("mini-gpt2", frontier=True)
    assert asked_on_page() == asked_on_page(lora=None, budget="  ", packing=False, device="") == plain
    typed = asked_on_page(lora="8", load_in_4bit=True, budget=" 20GiB ", trainer="dpo")
    assert typed == Question("mini-gpt2", lora=8, load_in_4bit=True, budget="20GiB", trainer="dpo", frontier=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": "0"}, "Batch: must be a whole number of at least 1"),
        ({"load_in_4bit": True}, "a base in 4 bits stays frozen"),
        ({"model": "no such model"}, "cannot read a model's config from 'no such model'"),
        ({"model": " "}, "a model is needed"),
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
