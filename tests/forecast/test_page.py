"""The content of the report of `hf-ckpt plan --html` and of the page of `hf-ckpt app`, without a browser."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_ckpt.cli import app, main
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.forecast import forecast as forecasts
from hf_ckpt.forecast.answers import answer_of
from hf_ckpt.forecast.figures import frontier_figure, keeping_all, levels_of, option_named, slices_of, timeline_figure
from hf_ckpt.forecast.forecast import forecast
from hf_ckpt.forecast.html import MIB, _script, error_html, range_of, stop_of, stops_of
from hf_ckpt.prediction.question import Question
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "recipes" / "space"
ASKED = Question("mini-gpt2", batch=8, tokens=512, device="t4", frontier=True)


@pytest.fixture(scope="module")
def found():
    return forecast(ASKED)


@pytest.fixture(scope="module")
def stops(found):
    """Budget -> its part of the report."""
    kept = keeping_all(found)
    return {budget: stop_of(found, budget, kept) for budget in stops_of(found)}


def test_a_forecast_for_another_budget_is_that_of_a_new_trace(found):
    middle = (found.floor_bytes + option_named(found, "none").peak_bytes) // 2
    other, traced = found.within(middle), forecast(dataclasses.replace(ASKED, budget=str(middle), frontier=False))
    assert other.plan == traced.plan != found.plan
    assert other.timeline == traced.timeline
    assert (other.budget_bytes, other.spec, other.answer) == (middle, traced.spec, traced.answer)
    assert other.within(found.budget_bytes).plan == found.plan
    with pytest.raises(InfeasibleError) as error:
        found.within(found.floor_bytes - 1)
    assert error.value.floor_bytes == found.floor_bytes


def test_the_report_shows_the_answer_for_every_budget(found, stops):
    """Each budget shows the words, tables and copyable lines of its answer; only the lowest budget does not fit."""
    budgets = list(stops)
    low, high = range_of(found)
    assert (budgets[0], budgets[-1]) == (low, high)
    assert budgets == sorted(budget for budget in budgets if budget % MIB == 0)
    assert low < found.floor_bytes <= budgets[1]
    seconds = []
    for budget in budgets[1:]:
        stop, within = stops[budget], found.within(budget)
        answer = answer_of(within)
        assert escape(answer.headline) in stop["summary"]
        assert "hf-fits" in stop["summary"]
        for table in answer.tables:
            assert all(escape(cell) in stop["tables"] for row in table.rows for cell in row)
        assert (stop["lines"]["arguments"], stop["lines"]["model"]) == tuple(text for _, text in answer.copies)
        written = yaml.safe_load(stop["lines"]["arguments"]).get("gradient_checkpointing_kwargs", {"policy": "none"})
        assert Spec.parse(stop["lines"]["spec"]) == Spec.parse(written)
        assert stop["lines"]["command"].endswith(f"--device t4 --budget {budget // MIB}MiB")
        assert stop["blocks"].count(" title=") == len(within.plan.actions)
        for block, action in within.plan.actions:
            assert f'title="block {block.index}: {action}"' in stop["blocks"]
        seconds.append(within.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == option_named(found, "none").step_seconds
    misfit = stops[low]
    assert misfit["summary"].index("Does not fit: ") < misfit["summary"].index("weights and optimizer state")
    assert "this plan" not in misfit["tables"]
    assert "No plan fits" in misfit["blocks"]
    assert misfit["lines"]["spec"] == misfit["lines"]["arguments"] == ""
    json.dumps(stops)


def test_what_the_device_cannot_hold_does_not_fit(found):
    """A plan must also fit the device if the budget is larger; the slider then ends at the device's memory."""
    memory = (found.floor_bytes + option_named(found, "none").peak_bytes) // 2
    small = dataclasses.replace(found, device=dataclasses.replace(found.device, memory_gib=memory / GIB))
    assert range_of(small)[1] == memory // MIB * MIB < range_of(found)[1]
    assert small.within(range_of(small)[1]).fits
    shown = stop_of(small, 100 * GIB, keeping_all(found))["summary"]
    assert "Does not fit: " in shown
    assert f" of {memory / GIB:.1f} GiB on a T4, though a budget of 100.0 GiB would allow it." in shown
    assert "hf-misfit" in shown


def test_where_plans_cannot_differ_there_is_one_budget_that_fits(found):
    """If all plans have the same peak, as in a short training, only one budget that fits is shown."""
    same = dataclasses.replace(option_named(found, "none"), peak_bytes=found.floor_bytes)
    flat = dataclasses.replace(found, usual=(same, *found.usual[1:]))
    assert len(stops_of(flat)) == 2


