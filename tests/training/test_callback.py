"""The Trainer from end to end: what the callback logs, where it logs, and that it does not change the training."""

from __future__ import annotations

import json
import logging
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from helpers.sparing import sparing
from helpers.trainers import FLAG, KNOWN, Rows, StopAt, metrics, trainer
from transformers import HfArgumentParser, Trainer, TrainingArguments

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.errors import PlanLostError
from hf_ckpt.measure.memory import PeakMeter
from hf_ckpt.models.tiny import tiny_model
from hf_ckpt.training import callback
from hf_ckpt.training.callback import MemoryTimeCallback


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different


@pytest.mark.compat
def test_figures_reach_the_file_the_history_and_the_console(tmp_path, capsys):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    run = trainer(tmp_path, model, callbacks=[MemoryTimeCallback()])
    run.train()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["memory/peak_gib"] > 0
        assert row["time/step_s"] > 0
        assert row["time/tokens_per_s"] == pytest.approx(2 * 12 / row["time/step_s"])
        # logits of the training step: batch 2, 12 tokens, 320 entries of 4 bytes
        assert row["memory/head_gib"] * 2**30 == 2 * 12 * 320 * 4
    start = metrics(tmp_path, "start")[0]
    assert start["memory_source"] == PeakMeter({torch.device("cpu")}).source
    assert [row["action"] for row in start["plan"]["stacks"]["decoder"]] == ["full"] * 4
    history = [row for row in run.state.log_history if "loss" in row]
    assert [row["memory/peak_gib"] for row in history] == [row["memory/peak_gib"] for row in rows]
    printed = capsys.readouterr()
    assert "memory/peak_gib" in printed.out  # the Trainer's own console line
    assert "this training run" in printed.err
    assert "full on all 4 blocks" in printed.err.partition("this training run")[2]
    assert sum(hf_ckpt.describe(model).recomputed.values()) == 4 * 4


@pytest.mark.compat
def test_a_short_run_that_logs_nothing_still_tells_its_memory(tmp_path, capsys):
    """The callback reports memory even if a run ends before `logging_steps`, and keeps progress bars intact."""
    trainer(tmp_path, callbacks=[MemoryTimeCallback()], logging_steps=500, disable_tqdm=False).train()
    assert metrics(tmp_path) == []
    (end,) = metrics(tmp_path, "end")
    assert end["memory/peak_gib"] > 0
    assert end["time/tokens_per_s"] == pytest.approx(2 * 12 / end["time/step_s"])
    said = capsys.readouterr().err
    assert re.search(r"[\r\n] *hf_ckpt: this training run", said)


@pytest.mark.long
def test_a_cpu_compares_no_peak_of_the_process_with_bytes_of_tensors(tmp_path, capsys, monkeypatch):
    """The predicted peak is compared only with a meter that counts tensors: resident size includes Python itself."""
    found = {}
    for exact in (False, True):
        monkeypatch.setattr(callback, "PeakMeter", lambda devices, exact=exact: Meter(exact))
        model = tiny_model("llama")
        hf_ckpt.install(model)
        spec = {f"{FLAG}_kwargs": {"policy": "budget", "budget": "1GiB"}}
        steps = {"max_steps": 10, "logging_steps": 10}  # until the plan is on
        trainer(tmp_path / str(exact), model, callbacks=[MemoryTimeCallback()], **steps, **spec).train()
        (row,) = metrics(tmp_path / str(exact))
        found[exact] = row["memory/prediction_error"]
        said = capsys.readouterr().err
        assert row["memory/predicted_gib"] > 0
        assert ("measured against it" in said, "tensors alone" in said) == (exact, not exact)
    assert found[False] is None
    assert found[True] == pytest.approx(2**30 / (row["memory/predicted_gib"] * 2**30) - 1)


class Meter(PeakMeter):
    """A meter that always reads 1 GiB."""

    def __init__(self, exact: bool) -> None:
        super().__init__([torch.device("mps")])
        self.exact = exact

    def peak_bytes(self) -> int:
        return 2**30


def test_of_a_head_in_chunks_a_chunk_is_told(tmp_path):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    spec = {f"{FLAG}_kwargs": {"policy": "full", "head": 8}}
    trainer(tmp_path, model, callbacks=[MemoryTimeCallback()], **spec).train()
    assert {round(row["memory/head_gib"] * 2**30) for row in metrics(tmp_path)} == {8 * 320 * 4}
    assert hf_ckpt.describe(model).chunked_heads == 4


def test_unknown_memory_is_null_never_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(callback, "PeakMeter", lambda devices: PeakMeter([torch.device("mps")]))
    run = trainer(tmp_path, max_steps=1)
    run.train()
    row = metrics(tmp_path)[0]
    assert row["memory/peak_gib"] is None
    assert "memory/peak_gib" not in run.state.log_history[0]


