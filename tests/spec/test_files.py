"""Files of specs and plans: JSON and YAML, damaged files, and full disks."""

import contextlib
import functools
import json
import operator
import os
import resource

import pytest
import yaml

from hf_ckpt.errors import FileError, PlanMismatchError, SpecError, shown
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec import files
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.spec.spec import Spec


def plan_of(blocks):
    actions = tuple((Block(f"model.layers.{n}", "decoder", n, "Layer"), Action("full")) for n in range(blocks))
    return Plan("llama", "LlamaModel", actions, Prediction(9, 2e-05, 8, (("blocks", 4),), 10, "cpu"))


def test_errors_stay_short_however_much_is_given():
    """Texts of values are cut, and so is the list of problems."""
    assert len(shown("x" * 500, 20)) == 20
    assert shown(10**9000) == "a value of type int"
    told = SpecError([f"problem {number}" for number in range(1000)])  # such as a thousand block numbers
    assert len(told.problems) == 1000
    assert str(told).startswith("1000 problems")
    assert str(told).endswith("  - problem 19\n  ... and 980 more")


# --- what is read -----------------------------------------------------------------------------------------------------

SPEC = {"policy": "full", "layers": {"encoder": "0-3", "decoder": "-1"}, "preserve_rng_state": True, "mlp": 512}


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("spec.json", json.dumps(SPEC), SPEC),
        *((name, yaml.safe_dump(SPEC, sort_keys=False), SPEC) for name in ("spec.yaml", "spec.yml", "spec.txt")),
        ("spec", "{policy: full, layers: 2-}", {"layers": "2-"}),
        ("spec.json", '\ufeff{"policy": "none"}', {"policy": "none"}),  # as Windows editors write
        (
            "spec",
            "policy: &p full\nrules: [{policy: *p, layers: 0}]",
            {"policy": "full", "rules": [{"policy": "full", "layers": "0"}]},
        ),
        (  # a merge, which may replace a key
            "spec.yaml",
            "rules: [&r {policy: full, layers: 0}, {<<: *r, layers: 1}]",
            {"rules": [{"policy": "full", "layers": "0"}, {"policy": "full", "layers": "1"}]},
        ),
    ],
)
def test_a_spec_is_read_from_json_and_yaml(name, content, wanted, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert Spec.parse(tmp_path / name) == Spec.parse(str(tmp_path / name)) == Spec.parse(wanted)


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_a_plan_is_read_as_it_was_written(name, tmp_path):
    """Even 20 us, which JSON writes as `2e-05` and YAML reads as text. A spec may name the file."""
    plan = plan_of(500)
    plan.save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8").startswith("{") == name.endswith(".json")
    os.link(tmp_path / name, tmp_path / "plan")  # without a suffix, it may be either
    for path in (tmp_path / name, tmp_path / "plan"):
        spec, blocks = Spec.parse({"plan": str(path)}), [block for block, _ in plan.actions]
        assert Plan.load(path) == make_plan(spec, blocks, "llama", "LlamaModel") == plan
        assert Plan.load(path).prediction == plan.prediction


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.yaml", None, "a text must be JSON, key=value words, a file, or one of none, full, selective, full+"),
        ("", None, "Is a directory"),
        ("a.yaml", b"\xff\xfe\xff", "not valid YAML"),
        ("a.yaml", b"when: 2001-99-99", "not valid YAML"),  # YAML reads a date and then fails
        ("a.yaml", b"a: !!bool maybe", "not valid YAML"),
        ("a.yaml", b"a: !!int ''", "not valid YAML"),
        ("a.yaml", b'{"policy": "full",}}', "not valid YAML"),
        ("a.json", b"policy: full", "not valid JSON"),
        ("a.yaml", b"policy: full\nrules: [{layers: 0, layers: 1}]", "not valid YAML: `layers` is given twice"),
        ("a.json", b'{"policy": "full", "policy": "none"}', "not valid JSON: `policy` is given twice"),
        ("a.yaml", b"", "a spec must be a mapping of keys, but is NoneType instead"),
        ("a.yaml", b"policy: full\nlayer: 0", "did you mean `layers`?"),
    ],
)
def test_a_file_that_is_neither_spec_nor_plan(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        Spec.parse(path)
    assert len(caught.value.problems) == 1
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(PlanMismatchError, match=r"cannot read a plan from|is no plan of hf_ckpt") as raised:
        Plan.load(path)
    assert str(path) in str(raised.value)


ROW = ("stacks", "decoder", 1)
COMPILED = {"block": "model.layers.1", "kind": "Layer", "action": "compiled"}


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        *((("hf_ckpt_plan",), version, "is no plan of hf_ckpt (format 1)") for version in (True, 1.0, 99)),
        (("prediction",), {}, "is damaged: KeyError('step_seconds')"),
        (("prediction", "parts"), ["blocks"], "is damaged"),
        (("prediction", "step_seconds"), "long", "is damaged"),
        *((("prediction", key), "8 GiB", "is damaged: TypeError") for key in ("peak_bytes", "tokens", "budget_bytes")),
        *((("prediction", key), {"blocks": None}, "is damaged: TypeError") for key in ("parts", "stacks")),
        (("prediction", "later"), 1, "is damaged"),
        ((*ROW, "block"), "model.layers.0", "is named twice"),
        ((*ROW, "block"), 7, "`block` must be a text, but is 7 instead"),
        *(((key,), ["llama"], f"`{key}` must be a text") for key in ("family", "model")),
        *(((*ROW, "action"), name, "must be one of") for name in ("none", "budget", "Full", "", None, ["full"])),
        ((*ROW, "share"), 0.5, "`share` goes with `compiled`"),
        ((*ROW, "save"), ["linear"], "`save` goes with `selective` or `full+selective`, but its action is `full`"),
        ((*ROW, "moved"), True, "`moved` goes with `selective`"),
        (ROW, {**COMPILED, "share": 0.5, "segment": 0}, "`segment` goes with `full`"),
        *((ROW, {**COMPILED, "share": share}, "from 0 to 1") for share in (None, -0.1, 1.5, "half", True)),
    ],
)
def test_a_damaged_plan_is_refused(place, value, said, tmp_path):
    saved, (*outer, last) = plan_of(2).to_dict(), place
    functools.reduce(operator.getitem, outer, saved)[last] = value
    (tmp_path / "plan.yaml").write_text(json.dumps(saved))
    with pytest.raises(PlanMismatchError) as caught:
        Plan.load(tmp_path / "plan.yaml")
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# --- what is written --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(most_bytes):
    """Limit files of this process to a size in bytes: a write is cut there, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.trap(42)
def test_a_full_disk_leaves_the_plan_that_was_there(tmp_path):
    plan_of(2).save(tmp_path / "plan.json")
    with full_disk(4096), pytest.raises(FileError, match="cannot be written: "):
        plan_of(500).save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan_of(2)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_where_no_plan_can_be_saved(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name, said in {
        "plan.txt": "must end in .json or .yaml or .yml",
        "plan": "must end in",
        "no/plan.json": "there is no folder",
        "folder.json": "it is a folder",
    }.items():
        with pytest.raises(FileError, match=said):
            plan_of(2).save(tmp_path / name)
    assert os.listdir(tmp_path) == ["folder.json"]


def test_a_link_stays_a_link_and_points_to_the_new_plan(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "plan.json").symlink_to(tmp_path / "there" / "real.json")
    plan_of(3).save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").is_symlink()
    assert Plan.load(tmp_path / "there" / "real.json") == plan_of(3)


def test_no_link_that_someone_planted_is_followed(tmp_path, monkeypatch):
    victim, plan = tmp_path / "victim", tmp_path / "plan.json"
    victim.write_text("of another user")
    plan_of(2).save(plan)
    assert plan.stat().st_mode == victim.stat().st_mode
    monkeypatch.setattr(os, "urandom", bytes)  # so that the temporary name can be guessed
    for guess in (str(os.getpid()), bytes(4).hex()):
        (tmp_path / f".plan.json.{guess}.tmp").symlink_to(victim)
    with pytest.raises(FileError, match="cannot be written: File exists"):
        plan_of(3).save(plan)
    assert victim.read_text() == "of another user"
    assert Plan.load(plan) == plan_of(2)


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    files.append_line(path, json.dumps({"row": 1}))
    with full_disk(1000), pytest.raises(FileError, match=r"rows\.jsonl' cannot be written"):
        files.append_line(path, json.dumps({"row": "x" * 2000}))
    files.append_line(path, json.dumps({"row": 2}))
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [1, 2]
