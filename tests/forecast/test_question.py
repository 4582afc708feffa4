"""The options of `hf-ckpt plan`, what is refused, and the names of devices."""

import dataclasses
import shlex

import pytest
from helpers.planned import model_of

import hf_ckpt
from hf_ckpt.cli import main
from hf_ckpt.cli.arguments import asked_of
from hf_ckpt.compat import devices
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES, device_named, this_device
from hf_ckpt.forecast.question import Question, command_of, question
from hf_ckpt.measure import memory

TEXT = """--accum 2; --architecture AClass; --attention eager; --autocast none; --batch 3; --budget 5MiB; --device t4;
--dtype float32; --global-batch 6; --head 64; --host-budget 8GiB; --image-size 224; --images 2;
--load-in-4bit --lora 8; --lora 8;
--lora-dropout 0.05; --lora-targets q,v; --no-double-quant; --no-kbit-preparation; --optimizer lion;
--mlp 64; --packing; --padded; --parallel fsdp2 --ranks 2; --ranks 2; --seq 9; --target-seq 7; --trainer dpo"""
OPTIONS = TEXT.replace("\n", " ").split("; ")
"""Every option, with a value that is not its default, and with options that it needs."""
FILES = {"--config", "--json", "--out", "--help", "-h"}


def asked(words):
    """The question of a command."""
    return question(asked_of(main._parser().parse_args(words)))


def test_the_options_of_plan_grow_by_decision_only():
    plan = main._parser()._subparsers._group_actions[0].choices["plan"]
    assert plan._option_string_actions.keys() - FILES == {words.split()[0] for words in OPTIONS}


@pytest.mark.parametrize("options", ["", *OPTIONS])
def test_the_command_to_copy_asks_the_same(options):
    found = asked(["plan", "a model", *options.split()])
    changed = [name for name, value in vars(Question("a model")).items() if getattr(found, name) != value]
    assert len(changed) == options.count("--")
    assert asked(shlex.split(command_of(found))[1:]) == found


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        *(
            ({name: value}, f"^{name} must be at least 1, but is {value} instead")
            for name, value in (("batch", 0), ("tokens", -1), ("target_tokens", 0), ("lora", -1), ("ranks", 0))
        ),
        ({"dtype": "torch.bfloat16"}, "^dtype must be one of float32, bfloat16, float16, but is 'torch.bfloat16' inst"),
        ({"trainer": "ppo"}, "trainer must be one of sft, dpo, grpo"),
        ({"optimizer": "magic"}, "optimizer must be one of adamw, "),
        ({"load_in_4bit": True}, "stays frozen"),
        ({"load_in_4bit": True, "lora": 4, "ranks": 2, "parallel": "fsdp2"}, "under fsdp2"),
        ({"tokns": 3}, "'tokns' cannot be asked: use model, batch, tokens, "),
        ({"parallel": "fsdp2"}, "parallel fsdp2 shares work between ranks: give their number"),
        ({"parallel": "fsdp2", "ranks": 2, "head": "auto"}, "the head in chunks needs whole weights"),
        ({"model": "lama-3.1-8b"}, r"config from 'lama-3.1-8b'.*\nUse a folder, .* hub id or llama-3.1-8b"),
        ({"global_batch": 8, "batch": 2}, "^global_batch chooses batch and accumulation: leave these out"),
        ({"global_batch": 9, "ranks": 2}, r"^global_batch must be a multiple of ranks \(2\), but is 9"),
        ({"batch": 2**20, "tokens": 2**10 + 1}, r"^a micro-step of 1,074,790,400 tokens is too large"),
        ({"tokens": 1025}, "gpt2 has positions for 1024 tokens, but 1025 are asked for"),
        ({"architecture": "BertTokenizer"}, "no model class 'BertTokenizer'"),
        ({"lora": 4, "lora_targets": ("q_proj",)}, "PEFT puts no adapters on"),
        ({"lora": 4, "lora_dropout": 7}, "PEFT puts no adapters on .*: dropout probability has to be between 0 and 1"),
        ({"model": model_of(lora=True), "lora": 4}, "a live model has its own lora:"),
        ({"model": model_of(), "dtype": "bfloat16", "attention": "eager"}, "a live model has its own attention, dtype"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_or_answered_is_refused(fields, told):
    with pytest.raises(HfCkptError, match=told):
        hf_ckpt.predict(**{"model": "gpt2", "device": "a10", **fields})


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("a100-40", "NVIDIA A100-PCIE-40GB"),
        ("v100-32", "Tesla V100-SXM2-32GB"),
        ("6000-ada", "NVIDIA RTX 6000 Ada Generation"),
        ("5060-ti-16", "NVIDIA GeForce RTX 5060 Ti"),
        ("4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("a100-80", "NVIDIA A1000 Laptop GPU"),  # unknown
        *((name, device.title.partition(",")[0]) for name, device in DEVICES.items() if name != "cpu"),
    ],
)
def test_devices_are_known_by_the_names_that_they_report(name, reported, monkeypatch):
    monkeypatch.setattr(devices, "device_name", lambda devices: reported)
    total = memory.device_memory(0).total_bytes
    assert this_device() == dataclasses.replace(DEVICES[name], memory_bytes=total)


@pytest.mark.parametrize(
    ("name", "row"),
    [("RTX 4090", "4090"), ("NVIDIA GeForce RTX 4090", "4090"), ("A100_80gb", "a100-80"), ("2080ti", "2080-ti")],
)
def test_devices_are_understood_as_people_write_them(name, row):
    assert device_named(name) is DEVICES[row]
    with pytest.raises(HfCkptError, match="'b300' is not a known device: use b200"):
        device_named("b300")
