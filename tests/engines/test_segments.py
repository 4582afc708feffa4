"""Segments: what is made again, how often blocks run, what a step holds, and when blocks hold their inputs after all.

`parity/test_matrix.py` compares gradients in every family, `parity/test_ranks.py` under FSDP2.
"""

import contextlib
import copy
import io
import pickle
import weakref

import pytest
import torch
from helpers.counting import counted_calls
from helpers.custom import CustomModel, custom_loss, custom_model, same_under, steps_of, work
from helpers.steps import assert_same, outcome, planned, step, without_cache, without_collector
from torch import nn

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import Functions
from hf_ckpt.engines import segments
from hf_ckpt.errors import ChangedBlockError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model
from hf_ckpt.planner.policies import in_segments
from hf_ckpt.spec.actions import FULL
from hf_ckpt.spec.plan import Plan
from hf_ckpt.spec.spec import Spec

ONE = {"policy": "full", "segments": 1}


@pytest.fixture(autouse=True)
def _nothing_is_checked(unwatched):
    """A check holds the input of its block."""


# --- memory -----------------------------------------------------------------------------------------------------------


def peak_of(spec, family, layers, autocast):
    """Peak of a step in units of hidden states, above what is there before, and how often blocks ran."""
    model = planned(tiny_model(family, layers=layers, attention="sdpa"), spec)
    for parameter in model.parameters():  # gradients that the step creates would be alive beside its last blocks only
        parameter.grad = torch.zeros_like(parameter)
    body = model.get_encoder() if family == "t5" else model.model
    batch = {"input_ids": tiny_batch(family, batch=4, tokens=128)["input_ids"]}
    casts = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with counted_calls(model) as calls, LiveBytes(model, batch) as live, casts:
        body(**batch)[0].float().sum().backward()
    return (live.peak_bytes - live.start_bytes) / (4 * 128 * 32 * 4), sum(calls.values())


@pytest.mark.parametrize(
    ("policy", "family", "layers", "number", "fewer", "again", "autocast"),
    [
        ("full", "llama", 16, "sqrt", 16 - 6, 10, False),
        ("full", "llama", 6, 2, 6 - 4, 4, True),
        # What additional runs would save is more than what recomputations save.
        ("full+selective", "llama", 6, 2, 6 - 4, 4, False),
        # T5's blocks share a position bias, which must not be there twice. The peak of `full` is in its last block but
        # one, because the bias gets its first gradient in the last one.
        ("full", "t5", 8, "sqrt", 7 - 4, 4, False),
    ],
)
def test_peaks_are_those_of_the_theory(policy, family, layers, number, fewer, again, autocast):
    """A step holds so many inputs `fewer`, and so many blocks run three times: all but the last of each segment."""
    full, calls = peak_of({"policy": policy}, family, layers, autocast)
    ours, more_calls = peak_of({"policy": policy, "segments": number}, family, layers, autocast)
    assert full - ours == pytest.approx(fewer, abs=0.1)
    assert more_calls - calls == again


@contextlib.contextmanager
def hidden_states_of(model):
    """Weak references to the memory of the inputs of all blocks. Views and aliases hold the memory, too."""
    references = []
    blocks = find_blocks(model).modules.values()
    hooks = [
        block.register_forward_pre_hook(lambda _, args: references.append(weakref.ref(args[0].untyped_storage())))
        for block in blocks
    ]
    yield references
    for hook in hooks:
        hook.remove()


def alive(references):
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_is_left(family, backward):
    """A hook that holds a tensor would keep all inputs, and a cycle would keep them after the step."""
    model = planned(tiny_model(family, layers=4, dropout=0.1), ONE)
    batch = without_cache(model, tiny_batch(family))
    step(model, batch)
    with without_collector(), hidden_states_of(model) as inputs:
        loss = model(**batch).loss
        assert alive(inputs) == len(inputs) // 4  # the first of each stack
        if backward:
            loss.backward()
        del loss
        assert alive(inputs) == 0


def held_after_the_last_block(spec):
    """Bytes alive once the backward of the last block has ended, in another autocast than the forward."""
    model = planned(tiny_model("llama", layers=4), spec)
    batch = without_cache(model, tiny_batch("llama"))
    with LiveBytes(model, batch) as live:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        with torch.autocast("cpu", torch.bfloat16):
            torch.autograd.grad(loss, [*model.model.layers[-1].parameters()], retain_graph=True)
            return live.current_bytes - live.start_bytes


