"""What `hf-ckpt plan` and `hf_ckpt.predict` answer: whether it fits, what was assumed, what to write, what fits."""

import itertools
import json
import re
import runpy
from pathlib import Path

import peft
import pytest
import transformers
import yaml
from helpers.planned import model_of
from helpers.quantised import scales_of
from helpers.sparing import sparing
from helpers.tables import table

import hf_ckpt
from hf_ckpt.cli.arguments import options_of
from hf_ckpt.cli.main import main, make_parser
from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, InfeasibleError
from hf_ckpt.forecast import changes
from hf_ckpt.forecast import estimator as estimator_module
from hf_ckpt.forecast.devices import device_named
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.model import load_config, nbytes, shallow_model
from hf_ckpt.forecast.notes import left_of, on_allocator
from hf_ckpt.forecast.printing import Printer
from hf_ckpt.forecast.question import PRESETS, Question, question
from hf_ckpt.forecast.result import ForecastRow
from hf_ckpt.forecast.sizes import largest_within
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec.actions import FULL
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import DEFAULT_SHARE, GIB, RESERVED, format_bytes, parse_bytes

ROOT = Path(__file__).resolve().parents[2]
TABLES = table(__file__, "answers.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config of a LLaMA of two blocks, and training files about it."""
    path = tmp_path_factory.mktemp("asked")
    tiny_model("llama", layers=2).config.to_json_file(path / "config.json", use_diff=False)
    for name, values in TABLES["files"].items():
        (path / name).write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def plan(folder, monkeypatch, capsys):
    """A function (options of `hf-ckpt plan`, exit code) -> the answer, which adds up."""
    monkeypatch.chdir(folder)

    def run(options, code=0):
        assert main(["plan", *options.split(), "--json"]) == code
        found = json.loads(capsys.readouterr().out)
        own, *others = found["rows"]
        assert sum(found["parts"].values()) == found["peak_bytes"] == found["plan"]["prediction"]["peak_bytes"]
        assert min(found["parts"].values()) >= 0
        assert found["floor_bytes"] <= found["peak_bytes"] <= found["budget_bytes"]
        assert [own[name] for name in ("peak_bytes", "step_seconds")] == [found["peak_bytes"], found["step_seconds"]]
        label = ", head as a whole" if "head" in found["plan"] else ""
        assert {f"none{label}", f"full{label}"} <= {row["name"] for row in others}
        faster = [row for row in others if row["options"].startswith(("--head", "--host-budget"))]
        assert all(row["step_seconds"] < own["step_seconds"] for row in faster)
        peaks = [row["peak_bytes"] for row in found["frontier"]]
        assert peaks == sorted(peaks)
        return found

    return run


@pytest.mark.parametrize("row", TABLES["rows"], ids=lambda row: row["options"])
def test_a_question_has_its_answer(row, plan):
    options = row["options"]
    fits = "90GiB" not in options
    found = plan(options, 0 if fits else 2)
    peak = f"{found['peak_bytes'] / GIB:.{1 if found['peak_bytes'] >= GIB else 3}f}"
    assert found["answer"].startswith(f"Fits: {peak} of " if fits else f"Does not fit: the plan needs {peak} GiB. ")
    ways = [*found["rows"], *found["frontier"]]
    limit = found["budget_bytes"] if fits else 14.6 * GIB
    assert all(way["fits"] == (way["peak_bytes"] <= limit) for way in ways)
    assert ("The budget is 90.0 GiB, and a T4 has 14.6." in found["answer"]) == (not fits)
    assert (f" {found['tokens_per_second']:,.0f} tokens per second" in found["answer"]) == fits
    assert row["assumed"] in found["assumed"]
    written, *lines = found["write"].values()
    assert yaml.safe_load(written) == row["arguments"]
    code = "" if "--config" in options else "from_pretrained"
    assert re.findall(r"\w+(?=\()|(?<=-m )\w+", "".join(lines)) == row.get("code", code).split()
    kwargs = yaml.safe_load(written).get("gradient_checkpointing_kwargs", {"policy": "none"})
    assert "--config" in options or Spec.parse(kwargs) == Spec.parse(found["rows"][0]["spec"])


def changed(options, others):
    """Options with these others in place of the same."""
    parts = re.findall(r"(--[\w-]+)( [^-]\S*)?", f"{options} {others}")
    return " ".join([options.split()[0], *(name + value for name, value in dict(parts).items())])


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (". --batch 4 --seq 128 --packing --lora 8 --optimizer adafactor --device 4090 --budget 3MiB", "--host-budget"),
        (". --batch 4 --seq 128 --device a10 --budget 1150KiB", "--batch"),
    ],
)
def test_options_in_the_table_give_the_plan_of_their_row(options, part, plan, capsys):
    forecaster = Forecaster(question(options_of(make_parser().parse_args(["plan", *options.split()]))))
    printer = Printer(make_console())
    measured = []

    def add(row):
        measured.append(len(forecaster.estimator.measured))
        printer.add(row)

    def show(first):
        measured.append(len(forecaster.estimator.measured))
        printer.show(first)
        assert first.verdict in capsys.readouterr().out  # the first line is there before a change is measured
        printer.show(first)

    forecast = forecaster.answer(show, add)
    printer.end(forecast)
    assert measured[0] == 1
    assert measured[1] < len(forecaster.estimator.measured)  # a row is there before the next one is measured
    printed = capsys.readouterr().out
    assert len(re.findall(r" (?:yes|no)  ", printed)) == len(forecast.rows)
    assert ("  the allocator takes " in printed) == forecast.fits
    headings = ["Does not fit: every plan needs ", "to lower it: ", "lowest peak: ", "what fits into "]
    headings = ["Fits: ", "ways to train it", "plan with host memory"] if forecast.fits else headings
    assert [printed.index(heading) for heading in headings] == sorted(printed.index(heading) for heading in headings)
    row = next(row for row in forecast.rows if part in row.options)
    again = plan(changed(options, row.options))["rows"][0]
    assert (again["peak_bytes"], again["step_seconds"]) == (row.peak_bytes, row.step_seconds)
    if part == "--batch":  # the largest divisor that fits
        assert row.options == "--batch 1 --accum 4"
        with pytest.raises(InfeasibleError):
            hf_ckpt.predict(".", 2, accumulation=2, tokens=128, device="a10", budget="1150KiB")


