"""The rows of `optimizers.csv` against real optimizers."""

import math
import pkgutil
import warnings

import pytest
import torch
from helpers.tables import table

from hf_ckpt.forecast.optimizers import OPTIMIZERS, optimizer_bytes
from hf_ckpt.measure.live import LiveBytes

SHAPES = [(300, 200), (300, 200), (64, 8, 8), (500,)]
REAL = table(__file__, "optimizers.yaml")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_state_and_step_are_those_of_real_optimizers(name, dtype):
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    kind, options = REAL[name]
    optimizer = pkgutil.resolve_name(kind)(parameters, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        held = {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters]}
        with LiveBytes(optimizer, held) as live:
            optimizer.step()
    state, temporary = optimizer_bytes([(shape, dtype.itemsize, True) for shape in SHAPES], name)
    scalars = 4 * 3 * len(SHAPES)  # numbers of steps, and what is computed from them
    assert LiveBytes(optimizer).start_bytes == pytest.approx(state, abs=scalars)
    assert live.peak_bytes - live.start_bytes == pytest.approx(temporary, abs=scalars + 0.05 * temporary)


def test_8_bit_state_has_scales_and_small_parameters_have_none():
    large, small = math.prod((64, 128)), math.prod((32, 64))
    tensors = [((64, 128), 4, True), ((32, 64), 4, True), ((9, 9), 4, False)]
    state, _ = optimizer_bytes(tensors, "lion_8bit")
    assert state == large + 4 * large // 256 + 4 * small


def test_every_row_is_complete():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sizes = {name: optimizer_bytes([((64, 128), 2, True)], name) for name in OPTIMIZERS}
    assert {name for name, (state, _) in sizes.items() if not state} == {"sgd"}
