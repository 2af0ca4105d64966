"""What the shared suites know of activations."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import cukern
from cukern.ops import moe_activation
from cukern.runtime.kernel import Variant
from tests.spec import BF16, Bits, Call, Function, Spec, floats, in_variants

OF_A_ROW = Bits("row", "a row", "the row")


def _calls() -> list[Call]:
    gated = (
        "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "swigluoai_and_mul", "relu2_and_mul", "mul_and_silu",
    )  # fmt: skip
    return [
        Call("moe_activation", (floats(2, 3, 32, dtype=BF16), "gelu")),
        Call("swigluoai_and_mul", (floats(3, 32), 1.5, 3.0), {"interleaved": True}),
        *(Call(name, (floats(3, 32),)) for name in gated),
        Call("add_bias_act", (floats(2, 3, 32, dtype=BF16), floats(32, seed=1, dtype=BF16), "silu")),
        *(Call(name, (floats(3, 32),)) for name in ("gelu_new", "gelu_fast", "gelu_quick")),
        Call("bias_gelu", (floats(3, 30), floats(30, seed=1))),
        Call("bias_gelu", (floats(3, 32, dtype=BF16), None), {"approximate": "tanh"}),
    ]


def _large_calls() -> list[Call]:
    wide = floats(40, 2048, dtype=BF16)
    return [
        *in_variants(Call("moe_activation", (floats(40, 256), "gelu")), "vector", "scalar"),
        *in_variants(Call("add_bias_act", (wide, wide[0])), "vector", "scalar"),
    ]


def _at_first_use() -> Iterator[Variant]:
    yield moe_activation._variant("bfloat16", 1, 2)
    yield moe_activation._variant("float32", 1, 4)
    yield moe_activation._variant("bfloat16", 1, 16, gate_last=True)
    yield moe_activation._variant("float16", 1, 2, gate_last=True)
    yield moe_activation._bias_variant("float16", "gelu", 2)
    yield moe_activation._bias_variant("float32", "gelu", 4)


SPEC = Spec(
    functions={
        "add_bias_act": Function(
            "x", OF_A_ROW, tolerance="moe_activation.biased", many_rows=[lambda x: cukern.add_bias_act(x, x[0])]
        ),
        "bias_gelu": Function(
            "x",
            OF_A_ROW,
            tolerance="moe_activation.biased",
            many_rows=[lambda x: cukern.bias_gelu(x, None, approximate="tanh")],
        ),
        "gelu_and_mul": Function("x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.gelu_and_mul]),
        "gelu_fast": Function("x", OF_A_ROW, tolerance="moe_activation.biased", many_rows=[cukern.gelu_fast]),
        "gelu_new": Function("x", OF_A_ROW, tolerance="moe_activation.biased", many_rows=[cukern.gelu_new]),
        "gelu_quick": Function("x", OF_A_ROW, tolerance="moe_activation.biased", many_rows=[cukern.gelu_quick]),
        "gelu_tanh_and_mul": Function(
            "x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.gelu_tanh_and_mul]
        ),
        "moe_activation": Function(
            "x",
            OF_A_ROW,
            tolerance="moe_activation.out",
            many_rows=[
                lambda x: cukern.moe_activation(x, "gelu"),
                lambda x: cukern.moe_activation(x, variant="scalar" if torch.is_tensor(x) else "auto"),
            ],
        ),
        "mul_and_silu": Function("x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.mul_and_silu]),
        "relu2_and_mul": Function("x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.relu2_and_mul]),
        "silu_and_mul": Function("x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.silu_and_mul]),
        "swigluoai_and_mul": Function(
            "x", OF_A_ROW, tolerance="moe_activation.out", many_rows=[cukern.swigluoai_and_mul]
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
