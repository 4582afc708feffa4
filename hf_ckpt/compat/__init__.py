"""Everything that depends on a version, a build or a private name of another package, with a module for each package.

Features are detected (`hasattr`, `inspect.signature`) rather than inferred from versions, and only in this folder.
Use it as `from hf_ckpt import compat; compat.torch.is_compiling()`.
"""

from __future__ import annotations

from hf_ckpt.compat import compiler as compiler
from hf_ckpt.compat import devices as devices
from hf_ckpt.compat import distributed as distributed
from hf_ckpt.compat import fakes as fakes
from hf_ckpt.compat import frames as frames
from hf_ckpt.compat import peft as peft
from hf_ckpt.compat import random_state as random_state
from hf_ckpt.compat import switches as switches
from hf_ckpt.compat import torch as torch
from hf_ckpt.compat import transformers as transformers
