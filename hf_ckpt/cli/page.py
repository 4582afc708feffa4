"""What the page of a plan shows for one budget, as texts, numbers and HTML. Both `--html` and `hf-ckpt app` show it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from hf_ckpt.cli.plan_picture import levels_of
from hf_ckpt.errors import InfeasibleError
from hf_ckpt.spec.actions import ACTIONS, WIDTHS, Action, colour_of
from hf_ckpt.spec.plan import spans
from hf_ckpt.units import GIB, format_bytes, format_ratio, format_seconds

if TYPE_CHECKING:
    from hf_ckpt.planner.alternatives import Alternative
    from hf_ckpt.planner.answers import Setting
    from hf_ckpt.planner.forecast import Forecast, Request
    from hf_ckpt.prediction.workload import Workload

STOPS = 32
"""Budgets of a report, from just below the lowest peak to that of no checkpointing."""
SLICES = 160
"""Parts of a step in a picture of its memory; of each, the moment with the most bytes is drawn."""
MIB = 2**20
_CLASSES = {
    "linear": "linear layers",
    "attention": "attention",
    "norm": "norms",
    "elementwise": "other cheap operations",
    **{width: f"{width} linear layers" for width in WIDTHS},
}
"""Classes of operations that `save` names, in words."""
OPTIONS = {"tokens": "seq", "target_tokens": "target_seq", "accumulation": "accum"}
"""Fields of `Workload` -> the options of `hf-ckpt plan` that have other names."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A way to train, beside others."""

    name: str
    peak_bytes: int
    step_seconds: float
    tokens_per_second: float | None
    fits: bool


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the page shows for one budget."""

    budget_bytes: int
    headline: str
    """Whether it fits, in a sentence."""
    found: Forecast | None
    """The forecast under this budget; None where no plan fits."""
    rows: tuple[Row, ...] = ()
    """The plan, no checkpointing, and `full`."""
    reasons: tuple[str, ...] = ()
    """What fills the memory and what would lower it, where no plan fits."""
    arguments: str = ""
    """Lines of YAML for the training arguments."""
    model: str = ""
    """Lines of Python for the model."""
    spec: str = ""
    """The spec, as JSON."""

    @property
    def fits(self) -> bool:
        """Whether a plan fits into the budget, and into the memory of the device."""
        memory = self.found.device.memory_bytes if self.found else None
        return self.found is not None and (memory is None or self.found.peak_bytes <= memory)


def answer_of(found: Forecast, budget_bytes: int) -> Answer:
    """What the page shows for another budget.

    Args:
        found: the forecast for any budget.
        budget_bytes: the peak that is allowed.
    """
    from hf_ckpt.planner.answers import arguments_of, headline, model_lines, yaml_lines

    try:
        found = found.within(budget_bytes)
    except InfeasibleError as error:
        return Answer(
            budget_bytes,
            headline(error.floor_bytes, budget_bytes, found.device, None),
            None,
            _usual_rows(found, budget_bytes),
            (*parts_of(error), *error.hints),
        )
    prediction = found.plan.prediction
    assert prediction is not None
    speed = prediction.tokens_per_second
    own = Row("this plan", prediction.peak_bytes, prediction.step_seconds, speed, fits=True)
    return Answer(
        budget_bytes,
        found.answer,
        found,
        (own, *_usual_rows(found, budget_bytes)),
        arguments="\n".join(yaml_lines(arguments_of(found.workload, found.spec))),
        model="\n".join(model_lines(found.workload, found.spec)),
        spec=json.dumps(found.spec),
    )


def _usual_rows(found: Forecast, budget_bytes: int) -> tuple[Row, ...]:
    """No checkpointing and `full`, as rows."""
    prediction = found.plan.prediction
    assert prediction is not None
    names = {"none": "no checkpointing", "full": "full on every block"}
    return tuple(
        Row(
            names[option.name],
            option.peak_bytes,
            option.step_seconds,
            prediction.tokens / option.step_seconds if prediction.tokens else None,
            fits=option.peak_bytes <= budget_bytes,
        )
        for option in found.usual
        if option.name in names
    )


def parts_of(error: InfeasibleError) -> list[str]:
    """What fills the lowest peak, in words."""
    return [f"{format_bytes(size)} {name}" for name, size in error.parts.items() if size]


def range_of(found: Forecast) -> tuple[int, int]:
    """The budgets, in whole MiB as bytes, between which plans differ: from just below the lowest peak, which nothing
    fits into, to that of no checkpointing, or to the memory of the device where that is less."""
    floor, memory = found.floor_bytes, found.device.memory_bytes
    high = max(floor, option_named(found, "none").peak_bytes)
    high = -(-high // MIB) * MIB
    high = min(high, memory // MIB * MIB) if memory and memory > floor else high
    low = floor - max((high - floor) // STOPS, floor // 50)
    return max(low // MIB, 1) * MIB, high


def stops_of(found: Forecast, count: int = STOPS) -> list[int]:
    """The budgets of a report in bytes, growing: even steps over `range_of`, the lowest that a plan fits into, and the
    budget that was asked for.

    Args:
        found: the forecast for the budget that was asked for.
        count: of even steps.
    """
    low, high = range_of(found)
    least = -(-found.floor_bytes // MIB) * MIB
    even = [(least + (high - least) * number // (count - 1)) // MIB * MIB for number in range(1, count)]
    asked = min(max(found.budget_bytes // MIB * MIB, least), high)
    return sorted({low, least, asked, *even})


def option_named(found: Forecast, name: str) -> Alternative:
    """One of transformers' own options, by its name in tables. Raises `StopIteration` where there is none."""
    return next(option for option in found.usual if option.name == name)


