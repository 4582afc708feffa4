"""`hf-ckpt bench engines`, at sizes where no figure of time means anything."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from hf_ckpt import bench, cli, report
from hf_ckpt.bench import (
    ENGINES,
    EVERY_SECOND,
    HOST_SIZES,
    NONE,
    REBUILD,
    SAC,
    Engine,
    Settings,
    bench_engines,
    bench_model,
    engines_for,
)
from hf_ckpt.engines import offload
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.errors import HfCkptError, MissingDependencyError
from hf_ckpt.families import find_blocks
from hf_ckpt.measure import BlockBytes
from hf_ckpt.tiny import FAMILIES

SMALL = {"layers": 2, "hidden": 32, "batch": 2, "tokens": 16, "repeats": 2, "host_rounds": 0, "device": "cpu"}
WORDS = ["--layers", "2", "--hidden", "32", "--batch", "2", "--tokens", "16", "--repeats", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_host_model(monkeypatch):
    monkeypatch.setitem(HOST_SIZES, "layers", 2)


class Block(torch.nn.Module):
    """Keeps its input (for the product), the product (for the exponential's place: its own result) and returns 2x."""

    def forward(self, x):
        scratch = x + 1  # freed at the end
        return (x * x).exp() * float(scratch.numel() > 0)


def test_bytes_of_blocks_worked_out_by_hand():
    """Each block leaves its exponential, which the backward of `exp` holds, and its output; products are freed."""
    blocks = [Block(), Block()]
    batch = {"x": torch.ones(1000)}  # 4000 bytes each
    weight = torch.nn.Parameter(torch.ones(1000))
    with BlockBytes(blocks, batch) as live:
        x = batch["x"] * weight  # made outside
        for block in blocks:
            x = block(x)
        inside, everywhere = live.block_bytes, live.current_bytes
        (x * x).sum()  # made outside
        assert live.block_bytes == inside
        assert inside == 2 * 2 * 4000
        assert everywhere == live.start_bytes + inside + 4000  # and x before the first block
        del x
    assert live.block_bytes == 0
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_a_batch_is_no_part_of_what_blocks_keep():
    batch = {"x": torch.ones(1000), "use_cache": False}
    block = torch.nn.Flatten(0)  # a view of the batch: the block is the first to touch it
    with BlockBytes([block], batch) as live:
        kept = block(batch["x"])
    assert (live.start_bytes, live.block_bytes) == (4000, 0)
    del kept


@pytest.mark.parametrize("family", FAMILIES)
def test_every_engine_has_a_row(family):
    result = bench_engines(Settings(families=(family,), **SMALL))
    assert [(case.family, case.tuning) for case in result.cases] == [(family, "full"), (family, "lora")]
    for case in result.cases:
        assert [row.engine for row in case.rows] == [engine.name for engine in ENGINES]
        assert [row.problem for row in case.rows] == [None] * len(ENGINES)
        rows = {row.engine: row for row in case.rows}
        # T5's attention modules take another kernel when transformers itself turns their flags on.
        assert all(row.equal for row in case.rows if not (family == "t5" and row.foreign))
        assert rows["none"].recomputed == 0
        assert all(row.recomputed for name, row in rows.items() if name != "none")
        assert rows["full"].recomputed == case.blocks
        assert rows["full"].block_bytes < rows["rebuild"].block_bytes < rows["none"].block_bytes
        assert rows["full"].block_bytes < rows[EVERY_SECOND.name].block_bytes < rows["none"].block_bytes
        assert all(len(row.step_seconds) == len(row.time_ratios) == 2 for row in case.rows)
        assert rows["none"].time_ratios == [1, 1]
    assert result.ok


def test_models_are_left_as_they_were():
    model, _ = bench_model(Settings(**SMALL), "llama", "lora")
    hooks = [len(module._forward_hooks) for module in model.modules()]
    for engine in ENGINES:
        with engine.turned_on(model):
            pass
        assert [len(module._forward_hooks) for module in model.modules()] == hooks
        assert not any(module.gradient_checkpointing for module in find_blocks(model).modules.values())


def test_everything_lands_in_the_files(tmp_path, capsys):
    words = ["bench", "engines", "--family", "llama", "--tuning", "full", *WORDS, "--host-rounds", "1"]
    files = [tmp_path / "x" / name for name in ("engines.json", "engines.png", "block.png")]
    assert cli.main([*words, "--json", str(files[0]), "--png", str(files[1]), "--block-png", str(files[2])]) == 0
    printed = capsys.readouterr().out
    assert "llama, full fine-tuning, 2 blocks" in printed
    assert "LoRA" not in printed
    assert all(engine.name in printed for engine in ENGINES)
    found = json.loads(files[0].read_text())
    assert found["ok"]
    assert found["settings"]["hidden"] == 32
    assert found["settings"]["lora_rank"] == 8
    assert found["circumstances"].keys() == {
        *("date", "device", "cpus", "threads", "python", "torch", "transformers", "peft", "trl")
    }
    (case,) = found["cases"]
    assert case["block_input_bytes"] == 2 * 16 * 32 * 2
    assert [row["engine"] for row in case["rows"]] == [engine.name for engine in ENGINES]
    for row in case["rows"]:
        assert row["gradients_equal"] is True
        assert row["error"] is None
        assert row["step_seconds_median"] > 0
        assert len(row["time_ratios"]) == 2
        assert (row["host_seconds"] is None) == (row["engine"] == "none")
    assert case["rows"][1]["kept"]
    assert case["rows"][1]["dropped"]
    assert [file.read_bytes()[:4] for file in files[1:]] == [b"\x89PNG"] * 2


def test_an_engine_that_does_nothing_is_exit_code_1(monkeypatch, capsys):
    """Gradients are perfectly equal then."""
    monkeypatch.setattr(FullRegion, "_checkpoint", lambda self, fn, *args: fn(*args))
    words = ["bench", "engines", "--family", "gpt2", "--tuning", "full", *WORDS, "--host-rounds", "0"]
    assert cli.main(words) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "full: 2 of 2 planned blocks recomputed nothing" in printed


def test_an_engine_that_is_never_on_is_idle():
    result = bench_engines(Settings(families=("llama",), tunings=("full",), **SMALL), engines=(NONE, Engine("nothing")))
    assert not result.ok
    assert result.cases[0].rows[1].idle == "nothing was planned"


def test_an_engine_that_raises_is_listed(monkeypatch, capsys):
    def fail(self, fn, *args):
        raise RuntimeError("[no] such thing")

    monkeypatch.setattr(FullRegion, "_checkpoint", fail)
    result = bench_engines(Settings(families=("llama",), tunings=("full",), **{**SMALL, "host_rounds": 1}))
    rows = {row.engine: row for row in result.cases[0].rows}
    assert rows["full"].error == "RuntimeError: [no] such thing"
    assert rows["full"].to_dict()["gradients_equal"] is None
    assert rows["rebuild"].problem is None
    assert not result.ok
    report.print_engines(result)
    assert "full: RuntimeError: [no] such thing" in capsys.readouterr().out


def test_other_gradients_of_transformers_itself_are_told_and_no_failure(capsys):
    result = bench_engines(Settings(families=("t5",), tunings=("full",), **SMALL), engines=(NONE, EVERY_SECOND))
    row = result.cases[0].rows[1]
    if row.foreign and not row.equal:
        report.print_engines(result)
        assert f"{EVERY_SECOND.name}: gradients differ: {row.first_difference}" in capsys.readouterr().out
    assert result.ok


def test_the_reference_may_not_fail(monkeypatch):
    monkeypatch.setattr(bench, "_step", lambda model, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench_engines(Settings(families=("llama",), tunings=("full",), **SMALL))


def test_other_gradients_are_found():
    """Dropout drawn again in recomputation."""
    careless = Engine("careless", {"policy": "full", "preserve_rng_state": False})
    settings = Settings(families=("gpt2",), tunings=("full",), **SMALL, dropout=0.5)
    result = bench_engines(settings, engines=(NONE, REBUILD, SAC, careless))
    *good, bad = result.cases[0].rows
    assert [row.problem for row in good] == [None] * 3
    assert bad.problem.startswith("gradients differ: transformer.")
    assert not result.ok


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--family", "lama"], "family must be one of llama, gpt2, bert, t5, but is 'lama' instead."),
        (["--tuning", "half"], "tuning must be one of full, lora"),
        (["--dtype", "int8"], "dtype must be one of bfloat16"),
        (["--hidden", "40"], "hidden must be a multiple of 16"),
    ],
)
def test_asked_wrongly(words, said, capsys):
    assert cli.main(["bench", "engines", *words]) == 2
    assert said in capsys.readouterr().err


