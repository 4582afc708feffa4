"""Blocks that work in place: gradients equal those without checkpointing, or an error names the block."""

import functools
import gc
from contextlib import nullcontext

import pytest
import torch
from helpers.custom import custom_model, same_under, steps_of
from helpers.steps import ENGINES, RUN_AGAIN, assert_same, planned, without_cache
from helpers.toys import WEIGHT, hooked, plain_and_ours, same_toys, toy
from torch import nn
from torch.nn import functional

import hf_ckpt
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.engines.full import FullRegion
from hf_ckpt.engines.rebuild.region import RebuildRegion
from hf_ckpt.errors import ChangedBlockError, InPlaceError, RebuildError
from hf_ckpt.models.tiny import tiny_batch

unwatched = pytest.mark.usefixtures("unwatched")

# --- what blocks do ---------------------------------------------------------------------------------------------------


def adds_to_its_input(block, hidden, shift):
    hidden += block.frozen(hidden)
    return block.one(functional.silu(hidden))


def scales_its_input(block, hidden, shift):
    hidden *= 0.5
    return block.frozen(hidden).tanh() + block.one(hidden).clone()


def adds_a_norm_to_its_input(block, hidden, shift):
    hidden += block.one(functional.rms_norm(hidden, (16,)))  # in 16 bits nothing saves `hidden`
    return hidden


def adds_to_a_residual(block, hidden, shift):
    middle = block.one(hidden)
    middle += block.two(functional.rms_norm(middle, (16,)))
    return middle + hidden


def relu_in_place(block, hidden, shift):
    return block.two(functional.relu(block.one(hidden), inplace=True))


def masks_scores(block, hidden, shift):
    scores = block.one(hidden) @ block.two(hidden).transpose(-1, -2)
    scores.masked_fill_(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e4)
    return scores.softmax(-1) @ hidden


def changes_an_operand(block, hidden, shift):
    one, two = block.one(hidden), block.two(hidden)
    result = functional.silu(one + two)
    one.mul_(2.0)
    return hidden + result + one


def clamps_without_a_graph(block, hidden, shift):
    result = functional.silu(block.one(hidden))
    with torch.no_grad():
        result.clamp_(-0.1, 0.05)
    return functional.silu(result * 2.0)


def writes_data(block, hidden, shift):
    result = functional.silu(block.one(hidden))
    result.data.mul_(2.0)
    return functional.silu(result * 2.0)


def changes_a_norm(block, hidden, shift):
    result = block.norm(hidden)
    with torch.no_grad():
        result.mul_(2.0)
    return functional.silu(result) * result + block.one(hidden)


def adds_to_what_it_has_read(block, hidden, shift):
    result = torch.tanh(hidden)
    hidden.add_(1.0)
    return result * 2.0 + block.one(hidden)


def drops_its_input(block, hidden, shift):
    return block.one(functional.silu(functional.dropout(hidden, 0.5, True, True)))


def writes_to_parts(block, hidden, shift):
    result = functional.silu(block.one(hidden)) * 2.0
    result[:, :4].mul_(3.0)
    result[:, 0] = 0.0
    return functional.silu(result) * result


def drops_in_place(block, hidden, shift):
    return block.two(functional.dropout(functional.silu(block.one(hidden)), 0.3, True, True))


def adds_rows(block, hidden, shift):
    out = torch.zeros_like(hidden)
    out.index_add_(0, torch.tensor([0, 1]), block.one(hidden))
    out[:, 0] = 0.0
    return functional.silu(out) * hidden


IN_16_BITS = (adds_a_norm_to_its_input, adds_to_a_residual)
"""Changes that autograd itself refuses in float32."""
OF_THEIR_INPUT = (adds_to_its_input, scales_its_input, drops_its_input)
"""Changes of what a block would be recomputed from. If it is not recomputed, they are harmless."""
OF_WHAT_IS_SAVED = (adds_to_what_it_has_read, adds_a_norm_to_its_input)
"""Changes of its input after something else that is rebuilt has read it."""
BEHIND_ITS_BACK = (clamps_without_a_graph, writes_data)
"""Changes that autograd does not count for what it saves. No model of transformers makes them."""
HARMLESS = (relu_in_place, masks_scores, adds_rows, changes_an_operand, drops_in_place, changes_a_norm)
WORKS = (*OF_THEIR_INPUT, *OF_WHAT_IS_SAVED, *HARMLESS, writes_to_parts, adds_to_a_residual)
CASES = [(work, kind) for work in WORKS for kind in ENGINES]
CASES += [(work, kind) for work in BEHIND_ITS_BACK for kind in ("full", "offload")]


@pytest.mark.trap(20)
@unwatched
@pytest.mark.compat
@pytest.mark.parametrize(("work", "kind"), CASES)
def test_a_change_in_place_is_harmless_or_refused(work, kind, lanes):
    """Changes that autograd accepts give the same gradients, or an error that names the block."""
    dtype = torch.bfloat16 if work in IN_16_BITS else torch.float32
    runs_again = kind in RUN_AGAIN
    if work in OF_WHAT_IS_SAVED or (work in OF_THEIR_INPUT and runs_again):
        model = planned(custom_model(work, dtype=dtype), ENGINES[kind])
        with pytest.raises(InPlaceError, match=r"block 'layers\.\d'.*was changed in place"):
            steps_of(model)
    else:
        model = same_under(ENGINES[kind], steps_of, lambda: custom_model(work, dtype=dtype), times=3 * runs_again)
        done = hf_ckpt.describe(model)
        assert set(done.forwards.values()) == {3}
        assert all(times % 3 == 0 for times in done.recomputed.values())
    assert bool(lanes) == (kind in ("saved", "offload"))
    if lanes:
        gc.collect()
        assert installation(model).regions["layers.0"].mover.held_bytes == 0


