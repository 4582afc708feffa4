"""`hf-ckpt bench head`: the head and its loss, whole and in chunks: bytes, time, and how far gradients are from exact.

The head of a causal language model and transformers' own loss, forward and backward, on random hidden states. Bytes are
counted, above what is there before; times are taken in turn, and ratios within a repeat.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_ckpt import compat
from hf_ckpt.engines.head import Logits, chunked
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure import LiveBytes, circumstances, stopwatch

FULL = "full"
TUNINGS = ("trained", "frozen")


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """Sizes. Raises `HfCkptError` for values that mean nothing."""

    vocabulary: int = 32_000
    tokens: int = 2048
    hidden: tuple[int, ...] = (512, 1024, 2048)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    chunks: tuple[int | str, ...] = ("auto",)
    device: str = dataclasses.field(default_factory=lambda: compat.accelerator_type() or "cpu")
    repeats: int = 7

    def __post_init__(self) -> None:
        for name in self.dtypes:
            if name not in ("float32", "bfloat16", "float16"):
                raise HfCkptError(f"dtype must be float32, bfloat16 or float16, but is {name!r} instead.")


@dataclasses.dataclass
class HeadRow:
    """One way to run one head."""

    hidden: int
    dtype: str
    tuning: str
    """`trained`, or `frozen` as with LoRA."""
    head: int | str
    peak_bytes: int
    """Most live bytes above hidden states, weight and labels; the gradient of the weight is among them."""
    weight_gradient_bytes: int
    """That gradient, which is there at the end in any case."""
    error: float
    """Of all gradients, against float64: norm of the difference over norm."""
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    bytes_ratio: float | None = None
    """`peak_bytes` of the plain head over this one's."""
    time_ratio: float | None = None
    """Median of this one's time over the plain head's, repeat by repeat."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**dataclasses.asdict(self), "step_seconds_median": statistics.median(self.step_seconds)}


@dataclasses.dataclass
class HeadBench:
    """What was measured, and where."""

    settings: HeadSettings
    circumstances: dict[str, Any]
    rows: list[HeadRow]

    @property
    def ok(self) -> bool:
        """No chunked head is further from exact gradients than the plain one, but for float32's last digits."""
        plain = {(row.hidden, row.dtype, row.tuning): row.error for row in self.rows if row.head == FULL}
        return all(row.error <= 1.2 * plain[row.hidden, row.dtype, row.tuning] + 1e-6 for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        rows = [row.to_dict() for row in self.rows]
        settings = dataclasses.asdict(self.settings)
        return {"circumstances": self.circumstances, "settings": settings, "ok": self.ok, "rows": rows}


def bench_head(settings: HeadSettings, *, on_progress: Callable[[str], None] = lambda text: None) -> HeadBench:
    """Measure every head that `settings` name."""
    rows: list[HeadRow] = []
    for hidden in settings.hidden:
        for dtype in settings.dtypes:
            for tuning in TUNINGS:
                on_progress(f"hidden size {hidden}, {dtype}, {tuning}")
                rows += _Case(settings, hidden, getattr(torch, dtype), tuning).rows()
    return HeadBench(settings, circumstances(settings.device), rows)


def progress_steps(settings: HeadSettings) -> int:
    """How often `bench_head` reports progress."""
    return len(settings.hidden) * len(settings.dtypes) * len(TUNINGS)


class _Case:
    def __init__(self, settings: HeadSettings, hidden: int, dtype: torch.dtype, tuning: str) -> None:
        torch.manual_seed(0)
        self.settings, self.tuning, self.dtype = settings, tuning, dtype
        self.head = nn.Linear(hidden, settings.vocabulary, bias=False, dtype=dtype, device=settings.device)
        self.head.weight.requires_grad_(tuning == "trained")
        shape = (1, settings.tokens, hidden)
        self.hidden = torch.randn(shape, dtype=dtype, device=settings.device).requires_grad_()
        self.labels = torch.randint(settings.vocabulary, shape[:2], device=settings.device)

    def rows(self) -> list[HeadRow]:
        ways = [FULL, *self.settings.chunks]
        exact = self._exact()
        rows = [self._counted(way, exact) for way in ways]
        for number in range(self.settings.repeats):
            for place in [*range(number % len(ways), len(ways)), *range(number % len(ways))]:
                with stopwatch() as seconds:
                    self._step(ways[place])
                rows[place].step_seconds.append(seconds[0])
        plain = rows[0]
        for row in rows:
            row.bytes_ratio = plain.peak_bytes / row.peak_bytes
            pairs = zip(row.step_seconds, plain.step_seconds, strict=True)
            row.time_ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        return rows

    def _step(self, way: int | str) -> list[torch.Tensor]:
        """Forward and backward; returns the gradients."""
        self.head.weight.grad = self.hidden.grad = None
        logits = self.head(self.hidden) if way == FULL else chunked(self.head, self.head.forward, self.hidden, way)
        if (way != FULL) != isinstance(logits, Logits):
            raise HfCkptError(f"{self.settings.tokens} tokens do not make several chunks of {way}.")
        compat.causal_loss(logits, self.labels, self.settings.vocabulary).backward()  # type: ignore[no-untyped-call]
        return [value.grad for value in (self.hidden, self.head.weight) if value.grad is not None]

    def _counted(self, way: int | str, exact: Sequence[torch.Tensor]) -> HeadRow:
        self.head.weight.grad = self.hidden.grad = None
        with LiveBytes(self.head, {"hidden": self.hidden, "labels": self.labels}) as live:
            gradients = self._step(way)
        weight = self.head.weight
        return HeadRow(
            hidden=self.hidden.shape[-1],
            dtype=str(self.dtype).removeprefix("torch."),
            tuning=self.tuning,
            head=way,
            peak_bytes=live.peak_bytes - live.start_bytes,
            weight_gradient_bytes=weight.nbytes if weight.requires_grad else 0,
            error=_distance(gradients, exact),
        )

    def _exact(self) -> list[torch.Tensor]:
        """The gradients in float64."""
        hidden, weight = (value.detach().double().requires_grad_() for value in (self.hidden, self.head.weight))
        logits = (hidden[0, :-1] @ weight.t()).requires_grad_()
        nn.functional.cross_entropy(logits, self.labels[0, 1:]).backward()  # type: ignore[no-untyped-call]
        found = [hidden.grad, weight.grad if self.tuning == "trained" else None]
        return [value for value in found if value is not None]


def _distance(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    return max(float((mine.double() - right).norm() / right.norm()) for mine, right in zip(found, exact, strict=True))
