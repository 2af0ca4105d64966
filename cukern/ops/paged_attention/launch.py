"""A call of paged attention: its checks, its results, its workspace, and its launches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cukern.ops.paged_attention.choose import (
    CLEARING,
    DTYPES,
    LAYOUTS,
    MAX_BLOCK_SIZE,
    VARIANTS,
    Config,
    Request,
    Sizes,
    choose,
    clearing,
    scalar,
    unit_tokens,
)  # fmt: skip
from cukern.reference import paged_attention as twin
from cukern.runtime import arrays, check, fp8, template
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import Library, View
from cukern.runtime.decisions import Decision, Decisions
from cukern.runtime.gpu import Gpu
from cukern.runtime.launch import gpu_of
from cukern.runtime.view import read, read_beside, read_like, read_table

PARTITION = twin.PARTITION
_LARGEST_SCALE = 1e30
_MOST_CHOICES = 4096  # of a decision
_FLOAT32 = ("float32",)
#: The fields of vLLM's block-sparse pattern, and their values where there is none.
_SPARSE = "sparse_local", "sparse_stride", "sparse_size", "sparse_head_step", "sparse_rank"
_DENSE = 0, 0, 64, 0, 0
#: What earlier calls chose, by query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, sinks, k_scale,
#: v_scale, out, lse, exp_sums, max_logits and tmp_out. The number of sequences, the width of the tables and vLLM's
#: partitions are free.
DECISIONS = Decisions((0,), (), (), (0, 1), (0,), (), (), (), (), (0,), (0,), (0, 2), (0, 2), (0, 2))

#: The addresses of vLLM's tmp_out, max_logits and exp_sums, and the partitions that they have room for.
_Spaces = tuple[int, int, int, int]
_NO_SPACES: _Spaces = 0, 0, 0, 0


class Own(NamedTuple):
    """What alike calls share beside the choice for their sizes."""

    gpu: Gpu
    request: Request  # of the call that was checked
    fixed: tuple[tuple[str, Any], ...]  # fields of the kernels' parameters
    rows: tuple[int, ...]  # the query's shape behind seqs
    scale: float | None  # where the caller gives none
    returns_lse: bool

    def choose(self, seqs: int, max_blocks: int, aligned: bool) -> Config:
        """The choice for these sizes. `aligned`: the query and the caches begin at multiples of 16 bytes."""
        x = self.request
        sizes = x.sizes._replace(seqs=seqs, max_blocks=max_blocks)
        (_, seq), (_, token), (_, head), *distances = self.fixed[:9]
        # Along a dimension of one element the stride does not matter.
        steps = [step for step, n in zip((seq, token, head), sizes[:3], strict=True) if n > 1]
        aligned = (
            aligned
            and not any(step * arrays.ITEM_SIZE[x.dtype] % 16 for step in steps)
            and not any(step % 16 for _, step in distances)
        )
        return choose(self.gpu, x._replace(sizes=sizes, aligned=aligned), self.fixed)


def attend(
    decide: Callable[..., tuple[Any, Any]], facts: tuple[Any, ...], given: tuple[Any, ...],
    scales: tuple[Any, Any, Any], max_seq_len: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Launch what an alike call has chosen, or check and choose by `decide`; the result, and its log-sum-exp or None.

    `given` are the arrays of `DECISIONS`. `scales` are the scales of scores, keys and values: numbers, arrays or None.
    """
    decision = DECISIONS.find(facts, given)
    if decision is not None:
        query, keys, values, tables, lengths, slopes, sinks, key_scale, value_scale, out, lse, _, _, _ = given
        library, own = decision.library, decision.own
        address, seqs, (rows, width) = library.address, query.shape[0], tables.shape
        table_row, between = library.strides(tables)
        spaces: _Spaces | None = _NO_SPACES
        if decide is decide_vllm:
            longest = _integer("max_seq_len", max_seq_len, 0)
            spaces = _spaces(library, given[11:], (seqs, *own.rows), longest)
        if (
            rows == lengths.shape[0] == seqs
            and between == 1
            and (out is None or (out.shape[0] == seqs and address(out) % 16 == 0))
            and (lse is None or lse.shape[0] == seqs)
            and spaces is not None
        ):
            at_query, at_keys, at_values = address(query), address(keys), address(values)
            aligned = (at_query | at_keys | at_values) % 16 == 0
            config = decision.choices.get((seqs, width, aligned)) or _choose(decision, seqs, width, aligned)
            scale, k_scale, v_scale = scales
            key_factor = 1.0 if k_scale is None or key_scale is not None else check.number("k_scale", k_scale)
            out_scale = 1.0 if v_scale is None or value_scale is not None else check.number("v_scale", v_scale)
            factor = _factor_of_scores(own.scale if scale is None else scale, key_factor)
            read = (
                at_query, at_keys, at_values, address(tables), address(lengths),
                0 if slopes is None else address(slopes), 0 if sinks is None else address(sinks),
                0 if key_scale is None else address(key_scale), 0 if value_scale is None else address(value_scale),
            )  # fmt: skip
            numbers, shape = (table_row, factor, out_scale), (seqs, *own.rows)
            return launch(config, library, decision.device, read, spaces, numbers, shape, out, lse, own.returns_lse)
    return decide(decision, facts, given, scales, max_seq_len)


