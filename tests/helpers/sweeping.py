"""What becomes of one model type under each way of checkpointing, and of many types, each in a process of its own."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import gc
import io
import logging
import multiprocessing
import random
import time
import traceback
import warnings

import numpy
import torch
import transformers

import hf_ckpt
from helpers.shrinking import FACTORS, batches, classes, loss_of, small_config, small_model
from helpers.steps import assert_near, assert_same, enable, without_cache
from hf_ckpt import compat
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.units import format_bytes

WAYS = {
    "full": {"policy": "full"},
    "selective": {"policy": "selective"},
    "save attention": {"policy": "selective", "save": ["attention"]},
    "every 2nd": {"policy": "full", "every_n_layers": 2},
    "segments": {"policy": "full", "segments": 2},
    "chunked head": {"policy": "full", "head": 8},
    "LoRA": {"policy": "selective"},
    "budget": {"policy": "budget"},
}
"""What is tried, by the name of its column."""
EQUAL, NOTHING, REFUSED, FAILED = "equal", "nothing", "refused", "failed"
"""Bit-equal, with something run again; bit-equal, with nothing run again; a typed error; anything else."""
BUDGET_BATCH, LARGE_BATCH = 4, 50_000
"""How often the batch of a type is repeated under a budget, unless it has more numbers than this."""
BUDGET_STEPS = 12
"""Steps under a budget: some of them measure, the others run the plan."""
OVER, OVER_AT_FIRST = 1.01, 1.03
"""Share of the budget that a step may need, and that the first step of the plan may."""
LEAST_SAVED = 0.02
"""Share of the peak that `full` has to save, or else there is nothing for a budget to be between."""
NEAR = 2e-5
"""Relative difference that gradients may have with the head in chunks, whose sums are taken in another order."""
LIMIT_SECONDS = 120


class NotSwept(Exception):
    """The type is left out, for the reason that the message gives."""


def sweep(model_type, ways=tuple(WAYS)):
    """Try all ways on a small model of a type: a dict that can be written as JSON.

    `left_out` says why there is nothing to try; else `ways` has, for each way, what came of it and a few words more.
    """
    found = {"type": model_type}
    transformers.logging.set_verbosity_error()
    logging.getLogger("hf_ckpt").setLevel(logging.ERROR)
    began = time.monotonic()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            model, batch, factor = trained(model_type)
            expected = [step_of(model, batch), step_of(model, batch)]
            if not _same(*expected):
                raise NotSwept("two steps without checkpointing differ")
            found |= {"class": type(model).__name__, "divided_by": factor, "ways": {}}
            found["blocks"] = sum(isinstance(m, compat.GradientCheckpointingLayer) for m in model.modules())
            for way in [way for way in WAYS if way in ways]:  # adapters last: some that fail stay on the model
                found["ways"][way] = tried(model, batch, expected[0], way)
        except NotSwept as reason:
            found["left_out"] = str(reason)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def trained(model_type):
    """A small model of a type that trains without checkpointing, a batch, and the factor that divided its widths.

    Raises `NotSwept` where there is none.
    """
    names = classes(model_type)
    if not names:
        raise NotSwept("part of other models: no Auto class makes it")
    reason = ""
    for factor in FACTORS:
        try:
            config = small_config(model_type, factor)
        except Exception as error:  # each config checks itself in its own way
            reason = reason or f"no small config: {_short(error)}"
            continue
        for name in names:
            try:
                model = small_model(name, config)
            except Exception as error:
                reason = reason or f"{name} cannot be made: {_short(error)}"
                continue
            if not any(isinstance(module, compat.GradientCheckpointingLayer) for module in model.modules()):
                raise NotSwept("no blocks: nothing is built on GradientCheckpointingLayer")
            for batch in batches(model):
                try:
                    if _trains(step_of(model, batch)):
                        return model, batch, factor
                except Exception as error:
                    reason = f"{name} does not train on such a batch: {_short(error)}"
    raise NotSwept(reason or "no batch is known")


def step_of(model, batch, *, plain=True, then=None):
    """Loss and gradients of a step from a fixed seed of every generator; `plain` without a cache, where there is one.

    With a plan on the model, no cache is to be made unasked: see `without_cache`. `then` is called when gradients are
    there.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    batch = {name: value.clone() for name, value in batch.items()}
    with no_cache_by_default(model) if plain else contextlib.nullcontext():
        loss = loss_of(model(**(without_cache(model, batch) if plain else batch)))
    loss.backward()
    if then is not None:
        then()
    found = {"loss": loss.detach().float(), **{n: p.grad for n, p in model.named_parameters() if p.requires_grad}}
    model.zero_grad(set_to_none=True)
    if not torch.isfinite(found["loss"]):
        raise ValueError("the loss is not finite")
    return found


