"""What the shared suites know of permutations of tokens by expert."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

import cukern
from cukern.ops.moe_permute import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COLUMNS,
    COPIES,
    DTYPES,
    SMALL,
    Bits,
    Call,
    Function,
    Spec,
    drawn,
    floats,
    in_variants,
    integers,
    row_numbers,
    widths,
    zeros_like,
)

OF_A_ROW = Bits("row", "a token", "its slots, added up in their order")
BY_BATCH = {"rows": "places are of the whole batch"}


def _numbered(inverse: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([inverse + i * inverse.numel() for i in range(times)])


def _calls() -> list[Call]:
    topk_ids = integers([3, 0], [1, -1], [1, 3])
    batched = integers([0, 2], [2, 1], [-1, 0], [1, 2], [0, 1])
    return [
        Call("moe_sort", (topk_ids, 4), {"expert_map": integers(-1, 1, 0, -1), "num_local_experts": 2}),
        Call("moe_sort_batched", (batched, 4, 2), {"expert_map": integers(1, -1, 2, 0), "num_local_experts": 3}),
        Call("moe_align_block_size", (topk_ids, 4, 4, integers(-1, 1, 0, -1), True)),
        Call("permute_rows", (floats(3, 12), integers([5, 0], [2, 1], [3, 4]))),
        Call("moe_permute", (floats(3, 12), floats(3, 2, seed=1), integers([3, 0], [1, 2], [1, 3]), 4, -1, None, 1)),
        Call("moe_unpermute", (floats(3, 12), floats(6, 12), floats(3, 2, seed=1), integers([5, 0], [2, -1], [3, 4]))),
        Call("moe_sum", (floats(3, 2, 12, dtype=BF16),)),
    ]


def _large_calls() -> list[Call]:
    ids, rows = drawn(64, 3000, 8), floats(3000, 512, dtype=BF16)
    inverse = torch.randperm(24000, generator=torch.Generator().manual_seed(0)).int().view(3000, 8)
    few = ids[:50].contiguous()
    return [
        *in_variants(Call("moe_sort", (ids, 64)), "many_blocks", "counted"),
        *in_variants(Call("moe_sort", (few, 64)), "one_block"),
        Call("moe_align_block_size", (ids, 64, 64)),
        Call("moe_permute", (rows[:500], None, ids[:500].contiguous(), 64)),
        *in_variants(
            Call("moe_unpermute", (floats(3000, 64), floats(24000, 64), floats(3000, 8), inverse)), "auto", "dynamic"
        ),
    ]


def _at_first_use() -> Iterator[Variant]:
    yield op.count_variant(8)
    for experts, (chunks, cluster) in itertools.product((32, 256, 512), ((16, 1), (64, 1), (32, 8))):
        yield op.chunks_variant(8, experts, chunks, cluster)
    for width, items in itertools.product((8, 4, 2, 1), (1, op._PERMUTE_ITEMS)):
        yield op.permute_variant(width, items)
    for dtype in DTYPES:
        for width in widths(dtype):
            yield op.unpermute_variant(dtype, width, 0)


SPEC = Spec(
    functions={
        **dict.fromkeys(
            ("moe_align_block_size", "moe_sort", "moe_sort_batched"),
            Function("topk_ids", COPIES, exempt=SMALL | BY_BATCH),
        ),
        "moe_permute": Function(
            "hidden_states a1q_scale topk_ids",
            COPIES,
            many_rows=[lambda x: cukern.moe_permute(x, None, 0 * row_numbers(x), 1)[0]],
            exempt=BY_BATCH,
        ),
        "moe_sum": Function("input", OF_A_ROW, many_rows=[lambda x: cukern.moe_sum(x.reshape(-1, 2, COLUMNS // 2))]),
        "moe_unpermute": Function(
            "out permuted_hidden_states topk_weights inv_permuted_idx",
            OF_A_ROW,
            many_rows=[lambda x: cukern.moe_unpermute(zeros_like(x), x, None, row_numbers(x))],
        ),
        "permute_rows": Function(
            "hidden_states inverse",
            COPIES,
            many_rows=[lambda x: cukern.permute_rows(x, row_numbers(x))],
            exempt=BY_BATCH,
            grown={"inverse": _numbered},
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
