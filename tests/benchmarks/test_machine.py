"""What the CPU's allocator hands out, and what it keeps."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch
from machine import CpuAllocations, keep_freed_memory
from workers import Worker

from hf_ckpt.measure.live import LiveBytes


def test_allocations_of_the_cpu_by_hand():
    """Two of 40,000 bytes at once, and one of them freed before a third comes; what was there before is not counted."""
    before = torch.ones(10_000)
    with CpuAllocations() as found:
        one, two = torch.empty(10_000), torch.empty(10_000)
        del one
        three = torch.empty(5_000)
    assert found.peak_bytes == 80_000
    del before, two, three


def test_allocations_within_an_operation_are_seen():
    """The CPU's attention kernel takes room for a block of scores, which is nobody's tensor."""
    query = torch.rand(1, 8, 256, 64)
    with LiveBytes({"query": query}) as live:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    with CpuAllocations() as found:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert found.peak_bytes > 1.1 * (live.peak_bytes - live.start_bytes) >= query.nbytes


class Memory:
    """Takes memory and frees it again, in a process of its own."""

    def __init__(self, keep):
        if keep:
            keep_freed_memory()

    def given_back(self):
        """Bytes that go back to the system of 128 MiB in pieces, a large one among them."""
        held = [torch.ones(2**20) for _ in range(16)] + [torch.ones(2**24)]
        before = psutil.Process().memory_info().rss
        del held
        return before - psutil.Process().memory_info().rss


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept():
    """What glibc would give back at once."""
    with Worker(Memory, True) as keeping, Worker(Memory, False) as leaving:
        assert keeping.ask("given_back") < 8 * 2**20 < 100 * 2**20 < leaving.ask("given_back")
