"""`cukern.compat.flash_attn`: the functions of FlashAttention 2 and 3 and of vLLM against a formula in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cukern.compat import flash_attn  # noqa: E402
from cukern.compat.flash_attn import flash_attn_3, vllm_flash_attn  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 64
Tensor = Any
Place = tuple[str, Any]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    return request.param, torch.float32 if request.param == "cpu" else torch.bfloat16


def rand(place: Place, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(*place)


def ints(place: Place, numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=place[0])


def close(found: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-5 if found.device.type == "cpu" else 1e-4 if found.dtype == torch.float32 else 2e-2
    assert found.shape == wanted.shape and found.is_contiguous()
    torch.testing.assert_close(found.double().cpu(), wanted, atol=tolerance, rtol=tolerance)


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor = None,
) -> tuple[Tensor, Tensor]:
    """Return out [n, heads, dim_v] and lse [heads, n] for q [n, heads, dim] and k and v [m, kv_heads, ...]."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    (n, heads, dim), m = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (dim**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    after = torch.arange(m) - torch.arange(n)[:, None] - m + n  # how far a key is after the query's position
    right = 0 if causal else window[1]
    if right >= 0:
        scores = scores.masked_fill(after > right, -torch.inf)
    if window[0] >= 0:
        scores = scores.masked_fill(after < -window[0], -torch.inf)
    every = scores if sinks is None else torch.cat([scores, sinks.double().cpu()[:, None, None].expand(-1, n, 1)], 2)
    lse = torch.logsumexp(every, 2)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return torch.einsum("hnm,mhd->nhd", weights, v), lse


def pairs(found: Tensor, lse: Tensor, each: list[tuple[Tensor, Tensor]], by_batch: bool) -> None:
    """Compare a result with the formula's results of each sequence."""
    outs, all_lse = zip(*each, strict=True)
    close(found, torch.stack(outs) if by_batch else torch.cat(outs))
    assert lse.dtype == torch.float32
    close(lse, torch.stack(all_lse) if by_batch else torch.cat(all_lse, 1))


# --- dense batches --------------------------------------------------------------------------------------

#: Options of FlashAttention, and the same options of the formula.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "scale": ({"softmax_scale": 0.3}, {"scale": 0.3}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (3, 2)}, {"window": (3, 2)}),
    "causal window": ({"window_size": (3, -1), "causal": True}, {"window": (3, -1), "causal": True}),
    "softcap": ({"softcap": 2.0, "causal": True}, {"softcap": 2.0, "causal": True}),
}


@pytest.mark.parametrize(("options", "of_formula"), OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(5, 5), (4, 9), (7, 3)])
def test_dense(place: Place, lengths: tuple[int, int], options: dict[str, Any], of_formula: dict[str, Any]) -> None:
    q = rand(place, 3, lengths[0], HEADS, DIM)
    k, v = (rand(place, 3, lengths[1], KV_HEADS, dim, seed=i) for i, dim in ((1, DIM), (2, 32)))
    wanted = [formula(*x, **of_formula) for x in zip(q, k, v, strict=True)]
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    pairs(out, lse, wanted, True)
    assert probabilities.shape == (0,) and probabilities.dtype == q.dtype
    out, lse = flash_attn_3.flash_attn_func(q, k, v, **options, return_attn_probs=True, num_splits=3, pack_gqa=True)
    pairs(out, lse, wanted, True)
    for module in (flash_attn, flash_attn_3):
        assert torch.equal(module.flash_attn_func(q, k, v, **options), out)


def test_dense_with_heads_before_tokens(place: Place) -> None:
    q, k, v = (rand(place, 2, heads, 6, DIM, seed=heads).transpose(1, 2) for heads in (HEADS, KV_HEADS, KV_HEADS))
    close(flash_attn.flash_attn_func(q, k, v), torch.stack([formula(*x)[0] for x in zip(q, k, v, strict=True)]))
    columns = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(flash_attn_3.flash_attn_func(columns, k, v), flash_attn.flash_attn_func(q, k, v))