def test_what_users_typed_is_no_html():
    assert "<b>" not in error_html("<b>")
    assert _script({"text": "</script>"}) == '{"text":"<\\/script>"}'


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_timeline_has_the_peak_and_all_blocks(found, stops):
    budget = list(stops)[1]
    tight, kept = found.within(budget), keeping_all(found)
    figure = stops[budget]["timeline"]
    areas = [trace for trace in figure["data"] if trace.get("stackgroup")]
    tops = [sum(sizes) for sizes in zip(*(trace["y"] for trace in areas), strict=True)]
    assert max(tops) == pytest.approx(tight.peak_bytes / GIB, rel=1e-3)
    assert max(kept[1]) == pytest.approx(option_named(found, "none").peak_bytes / GIB, rel=1e-3)
    assert areas[0]["x"] == sorted(areas[0]["x"])
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert {trace["name"] for trace in bars} == {str(action) for _, action in tight.plan.actions}
    assert figure["layout"]["yaxis"]["range"][1] > max(kept[1])
    assert [trace["name"] for trace in timeline_figure(found, 1, kept, fits=False)["data"]] == ["no checkpointing"]
    few = slices_of(found, 10)
    assert len(few) <= 11
    assert max(sum(sizes) for _, sizes in few) == max(sum(sizes) for _, sizes in levels_of(found))


def test_the_frontier_marks_this_plan(found, stops):
    budget = list(stops)[1]
    tight, figure = found.within(budget), stops[budget]["frontier"]
    star = figure["data"][-1]
    assert (star["name"], star["x"], star["y"]) == ("this plan", [tight.peak_bytes / GIB], [tight.step_seconds])
    assert len(figure["data"][0]["x"]) == len(found.frontier) > 3
    names = [trace["name"] for trace in figure["data"]]
    assert names[:3] == ["plans", "no checkpointing", "full"]
    assert all(name in stops[budget]["legends"][1] for name in names)
    assert "this plan" not in [trace["name"] for trace in frontier_figure(found, 1, fits=False)["data"]]
    sides = [frontier_figure(found, size)["layout"]["annotations"][0]["xanchor"] for size in (budget, 2**40)]
    assert sides == ["left", "right"]


# --- the app ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "paths"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("my.host", False)],
)
def test_a_page_that_other_machines_reach_reads_no_files(host, paths, monkeypatch, tmp_path):
    built, page = [], SimpleNamespace(launch=lambda **_: None, close=lambda: None)
    monkeypatch.setattr(app, "import_gradio", lambda: None)
    monkeypatch.setattr(app, "look", lambda _: {})
    monkeypatch.setattr(app, "build", lambda model, *, paths: built.append(paths) or page)
    words = argparse.Namespace(model="mini-gpt2", host=host, port=1, open=False)
    assert app.run(words, wait=lambda _: None) == 0
    assert built == [paths]


@pytest.mark.parametrize(
    ("package", "words", "purpose", "remedy"),
    [
        ("gradio", ["app"], "hf-ckpt app needs `gradio`", "pip install gradio plotly"),
        (
            "plotly",
            ["plan", "mini-gpt2", "--html", "report.html"],
            "a report in HTML needs `plotly`",
            "pip install plotly",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(package, words, purpose, remedy, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.offline", None)
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert purpose in said
    assert remedy in said
    assert len(said.strip().splitlines()) == 1


def test_a_report_must_be_html(tmp_path, capsys):
    assert main.main(["plan", "mini-gpt2", "--html", str(tmp_path / "report.txt")]) == 2
    assert "must end in .html" in capsys.readouterr().err


def test_where_nothing_fits_the_page_says_what_would_and_finds_it_once(monkeypatch):
    tried = []
    nearest = forecasts.Forecaster.nearest
    monkeypatch.setattr(forecasts.Forecaster, "nearest", lambda self: tried.append(self) or nearest(self))
    asked = dataclasses.replace(ASKED, budget="540MiB")
    for _ in range(2):
        fits, html = app.answered(asked, "plotly.js")
    assert len(tried) == 1
    assert not fits
    order = ("Does not fit: 0.", "GiB on a T4", "mini-gpt2: every", "weights and optimizer", "What fits", "--")
    places = [html.index(part) for part in order]
    assert places == sorted(places)


def test_the_space_says_what_it_needs():
    """The Space's requirements are those of hf_ckpt and its extra `app`, and its card has Gradio's required fields."""
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