def _spaces(library: Library, given: tuple[Any, ...], shape: tuple[int, ...], longest: int) -> _Spaces | None:
    """vLLM's workspaces where there are any; None where they do not fit a query of this shape."""
    exp_sums, max_logits, tmp_out = given
    if exp_sums is None:
        return _NO_SPACES
    seqs, heads, head_dim = shape
    partitions, address, strides = exp_sums.shape[2], library.address, library.strides
    statistics, steps, at_tmp_out = (seqs, heads, partitions), (heads * partitions, partitions, 1), address(tmp_out)
    if (
        exp_sums.shape != statistics
        or max_logits.shape != statistics
        or tmp_out.shape != (*statistics, head_dim)
        or strides(exp_sums) != steps
        or strides(max_logits) != steps
        or strides(tmp_out) != (*[head_dim * step for step in steps], 1)
        or at_tmp_out % 16
        or longest > partitions * PARTITION
    ):
        return None
    return at_tmp_out, address(max_logits), address(exp_sums), partitions


def _choose(decision: Decision, seqs: int, max_blocks: int, aligned: bool) -> Config:
    """The choice for sizes that no alike call had, which later ones find."""
    own: Own = decision.own
    if len(decision.choices) >= _MOST_CHOICES:
        decision.choices.clear()
    made = decision.choices[seqs, max_blocks, aligned] = own.choose(seqs, max_blocks, aligned)
    return made


def _plain(name: str, number: Any) -> Any:
    """A number that is no array: to read an array's element would wait for the GPU."""
    if arrays.is_array(number):
        check.fail(name, "a number", f"an array ({type(number).__name__})", TypeError)
    return number


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    return check.integer(name, _plain(name, value), low, high)


def _factor_of_scores(scale: Any, key_scale: float) -> float:
    """What scores are multiplied by."""
    factor = check.number("scale", scale if type(scale) is float else _plain("scale", scale)) * key_scale
    if not abs(factor) <= _LARGEST_SCALE:
        check.fail("scale", f"of at most {_LARGEST_SCALE:g}, with k_scale", factor)
    return factor


# --- the checks of a call that is not like one before -------------------------------------------------


class Call(NamedTuple):
    """A call whose inputs and scales have been checked."""

    inputs: tuple[View, View, View, View, View]
    k_scale: View | None
    v_scale: View | None
    cache: str  # dtype
    layout: str
    sizes: Sizes
    steps: dict[str, int]  # strides, by their fields
    default_scale: float | None
    scale: float  # of the scores, before the scale of keys joins it
    factor: float  # of the scores
    out_scale: float

    @property
    def query(self) -> View:
        return self.inputs[0]

    def request(self, extras: bool, split: int, vllm_workspace: bool, variant: str) -> Request:
        """What the call asks of the kernels, without the alignment of its arrays."""
        query = self.query
        return Request(query.dtype, self.cache, self.layout, self.sizes, extras, split, vllm_workspace, False, variant)

    def for_twin(self, scales: tuple[Any, Any, Any]) -> dict[str, Any]:
        """The arguments that the NumPy references of all functions have."""
        names = "query", "key_cache", "value_cache", "block_tables", "seq_lens"
        _, k_scale, v_scale = scales
        own = {"k_scale": self.k_scale or k_scale, "v_scale": self.v_scale or v_scale}
        return dict(zip(names, self.inputs, strict=True)) | own


