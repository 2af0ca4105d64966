"""What the shared suites know of norms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import cukern
from cukern.ops import norm as op
from cukern.runtime.kernel import Variant
from tests.spec import BF16, DTYPES, SHARE, Bits, Call, Function, Spec, floats, in_variants, zeros_like

OF_A_ROW = Bits("row", "a row", "the row, weight, bias and width; not on the variant")


def _calls() -> list[Call]:
    rows = floats(3, 40), floats(3, 40, seed=1)
    return [
        Call("rms_norm", (floats(3, 2, 48, dtype=BF16), floats(48, seed=1, dtype=BF16))),
        Call("rms_norm", (floats(3, 37), None, 0.0), {"variant": "auto"}),
        Call("fused_add_rms_norm", (*rows, floats(40, seed=2)), {"weight_offset": 1.0}),
        Call(
            "fused_add_rms_norm",
            (floats(3, 40, dtype=BF16), floats(3, 40, seed=1, dtype=BF16), None),
            {"round_sum": False},
        ),
        Call("rms_norm_quant", (floats(3, 256, dtype=BF16), floats(256, seed=1))),
        Call("rms_norm_quant", (floats(3, 50), floats(50, seed=1)), {"group_size": None}),
        Call("rms_norm_quant", (floats(3, 40), None), {"scale": SHARE}),
        Call("fused_add_rms_norm_quant", (floats(3, 64), floats(3, 64, seed=1), None, 1e-5), {"group_size": 32}),
        Call("layer_norm", (floats(3, 2, 48, dtype=BF16), floats(48, seed=1), floats(48, seed=2))),
        Call("layer_norm", (floats(3, 37), None, None, 0.0), {"variant": "auto"}),
        Call("fused_add_layer_norm", (*rows, floats(40, seed=2), floats(40, seed=3))),
        Call(
            "fused_add_layer_norm",
            (*rows, floats(40, seed=2), None, 1e-12),
            {"input_bias": floats(40, seed=3), "residual_out": torch.zeros(3, 40)},
        ),
    ]


def _large_calls() -> list[Call]:
    wide, narrow = floats(40, 2048, dtype=BF16), floats(40, 768, dtype=torch.float16)
    sums, weight = (narrow, narrow.flip(0)), narrow[0].float()
    in_all = [
        Call("rms_norm", (wide, wide[0])),
        Call("fused_add_rms_norm", (wide, wide.flip(0), wide[0].float())),
        Call("rms_norm_quant", (wide, wide[0])),
        Call("layer_norm", (narrow, narrow[0], narrow[1])),
        Call("fused_add_layer_norm", (*sums, weight, narrow[1].float())),
    ]
    more = {"input_bias": floats(20000, seed=3), "residual_out": torch.zeros(3, 20000)}
    return [
        *(each for call in in_all for each in in_variants(call, "specialized", "dynamic", "scalar")),
        Call("rms_norm", (floats(3, 9001), floats(9001, seed=1))),
        Call("fused_add_rms_norm", (floats(3, 20000), floats(3, 20000, seed=1), None)),
        Call("fused_add_rms_norm_quant", (wide, wide.flip(0), wide[0]), {"group_size": None}),
        Call("layer_norm", (floats(3, 9001), floats(9001, seed=1), None)),
        Call("fused_add_layer_norm", (floats(3, 20000), floats(3, 20000, seed=1), None, floats(20000, seed=2)), more),
    ]


def _at_first_use() -> Iterator[Variant]:
    for dtype, add, width in itertools.product(DTYPES, (False, True), (8, 2048, 9000)):
        yield op._variant(op._Operation(dtype, dtype, add), width, False, False)
    for width, wide in itertools.product((8, 1024, 9000), (False, True)):
        yield op._variant(op._Operation("bfloat16", "float32", True), width, False, wide)
    for dtype, (result, group) in itertools.product(DTYPES, (("BY_TENSOR", 0), ("BY_ROW", 0), ("BY_GROUP", 32))):
        for width, wide in ((64, False), (9056, True)):
            yield op._variant(op._Operation(dtype, dtype, True, result, group), width, False, wide)
    for dtype, add, width in itertools.product(DTYPES, (False, True), (8, 2048, 9000)):
        yield op._layer_variant(op._Operation(dtype, dtype, add), width, False, False)
    for width, wide in itertools.product((8, 1024, 9000), (False, True)):
        yield op._layer_variant(op._Operation("bfloat16", "float32", True), width, False, wide)


SPEC = Spec(
    functions={
        "fused_add_layer_norm": Function(
            "input residual residual_out",
            OF_A_ROW,
            many_rows=[lambda x: cukern.fused_add_layer_norm(x, zeros_like(x), None, None, residual_out=zeros_like(x))],
        ),
        "fused_add_rms_norm": Function(
            "input residual", OF_A_ROW, many_rows=[lambda x: cukern.fused_add_rms_norm(x, zeros_like(x), None)]
        ),
        "fused_add_rms_norm_quant": Function(
            "input residual", OF_A_ROW, many_rows=[lambda x: cukern.fused_add_rms_norm_quant(x, zeros_like(x), None)]
        ),
        "layer_norm": Function("input", OF_A_ROW, many_rows=[lambda x: cukern.layer_norm(x, x[0] + 1, x[1])]),
        "rms_norm": Function("input", OF_A_ROW, many_rows=[lambda x: cukern.rms_norm(x, x[0] + 1)]),
        "rms_norm_quant": Function("input", OF_A_ROW, many_rows=[lambda x: cukern.rms_norm_quant(x, None)]),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
