"""The benchmark of accelerators on the simulated device, with tiny models, few rows and few steps."""

import importlib.util
import itertools

import gpu
import machine
import pytest
import session
import torch
from harness import Results
from torch._dynamo.backends.registry import lookup_backend

from accelerator import device
from hf_ckpt import compat

LONG, FOUR_BITS = gpu.LORA[2], gpu.LORA[3]
FEW = {
    "small": ([gpu.GPT2], [gpu.NONE, gpu.FULL, gpu.SECOND, gpu.PLANS[0]]),
    "lora": ([LONG, FOUR_BITS], [gpu.NONE, gpu.FULL, gpu.PLANS[0]]),
    "compiled": ([gpu.LLAMA], [gpu.NONE, gpu.FULL, gpu.COMPILED[0.5], gpu.COMPILED_PLANS[1]]),
    "peaks": ([gpu.BERT], [gpu.NONE, gpu.FULL, gpu.Budget(0.5)]),
    "host": (gpu.NARROW[1:], [gpu.NONE, gpu.FULL_SELECTIVE]),
    "table": ([gpu.LLAMA], [gpu.NONE, gpu.OFFLOAD_SAVED, gpu.FULL, gpu.WITH_HOST]),
}
"""Part -> models and ways of these tests."""
BYTES = {"allocated_bytes", "reserved_bytes", "saved_bytes", "recomputed", "first_seconds"}
TIMES = {"reference", "reference_seconds", "step_seconds"}
PLAN = {"plan", "predicted_peak_bytes", "budget_bytes", "budget_share"}


@pytest.fixture
def packages(monkeypatch):
    """What is installed: bitsandbytes is not, unless a test adds it."""
    find, added = importlib.util.find_spec, set()
    spec_of = lambda name, *more: find(name, *more) if name != "bitsandbytes" or name in added else None  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", spec_of)
    return added


@pytest.fixture
def run(nothing_compiled, packages, tmp_path, monkeypatch):
    """Run parts; returns the exit code and the rows by their names."""
    aot_eager = lookup_backend("aot_eager_decomp_partition")  # inductor does not know the simulated device
    monkeypatch.setattr(compat.compiler, "compile_graph", aot_eager)
    for module in (machine, session, gpu):
        monkeypatch.setattr(module, "DEVICE", device.NAME)
    for name, value in {"PARTS": FEW, "TURNS": 2, "STEPS": 1, "LAUNCHES": 2, "HOST_BLOCKS": (1, 2)}.items():
        monkeypatch.setattr(gpu, name, value)

    def run(*words, file="gpu.json"):
        code = gpu.main([*words, "--tiny", "--out", str(tmp_path / file)])
        return code, Results.read(tmp_path / file).cases

    return run


def names(*parts):
    pairs = [(part, pair) for part in parts for pair in itertools.product(*FEW[part])]
    return [f"{part}: {training.name}: {way.name}" for part, (training, way) in pairs]


