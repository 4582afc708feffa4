"""Files of specs and plans: JSON and YAML, damaged files, and full disks."""

import contextlib
import functools
import json
import operator
import os
import resource

import pytest
from helpers.tables import table

from hf_ckpt.errors import FileError, PlanMismatchError, SpecError, shown
from hf_ckpt.planner.policies import make_plan
from hf_ckpt.spec import files
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.spec.spec import Spec


def plan_of(blocks):
    actions = tuple((Block(f"model.layers.{n}", "decoder", n, "Layer"), Action("full")) for n in range(blocks))
    return Plan("llama", "LlamaModel", actions, Prediction(9, 2e-05, 8, (("blocks", 4),), 10, "cpu", (("decoder", 3),)))


def test_errors_stay_short_however_much_is_given():
    """Texts of values are cut."""
    assert len(shown("x" * 500, 20)) == 20


# --- what is read -----------------------------------------------------------------------------------------------------

FILES = table(__file__, "files.yaml")


@pytest.mark.parametrize(("name", "content", "wanted"), FILES["read"])
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


NOT_IN_YAML = [
    ("absent.yaml", None, "a text must be JSON, key=value words, a file, or one of none, full, selective, full+"),
    ("", None, "Is a directory"),
    ("a.yaml", b"\xff\xfe\xff", "not valid YAML"),
]


@pytest.mark.parametrize(("name", "content", "said"), [*FILES["refused"], *NOT_IN_YAML])
def test_a_file_that_is_neither_spec_nor_plan(name, content, said, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecError) as caught:
        Spec.parse(path)
    assert len(caught.value.problems) == 1
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    with pytest.raises(PlanMismatchError, match=r"cannot read a plan from|is not a plan of hf_ckpt") as raised:
        Plan.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(("place", "value", "said"), table(__file__, "damaged.yaml"))
def test_a_damaged_plan_is_refused(place, value, said, tmp_path):
    saved = plan_of(2).to_dict()
    *outer, last = place
    functools.reduce(operator.getitem, outer, saved)[last] = value
    (tmp_path / "plan.yaml").write_text(json.dumps(saved))
    with pytest.raises(PlanMismatchError) as caught:
        Plan.load(tmp_path / "plan.yaml")
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_saved_plan_with_the_old_name_of_a_whole_head_is_read():
    assert Plan.from_dict({**plan_of(2).to_dict(), "head": "full"}) == plan_of(2)


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
        "no/plan.json": "is not a folder, or it is read-only",
        "folder.json": "Is a directory",
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


def test_a_line_that_cannot_be_written_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    files.append_line(path, "one")
    with full_disk(1000), pytest.raises(FileError, match=r"rows\.jsonl' cannot be written"):
        files.append_line(path, "x" * 2000)
    files.append_line(path, "two")
    first, half, last = path.read_text().splitlines()
    assert (first, set(half), last) == ("one", {"x"}, "two")
