"""The rows of `optimizers.csv` against real optimizers."""

import inspect
import math
import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

from hf_ckpt.forecast.optimizers import OPTIMIZERS, optimizer_bytes, training_arguments
from hf_ckpt.measure.live import LiveBytes

SHAPES = [(300, 200), (300, 200), (64, 8, 8), (500,)]


def made_by_trainer(name, parameters, folder):
    """The optimizer that a Trainer makes of what a row says to write. On an accelerator, steps are foreach ones."""
    arguments = TrainingArguments(folder, report_to="none", use_cpu=True, **training_arguments(name))
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    takes_foreach = "foreach" in inspect.signature(kind).parameters and not options.get("fused")
    return kind(parameters, **options, **({"foreach": True} if takes_foreach else {}))


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_step_are_those_of_the_optimizer_that_is_written(name, dtype, tmp_path):
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = made_by_trainer(name, parameters, tmp_path)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        held = {"parameters": parameters, "gradients": [parameter.grad for parameter in parameters]}
        with LiveBytes(optimizer, held) as live:
            optimizer.step()
    state, temporary = optimizer_bytes([(shape, dtype.itemsize, True) for shape in SHAPES], name)
    scalars = 4 * 3 * len(SHAPES)  # numbers of steps, and what is computed from them
    tables = 4 * 256 * 2 if "8bit" in name else 0  # of the values of 8 bits, signed and unsigned
    assert LiveBytes(optimizer).start_bytes == pytest.approx(state, abs=scalars + tables)
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
