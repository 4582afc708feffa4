"""Times that are measured on this machine, those of the device table, and transformers' own checkpointing."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import pytest
from helpers.planned import saved_config

import hf_ckpt
from hf_ckpt.errors import HfCkptError
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.prediction import timings
from hf_ckpt.prediction.batches import step_of_workload
from hf_ckpt.prediction.devices import DEVICES, device_like, device_named
from hf_ckpt.prediction.timeline import step_nanoseconds
from hf_ckpt.prediction.timings import ShallowModels, depths_of, measured
from hf_ckpt.prediction.trace import chunked_head, trace_costs
from hf_ckpt.prediction.workload import Workload, skeleton_of_workload
from hf_ckpt.spec.actions import Action, candidates

SMALL = Workload("gpt2", batch=2, tokens=64)


@functools.cache
def small():
    """(costs, skeleton, step) of a small workload on the CPU."""
    skeleton = skeleton_of_workload(SMALL)
    step = step_of_workload(SMALL, skeleton)
    return trace_costs(skeleton, step, DEVICES["cpu"], actions=candidates()), skeleton, step


def test_measured_times_take_the_place_of_the_tables():
    """Blocks that take 1, 2, 3, 4 ms by action, and 10 ms around them, give steps of just that."""
    costs = small()[0]
    block = {action: 0.001 * (number + 1) for number, action in enumerate(costs.actions)}
    optimizer = lambda depth: 0.010 + 0.002 * depth  # noqa: E731
    found = measured(costs, lambda depth, action: 0.010 + depth * block[action], optimizer_seconds=optimizer)
    for number, action in enumerate(costs.actions):
        seconds = (step_nanoseconds(found, found.uniform(number)) - found.optimizer_nanoseconds) / 1e9
        assert seconds == pytest.approx(0.010 + 12 * block[action], rel=0.02)
    assert "measured" in found.notes[-1]
    assert found.optimizer_nanoseconds == pytest.approx(34e6, rel=1e-6)  # of 12 blocks


def test_of_all_turns_the_fastest_counts():
    """A machine that is busy for most turns makes blocks slower, and an action that it hits is not the slower one."""
    costs = small()[0]
    busy = iter([7.0, 3.0, 1.0, 5.0, 9.0])
    speed = 1.0
    seconds = {}

    def step(depth, action):
        nonlocal speed
        if (depth, action) in seconds or not seconds:  # a new turn
            seconds.clear()
            speed = next(busy)
        seconds[depth, action] = speed * (0.010 + 0.004 * depth)
        return seconds[depth, action]

    found = measured(costs, step)
    quiet = measured(costs, lambda depth, action: 0.010 + 0.004 * depth)
    assert [step_nanoseconds(found, found.uniform(number)) for number in range(len(costs.actions))] == [
        step_nanoseconds(quiet, quiet.uniform(number)) for number in range(len(costs.actions))
    ]


def test_of_several_steps_the_fastest_counts(monkeypatch):
    """Behind one that is not timed."""
    taken, forwards = iter([3.0, 1.0, 2.0]), []

    @contextlib.contextmanager
    def stopwatch():
        seconds = []
        yield seconds
        seconds.append(next(taken))

    monkeypatch.setattr(timings, "stopwatch", stopwatch)
    model = tiny_model("llama", layers=2)
    model.register_forward_pre_hook(lambda *_: forwards.append(sum(hf_ckpt.describe(model).recomputed.values())))
    assert timings.timed_step(model, tiny_batch("llama"), Action("full"), steps=3) == 1.0
    assert forwards == [0, 2, 4, 6]  # blocks recomputed before each


@pytest.mark.parametrize(("wanted", "found"), [((1, 3), (1, 3)), ((1, 20), (1, 12)), ((12, 14), (11, 12))])
def test_no_model_is_timed_that_is_deeper_than_its_own(wanted, found):
    """A config's depth is never exceeded, so that the deeper model would not be as deep as it was taken for."""
    costs = small()[0]
    assert depths_of(costs, wanted) == found
    one = [dataclasses.replace(stack, blocks=stack.blocks[:1]) for stack in costs.stacks]
    with pytest.raises(HfCkptError, match="has one block"):
        depths_of(dataclasses.replace(costs, stacks=tuple(one)))


def test_a_head_in_chunks_is_as_fast_as_the_measured_one():
    """Its times come from the table, whose mistake about the plain head is taken for its own, too."""
    costs, skeleton, step = small()
    head = tuple(dataclasses.replace(phase, nanoseconds=3 * phase.nanoseconds) for phase in costs.head)
    slow = dataclasses.replace(costs, head=head)
    by_table, by_measure = (chunked_head(found, skeleton, step, DEVICES["cpu"], 64) for found in (costs, slow))
    for phase, measured_phase in zip(by_table.head, by_measure.head, strict=True):
        assert measured_phase.nanoseconds == pytest.approx(3 * phase.nanoseconds, rel=0.01)
        assert measured_phase.points == phase.points


def test_blocks_are_really_timed(tmp_path):
    name = str(saved_config(tmp_path))
    models = ShallowModels(Workload(name, batch=1, tokens=16, dtype="float32"))
    taken = [models.step_seconds(depth, Action("full")) for depth in (1, 6)]
    taken += [models.optimizer_seconds(1)]
    assert all(seconds > 0 for seconds in taken)
    lion = ShallowModels(Workload(name, batch=1, tokens=16, optimizer="lion"))
    assert lion.optimizer_seconds(1) is None


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_are_known_by_their_own_names():
    for names in (
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("h100-pcie", "NVIDIA H100 PCIe"),
        ("h100-nvl", "NVIDIA H100 NVL"),
        ("gh200", "NVIDIA GH200 480GB"),
        ("a100-80", "NVIDIA A100-SXM4-80GB"),
        ("a100-40", "NVIDIA A100-PCIE-40GB"),
        ("v100-32", "Tesla V100-SXM2-32GB"),
        ("l40s", "NVIDIA L40S"),
        ("a10g", "NVIDIA A10G"),
        ("a6000", "NVIDIA RTX A6000"),
        ("6000-ada", "NVIDIA RTX 6000 Ada Generation"),
        ("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("5060-ti-16", "NVIDIA GeForce RTX 5060 Ti"),
        ("4070-ti-super", "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("4070-ti", "NVIDIA GeForce RTX 4070 Ti"),
        ("4070", "NVIDIA GeForce RTX 4070"),
        ("mi300x", "AMD Instinct MI300X"),
    ):
        assert device_like(names[1]) is DEVICES[names[0]], names
    for name, device in DEVICES.items():
        assert name == "cpu" or device_like(device.source.partition(",")[0]) is device, name
    assert device_like("NVIDIA A1000 Laptop GPU") is None
    with pytest.raises(HfCkptError, match="'b300' is not a known device; did you mean b200"):
        device_named("b300")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *(("rtx4090", "4090"), ("RTX 4090", "4090"), ("NVIDIA GeForce RTX 4090", "4090"), ("a100-80gb", "a100-80")),
        *(
            ("A100_80", "a100-80"),
            ("rtx-a6000", "a6000"),
            ("2080ti", "2080-ti"),
            ("Tesla T4", "t4"),
            ("V100 32GB", "v100-32"),
        ),
    ],
)
def test_devices_are_understood_as_people_write_them(name, row):
    assert device_named(name) is DEVICES[row]