def _check_cache_dtype(key_cache: View, value_cache: View, query: View, kv_cache_dtype: Any) -> str:
    """Check the caches' dtypes; returns what they hold, which for bytes is `kv_cache_dtype`."""
    found = key_cache.dtype
    if check.one_of("kv_cache_dtype", kv_cache_dtype, fp8.KV_CACHE_DTYPES) == "auto":
        if found == "uint8":
            check.fail("kv_cache_dtype", "'fp8_e4m3' or 'fp8_e5m2' for a cache of bytes", "'auto'")
        cache = found
        check.dtype("key_cache", found, (query.dtype, *fp8.DTYPES))
    else:
        cache = fp8.FORMATS[kv_cache_dtype]
        check.dtype("key_cache", found, ("uint8", cache))
    check.dtype("value_cache", value_cache.dtype, (found,))
    return cache


def _check_caches(
    key_cache: View, value_cache: View, layout: str, cache: str, head_dim: int
) -> tuple[int, int, int, dict[str, int]]:
    """Check the caches' shapes and strides; returns blocks, kv_heads, block_size and the strides in bytes by field."""
    shape = key_cache.shape
    axes: dict[str, int | None]
    if layout == "flash":
        symbols: tuple[str, ...] = "blocks", "block_size", "kv_heads", "head_dim"
        check.dimensions("key_cache", shape, symbols, {5: 'layout="vllm"'})
        blocks, block_size, kv_heads, _ = shape
        wanted = value_wanted = (*shape[:3], head_dim)
        text = value_text = f"[{', '.join(symbols)}]"
        axes = {"block": 0, "token": 1, "head": 2}
        outer = 3
    else:
        symbols = "blocks", "kv_heads", "head_dim / x", "block_size", "x"
        check.dimensions("key_cache", shape, symbols, {4: 'paged_attention with layout="flash"'})
        x = 16 // arrays.ITEM_SIZE[cache]
        if head_dim % x:
            check.fail(
                "query", f"of a head_dim that is a multiple of {x} for a cache of {cache} in this layout", head_dim
            )
        blocks, kv_heads, _, block_size, _ = shape
        wanted = (blocks, kv_heads, head_dim // x, block_size, x)
        value_wanted = (blocks, kv_heads, head_dim, block_size)
        text, value_text = f"[{', '.join(symbols)}]", "[blocks, kv_heads, head_dim, block_size]"
        axes = {"block": 0, "token": None, "head": 1}
        outer = 2
    check.shape("key_cache", shape, wanted, text)
    check.shape("value_cache", value_cache.shape, value_wanted, value_text)
    if kv_heads < 1:
        check.fail("key_cache", "of at least one kv head", f"shape {list(shape)}")
    if block_size % 8 or not 8 <= block_size <= MAX_BLOCK_SIZE:
        check.fail("key_cache", f"of blocks of a multiple of 8 tokens, at most {MAX_BLOCK_SIZE}", block_size)
    distances = {}
    for name, array in (("key", key_cache), ("value", value_cache)):
        inner, strides = array.shape[outer:], array.strides[outer:]
        if blocks and not array._replace(shape=inner, strides=strides).is_contiguous:
            last = {1: "dimension", 2: "two dimensions", 3: "three dimensions"}[len(inner)]
            check.fail(f"{name}_cache", f"contiguous along its last {last}", f"strides {strides} (in elements) there")
        for step, axis in axes.items():
            # Along an axis of one element the stride does not matter.
            one = axis is None or array.shape[axis] <= 1
            distances[f"{name}_{step}"] = 0 if one else array.strides[axis] * array.item_size  # type: ignore[index]
    return blocks, kv_heads, block_size, distances


def _check_aligned(name: str, view: View) -> None:
    if view.alignment < 16:
        check.fail(name, "at a multiple of 16 bytes", f"an address that is a multiple of {view.alignment}")


def _check_call(
    given: tuple[Any, ...], scales: tuple[Any, Any, Any], layout: Any, kv_cache_dtype: Any, several: bool
) -> Call:
    """Check the five arrays that come first, and the scales of scores, keys and values.

    `several`: the query may have several tokens per sequence, and the scale of the scores may be None.
    """
    scale, k_scale, v_scale = scales
    query, key_cache, value_cache, tables, lengths, *_ = given
    query = read("query", query, DTYPES)
    check.one_of("layout", layout, LAYOUTS)
    shape, strides = query.shape, query.strides
    query_strides: tuple[int, ...]
    if len(shape) == 3:
        seqs, heads, head_dim = shape
        query_tokens, query_strides = 1, (strides[0], 0, strides[1])
    elif len(shape) == 4 and several:
        seqs, query_tokens, heads, head_dim = shape
        query_strides = strides[:3]
    else:
        wanted = "[seqs, heads, head_dim]" + (" or [seqs, query_tokens, heads, head_dim]" if several else "")
        check.fail("query", f"of shape {wanted}", list(shape))
    most = template.constants(scalar.file)["MAX_DIM"]
    if head_dim % 8 or not 8 <= head_dim <= most:
        check.fail("query", f"of a head_dim that is a multiple of 8 in [8, {most}]", head_dim)
    if strides[-1] != 1 and 0 not in shape:
        check.fail("query", "contiguous along its last dimension", f"strides {strides} (in elements)")
    key_cache = read_beside("key_cache", key_cache, query, "query")
    value_cache = read_beside("value_cache", value_cache, query, "query")
    cache = _check_cache_dtype(key_cache, value_cache, query, kv_cache_dtype)
    blocks, kv_heads, block_size, distances = _check_caches(key_cache, value_cache, layout, cache, head_dim)
    if heads % kv_heads:
        check.fail("query", f"of a multiple of {kv_heads} heads (kv_heads of key_cache)", heads)
    tables = read_table("block_tables", tables, query, "query", seqs, ("seqs", "max_blocks"))
    lengths = read_like("seq_lens", lengths, query, "query", ("int32",), (seqs,), "[seqs]")
    default = head_dim**-0.5 if several else None
    scale = check.number("scale", _plain("scale", default if scale is None else scale))
    key_scale, key_factor = fp8.read_scale("k_scale", k_scale, query, "query")
    value_scale, out_scale = fp8.read_scale("v_scale", v_scale, query, "query")
    sizes = Sizes(seqs, query_tokens, heads, kv_heads, head_dim, blocks, block_size, tables.shape[1])
    steps = dict(zip(("query_seq", "query_token", "query_head"), query_strides, strict=True)) | distances
    inputs = query, key_cache, value_cache, tables, lengths
    factor = _factor_of_scores(scale, key_factor)
    return Call(inputs, key_scale, value_scale, cache, layout, sizes, steps, default, scale, factor, out_scale)


def _per_head(name: str, array: Any, call: Call) -> View | None:
    if array is None:
        return None
    return read_like(name, array, call.query, "query", _FLOAT32, (call.sizes.heads,), "[heads]")


def decide(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, ...], scales: tuple[Any, Any, Any],
    max_seq_len: None,
) -> tuple[Any, Any]:  # fmt: skip
    """Check a call of `paged_attention`, choose its kernel, keep the choice, launch."""
    layout, window, softcap, kv_cache_dtype, returns_lse, split, variant = facts
    slopes, sinks, _, _, out, lse = given[5:11]
    call = _check_call(given, scales, layout, kv_cache_dtype, True)
    slopes, sinks = _per_head("alibi_slopes", slopes, call), _per_head("sinks", sinks, call)
    if window is not None:
        window = _integer("window", window, 1)
    if softcap is not None:
        softcap = check.number("softcap", _plain("softcap", softcap))
        if not 1e-30 <= softcap <= 1e30:
            check.fail("softcap", "in [1e-30, 1e30]", softcap)
    if split is not None:
        split = _integer("split", split, unit_tokens(), 2**30)
        if split % unit_tokens():
            check.fail("split", f"a multiple of {unit_tokens()}", split)
    query, name = call.query, "out[0]" if returns_lse else "out"
    if out is not None:
        out = read_like(name, out, query, "query", (query.dtype,), query.shape, "query's")
    if lse is not None:
        lse = read_like("out[1]", lse, query, "query", _FLOAT32, query.shape[:-1], "query's without head_dim")
    if out is not None:
        _check_aligned(name, out)
    check.one_of("variant", variant, VARIANTS)
    if query.on_host:
        check.host_variant(variant, VARIANTS)
        arguments = {
            "layout": layout, "scale": call.scale, "alibi_slopes": slopes, "window": window, "softcap": softcap,
            "sinks": sinks, "kv_cache_dtype": kv_cache_dtype, "return_lse": True,
        }  # fmt: skip
        found = runtime.run_twin(twin.paged_attention, query, (out, lse), call.for_twin(scales) | arguments)
        return found or (None, None)
    fixed = {"window": min(window or 0, 2**30), "softcap": softcap or 0.0, **dict(zip(_SPARSE, _DENSE, strict=True))}
    request = call.request(slopes is not None or softcap is not None, split or 0, False, variant)
    others = slopes, sinks, out, lse
    return _launch_first(decision, facts, given, call, fixed, request, others, _NO_SPACES, returns_lse)