def question_of(found: Forecast) -> str:
    """What was asked, in a line."""
    workload = found.workload
    tuning = "every weight" if workload.lora is None else f"LoRA r={workload.lora}"
    tuning += f" on a base in {workload.bits} bits" if workload.bits else ""
    micro = f", {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    micro += f", {workload.trainer.upper()} of TRL" if workload.trainer else ""
    micro += ", packed" if workload.packing else ""
    micro += f", {workload.ranks} ranks ({workload.parallel})" if workload.ranks > 1 else ""
    return (
        f"{workload.model}, training {tuning}, {workload.dtype}, {workload.optimizer}, "
        f"batch {workload.batch} x {workload.tokens} tokens{micro}, {found.device.title}"
    )


def command_of(workload: Workload, asked: Request, budget_bytes: int) -> str:
    """The `hf-ckpt plan` that answers the same question.

    Args:
        workload: what is trained.
        asked: the request, of which the budget does not count.
        budget_bytes: the peak that is allowed.
    """
    words = ["hf-ckpt", "plan", workload.model]
    for field in dataclasses.fields(workload):
        value = getattr(workload, field.name)
        if field.name in ("model", "double_quant") or (
            value == field.default and field.name not in ("batch", "tokens")
        ):
            continue
        option = "--" + OPTIONS.get(field.name, field.name).replace("_", "-")
        listed = ",".join(value) if isinstance(value, tuple) else str(value)
        words += [option] if value is True else [option, listed]
    words += [] if workload.double_quant else ["--no-double-quant"]
    words += ["--device", asked.device] if asked.device else []
    words += ["--head", str(asked.head)] if asked.head != "full" else []
    words += ["--mlp", str(asked.mlp)] if asked.mlp != "full" else []
    words += ["--host-budget", asked.host_budget] if asked.host_budget else []
    words += ["--compile"] if asked.compiled else []
    return shlex.join([*words, "--budget", f"{budget_bytes // MIB}MiB"])


