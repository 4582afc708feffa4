"""`budget` and `auto`: how much there is, what is logged, and plans of several ranks."""

from __future__ import annotations

import json
import types

import pytest
import torch
from helpers.planned import SIZES, model_of
from helpers.processes import torchrun
from helpers.steps import enable, step
from helpers.trainers import FLAG, Rows, trainer

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.measure import machine
from hf_ckpt.measure.machine import DeviceMemory
from hf_ckpt.models.tiny import tiny_batch
from hf_ckpt.planner import live
from hf_ckpt.planner.live import limit_bytes
from hf_ckpt.prediction import optimizers
from hf_ckpt.spec.spec import Spec
from hf_ckpt.training.callback import METRICS_FILE

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("few_actions")]


# --- how much there is ------------------------------------------------------------------------------------------------


def test_limits():
    memory = DeviceMemory(total_bytes=1000, available_bytes=700, outside_bytes=None)
    for spec, limit in (
        ({"policy": "budget", "budget": 123}, 123),
        ({"policy": "budget", "budget": "1KiB"}, 1024),
        ({"policy": "budget", "budget": 0.5}, 500),
        ({"policy": "budget", "budget": "80%"}, 800),
        ("auto", 650),
    ):
        assert limit_bytes(Spec.parse(spec), memory) == limit


@pytest.mark.long
def test_auto_reads_the_machine(monkeypatch):
    model = model_of()
    hf_ckpt.install(model)
    enable(model, {"policy": "auto"})
    step(model, tiny_batch("llama"))
    planned = installation(model).planned
    assert 2**28 < planned.limit_bytes < planned.memory.total_bytes
    assert {action.kind for _, action in planned.plan.actions} == {"keep"}

    small = DeviceMemory(total_bytes=48 * 2**20, available_bytes=38 * 2**20, outside_bytes=0)
    monkeypatch.setattr(live, "device_memory", lambda *_: small)
    hf_ckpt.uninstall(model)
    hf_ckpt.install(model)
    enable(model, {"policy": "auto"})
    step(model, tiny_batch("llama", **SIZES))
    assert installation(model).planned.limit_bytes == 38 * 2**20 - round(0.05 * 48 * 2**20)
    assert hf_ckpt.describe(model).plan.active()


def test_the_container_is_what_counts(tmp_path, monkeypatch):
    """A cgroup's limit, less what it uses and cannot drop, where it is smaller than the machine."""
    files = {"memory.max": "1000000", "memory.current": "400000", "memory.stat": "anon 1\ninactive_file 100000\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    real = machine.Path
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path if path == "/sys/fs/cgroup" else real(path))
    memory = machine.device_memory(50)
    assert memory.total_bytes == 1000000
    assert memory.available_bytes == 1000000 - 300000 + 50


