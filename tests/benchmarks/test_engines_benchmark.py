"""`engines.py`, at sizes where no figure of time means anything."""

from __future__ import annotations

import json

import engines
import head
import pytest
import torch
from engines import (
    ENGINES,
    EVERY_SECOND,
    HOST_SIZES,
    OFFLOADS,
    REBUILD,
    SAC,
    Settings,
    bench_engines,
    bench_model,
    engines_for,
)
from ways import NONE, OURS, TRANSFORMERS, Way

from hf_ckpt.engines import offload
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.measure.live import BlockBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import FAMILIES

SMALL = {"layers": 2, "hidden": 32, "batch": 2, "tokens": 16, "repeats": 1, "host_rounds": 0, "device": "cpu"}
WORDS = ["--layers", "2", "--hidden", "32", "--batch", "2", "--tokens", "16", "--repeats", "2", "--device", "cpu"]
FULL = ENGINES[4]


@pytest.fixture(autouse=True)
def small_host_model(monkeypatch):
    monkeypatch.setitem(HOST_SIZES, "layers", 2)


# --- what blocks keep, counted ----------------------------------------------------------------------------------------


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


# --- every engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family", [family if family == "llama" else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_every_engine_has_a_row_and_everything_lands_in_the_files(family, tmp_path, capsys):
    files = [tmp_path / name for name in ("engines.json", "engines.png", "block.png")]
    words = ["--json", str(files[0]), "--png", str(files[1]), "--block-png", str(files[2]), "--host-rounds", "1"]
    assert engines.main(["--family", family, *WORDS, *words]) == 0
    printed = capsys.readouterr().out
    assert f"{family}, full fine-tuning, " in printed
    assert f"{family}, LoRA, " in printed
    assert all(engine.name in printed for engine in ENGINES)
    assert [file.read_bytes()[:4] for file in files[1:]] == [b"\x89PNG"] * 2
    found = json.loads(files[0].read_text())
    assert found["ok"]
    assert found["settings"]["hidden"] == 32
    assert found["settings"]["lora_rank"] == 8
    assert found["circumstances"].keys() == {
        *("date", "device", "cpus", "threads", "python", "torch", "transformers", "peft", "trl")
    }
    assert [(case["family"], case["tuning"]) for case in found["cases"]] == [(family, "full"), (family, "lora")]
    for case in found["cases"]:
        check_case(case)


def check_case(case):
    names = [engine.name for engine in ENGINES]
    rows = {row["engine"]: row for row in case["rows"]}
    assert [row["engine"] for row in case["rows"]] == names
    assert case["block_input_bytes"] == 2 * 16 * 32 * 2
    assert case["blocks"] == (4 if case["family"] == "t5" else 2)
    for name, row in rows.items():
        assert (row["error"], row["idle"]) == (None, None)
        # T5's attention modules take another kernel when transformers itself turns their flags on.
        assert row["gradients_equal"] or (case["family"] == "t5" and row["foreign"])
        assert (row["recomputed"] > 0) == (name != "none")
        assert len(row["step_seconds"]) == len(row["time_ratios"]) == 2
        assert row["step_seconds_median"] > 0
        assert (row["host_seconds"] is None) == (name == "none")
    assert rows["none"]["time_ratios"] == [1, 1]
    assert rows["full"]["recomputed"] == case["blocks"]
    kept = {name: row["block_bytes"] for name, row in rows.items()}
    assert kept["full"] < kept["rebuild"] < kept["none"]
    assert kept["full"] < kept[EVERY_SECOND.name] < kept["none"]
    assert rows["rebuild"]["kept"]
    assert rows["rebuild"]["dropped"]


def test_models_are_left_as_they_were():
    model, _ = bench_model(Settings(**SMALL), "llama", "lora")
    hooks = [len(module._forward_hooks) for module in model.modules()]
    for engine in ENGINES:
        with engine.turned_on(model):
            pass
        assert [len(module._forward_hooks) for module in model.modules()] == hooks
        assert not any(module.gradient_checkpointing for module in find_blocks(model).modules.values())


