"""Reading and writing files: JSON and YAML, damaged plans, and full disks."""

from __future__ import annotations

import contextlib
import json
import os
import resource

import pytest

from hf_ckpt.errors import FileError, PlanMismatchError, SpecError, shown
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


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml", "plan.yml"])
def test_a_plan_is_read_as_it_was_written(name, tmp_path):
    plan_of(500).save(tmp_path / name)
    os.link(tmp_path / name, tmp_path / "plan")  # without a suffix, it may be either
    for path in (tmp_path / name, tmp_path / "plan"):
        assert Plan.load(path) == plan_of(500)
        assert Plan.load(path).prediction == plan_of(500).prediction


def test_what_is_no_json_may_be_yaml(tmp_path):
    path = tmp_path / "spec"
    path.write_text("{policy: full, layers: 2-}")
    assert Spec.parse(path) == Spec(layers="2-")
    path.write_bytes(b"\xef\xbb\xbf" + b'{"policy": "none"}')  # as Windows editors write
    assert Spec.parse(path).policy == "none"
    path.write_text("policy: &p full\nrules: [{policy: *p, layers: 0}]")
    assert Spec.parse(path).rules[0].policy == "full"
    os.rename(path, tmp_path / "spec.json")
    for read, error in ((Spec.parse, SpecError), (Plan.load, PlanMismatchError)):
        with pytest.raises(error, match="not valid JSON"):
            read(tmp_path / "spec.json")
        with pytest.raises(error, match="Is a directory"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hf_ckpt_plan",), True),
        (("hf_ckpt_plan",), 1.0),
        (("prediction", "parts"), ["blocks"]),
        (("prediction", "step_seconds"), "long"),
        (("prediction", "later"), 1),
        (("stacks", "decoder", 1, "block"), "model.layers.0"),
        (("stacks", "decoder", 1, "block"), 7),
    ],
)
def test_a_damaged_plan_is_refused(path, value):
    saved = plan_of(2).to_dict()
    assert Plan.from_dict(saved) == plan_of(2)
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanMismatchError):
        Plan.from_dict(saved)


@contextlib.contextmanager
def full_disk(most_bytes):
    """Limit files of this process to a size in bytes: a write is cut there, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def test_a_line_is_added_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"
    files.append_line(path, json.dumps({"row": 1}))
    with full_disk(1000), pytest.raises(FileError, match=r"rows\.jsonl' cannot be written"):
        files.append_line(path, json.dumps({"row": "x" * 2000}))
    files.append_line(path, json.dumps({"row": 2}))
    assert [json.loads(line)["row"] for line in path.read_text().splitlines()] == [1, 2]
