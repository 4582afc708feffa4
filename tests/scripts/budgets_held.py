"""Budgets against real peaks: rows of `budget_scenarios` and `budget_models`, at 25, 50 and 75 % of what can be saved.

budgets_held.py [--only TEXT ...] [--out FILE]

Prints a line for each as it goes. FILE gets a JSON line for each, and what it has already is left out, so that a run
that was cut short goes on. Run it from the repository root with `PYTHONPATH=tests`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from helpers import budget_models, budget_scenarios
from helpers.budget_runs import SHARES, Make, References, Run, references, within

TITLES = "   on  first  later  meas.   pred.  what"


def rows() -> dict[str, Make]:
    """Every training by name."""
    return {**budget_scenarios.ROWS, **budget_models.ROWS}


def figures(run: Run) -> dict:
    """What is kept of a run."""
    return {
        "budget_bytes": run.budget_bytes,
        "full_bytes": run.full_bytes,
        "steps_until_on": run.steps_until_on,
        "first_planned": run.first_planned,
        "worst_planned": run.worst_planned,
        "worst_measuring": run.worst_measuring,
        "predicted": run.predicted,
        "recomputed": run.recomputed,
        "plan": run.steps[-1].plan if run.steps else "",
        "misses": run.misses(),
        "steps": [
            (step.phase, step.shape, step.peak_bytes, step.predicted_bytes, step.plan, step.recomputed)
            for step in run.steps
        ],
        "said": [text for step in run.steps for text in step.said],
    }


def in_a_line(name: str, share: float, found: dict) -> str:
    """The figures of a run as a row of the table."""
    title = f"{name:36} {share:4.2f}"
    if "steps_until_on" not in found:
        return f"{title}  {'; '.join(found['misses'])}"
    ratios = [found[key] for key in ("first_planned", "worst_planned", "worst_measuring", "predicted")]
    shown = "  ".join(f"{ratio:5.3f}" if ratio else "    -" for ratio in ratios)
    return f"{title} {found['steps_until_on']:4d}  {shown}  {'; '.join(found['misses']) or 'held'}"


def judged(make: Make, reference: References | None, share: float, verbose: bool) -> dict:
    """The figures of a run, or the error of one that could not be judged."""
    try:
        assert reference is not None
        run = within(make, reference, share)
    except Exception as error:
        if verbose:
            traceback.print_exc()
        return {"misses": [f"not judged: {type(error).__name__}: {error}"]}
    if verbose:
        print(run.traceback)
        for step in run.steps:
            predicted = (step.predicted_bytes or 0) / run.budget_bytes
            print(f"    {step.shape} {step.peak_bytes / run.budget_bytes:.3f} {predicted:.3f} {step.plan} {step.said}")
    return figures(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names; every training unless given")
    parser.add_argument("--exact", action="store_true", help="whether those are whole names")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--out", type=Path, help="file of JSON lines, to which more are added")
    parser.add_argument("--verbose", action="store_true", help="a line for each step")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known = {}
    if asked.out is not None and asked.out.exists():
        for line in asked.out.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            known[found["name"], found["share"]] = found
    missed = 0
    print(f"{'':41}{TITLES}", flush=True)
    for name, make in rows().items():
        if not any(part == name if asked.exact else part in name for part in asked.only):
            continue
        reference = None
        for share in asked.shares:
            found = known.get((name, share))
            if found is None:
                began = time.time()
                try:
                    reference = reference or references(make)
                except Exception as error:
                    if asked.verbose:
                        traceback.print_exc()
                    print(f"{name}: not judged: {type(error).__name__}: {error}", flush=True)
                    missed += 1
                    break
                found = judged(make, reference, share, asked.verbose)
                found = {"name": name, "share": share, **found}
                found |= {"room": reference.room, "took": round(time.time() - began, 1)}
                if asked.out is not None:
                    with asked.out.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(found) + "\n")
            missed += bool(found["misses"])
            print(in_a_line(name, share, found), flush=True)
    print(f"{missed} missed")


if __name__ == "__main__":
    main()
