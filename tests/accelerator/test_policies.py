"""Every policy trains every family on the simulated device as the same model without a plan does, bit for bit.

Each cell counts what was recomputed, rebuilt, moved or run in chunks, so that a plan that does nothing fails. Copies to
the host and back wait for computation, and computation for them: with one stream as late as the waits allow, and the
other one eager, each wait of `Lane` is needed, and the outcome does not depend on time.
"""

import functools
import itertools

import pytest
import torch
from helpers.adapters import with_lora
from helpers.steps import ROUNDING, ROUNDING_16, assert_near, assert_same, outcome, planned, without_cache
from helpers.tables import table

import hf_ckpt
from accelerator import device
from hf_ckpt import compat
from hf_ckpt.engines import host_memory
from hf_ckpt.models.tiny import TINY_FAMILIES, tiny_batch, tiny_model

MODES, SPECS = table(__file__, "policies.yaml").values()


def new_model(family, mode):
    options = {**MODES[mode], "dtype": getattr(torch, MODES[mode].get("dtype", "float32"))}
    model = tiny_model(family, layers=3, dropout=0.1, **options)
    return device.moved_to(with_lora(model, family) if "LoRA" in mode else model, device.FIRST)


COUNTS = "recomputed", "moved", "chunked_heads"
STEPS = 2


def train(model, family, mode):
    """Losses and gradients of some steps from a fixed seed."""
    torch.manual_seed(7)
    losses = []
    model.zero_grad(set_to_none=True)
    for seed in range(STEPS):
        batch = {name: value.to(device.FIRST) for name, value in tiny_batch(family, seed=seed).items()}
        with torch.autocast(device.NAME, dtype=torch.bfloat16, enabled=mode == "autocast"):
            losses.append(model(**without_cache(model, batch)).loss)
        losses[-1].backward()
    return {name: None if value is None else value.cpu() for name, value in outcome(model, torch.stack(losses)).items()}


def copied_since(before):
    return {name: size - before[name] for name, size in device.counted().items() if name.startswith("bytes_")}


@functools.cache
def reference(family, mode):
    """The same without a plan, and the bytes that it copies to the host and back."""
    before = device.counted()
    return train(new_model(family, mode), family, mode), copied_since(before)


def counted(described, kind):
    count = getattr(described, kind)
    return count if isinstance(count, int) else sum(count.values())


def cells():
    for name, row in SPECS.items():
        yield from itertools.product(row.get("families", TINY_FAMILIES), [name], row.get("modes", MODES))


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize(("family", "name", "mode"), list(cells()))
def test_policies(family, name, mode, monkeypatch):
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 0)
    spec, counts = SPECS[name]["spec"], SPECS[name]["counts"]
    expected, copied = reference(family, mode)
    before = device.counted()
    model = planned(new_model(family, mode), spec)
    got = train(model, family, mode)
    if "head" in spec:  # sums in another order
        wide = mode != "dropout"
        assert_near(expected, got, ROUNDING_16 if wide else ROUNDING, together=wide)
    else:
        assert_same(expected, got, name)
    described = hf_ckpt.describe(model)
    assert [kind for kind in COUNTS if counted(described, kind)] == counts
    if not device.IS_SIMULATED:  # which counts copies
        return
    moved = {kind: size - copied[kind] for kind, size in copied_since(before).items()}
    assert moved["bytes_to_host"] == STEPS * counted(described, "moved")
    # T5 itself copies a few positions when it recomputes; backward reads one operand less of a frozen product.
    assert moved["bytes_from_host"] >= (0.9 if "LoRA" in mode else 1) * moved["bytes_to_host"]


# --- copies behind computation, and before it -------------------------------------------------------------------------

PACES = [("free", "free"), ("late", "eager"), ("eager", "late"), ("late", "late")]


def interrupted(model):
    """A step whose backward ends after block 1: the tensors of block 0 are on their way back, and nobody uses them."""

    def fail(gradient):
        raise KeyboardInterrupt

    block = model.get_submodule("model.layers.0")
    handle = block.register_forward_hook(lambda *found: found[2].register_hook(fail) and None)
    with pytest.raises(KeyboardInterrupt):
        train(model, "llama", "dropout")
    handle.remove()


