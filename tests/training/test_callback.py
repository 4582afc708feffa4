"""The Trainer from end to end: what the callback logs, where it logs, and that it does not change the training."""

import gc
import json
import logging
import os
import re
import time
import warnings

import pytest
import torch
import transformers
from helpers.failing import MESSAGE, run_out, train
from helpers.steps import assert_same, step
from helpers.trainers import FLAG, metrics, trainer
from transformers.trainer_callback import CallbackHandler

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.errors import OutOfPlansError, PlanLostError, SpecError
from hf_ckpt.measure.memory import PeakMeter
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.training import callback, figures, out_of_memory
from hf_ckpt.training.callback import MemoryTimeCallback
from hf_ckpt.training.out_of_memory import REPORT_FILE
from hf_ckpt.units import format_bytes

OFF = {FLAG: False, f"{FLAG}_kwargs": None}


def hook_count(model: torch.nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("hf_ckpt")]


@pytest.mark.compat
def test_figures_reach_the_file_the_history_the_console_and_tensorboard(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, report_to="tensorboard")
    hooks = hook_count(tiny_model("llama"))
    run.train()
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["memory/peak_gib"] > 0
        assert row["time/step_s"] > 0
    history = [row["memory/peak_gib"] for row in run.state.log_history if "loss" in row]
    assert history == [row["memory/peak_gib"] for row in rows]
    assert "memory/peak_gib" in capsys.readouterr().out  # the Trainer's own console line
    assert sum(hf_ckpt.describe(run.model).recomputed.values()) == 4 * 4
    events = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*")))).Reload()
    for key in ("memory/peak_gib", "time/step_s"):
        logged = [event.value for event in events.Scalars(f"train/{key}")]
        assert logged == pytest.approx([row[key] for row in rows], rel=1e-5), key
    run.model.gradient_checkpointing_disable()
    assert hook_count(run.model) == hooks


def test_unknown_figures_are_null_never_zero(tmp_path, monkeypatch):
    """As on a device without statistics."""
    monkeypatch.setattr(figures, "PeakMeter", lambda devices: PeakMeter([torch.device("mps")]))
    run = trainer(tmp_path, max_steps=1)
    run.train()
    (row,) = metrics(tmp_path)
    assert row["memory/peak_gib"] is None
    assert "memory/peak_gib" not in run.state.log_history[0]


class Meter:
    """In place of a `PeakMeter`, on a device where a step needs 1 GiB."""

    peak_bytes = 2**30

    def __init__(self, devices):
        pass

    def read(self):
        Meter.peak_bytes = 2**30

    def read_peak(self):
        peak_bytes = Meter.peak_bytes
        self.read()
        return peak_bytes

    def reserved_bytes(self):
        return None


class LogAtEpochEnd(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        # Before our callback at the end of the epoch: the default flow sets the flag there with other settings.
        handler = next(compat.frames.calling_objects(CallbackHandler))
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_log = True


@pytest.mark.parametrize("by", ["steps", "epoch"])
def test_evaluation_and_saving_are_not_counted(by, tmp_path, monkeypatch):
    """A slow evaluation with a large allocation changes neither the step time nor the peak.

    At the end of an epoch whose last step is logged already, only the end of the epoch announces it.
    """
    real, ahead = time.perf_counter_ns, [0]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: real() + ahead[0])
    monkeypatch.setattr(figures, "PeakMeter", Meter)
    epochs = {"max_steps": -1, "num_train_epochs": 2} if by == "epoch" else {"eval_steps": 1, "save_steps": 1}
    run = trainer(tmp_path, evaluate=True, eval_strategy=by, save_strategy=by if by == "steps" else "no", **epochs)
    if by == "epoch":
        run.add_callback(LogAtEpochEnd())

    def slowly(own):
        def run_slowly(*args, **kwargs):
            ahead[0] += 3600 * 10**9
            Meter.peak_bytes = 9 * 2**30
            return own(*args, **kwargs)

        return run_slowly

    monkeypatch.setattr(run, "evaluate", slowly(run.evaluate))
    monkeypatch.setattr(run, "_save_checkpoint", slowly(run._save_checkpoint))
    run.train()
    rows = metrics(tmp_path)
    assert len(rows) == (4 if by == "steps" else 16)
    assert all(row["time/step_s"] < 1800 for row in rows)
    assert {row["memory/peak_gib"] for row in rows} == {1.0}