def test_every_part_is_measured_once_with_the_figures_of_its_table(run, packages, monkeypatch, capsys):
    assert FEW.keys() == gpu.PARTS.keys()
    code, rows = run()
    assert (code, list(rows)) == (0, names(*FEW))
    for name, row in rows.items():
        part, model, way = name.split(": ", 2)
        fields = row.keys() - {"part", "model", "name", "group"}
        if "QLoRA" in model:
            assert row["left_out"] == "needs bitsandbytes, which is not installed"
        elif part == "host":
            assert fields == {"host_seconds"}
        else:
            predicted = PLAN if "planned" in way else {"predicted_peak_bytes"} if part == "peaks" else set()
            assert fields == BYTES | predicted | (set() if part == "peaks" else TIMES), name
            assert row["reserved_bytes"] >= row["allocated_bytes"] > row["saved_bytes"] > 0
        if part != "peaks" and "step_seconds" in row:
            assert (row["reference"], len(row["step_seconds"]), len(row["reference_seconds"])) == ("none", 2, 2)
        if "planned" in way and "plan" in row:
            assert row["predicted_peak_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.1), name
            assert row["allocated_bytes"] <= 1.05 * row["budget_bytes"], name
    counts = [rows[name]["recomputed"] for name in names("small")[:3]]
    assert counts == [None, 2, 1]
    tables = capsys.readouterr().out
    for heading in (
        "| model | way | step | of none | peak | reserved | predicted |",
        "| model | way | peak | reserved | predicted |",
        "| model | way | host, a block |",
        "| model | way | step | of none | peak | reserved | predicted | left out |",
    ):
        assert heading + "\n" in tables
    assert "| llama-8b, QLoRA, 2k | none | - | - | - | - | - | needs bitsandbytes, which is not installed |" in tables

    monkeypatch.setattr(gpu, "Session", None)  # nothing is measured again
    assert run() == (0, rows)
    packages.add("bitsandbytes")  # but for what can be measured now
    code, again = run()
    changed = {name: row for name, row in again.items() if row != rows[name]}
    assert (code, list(changed)) == (1, [name for name in names("lora") if "QLoRA" in name])
    assert all("error" in row for row in changed.values())
    assert "left: lora: llama-8b, QLoRA, 2k: none: TypeError: " in capsys.readouterr().out


def test_a_row_that_runs_out_of_memory_is_no_end(run):
    """Then `full` is the reference, and budgets lie between its peak and the memory of the device."""
    rows = run("lora")[1]
    none, full, plan = names("lora")[:3]
    size = (rows[none]["allocated_bytes"] + rows[full]["allocated_bytes"]) // 2
    with device.memory_of(size):
        code, less = run("lora", file="less.json")
        assert (code, less[none]["left_out"], less[full]["reference"]) == (0, "out of memory", "full")
        assert less[plan]["reference"] == "full"
        floor = less[full]["allocated_bytes"]
        assert less[plan]["budget_bytes"] == floor + round(0.25 * (size - floor))
        assert run("lora", file="less.json") == (0, less)


def test_events_need_no_times(run):
    """The host's clock times steps."""
    with device.no_event_times():
        assert run("small")[0] == 0


def test_a_part_ends_before_its_time_is_over(run, monkeypatch, capsys):
    monkeypatch.setattr(gpu.Run, "row", lambda self, part, training, way: {"part": part, "model": "any", "name": "any"})
    clock = itertools.count(step=7)  # each row takes 7 seconds, and so does each look at the clock between them
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    code, rows = run("small", "--minutes", str(30 / 60))
    assert (code, list(rows)) == (1, names("small")[:2])
    assert "left: small: gpt2-medium: every_n_layers: 2: not measured yet" in capsys.readouterr().out
    assert (run("small")[0], run("small")[0]) == (0, 0)


def test_what_cannot_be_measured_is_refused_by_name(run, tmp_path, monkeypatch, capsys):
    def refused(text, *words):
        with pytest.raises(SystemExit, match="2"):
            gpu.main(["small", *words])
        assert text in capsys.readouterr().err

    out = "--out", str(tmp_path / "gpu.json")
    refused("--out: give a file for the figures")
    with device.no_statistics():
        refused("needs an accelerator whose allocator reports peaks", *out)
    (tmp_path / "gpu.json").write_text('{"settings": {"tiny": true}, "circumstances": {}, "cases": {}}')
    refused("has figures of another run (tiny True there and False now", *out)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    refused("but torch trains on cpu here", *out)
    assert gpu.main(["--list"]) == 0
    assert "host\n  gpt2, dropout\n  none; full+selective\n" in capsys.readouterr().out


def test_qlora_trains_adapters_on_linear_layers_of_4_bits(monkeypatch, tmp_path):
    """With bitsandbytes' kernels of the CPU. The head stays as it is."""
    monkeypatch.setattr(session, "DEVICE", "cpu")
    tiny = gpu.Run(Results({}, {}), tmp_path, is_tiny=True)
    assert tiny.forecast(FOUR_BITS).keys() == {"none", "full"}
    settings = tiny.settings(FOUR_BITS)
    small = session.Session(settings, settings.config, gpu.NONE)
    layers = [module for module in small.model.modules() if hasattr(module, "lora_A")]
    assert {layer.base_layer.weight.dtype for layer in layers} == {torch.uint8}
    assert type(session.base_of(small.model).get_output_embeddings()) is torch.nn.Linear
    small.step()
    assert len(small.gradients()) == 2 * len(layers) == 2 * 2 * 7
