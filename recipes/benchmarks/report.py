"""Benchmarks as tables, on the terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import turns
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hf_ckpt.console import make_console
from hf_ckpt.units import format_bytes, format_percent, format_ratio, format_seconds

if TYPE_CHECKING:
    from compiling import CompilingBench
    from engines import EngineBench, EngineRow
    from figures import LargestBench, LargestRow, PeerBench, PeerCase, PeerRow
    from head import HeadBench
    from held import HeldBench
    from lengths import LengthsBench
    from overheads import OverheadsBench
    from rich.console import Console

    from hf_ckpt.prediction.workload import Workload

PEER_NAMES = (
    "way",
    "",
    "peak MiB",
    "error",
    "live",
    "taken",
    "step ms",
    "error",
    "of none",
    "spread",
    "tok/s",
    "first s",
    "grad.",
)
BUDGET_NAMES = ("budget", "MiB", "plan", "peak MiB", "of none", "fastest other", "peak MiB", "of none", "ratio")
ENGINE_NAMES = ("engine", "kept", "", "step", "", "spread", "gradients", "recomp.", "host", "of sac")
HELD_NAMES = ("model", "attention", "tuning", "saved", "none", "selective", "ratio", "at most")
MASKS_NAMES = ("model", "tuning", "masks", "packing", "step", "as they are", "ratio", "spread")
HEAD_NAMES = (
    "hidden",
    "type",
    "weight",
    "chunks",
    "peak",
    "of it its gradient",
    "smaller",
    "step",
    "of whole",
    "error",
)
COMPILING_NAMES = ("what is compiled", "blocks", "first step", "of a whole model's", "later step")
LENGTHS_NAMES = ("way", "peak", "free", "recomp.", "epoch", "of full", "of one plan", "planning", "gradients")
TUNING_NAMES = {"full": "full fine-tuning", "lora": "LoRA"}


# --- every way against every other ------------------------------------------------------------------------------------


def print_peers(result: PeerBench, console: Console | None = None) -> None:
    """Two tables a model: every way, and what is the fastest at each budget."""
    console = console or make_console()
    for case in result.cases:
        console.print(_table(_title(case), PEER_NAMES, map(_cells, case.rows), left=(0, 1, 12)))
        for name, told in _told(case):
            console.print(f"{name}: {told}", markup=False, highlight=False, soft_wrap=True)
        lines = _budget_cells(case)
        console.print(_table("the plan for each budget, and the fastest other", BUDGET_NAMES, lines, left=(2, 5)))
    console.print(_legend(result), highlight=False)


def peers_as_markdown(result: PeerBench) -> str:
    """What `print_peers` shows, as Markdown."""
    parts: list[str] = []
    for case in result.cases:
        parts += [f"### {_title(case)}", _markdown(PEER_NAMES, map(_cells, case.rows))]
        parts += ["\n".join(f"- {name}: {told}" for name, told in _told(case))]
        parts += [_markdown(BUDGET_NAMES, _budget_cells(case))]
    return "\n\n".join(part for part in parts if part) + "\n"


def budgets_as_markdown(result: PeerBench, shares: Collection[float]) -> str:
    """One table of all models: the plans for these budgets, and the fastest others that fit."""
    lines = [
        (case.workload.model, *cells)
        for case in result.cases
        for line, cells in zip(case.at_budgets(), _budget_cells(case), strict=True)
        if line.share in shares
    ]
    return _markdown(("model", *BUDGET_NAMES), lines)


def _legend(result: PeerBench) -> str:
    """What the columns mean, and where they were measured."""
    compared = " or ".join(dict.fromkeys(case.reference for case in result.cases))
    return (
        f"{_where(result.circumstances)}\n"
        "peak:    of the allocator, through a whole optimizer step: weights, gradients and optimizer state included\n"
        "live:    the same, as a count of all live tensors (MiB)\n"
        "taken:   what the process holds, on a CPU its resident size; on an accelerator what its allocator took (MiB)\n"
        f"of none: forward, backward and optimizer: the fastest of a few steps over that of {compared} beside them; "
        f"median and spread of {result.repeats} turns\n"
        "error:   measured over predicted, less 1\n"
        "first:   forward and backward of the first step, in which graphs are compiled (caches begin empty)\n"
        "*:       on the frontier: no other way is as fast with as little memory (compiled ones aside)"
    )


def describe_workload(workload: Workload) -> str:
    """A workload in a line."""
    tuning = "full fine-tuning" if workload.lora is None else f"LoRA r={workload.lora}"
    accumulated = f" x {workload.accumulation} micro-steps" if workload.accumulation > 1 else ""
    return (
        f"{workload.model}, {tuning}, batch {workload.batch} x {workload.tokens}{accumulated}, {workload.dtype}, "
        f"{workload.optimizer}, {workload.attention}"
    )


def _title(case: PeerCase) -> str:
    compared = "" if case.reference == "none" else f"; none does not run, compared with {case.reference}"
    return f"{describe_workload(case.workload)}; {case.blocks} blocks{compared}"


def _told(case: PeerCase) -> list[tuple[str, str]]:
    return [(row.name, told) for row in case.rows for told in (row.error, row.fault) if told]


def _cells(row: PeerRow) -> tuple[str, ...]:
    return (
        row.name,
        "*" if row.frontier else "",
        _mib(row.allocated_bytes),
        _share(row.peak_error),
        _mib(row.live_bytes),
        _mib(row.reserved_bytes),
        "-" if row.seconds is None else f"{row.seconds * 1e3:.0f}",
        _share(row.seconds_error),
        format_ratio(row.time_ratio),
        _spread(row.time_ratios),
        "-" if row.tokens_per_second is None else f"{row.tokens_per_second:.0f}",
        "-" if row.first_seconds is None else f"{row.first_seconds:.1f}",
        _gradients(row),
    )


def _gradients(row: PeerRow) -> str:
    if row.fault:
        return "FAILED"
    if row.group == "none" or row.difference is None:
        return "-"
    return "equal" if row.first_difference is None else f"{row.difference:.0e}"


def _budget_cells(case: PeerCase) -> list[tuple[str, ...]]:
    rows = {row.name: row for row in case.rows}
    found: list[tuple[str, ...]] = []
    for line in case.at_budgets():
        ours, rival = rows[line.ours], rows.get(line.rival or "")
        found.append(
            (
                f"{line.share:.0%}",
                _mib(line.budget_bytes),
                _short(ours.plan or ""),
                _mib(ours.allocated_bytes),
                format_ratio(ours.time_ratio),
                line.rival or "none fits",
                _mib(rival.allocated_bytes if rival else None),
                format_ratio(rival.time_ratio if rival else None),
                "-" if line.ratio is None else f"{line.ratio:.2f}",
            )
        )
    return found


def _short(plan: str) -> str:
    """What a plan does, without its heading and classes; the stack is named where there are several."""
    lines = [re.sub(r" \(\d+ x [^)]*\)", "", line.strip()) for line in plan.splitlines()[1:]]
    return "; ".join(lines if len(lines) > 1 else [line.partition(": ")[2] for line in lines])


# --- how far every way goes -------------------------------------------------------------------------------------------


def print_largest(result: LargestBench, console: Console | None = None) -> None:
    """One row for each way."""
    console = console or make_console()
    what = "sequences" if result.what == "batch" else "tokens"
    title = f"{describe_workload(result.workload)}: most {what} within {format_bytes(result.budget_bytes)}"
    rows = [
        (
            row.name,
            "-" if row.largest is None else str(row.largest),
            format_ratio(row.over_none),
            format_bytes(row.peak_bytes),
            str(len(row.tried)),
            row.error or "",
        )
        for row in result.rows
    ]
    console.print(_table(title, ("way", what, "of none", "peak", "tried", "note"), rows, left=(0, 5)))


def largest_as_markdown(results: Sequence[LargestBench]) -> str:
    """One table: how far every way goes, a column for each search."""
    heads = [f"{found.workload.model}: {found.what} in {format_bytes(found.budget_bytes)}" for found in results]
    names = dict.fromkeys(row.name for result in results for row in result.rows)
    found = [{row.name: row for row in result.rows} for result in results]
    lines = [(name, *(_largest_cell(rows.get(name)) for rows in found)) for name in names]
    return _markdown(("way", *heads), lines)


def _largest_cell(row: LargestRow | None) -> str:
    if row is None or row.largest is None:
        return "-"
    return f"{row.largest} ({format_ratio(row.over_none)})"


# --- engines and heads ------------------------------------------------------------------------------------------------


def print_engines(result: EngineBench, console: Console | None = None) -> None:
    """One table a model: what every engine keeps and costs, the first row being what the others are compared with."""
    console = console or make_console()
    for case in result.cases:
        title = f"{case.family}, {TUNING_NAMES[case.tuning]}, {case.blocks} blocks"
        console.print(_table(title, ENGINE_NAMES, map(_engine_cells, case.rows), left=(0, 6)))
        for row in case.rows:
            told = row.problem or row.difference
            if told:
                console.print(f"{row.engine}: {told}", style="red", markup=False, highlight=False, soft_wrap=True)
    settings = result.settings
    console.print(
        f"{settings.layers} layers, hidden {settings.hidden}, batch {settings.batch} x {settings.tokens} tokens, "
        f"{settings.dtype}, dropout {settings.dropout:g}, sdpa\n{_where(result.circumstances)}\n"
        "kept:       live bytes at the end of the forward that were made inside the blocks, counted from outside.\n"
        f"step:       forward and backward, median of {settings.repeats} interleaved repeats; ratios within a repeat.\n"
        "recomp.:    operations, modules or blocks run again in the backward of one step.\n"
        "host:       a block's part of the time of a step beyond `none`, on a model too small to compute anything.",
        highlight=False,
    )


def _engine_cells(row: EngineRow) -> tuple[str | Text, ...]:
    differ = Text("bit-equal") if row.equal else Text("differ", style="yellow")
    return (
        row.engine,
        format_bytes(row.block_bytes),
        format_ratio(row.bytes_ratio),
        format_seconds(turns.median(row.step_seconds)),
        format_ratio(turns.median(row.time_ratios)),
        _spread(row.time_ratios),
        Text("FAILED", style="bold red") if row.problem else differ,
        str(row.recomputed),
        format_seconds(row.host_seconds),
        format_percent(row.host_share_of_sac),
    )


def print_head(result: HeadBench, console: Console | None = None) -> None:
    """One row for each way to run each head."""
    rows = (
        (
            str(row.hidden),
            row.dtype,
            row.tuning,
            "none" if row.head == "full" else str(row.head),
            format_bytes(row.peak_bytes),
            format_bytes(row.weight_gradient_bytes),
            format_ratio(row.bytes_ratio),
            format_seconds(turns.median(row.step_seconds)),
            format_ratio(row.time_ratio),
            f"{row.error:.1e}",
        )
        for row in result.rows
    )
    console = console or make_console()
    console.print(_table("the head and its loss", HEAD_NAMES, rows, left=(1, 2, 3)))
    settings = result.settings
    console.print(
        f"vocabulary {settings.vocabulary}, {settings.tokens} tokens\n{_where(result.circumstances)}\n"
        "peak:  most live bytes above hidden states, weight and labels, the gradient of the weight among them.\n"
        f"step:  forward and backward, median of {settings.repeats} interleaved repeats; ratios within one.\n"
        "error: of gradients, against float64: norm of the difference over norm.",
        highlight=False,
    )


def print_held(result: HeldBench, console: Console | None = None) -> None:
    """One row for each model, way of training, and choice of what is saved."""
    rows = (
        (
            row.model,
            row.attention,
            row.tuning,
            ", ".join(row.save),
            format_bytes(row.none_bytes),
            format_bytes(row.held_bytes),
            f"{row.ratio:.2f}",
            "-" if row.bound is None else f"{row.bound:.2f}",
        )
        for row in result.rows
    )
    console = console or make_console()
    console.print(_table("held at the end of the forward, with dropout", HELD_NAMES, rows, left=(0, 1, 2, 3)))
    found = result.settings
    console.print(
        f"{found.dtype}, {found.blocks} blocks, hidden size {found.hidden}, batch {found.batch} x {found.tokens}; "
        f"dropout {found.dropout:g}, LoRA of rank {found.lora} with dropout {found.lora_dropout:g}\n"
        f"{_where(result.circumstances)}",
        highlight=False,
    )


def print_overheads(result: OverheadsBench, console: Console | None = None) -> None:
    """One row for each model with dropout, and a line on changes of plans."""
    rows = (
        (
            row.model,
            row.tuning,
            str(row.masks),
            f"{row.share:.1%}",
            format_seconds(turns.median(row.step_seconds)),
            format_seconds(turns.median(row.without_seconds)),
            format_ratio(row.ratio),
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
        )
        for row in result.rows
    )
    console = console or make_console()
    console.print(_table("`selective` with masks of dropout as bits", MASKS_NAMES, rows, left=(0, 1)))
    console.print(
        f"to find that the plan stays: {result.same_microseconds:.1f} us; to change it on {result.changed} of "
        f"{result.settings.blocks} blocks: {result.change_microseconds:.1f} us more\n{_where(result.circumstances)}",
        highlight=False,
    )


def compiling_rows(result: CompilingBench) -> list[tuple[str, ...]]:
    """One row for each way at each depth, as text."""
    return [
        (
            row.name,
            str(row.blocks),
            format_seconds(row.first),
            format_ratio(result.over_whole(row)),
            format_seconds(min(row.later_seconds)),
        )
        for row in result.rows
    ]


def compiling_as_markdown(result: CompilingBench) -> str:
    """The same table."""
    return _markdown(COMPILING_NAMES, compiling_rows(result))


def print_compiling(result: CompilingBench, console: Console | None = None) -> None:
    """How long each takes to compile, at each depth."""
    console = console or make_console()
    title = f"the first step, in which graphs are compiled: {describe_workload(result.workload)}"
    console.print(_table(title, COMPILING_NAMES, compiling_rows(result), left=(0,)))
    console.print(
        f"{_where(result.circumstances)}\nof a whole model's: over the fastest whole model of that depth.",
        highlight=False,
    )


def print_lengths(result: LengthsBench, console: Console | None = None) -> None:
    """One row for each way to train on batches of mixed lengths."""
    full, one, each = result.rows
    rows = (
        (
            row.name,
            format_bytes(max(row.peak_bytes)),
            f"{row.free} of {len(result.lengths)}",
            str(row.recomputed),
            format_seconds(turns.median(row.epoch_seconds)),
            format_ratio(row.over(full)),
            format_ratio(row.over(one)),
            format_seconds(row.planning_seconds),
            "equal" if row.first_difference is None else row.first_difference,
        )
        for row in result.rows
    )
    console = console or make_console()
    console.print(_table("batches of mixed lengths", LENGTHS_NAMES, rows, left=(0, 8)))
    settings, lengths = result.settings, sorted(result.lengths)
    console.print(
        f"{settings.layers} blocks, hidden size {settings.hidden}, {settings.sequences} sequences of {lengths[0]} to "
        f"{lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), {result.text}\n"
        f"budget {format_bytes(result.budget_bytes)}, {len(each.plans)} plans from {len(each.traced)} traces\n"
        f"{_where(result.circumstances)}\n"
        "peak: most live bytes in any step of the counted epoch.\nfree: its steps in which nothing was recomputed.\n"
        f"epoch: median of {settings.epochs} epochs, step by step in turn; ratios within an epoch.\n"
        "planning: time in which training stood still for it, once for the whole training.",
        highlight=False,
    )


# --- what all tables share --------------------------------------------------------------------------------------------


def _where(found: Mapping[str, Any]) -> str:
    """Machine, versions and date of some figures."""
    return (
        f"{found['device']}, {found['threads']} threads of {found['cpus']} CPUs; torch {found['torch']}, transformers "
        f"{found['transformers']}, {found['date']}"
    )


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f}-{max(ratios):.2f}" if ratios else "-"


def _markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _table(title: str, names: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[int]) -> Table:
    """`left` are the places of columns that are not aligned to the right. No cell is read as rich's markup."""
    table = Table(title=escape(title), title_justify="left", pad_edge=False, collapse_padding=True)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place in left else "right")
    for cells in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
    return table
