"""Find the kernel instances that a serving engine launches for a model.

`calls_of` derives the calls of cukern's functions from the model's sizes. Some sizes of a `Call` vary, such as the
number of tokens. `reached` returns the instances that a call launches for all values of these sizes. `launched` runs a
call's host code on descriptions of arrays, without a GPU.

The calls do not include exchanges between GPUs, beam search, penalties, or FP8 caches of keys and values.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

import cukern
from cukern.commands import UserError
from cukern.commands.models_of import NAMED, Model, models_of
from cukern.explain import _Call as _Described
from cukern.ops.moe_gemm.prepare import _prepared
from cukern.runtime import arrays, gpu, kernel
from cukern.runtime.compile import Instance
from cukern.runtime.progress import progress

#: The maximum number of tokens of a forward pass, and of sequences of a batch.
MOST = 16384
#: Tokens per page, in a cache of keys and values, and in a cache of latents.
PAGE, LATENT_PAGE = 16, 64
#: The numbers of GPUs that may share a model. Each GPU gets some attention heads, and either columns of every expert or
#: whole experts.
RANKS = (1, 2, 4, 8)
#: Query tokens per sequence in a step: 1 in plain decoding, more with draft tokens or chunked prefill.
_QUERY_TOKENS = (1, 2, 4, 8, 16)
#: The 16-bit kernel for few rows takes at most _DENSE_ROWS rows. Its calls pass min(rows, _DENSE_EXPECTED) as
#: `expected_m`.
_DENSE_ROWS, _DENSE_EXPECTED = 4, 2
_GROUP = 128  # elements per FP8 scale


class Axis(NamedTuple):
    """A varying size: `n * times + more` for n from 1 to `most`."""

    name: str
    most: int
    times: int = 1
    more: int = 0


class Spec(NamedTuple):
    dtype: str
    shape: tuple[int | Axis, ...]


class Call(NamedTuple):
    """A call of a public function. An optional call is skipped if the function raises."""

    function: str
    arguments: tuple[tuple[str, Any], ...]
    is_optional: bool = False

    @property
    def axes(self) -> dict[str, int]:
        specs = [value for _, value in self.arguments if isinstance(value, Spec)]
        return {size.name: size.most for spec in specs for size in spec.shape if isinstance(size, Axis)}

    def at(self, sizes: dict[str, int]) -> dict[str, Any]:
        return {name: _array(x, sizes) if isinstance(x, Spec) else x for name, x in self.arguments}


def _call(function: str, **arguments: Any) -> Call:
    return Call(function, tuple(arguments.items()))


def _array(spec: Spec, sizes: dict[str, int]) -> Any:
    return placeholder(
        spec.dtype, tuple(sizes[n.name] * n.times + n.more if isinstance(n, Axis) else n for n in spec.shape)
    )


@functools.lru_cache(1 << 12)
def placeholder(dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a NumPy array that occupies 64 bytes of memory, whatever its shape. Its elements must not be read."""
    kind = arrays.numpy_dtype(dtype)
    strides = [kind.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8).view(kind)[:1], shape, strides)


# --- the instances that calls launch --------------------------------------------------------------------


def launched(function: str, arguments: dict[str, Any], on: gpu.Gpu) -> frozenset[Instance]:
    """Return the instances that a call launches on a GPU. Raises the function's errors."""
    trace, _ = _Described(getattr(cukern, function), (), arguments).trace(on)
    return frozenset(step.variant.instance for step in trace.steps)


def _sweep(at: Callable[[int], frozenset[Instance]], points: set[int]) -> frozenset[Instance]:
    """Return the union of `at(n)` for all n between the smallest and largest of `points`.

    Bisects between points with different results. Adds two values of n to `points` for each change of the result: the
    last n before it, and the first n after it.
    """
    known = {n: at(n) for n in sorted(points)}
    pairs = list(itertools.pairwise(known))
    while pairs:
        first, last = pairs.pop()
        if known[first] == known[last]:
            continue
        if last - first == 1:
            points |= {first, last}
            continue
        middle = (first + last) // 2
        known[middle] = at(middle)
        pairs += (first, middle), (middle, last)
    return frozenset[Instance]().union(*known.values())