def test_pictures_need_matplotlib_and_the_rebuild_engine(monkeypatch, tmp_path):
    result = bench_engines(Settings(families=("llama",), tunings=("full",), **SMALL), engines=(NONE, SAC))
    with pytest.raises(HfCkptError, match="needs figures of `rebuild`"):
        report.save_block_picture(result, tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hf-ckpt\[plot\]'"):
        report.save_engines_picture(result, tmp_path / "x.png")


# --- plans ------------------------------------------------------------------------------------------------------------


def test_offloading_engines_move_and_give_the_same_gradients(monkeypatch):
    """On a CPU that pretends to have a host beside it; without one they have no row."""
    assert engines_for("cpu") == ENGINES
    ours = [engine for engine in engines_for("cuda") if engine.spec is not None and "offload" in str(engine.spec)]
    assert [engine.name for engine in ours] == ["offload", "rebuild, offload saved"]
    moved = []

    class AtOnce:
        def out(self, tensor, host):
            moved.append(tensor.nbytes)
            host.copy_(tensor)

        def back(self, host):
            return host.clone(), None

        def wait(self, copy):
            pass

        drop = wait

    monkeypatch.setattr(offload, "lane_of", lambda device: AtOnce())
    monkeypatch.setattr(offload, "LEAST_BYTES", 0)
    (case,) = bench_engines(
        Settings(**SMALL, families=("llama",), tunings=("full",)), engines=[ENGINES[0], *ours]
    ).cases
    assert [row.problem for row in case.rows] == [None] * 3
    assert moved


def test_heads_are_measured_whole_and_in_chunks(tmp_path, capsys):
    words = ["--vocabulary", "4000", "--tokens", "512", "--hidden", "32", "--chunk", "64", "--chunk", "128"]
    assert cli.main(["bench", "head", *words, "--repeats", "2", "--json", str(tmp_path / "head.json")]) == 0
    found = json.loads((tmp_path / "head.json").read_text())
    assert found["ok"]
    rows = found["rows"]
    assert [row["head"] for row in rows] == ["full", 64, 128] * 4
    for whole, small, large in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert whole["bytes_ratio"] == whole["time_ratio"] == 1
        assert whole["peak_bytes"] > large["peak_bytes"] > small["peak_bytes"] > 0
        assert large["peak_bytes"] - large["weight_gradient_bytes"] < whole["peak_bytes"] / 3
        assert small["error"] <= 1.2 * whole["error"] + 1e-6
        assert len(small["step_seconds"]) == 2
    assert "the head and its loss" in capsys.readouterr().out
    assert cli.main(["bench", "head", "--tokens", "64", "--chunk", "64"]) == 2  # there is but one


def test_plans_are_measured_beside_what_they_are_planned_for(tmp_path, capsys):
    """Every option runs with the same gradients; peaks are as predicted, and those of plans within their rivals'."""
    files = ["--json", str(tmp_path / "plans.json"), "--png", str(tmp_path / "plans.png")]
    sizes = ["--layers", "6", "--hidden", "64", "--tokens", "64", "--repeats", "2", "--device", "cpu"]
    assert cli.main(["bench", "plans", "--family", "gpt2", *sizes, *files]) == 0
    assert (tmp_path / "plans.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "plans.json").read_text())
    assert found["ok"]
    rows = {row["name"]: row for row in found["cases"][0]["rows"]}
    rivals = [row["against"] for row in rows.values() if row["against"]]
    assert rivals == ["every_n_layers: 4", "every_n_layers: 2", "full"]
    for row in rows.values():
        assert abs(row["peak_error"]) <= 0.03, row
        assert row["time_ratio"] > 0
        assert row["recomputed"] > 0 or row["name"] == "none" or row["against"] == "every_n_layers: 4"
        if row["against"]:
            assert row["peak_bytes"] <= rows[row["against"]]["peak_bytes"] * 1.01
            assert row["ratio_to_rival"] > 0
    cut = rows["planned, -60% activations"]
    activations = found["cases"][0]["none_activation_bytes"]
    start = rows["none"]["predicted_peak_bytes"] - activations
    assert cut["peak_bytes"] - start <= 0.41 * activations
    assert "planned, every_n_layers: 2" in capsys.readouterr().out
