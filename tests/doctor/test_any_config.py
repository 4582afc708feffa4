"""No config, file or text makes doctor fail without its own error message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.configs import asking
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_ckpt.doctor import facts, rules
from hf_ckpt.doctor.facts import ACCELERATE, ADAPTER, DEEPSPEED, FSDP, TRAINING, ConfigFile, Facts, ModelFacts
from hf_ckpt.doctor.rules import diagnose, to_dict
from hf_ckpt.errors import HfCkptError
from hf_ckpt.forecast.devices import DEVICES

RULES_SOURCE = "".join(Path(module.__file__).read_text() for module in (facts, rules))
NAMES = sorted(
    {re.sub(r"\W", "", word) for word in re.findall(r'"([a-z_.]+)"', RULES_SOURCE)}
    | set(facts.OUR_KEYS | facts._THEIR_KEYS)
    | {"fsdp_version", "triton.cudagraphs"}
)
WORDS = ("FSDP", "DEEPSPEED", "eager", "selective", "full", "budget", "sac", "3", "true", '{"policy": "auto"}', '{"')
LEAVES = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=5),
    max_leaves=12,
)
MAPPINGS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=8)


@pytest.mark.long
@settings(max_examples=150)
@given(
    given_files=st.lists(
        st.tuples(st.sampled_from([TRAINING, ACCELERATE, DEEPSPEED, ADAPTER, FSDP]), MAPPINGS), max_size=3
    ),
    kwargs=JSON,
    config=MAPPINGS,
)
def test_no_config_crashes_the_checks(given_files, kwargs, config):
    files = [ConfigFile(f"{number}", kind, values) for number, (kind, values) in enumerate(given_files)]
    model = ModelFacts("m", "t5", config, (("encoder", 2), ("decoder", 3)))
    facts_given = Facts((*files, asking(kwargs)), {"deepspeed": "x", "torch": ""}, model, DEVICES["t4"], 1, 9)
    findings = diagnose(facts_given)
    assert json.loads(json.dumps(to_dict(facts_given, findings)))["findings"]
    assert {finding.severity for finding in findings} <= set(facts.SEVERITIES)
    assert findings == diagnose(facts_given)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("any")


def refused(path):
    """The error message for an unusable file; None if the file was diagnosed."""
    try:
        files = facts.read_files([path])
    except HfCkptError as error:
        return str(error)
    assert files
    diagnose(Facts(files))
    return None


@settings(max_examples=60)
@given(JSON, st.sampled_from(["json", "yaml"]))
def test_no_file_crashes_the_reading(folder, values, suffix):
    path = folder / f"any.{suffix}"
    path.write_text(json.dumps(values))
    refusal = refused(path)
    assert refusal is None or str(path) in refusal


@settings(max_examples=60)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_text_crashes_the_reading(folder, content):
    path = folder / "text.yaml"
    path.write_bytes(content)
    refusal = refused(path)
    assert refusal is None or str(path) in refusal
