"""Time the paged KV cache beside PyTorch's indexing, with precomputed indices, and vLLM's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.reference.kv_cache import ENTRY, GROUP, LATENTS, ROTARY, ROTARY_AT, SCALES_AT
from cukern.runtime.arrays import ITEM_SIZE

BLOCK_SIZE = 16
DS_MLA = "fp8_ds_mla"
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Sizes(NamedTuple):
    tokens: int
    kv_heads: int = 8
    head_dim: int = 128
    cache: str = "auto"  # kv_cache_dtype
    slots: str = "prefill"
    dtype: str = "bfloat16"

    @property
    def blocks(self) -> int:
        """Blocks of the cache, twice the number needed. Each token of a decoding step has its own block."""
        return 2 * (self.tokens if self.slots == "decode" else -(-self.tokens // BLOCK_SIZE))

    @property
    def kind(self) -> torch.dtype:
        return FP8[self.cache] if self.cache != "auto" else getattr(torch, self.dtype)

    @property
    def moved(self) -> int:
        """Bytes read and written per element."""
        return ITEM_SIZE[self.dtype] + (1 if self.cache != "auto" else ITEM_SIZE[self.dtype])


PREFILL, DECODE = Sizes(8192), Sizes(64, slots="decode")


def slot_mapping(sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Return slots in shuffled blocks. "prefill" fills all blocks; "ragged" sequences end inside a block."""
    device = generator.device
    blocks = torch.randperm(sizes.blocks, generator=generator, device=device)
    if sizes.slots == "decode":
        places = torch.randint(0, BLOCK_SIZE, (sizes.tokens,), generator=generator, device=device)
        return blocks[: sizes.tokens] * BLOCK_SIZE + places
    tokens = torch.arange(sizes.tokens, device=device)
    if sizes.slots == "ragged":
        # Sequences of 1003 tokens, whose last block is not full.
        within = tokens % 1003
        return blocks[tokens // 1003 * 63 + within // BLOCK_SIZE] * BLOCK_SIZE + within % BLOCK_SIZE
    return blocks[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE


def _random(generator: torch.Generator, sizes: Sizes, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(getattr(torch, sizes.dtype))


def _stored(x: torch.Tensor, kind: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    if x.dtype == kind:
        return x
    largest = torch.finfo(kind).max
    return (x.float() / scale).clamp(-largest, largest).to(kind)


def _bits(x: torch.Tensor) -> torch.Tensor:
    # torch cannot index or compare FP8 arrays.
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def agree(ours: Any, theirs: Any) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(ours, theirs, strict=True))


def _baseline(function: Callable[..., Any]) -> Baseline:
    return Baseline(lambda: function)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _case(
    op: str,
    sizes: Sizes,
    inputs: Callable[[torch.Generator], tuple[Any, ...]],
    call: Callable[..., Any],
    size: int,
    baselines: Mapping[str, Baseline],
    peers: Mapping[str, Baseline],
    host: bool = False,
    **named: int | str,
) -> Case:
    case: dict[str, int | str] = {"tokens": sizes.tokens, **named, "block_size": BLOCK_SIZE, "cache": sizes.cache}
    case |= {"slots": sizes.slots, "dtype": sizes.dtype}
    return Case(op, case, "dynamic", inputs, call, size, baselines=baselines, peers=peers, agree=agree, host=host)


def _vllm(name: str) -> Callable[..., Any]:
    """Return a function of vLLM 0.26, or raise ImportError if this version does not have it."""
    function = getattr(importlib.import_module("vllm._custom_ops"), name, None)
    if function is None:
        raise ImportError(f"this version of vLLM has no {name}")
    return function


# --- one function after the other ---------------------------------------------------------------------


def _scales(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.full((1,), x, device=generator.device) for x in (0.03, 0.05)]


def _reshape(sizes: Sizes, flash: bool, compared: bool = False) -> Case:
    tokens, heads, dim, blocks = sizes.tokens, sizes.kv_heads, sizes.head_dim, sizes.blocks
    x = 16 // sizes.kind.itemsize

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        key, value = (_random(generator, sizes, tokens, heads, dim) for _ in range(2))
        shapes = [(blocks, BLOCK_SIZE, heads, dim)] * 2
        if not flash:
            shapes = [(blocks, heads, dim // x, BLOCK_SIZE, x), (blocks, heads, dim, BLOCK_SIZE)]
        caches = [torch.zeros(shape, dtype=sizes.kind, device=generator.device) for shape in shapes]
        slots = slot_mapping(sizes, generator)
        places = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        return key, value, *caches, slots, *places, *_scales(generator)

    function = cukern.reshape_and_cache_flash if flash else cukern.reshape_and_cache

    def call(key: Any, value: Any, keys: Any, values: Any, slots: Any, block: Any, place: Any, *scales: Any) -> Any:
        function(key, value, keys, values, slots, sizes.cache, *scales)
        return keys, values

    def put(key: Any, value: Any, keys: Any, values: Any, slots: Any, block: Any, place: Any, *scales: Any) -> Any:
        k, v = (_bits(_stored(new, sizes.kind, scale)) for new, scale in zip((key, value), scales, strict=True))
        if flash:
            _bits(keys)[block, place] = k
            _bits(values)[block, place] = v
        else:
            _bits(keys)[block, :, :, place] = k.view(tokens, heads, dim // x, x)
            _bits(values)[block, :, :, place] = v
        return keys, values

    def copy(key: Any, value: Any, keys: Any, values: Any, slots: Any, block: Any, place: Any, *scales: Any) -> Any:
        for cache, new in ((keys, key), (values, value)):
            cache.view(-1, heads, dim).index_copy_(0, slots, new)
        return keys, values

    def vllm() -> Callable[..., Any]:
        theirs = _vllm(function.__name__)

        def run(key: Any, value: Any, keys: Any, values: Any, slots: Any, block: Any, place: Any, *scales: Any) -> Any:
            theirs(key, value, _bits(keys), _bits(values), slots, sizes.cache, *scales)
            return keys, values

        return run

    baselines = {"torch": _baseline(put)}
    if flash and sizes.cache == "auto":
        baselines["torch index_copy_"] = _baseline(copy)
    if compared:
        baselines["torch.compile"] = _compiled(put)
    size = 2 * tokens * heads * dim * sizes.moved + 8 * tokens
    host = sizes in (PREFILL, DECODE)
    peers = {"vLLM": Baseline(vllm)}
    return _case(function.__name__, sizes, inputs, call, size, baselines, peers, host, kv_heads=heads, head_dim=dim)


def _mla(sizes: Sizes) -> Case:
    rank, rope_dim = 512, 64

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        kv_c, k_pe = (_random(generator, sizes, sizes.tokens, n) for n in (rank, rope_dim))
        shape = (sizes.blocks, BLOCK_SIZE, rank + rope_dim)
        cache = torch.zeros(shape, dtype=sizes.kind, device=generator.device)
        return kv_c, k_pe, cache, slot_mapping(sizes, generator), _scales(generator)[0]

    def call(kv_c: Any, k_pe: Any, cache: Any, slots: Any, scale: Any) -> Any:
        cukern.concat_and_cache_mla(kv_c, k_pe, cache, slots, sizes.cache, scale)
        return (cache,)

    def put(kv_c: Any, k_pe: Any, cache: Any, slots: Any, scale: Any) -> Any:
        row = _bits(_stored(torch.cat([kv_c, k_pe], dim=1), sizes.kind, scale))
        _bits(cache).view(-1, rank + rope_dim)[slots] = row
        return (cache,)

    def vllm() -> Callable[..., Any]:
        theirs = _vllm("concat_and_cache_mla")

        def run(kv_c: Any, k_pe: Any, cache: Any, slots: Any, scale: Any) -> Any:
            theirs(kv_c, k_pe, _bits(cache), slots, sizes.cache, scale)
            return (cache,)

        return run

    size = sizes.tokens * (rank + rope_dim) * sizes.moved + 8 * sizes.tokens
    baselines, peers = {"torch": _baseline(put)}, {"vLLM": Baseline(vllm)}
    named = {"kv_lora_rank": rank, "rope_dim": rope_dim}
    return _case("concat_and_cache_mla", sizes, inputs, call, size, baselines, peers, sizes == PREFILL, **named)


def _numbers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 latents and rotary numbers of tokens in FlashMLA's FP8 cache, [tokens, ENTRY] bytes."""
    latents = rows[:, :SCALES_AT].view(torch.float8_e4m3fn).float().view(-1, LATENTS // GROUP, GROUP)
    scales = rows[:, SCALES_AT:ROTARY_AT].contiguous().view(torch.float32)
    return (latents * scales[..., None]).view(-1, LATENTS), rows[:, ROTARY_AT:].view(torch.bfloat16)


def _agree_on_numbers(ours: Any, theirs: Any) -> bool:
    """Return whether two caches hold the same tokens, with latents rounded to E4M3 under different scales."""
    (latents, rotary), (other_latents, other_rotary) = (_numbers(x[0].view(-1, ENTRY)) for x in (ours, theirs))
    return torch.allclose(latents, other_latents, rtol=2**-3, atol=1e-3) and torch.equal(rotary, other_rotary)


def _mla_with_scales(of: Sizes) -> Case:
    sizes = of._replace(cache=DS_MLA)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        kv_c, k_pe = (_random(generator, sizes, sizes.tokens, n) for n in (LATENTS, ROTARY))
        cache = torch.zeros(sizes.blocks, BLOCK_SIZE, ENTRY, dtype=torch.uint8, device=generator.device)
        # `largest` is an array, because torch divides by a Python number by multiplying by the reciprocal.
        return kv_c, k_pe, cache, slot_mapping(sizes, generator), torch.full((1,), 448.0, device=generator.device)

    def call(kv_c: Any, k_pe: Any, cache: Any, slots: Any, largest: Any) -> Any:
        cukern.concat_and_cache_mla(kv_c, k_pe, cache, slots, DS_MLA, None)
        return (cache,)

    def put(kv_c: Any, k_pe: Any, cache: Any, slots: Any, largest: Any) -> Any:
        groups = kv_c.float().view(-1, LATENTS // GROUP, GROUP)
        scales = (groups.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-4).log2().ceil().exp2()
        latents = _stored(groups, torch.float8_e4m3fn, scales).view(-1, LATENTS)
        parts = latents, scales.view(-1, LATENTS // GROUP), k_pe.bfloat16()
        cache.view(-1, ENTRY)[slots] = torch.cat([x.view(torch.uint8) for x in parts], dim=1)
        return (cache,)

    def vllm() -> Callable[..., Any]:
        theirs = _vllm("concat_and_cache_mla")

        def run(kv_c: Any, k_pe: Any, cache: Any, slots: Any, largest: Any) -> Any:
            theirs(kv_c, k_pe, cache, slots, DS_MLA, largest)
            return (cache,)

        return run

    size = sizes.tokens * ((LATENTS + ROTARY) * ITEM_SIZE[sizes.dtype] + ENTRY + 8)
    named = {"kv_lora_rank": LATENTS, "rope_dim": ROTARY}
    # Before 0.33 vLLM's scales are not powers of two.
    baselines, peers = {"torch": _baseline(put)}, {"vLLM": Baseline(vllm, agree=_agree_on_numbers)}
    return _case("concat_and_cache_mla", sizes, inputs, call, size, baselines, peers, True, **named)


def _copy(pairs: int, layers: int, blocks: int) -> Case:
    shape, dtype = (blocks, 8, 128, BLOCK_SIZE), "bfloat16"

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        keys, values = (
            [torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(layers)] for _ in range(2)
        )
        order = torch.randperm(blocks, generator=generator, device=device)
        return keys, values, order[: 2 * pairs].view(2, pairs).t().contiguous()

    def call(keys: Any, values: Any, mapping: Any) -> Any:
        cukern.copy_blocks(keys, values, mapping)
        return *keys, *values

    def put(keys: Any, values: Any, mapping: Any) -> Any:
        source, target = mapping.t()
        for cache in (*keys, *values):
            cache[target] = cache[source]
        return *keys, *values

    case: dict[str, int | str] = {"pairs": pairs, "layers": layers, "kv_heads": 8, "head_dim": 128}
    case |= {"block_size": BLOCK_SIZE, "dtype": dtype}
    size = 2 * pairs * 2 * layers * 8 * 128 * BLOCK_SIZE * ITEM_SIZE[dtype] + 16 * pairs
    baselines = {"torch": _baseline(put)}
    return Case("copy_blocks", case, "dynamic", inputs, call, size, baselines=baselines, agree=agree, host=True)


def _swap(pairs: int, blocks: int) -> Case:
    """Return a case of copying an MLA cache's blocks to a cache on the same GPU: one driver copy per block."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        caches = (_random(generator, PREFILL, blocks, BLOCK_SIZE, LATENTS + ROTARY) for _ in range(2))
        return *caches, torch.stack([torch.arange(pairs) * 2, pairs - 1 - torch.arange(pairs)], dim=1)

    def call(src: Any, dst: Any, mapping: Any) -> Any:
        cukern.swap_blocks(src, dst, src[0].nbytes, mapping)
        return (dst,)

    def put(src: Any, dst: Any, mapping: Any) -> Any:
        for first, to in mapping.tolist():
            dst[to].copy_(src[first])
        return (dst,)

    def vllm() -> Callable[..., Any]:
        theirs = _vllm("swap_blocks")

        def run(src: Any, dst: Any, mapping: Any) -> Any:
            theirs(src, dst, src[0].nbytes, mapping)
            return (dst,)

        return run

    case: dict[str, int | str] = {"pairs": pairs, "kv_lora_rank": LATENTS, "rope_dim": ROTARY}
    case |= {"block_size": BLOCK_SIZE, "dtype": PREFILL.dtype}
    size = 2 * pairs * BLOCK_SIZE * (LATENTS + ROTARY) * ITEM_SIZE[PREFILL.dtype]
    baselines, peers = {"torch": _baseline(put)}, {"vLLM": Baseline(vllm)}
    return Case("swap_blocks", case, "auto", inputs, call, size, baselines=baselines, peers=peers, agree=agree)


def _gather(batch: int, length: int, cache: str = "auto") -> Case:
    sizes = Sizes(batch * length, cache=cache)
    entry, columns = 576, -(-length // BLOCK_SIZE)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        src = _random(generator, sizes, batch * columns, BLOCK_SIZE, entry).to(sizes.kind)
        table = torch.randperm(batch * columns, generator=generator, device=device).view(batch, columns).int()
        lengths = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        dst = _random(generator, sizes, sizes.tokens, entry)
        token = torch.arange(length, device=device)
        slots = table[:, token // BLOCK_SIZE].long() * BLOCK_SIZE + token % BLOCK_SIZE
        return src, dst, table, lengths, slots.flatten(), _scales(generator)[0]

    def call(src: Any, dst: Any, table: Any, lengths: Any, slots: Any, scale: Any) -> Any:
        cukern.gather_cache(src, dst, table, lengths, batch, scale=scale)
        return (dst,)

    def select(src: Any, dst: Any, table: Any, lengths: Any, slots: Any, scale: Any) -> Any:
        rows = _bits(src).view(-1, entry)
        if cache == "auto":
            return (torch.index_select(rows, 0, slots, out=dst),)
        return (dst.copy_(rows[slots].view(sizes.kind).float() * scale),)

    def vllm() -> Callable[..., Any]:
        if cache == "auto":
            plain = _vllm("cp_gather_cache")

            def copy(src: Any, dst: Any, table: Any, lengths: Any, slots: Any, scale: Any) -> Any:
                plain(src, dst, table, lengths, batch)
                return (dst,)

            return copy
        scaled = _vllm("gather_and_maybe_dequant_cache")

        def prepare(src: Any, dst: Any, table: Any, lengths: Any, slots: Any, scale: Any) -> Callable[[], Any]:
            sequence = torch.arange(batch, dtype=torch.int32, device=src.device).repeat_interleave(length)

            def run() -> Any:
                scaled(_bits(src), dst, table, lengths, sequence, sizes.tokens, cache, scale)
                return (dst,)

            return run

        return prepare

    case: dict[str, int | str] = {"batch": batch, "length": length, "entry": entry, "block_size": BLOCK_SIZE}
    case |= {"cache": cache, "dtype": sizes.dtype}
    size = sizes.tokens * entry * sizes.moved + 4 * batch * (columns + 1)
    baselines, plain = {"torch": _baseline(select)}, cache == "auto"
    peers = {"vLLM": Baseline(vllm, prepared=not plain)}
    return Case(
        "gather_cache", case, "dynamic", inputs, call, size, baselines=baselines, peers=peers, agree=agree, host=plain
    )


def _gather_with_scales(batch: int, length: int) -> Case:
    tokens, columns = batch * length, -(-length // BLOCK_SIZE)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        device = generator.device
        sizes = Sizes(tokens)
        of_all = batch * columns * BLOCK_SIZE
        latents, rotary = (_random(generator, sizes, of_all, n) for n in (LATENTS, ROTARY))
        scales = torch.rand(of_all, LATENTS // GROUP, generator=generator, device=device)
        parts = [x.view(torch.uint8) for x in (latents.to(torch.float8_e4m3fn), scales, rotary)]
        src = torch.cat(parts, dim=1).view(-1, BLOCK_SIZE, ENTRY)
        table = torch.randperm(batch * columns, generator=generator, device=device).view(batch, columns).int()
        lengths = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        dst = _random(generator, sizes, tokens, LATENTS + ROTARY)
        token = torch.arange(length, device=device)
        slots = table[:, token // BLOCK_SIZE].long() * BLOCK_SIZE + token % BLOCK_SIZE
        return src, dst, table, lengths, slots.flatten()

    def call(src: Any, dst: Any, table: Any, lengths: Any, slots: Any) -> Any:
        cukern.gather_cache(src, dst, table, lengths, batch, kv_cache_dtype=DS_MLA)
        return (dst,)

    def select(src: Any, dst: Any, table: Any, lengths: Any, slots: Any) -> Any:
        dst[:, :LATENTS], dst[:, LATENTS:] = _numbers(src.view(-1, ENTRY)[slots])
        return (dst,)

    case: dict[str, int | str] = {"batch": batch, "length": length, "entry": LATENTS + ROTARY}
    case |= {"block_size": BLOCK_SIZE, "cache": DS_MLA, "dtype": "bfloat16"}
    size = tokens * (ENTRY + (LATENTS + ROTARY) * 2) + 4 * batch * (columns + 1)

    def vllm() -> Callable[..., Any]:
        theirs = _vllm("cp_gather_and_upconvert_fp8_kv_cache")

        def run(src: Any, dst: Any, table: Any, lengths: Any, slots: Any) -> Any:
            theirs(src, dst, table, lengths[:-1], batch)
            return (dst,)

        return run

    baselines, peers = {"torch": _baseline(select)}, {"vLLM": Baseline(vllm)}
    return Case("gather_cache", case, "dynamic", inputs, call, size, baselines=baselines, peers=peers, agree=agree)


def cases(small: bool = False) -> list[Case]:
    """Return cases: a prefill of 8192 tokens (Llama-3-8B: 8 kv heads of 128), a step of 64 tokens, DeepSeek's MLA.

    `small`: the same cases with few tokens, which the tests run in host memory.
    """
    prefill = Sizes(70, 2, 16) if small else PREFILL
    decode = Sizes(5, 2, 16, slots="decode") if small else DECODE

    def all_cases() -> Iterator[Case]:
        for flash in (False, True):
            yield _reshape(prefill, flash, compared=True)
            yield _reshape(prefill._replace(slots="ragged"), flash)
            for cache in FP8:
                yield _reshape(prefill._replace(cache=cache), flash)
            yield _reshape(decode, flash)
        yield _mla(prefill)
        yield _mla(prefill._replace(cache="fp8_e4m3"))
        yield _mla_with_scales(prefill)
        yield _mla_with_scales(decode)
        pairs, batch, length = ((2, 2, 6), 3, 20) if small else ((64, 32, 256), 8, 4096)
        yield _copy(*pairs)
        yield _swap(*pairs[::2])
        yield _gather(batch, length)
        yield _gather(batch, length, "fp8_e4m3")
        yield _gather_with_scales(batch, length)

    return list(all_cases())