def slices_of(found: Forecast, slices: int = SLICES) -> list[tuple[float, tuple[int, ...]]]:
    """The memory of a step under the plan, as `levels_of`, but the moment with the most bytes of each part of the step.

    Args:
        found: whose plan is drawn.
        slices: how many parts of the same time.
    """
    places = list(levels_of(found))
    end = places[-1][0] or 1.0
    most: dict[int, tuple[float, tuple[int, ...]]] = {}
    for seconds, sizes in places:
        number = min(int(seconds / end * slices), slices - 1)
        if number not in most or sum(sizes) >= sum(most[number][1]):
            most[number] = seconds, sizes
    return [*most.values(), places[-1]]


# --- as HTML ----------------------------------------------------------------------------------------------------------


def summary_html(answer: Answer) -> str:
    """Whether it fits, and the peak and the time of a step beside those of other ways to train."""
    look, sign = ("fits", "&#10003;") if answer.fits else ("misfit", "&#10007;")
    text = f'<p class="hf-answer hf-{look}" role="status"><span aria-hidden="true">{sign}</span> '
    text += f"{escape(answer.headline)}</p>"
    if answer.reasons:
        text += "<p>What fills it, and what would lower it:</p>" + _list(answer.reasons)
    return text + _table(answer.rows)


def blocks_html(answer: Answer) -> str:
    """What each block does: a cell for every block, and below it the actions in words."""
    if answer.found is None:
        return "<p>No plan fits into this budget.</p>"
    text = ""
    for stack, pairs in answer.found.plan.stacks().items():
        chosen: dict[Action, list[int]] = {}
        for block, action in pairs:
            chosen.setdefault(dataclasses.replace(action, segment=None), []).append(block.index)
        cells = "".join(
            f'<i style="background:{css_colour(colour_of(dataclasses.replace(action, segment=None)))}" '
            f'title="{escape(f"block {block.index}: {action}")}"></i>'
            for block, action in pairs
        )
        kinds = ", ".join(dict.fromkeys(block.kind for block, _ in pairs))
        text += f"<h4>{escape(stack)}: {len(pairs)} x {escape(kinds)}, first to last</h4>"
        text += f'<div class="hf-strip" role="img" aria-label="actions of the blocks of {escape(stack)}">{cells}</div>'
        text += '<ul class="hf-actions">' + "".join(_action(*item) for item in chosen.items()) + "</ul>"
    plan = answer.found.plan
    chunks = [f"The {name} runs in chunks." for name, how in _in_chunks(plan.head, plan.mlp) if how != "full"]
    return text + "".join(f"<p>{sentence}</p>" for sentence in chunks)


def nearest_html(headline: str, parts: Sequence[str], settings: Sequence[Setting], hints: Sequence[str]) -> str:
    """That nothing fits, what fills the memory, and the settings nearest to those asked for that do fit.

    Args:
        headline: that it does not fit, in a sentence.
        parts: what fills the lowest peak.
        settings: that fit; where there are none, `hints` are shown.
        hints: what would lower the peak.
    """
    text = (
        f'<p class="hf-answer hf-misfit" role="status"><span aria-hidden="true">&#10007;</span> {escape(headline)}</p>'
    )
    text += "<p>What fills it:</p>" + _list(parts)
    if not settings:
        return text + "<p>Nothing near it fits, either:</p>" + _list(hints)
    rows = "".join(
        f"<tr><td>{escape(setting.name)}</td><td><code>{escape(setting.options)}</code></td>"
        f"<td>{format_bytes(setting.peak_bytes)}</td><td>{_speed(setting.tokens_per_second)}</td></tr>"
        for setting in settings
    )
    return (
        text + "<p>What fits, with one change or two:</p>"
        '<div class="hf-scroll"><table class="hf-table"><tr><th>change</th><th>options of hf-ckpt plan</th>'
        f"<th>peak</th><th>tokens/s</th></tr>{rows}</table></div>"
    )


def error_html(message: str) -> str:
    """An error, as the command line prints it."""
    return f'<pre class="hf-error" role="alert">{escape(message)}</pre>'


def _in_chunks(head: int | str, mlp: int | str) -> tuple[tuple[str, int | str], ...]:
    return (("head", head), ("feed-forward of each block", mlp))


