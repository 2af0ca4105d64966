"""Check the arguments of a fused mixture-of-experts layer, and describe its output."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import FOLDED_BYTES, FOLDED_K, UNIT_BYTES, UNIT_K, UNIT_ROWS, is_prepared, rows_of_weights
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.activation import is_gated
from cukern.runtime.describe import Array, Result, expect, expect_array, expect_contiguous, expect_place, expect_weights
from cukern.runtime.op import op
from cukern.runtime.plan import outputs, run_twin

DTYPES = ("bfloat16", "float16")
ID_DTYPES = ("int32", "int64", "uint32")


def _output_on_host(hidden_states: Any, out: Any = None, **_: Any) -> Any:
    return np.empty_like(hidden_states) if out is None else out


@op(_output_on_host)
def layer_output(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: str,
    quantization: str | None,
    apply_router_weight_on_input: bool,
    *,
    expert_map: Any = None,
    out: Any = None,
    activation_options: tuple[Any, Any, Any] = (activations.ALPHA, activations.LIMIT, False),
    **scales: Any,
) -> Any:
    """Check all arguments of the layer, and allocate its output. `activation_options`: (alpha, limit, interleaved)."""
    dtypes_of_x = DTYPES if quantization else (*DTYPES, "float32")
    x = expect_array("hidden_states", hidden_states, dtypes_of_x, ("tokens", "hidden"))
    activations.function_number(activation)
    gated = is_gated(activation)
    activations.check_bounds(*activation_options[:2])
    if check.one_of("interleaved", activation_options[2], (False, True)) and not gated:
        check.fail("interleaved", "False without a gate", f"True with activation {activation!r}")
    like = "hidden_states"
    tokens, hidden = x.shape
    packed = quantization in ("mxfp4", "nvfp4", "mxfp4_fp8")
    prepared = packed and "w1_scale" not in scales
    for name, array in (("w1", w1), ("w2", w2)):
        expect_place(name, array, x, like)
        if prepared and not is_prepared(array):
            check.fail(f"{name}_scale", f"the scales of {name}, which is not prepared", None)
        if not prepared:
            check.dimensions(name, array.shape, ("experts", "n", "k"))
    experts, columns = w1.shape[0], rows_of_weights(w1)
    inter = columns // 2 if gated else columns
    symbols = "[experts, 2 * inter, hidden]" if gated else "[experts, inter, hidden]"
    if not experts or (gated and columns % 2) or not columns:
        check.fail("w1", f"of shape {symbols}, none of them 0", list(w1.shape))
    if quantization is None:
        dtypes: tuple[str, ...] = (x.dtype,)
    else:
        dtypes = ("float8_e4m3fn", "uint8") if quantization.startswith("fp8") else ("uint8",)
    groups = {"mxfp4": 32, "nvfp4": 32 if prepared else 16, "fp8_block": 128, "mxfp4_fp8": 128}
    group = groups.get(quantization or "", 1)
    for name, size in ((like, hidden), ("w1", inter)):
        if size % group:
            size_name = "a hidden size" if name == like else "an inter"
            check.fail(name, f"of {size_name} that is a multiple of {group} ({quantization})", size)
    if prepared:
        _check_prepared(w1, w2, x, quantization, hidden, columns, inter)
    else:
        elements_per_byte = 2 if packed else 1
        for name, array, wanted, shape_symbols in (
            ("w1", w1, (experts, columns, hidden // elements_per_byte), symbols),
            ("w2", w2, (experts, hidden, inter // elements_per_byte), "[experts, hidden, inter]"),
        ):
            check.dtype(name, array.dtype, dtypes)
            check.shape(name, array.shape, wanted, shape_symbols)
            expect_weights(name, array)
    expect_place("topk_ids", topk_ids, x, like)
    check.dimensions("topk_ids", topk_ids.shape, ("tokens", "topk"))
    shape = (tokens, topk_ids.shape[1])
    expect("topk_ids", topk_ids, x, like, ID_DTYPES, shape, "[tokens, topk]")
    expect("topk_weights", topk_weights, x, like, ("float32",), shape, "[tokens, topk]")
    if expert_map is not None:
        expect_place("expert_map", expert_map, x, like)
        check.dimensions("expert_map", expert_map.shape, ("global_num_experts",))
        map_shape = (expert_map.shape[0],)
        expect("expert_map", expert_map, x, like, ("int32",), map_shape, "[global_num_experts]")
        if map_shape[0] < experts:
            check.fail("expert_map", f"of at least the {experts} experts of w1", map_shape[0])
    if apply_router_weight_on_input and shape[1] != 1:
        check.fail("topk_ids", "of one expert per token with apply_router_weight_on_input", f"{shape[1]} per token")
    output = outputs(out, x, like, Result((tokens, hidden), x.dtype, "[tokens, hidden]"))
    expect_contiguous(like, x)
    for name, scale in scales.items():
        _check_scale(name, scale, x, quantization, (experts, columns), inter)
    return run_twin() if x.on_host else output


def _check_prepared(
    w1: Any, w2: Any, like: Array, quantization: str | None, hidden: int, columns: int, inter: int
) -> None:
    size, k_per_tile = UNIT_BYTES[MXFP4_GROUP if quantization == "mxfp4" else NVFP4_GROUP], UNIT_K
    if quantization == "mxfp4_fp8":
        size, k_per_tile = FOLDED_BYTES, FOLDED_K
    for name, array, n, k in (("w1", w1, columns, hidden), ("w2", w2, hidden, inter)):
        shape = w1.shape[0], n // UNIT_ROWS, -(-k // k_per_tile), size
        expect(
            name, array, like, "hidden_states", ("uint8",), shape, f"[experts, n / 8, ceil(k / {k_per_tile}), bytes]"
        )


def _check_scale(name: str, scale: Any, like: Array, quantization: str | None, w1: tuple[int, int], inter: int) -> None:
    """Check the scale or bias `name`. `w1` is the pair (experts, rows of w1 per expert)."""
    expect_place(name, scale, like, "hidden_states")
    experts, columns = w1
    hidden = like.shape[1]
    n, k = (columns, hidden) if name[1] == "1" else (hidden, inter)
    kind: tuple[str, ...] = ("float32",)
    if name.endswith("bias"):
        options: tuple[tuple[int, ...], ...] = ((experts, n),)
        kind = "float32", like.dtype
    elif name in ("a1_scale", "a2_scale"):
        options = ((1,), (1, 1), ())
    elif name.endswith("global_scale"):
        options = ((experts,),)
    elif quantization in ("mxfp4", "nvfp4"):
        options = ((experts, n, k // (32 if quantization == "mxfp4" else 16)),)
        kind = ("uint8", "float8_e8m0fnu", "float8_e4m3fn")
    elif quantization == "fp8_block":
        options = ((experts, -(-n // 128), -(-k // 128)),)
    else:
        options = ((experts,), (experts, n))
    check.dtype(name, scale.dtype, kind)
    if scale.shape not in options:
        check.fail(name, "of shape " + " or ".join(str(list(o)) for o in options), list(scale.shape))
    expect_contiguous(name, scale)
