"""`hf-ckpt bench peers`, `max-batch` and `max-seq`, at sizes where no figure of time means anything."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ckpt import cli, compat, peerbench, peerreport, report
from hf_ckpt.errors import HfCkptError, InfeasibleError, MissingDependencyError, WorkerError
from hf_ckpt.peerbench import (
    BUDGETS,
    PLANNED,
    PLANNED_CHUNKED,
    LargestBench,
    LargestRow,
    PeerBench,
    PeerCase,
    PeerRow,
    Session,
    bench_largest,
    bench_peers,
    known_ways,
)
from hf_ckpt.peers import COMPILED, NONE, OUR_PEERS, OURS, PEERS, Peer
from hf_ckpt.plan import Action, Plan
from hf_ckpt.setups import Setup
from hf_ckpt.tiny import FAMILIES, tiny_model
from hf_ckpt.workers import _told

EAGER = [peer for peer in (*PEERS, *OUR_PEERS) if peer.group != COMPILED and not peer.to_host]
TRL = ["activation offloading (TRL)", "full, activation offloading (TRL)"]
TO_HOST = ["offload (HF)", *TRL, "offload"]
NAMED = {peer.name: peer for peer in (*PEERS, *OUR_PEERS)}


class InProcess:
    """As a worker, but here; figures that need a process of their own are left out."""

    def __init__(self, make, *arguments, preload=()):
        self.make, self.arguments, self.found = make, arguments, None

    def ask(self, name, *arguments):
        try:
            self.found = self.found or self.make(*self.arguments)
            return getattr(self.found, name)(*arguments)
        except Exception as error:
            raise WorkerError(*_told(error)) from error

    def close(self):
        if self.found is not None and hasattr(self.found, "_exit"):
            self.found._exit.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()


@pytest.fixture
def here(monkeypatch):
    """Without processes, and without touching this one's allocator."""
    monkeypatch.setattr(peerbench, "Worker", InProcess)
    monkeypatch.setattr(peerbench, "keep_freed_memory", lambda: None)


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Family -> config of a model whose activations outweigh its weights."""
    folder = tmp_path_factory.mktemp("configs")
    for family in FAMILIES:
        model = tiny_model(family, layers=5, hidden=32, attention="sdpa")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder / family)
    return {family: str(folder / family / "config.json") for family in FAMILIES}


@pytest.fixture
def setup(configs):
    return Setup(configs["llama"], batch=4, tokens=160, dtype="float32")


def measured(setup, peer, path):
    """Figures of one way, in this process."""
    session = Session(setup, peer)
    with session._exit:
        found = session.compare(path, peer is NONE)
        return {**found, **session.peaks(), "live_bytes": session.live_peak(), "seconds": session.timed()}


@pytest.fixture(scope="module")
def figures(configs, tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "gradients.pt"
    setup = Setup(configs["llama"], batch=4, tokens=160, dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peerbench, "keep_freed_memory", lambda: None)
        return {peer.name: measured(setup, peer, path) for peer in EAGER}


# --- the ways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [peer.name for peer in EAGER if peer is not NONE])
def test_every_way_runs_something_again_and_gives_the_same_gradients(figures, name):
    row = figures[name]
    assert row["recomputed"] > 0
    if "head" in name:  # sums in another order
        assert 0 < row["difference"] < 1e-5
        assert row["first_difference"] is not None
    else:
        assert (row["first_difference"], row["difference"]) == (None, 0.0)
    assert row["seconds"] > 0


@pytest.mark.parametrize("name", [peer.name for peer in EAGER])
def test_the_allocator_and_the_count_of_tensors_agree(figures, name):
    """On this model no kernel takes scratch memory to speak of."""
    assert figures[name]["allocated_bytes"] == pytest.approx(figures[name]["live_bytes"], rel=0.01)


def test_ways_save_what_they_say(figures):
    peak = {name: row["allocated_bytes"] for name, row in figures.items()}
    assert peak["none"] > peak["every_n_layers: 4 (HF)"] > peak["every_n_layers: 2 (HF)"] > peak["full (HF)"]
    assert peak["none"] > peak["SAC, all matmuls + attention"] > peak["SAC, every 2nd matmul + attention"]
    assert peak["SAC, every 2nd matmul + attention"] > peak["SAC, attention"] > peak["full"]
    assert peak["none"] > peak["selective"] > peak["selective, save attention"]
    assert peak["full"] == pytest.approx(peak["full (HF)"], rel=0.001)
    assert peak["head in chunks"] < peak["none"]


class Watching(TorchDispatchMode):
    """Counts products of matrices and attention."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "products", "attention"),
    [
        ("none", 0, 0),
        ("SAC, all matmuls + attention", 0, 0),
        ("SAC, every 2nd matmul + attention", 3, 0),  # k_proj, o_proj and up_proj of seven
        ("SAC, attention", 6, 0),  # but for the last, which nothing needs
        ("full (HF)", 6, 1),
    ],
)
def test_what_is_run_again_in_a_block(setup, here, name, products, attention):
    """Against no checkpointing, in a LLaMA of 5 blocks."""
    counts = {}
    for way in ("none", name):
        session = Session(setup, NAMED[way])
        with session._exit:
            session.step()
            with Watching() as watching:
                session._backward()
        counts[way] = watching.counts
    more = {operation: counts[name][operation] - counts["none"][operation] for operation in counts[name]}
    found = {
        kind: sum(count for operation, count in more.items() if kind in operation) for kind in ("aten.mm", "_flash")
    }
    assert found == {"aten.mm": 5 * products, "_flash": 5 * attention}


