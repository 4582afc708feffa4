"""What measured costs depend on: results are stored by it, so that no question gets the costs of another one."""

import functools

import pytest
from helpers.tables import table

from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.forecast import Forecaster
from hf_ckpt.forecast.question import FIELDS, question
from hf_ckpt.forecast.run import inputs_of

ROWS = table(__file__, "fields.yaml")


def two(name):
    """Two questions that differ in a field, and whether their costs are to differ."""
    value, what, *more = ROWS[name]
    base = {"model": "mini-llama", "tokens": 64, "device": "a10", **dict(*more)}
    return [question(fields) for fields in (base, {**base, name: value})], what == "costs"


def test_each_field_that_changes_costs_is_in_what_measures_are_given():
    assert ROWS.keys() == FIELDS.keys()
    for name in ROWS:
        questions, differ = two(name)
        forecasters = map(Forecaster, questions)
        first, second = (inputs_of(forecaster.training, forecaster.device) for forecaster in forecasters)
        assert (first != second) == differ, name


@functools.cache
def costs_or_error(training):
    """The costs of a question, which many rows share; the error of a model that refuses to run so."""
    forecaster = Forecaster(training)
    try:
        return vars(forecaster.estimator.costs_of(forecaster.training))
    except HfCkptError as error:
        return str(error)


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_costs_differ_as_the_table_says(name):
    questions, differ = two(name)
    first, second = map(costs_or_error, questions)
    assert isinstance(first, dict)
    assert (first != second) == differ


def test_the_longest_sequences_are_no_longer_than_the_positions_of_the_model():
    """Also where a model for shorter ones is there already."""
    forecaster = Forecaster(question({"model": "mini-gpt2", "tokens": 128, "max_tokens": True, "device": "h100"}))
    forecaster.budget = 1 << 60
    forecaster.estimator.costs_of(question({"model": "mini-gpt2", "tokens": 128}))
    with pytest.raises(HfCkptError, match="has positions for 4096 tokens, but 8192 are asked for"):
        forecaster.estimator.costs_of(question({"model": "mini-gpt2", "tokens": 8192}))
    assert any("the model takes no more" in note for note in forecaster.answer().notes)