@contextlib.contextmanager
def no_cache_by_default(model):
    """Inside this context no config of the model asks for a cache; some models take `use_cache` from nowhere else."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    asking = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in asking:
        config.use_cache = False
    try:
        yield
    finally:
        for config in asking:
            config.use_cache = True


def _trains(found):
    """Whether some parameter has a gradient."""
    return any(value is not None and bool(value.any()) for name, value in found.items() if name != "loss")


def _same(expected, got):
    try:
        assert_same(expected, got)
    except AssertionError:
        return False
    return True


def tried(model, batch, expected, way):
    """[what came of a way, a few words more].

    Plans within a budget are made for adapters, where they work: beside whole gradients and an optimizer's state, what
    so small a batch saves would be too little to recompute anything for.
    """
    adapted, trainable = None, [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = model
    try:
        if way in ("LoRA", "budget"):
            try:
                adapted = add_lora(model, rank=4, init_lora_weights=False).train()
                wanted = step_of(adapted, batch)
            except Exception as error:  # code of others
                reason = f"adapters do not work without checkpointing: {_short(error)}"
            else:
                reason = "" if _trains(wanted) else "no adapter is reached by the batch"
            if way == "LoRA" and reason:
                return [NOTHING, reason]
            if not reason:
                model, expected = adapted, wanted
            else:
                adapted = _without_adapters(plain, adapted, trainable)
                expected = step_of(model, batch)
        if way == "budget":
            return within_budget(model, *repeated(model, batch, expected))
        return _compared(model, batch, expected, WAYS[way], near=way == "chunked head")
    except HfCkptError as error:
        return [REFUSED, _short(error)]
    except AssertionError as error:
        return [FAILED, _short(error)]
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return [FAILED, f"{_short(error)} ({frame.filename.rpartition('site-packages/')[2]}:{frame.lineno})"]
    finally:
        with contextlib.suppress(HfCkptError):
            hf_ckpt.uninstall(model)
        _without_adapters(plain, adapted, trainable)


def _without_adapters(model, adapted, trainable):
    """Take adapters off a model, which leave its own parameters frozen."""
    if adapted is not None:
        adapted.unload()
    for parameter in trainable:
        parameter.requires_grad_(True)


def _compared(model, batch, expected, spec, near=False, steps=2):
    """Two steps under a spec or plan: the first may be a trial of unknown blocks."""
    hf_ckpt.install(model, spec)
    enable(model)
    for _ in range(steps):
        got = step_of(model, batch, plain=False)
        if near:
            assert_near(expected, got, NEAR)
        else:
            assert_same(expected, got)
    done = hf_ckpt.describe(model)
    again = sum(done.recomputed.values())
    if near and not done.chunked_heads:
        return [NOTHING, "the head ran as a whole"]
    if not again:
        return [NOTHING, "no block was reached" if not sum(done.forwards.values()) else "nothing to run again"]
    return [EQUAL, f"{again} run again"]


def within_budget(model, batch, expected):
    """Steps under a budget half way between the peaks of `full` and of no checkpointing, each counted and compared.

    The optimizer keeps nothing and changes nothing, so that each step has the gradients of the first.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    peaks = {}
    for way, spec in (("keep", None), ("full", {"policy": "full"})):
        if spec is not None:
            hf_ckpt.install(model, spec)
            enable(model)
        for _ in range(2):  # the first may be a trial of unknown blocks, or fill caches
            peaks[way] = _counted(model, batch, optimizer, expected, plain=spec is None)
        hf_ckpt.uninstall(model)
    if peaks["keep"] - peaks["full"] < LEAST_SAVED * peaks["keep"]:
        return [NOTHING, f"`full` needs {format_bytes(peaks['full'])} of {format_bytes(peaks['keep'])}"]
    budget = (peaks["keep"] + peaks["full"]) // 2
    hf_ckpt.install(model, {"policy": "budget", "budget": f"{budget}B"})  # a plain number is none below 1 MiB
    enable(model)
    shares, planned_at = [], None
    for number in range(BUDGET_STEPS):
        shares.append(_counted(model, batch, optimizer, expected, plain=False) / budget)
        plan = hf_ckpt.describe(model).plan
        if planned_at is None and plan.prediction is not None:
            planned_at = number
    assert planned_at is not None, f"no plan within {BUDGET_STEPS} steps"
    for number, share in enumerate(shares):
        most = OVER_AT_FIRST if number == planned_at else OVER
        assert share <= most, f"over budget: step {number} needs {share:.3f} of it, the plan is on at {planned_at}"
    predicted, again = plan.prediction.peak_bytes / budget, sum(hf_ckpt.describe(model).recomputed.values())
    words = f"plan at step {planned_at}, peak {shares[-1]:.3f} of the budget, predicted {predicted:.3f}"
    saved = f"`full` saves {1 - peaks['full'] / peaks['keep']:.2f}"
    return [EQUAL if again else NOTHING, f"{again} run again, {words}, {saved}"]


