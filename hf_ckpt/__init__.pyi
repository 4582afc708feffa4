"""The public names, for `__init__.py` and for type checkers, to which `as` says that a name is public."""

from hf_ckpt.attach.described import describe as describe
from hf_ckpt.attach.for_a_while import paused as paused
from hf_ckpt.errors import HfCkptError as HfCkptError, InfeasibleError as InfeasibleError
from hf_ckpt.errors import MismatchError as MismatchError, OutOfPlansError as OutOfPlansError
from hf_ckpt.errors import PlanLostError as PlanLostError, SpecError as SpecError
from hf_ckpt.forecast.result import Forecast as Forecast
from hf_ckpt.forecast.forecast import predict as predict
from hf_ckpt.models.blocks import find_blocks as find_blocks
from hf_ckpt.models.families import Family as Family, register_family as register_family
from hf_ckpt.spec.description import Description as Description
from hf_ckpt.spec.plan import Plan as Plan
from hf_ckpt.spec.spec import Spec as Spec
from hf_ckpt.training.callback import MemoryTimeCallback as MemoryTimeCallback
from hf_ckpt.training.guard import OomGuard as OomGuard, OomGuardMixin as OomGuardMixin
from hf_ckpt.training.install import install as install, uninstall as uninstall
from hf_ckpt.training.verify import verify as verify

__all__: list[str]
__version__: str
