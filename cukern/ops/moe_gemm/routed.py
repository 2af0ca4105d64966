"""An MoE layer for a single token: two GEMM kernels that read the router's expert ids, so the tokens are not sorted.

A slot is one of the topk experts of the token. The second kernel also adds up the results of the slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.ops.moe_gemm import kernels
from cukern.ops.moe_gemm.prepare import MAX_EXPERTS
from cukern.runtime import activation as activations
from cukern.runtime import arrays, check
from cukern.runtime.activation import is_gated
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import Array, expect, expect_array, expect_contiguous, expect_place
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import launch, note

_routed = Kernel("moe_gemm/stream_routed", "gemm_stream_routed")
_summed = Kernel("moe_gemm/stream_summed", "gemm_stream_summed")

DTYPES = ("bfloat16", "float16")
#: Up to this many tokens a layer uses these kernels. They read all weights of an expert again for each (token, slot)
#: row, so with more tokens the weights of an expert would be read several times.
MOST_TOKENS = 1
#: The largest number of (token, slot) rows, because a warp has one lane for each row.
MOST_ROWS = 32
_UNIT = 8  # elements in 16 bytes
_MOST_LOADS = 8
_MOST_SLOTS = 4


class RoutedTile(NamedTuple):
    """The sizes among the template arguments of both kernels, except the slots."""

    pairs: int  # pairs of weight rows that a warp processes at a time
    loads: int  # 16-byte loads of each row that a lane has in flight
    warps: int
    blocks: int  # resident blocks per multiprocessor


def tile_for(k: int) -> RoutedTile:
    """Return the tile for rows of k elements. A row is loaded in one or more chunks of equal size."""
    lines = -(-k // (32 * _UNIT))
    loads = -(-lines // -(-lines // _MOST_LOADS))
    pairs = 1 if loads > 4 else 2 if loads > 2 else 4
    # With four pairs a thread needs more registers, so three blocks are resident, not four.
    return RoutedTile(pairs, loads, 4, 3 if pairs == 4 else 4)


def _words(tile: RoutedTile, k: int) -> str:
    """Return a text that describes the tile for rows of k elements."""
    return f"rows of {k} in parts of {32 * _UNIT * tile.loads}, {tile.pairs} pair{'s' * (tile.pairs > 1)} at once"


def slots_for(topk: int, experts: int, all_experts: int) -> int:
    """Return how many warps share one output element: about one per slot whose expert is likely to be on this rank."""
    expected = max(topk * experts // all_experts, 1)
    return min(1 << (expected.bit_length() - 1), _MOST_SLOTS)


def routed_variant(dtype: str, epilogue: int, tile: RoutedTile) -> Variant:
    return _routed.variant(arrays.CUDA_TYPE[dtype], epilogue, *tile)


def summed_variant(dtype: str, epilogue: int, tile: RoutedTile, slots: int) -> Variant:
    sizes = tile.pairs, tile.loads, tile.warps, slots, tile.blocks
    return _summed.variant(arrays.CUDA_TYPE[dtype], epilogue, *sizes)


# The sizes of Qwen3-30B-A3B and of Mixtral are compiled ahead of time, all others at their first use.
_routed.specialized = [routed_variant("bfloat16", activations.number("silu"), tile_for(2048)).instance]
_summed.specialized = [
    summed_variant("bfloat16", 0, tile_for(k), slots).instance for k, slots in ((768, 4), (14336, 2), (2048, 4))
]
_routed.at_import, _summed.at_import = _routed.specialized, _summed.specialized[:2]


def fits(tokens: Any, topk: int, w1: Any, w2: Any, all_experts: int) -> bool:
    """Return whether `routed_experts` can compute a layer of these sizes, with 16-bit weights."""
    # The kernels use 32-bit indices for pairs of weight rows, and for the 16-byte units of an expert's weights.
    small = all(x.shape[1] * MOST_ROWS < 2**31 and x.shape[1] * (x.shape[2] // _UNIT) < 2**32 for x in (w1, w2))
    units = w1.shape[2] % _UNIT == 0 == w2.shape[2] % _UNIT
    # A layer with a single expert uses `moe_gemm`, which divides the weights among more blocks.
    several = 1 < w1.shape[0] <= MAX_EXPERTS and all_experts <= MAX_EXPERTS
    return bool(small and units and several and 0 < topk * MOST_TOKENS <= MOST_ROWS and tokens <= MOST_TOKENS)


def _fields(
    a: Array, b: Array, out: Array, rows: Any, bias: Array | None, bounds: tuple[float, float], routing: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of the struct RoutedParams, by name."""
    experts, n, k = b.shape
    return {
        **dict.fromkeys(("a_scale", "b_scale", "offsets", "row_token", "b_global_scale")),
        **dict.fromkeys(("offset_words", "max_tokens", "a_scale_step", "b_scale_step", "together"), 0),
        **{"a": a, "b": b, "out": out, "rows": rows, "tokens": a.shape[0], "experts": experts, "n": n, "k": k},
        **{"bias": bias, "bias_is_float": int(bias is not None and bias.dtype == "float32")},
        **{"alpha": bounds[0], "limit": bounds[1]},
        **routing,
    }


