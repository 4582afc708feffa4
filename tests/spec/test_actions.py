"""Each action is one record: its engine, its options, and what a budget chooses from."""

import dataclasses
import pkgutil

import pytest

from hf_ckpt.engines.region import Region, Request, make
from hf_ckpt.spec import reading
from hf_ckpt.spec.actions import (
    ACTIONS,
    FULL,
    FULL_SELECTIVE,
    KEEP,
    OFFLOAD,
    OFFLOADED,
    SELECTIVE,
    Action,
    planned_actions,
)


def test_the_records():
    """Those that keep most come first; a new one shows up here."""
    assert " ".join(ACTIONS) == "keep selective full full+selective full+tiles offload compiled"
    assert set(reading.POLICIES) == {"none", "budget", "auto", "selective", "full", "full+selective", "offload"}
    assert [name for name, record in ACTIONS.items() if not record.is_exact] == ["full+tiles", "compiled"]


@pytest.mark.parametrize("record", ACTIONS.values(), ids=ACTIONS)
def test_a_record_is_complete(record):
    """Its engine creates a block's function, and its forms have only its own options."""
    forms = [*record.forms, *(form for form in OFFLOADED.values() if form.kind == record.name)]
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
    assert planned_actions() == (KEEP, SELECTIVE, attention, FULL, FULL_SELECTIVE)
    assert planned_actions(tile=64) == (*planned_actions(), Action("full+tiles", tile=64))
    assert list(OFFLOADED.items()) == [(FULL, OFFLOAD), (SELECTIVE, dataclasses.replace(SELECTIVE, moved=True))]
