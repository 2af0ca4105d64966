"""An MoE layer for a single token, without a sort of the tokens: two GEMM kernels that read the router's expert ids.

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
from cukern.runtime.describe import Array, expect, expect_aligned, expect_array, expect_contiguous, expect_place
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import launch, note

_routed = Kernel("moe_gemm/stream_routed", "gemm_stream_routed")
_summed = Kernel("moe_gemm/stream_summed", "gemm_stream_summed")

DTYPES = ("bfloat16", "float16")
#: With more tokens the weights would be read several times, because each (token, slot) row reads its expert's weights.
MOST_TOKENS = 1
#: A warp has one lane for each (token, slot) row.
MAX_ROWS = 32
_VECTOR = 8  # elements in 16 bytes
_MAX_LOADS = 8
_MAX_SLOTS = 4


class RoutedTile(NamedTuple):
    """Template arguments of both kernels."""

    pairs: int  # of weight rows that a warp processes at a time
    loads: int  # of 16 bytes of each row, in flight per lane
    warps: int
    blocks: int  # resident, per multiprocessor


def tile_for(k: int) -> RoutedTile:
    """Return the tile for rows of k elements."""
    lines = -(-k // (32 * _VECTOR))
    loads = -(-lines // -(-lines // _MAX_LOADS))
    pairs = 1 if loads > 4 else 2 if loads > 2 else 4
    # Four pairs need more registers.
    return RoutedTile(pairs, loads, 4, 3 if pairs == 4 else 4)


def _describe(tile: RoutedTile, k: int) -> str:
    return f"rows of {k} in parts of {32 * _VECTOR * tile.loads}, {tile.pairs} pair{'s' * (tile.pairs > 1)} at once"


def slots_for(topk: int, experts: int, all_experts: int) -> int:
    """Return how many warps compute an output element together: about one per slot whose expert is on this rank."""
    expected = max(topk * experts // all_experts, 1)
    return min(1 << (expected.bit_length() - 1), _MAX_SLOTS)


def routed_variant(dtype: str, epilogue: int, tile: RoutedTile) -> Variant:
    return _routed.variant(arrays.CUDA_TYPE[dtype], epilogue, *tile)


def summed_variant(dtype: str, epilogue: int, tile: RoutedTile, slots: int) -> Variant:
    sizes = tile.pairs, tile.loads, tile.warps, slots, tile.blocks
    return _summed.variant(arrays.CUDA_TYPE[dtype], epilogue, *sizes)


# These instances are for the sizes of Qwen3-30B-A3B and of Mixtral.
_routed.specialized = [routed_variant("bfloat16", activations.number("silu"), tile_for(2048)).instance]
_summed.specialized = [
    summed_variant("bfloat16", 0, tile_for(k), slots).instance for k, slots in ((768, 4), (14336, 2), (2048, 4))
]
_routed.at_import, _summed.at_import = _routed.specialized, _summed.specialized[:2]


def fits(tokens: Any, topk: int, w1: Any, w2: Any, all_experts: int) -> bool:
    """Return whether `routed_experts` can compute a layer."""
    # The kernels index pairs of rows and the 16-byte vectors of an expert's weights with 32 bits.
    small = all(x.shape[1] * MAX_ROWS < 2**31 and x.shape[1] * (x.shape[2] // _VECTOR) < 2**32 for x in (w1, w2))
    units = w1.shape[2] % _VECTOR == 0 == w2.shape[2] % _VECTOR
    # A single expert is left to `moe_gemm`, which divides the weights among more blocks.
    several = 1 < w1.shape[0] <= MAX_EXPERTS and all_experts <= MAX_EXPERTS
    return bool(small and units and several and 0 < topk * MOST_TOKENS <= MAX_ROWS and tokens <= MOST_TOKENS)


def _fields(
    a: Array, b: Array, out: Array, rows: Any, bias: Array | None, bounds: tuple[float, float], routing: dict[str, Any]
) -> dict[str, Any]:
    experts, n, k = b.shape
    return {
        **dict.fromkeys(("a_scale", "b_scale", "offsets", "row_token", "b_global_scale")),
        **dict.fromkeys(("offset_stride", "max_tokens", "a_scale_stride", "b_scale_stride", "band_tiles"), 0),
        **{"a": a, "b": b, "out": out, "rows": rows, "tokens": a.shape[0], "experts": experts, "n": n, "k": k},
        **{"bias": bias, "bias_is_float": int(bias is not None and bias.dtype == "float32")},
        **{"alpha": bounds[0], "limit": bounds[1]},
        **routing,
    }


def _check(
    output: Array, hidden_states: Array, w1: Array, w2: Array, topk_weights: Any, topk_ids: Array, activated: Array,
    expert_map: Any, biases: dict[str, Any], activation: str, all_experts: int,
) -> None:  # fmt: skip
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
        wanted = f"a layer of at most {MOST_TOKENS} tokens, and of rows that are multiples of {_VECTOR}"
        check.fail("hidden_states", wanted, f"{list(x.shape)}, topk {shape[1]} and w1 {list(w1.shape)}")
    arrays_of_units = {like: x, "w1": w1, "w2": w2, "output": output, "activated": activated}
    for name, array in arrays_of_units.items():
        expect_contiguous(name, array)
        expect_aligned(name, array)


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

    The result has the same bits as from `moe_sort`, then two calls of `moe_gemm` with variant "stream", then
    `moe_unpermute`.

    Args:
        output: [tokens, hidden], written.
        hidden_states: [tokens, hidden], bfloat16 or float16.
        w1, w2, topk_ids, activation, expert_map, w1_bias, w2_bias, alpha, limit, interleaved: as in `fused_experts`.
            The weights are contiguous. hidden and inter are multiples of 8.
        topk_weights: float32 [tokens, topk]. None: all weights are 1.
        activated: [tokens * topk, inter], receives the result of the first product. Rows whose expert is not on this
            rank are not written.
        all_experts: the number of experts on all ranks. `topk_ids` are below this number.

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
        "id_stride": 2 if topk_ids.dtype == "int64" else 1, "global_experts": all_experts,
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
        why=f"{few}; {_describe(tile, hidden)}",
        **_fields(hidden_states, w1, activated, rows, w1_bias, bounds, routing),
    )
    tile, slots = tile_for(inter), slots_for(topk, experts, all_experts)
    launch(
        summed_variant(dtype, kernels.epilogue(0, is_gated=False, biased=w2_bias is not None), tile, slots),
        (-(-hidden // (2 * tile.pairs * (tile.warps // slots))), tokens),
        32 * tile.warps,
        why=f"{few}; {slots} warps share an output, for {topk} slots with {experts} of {all_experts} experts here; "
        + _describe(tile, inter),
        **_fields(activated, w2, output, rows, w2_bias, bounds, routing),
    )
    return output
