"""Checks of the machine that trains: its device, and the versions that are installed."""

from __future__ import annotations

from collections.abc import Iterator

from hf_ckpt.doctor.facts import ACCELERATE, REQUIRED, Facts, Setting, is_at_most, is_before, is_on
from hf_ckpt.doctor.findings import Finding
from hf_ckpt.versions import LAST_DEEPSPEED_WITH_EMPTY_SHAPES


def offload_nowhere(facts: Facts) -> Iterator[Finding]:
    """Find offloading on a CPU, where hidden states are in host memory anyway."""
    spec, given = facts.spec, facts.given_kwargs
    if spec is None or given is None or not (spec.offload or "offload" in facts.policies):
        return
    on_cpu = facts.option_on("use_cpu", "no_cuda")
    for file in facts.of(ACCELERATE):
        use = file.setting("use_cpu")
        on_cpu = on_cpu or (use if use is not None and is_on(use.value) else None)
    if on_cpu is None and facts.device is not None and facts.device.name == "cpu":
        on_cpu = Setting("cpu", "--device")
    if on_cpu is not None:
        yield Finding(
            "warning",
            "offload-nowhere",
            given.where,
            f"Offloading moves hidden states from an accelerator to host memory, but training is on the CPU "
            f"({on_cpu.where}): nothing is moved.",
            "Use `policy: full`, or train on an accelerator.",
        )


def environment(facts: Facts) -> Iterator[Finding]:
    """Find versions that hf_ckpt does not work with, and a DeepSpeed that cannot recompute frozen weights."""
    for package, (first, beyond) in REQUIRED.items():
        version = facts.versions.get(package)
        wanted = f"{package} {first} or later" + (f", before {beyond}" if beyond else "")
        command = f"pip install '{package}>={first}" + (f",<{beyond}'" if beyond else "'")
        if version is None:
            yield Finding("error", "version", package, f"hf_ckpt needs {wanted}, and it is not installed.", command)
        elif is_before(version, first) or (beyond and not is_before(version, beyond)):
            yield Finding("error", "version", package, f"hf_ckpt needs {wanted}; {version} is installed.", command)
    version = facts.versions.get("deepspeed")
    if version is not None and not facts.files and is_at_most(version, LAST_DEEPSPEED_WITH_EMPTY_SHAPES):
        yield Finding(
            "note",
            "deepspeed",
            "deepspeed",
            f"DeepSpeed {version} cannot recompute frozen weights (LoRA) under ZeRO-3.",
            f"Install one after {LAST_DEEPSPEED_WITH_EMPTY_SHAPES} for that.",
        )
