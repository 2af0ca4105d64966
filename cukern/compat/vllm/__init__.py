"""A replacement for `vllm._custom_ops` of vLLM 0.33.0.

`from cukern.compat import vllm as ops` replaces `from vllm import _custom_ops as ops`.
"""

from cukern.runtime.packages import missing

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing(error, __name__, "torch") from None

from cukern.compat.vllm import _custom_ops, moe_permute_unpermute
from cukern.compat.vllm._custom_ops import *  # noqa: F403
from cukern.compat.vllm._custom_ops import __all__ as _names

__all__ = [*_names, "moe_permute_unpermute"]
__getattr__ = _custom_ops.__getattr__
