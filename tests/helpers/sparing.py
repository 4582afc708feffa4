"""Parametrised tests with many cases, only a few of which run by default."""

import pytest


def sparing(names, cases, *fast, ids=None):
    """Parametrise a test with all cases; cases that are not in `fast` are marked `thorough`."""
    cases = list(cases)
    strange = [case for case in fast if case not in cases]
    assert not strange, f"no cases of this test: {strange}"
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=() if case in fast else pytest.mark.thorough))
    return pytest.mark.parametrize(names, marked, ids=ids)


def in_turn(names, cases, others, *further):
    """Parametrise a test with all pairs of both, which may be tuples.

    By default, each case runs with one of the others, in turn, and so do these `further` pairs.
    """
    others = [other if isinstance(other, tuple) else (other,) for other in others]
    pairs = [(case, *other) for case in cases for other in others]
    fast = [(case, *others[place % len(others)]) for place, case in enumerate(cases)]
    return sparing(names, pairs, *fast, *further)
