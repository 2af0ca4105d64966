"""What the shared suites know of quantization."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cukern
from cukern.ops.quantization import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import BF16, SHARE, Bits, Call, Function, Spec, floats, fp8_bytes, in_variants, integers

OF_A_ROW = Bits("row", "a row", "the row and the scales that are given")
NO_BOUND = {"late scale_ub": "a bound is of scales that are found"}
OF_ALL = {"rows": "one scale is found for all"}
ONE_SCALE = Bits(
    "batch",
    on="the largest magnitude of the whole tensor, where one scale is found; the row alone, where a scale is given or "
    "each row has one",
)


def _calls() -> list[Call]:
    packed = fp8_bytes(floats(5, 128, dtype=BF16))[:2, :32].contiguous()
    return [
        Call("scaled_fp8_quant", (floats(3, 32, dtype=BF16), SHARE), exempt=NO_BOUND),
        Call("scaled_fp8_quant", (floats(3, 32, dtype=BF16),), {"use_per_token_if_dynamic": True}),
        Call("per_token_group_quant_fp8", (floats(3, 64), 32), {"column_major_scales": True}),
        Call("per_token_group_quant_int8", (floats(3, 64, dtype=BF16), 16)),
        Call("scaled_int8_quant", (floats(3, 32),)),
        Call("scaled_int8_quant", (floats(3, 32), SHARE, integers(3), False), {"variant": "auto"}),
        Call("silu_and_mul_quant", (floats(3, 64, dtype=BF16), "gelu_tanh"), {"group_size": 16}),
        Call("quantize_mxfp4", (floats(3, 64),)),
        Call("dequantize_mxfp4", (packed, integers([120, 3], [130, 127], dtype=torch.uint8), "float32")),
        Call("scaled_fp4_quant", (floats(3, 64), SHARE)),
        Call("dequantize_nvfp4", (packed, packed[:, :4].contiguous(), SHARE)),
    ]


def _large_calls() -> list[Call]:
    x = floats(40, 256)
    return [
        *in_variants(Call("scaled_fp8_quant", (x,), exempt=OF_ALL), "vector", "scalar"),
        *in_variants(Call("scaled_fp8_quant", (x, torch.ones(1))), "vector", "scalar"),
        Call("per_token_group_quant_fp8", (x, 64)),
        *in_variants(Call("scaled_int8_quant", (x, None, None, False)), "vector", "scalar"),
        Call("quantize_mxfp4", (x,)),
        Call("scaled_fp4_quant", (x, torch.ones(1))),
    ]


def _at_first_use() -> Iterator[Variant]:
    yield op._groups_variant("float16", "E4M3", 4, 8)
    yield op._rows_variant("bfloat16", "INT8_AZP", 0, 1)
    yield op._magnitude_variant("float16", 1)
    yield op._tensor_variant("float32", "INT8_AZP", 0, 1, False)
    yield op._fp4_variant("float16", "NVFP4", 2)
    yield op._read_fp4_variant("float32", "NVFP4", False)


SPEC = Spec(
    functions={
        "dequantize_mxfp4": Function(
            "packed scale", OF_A_ROW, many_rows=[lambda x: cukern.dequantize_mxfp4(*cukern.quantize_mxfp4(x))]
        ),
        "dequantize_nvfp4": Function(
            "packed scale",
            OF_A_ROW,
            many_rows=[lambda x: cukern.dequantize_nvfp4(*cukern.scaled_fp4_quant(x, 1.0), 1.0)],
        ),
        "per_token_group_quant_fp8": Function(
            "x", OF_A_ROW, many_rows=[lambda x: cukern.per_token_group_quant_fp8(x, 128)]
        ),
        "per_token_group_quant_int8": Function(
            "x", OF_A_ROW, many_rows=[lambda x: cukern.per_token_group_quant_int8(x, 128)]
        ),
        "quantize_mxfp4": Function("x", OF_A_ROW, many_rows=[cukern.quantize_mxfp4]),
        "scaled_fp4_quant": Function("input", OF_A_ROW, many_rows=[lambda x: cukern.scaled_fp4_quant(x, 1.0)]),
        "scaled_fp8_quant": Function(
            "input",
            ONE_SCALE,
            many_rows=[
                lambda x: cukern.scaled_fp8_quant(x, 0.01),
                lambda x: cukern.scaled_fp8_quant(x, None, None, None, True),
                cukern.scaled_fp8_quant,
            ],
        ),
        "scaled_int8_quant": Function("input", ONE_SCALE, many_rows=[cukern.scaled_int8_quant]),
        "silu_and_mul_quant": Function(
            "x",
            OF_A_ROW,
            tolerance=("quantization.activated", "quantization.activated_scales"),
            many_rows=[cukern.silu_and_mul_quant],
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
)
