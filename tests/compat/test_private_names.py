"""Private names of torch: `private` looks them up, this torch has them, and a torch without one is told by name."""

import re
from pathlib import Path

import pytest

import hf_ckpt
from hf_ckpt.compat.private import private
from hf_ckpt.errors import HfCkptError

NAMES = sorted(
    {
        name
        for path in Path(hf_ckpt.__file__).parent.rglob("*.py")
        for name in re.findall(r'\bprivate\(\s*"([\w.]+)"', path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.compat
@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_it(name):
    assert private(name) is not None


def test_a_torch_without_a_name_is_told():
    with pytest.raises(HfCkptError, match=r"has no torch.autograd._no_such_name, which hf_ckpt needs"):
        private("torch.autograd._no_such_name")
