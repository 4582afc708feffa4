"""What users may write and what it means; everything else is refused, with all problems at once."""

import numpy
import pytest
from helpers.tables import table

from hf_ckpt.errors import SpecError
from hf_ckpt.spec.reading import Rule, parse_layers
from hf_ckpt.spec.spec import Spec


@pytest.mark.parametrize(("written", "fields"), table(__file__, "accepted.yaml"))
def test_what_follows_from_what_is_written(written, fields):
    spec = Spec.parse(written)
    read = {name: getattr(spec, name) for name in fields}
    assert {name: [*value] if isinstance(value, tuple) else value for name, value in read.items()} == fields
    assert isinstance(read.get("budget"), type(fields.get("budget")))
    assert Spec.parse(spec) is spec
    assert Spec.parse(spec.to_dict()) == spec


def test_a_rule_and_a_plan_are_read_and_written():
    assert Spec.parse({"rules": [{"layers": 1, "policy": "full"}]}).rules == (Rule(layers="1", policy="full"),)
    assert Spec.parse({"plan": "plan.json"}).to_dict() == {"plan": "plan.json"}
    assert Spec().to_dict() == {"policy": "full"}


def test_texts_that_name_no_layers():
    """What the others name is compared with a slow twin, where plans are made."""
    assert parse_layers(" 1 , 2 - 3,-4--1,-3- ") == ((1, 1), (2, 3), (-4, -1), (-3, -1))
    for text in ("", ",", "1,", "a", "-", "1--", "--1", "1-2-3", "1.5", "0x1", "1;2"):
        with pytest.raises(ValueError, match=r"must be a list like '0-15,-1'"):
            parse_layers(text)


def test_an_enable_call_selects_anew_or_only_changes_options():
    """Bare enable calls, or calls with only `use_reentrant`, keep the choice of blocks; others replace it."""
    spec = Spec.parse({"layers": "0-3", "preserve_rng_state": True})
    for bare in ({}, {"use_reentrant": True}, {"every_n_layers": 1, "offload": False, "use_reentrant": False}):
        assert spec.updated(bare) == spec, bare
    assert spec.updated({"determinism_check": "none"}) == Spec.parse({**spec.to_dict(), "determinism_check": "none"})
    assert spec.updated({"every_n_layers": 2}) == Spec(every_n_layers=2)
    assert spec.updated({"policy": "full"}) == Spec()
    assert spec.updated({"rules": [{"layers": "0", "policy": "full"}]}).layers is None
    for equal_to_a_default in ({"every_n_layers": True}, {"every_n_layers": 1.0}, {"offload": 0}):
        with pytest.raises(SpecError):
            spec.updated(equal_to_a_default)


def test_what_a_check_does_has_no_effect_without_checks(caplog):
    for _ in range(2):
        assert Spec.parse({"check_every": 0, "on_mismatch": "raise"}).on_mismatch == "raise"
    assert caplog.text.count("`on_mismatch: raise` has no effect: `check_every: 0` checks nothing.") == 1


NOT_IN_YAML = [
    ({"layers": "1" * 5000}, "`layers` must be a list like '0-15,-1', but is"),
    ({"head": 10**5000}, "`head` must be below 2**63, but is a whole number of 16610 bits instead"),
    ({"layers": 10**5000}, "`layers` must be a list like '0-15,-1', but is"),
    ({"host_budget": 10**5000}, "`host_budget` must look like '20GiB', '800MB' or 1073741824, but is"),
    ({10**5000: 1}, "`a whole number of 16610 bits` is not a key of the spec"),
    ({"budget": 500_000}, "`budget` needs a unit, but is 500000 instead; did you mean '500000B'?"),
    ({"offload": numpy.ones(2)}, '`offload` must be one of false, true, "saved", but is array([1., 1.]) instead'),
    ({"context_fn": print}, "`context_fn` is a callable, which TrainingArguments cannot save as JSON"),
]


@pytest.mark.trap(15, 35)
@pytest.mark.parametrize(("given_spec", "expected"), [*table(__file__, "refused.yaml"), *NOT_IN_YAML])
def test_one_clear_error(given_spec, expected):
    with pytest.raises(SpecError) as caught:
        Spec.parse(given_spec)
    assert len(caught.value.problems) == 1
    assert expected in str(caught.value)
    assert "?." not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_every_problem_is_named_at_once():
    wrong = {"polcy": "full", "every_n_layers": 0, "use_reentrant": "True", "host_budget": "1 parsec"}
    rules = [{"layers": "x"}, {"layers": "0", "policy": "ful"}]
    with pytest.raises(SpecError) as caught:
        Spec.parse({**wrong, "rules": rules, "context_fn": print})
    text = str(caught.value)
    assert text.startswith("6 problems in the activation checkpointing spec:\n")  # and nothing that follows from these
    of_rules = ("`[0]` `layers` must be a list", "and needs `policy`", "`[1]` `policy` must be one of")
    assert [part for part in (*(f"`{key}`" for key in wrong), "`context_fn`", *of_rules) if part not in text] == []
    with pytest.raises(SpecError, match=r"(?s)3 problems.*'a' does not.*'b' does not.*`polcy` is not a key"):
        Spec.parse("a policy=full b polcy=full")