def test_a_backward_that_ends_in_a_segment_leaves_nothing_of_it():
    """Neither hidden states nor casts of weights, which autocast caches until it ends.

    Of four inputs, the first one is there, and that of the last block, which its recomputation has saved.
    """
    inputs = 2 * 16 * 32 * 4
    assert held_after_the_last_block({"policy": "full"}) - held_after_the_last_block(ONE) == 2 * inputs


def test_what_is_alive_is_not_made_again():
    """Hidden states that are in the loss are there; a backward from the middle makes what it needs only."""
    model = planned(tiny_model("llama", layers=4), ONE)
    batch = tiny_batch("llama")
    with counted_calls(model) as calls:
        outputs = model(**batch, output_hidden_states=True, use_cache=False)
        (outputs.loss + sum(hidden.sum() for hidden in outputs.hidden_states)).backward()
    assert list(calls.values()) == [2, 2, 2, 2]
    del outputs
    with counted_calls(model) as calls:
        hidden = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[2]
        hidden.sum().backward()
    assert list(calls.values()) == [3, 2, 1, 1]


# --- other blocks -----------------------------------------------------------------------------------------------------


class WithResidual(CustomModel):
    """A model whose blocks hand on a residual beside their hidden states."""

    def forward(self, hidden_states, shift):
        hidden_states, residual = self.first(hidden_states), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        return self.last(hidden_states + residual)


def with_residual(block, hidden, residual):
    residual = hidden * 1 if residual is None else hidden + residual
    return block.two(torch.tanh(block.one(block.norm(residual)))), residual


def residual_model():
    model = custom_model(with_residual)
    model.__class__ = WithResidual
    return model


def test_a_residual_is_made_again_with_the_hidden_states():
    model = same_under(ONE, steps_of, residual_model)
    assert list(hf_ckpt.describe(model).recomputed.values()) == [6, 6, 3]
    with hidden_states_of(model) as inputs:
        residuals = []
        for layer in model.layers[1:]:
            layer.register_forward_pre_hook(lambda _, args: residuals.append(weakref.ref(args[1].untyped_storage())))
        loss = model(torch.randn(2, 8, 16), None).sum()
        assert (alive(inputs), alive(residuals)) == (1, 0)
        loss.backward()


class HandingOn(CustomModel):
    """A model whose blocks return what they are given by keyword."""

    def forward(self, hidden_states, shift):
        hidden_states = self.first(hidden_states)
        shift = shift * self.last.bias
        self.given = weakref.ref(shift)
        for layer in self.layers:
            hidden_states, shift = layer(hidden_states, shift=shift)
        return self.last(hidden_states)


def handing_on():
    model = custom_model(lambda block, hidden, shift: (work(block, hidden, shift), shift))
    model.__class__ = HandingOn
    return model


def test_what_a_block_hands_on_holds_no_cycle():
    model = same_under(ONE, steps_of, handing_on)
    with without_collector():
        model(torch.randn(2, 8, 16), torch.ones(16))
        assert model.given() is None