def decide_vllm(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, ...], scales: tuple[Any, Any, Any],
    max_seq_len: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Check a call of vLLM's functions, choose its kernel, keep the choice, launch."""
    split, num_kv_heads, block_size, kv_cache_dtype, tp_rank, *sparse = facts
    slopes, out = given[5], given[9]
    call = _check_call(given, scales, "vllm", kv_cache_dtype, False)
    query, sizes = call.query, call.sizes
    out = read_like("out", out, query, "query", (query.dtype,), query.shape, "query's")
    _check_aligned("out", out)
    for name, size, wanted in (
        ("num_kv_heads", num_kv_heads, sizes.kv_heads), ("block_size", block_size, sizes.block_size)
    ):  # fmt: skip
        if _integer(name, size, 1) != wanted:
            check.fail(name, f"{wanted} (of key_cache)", size)
    max_seq_len = _integer("max_seq_len", max_seq_len, 0)
    slopes = _per_head("alibi_slopes", slopes, call)
    names = "local_blocks", "vert_stride", "block_size", "head_sliding_step"
    for i, name in enumerate(names):
        least = -(2**20) if name == "head_sliding_step" else 0
        sparse[i] = _integer(f"blocksparse_{name}", sparse[i], least, 2**20)
    local, stride, size, step = sparse
    tp_rank = _integer("tp_rank", tp_rank, 0, 2**20)
    if stride > 1 and (size == 0 or size % sizes.block_size):
        check.fail("blocksparse_block_size", f"a multiple of block_size ({sizes.block_size})", size)
    of_spaces = _NO_SPACES
    if split:
        exp_sums, max_logits, tmp_out = _check_spaces(given[11:], query, max_seq_len)
        of_spaces = tmp_out.address, max_logits.address, exp_sums.address, exp_sums.shape[2]
    if query.on_host:
        arguments = call.for_twin(scales) | {
            "out": out, "num_kv_heads": num_kv_heads, "scale": call.scale, "block_size": block_size,
            "max_seq_len": max_seq_len, "alibi_slopes": slopes, "kv_cache_dtype": kv_cache_dtype, "tp_rank": tp_rank,
            **{f"blocksparse_{name}": value for name, value in zip(names, sparse, strict=True)},
        }  # fmt: skip
        if split:
            arguments |= {"exp_sums": exp_sums, "max_logits": max_logits, "tmp_out": tmp_out}
        function = twin.paged_attention_v2 if split else twin.paged_attention_v1
        runtime.run_twin(function, query, (), arguments)
        return None, None
    if stride <= 1:
        stride = 0
    fixed = {"window": 0, "softcap": 0.0, **dict(zip(_SPARSE, (local, stride, size, step, tp_rank), strict=True))}
    request = call.request(slopes is not None or stride > 0, split, split > 0, "auto")
    others = slopes, None, out, None
    return _launch_first(decision, facts, given, call, fixed, request, others, of_spaces, False)


