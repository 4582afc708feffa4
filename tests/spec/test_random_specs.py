"""Random specs as dicts, texts and files: each is read and comes back from every form, or is refused by `SpecError`."""

from __future__ import annotations

import json
import string

import pytest
import yaml
from helpers.fuzzing import examples
from helpers.specs import JSON, KEYS, WORDS, layer_text, rules, valid_specs
from hypothesis import example, given
from hypothesis import strategies as st

from hf_ckpt.errors import SpecError
from hf_ckpt.spec.spec import Spec


def check_forms(spec):
    """A spec comes back from dict, JSON, YAML and words, exactly; and the short form is no longer than needed."""
    short = spec.to_dict()
    assert Spec.parse(short).to_dict() == short
    written = yaml.safe_dump(short, sort_keys=False)
    for form in (short, spec.to_json(), json.loads(json.dumps(short)), yaml.safe_load(written)):
        assert Spec.parse(form) == spec
    assert hash(spec) == hash(Spec.parse(short))
    words = {key: json.dumps(value, separators=(",", ":")) for key, value in short.items()}
    if not any(character.isspace() for value in words.values() for character in value):
        text = " ".join(f"{key}={value}" for key, value in words.items())
        assert Spec.parse(text) == spec, text


def check(given_spec):
    """`SpecError` is a good answer, any other error is none; what is accepted comes back from every form."""
    try:
        spec = Spec.parse(given_spec)
    except SpecError:
        return
    check_forms(spec)


@examples(150, 0.1)
@given(valid_specs())
def test_every_spec_round_trips(given_dict):
    check_forms(Spec.parse(given_dict))


@given(st.dictionaries(KEYS | st.text(max_size=6), WORDS | JSON | layer_text() | st.lists(rules(), max_size=2)))
@example({"policy": "budget", "budget": "9" * 400 + ".5"})  # more than a float holds
@example({"budget": float("nan")})
@example({"every_n_layers": 10**400})
@example({"layers": {"encoder": []}})
@example({"save": [["linear"]]})
def test_any_dict_is_a_spec_or_a_spec_error(given_dict):
    check(given_dict)


@given(st.text(max_size=40) | st.text(alphabet=string.ascii_letters + "=:{}[]-, 0123456789", max_size=40))
@example("a\0b")  # no path can hold this
@example("\0=1")
@example("budget=2001-99-99")  # YAML takes it for a date, and then fails on it
@example("policy=full layers=" + ",".join(["1"] * 400))  # longer than a file name may be
@example('{"budget": ' + "9" * 400 + "}")
@example("!!python/object:os.system")
@example('{"a":' * 100_000)  # deeper than any parser goes
def test_any_text_is_a_spec_or_a_spec_error(text):
    check(text)


@st.composite
def nearly_specs(draw):
    """Valid specs with a key too many, too few, or of another value."""
    spec = draw(valid_specs())
    for _ in range(draw(st.integers(1, 3))):
        key = draw(KEYS | st.sampled_from(sorted(spec)) if spec else KEYS)
        if draw(st.booleans()):
            spec.pop(key, None)
        else:
            spec[key] = draw(WORDS | JSON | st.integers(-2, 9) | st.sampled_from(list(draw(valid_specs()).values())))
    return spec


YAML = ["!!int", "!!bool", "!!float", "!!timestamp", "!!binary", "!!null", "!!set", "!!merge", "&a", "*a", "<<", "---"]
YAML += ["{", "}", "[", "]", ":", ",", "'", '"', "|", ">", "%", "@", "`", "?", "- ", "0x", "0b", "1_", ".inf", ".nan"]
YAML += ["1:2", "2001-01-01", "~", "yes", "0.5", "9", "\t", "\\", "é", "\x85", "\ud800"]


@st.composite
def nearly_words(draw):
    """Texts like key=value words, with pieces of YAML for values."""
    piece = st.sampled_from(YAML) | WORDS | st.text(max_size=3)
    words = [f"{draw(KEYS)}={''.join(draw(st.lists(piece, max_size=4)))}" for _ in range(draw(st.integers(1, 3)))]
    return " ".join(words)


@examples(150, 0.1)
@given(nearly_specs())
def test_what_is_nearly_a_spec(given_spec):
    check(given_spec)


@examples(150, 0.1)
@given(nearly_words())
def test_what_are_nearly_words(text):
    check(text)


@pytest.mark.parametrize(
    "text",
    [
        "every_n_layers=!!int",
        "policy=!!bool",
        "budget=!!timestamp",
        "layers=" + "[" * 20_000,
        '{"every_n_layers": ' + "9" * 5_000 + "}",
    ],
    ids=["int", "bool", "timestamp", "nesting", "digits"],
)
def test_hostile_texts(text, tmp_path):
    """Such texts are refused as words or JSON, and as the content of a file."""
    path = tmp_path / "spec.yaml"
    path.write_text(text if text.startswith("{") else text.replace("=", ": ", 1), encoding="utf-8")
    for given_spec in (text, path):
        try:
            Spec.parse(given_spec)
        except SpecError:
            continue
        except ValueError as error:  # which `SpecError` is, too
            raise AssertionError(f"not a SpecError: {error!r}") from error