class Recurrent(nn.Module):
    """Kernels for inference compute it otherwise: without gradients, an LSTM differed by 1e-7."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def forward(self, hidden):
        return self.lstm(hidden)[0]


def with_lstm():
    model = custom_model(lambda block, hidden, shift: hidden + block.recurrent(hidden))
    for layer in model.layers:
        layer.recurrent = Recurrent()
    return model


def writing_to_itself():
    """Blocks that count their forwards, and compute with the count."""

    def counting(block, hidden, shift):
        block.count += 1
        return work(block, hidden, shift) * block.count

    model = custom_model(counting)
    for layer in model.layers:
        layer.count = 0
    return model


def differentiating():
    """Blocks that run a backward in their forward. To be made again, they run twice: the first run saves nothing."""

    def run(block, hidden, shift):
        energy = block.one(hidden).sin()
        (slope,) = torch.autograd.grad(energy.square().sum(), energy, create_graph=True)
        return work(block, hidden, shift) + slope * energy

    return custom_model(run)


@pytest.mark.parametrize(
    ("make", "runs"),
    [(with_lstm, [6, 6, 3]), (writing_to_itself, [6, 6, 3]), (differentiating, [12, 12, 6])],
)
def test_blocks_run_again_as_in_the_forward(make, runs):
    model = same_under(ONE, steps_of, make)
    assert list(hf_ckpt.describe(model).recomputed.values()) == runs


def test_hidden_states_that_are_overwritten_after_their_use_are_made_again():
    """Their block returned other values, and no saved tensor of the next one is theirs."""

    def run(model, overwrites):
        held = []
        handle = model.layers[0].register_forward_hook(lambda module, args, output: held.append(output))
        loss = custom_loss(model)
        handle.remove()
        if overwrites:
            with torch.no_grad():
                held[0].mul_(2)
        loss.backward()
        return outcome(model, loss)

    ours = planned(custom_model(), ONE)
    assert_same(run(custom_model(), False), run(ours, True))
    assert list(hf_ckpt.describe(ours).recomputed.values()) == [2, 2, 1]


def test_an_overwritten_weight_is_refused():
    """Also of a block whose own backward has not begun."""
    model = planned(custom_model(), ONE)
    loss = model(torch.randn(2, 8, 16), torch.ones(16)).sum()
    with torch.no_grad():
        model.layers[0].one.weight.add_(1)
    with pytest.raises(ChangedBlockError, match=r"layers\.0"):
        loss.backward()


# --- where blocks hold their inputs -----------------------------------------------------------------------------------


def changed_between(model):
    model.layers[0].register_forward_hook(lambda module, args, output: output * 1.5)
    return "other hidden states than the block before has returned"


def changed_in_place_between(model):
    model.layers[0].register_forward_hook(lambda module, args, output: output.mul_(1.5))
    return "other hidden states than the block before has returned"


def fetched_by_accelerate(model):
    setattr(model.layers[1], compat.distributed.ACCELERATES_HOOK, None)
    return "their parameters are freed"


@pytest.mark.parametrize("change", [changed_between, changed_in_place_between, fetched_by_accelerate])
def test_blocks_hold_their_inputs_where_these_cannot_be_made_again(change, caplog):
    """With the same gradients, one warning, and their names in `describe`."""
    plain, ours = custom_model(), custom_model()
    change(plain)
    why = change(ours)
    for expected, got in zip(steps_of(plain), steps_of(planned(ours, ONE)), strict=True):
        assert_same(expected, got)
    assert caplog.text.count(why) == 1
    described = hf_ckpt.describe(ours)
    assert described.holding == (("layers.1", "layers.2") if "parameters" in why else ("layers.1",))
    assert "kept their inputs despite `segments`, see the warning: layers.1" in str(described)


def test_hooks_of_others_say_where_inputs_are_kept(caplog):
    with torch.autograd.graph.save_on_cpu():
        model = planned(custom_model(), ONE)
        model(torch.randn(2, 8, 16), None).sum().backward()
    assert caplog.text.count("saved-tensor hooks around the model") == 1
    assert list(hf_ckpt.describe(model).recomputed.values()) == [1, 1, 1]


def test_the_watch_finds_hidden_states_that_were_changed_past_autograd(monkeypatch, caplog):
    """`.data` moves no version, so that what is made again lacks the change."""
    monkeypatch.undo()  # the watch is on
    model = planned(custom_model(), {**ONE, "check_every": 1})
    model.layers[0].register_forward_hook(lambda module, args, output: (output.data.add_(1), output)[1])
    steps_of(model, steps=3)
    assert "in `layers.1" in hf_ckpt.describe(model).watched.differences[0]


# --- plans and copies -------------------------------------------------------------------------------------------------


def test_plans_that_alternate():
    """A block passes on its hidden states only under the plan in which the next one makes them again.

    Plans share the function of a block that they treat alike.
    """
    model = planned(custom_model(), ONE)
    passed = []
    blocks = find_blocks(model).blocks
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, output: passed.append(segments.result_of(output) is not None))
    for spec, runs in (
        (ONE, [2, 2, 1]),
        ({"policy": "full", "segments": 2}, [2, 1, 1]),
        ({"policy": "full"}, [1, 1, 1]),
    ):
        planned(model, spec)
        with counted_calls(model) as calls:
            model(torch.randn(2, 8, 16), None).sum().backward()
        assert [count - 1 for count in calls.values()] == runs
        assert passed == [count > 1 for count in runs]
        passed.clear()
    functions = Functions(Spec())
    one, none = (Plan("", "", tuple(in_segments(dict.fromkeys(blocks, FULL), number).items())) for number in (1, 3))
    for plan, passing in ((one, [True, True, False]), (none, [False] * 3), (one, [True, True, False])):
        assert [region.passes_on for region in functions.of(plan).values()] == passing


def test_copies_of_models_and_results():
    model = planned(tiny_model("llama", layers=3), ONE)
    batch = tiny_batch("llama")
    expected = step(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(expected, step(other, batch))
        assert list(hf_ckpt.describe(other).recomputed.values())[-3:] != [0, 0, 0]
    hidden = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[1]
    assert segments.result_of(hidden) is not None
    file = io.BytesIO()
    torch.save(hidden, file)
    file.seek(0)
    assert torch.equal(torch.load(file), hidden)
