"""What the shared suites know of paged attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cukern.ops import paged_attention
from cukern.ops.paged_attention import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import IN_ITS_FILE, SHARE, SMALL, Bits, Call, Function, Spec, floats, in_variants, integers

BY_BATCH = {"rows": "tokens of all sequences are dealt out evenly"}
SAME_KERNEL = {"many rows": "it runs the kernel of paged_attention"}
#: The block tables and the lengths of three sequences in a paged cache.
PAGES = integers([2, 0], [1, 1], [0, 0]), integers(9, 3, 0)


def _calls() -> list[Call]:
    paged = floats(3, 4, 16), floats(3, 2, 4, 8, 4, seed=1), floats(3, 2, 16, 8, seed=2)
    vllm = [*paged, 2, 0.25, *PAGES, 8, 512, floats(4, seed=3), "auto", SHARE, None, 0, 1, 2, 8, 1]
    workspaces = [torch.zeros(3, 4, 1, *rest) for rest in ((), (), (16,))]
    return [
        Call("paged_attention", (*paged, *PAGES), {"window": 5, "sinks": floats(4, seed=5), "k_scale": SHARE}),
        Call("paged_attention_v1", (torch.zeros_like(paged[0]), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(paged[0]), *workspaces, *vllm)),
        Call("merge_attention_states", (paged[0], floats(3, 4, seed=1), floats(3, 4, 16, seed=2), floats(3, 4))),
        Call(
            "merge_attention_states",
            (floats(3, 2, 4, 16), floats(3, 4, 2, seed=1), floats(3, 2, 4, 16, seed=2), floats(3, 4, 2)),
            {"lse_heads_first": True},
        ),
    ]


def _large_calls() -> list[Call]:
    half = {"dtype": torch.float16}
    blocks = floats(192, 2, 8, 16, 8, seed=1, **half), floats(192, 2, 64, 16, seed=2, **half).clamp(-1, 1)
    query, lengths = floats(3, 8, 64, **half), integers(3000, 0, 17)
    tables = torch.arange(3 * 188, dtype=torch.int32).view(3, 188) % 192
    one = torch.ones(1)
    vllm = [query, *blocks, 2, 0.125, tables, lengths, 16, 3000, None, "auto", one, one, 0, 0, 0, 64, 0]
    workspaces = [torch.zeros(3, 8, 6), torch.zeros(3, 8, 6), torch.zeros(3, 8, 6, 64, **half)]
    return [
        *in_variants(Call("paged_attention", (query, *blocks, tables, lengths)), "specialized", "dynamic", "scalar"),
        Call("paged_attention_v1", (torch.zeros_like(query), *vllm)),
        Call("paged_attention_v2", (torch.zeros_like(query), *workspaces, *vllm)),
    ]


def _at_first_use() -> Iterator[Variant]:
    dynamic = op.AttendConfig("bfloat16", "bfloat16", "vllm", 0, 128, 0, 2, True)
    for dims, layout in ((64, "vllm"), (128, "flash"), (256, "vllm")):
        yield dynamic._replace(dims=dims, layout=layout).variant
    pairs, alone = op.Schedule(2, "EITHER", True, 136), op.Schedule(1, "EITHER", at_once=2)
    few = [op._FEW_ITEMS[7], op._FEW_ITEMS[15], pairs, alone]
    for layout, schedule in zip(("flash", "vllm", "flash", "flash", "vllm"), (op.Schedule(), *few), strict=True):
        yield dynamic._replace(layout=layout, schedule=schedule, extras=False).variant
    for cache, schedule in (("float8_e4m3fn", op._FEW_ITEMS_FP8[15]), ("bfloat16", op.Schedule(1, "CLUSTERS"))):
        yield dynamic._replace(cache=cache, schedule=schedule).variant
    # Up to 8 rows, with extras and large heads.
    few_rows = dynamic._replace(team=1, rows=8)
    for dims, cache, schedule in (
        (128, "float8_e5m2", op._BLOCK_PER_ITEM_FP8),
        (256, "bfloat16", op._FEW_ITEMS_LARGE_HEADS[8]),
    ):
        yield few_rows._replace(dims=dims, cache=cache, schedule=schedule).variant
    yield op.scalar.variant("float", "float", "VLLM", "true")
    yield op.scalar.variant("__half", "__nv_fp8_e5m2", "FLASH", "false")
    yield paged_attention._merge.variant("float", 4, "false")
    yield paged_attention._merge.variant("float", 1, "true")
    for heads_first in (True, False):
        yield paged_attention.merge_variant("bfloat16", 8, heads_first, 1 if heads_first else 2, True)


SPEC = Spec(
    functions={
        "merge_attention_states": Function(
            "out_a lse_a out_b lse_b",
            Bits("row", "a row", "its own states"),
            tolerance=("paged_attention.merged", "paged_attention.lse"),
            exempt=SMALL,
        ),
        "paged_attention": Function(
            "query block_tables seq_lens",
            tolerance=("paged_attention.out", "paged_attention.lse"),
            exempt=IN_ITS_FILE | BY_BATCH,
        ),
        "paged_attention_v1": Function(
            "out query block_tables seq_lens", tolerance="paged_attention.out", exempt=BY_BATCH | SAME_KERNEL
        ),
        "paged_attention_v2": Function(
            "out exp_sums max_logits tmp_out query block_tables seq_lens",
            Bits("row", "a row", "its own query, keys and values, added up in partitions of 512 tokens"),
            tolerance=("paged_attention.out", "paged_attention.exp_sums", "paged_attention.lse", "paged_attention.out"),
            exempt=SAME_KERNEL,
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    needs_cluster=lambda instance: instance.function == "attend" and instance.arguments[9] != 1,
)
