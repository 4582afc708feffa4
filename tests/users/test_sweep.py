"""Model types of transformers, made small and trained under every way of checkpointing, each in its own process.

`tests/scripts/sweep.py` does the same for all types.
"""

from __future__ import annotations

import pytest
from helpers.sparing import sparing
from helpers.sweeping import EQUAL, FAILED, NOTHING, WAYS, failures, left_out, sweep_all, table

FEW = ("opt", "git", "clip", "mllama", "bloom", "electra", "llama4_text")
PLANNED = ("vit",)
MORE = (
    *("mamba", "jamba", "gemma3", "llava", "qwen3_vl", "mixtral", "gpt_oss", "deepseek_v3", "bridgetower", "t5"),
    *("mobilebert", "hrm_text", "diffusion_gemma", "swin", "segformer", "layoutlmv3", "speecht5", "zamba2"),
    *("phi3", "whisper", "wav2vec2", "blip", "recurrent_gemma", "granitemoe_swa", "prophetnet", "uvdoc_backbone"),
)
PLAIN_WAYS = tuple(way for way in WAYS if way != "budget")


@pytest.fixture(scope="module")
def swept(request):
    """Results of all types that selected tests need. `FEW` are run without budgets, which take long."""
    names = {item.callspec.params["model_type"] for item in request.session.items if "swept" in item.fixturenames}
    few = [name for name in FEW if name in names]
    found = [*sweep_all(few, ways=PLAIN_WAYS), *sweep_all([name for name in (*PLANNED, *MORE) if name in names])]
    return {each["type"]: each for each in found}


@pytest.mark.long
@sparing("model_type", [*FEW, *PLANNED, *MORE], *FEW, *PLANNED)
def test_a_type_trains_under_every_way(swept, model_type):
    found = swept[model_type]
    assert "left_out" not in found, found
    assert not failures([found])
    assert {found["ways"][way][0] for way in ("full", "selective", "every 2nd")} == {EQUAL}, found
    assert found["ways"].get("budget", [EQUAL])[0] in (EQUAL, NOTHING), found


# --- the sweep itself -----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_process_that_hangs_is_told():
    (found,) = sweep_all(["opt"], limit=0)
    assert found["left_out"] == "still running after 0 s"


def test_the_table():
    found = [
        {"type": "a", "class": "A", "ways": {"full": [EQUAL, ""], "LoRA": [FAILED, "no"]}},
        {"type": "b", "left_out": "no blocks: none"},
    ]
    assert "| full | 1 | 0 | 0 | 0 |" in table(found)
    assert failures(found) == ["a (A), LoRA: no"]
    assert left_out(found) == {"no blocks": 1}
