"""Calls that take other ways through the kernels than the small ones: rows in parts, variants by name."""

from __future__ import annotations

import torch

from tests.calls import Call, drawn, flags, floats, integers


def _in_variants(call: Call, *variants: str) -> list[Call]:
    return [call._replace(options={**call.options, "variant": variant}) for variant in variants]


def _large_attention() -> list[Call]:
    rows, caches = [floats(1, 64, seed=i) for i in range(3)], [floats(3000, 1, 1, 64, seed=i) for i in range(2)]
    whole = [floats(3, 256, seed=i, dtype=torch.bfloat16) for i in range(3)]
    whole_caches = [floats(20, 3, 4, 64, seed=i, dtype=torch.bfloat16) for i in range(2)]
    memories = [floats(2, 3000, 2, 64, seed=i) for i in range(2)]
    half = {"dtype": torch.float16}
    blocks = floats(192, 2, 8, 16, 8, seed=1, **half), floats(192, 2, 64, 16, seed=2, **half).clamp(-1, 1)
    query, lengths = floats(3, 8, 64, **half), integers(3000, 0, 17)
    tables = torch.arange(3 * 188, dtype=torch.int32).view(3, 188) % 192
    paged = query, *blocks, tables, lengths
    one = torch.ones(1)
    vllm = [query, *blocks, 2, 0.125, tables, lengths, 16, 3000, None, "auto", one, one, 0, 0, 0, 64, 0]
    workspaces = [torch.zeros(3, 8, 6), torch.zeros(3, 8, 6), torch.zeros(3, 8, 6, 64, **half)]
    latents = floats(3, 2, 16, 576, dtype=torch.bfloat16), floats(40, 64, 1, 576, seed=1, dtype=torch.bfloat16) / 10
    pages = torch.arange(3 * 32, dtype=torch.int32).view(3, 32) % 40
    mla = Call("flash_mla_with_kvcache", (*latents, pages, integers(30, 0, 2000), 512, None, None, None, True))
    texts = [floats(300, 3, 64, seed=i, **half).clamp(-1, 1) for i in range(3)]
    varlen = Call("varlen_attention", (*texts, integers(0, 130, 130, 290)))
    other = Call("varlen_attention", (floats(200, 1, 64), caches[0][:, 0], caches[1][:, 0]))
    return [
        varlen,
        *_in_variants(varlen, "mma", "fma"),
        other._replace(args=(*other.args, integers(0, 70, 200), integers(0, 100, 3000)), options={"causal": True}),
        Call("masked_attention", (*rows, None, None, None, *caches, 3000)),
        *_in_variants(
            Call("masked_attention", (*whole, None, None, None, *whole_caches, 20)), "specialized", "dynamic"
        ),
        Call("cross_attention", (floats(2, 128), None, *memories, integers(3000, 17))),
        *_in_variants(Call("paged_attention", paged), "specialized", "dynamic", "scalar"),
        Call("paged_attention_v1", (torch.zeros_like(query), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(query), *workspaces, *vllm)),
        Call("get_mla_metadata", (integers(30, 0, 2000), 32, 1)),
        mla,
        *_in_variants(mla, "mma", "dynamic"),
    ]