def repeated(model, batch, expected):
    """The batch several times over, and its loss and gradients, so that more is saved; itself where that fails."""
    if sum(value.numel() for value in batch.values()) > LARGE_BATCH:  # as films are
        return batch, expected
    larger = {name: torch.cat([value] * BUDGET_BATCH) for name, value in batch.items()}
    try:
        found = step_of(model, larger)
        return (larger, found) if _same(found, step_of(model, larger)) else (batch, expected)
    except Exception:  # such as inputs without a dimension for sequences
        return batch, expected


def _counted(model, batch, optimizer, expected, plain):
    """The peak of a step in bytes, which must have the expected loss and gradients."""
    gc.collect()
    with LiveBytes(model) as live:
        got = step_of(model, batch, plain=plain, then=optimizer.step)
    assert_same(expected, got)
    return live.peak_bytes


def _short(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# --- many types -----------------------------------------------------------------------------------------------------


def sweep_all(types, processes=1, limit=LIMIT_SECONDS, ways=tuple(WAYS)):
    """`sweep` every type, each in a process of its own with a limit in seconds; yield what was found."""
    with concurrent.futures.ThreadPoolExecutor(processes) as pool:
        waiting = [pool.submit(_in_a_process, model_type, limit, tuple(ways)) for model_type in types]
        for done in concurrent.futures.as_completed(waiting):
            yield done.result()


def _in_a_process(model_type, limit, ways):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.sweeping", "peft"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, ways, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit) else _left_out(model_type, f"still running after {limit} s")
    except EOFError:
        process.join()
        return _left_out(model_type, f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _left_out(model_type, reason):
    return {"type": model_type, "left_out": reason}


def _send(model_type, ways, sender):
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported takes a quarter of a second to look through
    sender.send(sweep(model_type, ways))
    sender.close()


def table(found):
    """What became of how many types, as lines of Markdown."""
    swept = [each for each in found if "ways" in each]
    lines = [f"| way | {EQUAL} | {NOTHING} | {REFUSED} | {FAILED} |", "|---|--:|--:|--:|--:|"]
    for way in WAYS:
        counts = collections.Counter(each["ways"][way][0] for each in swept if way in each["ways"])
        lines.append(f"| {way} | " + " | ".join(str(counts[v]) for v in (EQUAL, NOTHING, REFUSED, FAILED)) + " |")
    return "\n".join(lines)


def left_out(found):
    """Why how many types were left out: reason -> how many."""
    reasons = collections.Counter(each["left_out"].split(":")[0] for each in found if "left_out" in each)
    return dict(reasons.most_common())


def trains(found):
    """Whether a type trains under `full`, with something run again."""
    return found.get("ways", {}).get("full", ("",))[0] == EQUAL


def failures(found):
    """Every failure, one a line."""
    return [
        f"{each['type']} ({each['class']}), {way}: {words}"
        for each in found
        for way, (verdict, words) in each.get("ways", {}).items()
        if verdict == FAILED
    ]
