"""Strategies of hypothesis that make specs, and parts of them."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from hf_ckpt.spec.actions import CHEAP_CLASSES, SAVE_CLASSES
from hf_ckpt.spec.reading import ENGINES, POLICIES
from hf_ckpt.spec.spec import Spec

# --- what can be written --------------------------------------------------------------------------------------------


def layer_text():
    """Choices of layers as texts, like "0-15,-1"."""
    index = st.integers(-9, 99)
    part = st.one_of(
        index.map(str),
        index.map(lambda first: f"{first}-"),
        st.tuples(index, index).map(lambda pair: f"{pair[0]}-{pair[1]}"),
    )
    return st.lists(part, min_size=1, max_size=4).map(",".join)


STACK = st.sampled_from(["encoder", "decoder"])
LAYERS = st.one_of(layer_text(), st.integers(-4, 40), st.dictionaries(STACK, layer_text(), min_size=1))
SAVE = st.lists(st.sampled_from(SAVE_CLASSES), min_size=1, max_size=2)
SIZE = st.one_of(st.integers(1, 2**45), st.sampled_from(["20GiB", "1.5 GB", "800mb", "64 KiB"]))
BUDGET = st.one_of(SIZE, st.floats(0.01, 1.0), st.sampled_from(["80%", "12.5%"]))
OPTIONS = {
    "preserve_rng_state": st.sampled_from(["auto", True, False]),
    "determinism_check": st.sampled_from(["default", "none"]),
    "use_reentrant": st.just(False),
    "head": st.one_of(st.integers(1, 4096), st.sampled_from(["auto", "full"])),
    "mlp": st.one_of(st.integers(1, 4096), st.sampled_from(["auto", "full"])),
}


@st.composite
def rules(draw):
    policy = draw(st.sampled_from(["none", "full", "selective", "offload"]))
    rule = {"layers": draw(layer_text()), "policy": policy}
    if draw(st.booleans()):
        rule["stack"] = draw(STACK)
    if policy == "selective" and draw(st.booleans()):
        rule["save"] = draw(SAVE)
    return rule


@st.composite
def valid_specs(draw):
    """Dicts that are specs: each policy with the keys that go with it."""
    policy = draw(st.sampled_from(POLICIES))
    choosing = [{}]
    if policy in ("full", "selective", "offload"):
        choosing += [{"every_n_layers": draw(st.integers(1, 9))}, {"layers": draw(LAYERS)}]
    if policy == "full":
        choosing.append({"segments": draw(st.one_of(st.integers(1, 9), st.just("sqrt")))})
    spec = {"policy": policy} | draw(st.sampled_from(choosing))
    if policy not in ("budget", "auto") and "segments" not in spec and draw(st.booleans()):
        spec["rules"] = draw(st.lists(rules(), min_size=1, max_size=3))
    if policy == "budget":
        spec["budget"] = draw(BUDGET)
    if policy in ("selective", "budget", "auto"):
        spec["save"] = draw(SAVE)
        saves = {name for rule in spec.get("rules", ()) for name in rule.get("save", ())} | {*spec["save"]}
        by_sac = saves.isdisjoint(CHEAP_CLASSES)  # which saves no cheap results
        spec["engine"] = draw(st.sampled_from([engine for engine in ENGINES if engine != "sac" or by_sac]))
    moving = [False]
    if policy in ("full", "offload", "budget", "auto") and "segments" not in spec:
        moving.append(True)
    if policy in ("selective", "budget", "auto") and spec["engine"] != "sac":
        moving.append("saved")
    spec["offload"] = draw(st.sampled_from(moving))
    if (policy in ("offload", "budget", "auto") or spec["offload"]) and draw(st.booleans()):
        spec["host_budget"] = draw(SIZE)
    for key, values in OPTIONS.items():
        if draw(st.booleans()) and not (key == "mlp" and spec.get("engine") == "sac"):
            spec[key] = draw(values)
    return spec


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*(field.name for field in dataclasses.fields(Spec)), "polcy", "context_fn"])
WORDS = st.sampled_from([*POLICIES, *SAVE_CLASSES, *ENGINES, "saved", "sqrt", "20GiB", "80%", "0-3,-1", "1-", "-", ","])
