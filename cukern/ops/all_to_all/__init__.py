"""All-to-all by stores into the memory of other GPUs: send tokens to the ranks of their experts, and results back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cukern.ops.all_to_all.layout import FEW_VECTORS, GROUP, MANY_TOKENS, MANY_VECTORS, RECEIVE, SEND
from cukern.ops.all_to_all.memory import AllToAllError, AllToAllState, Dispatched, Link
from cukern.reference import all_to_all as twin
from cukern.runtime import arrays, check, template
from cukern.runtime.arrays import CUDA_TYPE, AnyArray
from cukern.runtime.describe import Array, Result, expect, expect_array, expect_contiguous, expect_place
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div

__all__ = ["AllToAllError", "AllToAllState", "all_to_all_combine", "all_to_all_dispatch"]

DTYPES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "uint8")
ID_DTYPES = ("int32", "int64")
_ID_TYPE = {"int32": "unsigned", "int64": "unsigned long long"}
_BOTH = SEND | RECEIVE
_DISPATCH, _COMBINE = (template.constants(f"all_to_all/{name}") for name in ("dispatch", "combine"))
_THREADS = _DISPATCH["THREADS"]
#: The fraction of a combine's blocks that send, for few and for many tokens. More blocks receive than send, because
#: receiving blocks also compute this rank's partial sums.
_SENDERS = {"SUMMED": (0.34, 0.34), "BY_SLOT": (0.34, 0.42), "APART": (0.42, 0.42)}
_MODES = {
    "SUMMED": "rows that are added up already",
    "BY_SLOT": "rows of slots, which each rank adds up before it sends",
    "APART": "rows of slots, sent one by one",
}
_PHASE_WORDS = {_BOTH: "send and receive in one launch", SEND: "send alone", RECEIVE: "receive alone"}

_dispatch_kernel = Kernel("all_to_all/dispatch", "dispatch_tokens", 0.6)
_combine_kernel = Kernel("all_to_all/combine", "combine_tokens", 1.0)


def _dispatch_variant(dtype: str, id_dtype: str, quantize: bool, phases: int) -> Variant:
    # Rows that are not quantized are copied as bytes.
    own = CUDA_TYPE[dtype] if quantize else "unsigned char"
    return _dispatch_kernel.variant(own, _ID_TYPE[id_dtype], quantize, phases)


def _combine_variant(dtype: str, id_dtype: str, mode: str, vectors: int, phases: int) -> Variant:
    return _combine_kernel.variant(CUDA_TYPE[dtype], _ID_TYPE[id_dtype], mode, vectors, phases)


def resident(mode: str, vectors: int) -> int:
    """Return how many blocks of a combine are resident on a multiprocessor."""
    return _COMBINE["RESIDENT_LARGE" if mode == "BY_SLOT" or vectors > FEW_VECTORS else "RESIDENT"]


_dispatch_kernel.specialized = [
    _dispatch_variant(dtype, id_dtype, quantize, phases).instance
    for quantize, dtypes in ((True, DTYPES), (False, DTYPES[:1]))
    for dtype in dtypes
    for id_dtype in ID_DTYPES
    for phases in (_BOTH, SEND, RECEIVE)
]
_combine_kernel.specialized = [
    _combine_variant(dtype, id_dtype, mode, vectors, phases).instance
    for dtype in DTYPES
    for id_dtype in ID_DTYPES
    for mode in _MODES
    for vectors in (FEW_VECTORS, MANY_VECTORS)
    for phases in (_BOTH, SEND, RECEIVE)
]
# These instances are compiled at import. `AllToAllState.local` and `connect` compile all others.
_dispatch_kernel.at_import = [_dispatch_variant(DTYPES[0], ID_DTYPES[0], x, _BOTH).instance for x in (False, True)]
_combine_kernel.at_import = [_combine_variant(DTYPES[0], ID_DTYPES[0], "BY_SLOT", FEW_VECTORS, _BOTH).instance]


# --- the plans ----------------------------------------------------------------------------------------


def _expect_rank(name: str, array: Array, link: Link) -> None:
    if array.place.device != link.device:
        place = "in host memory" if link.device is None else f"on CUDA device {link.device}"
        check.fail(name, f"{place}, as the state is", f"one on {array.place}")


def _expect_routing(weights: Any, ids: Any, first: Array, name: str, tokens: Any, link: Link) -> None:
    shape, symbols = (tokens, link.sizes.topk), "[tokens, topk]"
    expect("topk_ids", ids, first, name, ID_DTYPES, shape, symbols)
    if weights is not None:
        expect("topk_weights", weights, first, name, ("float32",), shape, symbols)


def _at_most(tokens: Any, link: Link) -> None:
    check.integer("the number of tokens", tokens, 0, link.sizes.max_tokens, "max_tokens of the state")


def _dispatch_on_host(
    hidden_states: Any, topk_weights: Any, topk_ids: Any, link: Link, buffer: int, quantize: bool, phases: int, *,
    scales: Any = None, expert_load: Any = None,
) -> Any:  # fmt: skip
    if phases & SEND:
        twin.send(link.host, link.rank, buffer, hidden_states, scales, topk_weights, topk_ids, quantize)
    return twin.receive(link.host, link.rank, buffer, expert_load) if phases & RECEIVE else None


@op(_dispatch_on_host)
def _dispatch(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    link: Link,
    buffer: int,
    quantize: bool,
    phases: int,
    *,
    scales: Any = None,
    expert_load: Any = None,
) -> Any:
    """Launch a dispatch, or one of its phases. Return the received weights and ids."""
    name = "hidden_states"
    x = expect_array(name, hidden_states, (*DTYPES, *FP8), ("tokens", "hidden"))
    _expect_rank(name, x, link)
    expect_contiguous(name, x)
    tokens, hidden = x.shape
    sizes = link.sizes
    if hidden != sizes.hidden:
        check.fail(name, f"of {sizes.hidden} numbers a row (hidden of the state)", hidden)
    _at_most(tokens, link)
    if quantize and (x.dtype not in DTYPES or hidden % GROUP):
        check.fail("quantize", f"False unless hidden_states are of 16 bits and {GROUP} divides hidden", x.dtype)
    columns = 0
    if scales is not None:
        if x.dtype not in FP8:
            check.fail("scales", "None unless hidden_states are in FP8", f"scales of {x.dtype}")
        columns, max_columns = scales.shape[1] if len(scales.shape) == 2 else 0, max(1, -(-hidden // GROUP))
        if not 0 < columns <= max_columns:
            check.fail("scales", f"of shape [tokens, columns], of at most {max_columns} columns", list(scales.shape))
        expect("scales", scales, x, name, ("float32",), (tokens, columns), "[tokens, columns]")
    _expect_routing(topk_weights, topk_ids, x, name, tokens, link)
    if expert_load is not None:
        expect("expert_load", expert_load, x, name, ("int32",), (sizes.num_experts,), "[num_experts]")
    if x.on_host:
        return run_twin()
    places, layout = link.ranks * sizes.max_tokens, link.layout
    weights_out = ids_out = None
    if phases & RECEIVE:
        weights_out, ids_out = outputs(
            None, x, name,
            Result((places, sizes.topk), "float32"), Result((places, sizes.topk), "int32"),
        )  # fmt: skip
    max_blocks = _DISPATCH["RESIDENT"] * x.gpu.multiprocessors // link.sharing
    min_blocks = ceil_div(places * sizes.topk, 8 * _THREADS) if phases & RECEIVE else 1
    blocks = _clamp(tokens, min_blocks, max_blocks)
    sent = "rows in FP8 with a scale" if quantize else "rows sent unchanged"
    why = f"{_PHASE_WORDS[phases]}, {sent}: a block for each of {tokens} tokens, at least {min_blocks} (for what"
    why += f" arrives), at most {max_blocks} (that run at once, shared by the {link.sharing} ranks of the GPU)"
    launch(
        _dispatch_variant(x.dtype if quantize else DTYPES[0], topk_ids.dtype, quantize, phases),
        blocks, _THREADS, why=why,
        ranks=link.fields, hidden=x, scales=scales, topk_ids=topk_ids, weights=topk_weights, ids_out=ids_out,
        weights_out=weights_out, expert_load=expert_load, rows_at=layout.rows[buffer], scales_at=layout.scales[buffer],
        ids_at=layout.ids[buffer], weights_at=layout.weights[buffer], tokens=tokens,
        width=hidden if quantize else hidden * x.item_size, scale_columns=columns, topk=sizes.topk,
        max_tokens=sizes.max_tokens, buffer=buffer,
    )  # fmt: skip
    return None if weights_out is None else (weights_out, ids_out)


def _clamp(number: int, min_blocks: int, max_blocks: int) -> int:
    return max(1, min(max(number, min_blocks), max_blocks))


def _combine_on_host(
    expert_output: Any, topk_weights: Any, topk_ids: Any, link: Link, buffer: int, apart: bool, phases: int, *,
    inverse: Any = None,
) -> Any:  # fmt: skip
    if phases & SEND:
        weighted = topk_weights is not None
        twin.send_back(link.host, link.rank, buffer, expert_output, inverse, weighted, apart)
    if not phases & RECEIVE:
        return None
    return twin.receive_back(link.host, link.rank, topk_weights, topk_ids, apart, expert_output.dtype)


@op(_combine_on_host)
def _combine(
    expert_output: Any,
    topk_weights: Any,
    topk_ids: Any,
    link: Link,
    buffer: int,
    apart: bool,
    phases: int,
    *,
    inverse: Any = None,
    out: Any = None,
) -> Any:
    """Launch a combine, or one of its phases. Return the result of the receiving phase."""
    name, sizes = "expert_output", link.sizes
    x = expect_array(name, expert_output, DTYPES)
    _expect_rank(name, x, link)
    places = link.ranks * sizes.max_tokens
    if len(x.shape) not in (2, 3) or x.shape[-1] != sizes.hidden:
        check.fail(name, f"of shape [rows, {sizes.hidden}] or [experts, rows, {sizes.hidden}]", list(x.shape))
    expect_contiguous(name, x)
    rows = x.size // sizes.hidden
    if inverse is None:
        if rows != places:
            check.fail(name, f"of {places} rows, ranks * max_tokens, without inverse", rows)
        if topk_weights is not None:
            check.fail("topk_weights", "None without inverse: expert_output is weighted", "an array")
    else:
        expect("inverse", inverse, x, name, ("int32",), (places, sizes.topk), "[ranks * max_tokens, topk]")
    if apart and (inverse is None or not sizes.apart):
        check.fail("apart", "False without inverse, or for a state that was made without apart", True)
    expect_place("topk_ids", topk_ids, x, name)
    check.dimensions("topk_ids", topk_ids.shape, ("tokens", "topk"))
    tokens = topk_ids.shape[0]
    _at_most(tokens, link)
    _expect_routing(topk_weights, topk_ids, x, name, tokens, link)
    result = Result((tokens, sizes.hidden), x.dtype, "[tokens, hidden]")
    if out is not None:  # in the sending phase, too: an error comes before anything is sent
        expect("out", out, x, name, result.dtypes, result.shape, result.symbols)
    if not phases & RECEIVE:
        out = None
    elif not x.on_host or out is not None:
        out = outputs(out, x, name, result)
    if x.on_host:
        return run_twin()
    mode = "SUMMED" if inverse is None else "APART" if apart else "BY_SLOT"
    vectors = MANY_VECTORS if tokens > MANY_TOKENS else FEW_VECTORS
    chunks = sizes.chunks(vectors)
    # All blocks must be resident, because they wait for each other.
    max_blocks = max(2, resident(mode, vectors) * x.gpu.multiprocessors // link.sharing)
    share = max(1, int(max_blocks * _SENDERS[mode][vectors == MANY_VECTORS]))
    senders = min(share, (link.ranks - 1) * sizes.max_tokens * chunks) if phases & SEND else 0
    receivers = _clamp(tokens * chunks, 1, max_blocks - share) if phases & RECEIVE else 0
    blocks = senders + receivers
    if not blocks:
        return out
    layout = link.layout
    why = f"{_PHASE_WORDS[phases]}, {_MODES[mode]}: {vectors} vectors a thread"
    why += f" ({MANY_VECTORS} from {MANY_TOKENS + 1} tokens on)"
    why += f"; {senders} blocks send and {receivers} receive, at most {max_blocks} (that run at once, shared by the"
    why += f" {link.sharing} ranks of the GPU)"
    launch(
        _combine_variant(x.dtype, topk_ids.dtype, mode, vectors, phases),
        blocks, _THREADS, why=why,
        ranks=link.fields, src=x, inverse=inverse, topk_ids=topk_ids, weights=topk_weights, out=out,
        ids_at=layout.ids[buffer], weights_at=layout.weights[buffer], partial_at=layout.partial,
        flags_at=layout.flags, lines_at=layout.lines, weighted=topk_weights is not None, rows=rows, tokens=tokens,
        vectors=sizes.vectors, chunks=chunks, flags=sizes.flags, lines=sizes.lines, topk=sizes.topk,
        max_tokens=sizes.max_tokens, senders=senders, buffer=buffer, line_tokens=sizes.line_tokens,
    )  # fmt: skip
    return out


# --- the public functions -----------------------------------------------------------------------------


def _expect_state(state: Any) -> AllToAllState:
    if not isinstance(state, AllToAllState):
        check.fail("state", "an AllToAllState", type(state).__name__, TypeError)
    return state


def _entered(**given: Any) -> dict[str, Any]:
    """Return the arguments that are not None, as arrays of a known library."""
    return {name: arrays.enter(name, value) for name, value in given.items() if value is not None}


def _receiver(state: AllToAllState, receive: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap `receive` so that it can be called only once."""
    pending = [receive]

    def receiver() -> Any:
        state.expect_open()
        if not pending:
            raise RuntimeError("this call has been received: its receiver is called once")
        return pending.pop()()

    return receiver


