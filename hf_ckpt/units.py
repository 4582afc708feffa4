"""Convert bytes, seconds and percent to text and back. No other file formats numbers for people."""

from __future__ import annotations

import re
from decimal import Decimal

from hf_ckpt.errors import HfCkptError, shown

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
    _UNITS[_letter] = 1024**_power
_LEAST_BYTES = 2**20
"""A smaller size without a unit is refused: the unit was probably forgotten."""
# A float may have an exponent: Python writes 1e+16, and YAML reads 1e9 as a text.
_SIZE = re.compile(r"\s*((?:\d+(?:\.\d+)?|\.\d+)(?:[eE]\+?\d{1,2})?)\s*([a-zA-Z]*)\s*")
# Not a size: there are no half bytes. Python writes a small share as 5e-05.
_SHARE = re.compile(r"\s*(\d*\.\d+(?:[eE]-\d+)?|\d+[eE]-\d+|\d+(?=\s*%))\s*(%?)\s*")
GIB = 2**30
RESERVED = 1.12, 1.24
"""Bytes that torch's allocator reserved, as multiples of those of tensors: the least and the most of published runs
that report both, which had no expandable segments (docs/comparison.md)."""
# The least, not the most: that would leave a fifth of each card unused, also where all batches have one length, and
# expandable segments need a few percent. Where the most would not fit, an answer has a note.
DEFAULT_SHARE = round(1 / RESERVED[0], 1)
"""Share of the device's memory that `auto`, `hf-ckpt plan` and `predict` use if no budget is given: 0.9. The rest is
for memory that no tensor holds, such as gaps between blocks of the allocator."""


class UnitError(HfCkptError, ValueError):
    """A text cannot be read as a size or as a share. The message continues a sentence that begins with its name."""


def _text_of(value: float | str) -> str:
    """The text of a number. `str` raises an error of its own for whole numbers with thousands of digits."""
    return shown(value) if isinstance(value, int) else str(value)


def parse_bytes(text: str | float) -> int:
    """Read a size in bytes: `parse_bytes("20GiB") == 21474836480`. `"20G"` is the same, and `"20GB"` is decimal.

    A plain number is bytes. Raises `UnitError` if the text is not a positive size, and for a plain number below 1 MiB,
    such as `20`, whose unit was probably forgotten.
    """
    match = _SIZE.fullmatch(_text_of(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise UnitError(f"must look like '20GiB', '800MB' or 1073741824, but is {shown(text)} instead")
    # Not `float`, which rounds fractions such as 0.1, and bytes above 2**53.
    size = int(Decimal(match.group(1)) * _UNITS[unit])
    if size <= 0:
        raise UnitError(f"must be positive, but is {shown(text)} instead")
    if size >= 2**63:  # no tensor is that large, and torch takes no such number
        raise UnitError(f"must be below 8 EiB, but is {shown(text)} instead")
    if not match.group(2) and size < _LEAST_BYTES:
        unit = "GiB" if size < 1024 else "MiB" if size < 100 * 1024 else "B"
        meant = f"{match.group(1)}{unit}"
        raise UnitError(f"needs a unit, but is {shown(text)} instead; did you mean {meant!r}?")
    return size


def parse_count(text: str) -> int:
    """Read a number of tokens: `parse_count("8k") == 8192`. Raises `UnitError` unless it is whole and at least 1."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*(k?)\s*", text.lower())
    if match is None or not int(match.group(1)):
        raise UnitError(f"must be a whole number of at least 1, such as 4096 or 4k, but is {shown(text)} instead")
    return int(match.group(1)) * (1024 if match.group(2) else 1)


def parse_budget(value: float | str) -> int | float:
    """Read a budget: an int is bytes, a float a share: `parse_budget("20GiB") == 21474836480`.

    A share is `"80%"`, or 0.8 as a number or text. Raises `UnitError` if the value is neither a size nor a share.
    """
    share = _SHARE.fullmatch(_text_of(value))
    if share is None or (isinstance(value, float) and value >= _LEAST_BYTES):  # such as 2e10, a float in YAML
        return parse_bytes(value)
    read = float(share.group(1))
    if share.group(2):
        read /= 100
    if not 0 < read <= 1:
        raise UnitError(f"must be above 0 and at most 1, but is {shown(value)} instead")
    return read


def budget_bytes(budget: float | None, memory_bytes: int) -> int:
    """Return a budget, as `parse_budget` reads it, in bytes: `budget_bytes(0.8, 1000) == 800`.

    An int is bytes, a float a share of the device's `memory_bytes`, and None is `DEFAULT_SHARE`.
    """
    if isinstance(budget, int):
        return budget
    return round((DEFAULT_SHARE if budget is None else budget) * memory_bytes)


def exact_size(size_bytes: int) -> str:
    """Write a size so that `parse_bytes` reads the same bytes: `exact_size(20 * GIB) == "20GiB"`."""
    unit = next(unit for unit in ("gib", "mib", "kib", "b") if size_bytes % _UNITS[unit] == 0)
    return f"{size_bytes // _UNITS[unit]}{unit.upper().replace('I', 'i')}"


def format_bytes(size_bytes: float | None) -> str:
    """Write a size in binary units: `format_bytes(1536) == "1.50 KiB"`; unknown (None) is a dash, never 0."""
    if size_bytes is None:
        return "-"
    value = float(size_bytes)
    for unit, digits in {"B": 0, "KiB": 2, "MiB": 2, "GiB": 2}.items():
        if abs(round(value, digits)) < 1024:  # as it is written
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def format_seconds(seconds: float | None) -> str:
    """Write a time in us, ms or s: `format_seconds(0.0123) == "12.3 ms"`; unknown (None) is a dash."""
    if seconds is None:
        return "-"
    if round(seconds * 1e6) < 1000:
        return f"{seconds * 1e6:.0f} us"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s"


def counted(number: int, noun: str) -> str:
    """Write a number of things: `counted(1, "block") == "1 block"`, `counted(2, "block") == "2 blocks"`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def to_gib(size_bytes: float | None) -> float | None:
    """Convert bytes to GiB; unknown (None) stays None."""
    return None if size_bytes is None else size_bytes / GIB