def _check_spaces(given: tuple[Any, Any, Any], query: View, max_seq_len: int) -> tuple[View, View, View]:
    """Check vLLM's workspaces, which have room for the partitions of `max_seq_len` tokens."""
    exp_sums, max_logits, tmp_out = given
    exp_sums = read_beside("exp_sums", exp_sums, query, "query")
    partitions = exp_sums.shape[-1] if len(exp_sums.shape) == 3 else 0
    if len(exp_sums.shape) == 3 and max_seq_len > partitions * PARTITION:
        least = f"of at least {-(-max_seq_len // PARTITION)} partitions (of {PARTITION} of max_seq_len)"
        check.fail("exp_sums", least, partitions)
    shape: tuple[int, ...] = (*query.shape[:2], partitions)
    symbols = "[seqs, heads, max_partitions"
    exp_sums = read_like("exp_sums", exp_sums, query, "query", _FLOAT32, shape, f"{symbols}]")
    max_logits = read_like("max_logits", max_logits, query, "query", _FLOAT32, shape, f"{symbols}]")
    shape = (*shape, query.shape[2])
    tmp_out = read_like("tmp_out", tmp_out, query, "query", (query.dtype,), shape, f"{symbols}, head_dim]")
    _check_aligned("tmp_out", tmp_out)
    return exp_sums, max_logits, tmp_out


