"""The page of `hf-ckpt app`, without a browser."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hf_ckpt.cli import app, main
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import GIB

ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "recipes" / "space"


def asked_on_page(**changes):
    """The question of the page with these values; other fields are empty."""
    return app.question_of(*({**dict.fromkeys(app.ON_PAGE, ""), "model": "mini-gpt2", **changes}).values())


@pytest.fixture(scope="module")
def forecast():
    pytest.importorskip("plotly")
    return Forecaster(asked_on_page(batch="8", tokens="512", device="t4", budget="700MiB")).answer()


def test_the_figure_has_the_peak_the_frontier_and_the_plan(forecast):
    traces = {trace.name: trace for trace in app.figure_of(forecast).data}
    tops = [sum(sizes) for sizes in zip(*(traces[name].y for name in app.PART_COLOURS), strict=True)]
    assert max(tops) == pytest.approx(forecast.peak_bytes / GIB, rel=1e-3)
    star = traces["this plan"]
    assert (*star.x, *star.y) == (forecast.peak_bytes / GIB, forecast.step_seconds)
    fastest = list(traces["fastest plan for each budget"].y)
    assert fastest == sorted(fastest, reverse=True)


def test_fields_are_read_as_options_of_the_command_line():
    """Fields that are left empty have their defaults."""
    assert asked_on_page() == asked_on_page(lora=None, budget="  ", packing=False, device="")
    typed = asked_on_page(lora="8", packing=True, budget=" 20GiB ", kbit_preparation=False)
    assert (typed.lora, typed.packing, typed.budget, typed.kbit_preparation) == (8, True, 20 * GIB, False)
    assert (typed.batch, typed.dtype, typed.device) == (1, "bfloat16", None)
    for changes, message in (
        ({"batch": "0"}, "Batch: must be a whole number of at least 1"),
        ({"load_in_4bit": True}, "a base in 4 bits stays frozen"),
        ({"model": " "}, "a model is needed"),
        ({"model": __file__}, "is neither a preset nor a hub id"),
        ({"model": "../secret"}, "is neither a preset nor a hub id"),
    ):
        with pytest.raises(HfCkptError, match=message):
            asked_on_page(**changes)


def test_the_page_answers_moves_and_refuses():
    """The callbacks of the page: a plan for its first question, another budget, no plan, what fits, a wrong field.

    What is empty is hidden, and after an error all but the error is.
    """
    pytest.importorskip("gradio")
    page = app.build("mini-gpt2")
    _, plan, _, move = (function for function in page.fns.values() if function.fn)
    values = [page.blocks[field._id].value for field in plan.inputs]
    assert app.question_of(*values) == asked_on_page(batch="16", tokens="1024", device="4080")

    def parts(function, *inputs):
        names = [getattr(part, "elem_id", None) for part in function.outputs]
        return dict(zip(names, function.fn(*inputs), strict=True))

    first = parts(plan, *values)
    assert first["hf-answer"]["value"].startswith("## Fits: ")
    slider = first["hf-slider"]
    assert all(round(slider[end], 2) == slider[end] for end in ("minimum", "maximum", "value"))
    moved = parts(move, first[None], first["hf-slider"]["minimum"])
    written = yaml.safe_load(moved["hf-arguments"]["value"])["gradient_checkpointing_kwargs"]
    assert Spec.parse(written).budget == round(first["hf-slider"]["minimum"] * 1024) * 2**20
    assert moved["hf-command"]["value"].endswith(f"--budget {written['budget']}")
    assert moved["hf-rows"]["value"][0][0] == "this plan"
    assert moved["hf-budget"] == written["budget"]
    budget = list(app.ON_PAGE).index("budget")
    narrow = [*values[:budget], "400MiB", *values[budget + 1 :]]
    none = parts(plan, *narrow)
    assert "Does not fit: " in none["hf-answer"]["value"]
    assert none["hf-figure"]["visible"]  # of the lowest peak
    assert not none["hf-arguments"]["visible"]
    assert none["hf-slider"]["value"] == none["hf-slider"]["minimum"]
    assert none["hf-rows"]["value"][0][-1] == "yes"
    typed = {"batch": "", "global_batch": "8"}
    step = [typed.get(name, value) for name, value in zip(app.ON_PAGE, values, strict=True)]
    split = parts(plan, *step)
    assert "--batch 8 --seq 1024 --device" in split["hf-command"]["value"]
    wrong = parts(plan, *values[:budget], "lots", *values[budget + 1 :])
    assert wrong["hf-answer"]["value"].startswith("## Budget: ")
    assert [name for name, part in wrong.items() if part and part["visible"]] == ["hf-answer"]


def test_an_address_opens_filled_and_answered():
    """It names what differs from an empty form; without a question, the page's first one is answered."""
    pytest.importorskip("gradio")
    page = app.build("mini-gpt2")
    opened, plan, *_ = (function for function in page.fns.values() if function.fn)
    first = [page.blocks[field._id].value for field in plan.inputs]
    size = len(app.ON_PAGE)

    def asked(**query):
        found = opened.fn(SimpleNamespace(query_params=query), *first)
        return dict(zip(app.ON_PAGE, found[:size], strict=True)), found[size:]

    query = {"model": "mini-gpt2", "tokens": "64", "lora": "4", "load_in_8bit": "true", "device": "t4"}
    values, (_, _, answer, *_) = asked(**query, __theme="dark")
    assert {name: value for name, value in values.items() if value != app.plain_value(name)} == {
        **query,
        "load_in_8bit": True,
    }
    assert answer["value"].startswith("## Fits: ")
    assert "--load-in-8bit" in answer["value"]
    assert app.question_of(*values.values()) == app.question_of(*app.values_of_address(query))
    assert [*asked()[0].values()] == first
    for wrong, said in (({"tokns": "3"}, "asks for 'tokns', which"), ({"packing": "1"}, "must be true or false")):
        _, (_, _, answer, *_) = asked(**wrong)
        assert said in answer["value"]


