"""Other people's training scripts, one after the other, as they are; what hf_ckpt counted is written down after each.

counted.py JOBS OUT     JOBS: a JSON list of [path or module, argument, ...]; OUT: a JSON list, one entry for each.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, set_seed

COUNTS: list[dict[str, Any] | None] = []
_train = Trainer.train


def train_and_count(self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.train`, after which the installed plan and its counts are noted."""
    result = _train(self, *args, **kwargs)
    import hf_ckpt
    from hf_ckpt.attach.record import installation

    if installation(self.model) is None:
        COUNTS.append(None)
    else:
        done = hf_ckpt.describe(self.model)
        COUNTS.append({"enabled": done.enabled, "forwards": done.forwards, "recomputed": done.recomputed})
    return result


def main() -> None:
    jobs, out = sys.argv[1:]
    Trainer.train = train_and_count
    for script, *arguments in json.loads(Path(jobs).read_text()):
        sys.argv = [script, *arguments]
        set_seed(0)  # adapters are drawn before a Trainer sets its own
        if script.endswith(".py"):
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    Path(out).write_text(json.dumps(COUNTS))


if __name__ == "__main__":
    main()
