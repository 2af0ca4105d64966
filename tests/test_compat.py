"""`cukern.compat`: signatures against those of the peers, results against plain formulas, on the CPU."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukern  # noqa: E402
from cukern.compat import flash_mla, flashinfer, sglang, vllm  # noqa: E402
from cukern.compat.flashinfer import sampling  # noqa: E402
from cukern.compat.vllm import moe_permute_unpermute  # noqa: E402

TABLE = json.loads((Path(__file__).parent / "peers_signatures.json").read_text())
CASES = [
    (module, name, signature)
    for module, releases in TABLE.items()
    for release in releases
    for name, signature in release["signatures"].items()
]
E4M3 = torch.float8_e4m3fn


def module_of(name: str) -> Any:
    return importlib.import_module(f"cukern.compat.{name}")


def rand(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), atol=tolerance, rtol=tolerance)


def ids_are(found: Any, *wanted: int) -> None:
    assert found.tolist() == list(wanted)


# --- signatures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name", "signature"), CASES, ids=[f"{m}.{n}" for m, n, _ in CASES])
def test_a_signature_is_the_peers(module: str, name: str, signature: str) -> None:
    own = inspect.signature(getattr(module_of(module), name))
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in own.parameters.values()]
    assert str(inspect.Signature(bare)) == signature


@pytest.mark.parametrize("module", TABLE)
def test_every_function_is_in_the_table(module: str) -> None:
    compat = module_of(module)
    functions = {name for name in compat.__all__ if inspect.isfunction(getattr(compat, name))}
    assert functions == {name for release in TABLE[module] for name in release["signatures"]}
    own = compat.__doc__ or ""
    assert all(release["release"].split()[1] in own for release in TABLE[module])


@pytest.mark.parametrize("module", [*TABLE, "flashinfer", "vllm"])
def test_what_is_not_covered_is_found_and_raises(module: str) -> None:
    compat = module_of(module)
    for name in getattr(compat, "NOT_COVERED", ()):
        assert name not in compat.__all__
        with pytest.raises(
            NotImplementedError, match=rf"^{name} is not covered by cukern\.compat\.[\w.]+: cukern stands "
        ):
            getattr(compat, name)(1, a=2)
    with pytest.raises(
        AttributeError, match=r"^no_such_name is not covered by cukern\.compat\.[\w.]+: cukern stands in for "
    ):
        _ = compat.no_such_name
    assert not hasattr(compat, "no_such_name") and getattr(compat, "no_such_name", 1) == 1
    for function in getattr(compat, "COVERS", {}).values():
        assert function.removeprefix("cukern.") in cukern.__all__


def test_an_import_of_what_is_not_covered() -> None:
    with pytest.raises(ImportError) as refused:
        exec("from cukern.compat.vllm import gptq_gemm")
    assert str(refused.value) == (
        "gptq_gemm is not covered by cukern.compat.vllm: cukern stands in for vllm._custom_ops here. "
        "docs/differences.md lists what it covers."
    )


# --- vLLM ---------------------------------------------------------------------------------------------


def rms(x: Any, weight: Any, epsilon: float = 1e-6) -> Any:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


def test_vllm_norms() -> None:
    x, weight, residual = rand(5, 64), rand(64, seed=1), rand(5, 64, seed=2)
    out = torch.empty_like(x)
    assert vllm.rms_norm(out, x, weight, 1e-6) is None
    close(out, rms(x, weight))
    total, given = x + residual, x.clone()
    assert vllm.fused_add_rms_norm(given, residual, weight, 1e-6) is None
    close(residual, total)
    close(given, rms(total, weight))


@pytest.mark.parametrize("with_residual", [False, True])
def test_vllm_quantized_norms(with_residual: bool) -> None:
    x, weight, residual = rand(6, 128), rand(128, seed=1), rand(6, 128, seed=2)
    total = x + residual if with_residual else x
    norm = rms(total, weight)
    more = {"residual": residual.clone()} if with_residual else {}
    q, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, 1e-6, E4M3, **more)
    assert (q.shape, q.dtype, scales.shape) == (x.shape, E4M3, (6, 1))
    close(scales, norm.abs().amax(-1, keepdim=True) / 448)
    close(q.float() * scales, norm, 0.2)
    if with_residual:
        close(more["residual"], total)
        more = {"residual": residual.clone()}
    for alignment, stride in ((None, (2, 1)), (0, (1, 6)), (4, (1, 8))):
        if with_residual:
            more = {"residual": residual.clone()}
        layout = {} if alignment is None else {"is_scale_transposed": True, "tma_alignment": alignment}
        _, scales = vllm.rms_norm_per_block_quant(x, weight, 1e-6, E4M3, [1, 64], **more, **layout)
        assert (tuple(scales.shape), scales.stride()) == ((6, 2), stride)
        close(scales, norm.view(6, 2, 64).abs().amax(-1) / 448)


def test_vllm_quantized_activation() -> None:
    x = rand(6, 256)
    gate, up = x.chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up).view(6, 2, 64)
    for transposed, stride in ((False, (2, 1)), (True, (1, 6))):
        q, scales = vllm.silu_and_mul_per_block_quant(x, 64, E4M3, None, transposed)
        assert (tuple(scales.shape), scales.stride(), q.dtype) == ((6, 2), stride, E4M3)
        close(scales, wanted.abs().amax(-1) / 448)
        close(q.float().view(6, 2, 64) * scales[..., None], wanted, 0.2)


def test_vllm_scaled_fp8_quant() -> None:
    x = rand(5, 32)
    q, scale = vllm.scaled_fp8_quant(x)
    assert tuple(scale.shape) == (1,)
    close(scale, x.abs().max().view(1) / 448)
    given = torch.tensor([0.5])
    q, scale = vllm.scaled_fp8_quant(x, given, group_shape=(-1, -1))
    assert scale is given
    assert torch.equal(q.float(), (x / 0.5).to(E4M3).float())
    q, scale = vllm.scaled_fp8_quant(x, None, 8, torch.tensor([0.25]), True)
    assert (tuple(q.shape), tuple(scale.shape)) == ((8, 32), (8, 1))
    close(scale[:5], x.abs().amax(-1, keepdim=True).clamp(max=0.25) / 448)


def test_vllm_scaled_int8_quant() -> None:
    x = rand(2, 3, 32)
    q, scale, azp = vllm.scaled_int8_quant(x)
    assert (tuple(scale.shape), azp) == ((6, 1), None)
    close(q.view(6, 32) * scale, x.view(6, 32), 0.05)
    given, zero = torch.tensor([0.1]), torch.tensor([3], dtype=torch.int32)
    q, scale, azp = vllm.scaled_int8_quant(x, given, zero, symmetric=False)
    assert (scale is given, azp is zero) == (True, True)
    assert torch.equal(q.int(), (torch.round(x / given) + 3).clamp(-128, 127).int())
    _, scale, azp = vllm.scaled_int8_quant(x, symmetric=False)
    assert (scale.shape, azp.shape) == ((6, 1), (6, 1))


def test_vllm_scaled_fp4_quant_and_its_swizzled_scales() -> None:
    x, of_all = rand(130, 96, dtype=torch.bfloat16), torch.tensor([8.0])
    packed, plain = vllm.scaled_fp4_quant(x, of_all, False)
    assert (tuple(packed.shape), tuple(plain.shape), plain.dtype) == ((130, 48), (130, 6), E4M3)
    close(plain, (x.float().view(130, 6, 16).abs().amax(-1) / 6 * 8).to(E4M3))
    again, scales = vllm.scaled_fp4_quant(x, of_all)
    assert torch.equal(again, packed)
    assert (tuple(scales.shape), scales.dtype) == ((256, 8), E4M3)
    flat, source = scales.view(torch.uint8).flatten(), plain.view(torch.uint8)
    for row in range(256):
        for group in range(8):
            place = (row // 128 * 2 + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
            assert flat[place] == (source[row, group] if row < 130 and group < 6 else 0)


def test_vllm_merge_attn_states() -> None:
    outs, lse = [rand(4, 2, 8, seed=i) for i in (0, 1)], [rand(2, 4, seed=i) for i in (2, 3)]
    out, merged = torch.empty(4, 2, 8), torch.empty(2, 4)
    vllm.merge_attn_states(out, outs[0], lse[0], outs[1], lse[1], merged, 4)
    share = torch.softmax(torch.stack(lse), 0).transpose(1, 2)[..., None]
    close(out, outs[0] * share[0] + outs[1] * share[1])
    close(merged, torch.logsumexp(torch.stack(lse), 0))
    alone = torch.empty(4, 2, 8)
    vllm.merge_attn_states(alone, outs[0], lse[0], outs[1], lse[1])
    assert torch.equal(alone, out)

    # Tokens without a prefix, by their number or by their log-sum-exp of either infinity, are the suffix itself.
    before = lse[0].clone()
    part, merged = torch.empty(4, 2, 8), torch.empty(2, 4)
    vllm.merge_attn_states(part, outs[0], lse[0], outs[1], lse[1], merged, 3)
    assert torch.equal(lse[0], before)
    assert torch.equal(part, torch.cat([out[:3], outs[1][3:]]))
    close(merged[:, 3], lse[1][:, 3])
    lse[0][:, 3] = torch.inf
    vllm.merge_attn_states(alone, outs[0], lse[0], outs[1], lse[1])
    assert torch.equal(alone, part)

    # Those by their number are the suffix even where that has no tokens, and in place too.
    lse[1][0, 1:] = torch.inf
    vllm.merge_attn_states(part, outs[0], lse[0], outs[1], lse[1], merged, 2)
    vllm.merge_attn_states(alone, outs[0], lse[0], outs[1], lse[1])
    assert torch.equal(part, torch.cat([alone[:2], outs[1][2:]]))
    assert torch.equal(merged[:, 2:], lse[1][:, 2:])
    close(merged[0, 1], lse[0][0, 1])
    same = outs[1].clone()
    vllm.merge_attn_states(same, outs[0], lse[0], same, lse[1], None, 2)
    assert torch.equal(same, part)


@pytest.mark.parametrize("first", [None, 0, 2, 9])
def test_vllm_merge_attn_states_in_fp8(first: int | None) -> None:
    outs, lse = [rand(4, 2, 8, seed=i).bfloat16() for i in (0, 1)], [rand(2, 4, seed=i) for i in (2, 3)]
    wide, out, scale = torch.empty_like(outs[0]), torch.empty(4, 2, 8, dtype=E4M3), torch.tensor([0.05])
    vllm.merge_attn_states(wide, outs[0], lse[0], outs[1], lse[1], None, first)
    vllm.merge_attn_states(out, outs[0], lse[0], outs[1], lse[1], None, first, scale)
    assert torch.equal(out.view(torch.uint8), (wide.float() / 0.05).clamp(-448, 448).to(E4M3).view(torch.uint8))


@pytest.mark.parametrize("name", ["apply_repetition_penalties", "apply_repetition_penalties_cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_vllm_repetition_penalties(name: str, dtype: Any) -> None:
    logits, penalties = rand(5, 40, dtype=dtype), torch.linspace(1.1, 1.5, 5).to(dtype)
    prompt, output = rand(5, 40, seed=1) > 1, rand(5, 40, seed=2) > 1
    wanted, by_rows = logits.clone(), torch.empty(40, 5, dtype=dtype).t().copy_(logits)
    chosen = prompt | output
    penalty = penalties[:, None].expand(5, 40)[chosen]
    x = wanted[chosen]
    wanted[chosen] = torch.where(x > 0, x / penalty, x * penalty)
    assert getattr(vllm, name)(logits, prompt, output, penalties) is None
    close(logits, wanted, 1e-3)
    vllm.apply_repetition_penalties_torch(by_rows, prompt, output, penalties)
    close(by_rows, wanted, 1e-3)


@pytest.mark.parametrize("name", ["topk_softmax", "topk_sigmoid"])
def test_vllm_gates(name: str) -> None:
    logits, bias = rand(7, 16), rand(16, seed=1, dtype=torch.bfloat16)
    weights, ids = torch.empty(7, 4), torch.empty(7, 4, dtype=torch.int64)
    sources = torch.empty(7, 4, dtype=torch.int32)
    getattr(vllm, name)(weights, ids, sources, logits, True, bias)
    scores = logits.softmax(-1) if name == "topk_softmax" else logits.sigmoid()
    wanted = (scores + bias.float()).topk(4).indices
    assert torch.equal(ids, wanted)
    share = scores.gather(1, wanted)
    close(weights, share / share.sum(-1, keepdim=True))
    assert torch.equal(sources, torch.arange(28, dtype=torch.int32).view(4, 7).t())
    for dtype in (torch.float16, torch.float32, torch.float64):
        again, of_32_bits = torch.empty(7, 4), torch.empty(7, 4, dtype=torch.int32)
        getattr(vllm, name)(again, of_32_bits, None, logits, True, bias.to(dtype))
        assert torch.equal(again, weights)
        assert torch.equal(of_32_bits, wanted.int())
    if name == "topk_sigmoid":
        scaled = torch.empty(7, 4)
        vllm.topk_sigmoid(scaled, ids, None, logits, True, bias, 2.5)
        close(scaled, weights * 2.5)


def test_vllm_grouped_topk() -> None:
    logits, bias = rand(5, 16), rand(16, seed=1)
    weights, ids = vllm.grouped_topk(logits, 4, 2, 3, True, 2.5, bias, 1)
    scores = logits.sigmoid()
    choice = (scores + bias).view(5, 4, 4)
    groups = choice.topk(2).values.sum(-1).topk(2).indices
    kept = torch.full((5, 4, 4), -torch.inf).scatter(1, groups[..., None].expand(5, 2, 4), 0) + choice
    wanted = kept.view(5, 16).topk(3).indices
    assert torch.equal(ids.long(), wanted)
    share = scores.gather(1, wanted)
    close(weights, share / share.sum(-1, keepdim=True) * 2.5)
    same, _ = vllm.grouped_topk(logits, 4, 2, 3, False, 2.5, bias.double(), 1)
    close(same, share * 2.5)


def test_vllm_moe_align_block_size_into_larger_arrays() -> None:
    ids = torch.tensor([[2, 0], [2, 1], [0, 3]], dtype=torch.int32)
    rows, experts = torch.full((40,), 99, dtype=torch.int32), torch.full((7,), 99, dtype=torch.int32)
    end = torch.empty(1, dtype=torch.int32)
    vllm.moe_align_block_size(ids, 4, 4, rows, experts, end)
    ids_are(end, 16)
    ids_are(rows[:16], 1, 4, 6, 6, 3, 6, 6, 6, 0, 2, 6, 6, 5, 6, 6, 6)
    ids_are(rows[16:], *[6] * 24)
    ids_are(experts, 0, 1, 2, 3, -1, -1, -1)
    here = torch.tensor([-1, 1, 0, -1], dtype=torch.int32)
    vllm.moe_align_block_size(ids, 4, 4, rows, experts, end, here)
    ids_are(end, 8)
    ids_are(rows[:8], 0, 2, 6, 6, 3, 6, 6, 6)
    ids_are(experts, 0, 1, -1, -1, -1, -1, -1)
    with pytest.raises(ValueError, match=r"out\[1\] must be of at least 4 elements, got 3"):
        vllm.moe_align_block_size(ids, 4, 4, rows, experts[:3], end)


def test_vllm_moe_sum_and_permutation() -> None:
    x, out = rand(5, 3, 16), torch.empty(5, 16)
    vllm.moe_sum(x, out)
    close(out, x.sum(1))
    vllm.moe_sum(x[:, ::2], out)
    close(out, x[:, ::2].sum(1))
    hidden, scale, ids = rand(5, 16), rand(5, 2, seed=1), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [3, 0]])
    here = torch.tensor([0, -1, 1, -1], dtype=torch.int32)
    rows, scales, offsets, inverse, permuted = moe_permute_unpermute.moe_permute(hidden, scale, ids, 4, 2, here)
    ids_are(offsets, 0, 4, 6)
    ids_are(permuted, 0, 3, 6, 9, 1, 4, 10, 10, 10, 10)
    assert torch.equal(rows[:6], hidden[permuted[:6] // 2])
    assert torch.equal(scales[:6], scale[permuted[:6] // 2])
    weights, back = rand(5, 2, seed=2), torch.empty(5, 16)
    moe_permute_unpermute.moe_unpermute(back, rows, weights, inverse, offsets)
    kept = torch.where((inverse >= 0).view(5, 2), weights, 0)
    close(back, kept.sum(1, keepdim=True) * hidden)
    assert moe_permute_unpermute.moe_permute_unpermute_supported()


def paged(seed: int = 0) -> tuple[Any, ...]:
    """Keys, values and slots of 6 tokens of 2 heads of 16, for caches of 5 blocks of 8."""
    slots = torch.tensor([3, 9, 39, -1, 17, 16])
    return rand(6, 2, 16, seed=seed), rand(6, 2, 16, seed=seed + 1), slots


def test_vllm_scales_of_heads() -> None:
    key, value, slots = paged()
    kept, of_heads, one = slots >= 0, torch.tensor([0.3, 1.7]), torch.tensor([0.6])
    for dtype in (torch.float32, torch.bfloat16):
        new = key.to(dtype), value.to(dtype)
        for scales in ((of_heads, of_heads.flip(0)), (of_heads, one), (one, of_heads)):
            for how, cache in (("fp8", torch.uint8), ("auto", E4M3), ("fp8_e5m2", torch.uint8), ("auto", dtype)):
                caches = torch.zeros(2, 5, 8, 2, 16).to(cache).unbind()
                vllm.reshape_and_cache_flash(*new, *caches, slots, how, *scales)
                for x, stored, scale in zip(new, caches, scales, strict=True):
                    kind = torch.float8_e5m2 if how == "fp8_e5m2" else E4M3
                    wanted = x if cache is dtype else (x.float() / scale[:, None]).to(kind)
                    found = stored.view(40, 2, 16)[slots[kept]]
                    assert torch.equal(found.view(torch.uint8), wanted[kept].view(torch.uint8))
    caches = torch.zeros(2, 5, 8, 2, 16, dtype=torch.uint8).unbind()
    for bad, error in ((torch.ones(3), ValueError), (of_heads.double(), TypeError), (of_heads[None], ValueError)):
        with pytest.raises(error, match="v_scale must be"):
            vllm.reshape_and_cache_flash(key, value, *caches, slots, "fp8", of_heads, bad)
    with pytest.raises(TypeError, match="value must be float32"):
        vllm.reshape_and_cache_flash(key, value.half(), *caches, slots, "fp8", one, one)


def test_vllm_cache() -> None:
    key, value, slots = paged()
    one = torch.ones(1)
    keys, values = torch.zeros(5, 8, 2, 16), torch.zeros(5, 8, 2, 16)
    vllm.reshape_and_cache_flash(key, value, keys, values, slots, "auto", one, one)
    kept = slots >= 0
    assert torch.equal(keys.view(40, 2, 16)[slots[kept]], key[kept])
    assert torch.equal(values.view(40, 2, 16)[slots[kept]], value[kept])
    keys_x, values_x = torch.zeros(5, 2, 4, 8, 4), torch.zeros(5, 2, 16, 8)
    vllm.reshape_and_cache(key, value, keys_x, values_x, slots, "auto", one, one)
    assert torch.equal(keys_x.permute(0, 3, 1, 2, 4).reshape(5, 8, 2, 16), keys)
    assert torch.equal(values_x.permute(0, 3, 1, 2), values)

    pairs, caches = torch.tensor([[0, 3], [4, 1]]), [rand(5, 8, seed=i) for i in range(6)]
    before = [cache.clone() for cache in caches]
    vllm.copy_blocks(caches[:1], caches[1:2], pairs)
    for count in (1, 3):
        vllm.copy_blocks_mla(caches[6 - count :], pairs)
    for i in (0, 1, 3, 4, 5):
        assert torch.equal(caches[i][[3, 1]], before[i][[0, 4]])
        assert torch.equal(caches[i][[0, 2, 4]], before[i][[0, 2, 4]])
    assert torch.equal(caches[2], before[2])
    into, size = torch.zeros(3, 8), caches[0][0].numel() * 4
    assert size == 32
    vllm.swap_blocks(caches[2], into, size, torch.tensor([[4, 0], [1, 2]]))
    assert torch.equal(into, torch.stack([before[2][4], torch.zeros(8), before[2][1]]))


def test_vllm_latent_cache() -> None:
    latents, rotary, one = rand(5, 512), rand(5, 64, seed=1), torch.ones(1)
    cache, slots = torch.zeros(3, 16, 576), torch.tensor([0, 1, 2, 3, 20])
    vllm.concat_and_cache_mla(latents, rotary, cache, slots, "auto", one)
    rows = torch.cat([latents, rotary], 1)
    assert torch.equal(cache.view(48, 576)[slots], rows)
    table, ends = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
    wanted = torch.cat([cache[0, :4], cache[1, :5]])
    found, numbers = torch.full((9, 576), 7.0), torch.tensor([0] * 4 + [1] * 5, dtype=torch.int32)
    vllm.cp_gather_cache(cache, found, table, ends, 2)
    assert torch.equal(found, wanted)
    found.fill_(7)
    for tokens in (8, torch.tensor(8)):
        found.fill_(7)
        vllm.gather_and_maybe_dequant_cache(cache, found, table, ends, numbers, tokens, "auto", one)
        assert torch.equal(found[:8], wanted[:8])
    assert bool((found[8] == 7).all())
    starts = torch.tensor([3, 14], dtype=torch.int32)
    vllm.cp_gather_cache(cache, found, table, ends, 2, starts)
    assert torch.equal(found, torch.cat([cache[0, 3:7], cache[1, 14:], cache[0, :3]]))

    packed = torch.zeros(3, 16, 656, dtype=torch.uint8)
    vllm.concat_and_cache_mla(latents, rotary, packed, slots, "fp8_ds_mla", one)
    scales = packed.view(48, 656)[slots, 512:528].contiguous().view(torch.float32)
    least = (latents.view(5, 4, 128).abs().amax(-1) / 448).clamp(1e-4)
    assert torch.equal(scales, torch.exp2(torch.log2(least).ceil()))
    found = torch.zeros(9, 576, dtype=torch.bfloat16)
    vllm.cp_gather_and_upconvert_fp8_kv_cache(packed, found, table, ends[:2], 2)
    close(found[:4], rows[:4], 0.25)
    close(found[8], rows[4], 0.25)


def attended(query: Any, keys: Any, values: Any, scale: float) -> Any:
    """Attention of one query [heads, dim] over keys and values [tokens, heads, dim]."""
    share = torch.softmax(torch.einsum("hd,thd->ht", query.float(), keys.float()) * scale, -1)
    return torch.einsum("ht,thd->hd", share, values.float())


def test_vllm_paged_attention() -> None:
    query, one = rand(2, 2, 64, dtype=torch.float16), torch.ones(1)
    keys, values = rand(4, 16, 2, 64, seed=1), rand(4, 16, 2, 64, seed=2)
    key_cache = keys.half().view(4, 16, 2, 8, 8).permute(0, 2, 3, 1, 4).contiguous()
    value_cache = values.half().permute(0, 2, 3, 1).contiguous()
    table = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    lengths = torch.tensor([20, 9], dtype=torch.int32)
    common = query, key_cache, value_cache, 2, 0.125, table, lengths, 16, 20, None, "auto", one, one
    out = torch.empty_like(query)
    vllm.paged_attention_v1(out, *common)
    for i, pages in enumerate(table.tolist()):
        rows = [x[pages].flatten(0, 1)[: lengths[i]].half() for x in (keys, values)]
        close(out[i], attended(query[i], *rows, 0.125), 5e-3)
    again, sums, largest = torch.empty_like(query), torch.empty(2, 2, 1), torch.empty(2, 2, 1)
    vllm.paged_attention_v2(again, sums, largest, torch.empty(2, 2, 1, 64, dtype=torch.float16), *common)
    close(again, out, 2e-3)


# --- latent attention ---------------------------------------------------------------------------------


def latent_case() -> tuple[Any, ...]:
    q, cache = rand(2, 1, 4, 576, dtype=torch.bfloat16), rand(3, 64, 1, 576, seed=1, dtype=torch.bfloat16)
    table = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([70, 5], dtype=torch.int32)
    wanted = []
    for i, pages in enumerate(table.tolist()):
        rows = cache[pages].flatten(0, 1)[: lengths[i]].expand(-1, 4, 576)
        wanted.append(attended(q[i, 0], rows, rows[..., :512], 576**-0.5))
    return q, cache, table, lengths, torch.stack(wanted)[:, None]


def test_flash_mla() -> None:
    q, cache, table, lengths, wanted = latent_case()
    meta, splits = flash_mla.get_mla_metadata(lengths, 4, 1)
    assert (meta.have_initialized, splits) == (False, None)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, meta, splits)
    close(out, wanted, 2e-2)
    assert (meta.have_initialized, tuple(lse.shape)) == (True, (2, 4, 1))
    plan = meta.tile_scheduler_metadata
    again, _ = flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, meta, None)
    assert torch.equal(again, out)
    assert meta.tile_scheduler_metadata is plan
    with pytest.raises(ValueError, match="tile_scheduler_metadata must be of a call with the causal of this one"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, meta, None, causal=True)
    with pytest.raises(TypeError, match="tile_scheduler_metadata must be what"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, plan)
    with pytest.raises(TypeError, match="num_splits must be None"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, meta, lengths)
    with pytest.raises(TypeError, match="cache_seqlens"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, None, 512, flash_mla.get_mla_metadata()[0])


def test_flash_mla_of_indices() -> None:
    q, cache, *_ = latent_case()
    packed = torch.zeros(3, 64, 656, dtype=torch.uint8)
    rows = cache.view(192, 576)
    cukern.concat_and_cache_mla(rows[:, :512], rows[:, 512:], packed, torch.arange(192), "fp8_ds_mla", None)
    indices = torch.tensor([[[5, 70, -1]], [[100, 3, 64]]], dtype=torch.int32)
    meta, _ = flash_mla.get_mla_metadata()
    options = {"is_fp8_kvcache": True, "indices": indices}
    out, _ = flash_mla.flash_mla_with_kvcache(q, packed[:, :, None], None, None, 512, meta, **options)
    for i in (0, 1):
        kept = rows[[x for x in indices[i, 0].tolist() if x >= 0]][:, None].expand(-1, 4, 576)
        close(out[i, 0], attended(q[i, 0], kept, kept[..., :512], 576**-0.5), 0.25)


def test_latent_attention_of_vllm_and_sglang() -> None:
    q, cache, table, lengths, wanted = latent_case()
    plan = vllm.get_flash_mla_metadata(lengths, 4, 1)
    out, lse = vllm.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan)
    close(out, wanted, 2e-2)
    plan = sglang.flash_mla.get_mla_metadata(lengths, 4, 1)
    again, same = sglang.flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan)
    assert torch.equal(again, out)
    assert torch.equal(same, lse)


# --- SGLang -------------------------------------------------------------------------------------------


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": torch.nn.functional.gelu,
    "gelu_tanh_and_mul": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def test_sglang_gelu_quick() -> None:
    x, out = rand(4, 32), torch.empty(4, 32)
    assert sglang.gelu_quick(x, out) is out
    close(out, x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("compat", [sglang, flashinfer], ids=["sglang", "flashinfer"])
def test_activations(compat: Any, name: str) -> None:
    x, function = rand(4, 32), getattr(compat, name)
    wanted = ACTIVATIONS[name](x[:, :16]) * x[:, 16:]
    close(function(x), wanted)
    out = torch.empty(4, 16)
    assert function(x, out) is out
    close(out, wanted)


@pytest.mark.parametrize("compat", [sglang, flashinfer], ids=["sglang", "flashinfer"])
def test_norms_of_sglang_and_flashinfer(compat: Any) -> None:
    x, weight, residual = rand(5, 64), rand(64, seed=1), rand(5, 64, seed=2)
    close(compat.rmsnorm(x, weight), rms(x, weight))
    out = torch.empty_like(x)
    assert compat.gemma_rmsnorm(x, weight, 1e-5, out, False) is out
    close(out, rms(x, weight + 1, 1e-5))
    for name, offset in (("fused_add_rmsnorm", 0), ("gemma_fused_add_rmsnorm", 1)):
        given, kept = x.clone(), residual.clone()
        assert getattr(compat, name)(given, kept, weight, 1e-6, enable_pdl=True) is None
        close(kept, x + residual)
        close(given, rms(x + residual, weight + offset))


def test_sglang_gates() -> None:
    logits, bias = rand(6, 16), rand(16, seed=1)
    for name, scores in (("topk_softmax", logits.softmax(-1)), ("topk_sigmoid", logits.sigmoid())):
        weights, ids = torch.empty(6, 3), torch.empty(6, 3, dtype=torch.int32)
        assert getattr(sglang, name)(weights, ids, logits, True) is None
        best = scores.topk(3)
        assert torch.equal(ids.long(), best.indices)
        close(weights, best.values / best.values.sum(-1, keepdim=True))
    capped = torch.empty(6, 3)
    sglang.topk_softmax(capped, ids, logits, False, 2.0)
    close(capped, (2 * torch.tanh(logits / 2)).softmax(-1).topk(3).values)

    scores = logits.sigmoid()
    wanted = (scores + bias).topk(3).indices
    share = scores.gather(1, wanted)
    for renormalize in (True, False):
        weights, ids = sglang.kimi_k2_moe_fused_gate(logits, bias, 3, renormalize, 2.0, True)
        assert torch.equal(ids.long(), wanted)
        close(weights, share / share.sum(-1, keepdim=True) * 2 if renormalize else share)
    one = sglang.moe_fused_gate(logits, bias, 1, 1, 3)
    close(one[0], share / share.sum(-1, keepdim=True))
    shared, ids = sglang.moe_fused_gate(logits, bias, 1, 1, 4, 1, 2.5)
    assert bool((ids[:, 3] == 16).all())
    close(shared[:, 3], torch.full((6,), 0.4))
    close(sglang.moe_fused_gate(logits, bias.half().float(), 1, 1, 3, 0, 2.5, True)[0], 2.5 * one[0], 1e-2)


def test_sglang_moe_align_block_size_has_blocks_of_tokens_filtered_out() -> None:
    ids = torch.tensor([[2, -1], [2, 1], [-1, 0]], dtype=torch.int32)
    rows, experts = torch.full((24,), 99, dtype=torch.int32), torch.full((8,), 99, dtype=torch.int32)
    end, buffer = torch.empty(1, dtype=torch.int32), torch.empty(5, dtype=torch.int32)
    assert sglang.moe_align_block_size(ids, 4, 4, rows, experts, end, buffer, True) is None
    ids_are(end, 16)
    ids_are(rows[16:], *[6] * 8)
    ids_are(experts[4:], *[-1] * 4)
    fewest = torch.empty(18 // 4, dtype=torch.int32)
    sglang.moe_align_block_size(ids, 4, 4, rows[:18], fewest, end, buffer)
    ids_are(fewest, -1, 0, 1, 2)
    ids_are(rows[:16], 1, 4, 6, 6, 5, 6, 6, 6, 3, 6, 6, 6, 0, 2, 6, 6)
    ids_are(experts[:4], -1, 0, 1, 2)


def test_sglang_moe_sums() -> None:
    x, out = rand(5, 3, 16), torch.empty(5, 16)
    sglang.moe_sum(x, out)
    close(out, x.sum(1))
    sglang.moe_sum_reduce(x, out, 2.5)
    close(out, x.sum(1) * 2.5)


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
@pytest.mark.parametrize("column_major", [False, True])
def test_sglang_group_quantization(dtype: Any, column_major: bool) -> None:
    x = rand(6, 128)
    q = torch.empty(6, 128, dtype=dtype)
    scales = torch.empty_strided((6, 2), (1, 8) if column_major else (2, 1))
    low, high = (-448.0, 448.0) if dtype is E4M3 else (-128, 127)
    sglang.sgl_per_token_group_quant_8bit(x, q, scales, 64, 1e-10, low, high)
    close(scales, x.view(6, 2, 64).abs().amax(-1) / high)
    close(q.float().view(6, 2, 64) * scales[..., None], x.view(6, 2, 64), 0.2)


def test_sglang_quantization_of_activations_and_of_tokens() -> None:
    x, q, scales = rand(6, 128), torch.empty(6, 64, dtype=E4M3), torch.empty(6, 1)
    wanted = torch.nn.functional.silu(x[:, :64]) * x[:, 64:]
    more = {"fuse_silu_and_mul": True}
    sglang.sgl_per_token_group_quant_fp8(x, q, scales, 64, 1e-10, -448.0, 448.0, **more)
    close(q.float() * scales, wanted, 0.2)
    q = torch.empty(6, 128, dtype=E4M3)
    sglang.sgl_per_token_quant_fp8(x, q, scales)
    close(scales, x.abs().amax(-1, keepdim=True) / 448)
    assert torch.equal(q.float(), (x / scales).to(E4M3).float())
    sglang.sgl_per_token_quant_fp8(x, q, scales.view(6))


def test_sglang_merge_state_v2() -> None:
    outs, lse = [rand(4, 2, 8, seed=i) for i in (0, 1)], [rand(4, 2, seed=i) for i in (2, 3)]
    out, merged = sglang.merge_state_v2(outs[0], lse[0], outs[1], lse[1])
    share = torch.softmax(torch.stack(lse), 0)[..., None]
    close(out, outs[0] * share[0] + outs[1] * share[1])
    close(merged, torch.logsumexp(torch.stack(lse), 0))
    into = torch.empty_like(out), torch.empty_like(merged)
    assert sglang.merge_state_v2(outs[0], lse[0].half(), outs[1], lse[1].half(), *into)[0] is into[0]
    close(into[0], out, 1e-2)


# --- FlashInfer ---------------------------------------------------------------------------------------


def test_flashinfer_quantized_norms_and_layer_norm() -> None:
    x, weight, residual = rand(5, 64), rand(64, seed=1), rand(5, 64, seed=2)
    q = torch.empty(5, 64, dtype=E4M3)
    flashinfer.rmsnorm_quant(q, x, weight, 0.05)
    close(q.float() * 0.05, rms(x, weight), 0.2)
    total = x + residual
    flashinfer.fused_add_rmsnorm_quant(q, x, residual, weight, torch.tensor([0.05]))
    close(residual, total)
    close(q.float() * 0.05, rms(total, weight), 0.2)
    bias = rand(64, seed=3)
    close(flashinfer.layernorm(x, weight, bias), torch.nn.functional.layer_norm(x, (64,), weight, bias, 1e-6))


@pytest.mark.parametrize("offset", [0, 1])
def test_norms_of_sums_that_are_not_rounded(offset: int) -> None:
    x, residual, weight = (
        rand(*shape, seed=seed).bfloat16() for seed, shape in enumerate(((8, 512), (8, 512), (512,)))
    )
    total = x.float() + residual.float()
    norm = rms(total, weight.float() + offset)
    for compat in (sglang, flashinfer):
        given, kept = x.clone(), residual.clone()
        getattr(compat, "gemma_fused_add_rmsnorm" if offset else "fused_add_rmsnorm")(given, kept, weight, 1e-6)
        assert torch.equal(kept, total.bfloat16())
        # One in some 10000 of float32 numbers is so near to a tie that the order of the sum counts.
        assert int((given != norm.bfloat16()).sum()) <= 4
    if not offset:
        _, scales = vllm.rms_norm_dynamic_per_token_quant(x, weight, 1e-6, E4M3, None, residual.clone())
        close(scales, norm.abs().amax(-1, keepdim=True) / 448, 1e-6)


def test_sglang_int8_is_rounded_towards_zero() -> None:
    x = rand(4, 64)
    q, s = torch.empty(4, 64, dtype=torch.int8), torch.empty(4, 2)
    sglang.sgl_per_token_group_quant_8bit(x, q, s, 32, 1e-10, -128.0, 127.0)
    assert torch.equal(q.view(4, 2, 32), (x.view(4, 2, 32) / s[..., None]).to(torch.int8))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("apart", [False, True])
def test_flashinfer_append_paged_kv_cache(layout: str, apart: bool) -> None:
    key, value, _ = paged()
    shape = (5, 2, 8, 2, 16) if layout == "NHD" else (5, 2, 2, 8, 16)
    cache = torch.zeros(shape)
    indptr, pages = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([4, 1, 2], dtype=torch.int32)
    last = torch.tensor([3, 6], dtype=torch.int32)
    ids_are(flashinfer.get_seq_lens(indptr, last, 8), 11, 6)
    sequences = torch.tensor([0, 0, 1, 1, -1, 1], dtype=torch.int32)
    positions = torch.tensor([9, 10, 4, 5, 0, 8], dtype=torch.int32)
    given = tuple(cache.unbind(1)) if apart else cache
    flashinfer.append_paged_kv_cache(key, value, sequences, positions, given, pages, indptr, last, layout)
    wanted = torch.zeros(5, 2, 8, 2, 16)
    for token, (page, place) in enumerate([(1, 1), (1, 2), (2, 4), (2, 5)]):
        wanted[page, 0, place], wanted[page, 1, place] = key[token], value[token]
    assert torch.equal(cache, wanted if layout == "NHD" else wanted.transpose(2, 3))


def test_flashinfer_get_batch_indices_positions() -> None:
    ends, lengths = torch.tensor([0, 1, 3, 3, 7], dtype=torch.int32), torch.tensor([5, 4, 9, 6], dtype=torch.int32)
    sequences, positions = flashinfer.get_batch_indices_positions(ends, lengths, 9)
    assert (sequences.dtype, positions.dtype) == (torch.int32, torch.int32)
    ids_are(sequences, 0, 1, 1, 3, 3, 3, 3, -1, -1)
    ids_are(positions, 4, 2, 3, 2, 3, 4, 5, 0, 0)
    into = torch.empty(9, dtype=torch.int32), torch.empty(9, dtype=torch.int32)
    found = flashinfer.get_batch_indices_positions(ends, lengths, 9, *into)
    assert [x is y for x, y in zip(found, into, strict=True)] == [True, True]
    assert torch.equal(into[1], positions)


def probabilities(rows: int = 4, vocab: int = 40) -> Any:
    return rand(rows, vocab).mul(2).softmax(-1)


#: Each draw with arguments that leave the most probable token alone.
DRAWS: dict[str, tuple[Any, ...]] = {
    "top_p_sampling_from_probs": (0.0,),
    "top_k_sampling_from_probs": (1,),
    "min_p_sampling_from_probs": (1.0,),
    "top_k_top_p_sampling_from_probs": (1, 1.0),
    "top_k_top_p_sampling_from_logits": (100, 0.0),
}


@pytest.mark.parametrize("name", DRAWS)
def test_flashinfer_filters(name: str) -> None:
    probs = probabilities()
    values, best = probs.log() if name.endswith("logits") else probs, probs.argmax(-1)
    function = getattr(sampling, name)
    assert torch.equal(function(values, *DRAWS[name]).long(), best)
    arrays = [torch.full((4,), x, dtype=torch.float64 if isinstance(x, float) else torch.int64) for x in DRAWS[name]]
    assert torch.equal(function(values, *arrays, seed=3, offset=4).long(), best)
    for dtype in (torch.int32, torch.float16):
        assert torch.equal(function(values, *[array.to(dtype) for array in arrays], seed=3).long(), best)
    order = torch.tensor([3, 0, 0, 1, 2])
    long = [array.repeat(2)[:5] for array in arrays]
    assert torch.equal(function(values, *long, indices=order), best[order])
    found = function(values, *DRAWS[name], indices=order)
    assert found.dtype == torch.int64
    assert torch.equal(found, best[order])
    if "return_valid" in inspect.signature(function).parameters:
        ids, valid = function(values, *DRAWS[name], indices=order, return_valid=True)
        assert torch.equal(ids, best[order])
        assert valid.tolist() == [True] * 5


@pytest.mark.rare
def test_flashinfer_draws_follow_the_distribution_and_the_generator() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2]]).expand(4000, 3).contiguous()
    for draw in (
        lambda: sampling.sampling_from_probs(probs, seed=11, offset=2),
        lambda: sampling.sampling_from_probs(probs, seed=torch.tensor([11]), offset=torch.tensor([2])),
        lambda: sampling.sampling_from_logits(probs.log(), generator=torch.Generator().manual_seed(5)),
    ):
        ids = draw()
        assert torch.equal(ids, draw())
        close(torch.bincount(ids.long(), minlength=3) / 4000, torch.tensor([0.5, 0.3, 0.2]), 0.05)
    assert torch.equal(
        sampling.sampling_from_probs(probs, seed=11, offset=2),
        sampling.sampling_from_probs(probs, seed=torch.tensor([11]), offset=torch.tensor([2])),
    )
    assert not torch.equal(
        sampling.sampling_from_probs(probs, seed=11, offset=2), sampling.sampling_from_probs(probs, seed=11, offset=3)
    )
    torch.manual_seed(7)
    first = sampling.sampling_from_probs(probs)
    assert not torch.equal(first, sampling.sampling_from_probs(probs))
    torch.manual_seed(7)
    assert torch.equal(first, sampling.sampling_from_probs(probs))
    by_row = torch.full((4000,), 9)
    assert len({*sampling.sampling_from_probs(probs, seed=by_row).tolist()}) == 1
    # An offset without a seed is not used; the draw is the generator's.
    torch.manual_seed(7)
    assert torch.equal(first, sampling.sampling_from_probs(probs, offset=3))
    unsigned = {"seed": torch.tensor([2**64 - 1], dtype=torch.uint64), "offset": torch.tensor([5], dtype=torch.uint64)}
    signed = {"seed": torch.tensor([-1]), "offset": torch.tensor([5])}
    assert torch.equal(sampling.sampling_from_probs(probs, **unsigned), sampling.sampling_from_probs(probs, **signed))
    with pytest.raises(ValueError, match="seed and offset must both be tensors or both be scalars"):
        sampling.sampling_from_probs(probs, seed=torch.tensor([1]), offset=2)
    large = sampling.sampling_from_probs(probs, seed=2**64 - 1)
    assert torch.equal(large, sampling.sampling_from_probs(probs, seed=-1))


def test_flashinfer_check_nan() -> None:
    probs = probabilities()
    probs[1, 2] = torch.nan
    with pytest.raises(ValueError, match="Input probs contains NaN"):
        sampling.top_p_sampling_from_probs(probs, 0.5, check_nan=True)
    with pytest.raises(ValueError, match="Input logits contains NaN"):
        sampling.sampling_from_logits(probs, check_nan=True)


def test_flashinfer_parameters_that_are_not_by_row() -> None:
    probs = probabilities()
    for wrong, words in (
        (torch.full((4, 1), 0.5), r"1D tensor or scalar for top_p, got a 2D tensor"),
        (torch.tensor(0.5), r"1D tensor of shape \(batch_size,\) or scalar for top_p, got a 0-dimensional tensor"),
        (torch.full((3,), 0.5), r"batch size mismatch: top_p has 3 for 4 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            sampling.top_p_sampling_from_probs(probs, wrong)
        with pytest.raises(ValueError, match=words):
            sampling.top_p_renorm_probs(probs, wrong)


@pytest.mark.parametrize("compat", [sglang, sampling], ids=["sglang", "flashinfer"])
def test_renormalization(compat: Any) -> None:
    probs = probabilities()
    best = probs.topk(3)
    kept = torch.zeros_like(probs).scatter(1, best.indices, best.values)
    for name in ("top_k_renorm_probs", "top_k_renorm_prob"):
        close(getattr(compat, name)(probs, 3), kept / kept.sum(-1, keepdim=True))
    close(compat.top_k_renorm_probs(probs, 1000), probs)
    ranked = probs.sort(descending=True)
    inside = ranked.values.cumsum(-1) - ranked.values < 0.6
    kept = torch.zeros_like(probs).scatter(1, ranked.indices, ranked.values * inside)
    for top_p in (0.6, torch.full((4,), 0.6, dtype=torch.float64)):
        for name in ("top_p_renorm_probs", "top_p_renorm_prob"):
            close(getattr(compat, name)(probs, top_p), kept / kept.sum(-1, keepdim=True))


def test_flashinfer_softmax_and_mask() -> None:
    logits = rand(4, 40)
    close(sampling.softmax(logits), logits.softmax(-1))
    close(sampling.softmax(logits, torch.full((4,), 0.5, dtype=torch.float64)), (logits * 2).softmax(-1))
    masked = sampling.top_k_mask_logits(logits, 3)
    assert torch.equal(masked > -torch.inf, logits >= logits.topk(3).values[:, 2:])
    assert torch.equal(sampling.top_k_mask_logits(logits, 1000), logits)


def test_flashinfer_chain_speculative_sampling() -> None:
    target = probabilities(6, 20).view(2, 3, 20)
    drafts = target[:, :2].argmax(-1).int()
    ids, accepted, emitted = sampling.chain_speculative_sampling(target[:, :2].contiguous(), drafts, target, seed=1)
    assert torch.equal(ids[:, :2], drafts)
    ids_are(accepted, 2, 2)
    ids_are(emitted, 2, 2)
    counts = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([7, 8], dtype=torch.int32)
    _, *found = sampling.chain_speculative_sampling(target[:, :2].contiguous(), drafts.long(), target, *counts)
    assert [x is y for x, y in zip(found, counts, strict=True)] == [True, True]
    ids_are(counts[0], 7, 8)
    ids_are(counts[1], 9, 10)


# --- what is refused ----------------------------------------------------------------------------------

X, W, ONE = rand(4, 64), rand(64), torch.ones(1)
LATENT = rand(1, 1, 4, 576), rand(1, 64, 1, 576), None, ONE.int(), 512
IDS, EMPTY = torch.zeros(4, 2, dtype=torch.int32), torch.empty(4, 2)
QUANT = "sgl_per_token_group_quant_8bit"
REFUSED: list[tuple[str, str, str, tuple[Any, ...], dict[str, Any]]] = [
    ("vllm", "rms_norm_dynamic_per_token_quant", "quant_dtype", (X, W, 1e-6, torch.int8), {}),
    ("vllm", "rms_norm_dynamic_per_token_quant", "scale_ub", (X, W, 1e-6, E4M3, ONE), {}),
    ("vllm", "rms_norm_per_block_quant", "group_size", (X, W, 1e-6, E4M3, [2, 64]), {}),
    ("vllm", "rms_norm_per_block_quant", "quant_dtype", (X, W, 1e-6, torch.int8, [1, 64]), {}),
    ("vllm", "silu_and_mul_per_block_quant", "quant_dtype", (X, 32, torch.int8), {}),
    ("vllm", "silu_and_mul_per_block_quant", "scale_ub", (X, 32, E4M3, ONE), {}),
    ("vllm", "scaled_fp8_quant", "group_shape", (X, ONE), {"group_shape": (1, 64)}),
    ("vllm", "scaled_fp8_quant", "scale", (X, torch.ones(4)), {}),
    ("vllm", "scaled_fp4_quant", "backend", (X, ONE), {"backend": "trtllm"}),
    ("vllm", "scaled_fp4_quant", "padded_n", (X, ONE), {"padded_n": 128}),
    ("vllm", "moe_sum", "topk_ids", (X, X), {"topk_ids": IDS}),
    ("vllm", "moe_align_block_size", "scatter_idx", (IDS, 4, 4, IDS, IDS, IDS), {"scatter_idx": IDS}),
    ("vllm", "topk_softmax", "is_padding", (EMPTY, IDS, None, X), {"is_padding": ONE}),
    ("vllm", "topk_sigmoid", "is_padding", (EMPTY, IDS, None, X), {"is_padding": ONE}),
    ("vllm", "grouped_topk", "scoring_func", (X, 4, 2, 2, True, 1.0, W), {}),
    ("vllm", "reshape_and_cache", "interleaved_v", (X, X, X, X, IDS, "auto", ONE, ONE, True), {}),
    ("vllm", "concat_and_cache_mla", "skip_scale", (X, X, X, IDS, "auto", ONE, True), {}),
    ("vllm", "gather_and_maybe_dequant_cache", "num_tokens", (X, X, IDS, IDS, 2, "auto", ONE, IDS), {}),
    ("vllm", "cp_gather_and_upconvert_fp8_kv_cache", "host_cache", (X, X, IDS, IDS, 2), {"host_cache": X}),
    ("vllm.moe_permute_unpermute", "moe_permute", "scratch", (X, None, IDS, 4), {"scratch": 1}),
    ("flashinfer.norm", "rmsnorm_quant", "out", (X.to(torch.float8_e5m2), X, W, 1.0), {}),
    ("flashinfer.norm", "fused_add_rmsnorm_quant", "out", (X.to(torch.float8_e5m2), X, X, W, 1.0), {}),
    ("sglang.flash_mla", "get_mla_metadata", "is_fp8_kvcache", (IDS, 4, 1, None, True), {}),
    ("sglang.flash_mla", "flash_mla_with_kvcache", "descale_q", (*LATENT, None, None), {"descale_q": ONE}),
    ("sglang", QUANT, "scale_ue8m0", (X, X.to(E4M3), EMPTY, 32, 1e-10, -448, 448, True), {}),
    ("sglang", QUANT, "output_q", (X, X, EMPTY, 32, 1e-10, -448, 448), {}),
    ("sglang", QUANT, "fp8_max", (X, X.to(E4M3), EMPTY, 32, 1e-10, -448, 240), {}),
    ("sglang", QUANT, "eps", (X, X.to(E4M3), EMPTY, 32, 1e-5, -448, 448, False, True), {}),
    ("sglang", QUANT, "output_q", (X, X.to(torch.int8), EMPTY, 32, 1e-10, -128, 127, False, True), {}),
]


@pytest.mark.parametrize(("module", "name", "argument", "args", "kwargs"), REFUSED)
def test_what_cukern_does_not_have_is_refused_by_name(
    module: str, name: str, argument: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(NotImplementedError, match=rf"^{name}: {argument} must be .* with cukern, got "):
        getattr(module_of(module), name)(*args, **kwargs)