def _action(action: Action, indices: list[int]) -> str:
    where = " in host memory" if action.moved else ""
    keeps = ACTIONS[action.kind].keeps
    if action.save:
        saved = ", ".join(_CLASSES[name] for name in action.save)
        keeps = f"the results of {saved}{where}, and makes the others again in backward"
    return (
        f'<li><i style="background:{css_colour(colour_of(action))}"></i><span><b>{escape(str(action))}</b>: '
        f"block{'s' if len(indices) > 1 else ''} {spans(indices)}<br>"
        f'<span class="hf-quiet">keeps {escape(keeps)}</span></span></li>'
    )


def css_colour(colour: str) -> str:
    """A colour as CSS takes it; matplotlib's greys are numbers."""
    return colour if colour.startswith("#") else "#808080"


def _list(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _speed(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second else "-"


def _table(rows: Sequence[Row]) -> str:
    """The ways to train as a table, with the peak and the time of each over those of no checkpointing."""
    base = next(row for row in rows if row.name == "no checkpointing")
    lines = ""
    for row in rows:
        peak, step = row.peak_bytes / base.peak_bytes, row.step_seconds / base.step_seconds
        cells = (
            f"{row.peak_bytes / GIB:.2f} GiB <span>({format_ratio(peak)})</span>",
            f"{format_seconds(row.step_seconds)} <span>({format_ratio(step)})</span>",
            _speed(row.tokens_per_second),
            "yes" if row.fits else "no",
        )
        lines += f"<tr{' class=hf-own' if row.name == 'this plan' else ''}><th scope=row>{row.name}</th>"
        lines += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    heads = ("", "peak memory", "step time", "tokens/s", "fits")
    head = "".join(f"<th scope=col>{name}</th>" for name in heads)
    return (
        f'<div class="hf-scroll"><table class="hf-table"><tr>{head}</tr>{lines}</table></div>'
        '<p class="hf-quiet">In brackets: as a share of no checkpointing. All figures are predicted.</p>'
    )


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
.hf-table .hf-own th, .hf-table .hf-own td { font-weight: 700; }
.hf-strip { display: flex; gap: 1px; height: 26px; margin: .2rem 0 .5rem; }
.hf-strip i { flex: 1 1 0; border-radius: 2px; min-width: 2px; }
.hf-actions { list-style: none; margin: 0 0 .6rem; padding: 0; }
.hf-actions li { display: flex; gap: .5rem; margin: .25rem 0; padding: 0; }
.hf-actions li > i { flex: 0 0 14px; height: 14px; border-radius: 3px; margin-top: .28rem; }
.hf-quiet { opacity: .8; font-size: .9em; margin: .2rem 0; }
.hf-table td span { opacity: .8; font-weight: 400; }
.hf-legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .87rem; margin: .2rem 0 .4rem; padding: 0; }
.hf-legend li { display: flex; align-items: center; gap: .35rem; list-style: none; margin: 0; padding: 0; }
.hf-legend b { font-size: 1.05rem; line-height: 1; width: 14px; text-align: center; font-weight: 700; }
h4 { margin: .5rem 0 .2rem; font-weight: 600; }
@media (max-width: 640px) {
  .hf-table th, .hf-table td { padding: .25rem .15rem; font-size: .82rem; }
  .hf-table td span { display: block; }
  .hf-table th:nth-child(4), .hf-table td:nth-child(4) { display: none; }
  .hf-answer { font-size: 1.1rem; }
}
@media (prefers-color-scheme: dark) {
  .hf-report .hf-answer.hf-fits { background: #12351f; color: #c6f0d2; }
  .hf-report .hf-answer.hf-misfit { background: #43171a; color: #fbd5d5; }
}
.dark .hf-answer.hf-fits { background: #12351f; color: #c6f0d2; }
.dark .hf-answer.hf-misfit, .dark .hf-error { background: #43171a; color: #fbd5d5; }
"""
"""Styles of all that the functions above return. `.dark` is what Gradio sets, and `.hf-report` what a report does."""
