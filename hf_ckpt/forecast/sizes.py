"""Which batches and lengths a forecast compares, and how it finds the largest that fits. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable

REFUSED = 2**62
"""The peak of a question that is refused, such as sequences that are longer than the model takes."""


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def micro_batches(sequences: int) -> list[int]:
    """The micro-batches to compare for a step of so many sequences: divisors, each at least twice the one before.

    More would differ little, and measuring each takes up to a second.
    """
    batches: list[int] = []
    for batch in divisors(sequences):  # because all micro-steps of a step have one size
        if not batches or batch >= 2 * batches[-1] or batch == sequences:
            batches.append(batch)
    return batches


def largest_within(peak_of: Callable[[int], int], limit: int) -> dict[int, int]:
    """Return number -> its peak, for what was tried to find the largest number whose peak is within a limit.

    Among them are that number and the next one. Peaks grow nearly in proportion to the number, so a guess is on the
    line through two that are known; every fourth one halves what is left, because such a line may come near slowly.
    """
    peaks = {1: peak_of(1)}
    low = 0 if peaks[1] > limit else 1
    high = 1 if peaks[1] > limit else None
    while high is None or high - low > 1:
        others = [number for number in peaks if number != low and peaks[number] != REFUSED]
        guess = 2 * low
        if others:
            slope = (peaks[low] - peaks[others[-1]]) / (low - others[-1])
            guess = low + int((limit - peaks[low]) / max(slope, 1.0))
        if high is not None and (peaks[high] == REFUSED or len(peaks) % 4 == 0):
            guess = (low + high) // 2
        guess = max(low + 1, min(guess, 64 * low if high is None else high - 1))
        peaks[guess] = peak_of(guess)
        if peaks[guess] <= limit:
            low = guess
        else:
            high = guess
    return peaks
