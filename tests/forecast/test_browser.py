"""The report of `hf-ckpt plan --html` and the page of `hf-ckpt app` in a real browser, as in CI."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import threading
from pathlib import Path

import pytest
import yaml

from hf_ckpt.cli import main
from hf_ckpt.forecast.figures import HEIGHT
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import exact_size, parse_bytes

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
SPACE = ROOT / "recipes" / "space"
CONTRAST = """
    const light = (text) => {
        const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const under = (node) => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (!/, 0\\)|transparent/.test(colour)) return light(colour);
        }
        return 1;
    };
    const found = [];
    for (const node of document.querySelectorAll(arguments[0])) {
        const style = getComputedStyle(node);
        const pair = [light(node.closest("svg") ? style.fill : style.color), under(node)].sort((a, b) => b - a);
        found.push((pair[0] + 0.05) / (pair[1] + 0.05));
    }
    return found;"""
"""Contrasts of texts with their backgrounds. Source: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio."""
TEXTS = "main p, main td, main th, main h2, main li span, main pre, main button, .xtick text, .g-xtitle text"
"""Selectors for the texts of a report."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from helpers.browser import Browser

    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report written by the command line."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    words = ["mini-gpt2", "--batch", "8", "--seq", "512", "--device", "t4", "--budget", "700MiB"]
    assert main.main(["plan", *words, "--html", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def served():
    """The address of the `hf-ckpt app` page, which starts with a small model."""
    import gradio

    page, ready, done = [], threading.Event(), threading.Event()

    def wait(found):
        page.append(found)
        ready.set()
        done.wait()

    from hf_ckpt.cli import app

    arguments = main._parser().parse_args(["app", "mini-gpt2", "--port", "7869"])
    thread = threading.Thread(target=app.run, args=(arguments, wait), daemon=True)
    thread.start()
    assert ready.wait(60)
    assert isinstance(page[0], gradio.Blocks)
    yield page[0].local_url
    done.set()
    thread.join(30)


def drawn(browser):
    """Whether both figures are drawn."""
    return browser.driver.execute_script("return document.querySelectorAll('.scatterlayer .trace').length") > 8


def room_for_figures(browser):
    """Heights in pixels of both figures and of their drawings."""
    script = """return ["timeline", "frontier"].map((name) => document.getElementById(name)).flatMap((node) =>
        [node.offsetHeight, node.querySelector(".main-svg").getBoundingClientRect().height])"""
    return set(browser.driver.execute_script(script))


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_shows_another_plan_for_another_budget(browser, report):
    browser.open(report.as_uri())
    browser.wait(lambda: drawn(browser))
    assert browser.text("#shown") == "0.6836 GiB"
    assert browser.text("#summary").startswith("✓ Fits: 0.6")
    last = int(browser.find("#budget").get_attribute("max"))
    seen = []
    for stop in range(last + 1):
        milliseconds = browser.slide("#budget", stop)
        texts = [browser.text(f"#{name}") for name in ("shown", "summary", "blocks", "spec", "timeline", "command")]
        seen.append((*texts, milliseconds))
        assert room_for_figures(browser) == {HEIGHT}
    assert len({shown for shown, *_ in seen}) == last + 1
    assert "Does not fit: " in seen[0][1]
    assert seen[0][3] == ""
    assert all("Fits: " in summary for _, summary, *_ in seen[1:])
    assert len({blocks for _, _, blocks, *_ in seen}) > 5
    assert "keep: blocks 0-" in seen[-1][2]
    assert Spec.parse(seen[-1][3]).policy == "none"
    for shown, _, _, spec, timeline, command, _ in seen[1:-1]:
        assert Spec.parse(spec).budget == parse_bytes(re.search(r"--budget (\d+[MG]iB)", command)[1])
        assert f"budget {shown}" in timeline
    assert statistics.median(milliseconds for *_, milliseconds in seen) < 300
    assert browser.complaints() == []
    assert {url.partition("#")[0] for url in browser.requested()} == {report.as_uri()}


@pytest.mark.parametrize("clipboard", [True, False], ids=["clipboard", "without"])
def test_what_is_copied_from_the_report_is_a_spec(clipboard, browser, report):
    browser.open(report.as_uri())
    browser.wait(lambda: drawn(browser))
    if not clipboard:
        browser.driver.execute_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    stop = 3 if clipboard else 5
    browser.slide("#budget", stop)
    button = browser.find("button[data-of=spec]")
    button.click()
    browser.wait(lambda: button.text == "Copied")
    copied = browser.clipboard()
    assert copied == browser.text("#spec")
    assert Spec.parse(copied).policy == "budget"
    button = browser.find("button[data-of=arguments]")
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)  # not under the slider
    button.click()
    browser.wait(lambda: button.text == "Copied")
    written = yaml.safe_load(browser.clipboard())
    assert Spec.parse(written["gradient_checkpointing_kwargs"]) == Spec.parse(copied)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_can_be_read(width, dark, browser, report):
    browser.open(report.as_uri(), width, dark)
    browser.wait(lambda: drawn(browser))
    assert not browser.too_wide()
    for stop in (0, 4):
        browser.slide("#budget", stop)
        contrasts = browser.driver.execute_script(CONTRAST, TEXTS)
        assert len(contrasts) > 25
        assert min(contrasts) > 4.5


def test_a_report_has_nothing_of_other_places(report):
    text = report.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.https?:", text)
    assert report.stat().st_size < 8 * 2**20


def test_plotly_knows_every_field_of_the_figures(report):
    import plotly.graph_objects as graphs

    data = re.search(r'<script id="stops" type="application/json">(.*?)</script>', report.read_text(), re.DOTALL)[1]
    for stop in json.loads(data):
        for name in ("timeline", "frontier"):
            graphs.Figure(stop[name])  # raises for unknown fields


# --- the app ----------------------------------------------------------------------------------------------------------


def opened(browser, served, **window):
    """Open the app, and switch to the report in its frame."""
    browser.open(served, **window)
    browser.look_into("#hf-report iframe", 120)
    browser.wait(lambda: drawn(browser))


FITS = "return Math.abs(document.body.offsetHeight - frameElement.clientHeight) <= 1"


def test_the_app_answers_with_a_report(browser, served):
    opened(browser, served)
    assert browser.text("#summary").strip().startswith("✓ Fits: ")
    assert browser.text(".hf-question").startswith("mini-gpt2: every weight")
    last = int(browser.find("#budget").get_attribute("max"))
    seen, milliseconds = [], []
    for stop in range(last + 1):
        milliseconds.append(browser.slide("#budget", stop))
        seen.append((browser.text("#shown"), browser.text("#command"), browser.text("#spec")))
        browser.wait(lambda: browser.driver.execute_script(FITS), 5)  # the frame does not scroll
        assert room_for_figures(browser) == {HEIGHT}
    assert len(set(seen)) == last + 1
    assert max(milliseconds) < 300
    budget = Spec.parse(seen[last // 2][2]).budget
    assert f"--budget {exact_size(budget)}" in seen[last // 2][1]
    assert browser.complaints() == []
    requested = browser.requested()
    assert len(requested) > 20
    assert [url for url in requested if not re.match(r"(http|ws)://127\.0\.0\.1:7869/", url)] == []


def test_what_is_copied_from_the_app_is_a_spec(browser, served):
    opened(browser, served)
    browser.slide("#budget", 7)
    button = browser.find("button[data-of=spec]")
    browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    browser.wait(lambda: button.text == "Copied")
    found = browser.clipboard()
    assert found == browser.text("#spec")
    assert Spec.parse(found).policy == "budget"


def typed(browser, selector, text):
    field = browser.find(f"{selector} input")
    browser.driver.execute_script("arguments[0].select()", field)
    field.send_keys(str(text), "\t")


def test_wrong_fields_get_the_words_of_the_command_line(browser, served):
    opened(browser, served)
    browser.driver.switch_to.default_content()
    typed(browser, "#hf-batch", 0)
    browser.find("#hf-plan").click()
    browser.wait(lambda: "batch must be at least 1, but is 0 instead." in browser.text("#hf-refused"))
    assert not browser.driver.execute_script("return document.querySelector('#hf-report iframe')?.checkVisibility()")
    typed(browser, "#hf-batch", 8)
    typed(browser, "#hf-model", "no such model")
    browser.find("#hf-plan").click()
    browser.wait(lambda: "cannot read a model's config from 'no such model'" in browser.text("#hf-refused"))
    assert "Traceback" not in browser.text("body")
    typed(browser, "#hf-model", "mini-gpt2")
    browser.find("#hf-plan").click()
    browser.look_into("#hf-report iframe", 120)
    browser.wait(lambda: "batch 8 x 1024 tokens" in browser.text(".hf-question"))
    assert browser.text(".hf-question").startswith("mini-gpt2: every weight")


def test_a_budget_that_is_asked_for_comes_first(browser, served):
    opened(browser, served)
    browser.driver.switch_to.default_content()
    browser.find("#hf-more button").click()
    browser.wait(lambda: browser.find("#hf-budget textarea, #hf-budget input").is_displayed())
    field = browser.find("#hf-budget textarea, #hf-budget input")
    field.send_keys("twenty", "\t")
    browser.find("#hf-plan").click()
    browser.wait(lambda: "'twenty'" in browser.text("#hf-refused"))
    browser.driver.execute_script("arguments[0].select()", field)
    field.send_keys("1200MiB", "\t")
    browser.find("#hf-plan").click()
    browser.look_into("#hf-report iframe", 120)
    browser.wait(lambda: browser.text("#shown") == "1.172 GiB")
    assert Spec.parse(browser.text("#spec")).budget == 1200 * 2**20


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_app_can_be_read(width, dark, browser, served):
    opened(browser, served, width=width, dark=dark)
    assert not browser.too_wide()
    contrasts = browser.driver.execute_script(CONTRAST, TEXTS)
    assert len(contrasts) > 25
    assert min(contrasts) > 4.5
    brightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((v) => v < 90)"
    assert browser.driver.execute_script(brightness) is dark
    browser.driver.switch_to.default_content()
    assert not browser.too_wide()
    assert browser.driver.execute_script("return !!document.querySelector('.dark')") is dark


# --- the Space --------------------------------------------------------------------------------------------------------


def parts(blocks):
    return [(type(part).__name__, part.elem_id, getattr(part, "label", None)) for part in blocks.blocks.values()]


def test_the_space_is_the_app():
    from hf_ckpt.cli import app

    found = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
    space = importlib.util.module_from_spec(found)
    found.loader.exec_module(space)
    assert parts(space.demo) == parts(app.build()) != []
