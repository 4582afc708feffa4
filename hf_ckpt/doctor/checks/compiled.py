"""Checks of checkpointing under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

from hf_ckpt.doctor.facts import ACCELERATE, TRAINING, Facts, is_on, shown, walk
from hf_ckpt.doctor.findings import Finding


def cuda_graphs(facts: Facts) -> Iterator[Finding]:
    """Find a compile mode that captures CUDA graphs, in which random state cannot be read."""
    if facts.checkpointing is None or facts.kwargs.get("preserve_rng_state") is False:
        return
    graphs = [facts.option("torch_compile_mode"), facts.option("torch_compile_backend")]
    for file in facts.of(ACCELERATE):
        graphs += [file.setting("dynamo_config", key) for key in ("dynamo_mode", "dynamo_backend")]
    for file in facts.of(TRAINING, ACCELERATE):
        values = (file.setting(*path) for path, value in walk(file.values) if path[-1] == "triton.cudagraphs")
        graphs += [value for value in values if value is not None and is_on(value.value)]
    for setting in graphs:
        by_mode = setting is not None and str(setting.value).lower() in (
            "reduce-overhead",
            "max-autotune",
            "cudagraphs",
        )
        if setting is not None and (by_mode or setting.where.endswith("triton.cudagraphs")):
            yield Finding(
                "warning",
                "cuda-graphs",
                setting.where,
                f"{shown(setting.value)} captures CUDA graphs, in which random state cannot be read: checkpointing "
                "that preserves it stops there.",
                "Use a mode without graphs (default, max-autotune-no-cudagraphs), or set preserve_rng_state to false "
                "in the checkpointing kwargs if no dropout is active.",
            )
            return


def compiled_engine(facts: Facts) -> Iterator[Finding]:
    """Find what works in eager mode only, asked for together with torch.compile."""
    spec, given, compiled = facts.spec, facts.given_kwargs, facts.compiled
    if spec is None or given is None or compiled is None:
        return
    if spec.engine == "rebuild":
        yield Finding(
            "error",
            "rebuild-compiled",
            f"{given.where}.engine",
            f'"engine": "rebuild" cannot work under torch.compile ({compiled.where}).',
            'Use "engine": "auto", which takes SAC there.',
        )
    if facts.policies & {"budget", "auto"}:
        yield Finding(
            "warning",
            "planned-compiled",
            f"{given.where}.policy",
            f"Under torch.compile ({compiled.where}) no plan is made, and every block is recomputed.",
            "Plan beforehand with `hf-ckpt plan ... --out plan.yaml` and use {'plan': 'plan.yaml'}, or do not compile.",
        )
    if "selective" in facts.policies and "linear" in spec.save and facts.adapters is not None:
        yield Finding(
            "warning",
            "adapters-compiled",
            f"{given.where}.save",
            f"Under torch.compile ({compiled.where}) `selective` is SAC, which keeps the results of all linear layers: "
            f"with adapters ({facts.adapters.where}) those are also what frozen ones and the adapters themselves make, "
            "and that is more than no checkpointing keeps.",
            'Use "save": ["attention"] or "policy": "full", or do not compile.',
        )
