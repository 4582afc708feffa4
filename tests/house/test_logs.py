"""Warnings given once per process."""

from __future__ import annotations

import logging

from hf_ckpt.logs import forget_warnings, warn_once

LOG, OTHER = logging.getLogger("hf_ckpt.one"), logging.getLogger("hf_ckpt.other")


def test_a_warning_is_given_once_for_every_logger_message_and_argument(caplog):
    for _ in range(2):
        warn_once(LOG, "no arguments")
        warn_once(OTHER, "no arguments")
        warn_once(LOG, "%s of %d", "one", 2)
        warn_once(LOG, "%s of %d", "one", 3)
        warn_once(LOG, "a list: %s", ["linear"])  # not hashable
    texts = ["no arguments", "no arguments", "one of 2", "one of 3", "a list: ['linear']"]
    assert [record.getMessage() for record in caplog.records] == texts
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    forget_warnings()
    warn_once(LOG, "no arguments")
    assert len(caplog.records) == len(texts) + 1
