"""Everything that depends on a version, a build or a private name of another package, with a module for each package.

Features are detected (`hasattr`, `inspect.signature`) rather than inferred from versions, and only in this folder.
Use it as `from hf_ckpt import compat; compat.torch.is_compiling()`.
"""

from hf_ckpt.compat import (
    autograd,
    checkpoint,
    compiler,
    devices,
    distributed,
    fakes,
    frames,
    hooks,
    modes,
    optimizers,
    peft,
    process_state,
    torch,
    transformers,
)