@pytest.mark.long
@pytest.mark.parametrize("device", ["--device t4", "--ranks 2 --parallel fsdp2 --device a10"])
def test_each_row_is_the_answer_to_its_own_options(device):
    """Also where the device, or FSDP2, changes the types of the question."""
    options = f"mini-llama --seq 64 --budget 160MiB {device}"
    ask = make_parser().parse_args
    forecast = Forecaster(question(options_of(ask(["plan", *options.split()])))).answer()
    rows = [row for row in forecast.rows if row.options]
    assert any("--lora" in row.options for row in rows)
    for row in rows:
        again = Forecaster(question(options_of(ask(["plan", *changed(options, row.options).split()])))).answer()
        assert (again.peak_bytes, again.step_seconds) == (row.peak_bytes, row.step_seconds), row.options


@pytest.mark.parametrize(
    "peak_of", [lambda n: 7 * n + 3, lambda n: n * n, lambda n: 40 * (n // 16 + 1) + n, lambda n: n]
)
@pytest.mark.parametrize("limit", [0, 1, 44, 45, 1000, 99_999])
def test_the_largest_number_within_a_limit_and_the_next_one_are_tried(peak_of, limit):
    tried = []

    def recorded(number):
        tried.append(number)
        return peak_of(number) if number <= 60_000 else 2**62

    peaks = largest_within(recorded, limit)
    largest = next(number for number in itertools.count() if recorded(number + 1) > limit)
    assert largest in {0, *peaks}
    assert largest + 1 in peaks
    assert len(peaks) <= 24


@pytest.mark.long
def test_the_largest_batch_and_the_longest_sequences_are_planned_for(plan):
    """A question with the number that was found has the same answer, and the next one does not fit."""
    for asked, rest, found, following in (
        ("--max-batch --seq 128", "--seq 128", "--batch 18 ", "--batch 19"),
        ("--max-seq --batch 2", "--batch 2", "--seq 1152 ", "--seq 1280"),
    ):
        options = ". --device a10 --budget 10MiB"
        answer = plan(f"{options} {asked}")
        assert f" {found}" in answer["assumed"]
        assert " are the most that fit, and can leave " in answer["notes"][0]
        same = plan(f"{options} {rest} {found}")
        assert (same["rows"][0], same["plan"]) == (answer["rows"][0], answer["plan"])
        words = ["plan", *f"{options} {rest} {following}".split()]
        forecaster = Forecaster(question(options_of(make_parser().parse_args(words))))
        with pytest.raises(InfeasibleError):
            forecaster.answer(nearest=False)


def test_the_code_to_copy_makes_the_model_that_was_planned_for(tmp_path):
    """Its weights take the bytes that the answer says: types, 4 bits, and adapters."""
    tiny_model("llama", layers=2).save_pretrained(tmp_path)
    of_transformers = ("LlamaForCausalLM", "BitsAndBytesConfig")
    names = {name: getattr(transformers, name) for name in of_transformers} | {**vars(peft), "NAME": tmp_path}
    for fields in ({"dtype": "bfloat16"}, {"lora": 4, "load_in_4bit": True}, {"lora": 4, "load_in_8bit": True}):
        found = hf_ckpt.predict(str(tmp_path), device="a10", budget="20GiB", **fields)
        exec(found.write["With the model (Python)"], names)
        model = names["model"]
        scales = sum({id(tensor): tensor.nbytes for tensor in scales_of(model)}.values())
        assert sum(parameter.nbytes for parameter in model.parameters()) + scales == found.parts["weights"]


@pytest.mark.long
def test_two_trainings_are_compared_part_by_part(folder, monkeypatch, capsys):
    """A training file or options against a question: parts add up, and single changes are answers of their own."""
    monkeypatch.chdir(folder)
    words = ["plan", *[".", "--batch", "2", "--seq", "128", "--lora", "8", "--device", "a10", "--json", "--against"]]

    def compared(other):
        assert main([*words, other]) == 0
        return json.loads(capsys.readouterr().out)

    found = compared("--batch 4 --dtype float32")
    *parts, (_, *peaks) = found["parts"]
    assert [sum(row[side] for row in parts) for side in (1, 2)] == peaks == found["peaks"]
    assert [name for name, _ in found["changes"]] == ["--batch 4", "--dtype float32"]
    assert all(found["peaks"][0] < peak < found["peaks"][1] for _, peak in found["changes"])
    batch = Forecaster(question({"model": ".", "batch": 4, "tokens": 128, "lora": 8, "device": "a10"}))
    assert found["changes"][0][1] == batch.lowest().floor_bytes
    assert compared("--batch 4")["changes"] == []  # one change is the whole difference
    assert "--optimizer adafactor" in dict(compared("axolotl.yaml")["changes"])
    assert main([*words[:-2], "--against", "--batch 4"]) == 0
    assert "what fills the lowest peak" in capsys.readouterr().out


def test_what_the_figures_leave_out_is_said():
    """Options without effect, the KV cache of completions, and what ranks send."""
    asked = {"model": "mini-llama", "batch": 2, "device": "a10"}
    config = load_config("mini-llama")
    asked_of_grpo = {"accumulation": 4, "trainer": "grpo", "generation": 1024, "tokens": 64, "lora_dropout": 0.1}
    notes = hf_ckpt.predict(**asked, **asked_of_grpo).notes
    assert notes[0] == "--lora-dropout has no effect without --lora"
    unused = {"target_tokens": 4096, "image_size": 224, "choices": 2}
    forecast = hf_ckpt.predict(**asked, tokens=64, **unused)
    said = [f"{flag} has no effect on LlamaForCausalLM" for flag in ("--target-seq", "--image-size", "--choices")]
    assert [*forecast.notes[:3]] == said
    assert forecast.tokens_per_second == hf_ckpt.predict(**asked, tokens=64).tokens_per_second
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * heads * size * 1024 * 8 * 2
    assert f"a KV cache of 1024 tokens takes at most {format_bytes(cache)};" in notes[1]
    for way, times in (("ddp", 2), ("fsdp2", 3)):  # gradients twice; weights twice, and gradients
        found = hf_ckpt.predict(**asked, ranks=4, parallel=way, autocast="none", tokens=64)
        weights = shallow_model(Question("mini-llama"))
        said = f"each rank sends about {format_bytes(0.75 * times * nbytes(weights.tensors))} a step"
        assert any(note.startswith(said) for note in found.notes)


@pytest.mark.long
def test_several_changes_are_combined_where_one_does_not_suffice(folder, monkeypatch):
    """Their row is the answer to its own options. If they do not suffice, a note has the nearest, and its gap."""
    monkeypatch.chdir(folder)
    asked = {"model": ".", "batch": 32, "tokens": 512, "device": "a10"}
    forecast = Forecaster(question({**asked, "budget": "1MiB"})).answer()
    (row,) = (row for row in forecast.rows if row.fits and row.name == "several changes")
    assert row.options.startswith("--mlp auto --head auto --lora 16 --load-in-4bit --batch 1 --accum 32")
    options = f"{row.options} --device a10 --budget 1MiB {'' if '--seq' in row.options else '--seq 512'}"
    again = Forecaster(question(options_of(make_parser().parse_args(["plan", ".", *options.split()])))).answer()
    assert again.fits
    assert (again.peak_bytes, again.step_seconds) == (row.peak_bytes, row.step_seconds)
    forecast = Forecaster(question({**asked, "batch": 1, "budget": "90KiB"})).answer()
    assert not forecast.rows
    assert re.search(r"several changes do not suffice: --.* needs .*iB, .*iB too much", "".join(forecast.notes))


@pytest.mark.long
def test_ranks_that_share_weights_are_offered_the_head_in_chunks_without(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shared = {"model": ".", "tokens": 512, "device": "h100", "ranks": 8, "parallel": "fsdp2", "budget": "1MiB"}
    rows = Forecaster(question({**shared, "lora": 8, "batch": 2})).answer().rows
    assert any(row.options.startswith("--mlp auto --head auto --parallel ddp") for row in rows)


@pytest.mark.parametrize("packing", [False, True])
def test_changes_that_cannot_fit_are_not_measured(packing, monkeypatch):
    """What a smaller batch needs at least follows from the larger one, and is less than what it needs."""
    asked = {"model": "mini-llama", "batch": 8, "tokens": 64, "packing": packing, "device": "a10"}
    forecaster = Forecaster(question(asked))
    forecaster.estimator.costs_of(forecaster.training)
    least = forecaster.estimator.least_bytes(question({**asked, "batch": 4, "accumulation": 2}), forecaster.budget)
    assert least <= forecaster.estimator.planner_of(question({**asked, "batch": 4, "accumulation": 2})).lowest_peak
    measure = estimator_module.costs_of_model
    batches = []

    def count(model, inputs):
        batches.append(inputs.training.batch)
        return measure(model, inputs)

    monkeypatch.setattr(estimator_module, "costs_of_model", count)
    forecaster = Forecaster(question(asked))
    forecaster.budget = least - 1
    list(forecaster._changed_rows({"batch", "accumulation"}))
    assert batches[:2] == [8, 2]


def test_changes_that_run_millions_of_tokens_in_parts_are_not_tried(monkeypatch):
    """A step in a thousand chunks takes a thousand times as long as one, also on fake tensors."""
    forecaster = Forecaster(question({"model": "mini-llama", "batch": 4, "tokens": 1024, "device": "a10"}))
    monkeypatch.setattr(forecaster.estimator, "least_bytes", lambda *args: 0)
    tried = []

    def refuse(name, change):
        tried.append(forecaster._changed(change))
        raise HfCkptError

    monkeypatch.setattr(forecaster, "_changed_row", refuse)
    list(forecaster._changed_rows({"head", "mlp"}))
    assert [(training.head, training.mlp) for training in tried] == [("auto", "whole"), ("whole", "auto")]
    monkeypatch.setattr(changes, "MOST_TOKENS", 256)
    tried.clear()
    list(forecaster._changed_rows({"head", "mlp"}))
    forecaster._combined_row()
    assert [training.batch * training.tokens for training in tried] == [128, 64, 64]


def test_a_change_whose_head_alone_does_not_fit_is_measured_in_one_step():
    asked = {"model": "mini-llama", "batch": 8, "tokens": 256, "device": "a10"}
    forecaster = Forecaster(question(asked))
    model = forecaster.estimator.model_of(question({**asked, "lora": 16}))
    least = forecaster.estimator.least_bytes(question({**asked, "lora": 16}), forecaster.budget)
    assert [inputs.actions for inputs in model.measured] == [(FULL,)]
    weights = nbytes(model.tensors)
    assert 1.5 * weights < least <= forecaster.estimator.planner_of(question({**asked, "lora": 16})).lowest_peak
    assert len(model.measured) > 1


def test_ranks_share_all_that_the_optimizer_needs():
    """State, temporary tensors and time, whatever the optimizer."""
    for optimizer, temporary in (("adamw_torch", 1), ("adagrad", 2)):
        asked = {"model": "mini-llama", "optimizer": optimizer, "device": "a10", "autocast": "none"}
        alone, shared = (Forecaster(question({**asked, **more})) for more in ({}, {"ranks": 4, "parallel": "fsdp2"}))
        one, part = (forecaster.estimator.costs_of(forecaster.training) for forecaster in (alone, shared))
        assert one.static.step_bytes == temporary * one.static.gradients
        assert part.static.step_bytes == pytest.approx(one.static.step_bytes / 4, rel=0.01)
        assert part.static.optimizer == pytest.approx(one.static.optimizer / 4, rel=0.01)
        assert part.optimizer_nanoseconds == pytest.approx(one.optimizer_nanoseconds / 4, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "batches", "fits", "chosen"),
    [
        (". --seq 128 --budget 8MiB --ranks 2", [1, 2, 4, 12], 4, 12),  # recomputes: fewer, larger steps are faster
        (". --seq 128 --budget 1800KiB --ranks 2", [1, 2, 4, 12], 2, 2),
        ("--config axolotl.yaml --budget 3MiB", [1, 2, 4, 8, 24], 3, 4),  # its micro-batch of 4 is not asked about
    ],
)
def test_a_step_is_split_into_the_fastest_micro_batches(options, batches, fits, chosen, plan):
    options += " --device h100"
    rows = plan(f"{options} --global-batch 24")["rows"]
    splits = [row for row in rows if row["name"].startswith("micro-batch of ")]
    assert [int(row["options"].split()[1]) for row in splits] == batches
    assert [row["fits"] for row in splits] == [True] * fits + [False] * (len(batches) - fits)
    fastest = min(splits[:fits], key=lambda row: row["step_seconds"])
    same = ("peak_bytes", "step_seconds", "spec")
    assert [rows[0][name] for name in same] == [fastest[name] for name in same]
    assert int(fastest["options"].split()[1]) == chosen
    for row in splits:  # a question of its own has the same answer
        alone = plan(f"{options} {row['options']}", 0) if row["fits"] else None
        assert alone is None or [alone["rows"][0][name] for name in same] == [row[name] for name in same]
        assert alone is not None or row["peak_bytes"] > rows[0]["peak_bytes"]


@pytest.mark.long
def test_a_step_that_is_not_split_may_fit_where_micro_steps_do_not():
    """Under accumulation, all gradients are alive while a micro-step runs."""
    asked = {"model": "mini-llama", "tokens": 64, "device": "h100", "optimizer": "sgd"}
    forecasts = [Forecaster(question({**asked, "batch": batch, "accumulation": 2 // batch})) for batch in (1, 2)]
    halves, whole = (forecast.answer().floor_bytes for forecast in forecasts)
    assert whole < halves
    found = hf_ckpt.predict(**asked, global_batch=2, budget=halves - 1)
    assert yaml.safe_load(found.write["Training arguments (YAML)"])["per_device_train_batch_size"] == 2
    with pytest.raises(InfeasibleError) as raised:
        hf_ckpt.predict(**asked, global_batch=2, budget=whole - 1)
    assert raised.value.floor_bytes == whole


@pytest.mark.long
def test_a_spec_that_is_given_has_a_row(tmp_path):
    """With the figures of its policy, beside those of the best plan; also if it leaves some stacks to the planner."""
    asked = {"model": "mini-llama", "batch": 4, "tokens": 256, "device": "a10", "budget": "320MiB"}

    def given(**spec):
        forecast = hf_ckpt.predict(**asked, spec=spec)
        (row,) = (row for row in forecast.rows if row.name == "your spec")
        assert row.spec == Spec.parse(spec).to_dict()
        return forecast, (row.peak_bytes, row.step_seconds)

    for spec, name in (
        ({"policy": "full"}, "full"),
        ({"policy": "none"}, "none"),
        ({"policy": "budget", "budget": "320MiB"}, "this plan"),
        ({"policy": {"decoder": "full"}}, "full"),
    ):
        forecast, figures = given(**spec)
        assert figures == next((r.peak_bytes, r.step_seconds) for r in forecast.rows if r.name == name), spec
    forecast, whole = given(policy="full")
    plain = forecast.usual[0].peak_bytes, forecast.usual[0].step_seconds
    half, moved, linear = (
        given(**spec)[1]
        for spec in ({"every_n_layers": 2}, {"policy": "offload"}, {"policy": "selective", "save": ["linear"]})
    )
    assert moved[1] > whole[1]
    for figures in (half, linear):
        assert whole[0] < figures[0] < plain[0]
        assert whole[1] > figures[1] > plain[1]
    for spec, said in (({"layers": "9"}, "`layers` names 9"), ({"policy": "ful"}, "did you mean 'full'")):
        with pytest.raises(HfCkptError, match=said):
            given(**spec)
    compiled = hf_ckpt.predict(**asked, spec="compile=blocks")
    assert any("compiles blocks" in note for note in compiled.notes)


def test_the_spec_of_a_file_is_planned(plan, folder):
    """A fixed policy beside the best plan; of a budget, the options that its keys are."""
    values = {"model_name_or_path": ".", "per_device_train_batch_size": 8, "max_length": 128, "output_dir": "out"}
    for spec, options in (
        ({"policy": "full", "every_n_layers": 2, "head": "auto"}, "--head auto"),
        ({"policy": "budget", "budget": "6MiB", "mlp": 64}, "--budget 6MiB --mlp 64"),
    ):
        kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": spec}
        (folder / "trainer.yaml").write_text(yaml.safe_dump({**values, **kwargs}))
        found = plan("--config trainer.yaml --device 4090")
        same = plan(f". --batch 8 --seq 128 --dtype float32 --optimizer adamw_torch_fused --device 4090 {options}")
        assert found["rows"][0] == same["rows"][0]
        given = [row["spec"] for row in found["rows"] if row["name"] == "your spec"]
        assert given == ([] if "budget" in spec else [spec])


def test_a_saved_plan_is_installed_on_the_model(plan, tmp_path):
    """A plan made from a config fits the model of that config and has its predicted effect."""
    path = tmp_path / "plan.yaml"
    plan(f". --batch 4 --seq 128 --dtype float32 --optimizer sgd --device cpu --budget 3500KiB --out {path}")
    model, batch = tiny_model("llama", layers=2), tiny_batch("llama", batch=4, tokens=128)
    result = hf_ckpt.verify(model, batch, {"plan": str(path)})
    assert result, result
    assert sum(result.recomputed.values()) > 0


BOOK = runpy.run_path(str(ROOT / "tests" / "scripts" / "cookbook.py"))


@pytest.mark.slow
@sparing("name", list(BOOK["QUESTIONS"]), "A BERT-large classifier with 512 tokens in 7 GiB")
def test_answers_of_the_cookbook_are_those_of_the_commands(name, monkeypatch):
    """The cookbook shows the commands' current answers; `python tests/scripts/cookbook.py` rewrites it."""
    monkeypatch.chdir(ROOT)
    command = BOOK["QUESTIONS"][name]
    section = BOOK["section"](name, command, BOOK["answer_of"](command))
    assert section.strip() in (ROOT / "docs" / "cookbook.md").read_text()


MINI = {"batch": 4, "tokens": 256, "device": "a10", "budget": "320MiB"}
TINY = {"device": "cpu", "budget": "30MiB", "optimizer": "sgd"}
BATCH = {"batch": 4, "tokens": 128}


def test_a_plan_fits_into_the_budget_that_is_written(folder):
    """Also if it needs every byte of the budget, which is written in MiB."""
    asked = hf_ckpt.predict(str(folder), 8, tokens=64, device="t4")
    least = hf_ckpt.predict(str(folder), 8, tokens=64, device="t4", budget=f"{asked.floor_bytes}B")
    written = parse_bytes(least.rows[0].spec["budget"])
    assert least.peak_bytes == least.budget_bytes == asked.floor_bytes <= written < asked.floor_bytes + 2**20


def test_a_forecast_plans_for_other_budgets():
    told = []
    found = hf_ckpt.predict("mini-llama", on_progress=told.append, **MINI)
    assert told[0] == "reading the model"
    assert "measuring steps with 4 x 256 tokens, on fake tensors" in told
    assert found.plan.active()
    assert found.floor_bytes < found.peak_bytes <= found.budget_bytes == 320 * 2**20
    assert found.step_seconds == found.plan.prediction.step_seconds > 0
    assert [row.name for row in found.usual] == ["none", "full"]
    other = found.within(found.usual[0].peak_bytes)
    assert not other.plan.active()
    assert other.step_seconds < found.step_seconds
    assert other.within("320MiB") == found.within("320MiB")
    with pytest.raises(InfeasibleError) as raised:
        found.within(found.floor_bytes - 1)
    assert raised.value.floor_bytes == sum(raised.value.parts.values()) == found.floor_bytes


@pytest.mark.long
def test_a_preset_its_config_its_file_and_the_command_have_one_answer(plan):
    found = hf_ckpt.predict("mini-llama", **MINI)
    for model in (load_config("mini-llama"), PRESETS["mini-llama"]):
        same = hf_ckpt.predict(model, **MINI)
        assert (same.rows, same.parts, same.frontier) == (found.rows, found.parts, found.frontier)
    by_command = plan("mini-llama --batch 4 --seq 256 --device a10 --budget 320MiB")
    assert by_command == json.loads(json.dumps(found.to_dict()))
    assert len(found.frontier) > 3


@pytest.mark.compat
@sparing(
    ("family", "lora"),
    itertools.product(TINY_FAMILIES, (None, 4)),
    ("llama", 4),
    ("gpt2", 4),
    ("bert", None),
    ("t5", None),
)
def test_the_config_of_a_model_gives_a_plan_for_its_blocks_and_weights(family, lora):
    model = model_of(family, lora=lora is not None, layers=3)
    found = hf_ckpt.find_blocks(model)
    found.base.config.architectures = [found.class_name]
    asked = {"dtype": "float32", "attention": found.base.config._attn_implementation, "lora": lora}
    forecast = hf_ckpt.predict(found.base.config, **BATCH, **asked, **TINY)
    assert [block for block, _ in forecast.plan.actions] == [*found.blocks]
    assert forecast.parts["weights"] == sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.long
def test_the_reference_pass_of_dpo_takes_time():
    """DPO of a pair runs one more forward than SFT of two sequences, through all blocks and not only the measured."""
    config = tiny_model("llama", layers=2).config
    config.num_hidden_layers, config.architectures = 40, ["LlamaForCausalLM"]
    asked = {"tokens": 64, "lora": 4, "device": "cpu"}
    sft, dpo = hf_ckpt.predict(config, 2, trainer="sft", **asked), hf_ckpt.predict(config, 1, trainer="dpo", **asked)
    assert 1.1 < dpo.step_seconds / sft.step_seconds < 1.5


def test_an_answer_says_what_to_leave_for_the_allocator():
    """It is no part of what fits. `auto` leaves the least of the two, rounded."""
    asked = {"model": "mini-llama", "tokens": 64}
    found = hf_ckpt.predict(**asked, device="t4")
    memory = device_named("t4").memory_bytes
    assert found.allocator_bytes == (round(0.12 * found.peak_bytes), round(0.24 * found.peak_bytes))
    assert sum(found.parts.values()) == found.peak_bytes
    assert found.budget_bytes == round(DEFAULT_SHARE * memory) == round(0.9 * memory)
    assert abs(1 / DEFAULT_SHARE - RESERVED[0]) < 0.01
    first, second = found.left
    free = f"{format_bytes(memory - found.peak_bytes)} of {format_bytes(memory)}"
    assert first.endswith(f"{free}; `auto` leaves {format_bytes(0.1 * memory)}")
    least, most = map(format_bytes, found.allocator_bytes)
    assert f"the allocator takes {least} to {most}: 12% to 24% of the peak" in second
    assert "expandable_segments:True" in second
    assert found.to_dict()["allocator_bytes"] == [*found.allocator_bytes]
    full = left_of(device_named("t4"), ForecastRow("", "", round(0.95 * memory), 1.0, None, True, None))
    assert ", more than is free: 12%" in full[1]
    on_cpu = hf_ckpt.predict(**asked, device="cpu", budget="1GiB")
    assert (on_cpu.allocator_bytes, on_cpu.left) == ((0, 0), ())


@pytest.mark.parametrize(("peak", "budget", "is_said"), [(12.0, 13.0, True), (11.7, 13.0, False), (13.5, 13.0, False)])
def test_what_the_allocator_may_add_is_said_where_the_card_could_lack_it(peak, budget, is_said):
    """The T4 has 14.56 GiB, which is more than 1.24 times 11.7 GiB, and less than 1.24 times 12 GiB."""
    row = ForecastRow("", "", round(peak * GIB), 1.0, None, peak <= budget, None)
    assert len(list(on_allocator(device_named("t4"), row))) == is_said
    assert not list(on_allocator(device_named("cpu"), row))


@pytest.mark.skipif(transformers.__version__ < "5", reason="experts are linear layers before transformers 5")
def test_experts_that_keep_their_bits_are_told():
    """A note says that experts are stacked weights, which bitsandbytes does not quantise."""
    shape = {"hidden_size": 64, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.MixtralConfig(**shape, architectures=["MixtralForCausalLM"])
    asked = {"lora": 4, "lora_targets": ("q_proj",), "load_in_4bit": True}
    notes = hf_ckpt.predict(config, tokens=64, device="t4", **asked).notes
    assert any(" of weights are stacked experts" in note for note in notes)


@pytest.mark.long
def test_a_plan_whose_budget_could_not_be_measured_is_to_be_saved():
    """A run under a budget measures its first steps without host memory, and these do not fit the card here."""
    fields = {"tokens": 512, "lora": 4, "dtype": "float32", "device": "t4", "head": "auto"}
    found = hf_ckpt.predict("mini-llama", 512, **fields, budget="14.4GiB", host_budget="64GiB")
    assert found.fits
    assert "offload" in {action.kind for _, action in found.plan.actions}
    assert found.rows[0].spec == {"plan": "plan.json"}
    assert any("--out plan.json" in note for note in found.notes)
    in_tiles = hf_ckpt.predict("mini-llama", 470, **fields, mlp="auto", budget="14.5GiB", host_budget="64GiB")
    assert "full+tiles" not in {action.kind for _, action in in_tiles.plan.actions}
    assert in_tiles.rows[0].spec["mlp"] == "auto"  # the steps that are measured need them
    measurable = hf_ckpt.predict("mini-llama", 64, **fields)
    assert measurable.rows[0].spec == {"policy": "none", "head": "auto"}  # no budget: nothing is to be measured
    assert not measurable.notes


@pytest.mark.long
def test_segments_are_planned_where_asked_and_advised_before_fewer_tokens():
    """The spec of a plan in segments makes this plan, without measuring."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=24, vocab_size=64, architectures=["LlamaForCausalLM"])
    fields = {"tokens": 512, "dtype": "float32", "device": "t4"}
    budget = round(0.9 * hf_ckpt.predict(config, 16, **fields).floor_bytes)
    with pytest.raises(InfeasibleError) as caught:
        hf_ckpt.predict(config, 16, **fields, budget=f"{budget}B")
    assert caught.value.hints[0].startswith('segments ("segments": "sqrt"), with which the peak is ')
    assert "shorter sequences" in caught.value.hints[1]
    found = hf_ckpt.predict(config, 16, **fields, segments="sqrt", budget=f"{budget}B")
    assert found.peak_bytes <= budget
    spec = Spec.parse(found.rows[0].spec)
    assert (spec.policy, spec.segments) == ("full", 7)
    blocks = [block for block, _ in found.plan.actions]
    assert make_plan(spec, blocks, found.plan.family, found.plan.model).actions == found.plan.actions
    given = hf_ckpt.predict(config, 16, **fields, segments="sqrt", spec=spec).rows[1]
    assert (given.name, given.peak_bytes) == ("your spec", found.peak_bytes)