def _large_routing() -> list[Call]:
    gate = Call(
        "moe_fused_gate",
        (floats(1000, 256), floats(256, seed=1), 8, 4, 8),
        {"num_token_non_padded": integers(900)},
    )
    ids, rows = drawn(64, 3000, 8), floats(3000, 512, dtype=torch.bfloat16)
    inverse = torch.randperm(24000, generator=torch.Generator().manual_seed(0)).int().view(3000, 8)
    product = Call(
        "moe_gemm",
        (floats(170, 256, dtype=torch.bfloat16), floats(3, 264, 256, dtype=torch.bfloat16), integers(0, 30, 30, 170)),
    )
    by_block = Call(
        "moe_gemm",
        tuple(x.to(torch.float8_e4m3fn).view(torch.uint8) for x in (product.args[0], product.args[1]))
        + product.args[2:],
        {"a_scale": floats(170, 2).abs() / 10, "b_scale": floats(3, 3, 2).abs(), "out_dtype": "float16"},
    )
    layer = (
        floats(33, 128, dtype=torch.bfloat16),
        *(floats(*shape, seed=i, dtype=torch.bfloat16) / 11 for i, shape in enumerate(((3, 64, 128), (3, 128, 32)))),
    )
    return [
        *_in_variants(gate, "specialized", "dynamic"),
        *_in_variants(Call("moe_sort", (ids, 64)), "many_blocks", "counted"),
        Call("moe_sort", (ids[:50].contiguous(), 64), {"variant": "one_block"}),
        Call("moe_align_block_size", (ids, 64, 64)),
        Call("moe_permute", (rows[:500], None, ids[:500].contiguous(), 64)),
        *_in_variants(
            Call("moe_unpermute", (floats(3000, 64), floats(24000, 64), floats(3000, 8), inverse)), "auto", "dynamic"
        ),
        *_in_variants(product, "auto", "mma", "stream"),
        by_block,
        Call("fused_experts", (*layer, floats(33, 2).abs(), drawn(3, 33, 2))),
    ]  # fmt: skip


def _large_decoding() -> list[Call]:
    logits, log_probs = floats(50, 5000) * 4, torch.log_softmax(floats(3, 4, 5001), dim=2)
    random = {"seed": torch.arange(50), "offset": torch.arange(50)}
    top_p, top_k = torch.linspace(0.1, 1, 50), drawn(5000, 50) + 1
    step = {"top_p": top_p, **random, "finished": drawn(2, 50).bool(), "end_id": 4, "sequence_length": drawn(9, 50)}
    probs = torch.softmax(logits, 1)
    chain = torch.softmax(floats(9, 3, 500), 2), drawn(500, 9, 3), torch.softmax(floats(9, 4, 500, seed=1), 2)
    penalized = Call(
        "apply_penalties",
        (floats(4, 9000, dtype=torch.bfloat16),),
        {
            "repetition_penalty": floats(4).abs() + 0.5, "output_ids": drawn(9000, 4, 60),
            "sequence_length": integers(60, 0, 7, 33), "min_length": integers(9, 9, 9, 9), "end_id": 5,
        },
    )  # fmt: skip
    state = [
        floats(3, 4),
        floats(3, 4, seed=1),
        drawn(9, 3, 4),
        drawn(9, 3, 4),
        drawn(4, 3, 4),
        flags(False, True, False),
    ]
    caches = Call("update_kv_cache", (floats(6, 12, 4, 32), floats(6, 12, 4, 32, seed=1), drawn(4, 3, 4), 6))
    return [
        *_in_variants(Call("sample", (logits,), step), "auto", "block"),
        *_in_variants(Call("softmax", (logits,)), "auto", "block"),
        *_in_variants(Call("top_k_sampling_from_probs", (probs, top_k), random), "auto", "block"),
        *_in_variants(Call("top_k_renorm_probs", (probs, top_k)), "auto", "block"),
        *_in_variants(Call("top_p_renorm_probs", (probs, top_p)), "auto", "block"),
        *_in_variants(Call("chain_speculative_sampling", chain, {"seed": torch.arange(9)}), "auto", "block"),
        *_in_variants(Call("beam_topk", (log_probs, 6)), "narrow", "wide"),
        Call("beam_topk", (log_probs, 6), {"diversity_rate": -0.5}),
        Call("beam_search_step", (log_probs, *state, 3, 9, [5])),
        Call("gather_tree", (drawn(50, 20, 3, 4), drawn(4, 20, 3, 4), None, 3)),
        *_in_variants(caches, "vector", "scalar"),
        *_in_variants(penalized, "wide", "narrow"),
        *_in_variants(
            Call("update_logits", (floats(4, 9000), floats(9000), flags(False, True, False, True), 5)), "wide", "narrow"
        ),
    ]  # fmt: skip


