"""What the shared suites know of caches of keys and values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from cukern.ops.kv_cache import choose as op
from cukern.runtime.kernel import Variant
from tests.spec import (
    COPIES,
    DTYPES,
    IN_ITS_FILE,
    SHARE,
    Call,
    Function,
    Spec,
    continued,
    floats,
    integers,
    widths,
)

BY_BATCH = {"rows": "slots and blocks are of one cache"}


def _calls() -> list[Call]:
    new_tokens = [floats(3, 2, 16, seed=seed) for seed in range(2)]
    slots = integers(9, -1, 4, dtype=torch.int64)
    block_caches = [torch.zeros(3, 2, *shape, dtype=torch.uint8) for shape in ((1, 4, 16), (16, 4))]
    flash_caches = [floats(3, 4, 2, 16, seed=seed) for seed in range(2)]
    return [
        Call("reshape_and_cache", (*new_tokens, *block_caches, slots, "fp8", SHARE, SHARE)),
        Call("reshape_and_cache_flash", (*new_tokens, *flash_caches, slots, "auto", SHARE, SHARE)),
        Call("concat_and_cache_mla", (*(x[:, 0] for x in new_tokens), floats(3, 4, 32), slots, "auto", SHARE)),
        Call(
            "concat_and_cache_mla",
            (floats(3, 512), floats(3, 64), floats(3, 4, 164).view(torch.uint8), slots),
            {"kv_cache_dtype": "fp8_ds_mla", "scale": None},
        ),
        Call("copy_blocks", (flash_caches, flash_caches[::-1], integers([0, 2], dtype=torch.int64))),
        Call(
            "copy_blocks", (flash_caches,), {"value_caches": [], "block_mapping": integers([0, 2], dtype=torch.int64)}
        ),
        Call(
            "gather_cache",
            (flash_caches[0], floats(6, 2, 16), integers([2, 0], [1, 1]), integers(0, 2, 5), 2),
            {"seq_starts": integers(0, 2), "scale": SHARE},
        ),
    ]


def _at_first_use() -> Iterator[Variant]:
    for dtype, cache_format in itertools.product(DTYPES, ("SAME", "E4M3")):
        for aligned, parts in itertools.product((True, False), (1, op.SPLITS)):
            yield op.blocks_variant(dtype, cache_format, aligned, parts)
        for width in op.WIDTHS if cache_format == "SAME" else widths(dtype):
            yield op.gather_variant(dtype, cache_format, width)
            for concat in (False, True):
                yield op.rows_variant(dtype, cache_format, width, concat)
    for dtype, aligned in itertools.product(DTYPES, (True, False)):
        yield op.store_latents_variant(dtype, aligned)
        yield op.gather_latents_variant(dtype, aligned)
    for width in op.WIDTHS:
        yield op.copy_variant(width)
    # E5M2 has other conversions than E4M3, and the same paths.
    yield op.rows_variant("float16", "E5M2", 2, False)
    yield op.blocks_variant("float32", "E5M2", True, op.SPLITS)
    yield op.gather_variant("float32", "E5M2", 4)


SPEC = Spec(
    functions={
        "concat_and_cache_mla": Function("kv_c k_pe slot_mapping", COPIES, exempt=IN_ITS_FILE | BY_BATCH),
        "copy_blocks": Function("block_mapping", COPIES, exempt=IN_ITS_FILE | BY_BATCH),
        "gather_cache": Function(
            "dst block_table cu_seq_lens batch_size seq_starts",
            COPIES,
            exempt=IN_ITS_FILE | BY_BATCH,
            grown={"cu_seq_lens": continued},
        ),
        **dict.fromkeys(
            ("reshape_and_cache", "reshape_and_cache_flash"),
            Function("key value slot_mapping", COPIES, exempt=IN_ITS_FILE | BY_BATCH),
        ),
        "swap_blocks": Function(bits=COPIES, exempt={"call": "it launches no kernel"}),
    },
    calls=_calls(),
    at_first_use=_at_first_use,
    none_spills=True,
)
