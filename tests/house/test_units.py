"""Sizes, shares and times as text and back, and warnings that are given once per process."""

import logging

import pytest
from helpers.tables import table
from hypothesis import given
from hypothesis import strategies as st

from hf_ckpt import units
from hf_ckpt.logs import forget_warnings, warn_once
from hf_ckpt.spec.spec import Spec
from hf_ckpt.units import UnitError

ROWS = table(__file__, "sizes.yaml")


@pytest.mark.parametrize(("given", "found"), [*ROWS["sizes"], *ROWS["shares"]])
def test_a_budget_is_bytes_or_a_share(given, found):
    """A budget means the same as text on a command line and as a number in YAML or JSON."""
    assert units.parse_budget(given) == found
    assert type(units.parse_budget(given)) is type(found)
    assert units.budget_bytes(found, 1000) == (found if isinstance(found, int) else round(found * 1000))
    assert units.budget_bytes(None, 1000) == 900
    if isinstance(found, int):
        assert units.parse_bytes(given) == found


@pytest.mark.parametrize("given", [*ROWS["no_sizes"], *ROWS["no_shares"]])
def test_what_is_no_budget(given):
    with pytest.raises(UnitError, match="must"):
        units.parse_budget(given)
    if given in ROWS["no_sizes"]:
        with pytest.raises(UnitError, match="must"):
            units.parse_bytes(given)


@pytest.mark.parametrize(("given", "meant"), ROWS["forgotten"])
def test_a_size_whose_unit_was_forgotten_is_asked_back(given, meant):
    for read in (units.parse_bytes, units.parse_budget):
        with pytest.raises(UnitError, match=f"did you mean '{meant}'"):
            read(given)


def test_a_count_of_tokens():
    assert [units.parse_count(text) for text in ("4096", "8k", " 128K ", "1")] == [4096, 8192, 131072, 1]
    for text in ("0", "k", "8m", "-1", "1.5", ""):
        with pytest.raises(UnitError, match="must be a whole number of at least 1, such as 4096 or 4k"):
            units.parse_count(text)


@given(st.integers(1, 2**50) | st.integers(1, 2**20).map(lambda size: size * 2**20))
def test_an_exact_size_is_read_as_the_same_bytes(size_bytes):
    assert units.parse_bytes(units.exact_size(size_bytes)) == size_bytes
    assert units.parse_bytes(str(2**20 + size_bytes)) == 2**20 + size_bytes
    assert [units.exact_size(size) for size in (20 * 2**30, 1536 * 2**20, 1000)] == ["20GiB", "1536MiB", "1000B"]


@given(st.floats(1e-300, 1))
def test_a_share_is_read_as_it_is_written(share):
    """As a number, as Python prints it, and in percent."""
    assert units.parse_budget(share) == units.parse_budget(str(share)) == share
    assert Spec.parse(Spec.parse({"budget": f"{share}%"}).to_dict()).budget == share / 100


def test_bytes_and_seconds_in_print():
    sizes = {None: "-", 0: "0 B", 1536: "1.50 KiB", 20 * 2**30: "20.00 GiB", 3 * 2**40: "3.00 TiB"}
    sizes |= {2**20 - 1: "1.00 MiB", 2**30 - 1: "1.00 GiB", 2**40 - 1: "1.00 TiB", 1023: "1023 B"}
    assert {size: units.format_bytes(size) for size in sizes} == sizes
    times = {None: "-", 0.0000021: "2 us", 0.0123: "12.3 ms", 4.05: "4.05 s"}
    times |= {0.9994e-3: "999 us", 0.9996e-3: "1.0 ms", 0.9999: "999.9 ms", 0.99999: "1.00 s"}
    assert {seconds: units.format_seconds(seconds) for seconds in times} == times
    assert {size: units.to_gib(size) for size in (2**30, None)} == {2**30: 1.0, None: None}


def test_a_warning_is_given_once_for_every_logger_message_and_argument(caplog):
    log, other = logging.getLogger("hf_ckpt.one"), logging.getLogger("hf_ckpt.other")
    text, not_hashable = "%s of %d", ["linear"]
    warnings = [(log, "no"), (other, "no"), (log, text, "one", 2), (log, text, "one", 3), (log, "a %s", not_hashable)]
    for warning in [*warnings, *warnings]:
        warn_once(*warning)
    assert [record.getMessage() for record in caplog.records] == ["no", "no", "one of 2", "one of 3", "a ['linear']"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    forget_warnings()
    warn_once(*warnings[0])
    assert len(caplog.records) == len(warnings) + 1