def reached(call: Call, on: gpu.Gpu) -> frozenset[Instance]:
    """Return the instances that a call launches on a GPU for all values of its varying sizes.

    The first varying size takes all values: `_sweep` starts from powers of two and their successors. A second varying
    size takes only powers of two and its maximum. Sizes for which the function raises are skipped. If the function
    raises even for the smallest sizes, the error is raised again, unless the call is optional.
    """
    axes = call.axes
    try:
        smallest = launched(call.function, call.at(dict.fromkeys(axes, 1)), on)
    except (TypeError, ValueError):
        if call.is_optional:
            return frozenset()
        raise
    if not axes:
        return smallest
    first, second = [*axes, ""][:2]
    powers = {name: [*(1 << i for i in range(most.bit_length())), most] for name, most in axes.items()}
    points = {n for power in powers[first] for n in (power, power + 1) if n <= axes[first]}

    def at(n: int, other: int) -> frozenset[Instance]:
        try:
            return launched(call.function, call.at({first: n, second: other}), on)
        except (TypeError, ValueError):
            return frozenset()

    def row(place: int) -> frozenset[Instance]:
        return _sweep(lambda n: at(n, powers[second][place]), points)

    if not second:
        return _sweep(lambda n: at(n, 1), points)
    end = len(powers[second]) - 1
    return _sweep(row, {0, end // 2, end})


def gpus_of(arch: str) -> list[gpu.Gpu]:
    """Return the GPUs to compile for: the architecture's reference GPU, and this machine's GPUs."""
    if arch not in gpu.BY_ARCH:
        raise UserError(f"--for takes --arch {', '.join(gpu.BY_ARCH)}, got {arch!r}")
    here = [found for found in map(gpu.of_device, range(kernel.device_count())) if found.arch == arch]
    return list(dict.fromkeys([gpu.BY_ARCH[arch], *here]))


def instances_of(models: Collection[Model], arch: str) -> list[Instance]:
    """Return the instances that serving these models launches on an architecture."""
    model_of: dict[Call, Model] = {}
    for model in models:
        for call in calls_of(model):
            model_of.setdefault(call, model)
    found, on = set[Instance](), gpus_of(arch) if models else []
    with progress(f"finding kernels for sm_{arch}", len(model_of)) as advance:
        for call, model in model_of.items():
            try:
                found.update(*(reached(call, each) for each in on))
            except (TypeError, ValueError) as error:
                raise UserError(f"--for {model.source}: {call.function} refuses its sizes: {error}") from None
            advance(1)
    return sorted(found, key=str)


def smallest_of(arch: str) -> Iterator[Instance]:
    """Yield the instances of the smallest calls of the models in `NAMED`."""
    for name in NAMED:
        for model in models_of(name):
            for call in calls_of(model):
                with contextlib.suppress(TypeError, ValueError):
                    yield from launched(call.function, call.at(dict.fromkeys(call.axes, 1)), gpu.BY_ARCH[arch])


# --- the calls of a model -------------------------------------------------------------------------------

TOKENS = Axis("tokens", MOST)
SEQUENCES = Axis("sequences", MOST)
_IDS, _FLOAT = "int32", "float32"


def calls_of(model: Model) -> Iterator[Call]:
    """Yield the calls that run a model on one GPU, and the calls that run it on several GPUs."""
    for ranks in RANKS:
        own = _of_rank(model, ranks)
        if own is None:
            continue
        groups = [_products(own), _attention(own), _experts(own)]
        if ranks == 1:
            groups += [_rows(own), _sampling(own), _gate(own)]
        for call in itertools.chain(*groups):
            yield call._replace(is_optional=call.is_optional or ranks > 1)


def _of_rank(model: Model, ranks: int) -> Model | None:
    """Return the sizes per GPU if `ranks` GPUs share the model; None if its heads cannot be divided among them."""
    if model.heads % ranks or (model.kv_heads % ranks and ranks % model.kv_heads):
        return None
    return model._replace(
        heads=model.heads // ranks,
        kv_heads=max(model.kv_heads // ranks, 1),
        inter=model.inter // ranks,
        expert_inter=model.expert_inter // ranks,
        local_experts=max(model.local_experts // ranks, 1),
    )


def _rows(m: Model) -> Iterator[Call]:
    yield _call("embedding_lookup", embedding_table=Spec(m.dtype, (m.vocab, m.hidden)), word_ids=Spec(_IDS, (TOKENS,)))
    widths = [m.hidden] + [rank for rank in (m.q_rank, m.kv_rank) if rank]
    for width in widths:
        rows, weight = Spec(m.dtype, (TOKENS, width)), Spec(m.dtype, (width,))
        yield _call("rms_norm", input=rows, weight=weight)
        yield _call("fused_add_rms_norm", input=rows, residual=rows, weight=weight)
        if m.quantization in ("fp8", "fp8_block"):
            group = {"group_size": _GROUP if m.quantization == "fp8_block" else None}
            yield _call("rms_norm_quant", input=rows, weight=weight, **group)
            yield _call("fused_add_rms_norm_quant", input=rows, residual=rows, weight=weight, **group)


def _products(m: Model) -> Iterator[Call]:
    """Yield the calls for linear layers and feed-forward activations."""
    sizes: list[tuple[int, int, str | None]]  # (result columns n, row length k, activation)
    if m.kind.is_latent:
        own = m.heads * (m.head_dim - m.rotary_dim)
        sizes = [
            (m.q_rank + m.kv_rank + m.rotary_dim, m.hidden, None),
            (m.heads * m.head_dim, m.q_rank, None),
            (2 * own, m.kv_rank, None),
            (m.hidden, own, None),
        ]
    else:
        sizes = [
            ((m.heads + 2 * m.kv_heads) * m.head_dim, m.hidden, None),
            (m.hidden, m.heads * m.head_dim, None),
        ]
    # Models with attention over latents have dense layers of two sizes: feed-forward (`inter`) and shared experts
    # (`expert_inter`).
    for inter in (m.inter, m.expert_inter) if m.kind.is_latent else () if m.experts else (m.inter,):
        sizes += [(2 * inter, m.hidden, m.kind.activation), (m.hidden, inter, None)]
        rows = Spec(m.dtype, (TOKENS, 2 * inter))
        yield _call("silu_and_mul", x=rows)
        if m.quantization in ("fp8", "fp8_block"):
            yield _call("silu_and_mul_quant", x=rows, group_size=_GROUP if m.quantization == "fp8_block" else None)
    for n, k, activation in sizes:
        if m.quantization in ("fp8", "fp8_block"):
            yield from _fp8_products(m, n, k)
        else:
            yield from _few_rows(m, n, k, activation)


def _few_rows(m: Model, n: int, k: int, activation: str | None) -> Iterator[Call]:
    """Yield the calls for a 16-bit linear layer in a decoding step."""
    bias = Spec(m.dtype, (1, n)) if m.has_attention_bias and activation is None else None
    for rows in range(1, _DENSE_ROWS + 1):
        yield _call(
            "moe_gemm", a=Spec(m.dtype, (rows, k)), b=Spec(m.dtype, (1, n, k)), expert_offsets=Spec(_IDS, (2,)),
            bias=bias, activation=activation, expected_m=min(rows, _DENSE_EXPECTED),
        )  # fmt: skip


def _fp8_products(m: Model, n: int, k: int) -> Iterator[Call]:
    """Yield the calls for an FP8 linear layer, and for quantizing its rows."""
    rows, blocks = Spec(m.dtype, (TOKENS, k)), -(-k // _GROUP)
    if m.quantization == "fp8_block":
        yield _call("per_token_group_quant_fp8", x=rows, group_size=_GROUP)
        scales = {"a_scale": Spec(_FLOAT, (TOKENS, blocks)), "b_scale": Spec(_FLOAT, (1, -(-n // _GROUP), blocks))}
    else:
        yield _call("scaled_fp8_quant", input=rows, use_per_token_if_dynamic=True)
        scales = {"a_scale": Spec(_FLOAT, (TOKENS,)), "b_scale": Spec(_FLOAT, (1,))}
    yield _call(
        "moe_gemm", a=Spec("float8_e4m3fn", (TOKENS, k)), b=Spec("float8_e4m3fn", (1, n, k)),
        expert_offsets=Spec(_IDS, (2,)), out_dtype=m.dtype, **scales,
    )  # fmt: skip


# --- experts --------------------------------------------------------------------------------------------


def _gate(m: Model) -> Iterator[Call]:
    """Yield the calls for the gate and for sorting tokens by expert."""
    if not m.experts:
        return
    weights, ids = Spec(_FLOAT, (TOKENS, m.topk)), Spec(_IDS, (TOKENS, m.topk))
    for dtype in dict.fromkeys((m.dtype, _FLOAT)):
        logits = Spec(dtype, (TOKENS, m.experts))
        if m.kind.scoring == "softmax":
            yield _call("topk_softmax", topk_weights=weights, topk_ids=ids, gating_output=logits, renormalize=True)
        else:
            yield _call(
                "moe_fused_gate", input=logits, bias=Spec(_FLOAT, (m.experts,)), num_expert_group=m.groups,
                topk_group=m.topk_group, topk=m.topk, scoring_func=m.kind.scoring,
            )  # fmt: skip
    rows, pairs = Spec(m.dtype, (TOKENS, m.hidden)), Axis("tokens", MOST, m.topk)
    yield _call("moe_align_block_size", topk_ids=ids, block_size=64, num_experts=m.experts)
    yield _call("moe_permute", hidden_states=rows, a1q_scale=None, topk_ids=ids, n_expert=m.experts)
    yield _call(
        "moe_unpermute", out=rows, permuted_hidden_states=Spec(m.dtype, (pairs, m.hidden)), topk_weights=weights,
        inv_permuted_idx=Spec(_IDS, (pairs,)),
    )  # fmt: skip
    yield _call("moe_sum", input=Spec(m.dtype, (TOKENS, m.topk, m.hidden)))


def _experts(m: Model) -> Iterator[Call]:
    """Yield the calls for the mixture-of-experts layer.

    A rank gets either columns of every expert, or whole experts and an expert map.
    """
    if not m.experts:
        return
    yield from _layers(m._replace(local_experts=m.experts))
    if m.local_experts < m.experts:
        yield from _layers(m._replace(expert_inter=m.expert_inter * (m.experts // m.local_experts)))


def _layers(m: Model) -> Iterator[Call]:
    """Yield the calls of `fused_experts`, with checkpoint weights and with prepared weights."""
    both, inter = 2 * m.expert_inter, m.expert_inter
    common: dict[str, Any] = {
        "hidden_states": Spec(m.dtype, (TOKENS, m.hidden)),
        "topk_weights": Spec(_FLOAT, (TOKENS, m.topk)),
        "topk_ids": Spec(_IDS, (TOKENS, m.topk)),
        "activation": m.kind.activation,
    }
    if m.local_experts < m.experts:
        common["expert_map"] = Spec(_IDS, (m.experts,))
    if m.kind.is_biased:
        common |= {"w1_bias": Spec(m.dtype, (m.local_experts, both)), "interleaved": True}
        common["w2_bias"] = Spec(m.dtype, (m.local_experts, m.hidden))
    sizes = {"w1": (m.local_experts, both, m.hidden), "w2": (m.local_experts, m.hidden, inter)}
    if m.quantization == "mxfp4":
        yield from _mxfp4_layers(sizes, common)
        return
    dtype = "float8_e4m3fn" if m.quantization else m.dtype
    weights = {name: Spec(dtype, shape) for name, shape in sizes.items()}
    if m.quantization == "fp8_block":
        for name, (experts, n, k) in sizes.items():
            weights[f"{name}_scale"] = Spec(_FLOAT, (experts, -(-n // _GROUP), -(-k // _GROUP)))
    elif m.quantization == "fp8":
        weights |= {f"{name}_scale": Spec(_FLOAT, (shape[0],)) for name, shape in sizes.items()}
    yield _call("fused_experts", **weights, **common, quant=m.quantization)


def _mxfp4_layers(sizes: dict[str, tuple[int, int, int]], common: dict[str, Any]) -> Iterator[Call]:
    packed = {name: Spec("uint8", (experts, n, k // 2)) for name, (experts, n, k) in sizes.items()}
    scales = {f"{name}_scale": Spec("uint8", (experts, n, k // 32)) for name, (experts, n, k) in sizes.items()}
    yield _call("fused_experts", **packed, **scales, **common, quant="mxfp4")
    for a_dtype, quant in ((None, "mxfp4"), ("float8_e4m3fn", "mxfp4_fp8")):
        prepared = {}
        for name, weights in packed.items():
            scale = scales[f"{name}_scale"]
            call = _call("prepare_weights", b=weights, b_scale=scale, a_dtype=a_dtype)
            yield call._replace(is_optional=True)
            prepared[name] = Spec("uint8", _prepared(weights, scale, a_dtype=a_dtype).shape)
        yield _call("fused_experts", **prepared, **common, quant=quant)._replace(is_optional=True)


# --- attention ------------------------------------------------------------------------------------------


def _attention(m: Model) -> Iterator[Call]:
    yield from _latent_attention(m) if m.kind.is_latent else _paged_attention(m)


def _pages(m: Model, page: int) -> Axis:
    return Axis("pages", -(-m.positions // page))


def _paged_attention(m: Model) -> Iterator[Call]:
    """Yield the calls that fill a paged KV cache and attend to it."""
    heads, kv = (Spec(m.dtype, (TOKENS, n, m.head_dim)) for n in (m.heads, m.kv_heads))
    slots, blocks = Spec("int64", (TOKENS,)), -(-m.positions // PAGE)
    flash = Spec(m.dtype, (blocks, PAGE, m.kv_heads, m.head_dim))
    each = 16 // arrays.ITEM_SIZE[m.dtype]
    keys = Spec(m.dtype, (blocks, m.kv_heads, m.head_dim // each, PAGE, each))
    values = Spec(m.dtype, (blocks, m.kv_heads, m.head_dim, PAGE))
    norm: dict[str, Any] = {}
    if m.kind.norms_heads:
        weight = Spec(m.dtype, (m.head_dim,))
        norm = {"q_weight": weight, "k_weight": weight, "epsilon": 1e-6}
        yield from (_call("rms_norm", input=x, weight=weight) for x in (heads, kv))
    for dtype in dict.fromkeys((m.dtype, _FLOAT)):
        angles = Spec(dtype, (TOKENS, m.head_dim))
        yield _call("rotary_embedding", query=heads, key=kv, cos=angles, sin=angles)
        fused = _call(
            "fused_qk_norm_rope_and_cache", query=heads, key=kv, value=kv, cos=angles, sin=angles, key_cache=flash,
            value_cache=flash, slot_mapping=slots, **norm,
        )  # fmt: skip
        yield fused._replace(is_optional=True)  # supports fewer head sizes than the functions that it replaces
    stored = {"key": kv, "value": kv, "slot_mapping": slots, "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    yield _call("reshape_and_cache_flash", **stored, key_cache=flash, value_cache=flash)
    yield _call("reshape_and_cache", **stored, key_cache=keys, value_cache=values)
    yield from _prefill(m, heads, kv)
    options: dict[str, Any] = {"window": m.window}
    if m.kind.has_sinks:
        options["sinks"] = Spec(_FLOAT, (m.heads,))
    for (layout, cache), count in itertools.product((("flash", (flash,) * 2), ("vllm", (keys, values))), _QUERY_TOKENS):
        yield _call(
            "paged_attention", query=Spec(m.dtype, (SEQUENCES, count, m.heads, m.head_dim)), key_cache=cache[0],
            value_cache=cache[1], block_tables=Spec(_IDS, (SEQUENCES, _pages(m, PAGE))),
            seq_lens=Spec(_IDS, (SEQUENCES,)), layout=layout, **options,
        )  # fmt: skip


def _prefill(m: Model, heads: Spec, kv: Spec) -> Iterator[Call]:
    """Yield the calls for attention within whole sequences, and for merging it with the attention to earlier tokens."""
    sums, lse = Spec(_IDS, (Axis("sequences", MOST, 1, 1),)), Spec(_FLOAT, (TOKENS, m.heads))
    yield _call("varlen_attention", q=heads, k=kv, v=kv, cu_seqlens_q=sums, causal=True)
    yield _call("merge_attention_states", out_a=heads, lse_a=lse, out_b=heads, lse_b=lse)


def _latent_attention(m: Model) -> Iterator[Call]:
    """Yield the calls that fill a paged cache of latents and attend to it."""
    latent, width = m.kv_rank, m.kv_rank + m.rotary_dim
    blocks, slots = -(-m.positions // LATENT_PAGE), Spec("int64", (TOKENS,))
    for dtype, layout in itertools.product(dict.fromkeys((m.dtype, _FLOAT)), ("interleaved", "deinterleaved")):
        angles = Spec(dtype, (TOKENS, m.rotary_dim))
        query, key = (Spec(m.dtype, (TOKENS, n, m.rotary_dim)) for n in (m.heads, 1))
        yield _call("rotary_embedding", query=query, key=key, cos=angles, sin=angles, layout=layout)
    caches = {"auto": Spec(m.dtype, (blocks, LATENT_PAGE, width))}
    if (latent, m.rotary_dim) == (512, 64):
        caches["fp8_ds_mla"] = Spec("uint8", (blocks, LATENT_PAGE, 656))
    lengths, table = Spec(_IDS, (SEQUENCES,)), Spec(_IDS, (SEQUENCES, _pages(m, LATENT_PAGE)))
    for kind, cache in caches.items():
        yield _call(
            "concat_and_cache_mla", kv_c=Spec(m.dtype, (TOKENS, latent)), k_pe=Spec(m.dtype, (TOKENS, m.rotary_dim)),
            kv_cache=cache, slot_mapping=slots, kv_cache_dtype=kind, scale=1.0,
        )  # fmt: skip
        yield _call(
            "gather_cache", src_cache=cache, dst=Spec(m.dtype, (TOKENS, width)),
            block_table=Spec(_IDS, (1, blocks)), cu_seq_lens=Spec(_IDS, (2,)), batch_size=1, kv_cache_dtype=kind,
        )  # fmt: skip
        pages = Spec(cache.dtype, (blocks, LATENT_PAGE, 1, cache.shape[-1]))
        for count in _QUERY_TOKENS:
            yield _call(
                "flash_mla_with_kvcache", q=Spec(m.dtype, (SEQUENCES, count, m.heads, width)), k_cache=pages,
                block_table=table, cache_seqlens=lengths, head_dim_v=latent, tile_scheduler_metadata=None,
                num_splits=None, causal=True, is_fp8_kvcache=kind != "auto",
            )  # fmt: skip
    heads = Spec(m.dtype, (TOKENS, m.heads, m.head_dim))
    yield from _prefill(m, heads, heads)


# --- sampling -------------------------------------------------------------------------------------------


def _sampling(m: Model) -> Iterator[Call]:
    filters: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}]
    for dtype in dict.fromkeys((m.dtype, _FLOAT)):
        logits = Spec(dtype, (SEQUENCES, m.vocab))
        yield from (_call("sample", logits=logits, seed=0, **own) for own in filters)
        yield _call("softmax", logits=logits)
    probs = Spec(_FLOAT, (SEQUENCES, m.vocab))
    yield _call("top_k_top_p_sampling_from_probs", probs=probs, top_k=50, top_p=0.9, seed=0)