def all_to_all_dispatch(
    state: AllToAllState,
    hidden_states: AnyArray,
    topk_weights: AnyArray,
    topk_ids: AnyArray,
    *,
    scales: AnyArray | None = None,
    quantize: bool = False,
    expert_load: AnyArray | None = None,
    return_receiver: bool = False,
) -> Any:
    """Send each token to the ranks of its experts, and receive the tokens of the other ranks.

    Every rank calls the function, with any number of tokens up to max_tokens. A token is sent once to each rank that
    has one of its experts, to the row `source_rank * max_tokens + token`, so the ranks need not exchange counts first.
    The call is one launch, which a CUDA graph can capture. It ends when the rows of all ranks have arrived.

    Args:
        state: the `AllToAllState` of this rank.
        hidden_states: [tokens, hidden], float16, bfloat16 or FP8 (e4m3), on the device of the state.
        topk_weights: float32 [tokens, topk].
        topk_ids: int32 or int64 [tokens, topk]; ids out of range are skipped.
        scales: float32 [tokens, columns], the scales of FP8 rows, at most one per 128 elements.
        quantize: send 16-bit rows in FP8 with a scale per 128 elements, as `per_token_group_quant_fp8` computes them.
        expert_load: int32 [num_experts]. For each expert of this rank, the number of received (token, slot) pairs is
            added to its entry.
        return_receiver: only send, and return a function that receives the rows and returns the result. Kernels that
            this rank launches between the two calls overlap with the arrival of rows.

    Returns:
        A named tuple (hidden_states, scales, topk_weights, topk_ids), of ranks * max_tokens rows each. The rows are in
        the state's window (memory that other ranks write), and valid until its next dispatch begins. Rows of tokens
        without an expert of this rank are undefined. scales is None if the rows do not have scales.

    Raises:
        AllToAllError: an earlier call of this state failed. A failed call itself returns ids of -1.
        RuntimeError: an earlier call has not been received, or this call is received twice.
        TypeError, ValueError: unsupported arguments.

    DeepEP's low-latency kernels and Perplexity's pplx-kernels also derive a token's row from its source rank and index.
    """
    state = _expect_state(state)
    first = hidden_states
    hidden_states = arrays.enter("hidden_states", first)
    topk_weights, topk_ids = arrays.enter("topk_weights", topk_weights), arrays.enter("topk_ids", topk_ids)
    options = _entered(scales=scales, expert_load=expert_load)
    buffer = state.begin_dispatch()
    own = (hidden_states, topk_weights, topk_ids, state.link, buffer, bool(quantize))

    def results(received: tuple[Any, Any]) -> Dispatched:
        state.end_dispatch(topk_ids.shape[0])
        columns = options["scales"].shape[1] if scales is not None else state.hidden // GROUP if quantize else 0
        dtype = FP8[0] if quantize else arrays.library_of(hidden_states).dtype(hidden_states)  # type: ignore[union-attr]
        if dtype in FP8:
            dtype = FP8[0]
        found = state.received(hidden_states, buffer, dtype, columns, *received)
        if hidden_states is first:
            return found
        return Dispatched(*(None if x is None else arrays.leave(x, first) for x in found))

    try:
        sent = _dispatch(*own, SEND if return_receiver else _BOTH, **options)
    except Exception:
        state.undo()
        raise
    if not return_receiver:
        return results(sent)
    return _receiver(state, lambda: results(_dispatch(*own, RECEIVE, **options)))


