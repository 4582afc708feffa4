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
        warn_once(LOG, "a list: %s", ["linear", "attention"])
    assert [(record.name, record.getMessage()) for record in caplog.records] == [
        ("hf_ckpt.one", "no arguments"),
        ("hf_ckpt.other", "no arguments"),
        ("hf_ckpt.one", "one of 2"),
        ("hf_ckpt.one", "one of 3"),
        ("hf_ckpt.one", "a list: ['linear']"),
        ("hf_ckpt.one", "a list: ['linear', 'attention']"),
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_what_is_forgotten_is_given_once_more(caplog):
    for _ in range(3):
        warn_once(LOG, "again")
        warn_once(LOG, "again")
        forget_warnings()
    assert [record.message for record in caplog.records] == ["again"] * 3
