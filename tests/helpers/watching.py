"""The check of the watch in models that something else than hf_ckpt checkpoints."""

from hf_ckpt.attach.for_a_while import put_check
from hf_ckpt.attach.switches import FUNCTION
from hf_ckpt.models.blocks import find_blocks
from hf_ckpt.training.watch import Watch


class WatchOfOthers(Watch):
    """Checks one block after the other, whatever checkpoints them; `check_next` comes before each forward."""

    def __init__(self, on_mismatch="warn"):
        super().__init__(1, on_mismatch)

    def check_next(self, model):
        """Check the next block in the forward that is about to begin."""
        blocks = [pair for pair in find_blocks(model).modules.items() if getattr(pair[1], FUNCTION, None)]
        name, module = blocks[self._turn % len(blocks)]
        self._turn += 1
        put_check(module, name, room_bytes=1 << 30, whole=True, done=self._has_ended)
