"""The output of a fused mixture-of-experts layer, after a check of all its arguments."""

from __future__ import annotations

from typing import Any

from cukern.formats.fused_moe import SCALES
from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import FOLDED_BYTES, FOLDED_K, UNIT_BYTES, UNIT_K, UNIT_ROWS, is_prepared, rows_of_weights
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.activation import is_gated
from cukern.runtime.arrays import View
from cukern.runtime.decisions import Decisions
from cukern.runtime.launch import returned
from cukern.runtime.view import contiguous, expect_weights, read, read_beside, read_like

DTYPES = ("bfloat16", "float16")
ID_DTYPES = ("int32", "int64", "uint32")


#: Calls of layers that have been checked; the number of tokens is free.
_DECISIONS = Decisions((0,), (), (), (0,), (0,), (), (0,), *[()] * len(SCALES))


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
    form: tuple[Any, Any, Any] = (activations.ALPHA, activations.LIMIT, False),
    **scales: Any,
) -> Any:
    """The layer's output, to be written, after a check of all arguments; `form`: alpha, limit and interleaved.

    Raises TypeError or ValueError, as the layer does, for arguments that do not fit each other.
    """
    of_scales = [scales.get(name) for name in SCALES]
    arrays = hidden_states, w1, w2, topk_weights, topk_ids, expert_map, out, *of_scales
    facts = activation, quantization, apply_router_weight_on_input, *form
    decision = _DECISIONS.find(facts, arrays)
    if decision is not None:
        tokens = hidden_states.shape[0]
        if topk_weights.shape[0] == tokens == topk_ids.shape[0] and (out is None or out.shape[0] == tokens):
            return out if out is not None else decision.library.allocate((tokens, *decision.own[0]), *decision.own[1:])
    x, *_, into = check_layer(arrays, *facts)
    own = x.shape[1:], x.dtype, x.device
    if x.device is not None and x.foreign is None and x.library.recorder is None:
        _DECISIONS.keep(facts, arrays, x.library, x.device, own)
    return out if into is not None else returned(x.library.allocate(x.shape, x.dtype, x.device), None, x)


def check_layer(
    arrays: tuple[Any, ...],
    activation: str,
    quantization: str | None,
    apply_router_weight_on_input: bool,
    alpha: Any,
    limit: Any,
    interleaved: Any,
) -> list[Any]:
    """Check the arguments of a layer; the views of `arrays`: as in `layer_output`, but `out` is the last one.

    Raises TypeError or ValueError for arguments that do not fit each other.
    """
    hidden_states, w1, w2, topk_weights, topk_ids, expert_map, out, *of_scales = arrays
    scales = {name: scale for name, scale in zip(SCALES, of_scales, strict=True) if scale is not None}
    dtypes_of_x = DTYPES if quantization else (*DTYPES, "float32")
    x = read("hidden_states", hidden_states, dtypes_of_x, ("tokens", "hidden"))
    activations.function_number(activation)
    gated = is_gated(activation)
    activations.check_bounds(alpha, limit)
    if check.one_of("interleaved", interleaved, (False, True)) and not gated:
        check.fail("interleaved", "False without a gate", f"True with activation {activation!r}")
    like = "hidden_states"
    tokens, hidden = x.shape
    packed = quantization in ("mxfp4", "nvfp4", "mxfp4_fp8")
    prepared = packed and "w1_scale" not in scales
    w1, w2 = read_beside("w1", w1, x, like), read_beside("w2", w2, x, like)
    for name, array in (("w1", w1), ("w2", w2)):
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
            what = "a hidden size" if name == like else "an inter"
            check.fail(name, f"of {what} that is a multiple of {group} ({quantization})", size)
    if prepared:
        _check_prepared(w1, w2, x, quantization, hidden, columns, inter)
    else:
        in_byte = 2 if packed else 1
        for name, array, wanted, of in (
            ("w1", w1, (experts, columns, hidden // in_byte), symbols),
            ("w2", w2, (experts, hidden, inter // in_byte), "[experts, hidden, inter]"),
        ):
            check.dtype(name, array.dtype, dtypes)
            if array.shape != wanted:
                check.shape(name, array.shape, wanted, of)
            expect_weights(name, array)
    topk_ids = read_beside("topk_ids", topk_ids, x, like)
    check.dimensions("topk_ids", topk_ids.shape, ("tokens", "topk"))
    shape = (tokens, topk_ids.shape[1])
    read_like("topk_ids", topk_ids, x, like, ID_DTYPES, shape, "[tokens, topk]")
    topk_weights = read_like("topk_weights", topk_weights, x, like, ("float32",), shape, "[tokens, topk]")
    if expert_map is not None:
        expert_map = read_beside("expert_map", expert_map, x, like)
        check.dimensions("expert_map", expert_map.shape, ("global_num_experts",))
        everywhere = (expert_map.shape[0],)
        read_like("expert_map", expert_map, x, like, ("int32",), everywhere, "[global_num_experts]")
        if everywhere[0] < experts:
            check.fail("expert_map", f"of at least the {experts} experts of w1", everywhere[0])
    if apply_router_weight_on_input and shape[1] != 1:
        check.fail("topk_ids", "of one expert per token with apply_router_weight_on_input", f"{shape[1]} per token")
    if out is not None:
        out = read_like("out", out, x, like, (x.dtype,), (tokens, hidden), "[tokens, hidden]")
    contiguous(like, x)
    for name, scale in scales.items():
        scales[name] = _check_scale(name, scale, x, quantization, (experts, columns), inter)
    return [x, w1, w2, topk_weights, topk_ids, expert_map, *map(scales.get, SCALES), out]


def _check_prepared(
    w1: View, w2: View, like: View, quantization: str | None, hidden: int, columns: int, inter: int
) -> None:
    """Check the shapes of prepared weights."""
    size, unit = UNIT_BYTES[MXFP4_GROUP if quantization == "mxfp4" else NVFP4_GROUP], UNIT_K
    if quantization == "mxfp4_fp8":
        size, unit = FOLDED_BYTES, FOLDED_K
    for name, array, n, k in (("w1", w1, columns, hidden), ("w2", w2, hidden, inter)):
        shape = w1.shape[0], n // UNIT_ROWS, -(-k // unit), size
        read_like(name, array, like, "hidden_states", ("uint8",), shape, f"[experts, n / 8, ceil(k / {unit}), bytes]")


def _check_scale(name: str, scale: Any, like: View, quantization: str | None, w1: tuple[int, int], inter: int) -> View:
    """Check a scale or a bias by its name; `w1` is the number of experts, and of the rows of w1."""
    scale = read_beside(name, scale, like, "hidden_states")
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
    contiguous(name, scale)
    return scale
