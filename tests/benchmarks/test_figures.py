"""Records of made-up figures: what follows from them, their files, tables and pictures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pictures
import pytest
import report
from engines import EngineBench, EngineCase, EngineRow, Settings
from figures import LargestBench, LargestRow, PeerBench, PeerCase, PeerRow, read_json, write_json
from ways import COMPILED, OURS, TRANSFORMERS

from hf_ckpt.console import make_console
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.prediction.workload import Workload

PLAN = "LlamaForCausalLM (family llama), 2 of 4 blocks planned\n  decoder (4 x LlamaDecoderLayer): keep 0-1; full 2-3"
CIRCUMSTANCES = dict.fromkeys(("device", "threads", "cpus", "torch", "transformers", "date"), "x")


def row(name, group, peak, ratio, **more):
    times = {"step_seconds": [ratio] * 3, "reference_seconds": [1.0] * 3, "seconds": ratio}
    return PeerRow(name, group, allocated_bytes=peak, **times, **more)


def made_up(reference="none", **changes):
    rows = [
        row("none", "none", 100, 1.0, live_bytes=100, predicted_peak_bytes=80, predicted_seconds=0.5),
        row("full (HF)", TRANSFORMERS, 40, 1.4),
        row("every_n_layers: 2 (HF)", TRANSFORMERS, 60, 1.2),
        row("compiled, budget 0.3", COMPILED, 10, 0.1),
        row("full", OURS, 40, 1.5, recomputed=4),
        PeerRow("offload", OURS, error="needs an accelerator"),
        row("planned for 50%", OURS, 55, 1.1, recomputed=2, budget_share=0.5, budget_bytes=60, plan=PLAN),
        row("planned for 10%", OURS, 41, 1.5, recomputed=4, budget_share=0.1, budget_bytes=39, plan=PLAN),
        PeerRow("planned for 70%", OURS, error="[/no] memory", budget_share=0.7, budget_bytes=80, plan=PLAN),
    ]
    for name, found in changes.items():
        rows[int(name.removeprefix("row"))] = found
    case = PeerCase(Workload("some-model"), 4, 1024, rows, reference)
    case.mark_frontier()
    return PeerBench(CIRCUMSTANCES, 3, [case])


def far():
    rows = [LargestRow("none", "none", 3, 90, {3: 90, 4: 110}, 1.0), LargestRow("offload", OURS, error="needs more")]
    return LargestBench({}, Workload("some-model"), "batch", 100, rows)


def some_engines(**changes):
    figures = {"block_bytes": 4096, "bytes_ratio": 1.0, "step_seconds": [0.5, 0.25], "time_ratios": [1.0, 1.0]}
    other = {**figures, "engine": "sac", "bytes_ratio": 0.5, "recomputed": 7, **changes}
    case = EngineCase("llama", "full", 2, 1024, [EngineRow("none", **figures), EngineRow(**other)])
    return EngineBench(Settings(device="cpu"), CIRCUMSTANCES, [case])


# --- what follows -----------------------------------------------------------------------------------------------------


def test_frontier_and_budgets_by_hand():
    case = made_up().cases[0]
    assert [found.name for found in case.rows if found.frontier] == ["none", "full (HF)", "planned for 50%"]
    half, tenth, failed = case.at_budgets()
    assert (failed.fits, failed.ratio, failed.ahead) == (False, None, False)
    assert (half.rival, half.fits, half.ahead) == ("every_n_layers: 2 (HF)", True, True)
    assert half.ratio == pytest.approx(1.1 / 1.2)
    assert (tenth.rival, tenth.fits, tenth.ratio, tenth.ahead) == (None, False, None, False)


def test_errors_of_predictions():
    none, other = made_up().cases[0].rows[:2]
    assert none.peak_error == pytest.approx(0.25)
    assert none.seconds_error == pytest.approx(1.0)
    assert (other.peak_error, other.seconds_error) == (None, None)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        (row("full", OURS, 40, 1.5, recomputed=0), "nothing was run again"),
        (row("full", OURS, 40, 1.5, recomputed=4, first_difference="a.weight"), "gradients differ: a.weight"),
        (row("head in chunks", OURS, 40, 1.5, recomputed=4, first_difference="a.weight"), None),
        (row("full", OURS, 40, 1.5, recomputed=4, first_difference="a.weight", repeatable=False), None),
        (row("full", OURS, 40, 1.5, recomputed=0, plan=PLAN), None),  # a plan may keep all
    ],
)
def test_faults_of_our_own_rows(found, fault):
    assert found.fault == fault
    assert made_up(row4=found).ok is (fault is None)


# --- files ------------------------------------------------------------------------------------------------------------


def test_figures_survive_a_file(tmp_path):
    for made, kind, script in ((made_up(), PeerBench, "peers"), (far(), LargestBench, "largest")):
        write_json(tmp_path / "figures.json", made.to_dict())
        again = kind.from_dict(read_json(tmp_path / "figures.json"))
        assert again == made
        assert again.to_dict() == made.to_dict()
        assert "setup" in json.dumps(made.to_dict())  # as files call it that were written before
        with pytest.raises(HfCkptError, match=f"no figures of `{script}.py`"):
            kind.from_dict({"rows": []})
    write_json(None, {})


# --- tables and pictures ----------------------------------------------------------------------------------------------


def test_tables_and_picture_of_peers(tmp_path, capsys):
    result = made_up()
    report.print_peers(result, make_console())
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 120
    assert "offload: needs an accelerator" in shown
    assert "planned for 70%: [/no] memory" in shown
    assert "keep 0-1; full 2-3" in shown
    assert "LlamaDecoderLayer" not in shown
    text = report.peers_as_markdown(result)
    assert "| full (HF) | * |" in text
    assert re.search(r"^\| 50% \| 0 \| keep 0-1; full 2-3 \| .* \| every_n_layers: 2 \(HF\) \|", text, re.MULTILINE)
    assert "- offload: needs an accelerator" in text
    one = report.budgets_as_markdown(result, [0.5])
    assert [line.split(" | ")[:2] for line in one.splitlines()[2:]] == [["| some-model", "50%"]]
    pictures.save_peers_picture(result, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


def test_the_table_says_what_was_compared_with_where_none_does_not_run(capsys):
    report.print_peers(made_up(reference="full (HF)"), make_console())
    assert "none does not run, compared with full (HF)" in " ".join(capsys.readouterr().out.split())


def test_table_of_the_largest(capsys):
    report.print_largest(far(), make_console())
    shown = capsys.readouterr().out
    assert "most sequences within 100 B" in shown
    assert "needs more" in shown
    assert "| none | 3 (1.00x) |" in report.largest_as_markdown([far()])


@pytest.mark.parametrize(
    ("changes", "ok", "told"),
    [
        ({}, True, "bit-equal"),
        ({"error": "RuntimeError: [no] such thing"}, False, "sac: RuntimeError: [no] such thing"),
        ({"idle": "nothing was planned"}, False, "sac: nothing was planned"),
        ({"first_difference": "a.weight"}, False, "sac: gradients differ: a.weight"),
        ({"first_difference": "a.weight", "foreign": True}, True, "sac: gradients differ: a.weight"),
    ],
)
def test_problems_of_engines_are_told(changes, ok, told, capsys):
    """Other gradients of transformers alone are no failure of hf_ckpt."""
    result = some_engines(**changes)
    assert (result.ok, result.cases[0].rows[1].problem is None) == (ok, ok)
    report.print_engines(result)
    shown = capsys.readouterr().out
    assert told in shown
    assert ("FAILED" in shown) is not ok
    assert max(len(line) for line in shown.splitlines()) <= 120


def test_pictures_need_matplotlib_and_the_rebuild_engine(monkeypatch, tmp_path):
    with pytest.raises(HfCkptError, match="needs figures of `rebuild`"):
        pictures.save_block_picture(some_engines(), tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-ckpt\[plot\]'"):
        pictures.save_engines_picture(some_engines(), tmp_path / "x.png")


def test_figures_of_engines_come_back_from_their_file():
    result = some_engines(kept_to_rebuild={"AddBackward0": 7})
    again = EngineBench.from_dict(json.loads(json.dumps(result.to_dict())))
    assert json.dumps(again.to_dict()) == json.dumps(result.to_dict())
    assert again.cases[0].rows[1].kept_to_rebuild == {"AddBackward0": 7}
    with pytest.raises(HfCkptError, match=r"no figures of `engines.py`"):
        EngineBench.from_dict({"cases": []})


def test_bytes_of_a_block_are_named_by_operations():
    """No name of an autograd node is left in the committed figures."""
    bench = EngineBench.from_dict(read_json(Path(pictures.__file__).with_name("engines-cpu.json")))
    rows = [row for case in bench.cases for row in case.rows]
    names = {name for row in rows for name in (*row.kept, *row.dropped)}
    assert len(names) > 10
    assert {pictures.operation_of(name) for name in ("LlamaRMSNorm", "NativeLayerNormBackward0")} == {"norm(x)"}
    assert not [name for name in names if pictures.operation_of(name) == name.removesuffix("Backward0")]
    assert pictures.operation_of("UnknownBackward0") == "Unknown"