# --- engines that fail ------------------------------------------------------------------------------------------------


def settings(family, **changes):
    return Settings(families=(family,), tunings=("full",), **{**SMALL, **changes})


def test_an_engine_that_does_nothing_is_exit_code_1(monkeypatch, capsys):
    """Gradients are perfectly equal then."""
    monkeypatch.setattr(FullRegion, "_checkpoint", lambda self, fn, *args: fn(*args))
    monkeypatch.setattr(engines, "ENGINES", (NONE, FULL))
    assert engines.main(["--family", "gpt2", "--tuning", "full", *WORDS, "--host-rounds", "0"]) == 1
    printed = capsys.readouterr().out
    assert "gpt2, full fine-tuning, 2 blocks" in printed
    assert "LoRA" not in printed
    assert "FAILED" in printed
    assert "full: 2 of 2 planned blocks recomputed nothing" in printed


def test_an_engine_that_is_never_on_is_idle():
    result = bench_engines(settings("llama"), engines=(NONE, Way("nothing", "none")))
    assert not result.ok
    assert result.cases[0].rows[1].idle == "nothing was planned"


def test_an_engine_that_raises_is_listed(monkeypatch):
    def fail(self, fn, *args):
        raise RuntimeError("[no] such thing")

    monkeypatch.setattr(FullRegion, "_checkpoint", fail)
    result = bench_engines(settings("llama", host_rounds=1), engines=(NONE, REBUILD, FULL))
    rows = {row.engine: row for row in result.cases[0].rows}
    assert rows["full"].error == "RuntimeError: [no] such thing"
    assert rows["full"].to_dict()["gradients_equal"] is None
    assert (rows["full"].step_seconds, rows["full"].host_seconds) == ([], None)
    assert rows["rebuild"].problem is None
    assert not result.ok


def test_the_reference_may_not_fail(monkeypatch):
    monkeypatch.setattr(engines, "_step", lambda model, inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench_engines(settings("llama"))


def test_other_gradients_are_found():
    """Dropout drawn again in recomputation."""
    careless = Way("careless", OURS, {"policy": "full", "preserve_rng_state": False})
    result = bench_engines(settings("gpt2", dropout=0.5), engines=(NONE, REBUILD, SAC, careless))
    *good, bad = result.cases[0].rows
    assert [row.problem for row in good] == [None] * 3
    assert bad.problem.startswith("gradients differ: transformer.")
    assert not result.ok


def test_offloading_engines_move_and_give_the_same_gradients(monkeypatch):
    """On a CPU that pretends to have a host beside it; without one they have no row."""
    assert engines_for("cpu") == ENGINES
    assert engines_for("cuda") == (*ENGINES, *OFFLOADS)
    ours = [engine for engine in OFFLOADS if engine.group == OURS]
    assert [engine.name for engine in ours] == ["offload", "rebuild, offload saved"]
    assert all(engine.group == TRANSFORMERS for engine in OFFLOADS[2:])
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
    (case,) = bench_engines(settings("llama"), engines=[NONE, *ours]).cases
    assert [row.problem for row in case.rows] == [None] * 3
    assert moved


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
    assert engines.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("script", [engines, head])
def test_a_device_that_is_not_here_is_refused(script, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(["--device", "foo"])
    assert ended.value.code == 2
    assert "--device: invalid choice: 'foo'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--png", "--block-png"])
def test_files_that_cannot_be_written_are_refused_before_anything_runs(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "bench_engines", None)
    for name, said in {"no/figures.json": "there is no folder", "figures.txt": "must end in"}.items():
        path = tmp_path / (name if option == "--json" else name.replace("json", "png"))
        assert engines.main([option, str(path)]) == 2
        assert said in capsys.readouterr().err
