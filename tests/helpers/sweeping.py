"""Results of a model type under each way of checkpointing, and of many types, each in its own process."""

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
"""The ways to try, by column name."""
EQUAL, NOTHING, REFUSED, FAILED = "equal", "nothing", "refused", "failed"
"""Bit-equal with recomputation; bit-equal without recomputation; a typed error; anything else."""
BUDGET_BATCH, LARGE_BATCH = 4, 50_000
"""How often a budget's batch repeats the type's batch, unless that has more elements than this."""
BUDGET_STEPS = 12
"""Steps under a budget: the first ones measure, the others run the plan."""
OVER, OVER_AT_FIRST = 1.01, 1.03
"""Largest share of the budget that a step may need, and that the first step of the plan may need."""
LEAST_SAVED = 0.02
"""Least share of the peak that `full` must save; otherwise there is no room for a budget."""
NEAR = 2e-5
"""Largest relative difference of gradients with a chunked head, which sums in another order."""
LIMIT_SECONDS = 120


class NotSwept(Exception):
    """The type is left out; the message says why."""


def sweep(model_type, ways=tuple(WAYS)):
    """Try all ways on a small model of a type; returns a dict that can be written as JSON.

    `left_out` says why there is nothing to try; otherwise `ways` has, for each way, the result and a short explanation.
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
            found["blocks"] = sum(
                isinstance(m, compat.transformers.GradientCheckpointingLayer) for m in model.modules()
            )
            for way in [way for way in WAYS if way in ways]:  # adapters last: if they fail, some stay on the model
                found["ways"][way] = tried(model, batch, expected[0], way)
        except NotSwept as reason:
            found["left_out"] = str(reason)
    return found | {"seconds": round(time.monotonic() - began, 1)}


def trained(model_type):
    """A small model of a type that trains without checkpointing, a batch, and the factor that divided its widths.

    Raises `NotSwept` if there is none.
    """
    names = classes(model_type)
    if not names:
        raise NotSwept("part of other models: no Auto class makes it")
    reason = ""
    for factor in FACTORS:
        try:
            config = small_config(model_type, factor)
        except Exception as error:  # configs validate themselves in different ways
            reason = reason or f"no small config: {_short(error)}"
            continue
        for name in names:
            try:
                model = small_model(name, config)
            except Exception as error:
                reason = reason or f"{name} cannot be made: {_short(error)}"
                continue
            if not any(
                isinstance(module, compat.transformers.GradientCheckpointingLayer) for module in model.modules()
            ):
                raise NotSwept("no blocks: nothing is built on GradientCheckpointingLayer")
            for batch in batches(model):
                try:
                    if _trains(step_of(model, batch)):
                        return model, batch, factor
                except Exception as error:
                    reason = f"{name} does not train on such a batch: {_short(error)}"
    raise NotSwept(reason or "no batch is known")


def step_of(model, batch, *, plain=True, then=None):
    """Loss and gradients of a step with every generator seeded; `plain` turns off the cache, if there is one.

    With a plan, hf_ckpt must turn off the default cache itself: see `without_cache`. `then` is called once gradients
    exist.
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
    """In this context, configs of the model do not ask for a cache; some models read `use_cache` only from the
    config."""
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
    """[result of a way, a short explanation].

    Budgets are tested with adapters if these work: beside full gradients and optimizer state, so small a batch would
    save too little to recompute anything for.
    """
    adapted, trainable = None, [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = model
    try:
        if way in ("LoRA", "budget"):
            try:
                adapted = add_lora(model, rank=4, init_lora_weights=False).train()
                wanted = step_of(adapted, batch)
            except Exception as error:  # third-party code
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
    """Remove adapters from a model; its own parameters stay frozen."""
    if adapted is not None:
        adapted.unload()
    for parameter in trainable:
        parameter.requires_grad_(True)


def _compared(model, batch, expected, spec, near=False, steps=2):
    """Compare two steps under a spec or plan: the first may be a trial of unknown blocks."""
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
    """Count and compare steps under a budget half-way between the peaks of `full` and of no checkpointing.

    The optimizer has no state and changes nothing, so that all steps have the same gradients.
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
    hf_ckpt.install(model, {"policy": "budget", "budget": f"{budget}B"})  # below 1 MiB a number needs a unit
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
    """The batch repeated, with its loss and gradients, so that more is saved; the batch itself if that fails."""
    if sum(value.numel() for value in batch.values()) > LARGE_BATCH:  # such as videos
        return batch, expected
    larger = {name: torch.cat([value] * BUDGET_BATCH) for name, value in batch.items()}
    try:
        found = step_of(model, larger)
        return (larger, found) if _same(found, step_of(model, larger)) else (batch, expected)
    except Exception:  # such as inputs without a batch dimension
        return batch, expected


def _counted(model, batch, optimizer, expected, plain):
    """The peak of a step in bytes; the step must have the expected loss and gradients."""
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
    """`sweep` each type in its own process with a time limit in seconds; yields results as they come."""
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
    gc.freeze()  # collecting over all imported objects takes a quarter of a second
    sender.send(sweep(model_type, ways))
    sender.close()


def table(found):
    """Number of types by way and result, as a Markdown table."""
    swept = [each for each in found if "ways" in each]
    lines = [f"| way | {EQUAL} | {NOTHING} | {REFUSED} | {FAILED} |", "|---|--:|--:|--:|--:|"]
    for way in WAYS:
        counts = collections.Counter(each["ways"][way][0] for each in swept if way in each["ways"])
        lines.append(f"| {way} | " + " | ".join(str(counts[v]) for v in (EQUAL, NOTHING, REFUSED, FAILED)) + " |")
    return "\n".join(lines)


def left_out(found):
    """Reason -> number of types that were left out for it."""
    reasons = collections.Counter(each["left_out"].split(":")[0] for each in found if "left_out" in each)
    return dict(reasons.most_common())


def trains(found):
    """Whether a type trains under `full` with recomputation."""
    return found.get("ways", {}).get("full", ("",))[0] == EQUAL


def failures(found):
    """Every failure as a line."""
    return [
        f"{each['type']} ({each['class']}), {way}: {words}"
        for each in found
        for way, (verdict, words) in each.get("ways", {}).items()
        if verdict == FAILED
    ]
