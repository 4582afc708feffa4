"""Sizes, shares and times: parsing and printing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt import units
from hf_ckpt.units import UnitError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("20GiB", 20 * 2**30),
        ("20 gib", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("20G", 20 * 2**30),
        ("20 GB", 20 * 10**9),
        ("512b", 512),
        (str(2**20), 2**20),
        (2**20, 2**20),
        ("0.5KiB", 512),
    ],
)
def test_parse_bytes(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "20 Gb/s", "-1GiB", "0", 0, "20XB", True, None, 1.5, "1e9"])
def test_parse_bytes_refuses(text):
    with pytest.raises(UnitError, match="a size must"):
        units.parse_bytes(text)


@pytest.mark.parametrize(("given", "meant"), [("20", "20GiB"), (20, "20GiB"), (20000, "20000MiB"), ("1023", "1023GiB")])
def test_a_size_whose_unit_was_forgotten_is_asked_back(given, meant):
    for read in (units.parse_bytes, units.parse_budget):
        with pytest.raises(UnitError, match=f"did you mean '{meant}'"):
            read(given)


def test_parse_count():
    assert [units.parse_count(text) for text in ("4096", "8k", " 128K ", "1")] == [4096, 8192, 131072, 1]
    for text in ("0", "k", "8m", "-1", "1.5", ""):
        with pytest.raises(UnitError, match="must be a whole number of at least 1, such as 4096 or 4k"):
            units.parse_count(text)


@given(st.integers(2**20, 2**50))
def test_a_number_of_bytes_is_read_exactly(size_bytes):
    assert units.parse_bytes(str(size_bytes)) == size_bytes


@given(st.integers(1, 2**50) | st.integers(1, 2**20).map(lambda size: size * 2**20))
def test_an_exact_size_is_read_as_the_same_bytes(size_bytes):
    assert units.parse_bytes(units.exact_size(size_bytes)) == size_bytes
    assert [units.exact_size(size) for size in (20 * 2**30, 1536 * 2**20, 1000)] == ["20GiB", "1536MiB", "1000B"]


@pytest.mark.parametrize(
    ("given", "found"),
    [(0.8, 0.8), ("0.8", 0.8), (" .5 ", 0.5), ("80%", 0.8), ("1.0", 1.0), (2**20, 2**20), ("1.5 KiB", 1536)],
)
def test_a_budget_is_bytes_or_a_share(given, found):
    """A budget means the same as text on a command line and as a number in YAML or JSON."""
    assert units.parse_budget(given) == found
    assert type(units.parse_budget(given)) is type(found)
    assert units.budget_bytes(found, 1000) == (found if isinstance(found, int) else found * 1000)
    assert units.budget_bytes(None, 1000) == 900


@pytest.mark.parametrize(
    "given",
    ["1.5", 1.5, 0.0, "0.0", "0", "-0.5", float("nan"), "nan", True, None, "0.8%%", "1.", "0%", "101%", "%", "x%"],
)
def test_what_is_no_budget(given):
    with pytest.raises(UnitError, match=r"a (size|share) must"):
        units.parse_budget(given)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(None, "-"), (0, "0 B"), (1536, "1.50 KiB"), (20 * 2**30, "20.00 GiB"), (3 * 2**40, "3.00 TiB")],
)
def test_format_bytes(size_bytes, text):
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(None, "-"), (0.0000021, "2 us"), (0.0123, "12.3 ms"), (4.05, "4.05 s")])
def test_format_seconds(seconds, text):
    assert units.format_seconds(seconds) == text


def test_gib():
    assert units.to_gib(2**30) == 1.0
    assert units.to_gib(None) is None
