"""Pictures: a colour for each policy, labels that do not overlap, and redrawing from files."""

from __future__ import annotations

import itertools
import json

import pytest

from hf_ckpt.cli import demo
from hf_ckpt.cli.demo_run import TIMELINE_POINTS, DemoResult, DemoRun, thinned
from hf_ckpt.cli.main import main
from hf_ckpt.cli.pictures import PLANNED, colour_of_policy, common_area, drawing, label_points, text_box
from hf_ckpt.spec.actions import ACTIONS, OFFLOAD, SELECTIVE, candidates, colour_of

WAYS = ("none", "selective", "every_n_layers: 2", "full", "budget: 9MiB", "guard: 9MiB")


def demo_of(*names):
    """Results of a demo, in which all peaks differ."""
    runs = [
        DemoRun(
            name=name,
            losses=[1.0],
            equal=True,
            first_difference=None,
            recomputed=0,
            step_seconds=None if name.startswith("guard") else 1 + 0.01 * number,
            tokens_per_second=None if name.startswith("guard") else 9.0,
            resident_peak_bytes=2**30,
            live_peak_bytes=2**30 - number * 2**20,
            start_bytes=2**20,
            timeline=[2**20, 2**30 - number * 2**20, 2**20] * 1000,
            tightened=["one plan", "another plan"] if name.startswith("guard") else [],
        )
        for number, name in enumerate(names)
    ]
    return DemoResult("a model", "a text", 1, 8, 1, 8, "a source", runs)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("none", "keep"),
        ("full", "full"),
        ("full (HF)", "full"),
        ("full, head in chunks", "full"),
        ("selective", SELECTIVE),
        ("SAC, all matmuls + attention", SELECTIVE),
        ("rebuild", SELECTIVE),
        ("selective, save attention", "selective (save attention)"),
        ("rebuild, save attention", "selective (save attention)"),
        ("SAC, attention", "selective (save attention)"),
        ("offload (transformers)", OFFLOAD),
        ("full, activation offloading (TRL)", OFFLOAD),
        ("compiled, budget 0.5", "compiled (share 1)"),
    ],
)
def test_a_policy_has_the_colour_of_its_action(name, action):
    assert colour_of_policy(name) == colour_of(action) != "0.5"


def test_no_two_actions_look_alike():
    colours = [colour for record in ACTIONS.values() for colour in record.colours.values()]
    assert len({*colours, PLANNED, colour_of_policy("every_n_layers: 2")}) == len(colours) + 2
    for action in (*candidates(), *candidates(compiled=True)):
        assert colour_of(action) in colours
    assert len({colour_of_policy(name) for name in WAYS}) == len(WAYS)
    assert colour_of_policy("planned for 50%") == colour_of_policy("budget: 1MiB") == PLANNED


def test_labels_cover_neither_points_nor_each_other():
    points = [(x / 10, y / 10) for x, y in itertools.product(range(3), range(3))]
    with drawing() as pyplot:
        figure, axes = pyplot.subplots(figsize=(6, 4))
        axes.set(xlim=(-1, 2), ylim=(-1, 2))
        axes.scatter(*zip(*points, strict=True))
        label_points(axes, [(*point, f"point {number}") for number, point in enumerate(points)], [])
        assert [note.get_text() for note in axes.texts] == [f"point {number}" for number in range(9)]
        boxes = [text_box(note) for note in axes.texts]
        assert not any(common_area(one, other) for one, other in itertools.combinations(boxes, 2))
        for x, y in map(axes.transData.transform, points):
            assert not any(box.contains(x, y) for box in boxes)
        assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())
        pyplot.close(figure)


def test_a_timeline_in_a_file_is_short_and_keeps_its_peak():
    assert thinned([1, 2, 3]) == [1, 2, 3]
    assert thinned([]) == []
    assert thinned([0, 5, 1, 0, 2, 2, 0], points=3) == [5, 1, 2]
    many = list(range(10_007))
    found = thinned(many)
    assert (len(found), max(found)) == (TIMELINE_POINTS, 10_006)
    assert found == sorted(found)


def test_a_demo_is_drawn_again_from_its_file(tmp_path, capsys):
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(demo_of(*WAYS).to_dict()))
    assert main(["demo", "--show", str(file), "--out", str(tmp_path / "again")]) == 0
    assert "every_n_layers: 2" in capsys.readouterr().out
    demo.save_demo_picture(demo_of(*WAYS), tmp_path / "first.png")
    assert (tmp_path / "again" / "demo.png").stat().st_size > 20_000
    again = DemoResult.from_dict(json.loads(file.read_text()))
    assert again.to_dict() == demo_of(*WAYS).to_dict()


@pytest.mark.parametrize("text", ["{}", "[1]", '{"runs": [{}]}', "no json"])
def test_what_is_no_demo_is_refused(text, tmp_path, capsys):
    file = tmp_path / "figures.json"
    file.write_text(text)
    assert main(["demo", "--show", str(file), "--out", str(tmp_path)]) == 2
    assert "cannot read the figures of a demo" in capsys.readouterr().err
