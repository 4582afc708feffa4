"""Compiled blocks on two CPU processes (gloo), under DDP and with each block sharded by FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.processes import each_rank, run_on_ranks, wanted

pytestmark = pytest.mark.slow
CASES = {
    f"{by}-{name}": {"family": "llama", "by": by, "spec": spec}
    for by in ("ddp", "fsdp2")
    for name, spec in {
        "share": {"share": 0.3},
        "mixed": {"policy": "none", "rules": [{"layers": "1", "policy": "full"}]},
        "budget": {"budget": "1GiB"},
    }.items()
} | {f"{by}-taken-over": {"family": "llama", "by": f"{by}-regions", "spec": {"share": 0.3}} for by in ("ddp", "fsdp2")}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compiled")
    # A cache of their own: a process that was killed while it compiled leaves half a library in the common one.
    extra = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "graphs")}
    return run_on_ranks("compiled_worker.py", wanted(request, CASES), folder, timeout=900, extra=extra)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager_mode_without_hf_ckpt(trained, name):
    ranks = each_rank(trained, name)
    for found in ranks:
        assert found["in_graphs"] == found["blocks"] == 3
        assert found["by_others"] == 0
        assert found["largest_gap"] < 1e-4
    assert ranks[0]["sums"] == ranks[1]["sums"]
