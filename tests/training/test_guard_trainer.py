"""A guard around the steps of one Trainer, and of every Trainer in a process."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.failing import FULL, HEAD, OFFLOAD, SELECTIVE, train
from helpers.steps import assert_same
from transformers import Trainer

import hf_ckpt
from hf_ckpt import __main__
from hf_ckpt.training.guard import guarded_training_step

pytestmark = pytest.mark.usefixtures("host_memory", "little_to_collect")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """History and weights of a training that never runs out of memory."""
    return train(tmp_path_factory.mktemp("plain"), ())[1:]


def test_trainer_goes_on_as_if_nothing_had_happened(tmp_path, undisturbed):
    history, weights = undisturbed
    trainer, found, others = train(tmp_path / "guarded", (hf_ckpt.OomGuardMixin,), at=(1, 4, 7))
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert trainer.oom_guard.attempts == 3
    assert trainer.oom_guard.taken == [SELECTIVE, FULL, HEAD] or trainer.oom_guard.taken == [SELECTIVE, FULL, OFFLOAD]
    assert type(trainer).calls > 12 + 3 - 1  # 12 micro-steps, three of them retried, and the micro-steps before them
    assert min(hf_ckpt.describe(trainer.model).recomputed.values()) > 0


def test_every_trainer_of_the_process(tmp_path, everywhere, undisturbed):
    history, weights = undisturbed
    everywhere(spec="selective", around_training_step=guarded_training_step)
    trainer, found, others = train(tmp_path / "guarded", (), at=(0,), spec="selective")
    assert found == history
    assert_same({"loss": None, **weights}, {"loss": None, **others})
    assert (trainer.oom_guard.attempts, trainer.oom_guard.taken) == (1, [FULL])
    hf_ckpt.uninstall()
    assert Trainer.training_step.__qualname__ == "Trainer.training_step"
    assert not hasattr(Trainer.training_step, "__wrapped__")


def test_tokens_of_a_step_that_ran_twice_count_once(tmp_path):
    trainer, *_ = train(tmp_path, (hf_ckpt.OomGuardMixin,), at=(0, 3, 5))
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["time/tokens_per_s"] * row["time/step_s"] for row in rows] == [pytest.approx(2 * 2 * 16)] * 6


def test_on_the_command_line(tmp_path, monkeypatch, undisturbed):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "import torch\n"
        "from helpers.failing import train\n"
        "trainer, history, _ = train(sys.argv[1], (), at=(2,))\n"
        "found = {'attempts': trainer.oom_guard.attempts, 'taken': trainer.oom_guard.taken, 'history': history}\n"
        "open(sys.argv[2], 'w').write(json.dumps(found))\n"
    )
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = tmp_path / "found.json"
    assert __main__.main(["--oom-guard", str(script), str(tmp_path / "guarded"), str(out)]) == 0
    assert json.loads(out.read_text()) == {"attempts": 1, "taken": [SELECTIVE], "history": undisturbed[0]}