def test_no_tokens(place: Place) -> None:
    q, k = rand(place, 0, 5, HEADS, DIM), rand(place, 2, 0, KV_HEADS, DIM)
    assert flash_attn.flash_attn_func(q, q, q).shape == q.shape
    out, lse = flash_attn_3.flash_attn_func(rand(place, 2, 5, HEADS, DIM), k, k, return_attn_probs=True)
    assert (out == 0).all() and (lse == -torch.inf).all() and lse.shape == (2, HEADS, 5)


# --- sequences of several lengths -----------------------------------------------------------------------

STARTS, KEY_STARTS = [0, 3, 3, 8], [0, 4, 6, 19]


def ragged(place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (rand(place, n, heads, DIM, seed=n) for n, heads in ((8, HEADS), (19, KV_HEADS), (19, KV_HEADS)))
    return q, k, v.flip(0), ints(place, STARTS), ints(place, KEY_STARTS)


def each_formula(q: Tensor, keys: list[tuple[Tensor, Tensor]], **options: Any) -> list[tuple[Tensor, Tensor]]:
    queries = [q[a:b] for a, b in pairwise(STARTS)]
    return [formula(x, *kv, **options) for x, kv in zip(queries, keys, strict=True)]


def packed_keys(k: Tensor, v: Tensor, used: tuple[int, ...] = (99, 99, 99)) -> list[tuple[Tensor, Tensor]]:
    ranges = [slice(a, min(a + n, b)) for (a, b), n in zip(pairwise(KEY_STARTS), used, strict=True)]
    return [(k[keys], v[keys]) for keys in ranges]


@pytest.mark.parametrize(("options", "of_formula"), OPTIONS.values(), ids=OPTIONS)
def test_varlen(place: Place, options: dict[str, Any], of_formula: dict[str, Any]) -> None:
    q, k, v, *starts = ragged(place)
    wanted = each_formula(q, packed_keys(k, v), **of_formula)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *starts, 5, 13, **options, return_attn_probs=True)
    pairs(out, lse, wanted, False)
    out, lse = flash_attn_3.flash_attn_varlen_func(q, k, v, *starts, 5, 13, **options, return_attn_probs=True)
    pairs(out, lse, wanted, False)
    out, lse = vllm_flash_attn.flash_attn_varlen_func(
        q, k, v, 5, starts[0], 13, starts[1], **options, return_softmax_lse=True, fa_version=3
    )
    pairs(out, lse, wanted, False)


def test_varlen_with_keys_that_are_not_used(place: Place) -> None:
    q, k, v, *starts = ragged(place)
    used = 2, 0, 9
    found = flash_attn_3.flash_attn_varlen_func(
        q, k, v, *starts, 5, 9, seqused_k=ints(place, used), return_attn_probs=True
    )
    pairs(*found, each_formula(q, packed_keys(k, v, used)), False)


