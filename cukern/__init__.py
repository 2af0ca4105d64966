"""CUDA kernels for LLM inference on NumPy, CuPy and PyTorch arrays, compiled at run time."""

from __future__ import annotations

from cukern.runtime import interrupt as _interrupt  # noqa: F401  (first: the rest may compile for a minute)

# isort: split

from importlib import import_module as _import_module
from typing import Any as _Any

from cukern.explain import explain as explain
from cukern.fused_moe import fused_experts as fused_experts
from cukern.ops.all_to_all import *
from cukern.ops.beam_search import *
from cukern.ops.decoder_attention import *
from cukern.ops.decoding import *
from cukern.ops.embedding import *
from cukern.ops.kv_cache import *
from cukern.ops.mla_decode import *
from cukern.ops.moe_activation import *
from cukern.ops.moe_gate import *
from cukern.ops.moe_gemm import *
from cukern.ops.moe_permute import *
from cukern.ops.norm import *
from cukern.ops.padding import *
from cukern.ops.paged_attention import *
from cukern.ops.quantization import *
from cukern.ops.rotary_embedding import *
from cukern.ops.sampling import *
from cukern.ops.softcap import *
from cukern.ops.varlen_attention import *
from cukern.runtime import kernel as _kernel
from cukern.runtime.compile import CompileError as CompileError
from cukern.runtime.kernel import specialize as specialize
from cukern.runtime.performance import PerformanceWarning as PerformanceWarning

__version__ = "0.2.0"
# Excludes modules and private names.
__all__ = sorted(name for name, value in globals().items() if getattr(value, "__module__", "").startswith("cukern."))


def __getattr__(name: str) -> _Any:
    """Import `cukern.models`, and `load` of the integration of transformers, at their first use."""
    if name == "models":
        return _import_module("cukern.models")
    if name == "load":
        return _import_module("cukern.integrations.transformers").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_kernel.compile_at_import()