@pytest.mark.compat
def test_tensorboard_event_file_has_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = tiny_model("llama")
    hf_ckpt.install(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # logging_dir is deprecated, but works in both versions
        run = trainer(
            tmp_path,
            model,
            report_to="tensorboard",
            **({"logging_dir": str(tmp_path)} if "logging_dir" in KNOWN else {}),
        )
    run.train()  # the TensorBoard callback calls args.to_json_string()
    file = next(tmp_path.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(file))
    events.Reload()
    for key in ("memory/peak_gib", "time/step_s", "time/tokens_per_s"):
        logged = [event.value for event in events.Scalars(f"train/{key}")]
        assert logged == pytest.approx([row[key] for row in metrics(tmp_path)], rel=1e-5), key


def test_samples_where_the_inputs_cannot_be_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        compat.torch, "is_compiling", lambda: True
    )  # as inside a compiled graph, where hooks count nothing
    run = trainer(tmp_path, max_steps=2)
    run.train()
    row = metrics(tmp_path)[0]
    assert "time/tokens_per_s" not in row
    assert row["time/samples_per_s"] == pytest.approx(2 / row["time/step_s"])


@pytest.fixture
def hours_pass(monkeypatch):
    """A function that moves the step clock an hour ahead, to expose time that must not be counted."""
    real, ahead = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead[0])
    return lambda: ahead.append(ahead.pop() + 3600)


def test_evaluation_and_saving_are_not_counted(tmp_path, monkeypatch, hours_pass):
    """A slow evaluation with a large allocation changes neither the step time nor the peak."""
    keys = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, evaluate=True, **keys)
    evaluate, save = run.evaluate, run._save_checkpoint

    def slow_evaluate(*args, **kwargs):
        hours_pass()
        wasted = torch.ones(60_000_000)  # 229 MiB
        assert wasted[0] == 1
        del wasted
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(run, "evaluate", slow_evaluate)
    monkeypatch.setattr(run, "_save_checkpoint", lambda *args, **kwargs: (hours_pass(), save(*args, **kwargs)))
    run.train()
    rows = metrics(tmp_path)
    assert len(rows) == 4
    assert all(row["time/step_s"] < 1800 for row in rows)
    assert rows[-1]["memory/peak_gib"] - rows[0]["memory/peak_gib"] < 0.15


def test_evaluation_after_an_epoch_whose_last_step_is_logged_already(tmp_path, monkeypatch, hours_pass):
    """Evaluation after an already logged step is not counted: only the end of the epoch announces it."""
    run = trainer(tmp_path, evaluate=True, eval_strategy="epoch", max_steps=-1, num_train_epochs=2)
    run.add_callback(LogAtEpochEnd())
    evaluate = run.evaluate
    monkeypatch.setattr(run, "evaluate", lambda *args, **kwargs: hours_pass() or evaluate(*args, **kwargs))
    run.train()
    rows = metrics(tmp_path)
    assert len(rows) == 16
    assert all(row["time/step_s"] < 1800 for row in rows)


class LogAtEpochEnd(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        # Before our callback at the end of the epoch: the default flow sets the flag there with other settings.
        handler = compat.transformers.callback_handler_of(self)
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log = True


def test_window_of_several_steps_with_evaluation_between(tmp_path):
    """Evaluating every second step and logging every fourth gives one window over both halves."""
    run = trainer(
        tmp_path, evaluate=True, eval_strategy="steps", eval_steps=2, logging_steps=4, max_steps=8, num_train_epochs=3
    )
    run.train()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [4, 8]
    for row in rows:
        assert row["time/tokens_per_s"] == pytest.approx(4 * 24 / (4 * row["time/step_s"]))


@sparing("later", ["full", "none", "layers"], "layers")
def test_row_29_resume_equals_one_run_also_with_another_policy(tmp_path, later):
    """Resuming after 2 of 4 steps, also with another policy, equals one run; optimizer state exists from the start."""
    specs = {"full": {"policy": "full"}, "none": {"policy": "none"}, "layers": {"layers": "1,-1"}}

    def run(folder: Path, resume: Path | None, stop: int, spec: dict) -> tuple[dict, int]:
        model = tiny_model("llama", dropout=0.1)
        hf_ckpt.install(model)
        job = trainer(folder, model, max_steps=4, save_strategy="steps", save_steps=2, **{f"{FLAG}_kwargs": spec})
        if stop < 4:
            job.add_callback(StopAt(stop))
        job.train(resume_from_checkpoint=None if resume is None else str(resume))
        return weights(model), sum(hf_ckpt.describe(model).recomputed.values())

    whole, count = run(tmp_path / "whole", None, 4, specs["full"])
    assert count == 16
    run(tmp_path / "parts", None, 2, specs["full"])
    resumed, count = run(tmp_path / "parts", tmp_path / "parts" / "checkpoint-2", 4, specs[later])
    assert count == {"full": 8, "none": 0, "layers": 4}[later]
    assert_same_weights(whole, resumed)


@pytest.mark.compat
def test_second_train_keeps_the_plan(tmp_path):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    run = trainer(tmp_path, model, max_steps=1, **{f"{FLAG}_kwargs": {"layers": "0,2"}})
    run.train()
    run.args.max_steps = 2
    run.train()
    counts = hf_ckpt.describe(model).recomputed
    assert set(counts) == {"model.layers.0", "model.layers.2"}
    assert all(count == 3 for count in counts.values())  # 1 + 2 steps


@pytest.mark.compat
def test_flag_from_the_command_line_as_json(tmp_path):
    words = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--max_steps",
        "1",
        "--report_to",
        "none",
        "--logging_steps",
        "1",
    ]
    spec = '{"policy": "full", "layers": "3", "every_n_layers": 1}'  # "3" arrives as a number
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*words, f"--{FLAG}", "True", f"--{FLAG}_kwargs", spec]
    )
    assert json.loads(args.to_json_string())[f"{FLAG}_kwargs"]["policy"] == "full"
    model = tiny_model("llama")
    hf_ckpt.install(model)
    Trainer(model=model, args=args, train_dataset=Rows(), callbacks=[MemoryTimeCallback(summary=False)]).train()
    assert hf_ckpt.describe(model).recomputed == {"model.layers.3": 1}