@pytest.mark.parametrize(
    ("name", "reader"), [("cuda", "mem_get_info"), ("xpu", "mem_get_info"), ("npu", "get_memory_info")]
)
def test_the_memory_of_every_accelerator_is_what_counts(name, reader, monkeypatch, caplog):
    """That of all devices of a device map together; the host's, with a warning, where torch does not tell it.
    An accelerator that fails to tell is an error: with the host's memory a share would be one of the wrong memory."""
    own = types.SimpleNamespace(memory_reserved=lambda device: 7, **{reader: lambda device: (100, 1000)})
    monkeypatch.setattr(compat, "accelerator_type", lambda: name)
    if reader == "get_memory_info":  # only the module for all accelerators has it
        monkeypatch.setattr(torch, "accelerator", own)
    else:
        monkeypatch.setattr(torch, name, own)
    assert machine.device_memory(50) == DeviceMemory(1000, 107, None)
    two = [types.SimpleNamespace(type=name, index=index) for index in (0, 1)]
    assert machine.device_memory(50, [*two, torch.device("cpu")]) == DeviceMemory(2000, 214, None)

    def failing(error):
        def read(device):
            raise error

        return read

    setattr(own, reader, failing(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        machine.device_memory(50)
    assert not caplog.records
    setattr(own, reader, failing(NotImplementedError("not for this type of device")))
    assert machine.device_memory(50).total_bytes > 2**28
    assert f"torch does not tell the memory of {name}" in caplog.text


def test_the_memory_of_mps_is_the_machines(monkeypatch, caplog):
    monkeypatch.setattr(compat, "accelerator_type", lambda: "mps")
    monkeypatch.setattr(compat, "memory_readers", lambda device_type: pytest.fail("nobody may ask"))
    assert machine.device_memory(50).outside_bytes is not None
    assert not caplog.records


# --- the callback -----------------------------------------------------------------------------------------------------


def trained(folder, spec, model=None):
    """A model after four steps of 4 x 128 tokens under a spec, and every line of the metrics file."""
    model = model or model_of()
    hf_ckpt.install(model)
    figures = [hf_ckpt.MemoryTimeCallback()]
    keys = {"per_device_train_batch_size": 4, f"{FLAG}_kwargs": spec, "save_strategy": "no"}
    trainer(folder, model, callbacks=figures, rows=Rows(count=64, tokens=128), **keys).train()
    return model, [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


@pytest.mark.long
def test_plan_and_prediction_are_logged(tmp_path, capsys):
    model, rows = trained(tmp_path, {"policy": "budget", "budget": "60MiB"})
    plans = [row for row in rows if row["event"] == "plan"]
    assert len(plans) == 1
    assert plans[0]["limit_bytes"] == 60 * 2**20
    assert plans[0]["batch"] == "4 x 128 tokens"
    assert hf_ckpt.Plan.from_dict(plans[0]["plan"]) == hf_ckpt.describe(model).plan
    predicted = plans[0]["plan"]["prediction"]["peak_bytes"]
    logs = [row for row in rows if row["event"] == "log"]
    assert all(row["memory/predicted_gib"] == predicted / 2**30 for row in logs)
    assert all(isinstance(row["memory/prediction_error"], float) for row in logs)
    assert "predicted" in capsys.readouterr().err


# --- several ranks ----------------------------------------------------------------------------------------------------


UNEQUAL = {
    "budget": [{"policy": "budget", "budget": "3500KiB"}],
    "auto": [{"policy": "auto"}],
    "offload": [{"policy": "offload"}],
    "segments": [{"policy": "full", "segments": 2}],
    "segments beside none": [{"policy": "full", "segments": 2}, {"policy": "none"}],
}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Two processes under DDP, rank 1 with longer sequences, then with one longer still."""
    folder = tmp_path_factory.mktemp("unequal")
    case = {"family": "llama", "tokens": [[16, 16, 16], [32, 32, 48]]}
    (folder / "cases.json").write_text(json.dumps({name: {**case, "specs": specs} for name, specs in UNEQUAL.items()}))
    torchrun("budget_worker.py", folder / "cases.json", folder, timeout=150)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNEQUAL)
def test_ranks_with_batches_of_their_own_train_as_without(unequal, name):
    for rank, found in enumerate(results[name] for results in unequal):
        assert "error" not in found, found["error"]
        assert found["different"] == [[], [], []]
        nothing = name == "auto" or (name == "segments beside none" and rank == 1)  # tiny models fit anywhere
        assert [count > 0 for count in found["recomputed"]] == [not nothing] * 3


@pytest.mark.slow
def test_ranks_agree_though_their_batches_differ(unequal):
    """The first plan is the same on both; a later one is each rank's own."""
    for name in ("budget", "auto"):
        ranks = [results[name] for results in unequal]
        assert [found["shapes"][0] for found in ranks] == ["2 x 32 tokens"] * 2
        assert ranks[0]["plans"][0] == ranks[1]["plans"][0]
        own = "2 x 16 tokens" if name == "budget" else "2 x 32 tokens"  # where nothing is recomputed, one serves both
        assert [found["shapes"][2] for found in ranks] == [own, "2 x 48 tokens"]
    assert unequal[0]["budget"]["limits"] == unequal[1]["budget"]["limits"]
    assert unequal[0]["auto"]["limits"][0] == unequal[1]["auto"]["limits"][0]


def test_optimizer_state_in_host_memory_is_no_part_of_an_accelerators_peak(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert optimizers.state_bytes(optimizer) == 2 * weight.nbytes + 4  # and the number of steps
    monkeypatch.setattr(compat, "accelerator_type", lambda: "cuda")
    assert optimizers.state_bytes(optimizer) == 0
