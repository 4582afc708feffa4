"""The options of `hf-ckpt plan`, what is refused, and the names of devices."""

import dataclasses
import re
import shlex

import pytest
from helpers.experts import ONE_BY_ONE, experts
from helpers.planned import model_of
from helpers.tables import table

import hf_ckpt
from hf_ckpt.cli.arguments import options_of
from hf_ckpt.cli.main import make_parser
from hf_ckpt.compat import devices
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES, device_named, this_device
from hf_ckpt.forecast.question import Question, command_of, question
from hf_ckpt.measure import memory
from hf_ckpt.units import GIB

OPTIONS = table(__file__, "options.yaml")
FILES = {"--against", "--config", "--html", "--json", "--out", "--help"}


def asked(words):
    """The question of a command."""
    return question(options_of(make_parser().parse_args(words)))


def test_the_options_of_plan_grow_by_decision_only(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args(["plan", "--help"])
    shown = re.findall(r"^  (?:-h, )?(--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert set(shown) - FILES == {words.split()[0] for words in OPTIONS}


@pytest.mark.parametrize("options", ["", *OPTIONS])
def test_the_command_to_copy_asks_the_same(options):
    found = asked(["plan", "a model", *options.split()])
    changed = [name for name, value in vars(Question("a model")).items() if getattr(found, name) != value]
    assert len(changed) == options.count("--")
    assert asked(shlex.split(command_of(found))[1:]) == found


def test_options_of_yes_and_no_have_opposites_that_win_over_a_file():
    opposites = ["--no-packing", "--no-double-quant", "--kbit-preparation"]
    found = asked(["plan", "a model", "--packing", "--double-quant", "--no-kbit-preparation", *opposites])
    assert found == Question("a model")
    numbers = Question("a model", batch="4", tokens="8k", lora="16", lora_targets=["q_proj", "v_proj"], budget="20GiB")
    assert (numbers.batch, numbers.tokens, numbers.lora) == (4, 8192, 16)
    assert (numbers.lora_targets, numbers.budget) == (("q_proj", "v_proj"), 20 * GIB)
    small = question({"model": "a model", "budget": "627496B"})
    assert dataclasses.replace(small, batch=2).budget == 627496
    with pytest.raises(HfCkptError, match="needs a unit"):
        question({"model": "a model", "budget": 627496})
    for name in ("batch", "budget", "head", "lora_dropout", "dtype"):
        with pytest.raises(HfCkptError, match=r"16610 bits|too large to convert to float"):
            question({"model": "a model", name: 10**5000})


def test_options_that_change_nothing_are_named():
    fields = {"lora_targets": "q_proj", "double_quant": True, "kbit_preparation": False}
    named = " ".join(Question("a model", **fields).without_effect())
    assert re.findall(r"(\S+) has no effect", named) == ["--lora-targets", "--double-quant", "--no-kbit-preparation"]
    assert not list(Question("a model", lora=4, load_in_4bit=True, **fields).without_effect())


LIVE = ({"model": model_of(), "lora": 4}, "a model that is passed determines lora: leave them out")


@pytest.mark.parametrize(
    ("fields", "reason"), [*table(__file__, "refused.yaml"), LIVE], ids=lambda value: str(value)[:40]
)
def test_what_cannot_be_asked_or_answered_is_refused(fields, reason):
    with pytest.raises(HfCkptError, match=reason):
        hf_ckpt.predict(**{"model": "gpt2", "device": "a10", **fields})


NAMES = table(__file__, "devices.yaml")
TITLES = [(name, device.title.partition(",")[0]) for name, device in DEVICES.items() if name != "cpu"]


@pytest.mark.parametrize(("name", "reported"), [*NAMES["reported"], *TITLES])
def test_devices_are_known_by_the_names_that_they_report(name, reported, monkeypatch):
    monkeypatch.setattr(devices, "device_name", lambda devices: reported)
    total = memory.device_memory(0).total_bytes
    assert this_device() == dataclasses.replace(DEVICES[name], memory_bytes=total)


@pytest.mark.parametrize(("row", "name"), NAMES["written"])
def test_devices_are_understood_as_people_write_them(row, name):
    assert device_named(name) is DEVICES[row]
    assert all(device_named(device.title) is device for device in DEVICES.values())
    with pytest.raises(HfCkptError, match="'b300' is not a known device: use b200"):
        device_named("b300")


@pytest.mark.skipif(ONE_BY_ONE is None, reason="transformers 4 has no other way to call experts")
def test_experts_that_are_called_one_by_one_are_refused_by_name():
    with pytest.raises(HfCkptError, match=r'one by one need experts_implementation="grouped_mm" or "batched_mm"'):
        hf_ckpt.predict(experts("mixtral", ONE_BY_ONE), 2, tokens=16, budget="1GiB", device="cpu")
