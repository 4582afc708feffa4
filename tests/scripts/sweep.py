"""Trains a small model of every transformers model type under every way of checkpointing.

sweep.py TYPE ...       one JSON line for each of these types
sweep.py                all types; OUT has a JSON line for each, the table is printed
sweep.py --out OUT      resumes an earlier run: types that have a line in OUT are skipped

Run it from the repository root with `PYTHONPATH=tests`. Each type runs in its own process, with a time limit.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.shrinking import types
from helpers.sweeping import LIMIT_SECONDS, WAYS, failures, left_out, sweep_all, table, trains


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=[], help="model types; all of them unless given")
    parser.add_argument("--processes", type=int, default=1, help="how many run at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a type")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is tried; everything")
    parser.add_argument("--out", type=Path, help="where to add the JSON lines")
    parser.add_argument(
        "--again", type=Path, help="only types that trained under `full` in this file of an earlier run"
    )
    asked = parser.parse_args()
    every = [each["type"] for each in _lines(asked.again) if trains(each)] if asked.again else types()
    random.Random(0).shuffle(every)  # an interrupted run has a fair sample
    found = _lines(asked.out)
    tried = {each["type"] for each in found}
    waiting = [name for name in asked.types or every if name not in tried]
    for each in sweep_all(waiting, asked.processes, asked.limit, asked.ways):
        found.append(each)
        print(json.dumps(each), flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as lines:
                lines.write(f"{json.dumps(each)}\n")
    print(table(found), file=sys.stderr)
    for reason, count in left_out(found).items():
        print(f"left out: {count}, {reason}", file=sys.stderr)
    print("\n".join(failures(found)), file=sys.stderr)


def _lines(path: Path | None) -> list[dict]:
    """Results of an earlier run."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
