"""The report of `hf-ckpt plan --html` and of `hf-ckpt app`: plans for many budgets, and a slider between them."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from hf_ckpt.cli.page import STYLE, Answer, answer_of, blocks_html, command_of, question_of, stops_of, summary_html
from hf_ckpt.cli.page_figures import HEIGHT, Line, frontier_figure, keeping_all, legend_html, timeline_figure
from hf_ckpt.errors import MissingDependencyError
from hf_ckpt.spec.files import write_text
from hf_ckpt.units import GIB

if TYPE_CHECKING:
    from hf_ckpt.planner.forecast import Forecast, Request

SUFFIXES = (".html",)
"""What the path of a report may end in."""


def import_plotly(purpose: str) -> Any:
    """Return the package `plotly`. Raises `MissingDependencyError` without it, which names the purpose."""
    try:
        import plotly.offline
    except ImportError as error:
        raise MissingDependencyError("plotly", purpose, "pip install 'hf-ckpt[app]'") from error
    return plotly


def save_report(found: Forecast, path: Path, asked: Request) -> None:
    """Write a report into a file that holds everything, and loads nothing from elsewhere.

    Args:
        found: as for `report_of`.
        path: of the file, which ends in `.html`.
        asked: as for `report_of`.

    Raises `MissingDependencyError` without plotly, and `FileError` where the file cannot be written.
    """
    plotly = import_plotly("a report in HTML").offline.get_plotlyjs()
    write_text(path, report_of(found, f"<script>{plotly}</script>", asked))


def report_of(found: Forecast, plotly: str, asked: Request) -> str:
    """The fastest plans for budgets from the lowest peak to that of no checkpointing, as a page of HTML.

    A frame around the page gets the height that the page needs.

    Args:
        found: the forecast for the budget that the report opens with. It has a frontier.
        plotly: a script element with plotly.js.
        asked: the request of the forecast, for the command that is shown.
    """
    stops = stops_of(found)
    first = max((stop for stop in stops if stop <= found.budget_bytes), default=stops[0])
    kept = keeping_all(found)
    shown = [_stop(answer_of(found, stop), found, kept, command_of(found.workload, asked, stop)) for stop in stops]
    return Template(_PAGE).substitute(
        title=escape(f"Plan for {found.workload.model}"),
        question=escape(question_of(found)),
        style=STYLE + _STYLE,
        plotly=plotly,
        data=_script(shown),
        start=stops.index(max(first, stops[1])),
        last=len(stops) - 1,
        notes="".join(f"<li>{escape(note)}</li>" for note in found.costs.notes),
        script=_SCRIPT,
    )


def _stop(answer: Answer, found: Forecast, kept: Line, command: str) -> dict[str, Any]:
    """What the page shows at one place of the slider, as values that JSON can hold."""
    drawn, budget, fits = answer.found or found, answer.budget_bytes, answer.found is not None
    figures = timeline_figure(drawn, budget, kept, fits=fits), frontier_figure(drawn, budget, fits=fits)
    return {
        "budget": f"{budget / GIB:.4g} GiB",
        "summary": summary_html(answer),
        "blocks": blocks_html(answer),
        "lines": {"spec": answer.spec, "arguments": answer.arguments, "model": answer.model, "command": command},
        "timeline": figures[0],
        "frontier": figures[1],
        "legends": [legend_html(figure) for figure in figures],
    }


def _script(value: Any) -> str:
    """JSON that cannot end the script element which it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")


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
<footer><ul>$notes</ul>Times are predicted from data sheets, and good for comparing.
Leave a margin for memory that no tensor holds.</footer>
</main>
<script id="stops" type="application/json">$data</script>
<script>$script</script>
</body>
</html>
"""