def test_transformers_runs_each_of_its_blocks_again(figures):
    names = ("full (HF)", "every_n_layers: 2 (HF)", "every_n_layers: 3 (HF)", "every_n_layers: 4 (HF)")
    assert [figures[name]["recomputed"] for name in names] == [5, 3, 2, 2]


@pytest.mark.parametrize("name", TO_HOST)
def test_moving_to_the_host_needs_another_device(setup, here, name):
    assert NAMED[name].to_host
    with pytest.raises(HfCkptError, match="needs an accelerator"):
        Session(setup, NAMED[name])


def test_every_way_that_moves_is_known():
    assert [peer.name for peer in (*PEERS, *OUR_PEERS) if peer.to_host] == TO_HOST


def test_trl_is_not_there(setup, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl.models.activation_offloading", None)
    with pytest.raises(MissingDependencyError, match="pip install trl"):
        Session(setup, Peer("activation offloading", "TRL", {"full": False}))


def test_transformers_without_these_options(setup, here, monkeypatch):
    monkeypatch.setattr(compat, "HAS_EVERY_N_LAYERS", False)
    with pytest.raises(HfCkptError, match="has no every_n_layers"):
        Session(setup, NAMED["every_n_layers: 2 (HF)"])


def test_models_without_a_vocabulary_have_no_head_to_cut(configs, here):
    with pytest.raises(HfCkptError, match="BertForSequenceClassification has no head over a vocabulary"):
        Session(Setup(configs["bert"], batch=2, tokens=16), NAMED["head in chunks"])


def test_a_compiled_budget_is_kept(setup, here, monkeypatch, tmp_path):
    """With a backend that partitions as inductor does, and compiles nothing."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compile_(model, backend="aot_eager_decomp_partition"))
    from torch._functorch import config

    before = config.activation_memory_budget
    plain = measured(setup, NONE, tmp_path / "gradients.pt")
    peaks = {}
    for share in (0.3, 1.0):
        row = measured(setup, NAMED[f"compiled, budget {share:g}"], tmp_path / "gradients.pt")
        assert row["difference"] < 1e-4
        assert row["recomputed"] is None  # inside a graph
        peaks[share] = row["allocated_bytes"]
        torch._dynamo.reset()
    assert peaks[0.3] < 0.9 * peaks[1.0]
    assert peaks[1.0] <= 1.05 * plain["allocated_bytes"]
    assert config.activation_memory_budget == before


def test_adapters_have_gradients_from_the_first_step_on(configs, here):
    session = Session(Setup(configs["llama"], batch=2, tokens=16, lora=4, dtype="float32"), NONE)
    session.step()
    gradients = {name: value.grad for name, value in session.model.named_parameters() if value.requires_grad}
    assert gradients
    assert all("lora" in name and bool(value.any()) for name, value in gradients.items())


def test_accumulated_micro_steps_add_up(configs, here):
    setup = Setup(configs["llama"], batch=2, tokens=16, dtype="float32")
    once, twice = (Session(dataclasses.replace(setup, accumulation=number), NONE) for number in (1, 2))
    for session in (once, twice):
        session._backward()
    pairs = zip(once.model.parameters(), twice.model.parameters(), strict=True)
    assert all(torch.allclose(one.grad, two.grad, atol=1e-6) for one, two in pairs)  # the same batch, half of it twice
    assert twice.facts() == {"blocks": 5, "tokens": 2 * 2 * 16}


def test_optimizers_that_torch_does_not_have(configs, here):
    with pytest.raises(HfCkptError, match="of PyTorch's own, but not with lion"):
        Session(Setup(configs["llama"], batch=1, tokens=16, optimizer="lion"), NONE)


# --- the comparison ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_peaks_are_those_predicted(configs, here, family):
    """Of every row that the planner can predict: T5's under transformers' own checkpointing among them."""
    setup = Setup(configs[family], batch=4, tokens=96, dtype="float32")
    found = bench_peers([setup], repeats=1, only=["transformers", OURS])
    assert found.ok
    case = found.cases[0]
    ran = [row for row in case.rows if row.error is None]
    assert {row.name for row in case.rows if row.error} == {
        *("offload (HF)", "offload"),
        *(("head in chunks", "full, head in chunks") if family == "bert" else ()),
    }
    assert len(ran) == 14 + (0 if family == "bert" else 2)
    assert all(row.peak_error is not None and row.seconds_error is not None for row in ran)
    assert {row.name: row.peak_error for row in ran if abs(row.peak_error) > 0.055} == {}  # the smallest of models
    lines = case.at_budgets()
    assert [line.share for line in lines] == list(BUDGETS)
    rows = {row.name: row for row in ran}
    assert all(rows[line.ours].allocated_bytes <= 1.02 * line.budget_bytes for line in lines)


def test_a_way_that_fails_is_a_row_that_says_so(setup, here, monkeypatch):
    monkeypatch.setattr(peerbench, "PEERS", (NONE, Peer("broken", "transformers", {"no_such_option": 1})))
    monkeypatch.setattr(peerbench, "OUR_PEERS", (Peer("misspelt", OURS, {"policy": "ful"}),))
    saved = []
    found = bench_peers([setup], repeats=2, on_case=lambda result: saved.append(len(result.cases)))
    rows = {row.name: row for row in found.cases[0].rows}
    assert "no_such_option" in rows["broken"].error
    assert "1 problem in the activation checkpointing spec" in rows["misspelt"].error
    assert rows["misspelt"].details.startswith("Traceback")
    assert all(len(row.step_seconds) == (0 if row.error else 2) for row in rows.values())
    assert all(len(row.reference_seconds) == len(row.step_seconds) for row in rows.values())
    assert saved == [1]


def test_ways_run_one_after_the_other_where_they_share_a_device(setup, here, monkeypatch):
    """Each is over before the next begins, the forecaster first, and all of the same is measured."""
    alive, most = [], []

    class Counting(InProcess):
        def ask(self, name, *arguments):
            if self not in alive:
                alive.append(self)
            most.append(len(alive))
            return super().ask(name, *arguments)

        def close(self):
            super().close()
            if self in alive:
                alive.remove(self)

    monkeypatch.setattr(peerbench, "Worker", Counting)
    together = bench_peers([setup], repeats=2, only=["full (HF)"])
    assert max(most) == 8  # the forecaster, none, full and five plans
    most.clear()
    run = peerbench._Case.run
    monkeypatch.setattr(peerbench._Case, "run", lambda self, repeats, forecaster=None: run(self, repeats))
    apart = bench_peers([setup], repeats=2, only=["full (HF)"])
    assert max(most) == 2  # the forecaster is not told to go before, because this is a CPU
    for case in (together.cases[0], apart.cases[0]):
        assert [len(row.step_seconds) for row in case.rows] == [2] * 7
    pairs = zip(together.cases[0].rows, apart.cases[0].rows, strict=True)
    assert all(one.recomputed == other.recomputed or one.plan for one, other in pairs)


def test_where_none_does_not_run_the_first_that_does_is_the_reference(setup, here, monkeypatch, capsys):
    make = peerbench.Session

    def session(setup, peer):
        if peer.name == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return make(setup, peer)

    monkeypatch.setattr(peerbench, "Session", session)
    found = bench_peers([setup], repeats=1, only=["full (HF)", "selective"])
    case = found.cases[0]
    rows = {row.name: row for row in case.rows}
    assert case.reference == "full (HF)"
    assert rows["none"].error == "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    assert len(rows["full (HF)"].reference_seconds) == 1
    assert rows["selective"].difference == 0.0
    assert found.ok
    assert PeerBench.from_dict(found.to_dict()).cases[0].reference == "full (HF)"
    peerreport.print_peers(found, report.make_console())
    assert "none does not run, compared with full (HF)" in capsys.readouterr().out.replace("\n", " ")


def test_where_nothing_runs(setup, here):
    with pytest.raises(HfCkptError, match=r"nothing runs on .* but not with lion"):
        bench_peers([dataclasses.replace(setup, optimizer="lion")], repeats=1, only=["TRL"])


def test_ways_that_nobody_knows():
    assert known_ways(["transformers", "selective"]) == ("transformers", "selective")
    with pytest.raises(HfCkptError, match=r"a way must be one of none, transformers, .* but is 'slective' instead"):
        known_ways(["slective"])


def row(name, group, peak, ratio, **more):
    times = {"step_seconds": [ratio] * 3, "reference_seconds": [1.0] * 3, "seconds": ratio}
    return PeerRow(name, group, allocated_bytes=peak, **times, **more)


PLAN = "LlamaForCausalLM (family llama), 2 of 4 blocks planned\n  decoder (4 x LlamaDecoderLayer): keep 0-1; full 2-3"


def made_up(**changes):
    rows = [
        row("none", "none", 100, 1.0, live_bytes=100, predicted_peak_bytes=80, predicted_seconds=0.5),
        row("full (HF)", "transformers", 40, 1.4),
        row("every_n_layers: 2 (HF)", "transformers", 60, 1.2),
        row("compiled, budget 0.3", COMPILED, 10, 0.1),
        row("full", OURS, 40, 1.5, recomputed=4),
        PeerRow("offload", OURS, error="needs an accelerator"),
        row("planned for 50%", OURS, 55, 1.1, recomputed=2, budget_share=0.5, budget_bytes=60, plan=PLAN),
        row("planned for 10%", OURS, 41, 1.5, recomputed=4, budget_share=0.1, budget_bytes=39, plan=PLAN),
        PeerRow("planned for 70%", OURS, error="[/no] memory", budget_share=0.7, budget_bytes=80, plan=PLAN),
    ]
    for name, found in changes.items():
        rows[int(name.removeprefix("row"))] = found
    case = PeerCase(Setup("some-model"), 4, 1024, rows)
    case.mark_frontier()
    circumstances = dict.fromkeys(("device", "threads", "cpus", "torch", "transformers", "date"), "x")
    return PeerBench(circumstances, 3, [case])


def test_frontier_and_budgets_by_hand():
    case = made_up().cases[0]
    assert [found.name for found in case.rows if found.frontier] == ["none", "full (HF)", "planned for 50%"]
    half, tenth, failed = case.at_budgets()
    assert (failed.fits, failed.ratio, failed.ahead) == (False, None, False)
    assert (half.rival, half.fits, half.ahead) == ("every_n_layers: 2 (HF)", True, True)
    assert half.ratio == pytest.approx(1.1 / 1.2)
    assert (tenth.rival, tenth.fits, tenth.ratio, tenth.ahead) == (None, False, None, False)


class Timed:
    """A way whose steps take these times, and that fails when there are no more."""

    def __init__(self, *seconds):
        self.seconds = iter(seconds)

    def ask(self, name):
        assert name == "timed"
        found = next(self.seconds, None)
        if found is None:
            raise WorkerError("killed", "")
        return found


def turns(tmp_path, count, **seconds):
    """`count` turns of `_Case`, in which ways beside `none` alternate with it."""
    peers = {name: NONE if name == "none" else Peer(name, OURS) for name in seconds}
    case = peerbench._Case(
        Setup("some-model"), {peer: PeerRow(peer.name, peer.group) for peer in peers.values()}, tmp_path, print
    )
    case.reference, case.facts = NONE, {"tokens": 30}
    workers = {peers[name]: Timed(*found) for name, found in seconds.items()}
    for _ in range(count):
        case._time({peer: worker for peer, worker in workers.items() if peer is not NONE}, workers)
    case._conclude()
    return {peer.name: row for peer, row in case.rows.items()}


def test_the_fastest_steps_of_a_turn_are_compared(tmp_path, monkeypatch):
    """The machine is half as fast in the second turn, and busy in one step of each: no ratio shows it."""
    monkeypatch.setattr(peerbench, "STEPS", 2)
    rows = turns(tmp_path, 2, none=[1, 8, 2, 2], full=[9, 1.5, 3, 16])
    full = rows["full"]
    assert (full.step_seconds, full.reference_seconds) == ([1.5, 3], [1, 2])
    assert full.time_ratios == [1.5, 1.5]
    assert (full.time_ratio, full.seconds, full.tokens_per_second) == (1.5, 1.5, 20.0)


def test_what_fails_on_the_way_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(peerbench, "STEPS", 2)
    rows = turns(tmp_path, 2, none=[1] * 4, full=[2] * 3, selective=[3] * 4)
    assert rows["full"].error == "killed"
    assert rows["full"].time_ratios == [2]
    assert rows["selective"].time_ratios == [3, 3]
    rows = turns(tmp_path, 2, none=[1, 1], full=[2] * 4)
    assert rows["none"].error == "killed"
    assert rows["full"].time_ratios == [2]
    rows = turns(tmp_path, 1, none=[], full=[2] * 2)
    assert (rows["none"].error, rows["full"].time_ratio, rows["full"].seconds) == ("killed", None, None)


def test_errors_of_predictions():
    none = made_up().cases[0].rows[0]
    assert none.peak_error == pytest.approx(0.25)
    assert none.seconds_error == pytest.approx(1.0)


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


def test_figures_survive_a_file():
    result = made_up()
    again = PeerBench.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.to_dict() == result.to_dict()
    with pytest.raises(HfCkptError, match="no figures of `hf-ckpt bench peers`"):
        PeerBench.from_dict({"rows": []})


def test_tables_and_picture(tmp_path, capsys):
    result = made_up()
    peerreport.print_peers(result, report.make_console())
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines()) <= 120
    assert "offload: needs an accelerator" in shown
    assert "keep 0-1; full 2-3" in shown
    assert "LlamaDecoderLayer" not in shown
    text = peerreport.peers_as_markdown(result)
    assert "| full (HF) | * |" in text
    assert re.search(r"^\| 50% \| 0 \| keep 0-1; full 2-3 \| .* \| every_n_layers: 2 \(HF\) \|", text, re.MULTILINE)
    assert "- offload: needs an accelerator" in text
    one = peerreport.budgets_as_markdown(result, [0.5])
    assert [line.split(" | ")[:2] for line in one.splitlines()[2:]] == [["| some-model", "50%"]]
    peerreport.save_peers_picture(result, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").stat().st_size > 10_000


# --- the largest that fits --------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_does_not(configs, here):
    setup = Setup(configs["gpt2"], batch=4, tokens=64, dtype="float32")
    budget = 6 * 2**20
    found = bench_largest(setup, "batch", budget, only=["full (HF)", "selective", "planned", "planned, head in chunks"])
    assert [row.name for row in found.rows] == ["none", "full (HF)", "selective", "planned", "planned, head in chunks"]
    for one in found.rows:
        assert one.error is None
        assert one.tried[one.largest] == one.peak_bytes <= budget
        beyond = one.tried[one.largest + 1]
        assert beyond is None or beyond > budget
        assert one.over_none == one.largest / found.rows[0].largest
    most = {one.name: one.largest for one in found.rows}
    assert most["none"] < most["selective"] < most["planned"] <= most["planned, head in chunks"]
    assert most["planned"] >= most["full (HF)"]


def test_sequences_are_no_longer_than_positions(configs, here):
    setup = Setup(configs["bert"], batch=1, tokens=8, dtype="float32")
    found = bench_largest(setup, "tokens", 2**30, only=["TRL"])
    assert found.rows[0].largest == 512
    assert found.rows[1].error == "needs an accelerator: a CPU has no host memory beside its own"


def test_what_cannot_be_planned_does_not_fit(setup, here):
    """Weights alone are more."""
    found = bench_largest(setup, "batch", 2**10, only=[PLANNED.name])
    assert [(one.largest, one.peak_bytes, one.error) for one in found.rows] == [(0, None, None)] * 2
    assert None in found.rows[1].tried.values()


def test_a_plan_that_is_predicted_too_low_is_made_again_for_less(configs, here, monkeypatch):
    setup = Setup(configs["gpt2"], batch=4, tokens=64, dtype="float32")
    measured_peak, given = peerbench._measured_peak, []

    def two_percent_more(peer, setup):
        given.append(peer.options)
        return measured_peak(peer, setup) * 102 // 100

    monkeypatch.setattr(peerbench, "_measured_peak", two_percent_more)
    budget = 12 * 2**20
    none, planned = bench_largest(setup, "batch", budget, only=[PLANNED.name]).rows
    assert planned.largest > 1.2 * none.largest
    assert planned.tried[planned.largest] <= budget
    limits = [plan.prediction.budget_bytes for plan in given if isinstance(plan, Plan)]
    assert min(limits) < max(limits) == budget


def test_plans_choose_from_what_users_plans_choose_from(configs, here):
    forecaster = peerbench.Forecaster(Setup(configs["llama"], batch=2, tokens=32, dtype="float32"))
    forecaster.take()
    costs = forecaster.timings.costs()
    linear = costs.actions.index(Action("selective", ("linear",)))
    made = peerbench._restricted(costs, peerbench.actions_for(forecaster.blueprint))
    assert all(linear in here for stack in costs.stacks for here in stack.choices)
    assert not any(linear in here for stack in made.stacks for here in stack.choices)
    for *_, plan in forecaster.plans():
        assert Action("selective", ("linear",)) not in dict(plan.actions).values()
    assert {"none", "full (HF)", "selective, save linear", "planned for 50%"} <= forecaster.predictions().keys()


def test_memory_that_runs_out_does_not_fit(setup, here, monkeypatch):
    def peak(peer, setup, budget_bytes, blueprint):
        if setup.batch > 9:
            raise WorkerError("OutOfMemoryError: CUDA out of memory. Tried to allocate")
        if peer.name == "full (HF)":
            raise WorkerError("KeyError: 'other'")
        return 1

    monkeypatch.setattr(peerbench, "_peak", peak)
    saved = []
    result = bench_largest(setup, "batch", 100, only=["full (HF)"], on_row=lambda found: saved.append(len(found.rows)))
    none, full = result.rows
    assert saved == [1, 2]  # what has been found is not lost with what comes next
    assert (none.largest, none.error) == (9, None)
    assert (full.largest, full.error) == (None, "KeyError: 'other'")


def test_heads_of_plans_that_are_not_there(configs, here):
    found = bench_largest(Setup(configs["bert"], batch=1, tokens=8), "batch", 2**20, only=[PLANNED_CHUNKED.name])
    assert "has no head over a vocabulary" in found.rows[1].error


def test_infeasible_is_no_error_of_a_worker():
    assert not issubclass(InfeasibleError, WorkerError)


def test_table_of_the_largest(capsys):
    rows = [LargestRow("none", "none", 3, 90, {3: 90, 4: 110}, 1.0), LargestRow("offload", OURS, error="needs more")]
    result = LargestBench({}, Setup("some-model"), "batch", 100, rows)
    peerreport.print_largest(result, report.make_console())
    shown = capsys.readouterr().out
    assert "most sequences within 100 B" in shown
    assert "needs more" in shown
    assert "| none | 3 (1.00x) |" in peerreport.largest_as_markdown([result])
    again = LargestBench.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again == result
    with pytest.raises(HfCkptError, match="no figures of `hf-ckpt bench max-batch`"):
        LargestBench.from_dict({"rows": []})


# --- the command, and real processes ----------------------------------------------------------------------------------


def test_the_command_with_processes_of_their_own(configs, tmp_path, capsys):
    words = ["bench", "peers", configs["llama"], "--batch", "2", "--seq", "32", "--dtype", "float32", "--repeats", "1"]
    files = {name: tmp_path / f"peers.{name}" for name in ("json", "png")}
    words += [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main([*words, "--only", "full (HF)", "--only", "offload"]) == 0
    found = json.loads(files["json"].read_text())
    rows = {one["name"]: one for one in found["cases"][0]["rows"]}
    assert set(rows) == {"none", "full (HF)", "offload", *(f"planned for {share:.0%}" for share in BUDGETS)}
    assert rows["offload"]["error"].startswith("needs an accelerator")
    assert rows["full (HF)"]["difference"] == 0.0
    assert rows["full (HF)"]["reserved_bytes"] > 50 * 2**20
    assert len(rows["full (HF)"]["step_seconds"]) == 1
    assert files["png"].stat().st_size > 10_000
    capsys.readouterr()
    assert cli.main(["bench", "peers", "--show", str(files["json"]), "--markdown", str(tmp_path / "peers.md")]) == 0
    assert "full (HF)" in capsys.readouterr().out
    assert "| full (HF) |" in (tmp_path / "peers.md").read_text()


def test_the_command_for_the_largest(configs, tmp_path, capsys):
    words = ["bench", "max-seq", configs["bert"], "--batch", "1", "--seq", "256", "--dtype", "float32"]
    words += ["--budget", "1GiB", "--only", "TRL", "--json", str(tmp_path / "most.json")]
    assert cli.main(words) == 0
    found = json.loads((tmp_path / "most.json").read_text())
    assert [one["largest"] for one in found["rows"]] == [512, None, None]
    assert "most tokens within 1.00 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["peers", "--only", "nobody"], "a way must be one of"),
        (["peers", "--show", "no-such.json"], "cannot read figures from no-such.json"),
        (["max-batch", "mini-gpt2", "--budget", "much"], "a size must look like"),
    ],
)
def test_wrong_words(words, told, capsys):
    assert cli.main(["bench", *words]) == 2
    assert told in capsys.readouterr().err