def _check(
    output: Array, hidden_states: Array, w1: Array, w2: Array, topk_weights: Any, topk_ids: Array, activated: Array,
    expert_map: Any, biases: dict[str, Any], activation: str, all_experts: int,
) -> None:  # fmt: skip
    """Check the arrays of `routed_experts`."""
    tokens, hidden = expect_array("hidden_states", hidden_states, DTYPES, ("tokens", "hidden")).shape
    x, like = hidden_states, "hidden_states"
    if x.on_host:
        check.fail("hidden_states", "on a GPU", "an array in host memory")
    check.dimensions("w1", w1.shape, ("experts", "n", "k"))
    experts, columns = w1.shape[:2]
    inter = columns // 2 if is_gated(activation) else columns
    expect("w1", w1, x, like, (x.dtype,), (experts, columns, hidden), "[experts, n, hidden]")
    expect("w2", w2, x, like, (x.dtype,), (experts, hidden, inter), "[experts, hidden, inter]")
    expect_place("topk_ids", topk_ids, x, like)
    check.dimensions("topk_ids", topk_ids.shape, ("tokens", "topk"))
    shape = tokens, topk_ids.shape[1]
    expect("topk_ids", topk_ids, x, like, ("int32", "int64", "uint32"), shape, "[tokens, topk]")
    if topk_weights is not None:
        expect("topk_weights", topk_weights, x, like, ("float32",), shape, "[tokens, topk]")
    if expert_map is not None:
        expect("expert_map", expert_map, x, like, ("int32",), (all_experts,), "[all experts]")
    for name, bias in biases.items():
        if bias is not None:
            n = columns if name == "w1_bias" else hidden
            expect(name, bias, x, like, ("float32", x.dtype), (experts, n), "[experts, n]")
    expect("output", output, x, like, (x.dtype,), (tokens, hidden), "[tokens, hidden]")
    expect("activated", activated, x, like, (x.dtype,), (tokens * shape[1], inter), "[tokens * topk, inter]")
    if not fits(tokens, shape[1], w1, w2, all_experts):
        wanted = f"a layer of at most {MOST_TOKENS} tokens, and of rows that are multiples of {_UNIT}"
        check.fail("hidden_states", wanted, f"{list(x.shape)}, topk {shape[1]} and w1 {list(w1.shape)}")
    arrays_of_units = {like: x, "w1": w1, "w2": w2, "output": output, "activated": activated}
    for name, array in arrays_of_units.items():
        expect_contiguous(name, array)
        if array.alignment < 16:
            check.fail(name, "at a multiple of 16 bytes", f"an address that is a multiple of {array.alignment}")


