"""Committed figures, values derived from them, and the tables on pages."""

from __future__ import annotations

import peer_figures
import pytest
import tables
from harness import Results
from peer_figures import at_budgets, fault, on_frontier, peak_error, seconds_error
from ways import OURS

PLAN = "LlamaForCausalLM (family llama), 2 of 4 blocks planned\n  decoder (4 x LlamaDecoderLayer): keep 0-1; full 2-3"
COMPARISON = " ".join((tables.ROOT / "docs" / "comparison.md").read_text(encoding="utf-8").split())


def row(name, group, peak, ratio, **more):
    times = {"step_seconds": [ratio] * 3, "reference_seconds": [1.0] * 3}
    return {"name": name, "group": group, "allocated_bytes": peak, "first_difference": None, **times, **more}


def failed(name, **more):
    return {**row(name, "hf_ckpt", None, 1.0), "error": "[/no] memory", "step_seconds": [], **more}


def made_up():
    """A case whose results can be checked by hand."""
    rows = [
        row("none", "none", 100, 1.0, predicted_peak_bytes=80, predicted_seconds=0.5),
        row("full (HF)", "transformers", 40, 1.4),
        row("every_n_layers: 2 (HF)", "transformers", 60, 1.2),
        row("compiled, budget 0.3", "torch.compile", 10, 0.1, difference=0.01),
        row("full", "hf_ckpt", 40, 1.5, recomputed=4),
        failed("offload"),
        row("planned for 50%", "hf_ckpt", 55, 1.1, recomputed=2, budget_share=0.5, budget_bytes=60, plan=PLAN),
        row("planned for 10%", "hf_ckpt", 41, 1.5, recomputed=4, budget_share=0.1, budget_bytes=39, plan=PLAN),
        failed("planned for 70%", budget_share=0.7, budget_bytes=80, plan=PLAN),
    ]
    return {"reference": "none", "repeatable": True, "blocks": 4, "rows": rows}


def test_frontier_budgets_and_errors_by_hand():
    case = made_up()
    assert [found["name"] for found in case["rows"] if on_frontier(case, found)] == [
        "none",
        "full (HF)",
        "planned for 50%",
    ]
    half, tenth, broken = at_budgets(case)
    assert (half.rival["name"], half.fits, half.ahead) == ("every_n_layers: 2 (HF)", True, True)
    assert half.ratio == pytest.approx(1.1 / 1.2)
    assert (tenth.rival, tenth.fits, tenth.ratio, tenth.ahead) == (None, False, None, False)
    assert (broken.fits, broken.ratio, broken.ahead) == (False, None, False)
    none, other = case["rows"][:2]
    assert (peak_error(none), seconds_error(case, none)) == (pytest.approx(0.25), pytest.approx(1.0))
    assert (peak_error(other), seconds_error(case, other)) == (None, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recomputed": 0}, "full: nothing was recomputed"),
        ({"first_difference": "a.weight"}, "full: gradients differ: a.weight"),
        ({"first_difference": "a.weight", "name": "head in chunks"}, None),
        ({"first_difference": "a.weight", "group": "transformers"}, None),
        ({"recomputed": 0, "plan": PLAN}, None),  # a plan may keep everything
        ({}, None),
    ],
)
def test_faults_of_our_own_rows(changes, told):
    found = {**row("full", "hf_ckpt", 40, 1.5, recomputed=4), **changes}
    assert fault(made_up(), found) == told
    if "first_difference" in changes:
        assert fault({**made_up(), "repeatable": False}, found) is None


def test_tables_and_picture_of_peers(tmp_path):
    results = Results({}, {}, {"some-model": made_up()})
    ways, errors, budgets = peer_figures.tables(results)
    assert "| full (HF) | * | 0 |" in ways.markdown()
    assert ("some-model", "offload", "[/no] memory") in errors.rows
    assert budgets.rows[0][:4] == ("some-model", "50%", "0", "keep 0-1; full 2-3")
    assert budgets.rows[0][6:] == ("every_n_layers: 2 (HF)", "0", "1.20x", "0.92")
    assert [cells[1] for cells in peer_figures.budgets_table(results, [0.5]).rows] == ["50%"]
    peer_figures.draw(results, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


# --- committed figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.relative_to(tables.ROOT).as_posix())
def test_tables_are_those_of_their_figures(page):
    """Committed tables match their figures; `python recipes/benchmarks/tables.py` writes them."""
    text = page.read_text(encoding="utf-8")
    assert tables.rewritten(text) == text
    assert text.count("figures -->") == 2 * len(tables.MARKED.findall(text))


def test_every_table_is_shown_once():
    names = [match[1] for page in tables.pages() for match in tables.MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(tables.TABLES)


@pytest.mark.parametrize("path", sorted(tables.HERE.glob("*-cpu.json")), ids=lambda path: path.stem)
def test_every_file_of_figures_can_be_shown(path):
    if path.stem != "demo-cpu":
        assert Results.read(path).good
    assert path.name in (tables.HERE / "README.md").read_text(encoding="utf-8")
    assert "traceback" not in path.read_text(encoding="utf-8")  # it holds paths of a machine


def rows_of(name):
    return [(case, found) for case in tables.read(name).good.values() for found in case["rows"]]


def lines_of(name):
    return [line for case in tables.read(name).good.values() for line in at_budgets(case)]


def worst_error(name):
    ours = (found for _, found in rows_of(name) if found["group"] == OURS)
    return max(abs(error) for found in ours if (error := peak_error(found)) is not None)


def test_what_the_comparison_says_was_measured():
    peers, lora = (f"{100 * worst_error(name):.1f} %" for name in ("peers", "peers-lora"))
    assert f"Peaks were predicted within {peers}." in COMPARISON
    assert f"up to {lora} of a peak" in COMPARISON
    names = [name for name, _ in tables.COMPARED.values()]
    assert not [told for name in names for case, found in rows_of(name) if (told := fault(case, found))]
    plans = [line.ours for name in names for line in lines_of(name)]
    over = [plan["allocated_bytes"] / plan["budget_bytes"] - 1 for plan in plans]
    assert f"Of {len(plans)} plans, {sum(share > 0 for share in over)} exceeded" in COMPARISON
    assert f"by {100 * max(over):.1f} %" in COMPARISON


def test_each_largest_is_the_largest():
    """One more than each reported maximum was tried and is too much."""
    for name in ("max-batch", "max-seq"):
        results = tables.read(name)
        assert len(results.good) >= 14
        for case in results.good.values():
            beyond = case["tried"].get(str(case["largest"] + 1))
            assert beyond is None or beyond > 256 * 2**20


def test_every_run_of_the_demo_gave_the_same_gradients():
    runs = tables.read_values(tables.HERE / "demo-cpu.json")["runs"]
    assert len(runs) == 6
    assert all(run["equal"] for run in runs)
