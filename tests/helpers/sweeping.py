"""What becomes of one model type under each way of checkpointing, and of many types, each in a process of its own."""

from __future__ import annotations

import collections
import contextlib
import io
import json
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
from helpers.steps import assert_near, assert_same, enable, gradients, without_cache
from hf_ckpt import compat
from hf_ckpt.attach.record import installation
from hf_ckpt.compat.peft import add_lora
from hf_ckpt.errors import HfCkptError
from hf_ckpt.planner.course import tightened

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


def step_of(model, batch, *, plain=True):
    """Loss and gradients of a step from a fixed seed of every generator; `plain` without a cache, where there is one.

    With a plan on the model, no cache is to be made unasked: see `without_cache`.
    """
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    batch = {name: value.clone() for name, value in batch.items()}
    with no_cache_by_default(model) if plain else contextlib.nullcontext():
        loss = loss_of(model(**(without_cache(model, batch) if plain else batch)))
    loss.backward()
    found = {"loss": loss.detach().float(), **gradients(model)}
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
            return within_budget(model, batch, expected)
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
    """A plan for the batch, and then the one of the lowest peak, which is that of the least budget there is."""
    _compared(model, batch, expected, {"policy": "budget", "budget": "1TiB"}, steps=1)
    least = tightened(installation(model).planned, 2**60).plan
    hf_ckpt.uninstall(model)
    return _compared(model, batch, expected, least)


def _short(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


# --- many types -----------------------------------------------------------------------------------------------------


def sweep_all(types, processes=1, limit=LIMIT_SECONDS, ways=tuple(WAYS)):
    """`sweep` every type, each in a process of its own with a limit in seconds; yield what was found."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.sweeping", "peft"])
    waiting, running = collections.deque(types), []
    while waiting or running:
        while waiting and len(running) < processes:
            model_type = waiting.popleft()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(model_type, ways, sender))
            process.start()
            sender.close()
            running.append((model_type, process, receiver, time.monotonic() + limit))
        time.sleep(0.02)
        for entry in list(running):
            model_type, process, receiver, deadline = entry
            ended = None
            if receiver.poll():
                try:
                    ended = receiver.recv()
                except EOFError:
                    process.join()
                    ended = {"type": model_type, "left_out": f"its process ended with {process.exitcode}"}
            elif time.monotonic() > deadline:
                process.kill()
                ended = {"type": model_type, "left_out": f"still running after {limit} s"}
            if ended is not None:
                process.join()
                running.remove(entry)
                yield ended


def _send(model_type, ways, sender):
    torch.set_num_threads(1)
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


def failures(found):
    """Every failure, one a line."""
    return [
        f"{each['type']} ({each['class']}), {way}: {words}"
        for each in found
        for way, (verdict, words) in each.get("ways", {}).items()
        if verdict == FAILED
    ]


def as_line(found):
    """One JSON line of what was found of a type."""
    return json.dumps(found)
