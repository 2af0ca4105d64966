"""What the shared suites know of routing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cukern.ops import moe_gate
from cukern.runtime.kernel import Variant
from tests.spec import BF16, IN_ITS_FILE, Bits, Call, Function, Spec, floats, in_variants, integers, outputs

OF_A_ROW = Bits("row", "a token's experts and weights", "its logits and the bias")
SAME_KERNEL = {"many rows": "it runs the kernel of moe_fused_gate"}
COUNTED_ALONE = {"places hidden_states": "only its number of tokens is read"}
PADDING_AT_THE_END = {"rows": "padding is at the end of the batch"}


def gate(tokens: int = 5, dtype: torch.dtype = torch.float32) -> Call:
    return Call("moe_fused_gate", (floats(tokens, 256, dtype=dtype), floats(256, seed=1), 8, 4, 8))


def topk_softmax() -> Call:
    return Call("topk_softmax", (*outputs(5, 8), floats(5, 128)))


def _with_all_options() -> list[Call]:
    padding = torch.tensor([4], dtype=torch.int32)
    gate_options = {"renormalize": False, "scoring_func": "softmax", "num_token_non_padded": padding}
    half, of_eight = floats(5, 8, dtype=torch.float16), floats(8, seed=1)
    of_hundred = floats(100, seed=1, dtype=BF16)
    sigmoid_options = {
        "num_fused_shared_experts": 1, "routed_scaling_factor": 2.5, "apply_routed_scaling_factor_on_output": False,
        "num_token_non_padded": torch.tensor(3),
    }  # fmt: skip
    softmax_args, sigmoid_args = (*outputs(5, 2), half, True, 30.0, of_eight), (*outputs(5, 7), floats(5, 100), True)
    calls = [
        Call("moe_fused_gate", (floats(6, 60), floats(60, seed=1), 12, 5, 9, 1, 2.5, True), gate_options),
        Call("topk_softmax", softmax_args, {"num_token_non_padded": torch.tensor(3)}),
        Call("topk_sigmoid", (*sigmoid_args, of_hundred), sigmoid_options),
    ]
    return [call._replace(note="all options", exempt=PADDING_AT_THE_END) for call in calls]


def _calls() -> list[Call]:
    logits, bias = floats(5, 128), floats(128, seed=1)
    no_rows = {"stream": "nothing is read", "rows": "there are no rows", "batch": "it has a batch of none"}
    return [
        gate(),
        gate(dtype=BF16)._replace(note="bfloat16"),
        gate(tokens=0)._replace(note="no tokens", exempt=no_rows),
        Call(
            "moe_fused_gate", (floats(5, 300)[:, :256], floats(256, seed=1), 8, 4, 8), note="strided rows",
            exempt={"batch": "copies have other strides"},
        ),
        Call("biased_grouped_topk", (None, logits, bias, 6, True, 4, 2, 1, 2.5), {"scoring_func": "sqrtsoftplus"}),
        Call("grouped_topk", (floats(5, 16, seed=1), floats(5, 160), 6, False, 8, 3)),
        topk_softmax(),
        Call("topk_sigmoid", (*outputs(5, 8), floats(5, 384), True, floats(384, seed=1))),
        *_with_all_options(),
    ]  # fmt: skip


def _large_calls() -> list[Call]:
    call = Call(
        "moe_fused_gate", (floats(1000, 256), floats(256, seed=1), 8, 4, 8), {"num_token_non_padded": integers(900)},
        exempt=PADDING_AT_THE_END,
    )  # fmt: skip
    return in_variants(call, "specialized", "dynamic")


def _at_first_use() -> Iterator[Variant]:
    # A bias of each float dtype that the instances of the import do not take, in each way of loading it.
    op = moe_gate.kernels
    config = next(iter(op.SPECIALIZED))
    for dtype, lanes, bias_type in (("bfloat16", 32, "__half"), ("float32", 8, "double"), ("float16", 16, "double")):
        yield op._variant(dtype, config, lanes, (bias_type,))
    # One warp per token for more slots than gate_by_warp deals, and that one with another bias and other scores.
    yield op._variant("float32", config, 32)
    yield op._by_warp_variant("bfloat16", config, ("double",))
    yield op._by_warp_variant("float32", op.Config(1024, 1, "softmax", biased=True))
    yield op._dynamic("float32", 16, 16, ("__nv_bfloat16",))
    yield op._dynamic("float16", 32, 32, ("double",))


SPEC = Spec(
    functions={
        "biased_grouped_topk": Function(
            "gating_output", OF_A_ROW, tolerance="moe_gate.weights", exempt=SAME_KERNEL | COUNTED_ALONE
        ),
        "grouped_topk": Function(
            "hidden_states gating_output", OF_A_ROW, tolerance="moe_gate.weights", exempt=SAME_KERNEL | COUNTED_ALONE
        ),
        "moe_fused_gate": Function("input", OF_A_ROW, tolerance="moe_gate.weights", exempt=IN_ITS_FILE),
        **dict.fromkeys(
            ("topk_sigmoid", "topk_softmax"),
            Function("topk_weights topk_ids gating_output", OF_A_ROW, tolerance="moe_gate.weights", exempt=SAME_KERNEL),
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
    allowed_spills={("moe_gate", "80"): {"13.5": 8}, ("moe_gate", "90a"): {"13.5": 8}},
)