def all_to_all_combine(
    state: AllToAllState,
    expert_output: AnyArray,
    topk_weights: AnyArray | None,
    topk_ids: AnyArray,
    *,
    inverse: AnyArray | None = None,
    apart: bool = False,
    out: AnyArray | None = None,
    return_receiver: bool = False,
) -> Any:
    """Send the experts' results back to the ranks of their tokens, and add them up.

    Every rank calls the function once after each `all_to_all_dispatch`. It adds up its experts' rows for each token, in
    float32 and in the order of the slots, and sends the sum in the dtype of `expert_output`. The token's rank adds
    these rows in the order of the ranks, so the bits do not depend on the order of arrival. The call is one launch,
    which a CUDA graph can capture.

    Args:
        expert_output: the rows of this rank's experts, float16 or bfloat16 [rows, hidden], or [experts, rows, hidden].
            Without `inverse`: the sum for each received token, [ranks * max_tokens, hidden], in the rows of the
            dispatch.
        topk_weights: float32 [tokens, topk], the dispatched weights, which multiply the rows. None: 1.
        topk_ids: int32 or int64 [tokens, topk], the dispatched ids.
        inverse: int32 [ranks * max_tokens, topk], from `moe_sort` or `moe_sort_batched`: the row of each received slot
            in `expert_output`. A slot whose expert is on this rank must have a row.
        apart: send the row of each slot separately, and add the rows on the token's rank in the order of the slots. The
            result then has the same bits for any number of ranks, but up to topk times as many bytes are sent.
        out: [tokens, hidden], written and returned.
        state, return_receiver: as in `all_to_all_dispatch`. Do not change any argument before the receiver returns.

    Returns:
        [tokens, hidden], in the dtype of `expert_output`. The row of a token without experts is 0. If the call failed,
        the result is NaN.

    Raises:
        AllToAllError: an earlier call of this state failed.
        RuntimeError: no dispatch was received since the last combine, or this call is received twice.
        TypeError, ValueError: unsupported arguments.
    """
    state = _expect_state(state)
    first = expert_output
    expert_output, topk_ids = arrays.enter("expert_output", first), arrays.enter("topk_ids", topk_ids)
    weights = None if topk_weights is None else arrays.enter("topk_weights", topk_weights)
    options = _entered(inverse=inverse, out=out)
    buffer = state.begin_combine(topk_ids)
    own = (expert_output, weights, topk_ids, state.link, buffer, bool(apart))

    def result(found: Any) -> Any:
        state.end_combine()
        if out is not None:
            return out
        return found if expert_output is first else arrays.leave(found, first)

    try:
        sent = _combine(*own, SEND if return_receiver else _BOTH, **options)
    except Exception:
        state.undo()
        raise
    if not return_receiver:
        return result(sent)
    return _receiver(state, lambda: result(_combine(*own, RECEIVE, **options)))