@pytest.mark.compat
def test_a_normal_run_warns_of_nothing_and_saves_the_config_unchanged(tmp_path, caplog, transformers_log):
    run = trainer(tmp_path, evaluate=True, eval_strategy="epoch", max_steps=2)
    config = run.model.config.to_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train()
        run.save_model(str(tmp_path / "model"))
    said = [str(entry.message) for entry in caught]
    assert not [text for text in said if "checkpoint" in text.lower() or "cache" in text]
    records = [*caplog.records, *transformers_log]
    assert not [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    # transformers 5's Trainer always writes args.use_cache into the config, even without checkpointing
    assert saved.get("use_cache", config["use_cache"]) == getattr(run.args, "use_cache", config["use_cache"])


def test_a_plan_that_was_replaced_on_the_blocks_stops_the_run_at_step_one(tmp_path):
    class Replace(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            model = kwargs["model"]
            type(model)._set_gradient_checkpointing(model, True, lambda fn, *args: fn(*args))

    run = trainer(tmp_path, callbacks=[MemoryTimeCallback(), Replace()])
    with pytest.raises(PlanLostError, match=r"4 planned blocks no longer carry.*model\.layers\.0"):
        run.train()


def test_installed_but_never_enabled_is_said(tmp_path, caplog):
    trainer(tmp_path, max_steps=1, **OFF).train()
    (said,) = messages(caplog)
    assert said.startswith("hf_ckpt is installed on LlamaForCausalLM, but not enabled")


OURS = {FLAG: True, f"{FLAG}_kwargs": {"policy": "selective", "preserve_rng_state": True}}
WHOSE = {
    "hf_ckpt's": ({}, "4 of 4 blocks are checkpointed by hf_ckpt"),
    "every second": ({f"{FLAG}_kwargs": {"every_n_layers": 2}}, "2 of 4 blocks are checkpointed by hf_ckpt"),
    "transformers'": ({f"{FLAG}_kwargs": {"use_reentrant": False}}, "4 of 4 .* by transformers, non-reentrant"),
    "reentrant": ({f"{FLAG}_kwargs": {"use_reentrant": True}}, "4 of 4 .* by transformers, reentrant"),
    "nobody's": (OFF, "no block is checkpointed"),
}


@pytest.mark.compat
@pytest.mark.parametrize("kind", WHOSE)
def test_the_callback_says_who_checkpoints(kind, tmp_path, capsys):
    changes, said = WHOSE[kind]
    model = tiny_model("llama")
    if kind in ("hf_ckpt's", "every second"):
        hf_ckpt.install(model)
    trainer(tmp_path, model, max_steps=1, **changes).train()
    lines = [line for line in capsys.readouterr().err.splitlines() if "checkpointed" in line]
    assert len(lines) == 1
    assert re.fullmatch(f"hf_ckpt: LlamaForCausalLM: {said}", lines[0])


@pytest.mark.compat
def test_options_of_hf_ckpt_without_it_are_refused_before_the_first_step(tmp_path):
    run = trainer(tmp_path, tiny_model("llama"), **OURS)
    with pytest.raises(SpecError, match=rf"{FLAG}_kwargs\):\n  - `policy` needs hf_ckpt, .*hf_ckpt\.install\(model\)"):
        run.train()
    assert not any(module._forward_pre_hooks for module in run.model.modules())


@pytest.mark.compat
def test_any_model_is_measured_and_a_short_run_that_logs_nothing_too(tmp_path):
    """The callback needs no hf_ckpt and no Hugging Face model. Its file has the memory if a run ends before a log."""

    class Linear(torch.nn.Linear):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            return {"loss": super().forward(input_ids.float()).square().mean()}

    trainer(tmp_path, Linear(12, 1), logging_steps=500, **OFF).train()
    assert metrics(tmp_path) == []
    (end,) = metrics(tmp_path, "end")
    assert end["memory/peak_gib"] > 0
    assert end["time/step_s"] > 0


def test_a_plan_without_effect_in_a_graph_is_told_in_a_step(tmp_path, caplog):
    run = trainer(tmp_path, max_steps=1)
    installation(run.model).heads.note("in a graph", is_in_graph=True)
    run.train()
    assert caplog.text.count("part of the plan has no effect, because torch.compile") == 1


def test_figures_of_the_worst_rank_are_logged(tmp_path, monkeypatch):
    seen: list[dict] = []

    def two_ranks(rank):
        values, tokens, padding = rank
        seen.append(values)
        other = {"memory/peak_gib": values["memory/peak_gib"] * 3, "time/step_s": values["time/step_s"] * 2}
        return [rank, ({**values, **other}, 3 * tokens, padding)]

    monkeypatch.setattr(compat.distributed, "of_all_ranks", two_ranks)
    trainer(tmp_path, max_steps=1).train()
    (row,), (first, *_) = metrics(tmp_path), seen
    assert row["memory/peak_gib"] == first["memory/peak_gib"] * 3
    assert row["time/step_s"] == first["time/step_s"] * 2
    assert row["tokens_per_second"] == pytest.approx(4 * 2 * 12 / row["time/step_s"])


def test_figures_of_a_run_count_each_step_once(monkeypatch):
    """A log after the first step makes a window of one step, and a slow one."""
    of_run = figures.Figures([torch.device("cpu")])
    for steps, seconds in ((1, 9), (4, 8)):
        of_run.go_on()
        of_run.steps = steps
        monkeypatch.setattr(of_run.clock, "between", lambda *_, seconds=seconds: seconds * 1e9)
        of_run.end_window()
    assert of_run.of_run()["time/step_s"] == 2


def ids(*, name="", rows=2, tokens=12, masked=None):
    values = {f"{name}input_ids": torch.ones(rows, tokens, dtype=torch.long)}
    if masked is not None:
        mask = torch.ones(rows, tokens)
        mask[0, :masked] = 0
        values[f"{name}attention_mask"] = mask
    return values


BATCHES = {
    "padded": ([ids(masked=3), ids(tokens=6, masked=0)], (36, 3)),
    "of pairs": ([ids(name="chosen_", masked=1) | ids(name="rejected_", tokens=8, masked=2)], (40, 3)),
    "without a mask": ([ids(masked=3), ids()], (48, None)),
    "packed, with a mask of four dimensions": ([ids() | {"attention_mask": torch.ones(2, 1, 12, 12)}], (24, None)),
    "prompts in words": ([ids(), ["a prompt"]], (None, None)),
    "images": ([{"pixel_values": torch.ones(2, 3)}, ids(masked=1)], (None, None)),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_tokens_are_counted_with_padding_or_not_at_all(kind):
    batches, expected = BATCHES[kind]
    tokens = figures.Tokens()
    for batch in batches:
        tokens.count(batch)
    assert tokens.read() == expected


@pytest.mark.compat
def test_a_planned_run_logs_what_was_predicted_and_ends_with_a_table(tmp_path, capsys):
    """The peak of a step, which `describe` measures, beside that of the process; nothing while steps are measured."""
    options = {"policy": "budget", "budget": "1GiB", "check_every": 0}
    run = trainer(tmp_path, max_steps=24, **{f"{FLAG}_kwargs": options})
    run.train()
    found, rows = hf_ckpt.describe(run.model), metrics(tmp_path)
    assert rows[0]["memory/predicted_gib"] is None
    assert rows[-1]["memory/predicted_gib"] == found.plan.prediction.peak_bytes / 2**30
    assert rows[-1]["memory/step_peak_gib"] == found.measured_bytes / 2**30 < rows[-1]["memory/peak_gib"]
    assert rows[-1]["padding"] == 0
    lines = capsys.readouterr().err.partition("hf_ckpt: 24 steps of training\n")[2].splitlines()
    peaks = [found.without.peak_bytes, found.plan.prediction.peak_bytes, found.measured_bytes]
    without, planned, measured = map(format_bytes, peaks)
    assert [line.split(maxsplit=1) for line in lines[:1] + lines[2:5]] == [
        ["budget", "1GiB"],
        ["without", f"{without}, predicted without checkpointing"],
        ["with", f"{planned}, predicted under the plan"],
        ["measured", f"{measured}, in a step under the plan"],
    ]
    assert [line.split()[0] for line in lines[1::4]] == ["plan", "time"]
    assert re.search(r" per step, [\d,]+ tokens per second", lines[5])


def test_a_peak_that_was_measured_under_the_plan_of_another_batch_is_not_set_beside_this_one(tmp_path, capsys):
    batches = [tiny_batch("llama", batch=1, tokens=tokens) for tokens in [12] * 20 + [48]]
    rows = [{name: values[0] for name, values in batch.items()} for batch in batches]
    options = {"policy": "budget", "budget": "1GiB"}
    sizes = {"max_steps": len(rows), "per_device_train_batch_size": 1}
    run = trainer(tmp_path, rows=rows, **sizes, **{f"{FLAG}_kwargs": options})
    run._get_train_sampler = lambda *args: torch.utils.data.SequentialSampler(rows)
    run.train()
    found = hf_ckpt.describe(run.model)
    assert found.measured_bytes is None
    (measured,) = re.findall(r"measured    (.*)", capsys.readouterr().err)
    assert measured.endswith(", in a step under another plan of the run")


def test_the_table_of_a_resumed_run_counts_its_own_steps(tmp_path, capsys):
    trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1).train()
    trainer(tmp_path, max_steps=3).train(resume_from_checkpoint=True)
    assert re.findall(r"hf_ckpt: (.*) of training", capsys.readouterr().err) == ["1 step", "2 steps"]


def test_a_run_that_ends_while_it_measures_says_so_in_its_table(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=3, **{f"{FLAG}_kwargs": {"policy": "budget", "budget": "1GiB"}})
    run.train()
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("  plan ")]
    assert line.endswith(f"; not yet the plan of the run: {hf_ckpt.describe(run.model).measuring}")


def test_without_a_plan_the_table_says_so_and_leaves_out_what_is_not_known(tmp_path, capsys):
    trainer(tmp_path, tiny_model("llama"), max_steps=1, **OFF).train()
    lines = capsys.readouterr().err.partition("hf_ckpt: 1 step of training\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == ["policy", "measured", "time"]
    assert lines[0].endswith("hf_ckpt is not installed on the model")
    assert lines[1].endswith("by the whole process")


@pytest.mark.compat
def test_a_run_that_raises_leaves_no_hooks_on_the_model(tmp_path):
    """The Trainer has no event for an error."""
    model = tiny_model("llama")
    hooks, expected = hook_count(model), step(model, tiny_batch("llama"))
    raises = model.lm_head.register_forward_hook(lambda *args: 1 / 0)
    run = trainer(tmp_path, model, **OFF)
    with pytest.raises(ZeroDivisionError):
        run.train()
    raises.remove()
    assert hook_count(model) == hooks
    assert_same(expected, step(model, tiny_batch("llama")))
    run.train()
    assert len(metrics(tmp_path)) == 4


@pytest.mark.trap(42, 51)
@pytest.mark.compat
@pytest.mark.parametrize(("make", "said"), [(os.mkdir, "Is a directory."), (os.mkfifo, "it is a pipe, not a file.")])
def test_a_file_that_cannot_be_written_is_warned_of_once(make, said, tmp_path, caplog):
    make(tmp_path / callback.METRICS_FILE)
    reader = os.open(tmp_path / callback.METRICS_FILE, os.O_RDONLY | os.O_NONBLOCK)  # else to open the pipe would wait
    run = trainer(tmp_path)
    run.train()
    assert all(row["memory/peak_gib"] > 0 for row in run.state.log_history if "loss" in row)
    (warning,) = [text for text in messages(caplog) if "figures are missing" in text]
    os.close(reader)
    assert f"{tmp_path / callback.METRICS_FILE}' cannot be written: {said}" in warning


class Generating(transformers.Trainer):
    """Generates before each step, like TRL's."""

    def _prepare_inputs(self, inputs):
        self.model.generate(inputs["input_ids"], max_new_tokens=2, do_sample=False)
        return super()._prepare_inputs(inputs)


class Rewarding(transformers.Trainer):
    """Runs out of memory in something of its own before each step."""

    def _prepare_inputs(self, inputs):
        run_out()


EVALUATES = {"evaluate": True, "eval_strategy": "steps", "eval_steps": 1}
RUNS_OUT = {
    "forward of model.layers.2.mlp": ({}, "fewer tokens"),
    "backward of model.layers.1.mlp": ({}, "fewer tokens"),
    "backward": (OFF, "fewer tokens"),
    "optimizer": ({}, "adamw_8bit"),
    "evaluation of model.layers.2.mlp": (EVALUATES, "eval_batch"),
    "evaluation of model.layers.1.mlp": ({"evaluate": True, "eval_on_start": True}, "eval_batch"),
    "generation of model.layers.1.mlp": ({"kind": Generating}, "completions"),
    "saving": ({"save_strategy": "steps", "save_steps": 1}, "full 0-3"),  # the plan: no advice follows it
    "loading of a batch": ({}, "full 0-3"),
    "": ({"kind": Rewarding}, "full 0-3"),
}


@pytest.mark.compat
@pytest.mark.parametrize("place", RUNS_OUT)
def test_the_report_says_where_memory_ran_out(place, tmp_path, caplog):
    """Once in the log and once in a file; the error passes, and the Trainer has its own methods again."""
    options, advice = RUNS_OUT[place]
    what = place.split(" of ")[0]
    if what in ("optimizer", "loading") and not hasattr(transformers.Trainer, "_run_epoch"):
        pytest.skip("transformers 4 runs these in one method with all else")
    gc.collect()  # a model of an earlier test, measured around each optimizer's step, would count on where one fails
    run = trainer(tmp_path, **options)
    calls = []

    def fail(module, *_):
        _sparse = torch.ones(2, 2).to_sparse()
        _without_storage = torch.ones(2, 2).to_sparse_csr()
        _without_values = torch.nn.UninitializedParameter()
        calls.append(module)  # under `full`, the second call is the recomputation
        if not module.training if what == "evaluation" else len(calls) == 1 + (what == "backward"):
            run_out()

    if what == "optimizer":
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        run.optimizer.register_step_pre_hook(run_out)
    elif what == "saving":
        run.model.save_pretrained = lambda *_, **__: run_out()
    elif what == "loading":
        run.data_collator = run_out
    elif options == OFF:
        run.model.get_parameter("model.layers.3.mlp.down_proj.weight").register_hook(run_out)
    elif place:
        run.model.get_submodule(place.split(" of ")[1]).register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match=re.escape(MESSAGE)):
        run.train()
    report = (tmp_path / REPORT_FILE).read_text()
    where = f" in the {place}" if place else ""
    assert report.startswith(f"hf_ckpt: out of memory{where}: OutOfMemoryError: {MESSAGE[:-1]}\n")
    reports = sum("hf_ckpt: out of memory" in text for text in messages(caplog))
    assert report.count("hf_ckpt: out of memory") == reports == 1
    assert "variable `_without" not in report
    assert ("no plan" if options == OFF else "full 0") in report
    assert advice in report.splitlines()[-1]
    assert not {"training_step", "_run_epoch"} & vars(run).keys()


def test_a_report_that_fails_hides_no_error(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(out_of_memory, "format_bytes", lambda _: 1 / 0)
    with pytest.raises(torch.OutOfMemoryError, match=re.escape(MESSAGE)):
        trainer(tmp_path, kind=Rewarding).train()
    text = f"hf_ckpt: out of memory: OutOfMemoryError: {MESSAGE[:-1]} (no report: ZeroDivisionError: division by zero)"
    assert [message for message in messages(caplog) if "out of memory" in message] == [text]


def test_the_callback_comes_after_the_flow_and_is_called_once(tmp_path):
    """Also as the first of a list, and without a flow."""
    for callbacks in ([MemoryTimeCallback, transformers.DefaultFlowCallback], [MemoryTimeCallback]):
        run = trainer(tmp_path, max_steps=1)
        ours = run.callback_handler.callbacks[-1 if "Memory" in str(run.callback_handler.callbacks[-1]) else -2]
        later = [transformers.PrinterCallback()]
        run.callback_handler.callbacks = [ours, *(kind() for kind in callbacks[1:]), *later]
        run.train()
        kinds = [type(callback).__name__ for callback in run.callback_handler.callbacks]
        assert kinds == [*(["DefaultFlowCallback"] * (len(callbacks) > 1)), "MemoryTimeCallback", "PrinterCallback"]
    assert len(metrics(tmp_path, "start")) == 2


def test_a_second_callback_reports_nothing(tmp_path, capsys):
    """A program, such as axolotl with the plug-in, adds one beside the script's."""
    run = trainer(tmp_path, max_steps=1, callbacks=[MemoryTimeCallback(), MemoryTimeCallback()])
    for attempt in (1, 2):
        run.train()
        assert len(metrics(tmp_path)) == attempt
    assert capsys.readouterr().err.count("of training") == 2


def test_one_report_for_each_attempt_of_the_guard(tmp_path):
    with pytest.raises(OutOfPlansError):
        train(tmp_path, hf_ckpt.OomGuardMixin, at=range(100))
    reports = (tmp_path / REPORT_FILE).read_text().split("hf_ckpt: out of memory")[1:]
    assert len(reports) > 2
