"""What the shared suites know of grouped products."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import torch

import cukern
from cukern.ops import moe_gemm
from cukern.ops.moe_gemm import routed
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COPIES,
    IN_ITS_FILE,
    SHARED_BYTES,
    Call,
    Function,
    Spec,
    floats,
    fp8_bytes,
    in_variants,
    integers,
)

BY_BATCH = {"rows": "the order of a sum goes by the number of rows"}
NO_BATCH = {"rows": "weights have no batch"}
IN_64_BITS = {"many rows": "places in its arrays are counted in 64 bits alone"}


def _calls() -> list[Call]:
    experts = floats(2, 32, 128, seed=1, dtype=BF16)
    fp8_scales = {"a_scale": floats(5, 1, seed=2) / 10, "b_scale": floats(2, 1, 1, seed=3)}
    fp4_scales = {"b_scale": integers(*[[[120] * 4] * 32] * 2, dtype=torch.uint8)}
    packed = experts[:, :, :32].contiguous().view(torch.uint8)
    return [
        Call("moe_gemm", (floats(4, 128, dtype=BF16), experts, integers(0, 1, 4))),
        Call(
            "moe_gemm",
            (fp8_bytes(floats(5, 128, dtype=BF16)), fp8_bytes(experts), integers(0, 1, 3, dtype=torch.int64)),
            {**fp8_scales, "row_token": integers(4, 0, 2), "activation": "silu", "out_dtype": "float16"},
            tolerance="moe_gemm.fp8_out",
        ),
        Call(
            "moe_gemm_batched",
            (floats(2, 3, 128, dtype=BF16), packed, integers(3, 3)),
            fp4_scales,
        ),
        Call(
            "moe_gemm",
            (floats(4, 128, dtype=BF16), packed, integers(0, 1, 4)),
            {
                **fp4_scales,
                "bias": floats(2, 32, seed=4),
                "activation": "swigluoai",
                "alpha": 1.5,
                "limit": 3.0,
                "interleaved": True,
            },
        ),
        Call(
            "moe_gemm",
            (floats(4, 13, dtype=BF16), floats(2, 21, 13, seed=1, dtype=BF16), integers(0, 1, 4)),
            {"bias": floats(2, 21, seed=4)},
        ),
        Call("moe_gemm", (floats(4, 24), floats(2, 20, 24, seed=1), integers(0, 1, 4)), {"activation": "silu"}),
        Call("prepare_weights", (packed, fp4_scales["b_scale"])),
        Call("restore_weights", (cukern.prepare_weights(packed, fp4_scales["b_scale"]),)),
        Call("prepare_weights", (packed, fp4_scales["b_scale"]), {"a_dtype": "float8_e4m3fn"}),
        *_dense_calls(experts[0], packed[0], fp4_scales["b_scale"][0]),
    ]


def _dense_calls(w: torch.Tensor, packed: torch.Tensor, e8m0: torch.Tensor) -> list[Call]:
    x, bytes_of_w, name = floats(4, 128, dtype=BF16), fp8_bytes(w), "quantized_matmul"
    # The sums have magnitude 1, as the tolerance of FP8 wants.
    scales = {"w_scale": floats(1, 1, seed=3) / 10, "bias": floats(32, seed=4)}
    of_rows = {"x_scale": floats(4, 1, seed=2) / 10, "w_scale": floats(32, seed=3), "out_dtype": "float16"}
    static = {"x_scale": floats(1, seed=2).abs() / 10, "w_scale": floats(1, seed=3) / 10}
    fp8 = "moe_gemm.fp8_out"
    return [
        Call(name, (x, bytes_of_w), scales, note="of blocks", tolerance=fp8),
        Call(name, (fp8_bytes(x), bytes_of_w), of_rows, note="of rows", tolerance=fp8),
        Call(name, (x.half(), bytes_of_w), static, note="of one scale", tolerance=fp8),
        Call(name, (x, packed, e8m0), note="of 4 bits"),
    ]


def _large_calls() -> list[Call]:
    rows, experts, offsets = floats(170, 256, dtype=BF16), floats(3, 264, 256, dtype=BF16), integers(0, 30, 30, 170)
    scales = {"a_scale": floats(170, 2).abs() / 10, "b_scale": floats(3, 3, 2).abs()}
    return [
        *in_variants(Call("moe_gemm", (rows, experts, offsets)), "auto", "mma", "stream"),
        Call("moe_gemm", (fp8_bytes(rows), fp8_bytes(experts), offsets), {**scales, "out_dtype": "float16"}),
    ]


def _at_first_use() -> Iterator[Variant]:
    op = moe_gemm.kernels
    yield op.WGMMA_FORMS[-1].variant("float16", 0)
    yield moe_gemm.fp8.Fp8Wgmma(128, 1).variant("bfloat16", False, 0)
    yield moe_gemm.fp8.Fp8Wgmma(256, 2).variant("bfloat16", True, 1)
    yield moe_gemm.fp8.Fp8Wgmma(288, 2).variant("float16", True, 0)
    yield op.stream_variant(1, "bfloat16", "FP8", False, 0)
    one = moe_gemm.stream_one
    for tokens, dtype in itertools.product(one.TOKENS, ("bfloat16", "float16")):
        for tile in one.TILES:
            yield one.variant_of(tokens, dtype, 65 if dtype == "bfloat16" else 0, tile)
    for k in (256, 512, 768, 1280, 2048, 7168):
        yield routed.routed_variant("float16", 65, routed.tile_for(k))
        yield routed.summed_variant("float16", 64, routed.tile_for(k), 2)
    for weights in ("MXFP4", "NVFP4"):
        yield from (op.prepare_variant(weights), op.prepare_variant(weights, True))
        yield op.FP4_FORMS[-1].variant("float16", weights, 1, False)
    yield from (moe_gemm.folded.prepare_variant(), moe_gemm.folded.prepare_variant(True))
    yield moe_gemm.folded.FOLDED_FORMS[-1].variant("float16", 1)
    of_4_bits = itertools.product(("MXFP4", "NVFP4"), ("bfloat16", "float16"))
    for (weights, dtype), most in itertools.product((("FP8", "bfloat16"), *of_4_bits), SHARED_BYTES.values()):
        is_by_blocks = weights == "FP8"
        form = op.MMA_FORMS[weights][2].fit(weights, is_by_blocks, most)
        yield form.variant(dtype, weights, is_by_blocks, 0)


SPEC = Spec(
    functions={
        "moe_gemm": Function(
            "a expert_offsets a_scale row_token",
            tolerance="moe_gemm.out",
            exempt=IN_ITS_FILE | BY_BATCH,
            grown={"expert_offsets": operator.mul},
        ),
        "moe_gemm_batched": Function(
            "a:1 expert_num_tokens",
            tolerance="moe_gemm.out",
            exempt=BY_BATCH | {"many rows": "it runs the kernel of moe_gemm"},
            grown={"expert_num_tokens": operator.mul},
        ),
        "quantized_matmul": Function(
            "x x_scale",
            tolerance="moe_gemm.out",
            exempt=BY_BATCH | {"many rows": "it runs the kernels of moe_gemm"},
            grown={"x_scale": lambda scales, times: scales.repeat(times, 1) if len(scales) > 1 else scales},
        ),
        "prepare_weights": Function("b b_scale", COPIES, exempt=NO_BATCH | IN_64_BITS),
        "restore_weights": Function("prepared", COPIES, exempt=NO_BATCH | IN_64_BITS),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
    allowed_spills={("gemm_fp8_blocks", "90a"): {"13.5": 112}, ("gemm_stream_routed", "90a"): {"13.5": 8}},
)
