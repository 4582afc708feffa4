"""Each action is one record: its engine, its options, and what a budget chooses from."""

import dataclasses
import pkgutil

import pytest

from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.spec import reading
from hf_ckpt.spec.actions import (
    ACTIONS,
    COMPILED,
    FULL,
    FULL_SELECTIVE,
    FULL_TILES,
    KEEP,
    OFFLOAD,
    SELECTIVE,
    Action,
    candidates,
    offloads,
)


def test_the_records():
    named = (KEEP, SELECTIVE, FULL, FULL_SELECTIVE, FULL_TILES, OFFLOAD, COMPILED)
    assert [record.name for record in ACTIONS.values()] == list(ACTIONS) == [action.kind for action in named]
    assert set(reading.POLICIES) == {"none", "budget", "auto"} | ACTIONS.keys() - {
        "keep",
        "full+tiles",
        "compiled",
    }
    assert [name for name, record in ACTIONS.items() if not record.is_exact] == ["full+tiles", "compiled"]


@pytest.mark.parametrize("record", ACTIONS.values(), ids=ACTIONS)
def test_a_record_is_complete(record):
    """Its engine creates a block's function, and its forms have only its own options."""
    forms = [*record.candidates, *record.offloads]
    assert forms
    assert bool(record.engine) == (record.name != "keep")
    assert not record.hooks or callable(pkgutil.resolve_name(record.hooks))
    defaults = {field.name: field.default for field in dataclasses.fields(Action) if field.name in record.options}
    assert defaults.keys() == set(record.options)
    for form in forms:
        assert dataclasses.replace(form, **defaults) == Action(record.name)
        if record.engine:
            assert isinstance(make(Request("block", form)), Region)


def test_what_a_budget_chooses_from():
    """Candidates that keep most come first, and of those with tensors in host memory, those that keep least."""
    attention = Action("selective", ("attention",))
    assert candidates() == (KEEP, SELECTIVE, attention, FULL, FULL_SELECTIVE)
    assert candidates(tile=64) == (*candidates(), Action("full+tiles", tile=64))
    assert list(offloads().items()) == [(FULL, OFFLOAD), (SELECTIVE, dataclasses.replace(SELECTIVE, moved=True))]