# --- the launches for `cukern.explain` ----------------------------------------------------------------


def _link_on(state: Any, on: Any) -> Link:
    """Return the link of a state. If `on` is a GPU, a rank in host memory gets the link of a rank with a GPU."""
    link = _expect_state(state).link
    return link if on is None or link.device is not None else replace(link, device=0, host=None, sharing=1)


def _dispatch_launch(
    on: Any, state: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, *, quantize: bool = False,
    return_receiver: bool = False, **options: Any,
) -> Any:  # fmt: skip
    link, phases = _link_on(state, on), SEND if return_receiver else _BOTH
    return _dispatch, (hidden_states, topk_weights, topk_ids, link, 0, bool(quantize), phases), options


def _combine_launch(
    on: Any, state: Any, expert_output: Any, topk_weights: Any, topk_ids: Any, *, apart: bool = False,
    return_receiver: bool = False, **options: Any,
) -> Any:  # fmt: skip
    link, phases = _link_on(state, on), SEND if return_receiver else _BOTH
    return _combine, (expert_output, topk_weights, topk_ids, link, 0, bool(apart), phases), options


all_to_all_dispatch.launched_op = _dispatch_launch  # type: ignore[attr-defined]
all_to_all_combine.launched_op = _combine_launch  # type: ignore[attr-defined]
