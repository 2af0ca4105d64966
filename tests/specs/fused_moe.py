"""What the shared suites know of fused experts."""

from __future__ import annotations

import torch

from tests.spec import BF16, Call, Function, Spec, drawn, floats, integers


def _calls() -> list[Call]:
    rows, *weights = (
        floats(5, 128, dtype=BF16), floats(3, 64, 128, dtype=BF16) / 11, floats(3, 128, 32, seed=1, dtype=BF16) / 6,
    )  # fmt: skip
    topk_weights, topk_ids = floats(5, 2).abs(), integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    # Numbers of 4 bits, times 2**-4.
    halves = [x.view(torch.uint8)[..., : x.shape[-1] // 2].contiguous() for x in weights]
    scales = {
        f"w{i + 1}_scale": torch.full((3, x.shape[1], x.shape[2] // 16), 123, dtype=torch.uint8)
        for i, x in enumerate(halves)
    }
    return [
        Call("fused_experts", (rows, *weights, topk_weights, topk_ids)),
        Call(
            "fused_experts",
            (rows, *halves, topk_weights[:, :1].contiguous(), topk_ids[:, :1].contiguous()),
            {
                "activation": "gelu",
                "quant": "mxfp4",
                "expert_map": integers(1, -1, 2, 0),
                **scales,
                "apply_router_weight_on_input": True,
            },
        ),
        Call(
            "fused_experts",
            (rows, *weights, topk_weights, topk_ids),
            {
                "activation": "swigluoai",
                "w1_bias": floats(3, 64, seed=2),
                "w2_bias": floats(3, 128, dtype=BF16),
                "alpha": 1.5,
                "limit": 3.0,
                "interleaved": True,
            },
        ),
    ]


def _large_calls() -> list[Call]:
    weights = [floats(*shape, seed=i, dtype=BF16) / 11 for i, shape in enumerate(((3, 64, 128), (3, 128, 32)))]
    return [Call("fused_experts", (floats(33, 128, dtype=BF16), *weights, floats(33, 2).abs(), drawn(3, 33, 2)))]


SPEC = Spec(
    functions={
        "fused_experts": Function(
            "hidden_states topk_weights topk_ids",
            tolerance="fused_moe.out",
            exempt={
                "rows": "the order of a sum goes by the number of rows",
                "many rows": "it is made of moe_permute, moe_gemm and moe_activation, which are tested",
            },
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    notebooks=("fused_moe",),
)
