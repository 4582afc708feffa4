"""Loads the simulated device for the tests of this folder, which run by themselves: `pytest -m accelerator`."""

import gc

import pytest
import torch

from accelerator import device

collect_ignore = [] if device.IS_SIMULATED else ["test_device.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/accelerator/" in item.path.as_posix():
            item.add_marker(pytest.mark.accelerator)


def pytest_collection_finish(session):
    ours = [item for item in session.items if item.get_closest_marker("accelerator")]
    if 0 < len(ours) < len(session.items):
        raise pytest.UsageError(
            "tests marked `accelerator` give the whole process an accelerator, so run them alone: pytest -m accelerator"
        )


@pytest.fixture(scope="session", autouse=True)
def the_device():
    device.load()


@pytest.fixture(autouse=True)
def nothing_left_running():
    """End every test with idle streams on device 0 and without its tensors, and raise what its kernels raised."""
    yield
    gc.collect()  # what a test has left in reference cycles would count in the next one's memory
    torch.accelerator.set_device_index(0)
    for number in range(device.DEVICES):
        torch.accelerator.synchronize(number)
