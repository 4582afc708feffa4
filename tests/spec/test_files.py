"""Reading and writing files: sizes, kinds of files, JSON and YAML, and full disks."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import tracemalloc

import pytest
import yaml
from helpers.disks import full_disk

from hf_ckpt.errors import FileError, PlanMismatchError, SpecError, shown
from hf_ckpt.spec import files
from hf_ckpt.spec.actions import Action
from hf_ckpt.spec.plan import Block, Plan, Prediction
from hf_ckpt.spec.spec import Spec

# Each line repeats the one before nine times: expanded, the last has 53 million characters.
BOMB = "a: &a [xxxxxxxx]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True)
)
MOST_TEXT = 4000  # most characters of an error about one file


def plan_of(blocks, name="model.layers.{}"):
    return Plan(
        "llama",
        "LlamaModel",
        tuple((Block(name.format(place), "decoder", place, "Layer"), Action("full")) for place in range(blocks)),
        Prediction(9, 2e-05, 8, (("blocks", 4),), 10, "cpu"),
    )


# --- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [BOMB, "policy: &p full\nengine: *p\n", "a: &a {b: 1}\npolicy:\n  <<: *a\n"])
def test_aliases_are_refused_where_they_stand(text, tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"not valid YAML: line \d has the alias \*[ap]; write out") as caught:
        Spec.parse(path)
    assert len(str(caught.value)) < MOST_TEXT
    with pytest.raises(PlanMismatchError, match="has the alias"):
        Plan.load(path)


@contextlib.contextmanager
def few_bytes():
    """Fail if Python objects in the block exceed 20 MB at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_errors_stay_short_however_much_is_given(tmp_path):
    """Errors stay short: texts of values are cut before they are built, and so is the list of problems."""
    many = {f"key{number}": "x" * 1000 for number in range(5000)}
    deep: dict = {}
    inner = deep
    for _ in range(5000):
        inner["layers"] = {}
        inner = inner["layers"]
    wide = [["x" * 1000] * 1000] * 1000
    wrong = [{"rules": [{"layers": "x", "policy": "ful"}] * 100_000}, {"save": wide}, {"budget": deep}, {"rules": deep}]
    for given in [
        many,
        deep,
        {"policy": wide},
        {"y" * 10**6: 1},
        {"layers": 10**5000},
        {"budget": "9" * 10**6},
        *wrong,
    ]:
        with few_bytes(), pytest.raises(SpecError) as caught:
            Spec.parse(given)
        assert len(str(caught.value)) < MOST_TEXT
    with pytest.raises(SpecError, match="4990 further keys"):
        Spec.parse(many)
    told = SpecError([f"problem {number}" for number in range(1000)])  # such as a thousand block numbers
    assert len(told.problems) == 1000
    assert str(told).startswith("1000 problems")
    assert str(told).endswith("  - problem 19\n  ... and 980 more")
    for damaged in (deep, {**plan_of(2).to_dict(), "stacks": deep}, {**plan_of(2).to_dict(), "head": deep}):
        with pytest.raises(PlanMismatchError) as refused:
            Plan.from_dict(damaged)
        assert len(str(refused.value)) < MOST_TEXT


def test_shown_values():
    assert shown("full") == "'full'"
    assert shown({"a": [1, None]}) == "{'a': [1, None]}"
    assert shown("x" * 500, 20) == shown("x" * 10**6, 20)
    assert len(shown("x" * 500, 20)) == 20
    assert shown("x y", quoted=False) == "x y"
    assert shown(10**9000) == "a value of type int"


def test_json_is_not_read_by_the_yaml_parser(tmp_path, monkeypatch):
    """JSON is read without PyYAML, which takes a hundred times as long for a plan of many blocks."""
    plan = plan_of(16_000)
    plan.save(tmp_path / "plan.json")
    os.link(tmp_path / "plan.json", tmp_path / "plan")
    monkeypatch.setattr(files, "load_yaml", None)
    for name in ("plan.json", "plan"):
        assert Plan.load(tmp_path / name) == plan
    (tmp_path / "plan").write_bytes((tmp_path / "plan.json").read_bytes()[:-3])
    with pytest.raises(PlanMismatchError, match="not valid JSON"):
        Plan.load(tmp_path / "plan")


def test_what_is_no_json_may_be_yaml(tmp_path):
    path = tmp_path / "spec"
    path.write_text("{policy: full, layers: 2-}")
    assert Spec.parse(path) == Spec(layers="2-")
    path.write_bytes(b"\xef\xbb\xbf" + b'{"policy": "none"}')  # as Windows editors write
    assert Spec.parse(path).policy == "none"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("plan.json", 2**24 + 1, "larger than 16.00 MiB"),
        ("plan.yaml", 2**20 + 1, "larger than 1.00 MiB; write it as JSON"),
    ],
)
def test_large_files_are_refused(name, size, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"#" * size)
    with pytest.raises(SpecError, match=said):
        Spec.parse(path)
    with pytest.raises(PlanMismatchError, match=said):
        Plan.load(path)


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path):
    plan = plan_of(2000, "model.layers.{}" + "x" * 600)
    with pytest.raises(FileError, match=r"more than 1\.00 MiB of YAML"):
        plan.save(tmp_path / "plan.yaml")
    assert os.listdir(tmp_path) == []
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused = []

    def read():
        for path in (tmp_path / "pipe", "/dev/zero", tmp_path):
            for reader in (Spec.parse, Plan.load):
                with pytest.raises((SpecError, PlanMismatchError)) as caught:
                    reader(path)
                refused.append("no regular file" in str(caught.value) or "Is a directory" in str(caught.value))

    reading = threading.Thread(target=read, daemon=True)  # opening a pipe without a writer blocks
    reading.start()
    reading.join(20)
    assert refused == [True] * 6


# --- what a saved plan must be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("hf_ckpt_plan",), True),
        (("hf_ckpt_plan",), 1.0),
        (("prediction", "budget_bytes"), "20GiB"),
        (("prediction", "budget_bytes"), True),
        (("prediction", "peak_bytes"), 1.5),
        (("prediction", "tokens"), -1),
        (("prediction", "parts"), {"blocks": "4"}),
        (("prediction", "step_seconds"), "nan"),
        (("prediction", "step_seconds"), True),
        (("prediction", "device"), ["cpu"]),
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


# --- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plan.json", "plan.yaml"])
def test_a_full_disk_leaves_the_plan_that_was_there(name, tmp_path):
    plan_of(2).save(tmp_path / name)
    with full_disk(4096), pytest.raises(FileError, match="cannot be written: "):
        plan_of(500).save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan_of(2)
    assert os.listdir(tmp_path) == [name]
    plan_of(500).save(tmp_path / name)
    assert Plan.load(tmp_path / name) == plan_of(500)


def test_where_no_plan_can_be_saved(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name, said in {
        "plan.txt": "must end in .json or .yaml or .yml",
        "plan": "must end in",
        "no/plan.json": "there is no folder",
        "folder.json": "it is a folder",
        "nul\0.json": "null",
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


def test_yaml_of_pure_python_refuses_the_same(monkeypatch):
    """PyYAML without its C loader refuses the same texts."""
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(ValueError, match="has the alias"):
        files.load_yaml(BOMB)
    with pytest.raises(ValueError, match="levels deep"):
        files.load_yaml("[" * 200 + "]" * 200)
    assert files.load_yaml("a: {b: [1, 2e-05]}") == {"a": {"b": [1, "2e-05"]}}