@pytest.mark.compat
def test_a_normal_run_warns_of_nothing_and_saves_the_config_unchanged(tmp_path, caplog):
    model = tiny_model("llama")
    config = model.config.to_dict()
    hf_ckpt.install(model)
    names = ["transformers", "hf_ckpt", "accelerate"]
    for name in names:  # transformers' logger does not propagate to caplog
        logging.getLogger(name).addHandler(caplog.handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = trainer(tmp_path, model, evaluate=True, eval_strategy="epoch", max_steps=2)
            run.train()
            run.save_model(str(tmp_path / "model"))
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(caplog.handler)
    ours = [
        str(entry.message)
        for entry in caught
        if "checkpoint" in str(entry.message).lower() or "cache" in str(entry.message)
    ]
    logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert not ours
    assert not logged
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    # transformers 5's Trainer always writes args.use_cache into the config, even without checkpointing
    assert saved.get("use_cache", config["use_cache"]) == getattr(run.args, "use_cache", config["use_cache"])


def test_a_plan_that_was_replaced_on_the_blocks_stops_the_run_at_step_one(tmp_path):
    model = tiny_model("llama")
    hf_ckpt.install(model)

    class Replace(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            type(model)._set_gradient_checkpointing(model, True, lambda fn, *args: fn(*args))

    run = trainer(tmp_path, model, callbacks=[MemoryTimeCallback(summary=False), Replace()])
    with pytest.raises(PlanLostError, match=r"4 planned blocks no longer carry.*model\.layers\.0"):
        run.train()


def test_installed_but_never_enabled_is_said(tmp_path, caplog):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    run = trainer(tmp_path, model, max_steps=1, **{FLAG: False, f"{FLAG}_kwargs": None})
    run.train()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")]
    assert len(said) == 1
    assert said[0].startswith("hf_ckpt is installed on this model, but not enabled")


@pytest.mark.compat
def test_nothing_stays_on_the_model_after_training(tmp_path):
    model = tiny_model("llama")
    hf_ckpt.install(model)
    hooks = hook_count(model)
    trainer(tmp_path, model, max_steps=1).train()
    model.gradient_checkpointing_disable()
    assert hook_count(model) == hooks


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_a_model_of_nobodys_is_measured_too(tmp_path):
    """The callback needs neither hf_ckpt on the model nor a Hugging Face model."""

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(12, 1)

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return {"loss": self.layer(input_ids.float()).square().mean()}

    run = trainer(tmp_path, Linear(), max_steps=2, **{FLAG: False, f"{FLAG}_kwargs": None})
    run.train()
    row = metrics(tmp_path)[0]
    assert row["time/tokens_per_s"] > 0
    assert row["memory/head_gib"] is None


def test_figures_of_the_worst_rank_are_logged(tmp_path, monkeypatch):
    """Memory and time are the largest of all ranks; tokens are their sum."""

    def two_ranks(values):
        other = {**values, "peak": values["peak"] * 3, "seconds": values["seconds"] * 2, "tokens": 1000.0}
        seen.append(values)
        return [values, other]

    assert compat.distributed.of_all_ranks({"peak": 1.0}) == [{"peak": 1.0}]  # without a process group
    seen: list[dict] = []
    monkeypatch.setattr(compat.distributed, "of_all_ranks", two_ranks)
    trainer(tmp_path, max_steps=1).train()
    row, mine = metrics(tmp_path)[0], seen[0]
    assert row["memory/peak_gib"] * 2**30 == mine["peak"] * 3
    assert row["time/step_s"] == mine["seconds"] * 2
    assert row["time/tokens_per_s"] == pytest.approx((mine["tokens"] + 1000) / (mine["seconds"] * 2))


def test_without_its_handler_the_callback_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compat.transformers, "callback_handler_of", lambda callback: None)
    trainer(tmp_path, max_steps=1).train()
    assert "not to the reporters" in caplog.text
    assert metrics(tmp_path)