@pytest.mark.parametrize("interrupt", [False, True], ids=["", "after an interrupted step"])
@pytest.mark.parametrize("paces", PACES, ids=" ".join)
@pytest.mark.parametrize("spec", ["offload", "saved", "segments, offload"])
def test_gradients_are_right_at_every_pace(spec, paces, interrupt, monkeypatch):
    """Copies that nobody waits for must not write to memory after it is freed, either."""
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 0)  # move even the smallest tensors
    expected, _ = reference("llama", "dropout")
    reused = []
    with device.pace(computing=paces[0], copying=paces[1]):
        model = new_model("llama", "dropout")
        planned(model, {**SPECS[spec]["spec"], "check_every": 0})
        if interrupt:
            interrupted(model)
            sizes = hf_ckpt.describe(model).moved.values()
            reused = [torch.zeros(size // 4, device=device.FIRST) for size in sizes for _ in range(8)]
        assert_same(expected, train(model, "llama", "dropout"))
        assert not any(bool(tensor.any()) for tensor in reused)
    assert sum(hf_ckpt.describe(model).moved.values()) > 0


class ReadsItsOwnStream(host_memory.Lane):
    """Asks for the computing stream inside the context of its own, and so waits for itself."""

    def _begin(self, source, target, on_device):
        with torch.no_grad(), compat.devices.on_stream(self._stream):
            computing = torch.accelerator.current_stream(self._device)
            self._stream.wait_stream(computing)
            target.copy_(source, non_blocking=True)
        return host_memory.Copy(self._stream.record_event(), computing, on_device)


class ClonesOnItsOwnStream(host_memory.Lane):
    """Copies back into memory of its own stream, which is used again while the computing stream still reads it."""

    def back(self, host):
        with compat.devices.on_stream(self._stream):
            target = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=self._device)
        return target, self._begin(host, target, target)


@pytest.mark.parametrize("lane", [ReadsItsOwnStream, ClonesOnItsOwnStream])
def test_races_that_others_have_had_in_silence(lane, monkeypatch):
    """The lane of hf_ckpt is right where these two give other gradients, without an error."""
    if not device.IS_SIMULATED:
        pytest.skip("a real device may win the race")
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 0)
    expected, _ = reference("llama", "dropout")

    def gradients_with(kind, paces):
        monkeypatch.setattr(host_memory, "Lane", kind)
        with device.pace(computing=paces[0], copying=paces[1]):
            model = planned(new_model("llama", "dropout"), {**SPECS["offload"]["spec"], "check_every": 0})
            found = train(model, "llama", "dropout")
        assert sum(hf_ckpt.describe(model).moved.values()) > 0
        return found

    def is_right(found):
        try:
            assert_same(expected, found)
        except AssertionError:
            return False
        return True

    right = host_memory.Lane
    assert all(is_right(gradients_with(right, paces)) for paces in PACES)
    assert not all(is_right(gradients_with(lane, paces)) for paces in PACES)


@pytest.mark.parametrize("paces", PACES, ids=" ".join)
def test_memory_that_is_not_pinned_is_copied_before_the_host_goes_on(paces, monkeypatch):
    monkeypatch.setattr(host_memory, "LEAST_BYTES", 0)
    monkeypatch.setattr(host_memory, "_buffer", lambda size, *, pin: torch.empty(size, dtype=torch.uint8, device="cpu"))
    expected, _ = reference("llama", "dropout")
    with device.pace(computing=paces[0], copying=paces[1]):
        model = planned(new_model("llama", "dropout"), {**SPECS["offload"]["spec"], "check_every": 0})
        assert_same(expected, train(model, "llama", "dropout"))
    assert sum(hf_ckpt.describe(model).moved.values()) > 0


def test_another_computing_stream_is_recorded():
    """A tensor that was fetched for one stream and is used by another is not reused before that has used it."""
    lane = host_memory.lane_of(torch.device(device.FIRST))
    other = torch.Stream(device.FIRST)
    source = torch.full((4096,), 2.0, pin_memory=True)
    with device.pace(computing="eager", copying="late"):
        tensor, copy = lane.back(source)
        with other:
            lane.wait(copy)
            doubled = tensor * 2
        copy.event.synchronize()
        del tensor, copy
        torch.full((4096,), 7.0, device=device.FIRST)
        torch.accelerator.synchronize()
    assert bool((doubled.cpu() == 4).all())


@pytest.mark.parametrize("paces", PACES, ids=" ".join)
def test_trl_offloads_what_selective_keeps(paces, monkeypatch):
    """TRL copies on a stream of its own, and frees after one node what it copied back; `selective` uses it longer."""
    offloading = pytest.importorskip("trl.models.activation_offloading")
    if device.IS_SIMULATED:
        module = torch.get_device_module(device.NAME)
        monkeypatch.setattr(module, "current_stream", torch.accelerator.current_stream, raising=False)
        monkeypatch.setattr(module, "Stream", lambda: torch.Stream(device.FIRST), raising=False)
        monkeypatch.setattr(module, "stream", lambda stream: stream, raising=False)
        monkeypatch.setattr(module, "empty_cache", lambda: None, raising=False)
    # What comes back may lie elsewhere in memory, so that some CPUs round otherwise than without offloading.
    with offloading.OffloadActivations():
        expected = train(new_model("llama", "dropout"), "llama", "dropout")
    with device.pace(computing=paces[0], copying=paces[1]):
        model = planned(new_model("llama", "dropout"), {**SPECS["selective"]["spec"], "check_every": 0})
        with offloading.OffloadActivations():
            assert_same(expected, train(model, "llama", "dropout"))
    assert all(hf_ckpt.describe(model).recomputed.values())