@unwatched
@pytest.mark.parametrize("stored", [torch.clone, torch.Tensor.detach])
def test_hooks_of_the_user_may_hold_a_copy_of_what_is_changed(stored):
    """If they hold the changed tensor itself, an error says so."""
    model = planned(custom_model(adds_to_what_it_has_read), "selective")
    with torch.autograd.graph.saved_tensors_hooks(stored, lambda held: held):
        if stored is torch.clone:
            assert_same(steps_of(custom_model(adds_to_what_it_has_read), 1)[0], steps_of(model, 1)[0])
            assert all(hf_ckpt.describe(model).recomputed.values())
        else:
            with pytest.raises(InPlaceError, match=r"block 'layers\.2'.*was changed in place"):
                steps_of(model, 1)


@pytest.mark.parametrize("steps", [2, 3])
def test_changes_behind_autograds_back_are_found_by_the_watch(steps, caplog):
    """Under `selective` they give wrong gradients; the first check, in the third step, warns of it."""
    steps_of(planned(custom_model(writes_data), "selective"), steps)
    assert ("gradients of this step are wrong" in caplog.text) == (steps == 3)


@pytest.mark.compat
@pytest.mark.parametrize("torchs", ["this torch", "another torch"])
def test_hidden_states_changed_behind_a_block(torchs, monkeypatch):
    """Changing a block's input after its forward is an error that names the block: recomputations would use it."""
    if torchs == "another torch":  # whose record of a checkpointed call is not known
        monkeypatch.setattr(compat.checkpoint, "_READ", {"something else"})
    hidden = torch.ones(4, requires_grad=True) * 1
    output = FullRegion("block")(torch.sin, hidden)
    hidden.add_(1.0)
    with pytest.raises(ChangedBlockError, match="block 'block': an input was changed in place"):
        output.sum().backward()


HEADS = torch.linspace(-1, 1, 128).view(1, 4, 8, 4)
READS = {
    "index": (lambda x, read: x[0][read], torch.tensor([0, 1, 2])),
    "index with a slice": (lambda x, read: x[:, read], torch.tensor([0, 1, 2])),
    "embedding": (lambda x, read: functional.embedding(read, x[0]), torch.tensor([0, 1, 2])),
    "mask of attention": (
        lambda x, read: functional.scaled_dot_product_attention(x.view(1, 4, 8, 4), HEADS, HEADS, read),
        torch.zeros(8, 8),
    ),
    "offsets of groups": (
        lambda x, read: torch.ops.aten._grouped_mm(x[0], WEIGHT.expand(2, 16, 16).contiguous(), read),
        torch.tensor([3, 8], dtype=torch.int32),
    ),
}
"""Operations that read a tensor which is no operand of their rows in the table, and that tensor."""


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("changes", ["never", "behind the block", "inside the block, under hooks"])
def test_what_an_operation_reads_beside_its_operands_may_not_change(name, changes):
    """A gradient that needs no more than the operation's result would else be wrong, without an error."""
    operation, read = READS[name][0], READS[name][1].clone()
    scale = nn.Parameter(torch.tensor(0.7))
    region = RebuildRegion("toy", save=())

    def block(x):
        result = operation(x, read)
        if changes.startswith("inside"):
            read.sub_(1)
        return functional.silu(result) * scale

    def gradient(run):
        x = torch.linspace(-2, 2, 128).view(1, 8, 16).requires_grad_()
        out = run(x * 1.5)
        if changes.startswith("behind"):
            read.sub_(1)
        return torch.autograd.grad(out.sum(), [scale])[0]

    if changes == "never":
        assert torch.equal(gradient(block), gradient(functools.partial(region, block)))
        assert region.recomputed
        return
    copied = changes.endswith("hooks")
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.Tensor.detach) if copied else nullcontext()
    with hooks, pytest.raises(InPlaceError, match=r"block 'toy'.*was changed in place"):
        gradient(functools.partial(region, block))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_norm_whose_parameter_is_changed_before_backward_is_said(name):
    """Changing a norm's weight or bias before backward is an error; autograd checks only the weight."""
    norm = hooked(nn.LayerNorm(16))

    def block(x):
        out = functional.silu(norm(x) @ WEIGHT)
        if changes:
            with torch.no_grad():
                getattr(norm, name).add_(1.0)
        return out

    changes = False
    same_toys(block, parameters=(norm.weight, norm.bias))
    changes = True
    with pytest.raises(InPlaceError, match=r"block 'toy'.*changed in place"):
        toy(block, RebuildRegion("toy", save=("linear", "attention")))


@unwatched
def test_a_module_that_does_something_else_when_it_runs_again_is_said(monkeypatch):
    _, model = plain_and_ours()
    loss = model(**without_cache(model, tiny_batch("llama"))).loss
    monkeypatch.setattr(type(model.model.norm), "forward", lambda norm, hidden: hidden.sin())
    with pytest.raises(RebuildError, match="LlamaRMSNorm saved"):
        loss.backward()
