"""Draw what fills memory over a training step, predicted, without checkpointing and with `full` on every block.

python recipes/benchmarks/memory.py --out docs/memory.png
"""

from __future__ import annotations

import argparse
import itertools

from matplotlib import pyplot

import hf_ckpt
from hf_ckpt.costs.costs import Timeline
from hf_ckpt.units import GIB

PARTS = {
    "weights, optimizer state": "#4c72b0",
    "gradients": "#55a868",
    "activations kept for backward": "#dd8452",
    "temporary, such as logits": "#c44e52",
}


def draw(axes: pyplot.Axes, title: str, timeline: Timeline) -> None:
    """Draw the peak of each part of a step over its time."""
    ends = list(itertools.accumulate(moment.part.nanoseconds / 1e6 for moment in timeline.moments))
    peaks = [[size / GIB for size in moment.parts().values()] for moment in timeline.moments]
    axes.stackplot([0, *ends], *zip(*[peaks[0], *peaks], strict=True), step="pre", labels=PARTS, colors=PARTS.values())
    axes.axhline(timeline.peak_bytes / GIB, color="black", linewidth=0.8, linestyle="--")
    axes.set(title=f"{title}: peak {timeline.peak_bytes / GIB:.1f} GiB", xlabel="ms (forward, then backward)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="a100-40")
    parser.add_argument("--out", default="memory.png")
    arguments = parser.parse_args()
    options = {"tokens": arguments.tokens, "device": arguments.device, "budget": "1000GiB"}
    without = hf_ckpt.predict(arguments.model, arguments.batch, **options)
    recomputed = without.within(without.floor_bytes)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    draw(panels[0], "no checkpointing", without.timeline)
    draw(panels[1], "the least that a plan needs", recomputed.timeline)
    panels[0].set_ylabel("GiB")
    panels[0].legend(loc="lower left", fontsize="small")
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
