"""What the page of a plan shows: its answers, figures and refusals, without a browser and without its packages."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli import app, main, plan
from hf_ckpt.cli.page import (
    MIB,
    answer_of,
    blocks_html,
    command_of,
    error_html,
    option_named,
    question_of,
    range_of,
    slices_of,
    stops_of,
    summary_html,
)
from hf_ckpt.cli.page_figures import frontier_figure, keeping_all, legend_html, timeline_figure
from hf_ckpt.cli.plan_picture import levels_of
from hf_ckpt.cli.report_html import _script
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError
from hf_ckpt.planner import forecast as forecasts
from hf_ckpt.planner.answers import Setting
from hf_ckpt.planner.forecast import Request, forecast
from hf_ckpt.prediction.workload import Workload
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "recipes" / "space"
WORKLOAD = Workload("mini-gpt2", batch=8, tokens=512)
REQUEST = Request("t4", frontier=True, nearest=True)
"""That of the page."""


@pytest.fixture(scope="module")
def found():
    return forecast(WORKLOAD, Request(device="t4", frontier=True))


# --- other budgets from the same costs ----------------------------------------------------------------------------


def test_a_forecast_for_another_budget_is_that_of_a_new_trace(found):
    middle = (found.floor_bytes + option_named(found, "none").peak_bytes) // 2
    other, traced = found.within(middle), forecast(WORKLOAD, Request(device="t4", budget=str(middle)))
    assert other.plan == traced.plan != found.plan
    assert other.timeline == traced.timeline
    assert (other.budget_bytes, other.spec, other.answer) == (middle, traced.spec, traced.answer)
    assert other.within(found.budget_bytes).plan == found.plan
    with pytest.raises(InfeasibleError) as error:
        found.within(found.floor_bytes - 1)
    assert error.value.floor_bytes == found.floor_bytes


def test_slower_plans_for_smaller_budgets(found):
    stops = stops_of(found)
    low, high = range_of(found)
    assert (stops[0], stops[-1]) == (low, high)
    assert stops == sorted(set(stops))
    assert all(stop % MIB == 0 for stop in stops)
    assert low < found.floor_bytes <= stops[1]
    assert high >= option_named(found, "none").peak_bytes
    answers = [answer_of(found, stop) for stop in stops]
    assert [answer.fits for answer in answers] == [False] + [True] * (len(stops) - 1)
    seconds = [answer.found.step_seconds for answer in answers[1:]]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == option_named(found, "none").step_seconds
    for answer in answers[1:]:
        assert answer.found.peak_bytes <= answer.budget_bytes
        written = yaml.safe_load(answer.arguments).get("gradient_checkpointing_kwargs", {"policy": "none"})
        assert Spec.parse(answer.spec) == Spec.parse(written)
    assert answers[0].spec == answers[0].arguments == ""
    assert json.loads(answers[1].spec) == {"policy": "budget", "budget": f"{stops[1] // MIB}MiB"}


def test_what_the_device_cannot_hold_does_not_fit(found):
    """A budget may be larger than the device; the slider ends at its memory where something fits into that."""
    none = option_named(found, "none").peak_bytes
    memory = (found.floor_bytes + none) // 2
    small = dataclasses.replace(found, device=dataclasses.replace(found.device, memory_gib=memory / GIB))
    assert range_of(small)[1] == memory // MIB * MIB < range_of(found)[1]
    assert answer_of(small, range_of(small)[1]).fits
    answer = answer_of(small, 100 * GIB)
    assert not answer.fits
    assert answer.headline.startswith("Does not fit: ")
    assert answer.headline.endswith(f" of {memory / GIB:.1f} GiB on a T4, though a budget of 100.0 GiB would allow it.")
    assert "hf-misfit" in summary_html(answer)


def test_where_plans_cannot_differ_there_is_one_budget_that_fits(found):
    """Gradients and weights are the peak of a short training, whatever blocks do."""
    none = option_named(found, "none")
    same = dataclasses.replace(none, peak_bytes=found.floor_bytes)
    flat = dataclasses.replace(found, usual=(same, *found.usual[1:]))
    assert [answer_of(flat, stop).fits for stop in stops_of(flat)] == [False, True]


# --- what is shown --------------------------------------------------------------------------------------------------


def test_it_says_first_whether_it_fits(found):
    stops = stops_of(found)
    html = summary_html(answer_of(found, stops[1]))
    assert html.index("Fits: ") < html.index("this plan") < html.index("no checkpointing") < html.index("full on every")
    assert "1.00x" in html
    html = summary_html(answer_of(found, stops[0]))
    assert html.index("Does not fit: ") < html.index("weights and optimizer state") < html.index("no checkpointing")
    assert "this plan" not in html
    assert "No plan fits" in blocks_html(answer_of(found, stops[0]))


def test_every_block_has_a_cell(found):
    answer = answer_of(found, stops_of(found)[1])
    html = blocks_html(answer)
    assert html.count(" title=") == len(answer.found.plan.actions)
    for block, action in answer.found.plan.actions:
        assert f'title="block {block.index}: {action}"' in html


def test_what_users_typed_is_no_html(found):
    assert "<b>" not in error_html("<b>")
    assert _script({"text": "</script>"}) == '{"text":"<\\/script>"}'
    assert question_of(found) == "mini-gpt2, training every weight, bfloat16, adamw, batch 8 x 512 tokens, T4"


@pytest.mark.parametrize(
    ("workload", "device", "head"),
    [
        (Workload("gpt2"), "", "full"),
        (Workload("a model", batch=3, tokens=9, lora=8, load_in_4bit=True, double_quant=False), "t4", "auto"),
        (Workload("t5-small", target_tokens=7, accumulation=2, lora=4, lora_targets=("q", "v"), padded=True), "", 64),
        (Workload("gpt2", trainer="dpo", reference="model", ranks=2, parallel="fsdp2", autocast="none"), "", "full"),
        (Workload("gpt2", trainer="sft", packing=True, lora=8, lora_dropout=0.05), "", "full"),
    ],
)
def test_the_command_asks_the_same(workload, device, head):
    parser = argparse.ArgumentParser()
    plan.add(parser.add_subparsers())
    words = shlex.split(command_of(workload, Request(device or None, head=head), 5 * MIB))
    assert words[0] == "hf-ckpt"
    arguments = parser.parse_args(words[1:])
    assert plan.workload_of(arguments, arguments.model) == workload
    assert (arguments.device, arguments.head, arguments.budget) == (device or None, head, "5MiB")
    assert (arguments.mlp, arguments.compile) == ("full", False)


def test_the_command_asks_for_chunks_host_memory_and_compiled_blocks():
    asked = Request("t4", "1GiB", mlp="auto", compiled=True, host_budget="8GiB")
    words = shlex.split(command_of(WORKLOAD, asked, MIB))
    assert words[-7:] == ["--mlp", "auto", "--host-budget", "8GiB", "--compile", "--budget", "1MiB"]


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_timeline_has_the_peak_and_all_blocks(found):
    stop = stops_of(found)[1]
    tight, kept = found.within(stop), keeping_all(found)
    figure = timeline_figure(tight, stop, kept)
    areas = [trace for trace in figure["data"] if trace.get("stackgroup")]
    tops = [sum(sizes) for sizes in zip(*(trace["y"] for trace in areas), strict=True)]
    assert max(tops) == pytest.approx(tight.peak_bytes / GIB, rel=1e-3)
    assert max(kept[1]) == pytest.approx(option_named(found, "none").peak_bytes / GIB, rel=1e-3)
    assert areas[0]["x"] == sorted(areas[0]["x"])
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert {trace["name"] for trace in bars} == {str(action) for _, action in tight.plan.actions}
    assert figure["layout"]["yaxis"]["range"][1] > max(kept[1])
    nothing = timeline_figure(found, 1, kept, fits=False)
    assert [trace["name"] for trace in nothing["data"]] == ["no checkpointing"]
    json.dumps(figure)


def test_slices_keep_the_highest_moments(found):
    few = slices_of(found, 10)
    assert len(few) <= 11
    assert max(sum(sizes) for _, sizes in few) == max(sum(sizes) for _, sizes in levels_of(found))
    assert {*few} <= {*levels_of(found)}


def test_the_frontier_marks_this_plan(found):
    stop = stops_of(found)[1]
    tight = found.within(stop)
    figure = frontier_figure(tight, stop)
    star = figure["data"][-1]
    assert (star["name"], star["x"], star["y"]) == ("this plan", [tight.peak_bytes / GIB], [tight.step_seconds])
    assert len(figure["data"][0]["x"]) == len(found.frontier) > 3
    names = [trace["name"] for trace in figure["data"]]
    assert names[:3] == ["plans", "no checkpointing", "full"]
    legend = legend_html(figure)
    assert all(name in legend for name in names)
    assert "this plan" not in [trace["name"] for trace in frontier_figure(found, 1, fits=False)["data"]]
    assert figure["layout"]["annotations"][0]["xanchor"] == "left"
    assert frontier_figure(found, 2**40)["layout"]["annotations"][0]["xanchor"] == "right"


# --- what is refused --------------------------------------------------------------------------------------------------

FIELDS = ("mini-gpt2", 8, 512, 0, "no", "t4", "bfloat16", "adamw", 1, "as a whole")


def asked(**changes):
    names = ("model", "batch", "tokens", "lora", "base", "device", "dtype", "optimizer", "accumulation", "head")
    return app.question(**{**dict(zip(names, FIELDS, strict=True)), **changes})


def test_the_fields_of_the_page_are_those_of_a_question():
    """In the same order, each with a value that can be asked."""
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks():
        fields = app._fields(gradio, "mini-gpt2")
    names = [name for name in inspect.signature(app.question).parameters if name != "paths"]
    assert len(fields) == len(names)
    found = app.question(**dict(zip(names, (field.value for field in fields), strict=True)))
    assert found == (Workload("mini-gpt2", batch=16, tokens=1024), dataclasses.replace(REQUEST, device="4080"))


def test_fields_make_a_question():
    assert asked() == (WORKLOAD, REQUEST)
    workload, request = asked(lora=8.0, base="4 bits", head="in chunks where that helps", device=app.THIS_MACHINE)
    assert (workload.lora, workload.bits, request.head, request.device) == (8, 4, "auto", None)
    workload, request = asked(
        lora=8, lora_dropout=0.05, trainer="DPO of TRL", packing=True, ranks=4.0, parallel="fsdp2", compiled=True
    )
    expected = {"lora": 8, "lora_dropout": 0.05, "trainer": "dpo", "packing": True, "ranks": 4, "parallel": "fsdp2"}
    assert workload == dataclasses.replace(WORKLOAD, **expected)
    assert request == dataclasses.replace(REQUEST, compiled=True)
    assert asked(mlp="in chunks where that helps") == (WORKLOAD, dataclasses.replace(REQUEST, mlp="auto"))
    assert asked(budget=" 20GiB ") == (WORKLOAD, dataclasses.replace(REQUEST, budget="20GiB"))
    assert asked(lora_dropout=0.1) == (WORKLOAD, REQUEST)  # without adapters there is nothing to drop out


def test_the_line_of_the_question_has_the_trainer(found):
    workload = dataclasses.replace(found.workload, trainer="dpo", packing=True, ranks=4, parallel="fsdp2")
    line = question_of(dataclasses.replace(found, workload=workload))
    assert ", DPO of TRL, packed, 4 ranks (fsdp2), T4" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, but is 0 instead"),
        ({"batch": None}, "batch must be at least 1, but is 0 instead"),
        ({"tokens": -3}, "tokens must be at least 1, but is -3 instead"),
        ({"lora": -1}, "lora must be at least 1, but is -1 instead"),
        ({"base": "4 bits"}, "a base in 4 bits stays frozen"),
        ({"model": "no such model"}, "cannot read a model's config from 'no such model'"),
        ({"model": " "}, "a model is needed"),
        ({"model": None}, "a model is needed"),
        ({"model": __file__, "paths": False}, "files of this machine are not read"),
        ({"model": "../secret", "paths": False}, "files of this machine are not read"),
    ],
)
def test_wrong_fields_are_refused_in_the_words_of_the_command_line(changes, message):
    with pytest.raises(HfCkptError, match=message):
        asked(**changes)


@pytest.mark.parametrize(
    ("package", "words", "purpose"),
    [
        ("gradio", ["app"], "hf-ckpt app needs `gradio`"),
        ("plotly", ["plan", "mini-gpt2", "--html", "report.html"], "a report in HTML needs `plotly`"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(package, words, purpose, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.offline", None)
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert purpose in said
    assert "pip install 'hf-ckpt[app]'" in said
    assert len(said.strip().splitlines()) == 1
    assert issubclass(MissingDependencyError, HfCkptError)


def test_a_report_must_be_html(tmp_path, capsys):
    assert main.main(["plan", "mini-gpt2", "--html", str(tmp_path / "report.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_where_nothing_fits_the_page_says_what_would():
    error = InfeasibleError(
        2 * GIB, 3 * GIB, {"gradients": GIB, "<kept>": 0, "logits": 2 * GIB}, ["fewer tokens"], "no"
    )
    html = app._misfit(error, REQUEST)
    assert "Does not fit: 3.0 of 14.6 GiB on a T4, of which 2.0 may be used" in html
    assert html.index("1.00 GiB gradients") < html.index("2.00 GiB logits") < html.index("fewer tokens")
    assert "kept" not in html
    error.nearest = (Setting("head in <chunks>", "--head auto", GIB, 1234.5, {}),)
    html = app._misfit(error, REQUEST)
    assert (
        html.index("What fits") < html.index("head in &lt;chunks&gt;") < html.index("--head auto") < html.index("1,234")
    )
    assert "fewer tokens" not in html


# --- the Space --------------------------------------------------------------------------------------------------------


def test_that_nothing_fits_is_found_once(monkeypatch):
    error, calls = InfeasibleError(1, 2, {}, (), "no plan fits"), []

    def nothing(workload, request):
        calls.append(workload)
        raise error

    monkeypatch.setattr(forecasts, "forecast", nothing)
    app._answered.cache_clear()
    for _ in range(2):
        with pytest.raises(InfeasibleError, match="no plan fits") as caught:
            app.answered(WORKLOAD, REQUEST, "plotly.js")
        assert caught.value is error
    assert len(calls) == 1
    app._answered.cache_clear()


def test_the_space_says_what_it_needs():
    """Its requirements are those of hf_ckpt and of the extra `app`; its card has what a Space of Gradio must have."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["app"]]
    assert (SPACE / "requirements.txt").read_text(encoding="utf-8").split("\n") == [*wanted, ""]
    card = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert (card["sdk"], card["app_file"], card["license"]) == ("gradio", "app.py", project["license"].lower())
    gradio = next(line for line in wanted if line.startswith("gradio>="))
    assert int(card["sdk_version"].split(".")[0]) >= int(gradio.removeprefix("gradio>=").split(".")[0])
    assert len(card["short_description"]) <= 60
    assert (SPACE / card["app_file"]).is_file()
