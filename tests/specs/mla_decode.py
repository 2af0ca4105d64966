"""What the shared suites know of MLA decode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cukern.ops.mla_decode import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import (
    BF16,
    COPIES,
    IN_ITS_FILE,
    SHARED_BYTES,
    SMALL,
    Call,
    Function,
    Spec,
    floats,
    in_variants,
    integers,
)

BY_BATCH = {"rows": "a plan is made of all lengths"}
#: The block tables and the lengths of three sequences in a paged cache.
PAGES = integers([2, 0], [1, 1], [0, 0]), integers(9, 3, 0)


def _calls() -> list[Call]:
    latents = [floats(3, 2, 4, 48, dtype=BF16), floats(3, 16, 2, 48, seed=1, dtype=BF16) / 10]
    sparse = {"attn_sink": floats(4, seed=2), "indices": integers(*[[[40, -1, 2], [5, 6, 7]]] * 3)}
    extra = {"extra_k_cache": floats(5, 7, 2, 48, seed=3, dtype=BF16) / 10, "extra_topk_length": integers(1, 0, 2)}
    extra |= {"extra_indices_in_kvcache": integers(*[[[30, 2], [-1, 9]]] * 3), "topk_length": integers(2, 3, 0)}
    counts = {"topk_length": integers(70, 0, 100), "extra_topk": 200, "extra_topk_length": integers(0, 200, 3)}
    return [
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2)),
        Call(
            "get_mla_metadata",
            (integers(300, 0, 5), 8, 2),
            {"num_heads_q": 4, "topk": 100},
            exempt={"stream": "the plan does not depend on the lengths"},
        ),
        Call("get_mla_metadata", (integers(300, 0, 5), 8, 2), {"num_heads_q": 4, "topk": 100, **counts}),
        Call("flash_mla_with_kvcache", (*latents, *PAGES, 32, None, None, 0.2, True)),
        Call("flash_mla_with_kvcache", (*latents, None, None, 32, None, None), sparse),
        Call("flash_mla_with_kvcache", (*latents, None, None, 32, None, None), sparse | extra),
    ]


def _large_calls() -> list[Call]:
    latents = floats(3, 2, 16, 576, dtype=BF16), floats(40, 64, 1, 576, seed=1, dtype=BF16) / 10
    pages = torch.arange(3 * 32, dtype=torch.int32).view(3, 32) % 40
    call = Call("flash_mla_with_kvcache", (*latents, pages, integers(30, 0, 2000), 512, None, None, None, True))
    return [
        Call("get_mla_metadata", (integers(30, 0, 2000), 32, 1)),
        call,
        *in_variants(call, "mma", "dynamic"),
    ]


def _at_first_use() -> Iterator[Variant]:
    for rows, most in itertools.product((16, 32), SHARED_BYTES.values()):
        yield op.mma_variant(op.best_mma_config("bfloat16", False, rows, (0, 0), most))
    yield op.mma_variant(op.best_mma_config("float16", True, 16, (576, 512), SHARED_BYTES["227 KiB"]))
    yield op.wgmma_variant("float16", False, False)
    yield op.wgmma_variant("float16", False, True, 656)
    yield op.wgmma_variant("float16", True, True)
    yield op.two_loaders_variant("float16", False, True)
    for rows, (dims, is_fp8) in itertools.product(
        (16, 64), (((576, 512), False), ((576, 512), True), ((512, 512), True))
    ):
        yield op.mma_variant(op.best_mma_config("bfloat16", is_fp8, rows, dims, SHARED_BYTES["99 KiB"], True))
        yield op.mma_variant(op.best_mma_config("bfloat16", is_fp8, rows, dims, SHARED_BYTES["227 KiB"], True))
    yield op.combine_variant("float16", 0, op.ONE_BLOCK)


SPEC = Spec(
    functions={
        "flash_mla_with_kvcache": Function(
            "q block_table cache_seqlens indices extra_indices_in_kvcache topk_length extra_topk_length",
            tolerance=("mla_decode.out", "mla_decode.lse"),
            exempt=IN_ITS_FILE | BY_BATCH,
        ),
        "get_mla_metadata": Function(
            "cache_seqlens topk_length extra_topk_length",
            COPIES,
            exempt=SMALL | {"twin": "a plan is for so many multiprocessors"} | BY_BATCH,
        ),
    },
    calls=_calls(),
    large_calls=_large_calls(),
    at_first_use=_at_first_use,
    allowed_spills={("attend_mma", "100a"): {"12.9": 52}},
)