def _launch_first(
    decision: Decision | None, facts: tuple[Any, ...], given: tuple[Any, ...], call: Call, fixed: dict[str, Any],
    request: Request, others: tuple[View | None, ...], spaces: _Spaces, returns_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Choose for a call that has passed its checks, keep the choice for alike calls, launch."""
    query, key_cache, value_cache, tables, lengths = call.inputs
    slopes, sinks, out, lse = others
    library, device, sizes = query.library, query.device, call.sizes
    assert device is not None
    fields = (*(call.steps | fixed).items(),)
    own = Own(gpu_of(query), request, fields, query.shape[1:], call.default_scale, returns_lse)
    aligned = min(query.alignment, key_cache.alignment, value_cache.alignment) == 16
    config = own.choose(sizes.seqs, sizes.max_blocks, aligned)
    # A stride does not matter to a call of up to one sequence, but to alike calls of more.
    dense = all(x is None or x.strides[0] == math.prod(x.shape[1:]) for x in (lengths, out, lse))
    if query.foreign is None and library.recorder is None and dense and query.strides[-1] == 1:
        if decision is None:
            decision = DECISIONS.keep(facts, given, library, device, own)
        decision.choices[sizes.seqs, sizes.max_blocks, aligned] = config
    read = tuple([0 if x is None else x.address for x in (*call.inputs, slopes, sinks, call.k_scale, call.v_scale)])
    attended, logs = launch(
        config, library, device, read, spaces, (tables.strides[0], call.factor, call.out_scale), query.shape,
        None if out is None else out.array, None if lse is None else lse.array, returns_lse,
    )  # fmt: skip
    return runtime.returned(attended, out, query), None if logs is None else runtime.returned(logs, lse, query)


def launch(
    config: Config, library: Library, device: int, read: tuple[int, ...], spaces: _Spaces,
    numbers: tuple[int, float, float], shape: tuple[int, ...], out: Any, lse: Any, returns_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Make the results that the caller does not give, and launch.

    `read` are the addresses of what is read, in the order of `FIELDS`. `numbers` are the stride of the block tables and
    the scales of scores and of the result, which has a `shape`.
    """
    if out is None:
        out = library.allocate(shape, config.dtype, device)
    if lse is None and returns_lse:
        lse = library.allocate(shape[:-1], "float32", device)
    grid, counters = config.grid, config.counters
    if grid[0]:
        partial, maxima, sums, partitions = spaces
        taken = arrived = 0
        if counters:
            # The array is held up to the last launch.
            _memory, parts = library.workspace(config.workspace, device)
            taken = parts[0]
            arrived = taken + 4
            if len(parts) > 1:
                _, partial, maxima, sums = parts
            runtime.launch(clearing(), library, device, (-(-counters // CLEARING), 1, 1), (taken, counters))
        table_row, scale, out_scale = numbers
        values = (
            *read, library.address(out), 0 if lse is None else library.address(lse), partial, maxima, sums, taken,
            arrived, table_row, *config.numbers, partitions, scale, out_scale,
        )  # of FIELDS  # fmt: skip
        runtime.launch(config, library, device, grid, values)
    return out, lse