def test_a_row_that_is_clicked_fills_the_form():
    """With the options of the row; the plan itself changes nothing."""
    gradio = pytest.importorskip("gradio")
    page = app.build("mini-gpt2")
    _, plan, clicked, _ = (function for function in page.fns.values() if function.fn)
    changes = {"batch": "16", "tokens": "1024", "device": "4080", "budget": "400MiB"}
    values = list({**{name: app.plain_value(name) for name in app.ON_PAGE}, "model": "mini-gpt2", **changes}.values())
    answered = plan.fn(*values)[0]
    rows = answered[1].rows
    assert len(rows) > 1
    for number, row in enumerate(rows):
        updates = clicked.fn(SimpleNamespace(index=[number, 2]), answered)
        filled = [
            value if update == gradio.skip() else update["value"] for value, update in zip(values, updates, strict=True)
        ]
        training = app.question_of(*filled)
        fields = app.fields_of_row(row.options)
        assert fields or not row.options
        assert all(getattr(training, name) == value for name, value in fields.items())
    split = app.form_values(app.fields_of_row("--batch 4 --accum 2"))
    assert split == {"batch": "4", "accumulation": "2", "global_batch": ""}


def test_the_figure_is_written_to_a_file(tmp_path, capsys):
    """Also of the lowest peak, if nothing fits."""
    pytest.importorskip("plotly")
    for budget, code in (("700MiB", 0), ("1MiB", 2)):
        path = tmp_path / f"{budget}.html"
        command = ["plan", "mini-gpt2", "--seq", "64", "--device", "t4", "--budget", budget, "--html", str(path)]
        assert main.main(command) == code
        assert f"wrote the figure to {path}" in "".join(capsys.readouterr()).replace("\n", "")
        text = path.read_text(encoding="utf-8")
        assert "kept for backward" in text
        assert "Plotly.newPlot" in text


@pytest.mark.parametrize("package", ["gradio", "plotly"])
def test_a_missing_package_is_named(package, monkeypatch, capsys):
    for name in ("gradio", "plotly"):
        monkeypatch.setitem(sys.modules, name, None if name == package else SimpleNamespace())
    assert main.main(["app"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"hf-ckpt app needs `{package}`, which is not installed. Install it with: pip install gradio" in line


def test_the_space_is_the_app_and_says_what_it_needs():
    """The Space's requirements are those of hf_ckpt and its extra `app`, and its card has Gradio's required fields."""
    tomllib, gradio = pytest.importorskip("tomllib"), pytest.importorskip("gradio")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["app"]]
    assert (SPACE / "requirements.txt").read_text(encoding="utf-8").split("\n") == [*wanted, ""]
    card = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert (card["sdk"], card["app_file"], card["license"]) == ("gradio", "app.py", project["license"].lower())
    assert isinstance(runpy.run_path(str(SPACE / card["app_file"]))["demo"], gradio.Blocks)