def pages(place: Place, page_size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return a cache whose keys and values share one tensor, and its block table."""
    both = rand(place, 9, page_size, KV_HEADS, 2 * DIM, seed=3)
    return *both.split(DIM, -1), ints(place, [[4, 7, 1], [0, 0, 0], [8, 2, 5]])


def paged_keys(k_cache: Tensor, v_cache: Tensor, table: Tensor, used: list[int]) -> list[tuple[Tensor, Tensor]]:
    rows = [[cache[row.long()].flatten(0, 1) for cache in (k_cache, v_cache)] for row in table]
    return [(k[:n], v[:n]) for (k, v), n in zip(rows, used, strict=True)]


@pytest.mark.parametrize(("options", "of_formula"), OPTIONS.values(), ids=OPTIONS)
def test_vllm_over_pages(place: Place, options: dict[str, Any], of_formula: dict[str, Any]) -> None:
    q, starts, used = rand(place, 8, HEADS, DIM), ints(place, STARTS), [13, 0, 22]
    k_cache, v_cache, table = pages(place)
    sinks = rand(place, HEADS, seed=5)
    out, scales = torch.empty_like(q), torch.ones(3, KV_HEADS, device=place[0])
    found, lse = vllm_flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, 5, starts, 22, seqused_k=ints(place, used), block_table=table, out=out, s_aux=sinks,
        q_descale=scales, k_descale=scales, v_descale=scales, num_splits=2, fa_version=3, return_softmax_lse=True,
        **options,
    )  # fmt: skip
    assert found is out
    pairs(out, lse, each_formula(q, paged_keys(k_cache, v_cache, table, used), sinks=sinks, **of_formula), False)


def test_vllm_writes_into_out(place: Place) -> None:
    q, k, v, *starts = ragged(place)
    out, lists = torch.empty_like(q), {"window_size": [2, 0]}
    found = vllm_flash_attn.flash_attn_varlen_func(q, k, v, 5, starts[0], 13, starts[1], out=out, **lists)
    assert found is out
    close(out, torch.cat([x for x, _ in each_formula(q, packed_keys(k, v), window=(2, 0))]))


def test_flash_attention_2_over_pages(place: Place) -> None:
    q, starts, used = rand(place, 8, HEADS, DIM), ints(place, STARTS), [13, 2, 22]
    k_cache, v_cache, table = pages(place)
    found = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, starts, ints(place, [0, 13, 15, 37]), 5, 22, causal=True, block_table=table
    )
    wanted = each_formula(q, paged_keys(k_cache, v_cache, table, used), causal=True)
    close(found, torch.cat([x for x, _ in wanted]))


# --- caches ---------------------------------------------------------------------------------------------

MODULES = pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])


def with_kvcache(module: Any, *args: Any, table: Tensor = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Call a module's function. Return the result and its lse."""
    options["block_table" if module is flash_attn else "page_table"] = table
    out = module.flash_attn_with_kvcache(*args, **options)
    again, lse, *of_splits = module.flash_attn_with_kvcache(*args, **options, return_softmax_lse=True)
    assert torch.equal(again, out)
    assert [x.numel() for x in of_splits] == ([] if module is flash_attn else [0, 0])
    return out, lse


@MODULES
@pytest.mark.parametrize(("options", "of_formula"), OPTIONS.values(), ids=OPTIONS)
def test_a_cache_of_pages(module: Any, place: Place, options: dict[str, Any], of_formula: dict[str, Any]) -> None:
    q, used = rand(place, 3, 2, HEADS, DIM), [13, 5, 20]
    k, v = (rand(place, 3, 4, KV_HEADS, DIM, seed=i) for i in (6, 7))
    k_cache, v_cache, table = pages(place)
    table[1, :2] = ints(place, [3, 6])
    wanted_caches = k_cache.clone(), v_cache.clone()
    for i, n in enumerate(used):
        for j in range(4):
            page, slot = int(table[i, (n + j) // 8]), (n + j) % 8
            for cache, new in zip(wanted_caches, (k, v), strict=True):
                cache[page, slot] = new[i, j]
    found = with_kvcache(module, q, k_cache, v_cache, k, v, cache_seqlens=ints(place, used), table=table, **options)
    assert torch.equal(k_cache, wanted_caches[0]) and torch.equal(v_cache, wanted_caches[1])
    keys = paged_keys(k_cache, v_cache, table, [n + 4 for n in used])
    pairs(*found, [formula(x, *kv, **of_formula) for x, kv in zip(q, keys, strict=True)], True)


@MODULES
@pytest.mark.parametrize("length", [11, 16])
@pytest.mark.parametrize("rows", [None, [4, 0]])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_cache_of_rows(module: Any, place: Place, length: int, rows: list[int] | None, is_part: bool) -> None:
    """A row may have any length if the rows follow each other in memory, else a multiple of 8."""
    q, used, of_batch = rand(place, 2, 1, HEADS, DIM), [9, 3], rows or [0, 1]
    k, v = (rand(place, 2, 1, KV_HEADS, DIM, seed=i) for i in (6, 7))
    count = 5 if rows else 2
    k_cache, v_cache = (rand(place, count, length + 3 * is_part, KV_HEADS, DIM, seed=i)[:, :length] for i in (1, 2))
    index = None if rows is None else ints(place, rows)
    calls = {"cache_seqlens": ints(place, used), "cache_batch_idx": index, "causal": True}
    if length % 8 and (rows or is_part):
        with pytest.raises(NotImplementedError, match="k_cache must be of pages, or of rows, of a multiple of 8"):
            with_kvcache(module, q, k_cache, v_cache, **calls)
        return
    wanted_caches = k_cache.clone(), v_cache.clone()
    for i, row in enumerate(of_batch):
        for cache, new in zip(wanted_caches, (k, v), strict=True):
            cache[row, used[i]] = new[i, 0]
    found = with_kvcache(module, q, k_cache, v_cache, k, v, **calls)
    assert torch.equal(k_cache, wanted_caches[0]) and torch.equal(v_cache, wanted_caches[1])
    keys = [[cache[row, : used[i] + 1] for cache in (k_cache, v_cache)] for i, row in enumerate(of_batch)]
    pairs(*found, [formula(x, *kv) for x, kv in zip(q, keys, strict=True)], True)


@MODULES
def test_lengths_of_a_cache(module: Any, place: Place) -> None:
    """A number is the length of all sequences, and without lengths all of the cache is used."""
    q = rand(place, 2, 3, HEADS, DIM)
    k_cache, v_cache = (rand(place, 2, 16, KV_HEADS, DIM, seed=i) for i in (1, 2))
    for used in (7, None):
        keys = [(k[:used], v[:used]) for k, v in zip(k_cache, v_cache, strict=True)]
        found = with_kvcache(module, q, k_cache, v_cache, cache_seqlens=used)
        pairs(*found, [formula(x, *kv) for x, kv in zip(q, keys, strict=True)], True)
    with pytest.raises(ValueError, match="cache_seqlens must be given with k, got None"):
        module.flash_attn_with_kvcache(q, k_cache, v_cache, k_cache, v_cache)
    with pytest.raises(ValueError, match="v must be given with k, got None"):
        module.flash_attn_with_kvcache(q, k_cache, v_cache, k_cache, cache_seqlens=0)
    with pytest.raises(ValueError, match="k_cache must be of 1 rows, like q, got 2"):
        module.flash_attn_with_kvcache(q[:1], k_cache, v_cache)


def test_tokens_past_the_end_of_a_cache_are_not_stored(place: Place) -> None:
    q, (k_cache, v_cache) = rand(place, 2, 2, HEADS, DIM), (rand(place, 2, 8, KV_HEADS, DIM, seed=i) for i in (1, 2))
    k, before = rand(place, 2, 2, KV_HEADS, DIM), k_cache.clone()
    flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=ints(place, [7, 0]))
    before[0, 7], before[1, :2] = k[0, 0], k[1]
    assert torch.equal(k_cache, before)


def test_a_cache_with_ragged_queries_and_keys(place: Place) -> None:
    q, starts, used, new = rand(place, 8, HEADS, DIM), ints(place, STARTS), [13, 5, 20], [0, 2, 2, 5]
    k, v = (rand(place, 5, KV_HEADS, DIM, seed=i) for i in (6, 7))
    k_cache, v_cache, table = pages(place)
    table = torch.cat([table[2:], table, table[:2]])  # the sequences are rows 1 to 3
    table[2, 0] = 3
    found = with_kvcache(
        flash_attn_3, q, k_cache, v_cache, k, v, cache_seqlens=ints(place, used), table=table, cu_seqlens_q=starts,
        cu_seqlens_k_new=ints(place, new), max_seqlen_q=5, cache_batch_idx=ints(place, [1, 2, 3]), causal=True,
    )  # fmt: skip
    lengths = [n + b - a for n, (a, b) in zip(used, pairwise(new), strict=True)]
    keys = paged_keys(k_cache, v_cache, table[1:4], lengths)
    assert torch.equal(keys[0][0][13:], k[:2]) and torch.equal(keys[2][1][20:], v[2:])
    pairs(*found, each_formula(q, keys, causal=True), False)


@pytest.mark.gpu
def test_a_cuda_graph() -> None:
    """A captured call keeps no memory of the graph for later calls."""
    place = "cuda", torch.bfloat16
    q, k, v = (rand(place, 2, 21, heads, DIM, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    flash_attn.flash_attn_func(q[:, :20], k[:, :20], v[:, :20])  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn.flash_attn_func(q, k, v)
    found = flash_attn.flash_attn_func(q, k, v)
    graph.replay()
    assert torch.equal(out, found)


# --- what is refused ------------------------------------------------------------------------------------

X, S = torch.zeros(1, 8, 2, 16), torch.tensor([0, 8], dtype=torch.int32)
P, ONE, FP8 = X[0], torch.ones(1), torch.zeros(8, 2, 16).to(torch.float8_e4m3fn)
DENSE, CACHE, VARLEN, VLLM = (X, X, X), (X, X, X), (P, P, P, S, S, 8, 8), (P, P, P, 8, S, 8, S)
F, FV, FK = "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"
REFUSED: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = [
    (flash_attn, F, DENSE, {"dropout_p": 0.1}),
    (flash_attn, F, DENSE, {"alibi_slopes": ONE}),
    (flash_attn, FV, VARLEN, {"dropout_p": 0.1}),
    (flash_attn, FV, VARLEN, {"alibi_slopes": ONE}),
    *((flash_attn, FK, CACHE, {x: ONE}) for x in ("rotary_cos", "rotary_sin", "cache_leftpad", "alibi_slopes")),
    (flash_attn_3, F, DENSE, {"qv": X}),
    (flash_attn_3, F, DENSE, {"attention_chunk": 4}),
    (flash_attn_3, FV, VARLEN, {"seqused_q": ONE}),
    (flash_attn_3, FV, VARLEN, {"qv": P}),
    (flash_attn_3, FV, VARLEN, {"attention_chunk": 4}),
    *((flash_attn_3, FK, CACHE, {x: ONE}) for x in ("qv", "rotary_cos", "rotary_sin", "cache_leftpad")),
    (flash_attn_3, FK, CACHE, {"attention_chunk": 4}),
    (vllm_flash_attn, FV, VLLM, {"dropout_p": 0.1}),
    (vllm_flash_attn, FV, VLLM, {"cp_world_size": 2}),
    *(
        (vllm_flash_attn, FV, VLLM, {x: ONE})
        for x in (
            "q_v", "alibi_slopes", "output_scale", "cp_tot_seqused_k", "mask_mod", "aux_tensors", "dynamic_causal",
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "args", "refused"), REFUSED)
def test_what_is_refused(module: Any, name: str, args: tuple[Any, ...], refused: dict[str, Any]) -> None:
    getattr(module, name)(*args)
    (argument,) = refused
    with pytest.raises(NotImplementedError, match=rf"^{name}: {argument} must be .* with cukern, got "):
        getattr(module, name)(*args, **refused)


def test_float8_is_refused() -> None:
    says = r"must be of float16, bfloat16 or float32 with cukern, got torch\.float8_e4m3fn$"
    with pytest.raises(NotImplementedError, match=f"^{FV}: k {says}"):
        vllm_flash_attn.flash_attn_varlen_func(P, FP8, FP8, 8, S, 8, S, k_descale=ONE, v_descale=ONE)
    with pytest.raises(NotImplementedError, match=f"^{F}: v {says}"):
        flash_attn_3.flash_attn_func(X, X, FP8[None])
    with pytest.raises(NotImplementedError, match=f"^{FK}: k_cache {says}"):
        flash_attn_3.flash_attn_with_kvcache(X, FP8[None], FP8[None])


@pytest.mark.parametrize("name", [F, FV, FK])
@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_there_is_no_backward(module: Any, name: str) -> None:
    args = [x.clone() if x is X or x is P else x for x in (VARLEN if name == FV else DENSE)]
    args[1].requires_grad_()
    with pytest.raises(RuntimeError, match="k must be a tensor that does not require grad"):
        getattr(module, name)(*args)
    with torch.no_grad():
        getattr(module, name)(*args)


def test_arguments_that_only_tune_are_ignored() -> None:
    tuned = {"num_splits": 4, "pack_gqa": True, "sm_margin": 8}
    assert torch.equal(flash_attn_3.flash_attn_func(*DENSE, **tuned, deterministic=True), X)
    assert torch.equal(flash_attn_3.flash_attn_with_kvcache(*CACHE, **tuned, scheduler_metadata=ONE.int()), X)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(*CACHE, num_splits=4), X)
    more = {"num_splits": 4, "scheduler_metadata": ONE.int(), "fa_version": 4, "deterministic": True}
    assert torch.equal(vllm_flash_attn.flash_attn_varlen_func(*VLLM, **more), P)