@op(None)
def routed_experts(
    output: AnyArray,
    hidden_states: AnyArray,
    w1: AnyArray,
    w2: AnyArray,
    topk_weights: AnyArray | None,
    topk_ids: AnyArray,
    activated: AnyArray,
    all_experts: int,
    activation: str = "silu",
    *,
    expert_map: AnyArray | None = None,
    w1_bias: AnyArray | None = None,
    w2_bias: AnyArray | None = None,
    alpha: float = activations.ALPHA,
    limit: float = activations.LIMIT,
    interleaved: bool = False,
) -> AnyArray:
    """Compute the experts of one token, with 16-bit weights, in two launches on a GPU.

    `fused_experts` calls this function, and the NumPy reference of `fused_experts` defines the result. The result is
    bit-identical to `moe_sort`, two calls of `moe_gemm` with variant "stream", and `moe_unpermute`.

    Args:
        output: [tokens, hidden], written.
        hidden_states: [tokens, hidden], bfloat16 or float16.
        w1, w2, topk_ids, activation, expert_map, w1_bias, w2_bias, alpha, limit, interleaved: as in `fused_experts`.
            The weights are contiguous. hidden and inter are multiples of 8.
        topk_weights: float32 [tokens, topk]. None: all weights are 1.
        activated: [tokens * topk, inter], receives the result of the first product. Rows whose expert is not on this
            rank are not written.
        all_experts: the number of experts on all ranks, to which the ids refer.

    Returns:
        output.

    Raises:
        TypeError, ValueError: arrays that do not fit. The message names the argument.
    """
    biases = {"w1_bias": w1_bias, "w2_bias": w2_bias}
    _check(
        output, hidden_states, w1, w2, topk_weights, topk_ids, activated, expert_map, biases, activation, all_experts
    )  # fmt: skip
    tokens, topk = topk_ids.shape
    (experts, n, hidden), inter, dtype = w1.shape, w2.shape[2], hidden_states.dtype
    rows, gated, bounds = tokens * topk, is_gated(activation), activations.check_bounds(alpha, limit)
    routing = {
        "topk_ids": topk_ids, "expert_map": expert_map, "topk_weights": topk_weights, "topk": topk,
        "id_words": 2 if topk_ids.dtype == "int64" else 1, "global_experts": all_experts,
    }  # fmt: skip
    note(flops=2 * rows * (n + inter) * hidden)

    is_bounded = activation == "swigluoai" and bounds != (activations.ALPHA, activations.LIMIT)
    flags = {"interleaved": interleaved, "biased": w1_bias is not None, "bounded": is_bounded}
    first = kernels.epilogue(activations.function_number(activation), is_gated=gated, **flags)
    tile = tile_for(hidden)
    blocks = -(-rows * -(-n // (2 * tile.pairs)) // tile.warps)
    resident = hidden_states.gpu.multiprocessors * tile.blocks
    few = f"{tokens} token, of 16 bits: both products find their experts by topk_ids, without a sort"
    few += f" (up to {MOST_TOKENS} token)"
    launch(
        routed_variant(dtype, first, tile),
        min(blocks, resident),
        32 * tile.warps,
        why=f"{few}; {_words(tile, hidden)}",
        **_fields(hidden_states, w1, activated, rows, w1_bias, bounds, routing),
    )
    tile, slots = tile_for(inter), slots_for(topk, experts, all_experts)
    launch(
        summed_variant(dtype, kernels.epilogue(0, is_gated=False, biased=w2_bias is not None), tile, slots),
        (-(-hidden // (2 * tile.pairs * (tile.warps // slots))), tokens),
        32 * tile.warps,
        why=f"{few}; {slots} warps share an output, for {topk} slots with {experts} of {all_experts} experts here; "
        + _words(tile, inter),
        **_fields(activated, w2, output, rows, w2_bias, bounds, routing),
    )
    return output
