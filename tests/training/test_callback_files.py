"""A full disk or an unwritable folder does not end a training."""

from __future__ import annotations

import json

import pytest
from helpers.disks import full_disk
from helpers.trainers import metrics, trainer

from hf_ckpt.training import callback
from hf_ckpt.training.callback import MemoryTimeCallback


def warnings_about_figures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "figures are missing" in record.getMessage()]


@pytest.mark.compat
def test_a_file_that_cannot_be_written_is_warned_of_once(tmp_path, caplog):
    (tmp_path / callback.METRICS_FILE).mkdir()
    run = trainer(tmp_path, callbacks=[MemoryTimeCallback(summary=False)])
    run.train()
    assert run.state.global_step == 4
    assert all(row["memory/peak_gib"] > 0 for row in run.state.log_history if "loss" in row)
    (warning,) = warnings_about_figures(caplog)
    assert f"{tmp_path / callback.METRICS_FILE}' cannot be written: Is a directory." in warning


class FullAtStep2(MemoryTimeCallback):
    """Fills the disk while the callback writes step 2, at most the fourth of its rows."""

    def _write(self, args, state, event, **row):
        if event == "log" and state.global_step == 2:
            written = (tmp := callback.Path(args.output_dir) / callback.METRICS_FILE).stat().st_size
            with full_disk(written + 10):
                super()._write(args, state, event, **row)
            assert tmp.stat().st_size == written
        else:
            super()._write(args, state, event, **row)


def test_rows_after_a_full_disk_are_whole(tmp_path, caplog):
    trainer(tmp_path, callbacks=[FullAtStep2(summary=False)]).train()
    assert [row["step"] for row in metrics(tmp_path)] == [1, 3, 4]
    (warning,) = warnings_about_figures(caplog)
    assert "File too large" in warning or "No space left" in warning
    assert all(json.loads(line) for line in (tmp_path / callback.METRICS_FILE).read_text().splitlines())
