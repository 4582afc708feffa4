"""Objects in processes of their own."""

from __future__ import annotations

import os
import sys
import time

import pytest
from workers import Worker, WorkerError

from hf_ckpt.errors import HfCkptError


class Thing:
    """Counts, fails and dies as it is told."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise HfCkptError("start must be at least 0, but is negative.")
        self.count = start

    def add(self, number: int) -> tuple[int, int]:
        self.count += number
        return self.count, os.getpid()

    def fail(self) -> None:
        raise ValueError("a line\nand another")

    def die(self) -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)

    def sleep(self) -> None:
        time.sleep(60)


@pytest.mark.long
def test_state_lives_in_another_process():
    with Worker(Thing, 1) as one, Worker(Thing, 10) as other:
        first, pid = one.ask("add", 2)
        assert (first, one.ask("add", 3)[0], other.ask("add", 1)[0]) == (3, 6, 11)
        assert len({pid, other.ask("add", 0)[1], os.getpid()}) == 3


def test_what_is_raised_there_is_told_here_and_the_next_question_is_answered():
    with Worker(Thing, 0) as thing:
        with pytest.raises(WorkerError, match=r"^ValueError: a line$") as caught:
            thing.ask("fail")
        assert "in fail" in caught.value.details
        assert thing.ask("add", 5)[0] == 5


def test_an_object_that_cannot_be_made():
    with Worker(Thing, -1) as thing, pytest.raises(WorkerError, match=r"^start must be at least 0, but is negative\.$"):
        thing.ask("add", 1)


def test_a_process_that_dies_leaves_its_last_words():
    with Worker(Thing, 0) as thing:
        thing.ask("add", 1)
        with pytest.raises(WorkerError, match="its process ended with exit code 3") as caught:
            thing.ask("die")
        assert "last words" in caught.value.details
        with pytest.raises(WorkerError, match="its process ended with exit code 3"):
            thing.ask("add", 1)


def test_an_answer_that_never_comes():
    with Worker(Thing, 0, seconds=20) as thing:
        thing.ask("add", 1)
        thing._seconds = 0.2
        with pytest.raises(WorkerError, match=r"sleep took longer than 0\.2 s"):
            thing.ask("sleep")
        assert not thing._process.is_alive()


def test_nothing_is_left_behind():
    with Worker(Thing, 0) as thing:
        thing.ask("add", 1)
        process, log = thing._process, thing._log
        assert log.exists()
    assert not process.is_alive()
    assert not log.exists()