def _large_rows() -> list[Call]:
    half = {"dtype": torch.float16}
    words = integers(0, 20, 7, 3, 12, 9)
    positions = [s * 20 + t for s, count in enumerate(words.tolist()) for t in range(count)]
    offsets = integers(*(at - i for i, at in enumerate(positions)))
    padded, by_head, packed = floats(6, 20, 768), floats(6, 12, 20, 64), floats(51, 768)
    bias, x, wide = floats(768, seed=1), floats(40, 256), floats(40, 2048, dtype=torch.bfloat16)
    narrow = floats(40, 768, **half)
    embedding = Call(
        "embedding_lookup_sine_position_encoding",
        (floats(50, 256, **half), floats(50, 256, seed=1, **half), drawn(50, 8), 0),
        {"position_ids": integers(9, dtype=torch.int64)},
    )
    return [
        Call("build_sequence_length_padding_offset", (words, 20), {"valid_word_num": 51}),
        *_in_variants(Call("remove_sequence_length_padding", (padded, offsets)), "specialized", "dynamic"),
        *_in_variants(Call("transpose_remove_padding", (by_head, offsets)), "specialized", "dynamic"),
        *_in_variants(
            Call("rebuild_sequence_length_padding", (packed, offsets, 6, 20)), "specialized", "dynamic"
        ),
        *_in_variants(
            Call("add_qkv_bias_rebuild_padding", (packed, packed, packed, bias, bias, bias, offsets, 6, 20, 12)),
            "specialized", "dynamic",
        ),
        *_in_variants(embedding, "wide", "narrow"),
        *_in_variants(Call("moe_activation", (x, "gelu")), "vector", "scalar"),
        *_in_variants(Call("add_bias_act", (wide, wide[0])), "vector", "scalar"),
        *_in_variants(Call("rms_norm", (wide, wide[0])), "specialized", "dynamic", "scalar"),
        Call("rms_norm", (floats(3, 9001), floats(9001, seed=1))),
        *_in_variants(
            Call("fused_add_rms_norm", (wide, wide.flip(0), wide[0].float())), "specialized", "dynamic", "scalar"
        ),
        Call("fused_add_rms_norm", (floats(3, 20000), floats(3, 20000, seed=1), None)),
        *_in_variants(Call("rms_norm_quant", (wide, wide[0])), "specialized", "dynamic", "scalar"),
        Call("fused_add_rms_norm_quant", (wide, wide.flip(0), wide[0]), {"group_size": None}),
        *_in_variants(Call("layer_norm", (narrow, narrow[0], narrow[1])), "specialized", "dynamic", "scalar"),
        Call("layer_norm", (floats(3, 9001), floats(9001, seed=1), None)),
        *_in_variants(
            Call("fused_add_layer_norm", (narrow, narrow.flip(0), narrow[0].float(), narrow[1].float())),
            "specialized", "dynamic", "scalar",
        ),
        Call(
            "fused_add_layer_norm",
            (floats(3, 20000), floats(3, 20000, seed=1), None, floats(20000, seed=2)),
            {"input_bias": floats(20000, seed=3), "residual_out": torch.zeros(3, 20000)},
        ),
        *_in_variants(Call("scaled_fp8_quant", (x,)), "vector", "scalar"),
        *_in_variants(Call("scaled_fp8_quant", (x, torch.ones(1))), "vector", "scalar"),
        Call("per_token_group_quant_fp8", (x, 64)),
        *_in_variants(Call("scaled_int8_quant", (x, None, None, False)), "vector", "scalar"),
        Call("quantize_mxfp4", (x,)),
        Call("scaled_fp4_quant", (x, torch.ones(1))),
    ]  # fmt: skip


def _large_calls() -> dict[str, Call]:
    calls = [*_large_attention(), *_large_routing(), *_large_decoding(), *_large_rows()]
    named: dict[str, Call] = {}
    for call in calls:
        key = f"{call.name} large {call.options.get('variant', 'auto')}"
        named[key if key not in named else f"{key} again"] = call
    assert len(named) == len(calls)
    return named


LARGE_CALLS: dict[str, Call] = _large_calls()
