"""The report of `hf-ckpt plan --html` and of `hf-ckpt app`: answers for many budgets, and a slider between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hf_ckpt.errors import InfeasibleError, MissingDependencyError
from hf_ckpt.forecast.answers import Answer, Table, answer_of, comparison_table, misfit_of, nearest_table
from hf_ckpt.forecast.figures import (
    HEIGHT,
    Line,
    css_colour,
    frontier_figure,
    keeping_all,
    legend_html,
    option_named,
    timeline_figure,
)
from hf_ckpt.forecast.words import assumed
from hf_ckpt.prediction.question import command_of
from hf_ckpt.spec.actions import ACTIONS, Action, colour_of
from hf_ckpt.spec.files import write_text
from hf_ckpt.spec.plan import spans
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    from hf_ckpt.forecast.nearest import Setting
    from hf_ckpt.forecast.record import Forecast

SUFFIXES = (".html",)
"""Suffixes that the path of a report may have."""
STOPS = 32
"""Budgets of a report, from just below the lowest peak to that of no checkpointing."""
MIB = 2**20


def import_plotly(purpose: str) -> Any:
    """Return the package `plotly`. Without it, raises `MissingDependencyError`, which names the purpose."""
    try:
        import plotly.offline
    except ImportError as error:
        raise MissingDependencyError("plotly", purpose, "pip install plotly") from error
    return plotly


def save_report(forecast: Forecast, path: Path) -> None:
    """Write a report into a self-contained file.

    Args:
        forecast: the forecast, with a frontier.
        path: of the file, which ends in `.html`.

    Raises `MissingDependencyError` without plotly, and `FileError` if the file cannot be written.
    """
    plotly = import_plotly("a report in HTML").offline.get_plotlyjs()
    write_text(path, report_of(forecast, f"<script>{plotly}</script>"))


def report_of(forecast: Forecast, plotly: str) -> str:
    """The fastest plans for budgets from the lowest peak to that of no checkpointing, as an HTML page.

    A frame around the page is resized to the page's height.

    Args:
        forecast: the forecast for the report's initial budget. It has a frontier.
        plotly: a script element with plotly.js.
    """
    stops = stops_of(forecast)
    first = max((stop for stop in stops if stop <= forecast.budget_bytes), default=stops[0])
    kept = keeping_all(forecast)
    return Template(_PAGE).substitute(
        title=escape(f"Plan for {forecast.asked.model}"),
        question=escape(assumed(forecast.workload, forecast.device)),
        style=STYLE + _STYLE,
        plotly=plotly,
        data=_script([stop_of(forecast, stop, kept) for stop in stops]),
        start=stops.index(max(first, stops[1])),
        last=len(stops) - 1,
        notes="".join(f"<li>{escape(note)}</li>" for note in forecast.costs.notes),
        script=_SCRIPT,
    )


def stop_of(forecast: Forecast, budget_bytes: int, kept: Line) -> dict[str, Any]:
    """What the page shows at one position of the slider, as a dict for JSON.

    Args:
        forecast: the forecast for any budget.
        budget_bytes: the peak that is allowed.
        kept: the result of `keeping_all`.
    """
    lines = dict.fromkeys(("spec", "arguments", "model"), "")
    try:
        drawn, fits = forecast.within(budget_bytes), True
        answer = answer_of(drawn)
        (_, arguments), (_, model) = answer.copies
        lines = {"spec": json.dumps(drawn.spec), "arguments": arguments, "model": model}
    except InfeasibleError as error:
        drawn, fits = forecast, False
        answer = misfit_of(error, forecast.workload, forecast.device)
        answer = dataclasses.replace(answer, tables=(comparison_table(forecast, budget_bytes, plan=False),))
    asked = dataclasses.replace(forecast.asked, budget=budget_bytes // MIB * MIB, frontier=False)
    figures = timeline_figure(drawn, budget_bytes, kept, fits=fits), frontier_figure(drawn, budget_bytes, fits=fits)
    return {
        "budget": f"{budget_bytes / GIB:.4g} GiB",
        "summary": headline_html(answer) + ("" if fits else _list(answer.remarks)),
        "tables": "".join(map(table_html, answer.tables)),
        "blocks": blocks_html(drawn) if fits else "<p>No plan fits into this budget.</p>",
        "lines": {**lines, "command": command_of(asked)},
        "timeline": figures[0],
        "frontier": figures[1],
        "legends": [legend_html(figure) for figure in figures],
    }


def range_of(forecast: Forecast) -> tuple[int, int]:
    """The smallest and largest budget of a report, in bytes, rounded to MiB: from just below the lowest peak, where
    nothing fits, to that of no checkpointing, or to the device's memory if that is less."""
    floor, memory = forecast.floor_bytes, forecast.device.memory_bytes
    high = max(floor, option_named(forecast, "none").peak_bytes)
    high = -(-high // MIB) * MIB
    high = min(high, memory // MIB * MIB) if memory and memory > floor else high
    low = floor - max((high - floor) // STOPS, floor // 50)
    return max(low // MIB, 1) * MIB, high


def stops_of(forecast: Forecast, count: int = STOPS) -> list[int]:
    """The budgets of a report in bytes, in ascending order: even steps over `range_of`, the lowest that fits a plan,
    and the budget that was asked for.

    Args:
        forecast: the forecast for the budget that was asked for.
        count: the number of even steps.
    """
    low, high = range_of(forecast)
    least = -(-forecast.floor_bytes // MIB) * MIB
    even = [(least + (high - least) * number // (count - 1)) // MIB * MIB for number in range(1, count)]
    asked = min(max(forecast.budget_bytes // MIB * MIB, least), high)
    return sorted({low, least, asked, *even})


def headline_html(answer: Answer) -> str:
    """Whether it fits."""
    look, sign = ("fits", "&#10003;") if answer.fits else ("misfit", "&#10007;")
    text = f'<p class="hf-answer hf-{look}" role="status"><span aria-hidden="true">{sign}</span> '
    return f"{text}{escape(answer.headline)}</p>"


def misfit_html(answer: Answer, settings: Sequence[Setting], error: InfeasibleError) -> str:
    """A message that nothing fits, what fills the memory, and the settings that fit, or else what would lower it."""
    text = f'{headline_html(answer)}<p class="hf-quiet">{escape(answer.assumed)}</p>{_list(answer.remarks)}'
    if settings:
        return text + table_html(nearest_table(settings, error.budget_bytes))
    return text + "<p>Nothing near it fits, either:</p>" + _list(error.hints)


def error_html(message: str) -> str:
    """An error, as the command line prints it."""
    return f'<pre class="hf-error" role="alert">{escape(message)}</pre>'


def table_html(table: Table) -> str:
    """A table of an answer."""
    heads = "".join(f"<th scope=col>{escape(head)}</th>" for head in table.heads)
    rows = ""
    for first, *cells in table.rows:
        rows += f"<tr{' class=hf-own' if first == 'this plan' else ''}><th scope=row>{escape(first)}</th>"
        rows += "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    caption = f"<caption>{escape(table.title)}</caption>"
    return f'<div class="hf-scroll"><table class="hf-table">{caption}<tr>{heads}</tr>{rows}</table></div>'


def blocks_html(forecast: Forecast) -> str:
    """What each block does: a cell for every block, and below it the actions in words."""
    text = ""
    for stack, pairs in forecast.plan.stacks().items():
        chosen: dict[Action, list[int]] = {}
        cells = ""
        for block, action in pairs:
            plain = dataclasses.replace(action, segment=None)
            chosen.setdefault(plain, []).append(block.index)
            cells += f'<i style="{_background(plain)}" title="{escape(f"block {block.index}: {action}")}"></i>'
        kinds = ", ".join(dict.fromkeys(block.kind for block, _ in pairs))
        text += f"<h4>{escape(stack)}: {len(pairs)} x {escape(kinds)}, first to last</h4>"
        text += f'<div class="hf-strip" role="img" aria-label="actions of the blocks of {escape(stack)}">{cells}</div>'
        text += '<ul class="hf-actions">' + "".join(_action(*item) for item in chosen.items()) + "</ul>"
    for name, how in (("head", forecast.plan.head), ("feed-forward of each block", forecast.plan.mlp)):
        text += f"<p>The {name} runs in chunks.</p>" if how != "full" else ""
    return text


def _action(action: Action, indices: list[int]) -> str:
    keeps = ACTIONS[action.kind].keeps
    if action.save:
        where = " in host memory" if action.moved else ""
        keeps = f"the results of {', '.join(action.save)} operations{where}, and recomputes the others in backward"
    return (
        f'<li><i style="{_background(action)}"></i><span><b>{escape(str(action))}</b>: '
        f"block{'s' if len(indices) > 1 else ''} {spans(indices)}<br>"
        f'<span class="hf-quiet">keeps {escape(keeps)}</span></span></li>'
    )


def _background(action: Action) -> str:
    return f"background:{css_colour(colour_of(action))}"


def _list(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _script(value: Any) -> str:
    """JSON that cannot end the script element that contains it."""
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")


STYLE = """
.hf-answer { font-size: 1.25rem; font-weight: 600; margin: 0 0 .6rem; padding: .5rem .8rem; border-radius: 6px; }
.hf-answer.hf-fits { background: #e3f3e8; color: #14532d; border-left: 5px solid #2f855a; }
.hf-answer.hf-misfit { background: #fdeaea; color: #7f1d1d; border-left: 5px solid #c53030; }
.hf-error { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .95rem; padding: .7rem .9rem; margin: 0;
  background: #fdeaea; color: #7f1d1d; border-left: 5px solid #c53030; border-radius: 6px; }
.hf-scroll { overflow-x: auto; }
.hf-table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: .2rem 0; }
.hf-table th, .hf-table td { padding: .3rem .6rem; border: 0; border-bottom: 1px solid rgba(128, 128, 128, .35); }
.hf-table td { text-align: right; white-space: nowrap; }
.hf-table th { text-align: right; font-weight: 500; }
.hf-table th:first-child, .hf-table td:first-child { text-align: left; }
.hf-table caption { text-align: left; opacity: .8; font-size: .9em; }
.hf-table .hf-own th, .hf-table .hf-own td { font-weight: 700; }
.hf-strip { display: flex; gap: 1px; height: 26px; margin: .2rem 0 .5rem; }
.hf-strip i { flex: 1 1 0; border-radius: 2px; min-width: 2px; }
.hf-actions { list-style: none; margin: 0 0 .6rem; padding: 0; }
.hf-actions li { display: flex; gap: .5rem; margin: .25rem 0; padding: 0; }
.hf-actions li > i { flex: 0 0 14px; height: 14px; border-radius: 3px; margin-top: .28rem; }
.hf-quiet { opacity: .8; font-size: .9em; margin: .2rem 0; }
.hf-legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .87rem; margin: .2rem 0 .4rem; padding: 0; }
.hf-legend li { display: flex; align-items: center; gap: .35rem; list-style: none; margin: 0; padding: 0; }
.hf-legend b { font-size: 1.05rem; line-height: 1; width: 14px; text-align: center; font-weight: 700; }
h4 { margin: .5rem 0 .2rem; font-weight: 600; }
@media (max-width: 640px) {
  .hf-table th, .hf-table td { padding: .25rem .15rem; font-size: .82rem; }
  .hf-answer { font-size: 1.1rem; }
}
@media (prefers-color-scheme: dark) {
  .hf-report .hf-answer.hf-fits { background: #12351f; color: #c6f0d2; }
  .hf-report .hf-answer.hf-misfit { background: #43171a; color: #fbd5d5; }
}
.dark .hf-answer.hf-fits { background: #12351f; color: #c6f0d2; }
.dark .hf-answer.hf-misfit, .dark .hf-error { background: #43171a; color: #fbd5d5; }
"""
"""Styles of everything that this module writes. Gradio sets `.dark`, and a report sets `.hf-report`."""
_STYLE = """
:root { color-scheme: light dark; --text: #1d2430; --quiet: #525c6b; --page: #ffffff; --box: #f4f5f7; --line: #d5d8dc; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8eaee; --quiet: #b3bac5; --page: #14171c; --box: #20252d; --line: #3a414c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 1rem 1.2rem 2rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.2rem 0 .3rem; }
.hf-question { color: var(--quiet); margin: 0 0 .8rem; }
.hf-budget { position: sticky; top: 0; z-index: 5; background: var(--page); padding: .5rem 0; margin-bottom: .6rem;
  border-bottom: 1px solid var(--line); display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; }
.hf-budget input { flex: 1 1 240px; accent-color: #c44e52; height: 1.6rem; margin: 0; }
.hf-budget output { font-weight: 700; min-width: 7rem; font-variant-numeric: tabular-nums; }
.hf-two { display: grid; grid-template-columns: 3fr 2fr; gap: 1.2rem; }
.hf-two > * { min-width: 0; }
.hf-copy { margin: .5rem 0; }
.hf-copy > div { display: flex; justify-content: space-between; align-items: center; gap: .5rem; }
.hf-copy pre { background: var(--box); border-radius: 6px; padding: .6rem .8rem; margin: .2rem 0 0; overflow-x: auto;
  font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.hf-copy button { font: inherit; font-size: .85rem; color: var(--text); background: var(--box); cursor: pointer;
  border: 1px solid var(--line); border-radius: 6px; padding: .1rem .7rem; }
footer { color: var(--quiet); font-size: .9rem; margin-top: 1.5rem; }
@media (max-width: 820px) { .hf-two { grid-template-columns: minmax(0, 1fr); } main { padding: .8rem; } }
"""

_SCRIPT = """
const stops = JSON.parse(document.getElementById("stops").textContent);
const slider = document.getElementById("budget");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const element = (name) => document.getElementById(name);
function draw(name, figure) {
  const text = getComputedStyle(document.body).color;
  const layout = {...figure.layout, font: {...figure.layout.font, color: text},
    hoverlabel: {bgcolor: dark.matches ? "#20252d" : "#ffffff", font: {color: text}}};
  Plotly.react(element(name), figure.data, layout, {displayModeBar: false, responsive: true});
}
function show() {
  const stop = stops[slider.value];
  element("shown").textContent = stop.budget;
  slider.setAttribute("aria-valuetext", stop.budget);
  element("summary").innerHTML = stop.summary;
  element("blocks").innerHTML = stop.blocks;
  element("tables").innerHTML = stop.tables;
  for (const [name, text] of Object.entries(stop.lines)) {
    element(name).textContent = text;
    element(name).closest(".hf-copy").hidden = !text;
  }
  element("timeline-legend").innerHTML = stop.legends[0];
  element("frontier-legend").innerHTML = stop.legends[1];
  draw("timeline", stop.timeline);
  draw("frontier", stop.frontier);
}
function copied(text) {  // where a page has no clipboard, as in some browsers for files
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done ? Promise.resolve() : Promise.reject();
}
for (const button of document.querySelectorAll(".hf-copy button")) {
  button.addEventListener("click", async () => {
    const text = element(button.dataset.of).textContent;
    try {
      await (navigator.clipboard ? navigator.clipboard.writeText(text).catch(() => copied(text)) : copied(text));
      button.textContent = "Copied";
    } catch { button.textContent = "Select it and press Ctrl+C"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
slider.addEventListener("input", show);
dark.addEventListener("change", show);
show();
const frame = window.frameElement;
if (frame) new ResizeObserver(() => { frame.style.height = document.body.offsetHeight + "px"; }).observe(document.body);
"""


def _copy(name: str, title: str) -> str:
    return (
        f'<div class="hf-copy"><div><span>{title}</span><button type="button" data-of="{name}" '
        f'aria-label="Copy: {title}">Copy</button></div><pre id="{name}"></pre></div>'
    )


_PAGE = f"""<!doctype html>
<html lang="en" class="hf-report">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
$plotly
</head>
<body>
<main>
<h1>$title</h1>
<p class="hf-question">$question</p>
<div class="hf-budget"><label for="budget">Memory that a step may take</label>
<input id="budget" type="range" min="0" max="$last" step="1" value="$start" autocomplete="off">
<output id="shown" for="budget"></output></div>
<div id="summary"></div>
<div class="hf-two">
<section><h2>Memory through one micro-step and the optimizer</h2><div id="timeline" style="height: {HEIGHT}px"></div>
<div id="timeline-legend"></div></section>
<section><h2>Step time against peak</h2><div id="frontier" style="height: {HEIGHT}px"></div>
<div id="frontier-legend"></div></section>
</div>
<div class="hf-two">
<section><h2>What to copy</h2>
{_copy("arguments", "Training arguments (YAML)")}
{_copy("spec", "The same policy as a spec (JSON)")}
{_copy("model", "With the model (Python)")}
{_copy("command", "This question on the command line")}
</section>
<section><h2>What each block does</h2><div id="blocks"></div></section>
</div>
<div id="tables"></div>
<footer><ul>$notes</ul>Times are predicted from data sheets, and good for comparing.
Leave a margin for memory that no tensor holds.</footer>
</main>
<script id="stops" type="application/json">$data</script>
<script>$script</script>
</body>
</html>
"""
