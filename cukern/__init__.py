"""CUDA kernels for LLM inference on NumPy, CuPy and PyTorch arrays, compiled at run time."""

from __future__ import annotations

from cukern.ops.moe_gate import biased_grouped_topk, grouped_topk, moe_fused_gate, topk_sigmoid, topk_softmax
from cukern.runtime import kernel as _kernel
from cukern.runtime.compile import CompileError
from cukern.runtime.kernel import specialize

__version__ = "0.1.0"

__all__ = [
    "CompileError",
    "biased_grouped_topk",
    "grouped_topk",
    "moe_fused_gate",
    "specialize",
    "topk_sigmoid",
    "topk_softmax",
]

_kernel.compile_at_import()
