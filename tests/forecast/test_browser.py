"""The page of `hf-ckpt app` in a real browser, as in CI."""

import re

import pytest

from hf_ckpt.cli import app
from hf_ckpt.units import GIB, exact_size

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from helpers.browser import Browser

    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.driver.quit()


@pytest.fixture(scope="module")
def served():
    """The address of the page, which starts with a small model."""
    page = app.build("mini-gpt2")
    page.launch(server_port=7869, prevent_thread_lock=True, quiet=True, **app.LOOK)
    yield page.local_url
    page.close()


def test_the_page_answers_and_refuses_without_a_network(browser, served):
    browser.open(served)
    browser.wait(lambda: "Fits: " in browser.text("#hf-answer"), 120)
    browser.wait(lambda: browser.text("#hf-figure .js-plotly-plot"), 60)
    field = browser.find("#hf-slider input[type=number]")
    browser.driver.execute_script("arguments[0].select()", field)
    field.send_keys("1.25", "\t")
    browser.wait(lambda: f"--budget {exact_size(round(1.25 * GIB))}" in browser.text("#hf-command"))
    assert "gradient_checkpointing_kwargs" in browser.text("#hf-arguments")
    for value, told in (("4", "--batch 4"), ("0", "Batch: must be a whole number")):
        field = browser.find("#hf-batch input, #hf-batch textarea")
        browser.driver.execute_script("arguments[0].select()", field)
        field.send_keys(value, "\t")
        browser.find("#hf-plan").click()
        browser.wait(lambda told=told: told in browser.text("#hf-command") + browser.text("body"))
    assert [url for url in browser.requested() if not re.match(r"(http|ws)://127\.0\.0\.1:7869/", url)] == []


def test_a_link_opens_filled_and_answered_and_a_row_fills_the_form(browser, served):
    """What is asked is in the address, which another reader opens."""
    browser.open(f"{served}?model=mini-gpt2&batch=16&tokens=1024&device=4080&budget=400MiB")
    browser.wait(lambda: "Does not fit: " in browser.text("#hf-answer"), 120)
    value = "return document.querySelector(arguments[0]).value"
    field = "#hf-tokens input, #hf-tokens textarea"
    assert browser.driver.execute_script(value, field) == "1024"
    cell = "#hf-rows [role=gridcell][data-row='0'][data-col='1']"

    def options():
        # Gradio builds the cells of a table that is in view, and the figure above moves it.
        browser.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", browser.find("#hf-rows"))
        return browser.text(cell).strip()

    browser.wait(lambda: options().startswith("--batch "))
    browser.wait(lambda: browser.find(cell).click() or True)
    _, batch, _, accumulation = options().split()
    browser.wait(lambda: browser.driver.execute_script(value, "#hf-batch input, #hf-batch textarea") == batch)
    browser.wait(lambda: f"batch={batch}&" in browser.driver.current_url)
    assert f"accumulation={accumulation}&" in browser.driver.current_url
    browser.find("#hf-plan").click()
    browser.wait(lambda: "Fits: " in browser.text("#hf-answer"), 120)
    browser.open(browser.driver.current_url)
    browser.wait(lambda: "Fits: " in browser.text("#hf-answer"), 120)
    assert browser.driver.execute_script(value, "#hf-batch input, #hf-batch textarea") == batch
