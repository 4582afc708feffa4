"""Every model type of transformers, made small and trained under every way of checkpointing.

sweep.py TYPE ...       one JSON line for each of these types
sweep.py                all types; OUT has a JSON line for each, the table is printed

Run it from the repository root with `PYTHONPATH=tests`. Each type has a process of its own, with a time limit.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.shrinking import types
from helpers.sweeping import LIMIT_SECONDS, WAYS, as_line, failures, left_out, sweep_all, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", default=[], help="model types; all of them unless given")
    parser.add_argument("--processes", type=int, default=1, help="how many run at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a type")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what is tried; everything")
    parser.add_argument("--out", type=Path, help="where to write the JSON lines")
    asked = parser.parse_args()
    every = types()
    random.Random(0).shuffle(every)  # a run that is cut short has tried a fair sample
    found = []
    for each in sweep_all(asked.types or every, asked.processes, asked.limit, asked.ways):
        found.append(each)
        print(as_line(each), flush=True)
        if asked.out is not None:
            asked.out.write_text("".join(f"{as_line(every)}\n" for every in found), encoding="utf-8")
    print(table(found), file=sys.stderr)
    for reason, count in left_out(found).items():
        print(f"left out: {count}, {reason}", file=sys.stderr)
    print("\n".join(failures(found)), file=sys.stderr)


if __name__ == "__main__":
    main()
