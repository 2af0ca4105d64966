"""The sizes of an exchange between ranks, and the memory layout of the windows.

A window is a region of a rank's memory into which all other ranks write. A vector is 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import check, compile, template

_CONSTANTS = {**template.constants("all_to_all/dispatch"), **template.constants("all_to_all/combine")}
MAX_RANKS: int = _CONSTANTS["MAX_RANKS"]
GROUP: int = _CONSTANTS["GROUP"]
LINE_VECTORS, BLOCK_VECTORS, FLAG_VECTORS = (_CONSTANTS[x] for x in ("LINE_VECTORS", "BLOCK_VECTORS", "FLAG_VECTORS"))
LINE_BYTES: int = _CONSTANTS["LINE_BYTES"]
FEW_VECTORS, MANY_VECTORS = FLAG_VECTORS, 2 * FLAG_VECTORS  # vectors per thread of a combine
#: Above this many tokens a thread of a combine handles MANY_VECTORS vectors instead of FEW_VECTORS.
MANY_TOKENS = 512
SEND, RECEIVE = _CONSTANTS["SEND"], _CONSTANTS["RECEIVE"]
MAX_TOPK = 32
MAX_TOKENS = 2**24
MAX_EXPERTS = 2**24
MAX_DEADLINE_S = 10**9
ALIGNMENT = 256  # of each buffer in a window, in bytes
#: If a source rank sent at most this many tokens, the sums are sent back to it as lines of 128 bytes. A line has 7
#: vectors of data and one vector with the number of the call (the epoch). The receiver polls the epochs instead of
#: flags. Epochs take an eighth of the bytes.
_LINE_TOKENS = 256
STRUCTS = "all_to_all/dispatch"


class Sizes(NamedTuple):
    """The sizes of an exchange, which must be equal on all ranks."""

    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    apart: bool
    deadline_s: float
    expert_rank: tuple[int, ...] | None

    @classmethod
    def checked(
        cls, ranks: int, max_tokens: Any, hidden: Any, topk: Any, num_experts: Any, apart: Any, deadline_s: Any,
        expert_rank: Any,
    ) -> Sizes:  # fmt: skip
        check.integer("the number of ranks", ranks, 1, MAX_RANKS)
        max_tokens = check.integer("max_tokens", max_tokens, 1, MAX_TOKENS)
        hidden = check.integer("hidden", hidden, 16)
        if hidden % 16:
            check.fail("hidden", "a multiple of 16", hidden)
        topk = check.integer("topk", topk, 1, MAX_TOPK)
        num_experts = check.integer("num_experts", num_experts, 1, MAX_EXPERTS)
        for what, size in (("slots", topk), ("numbers", hidden)):
            if ranks * max_tokens * size >= 2**31:
                check.fail("max_tokens", f"such that the {what} of all ranks are less than 2**31", max_tokens)
        deadline_s = check.number("deadline_s", deadline_s)
        if not 0 < deadline_s <= MAX_DEADLINE_S:
            check.fail("deadline_s", f"more than 0 and at most {MAX_DEADLINE_S}", deadline_s)
        if expert_rank is not None:
            if not hasattr(expert_rank, "__len__"):
                check.fail("expert_rank", "a sequence of ranks, or None", type(expert_rank).__name__, TypeError)
            expert_rank = tuple(check.integer("expert_rank", x, 0, ranks - 1) for x in expert_rank)
            if len(expert_rank) != num_experts:
                check.fail("expert_rank", f"of {num_experts} ranks, one for each expert", len(expert_rank))
        elif num_experts % ranks:
            check.fail("num_experts", f"a multiple of the {ranks} ranks, or expert_rank given", num_experts)
        return cls(max_tokens, hidden, topk, num_experts, bool(apart), deadline_s, expert_rank)

    @property
    def vectors(self) -> int:
        """The number of vectors in a row of 16-bit elements."""
        return self.hidden // 8

    def chunks(self, vectors: int) -> int:
        """Return into how many chunks a combine divides a row if a thread handles `vectors` vectors."""
        return -(-self.vectors // (vectors * BLOCK_VECTORS))

    @property
    def flags(self) -> int:
        """Flags per row: one per chunk, rounded up to an even number, because a thread may write two flags at once."""
        return -(-self.chunks(FLAG_VECTORS) // 2) * 2

    @property
    def lines(self) -> int:
        """128-byte lines per row."""
        return -(-self.vectors // LINE_VECTORS)

    @property
    def line_tokens(self) -> int:
        """The largest number of tokens of a source rank to which the sums are sent back as lines."""
        return min(self.max_tokens, _LINE_TOKENS)

    def takes(self, instance: compile.Instance) -> bool:
        """Return whether calls of these sizes may launch an instance."""
        if instance.function != "combine_tokens":
            return True
        mode, vectors = instance.arguments[2:4]
        return (mode != "APART" or self.apart) and (vectors == FEW_VECTORS or self.max_tokens > MANY_TOKENS)

    def owner(self, ranks: int) -> np.ndarray[Any, Any]:
        """Return the rank of each expert, int32 [num_experts]."""
        if self.expert_rank is not None:
            return np.array(self.expert_rank, np.int32)
        return (np.arange(self.num_experts) // (self.num_experts // ranks)).astype(np.int32)


class Layout(NamedTuple):
    """Byte offsets in a window. A field that is a pair has the offsets of the two receive buffers."""

    rows: tuple[int, int]
    scales: tuple[int, int]
    ids: tuple[int, int]
    weights: tuple[int, int]
    partial: int
    flags: int
    lines: int
    size: int

    @classmethod
    def of(cls, sizes: Sizes, ranks: int) -> Layout:
        places = ranks * sizes.max_tokens
        rows_returned = sizes.max_tokens * (max(ranks, sizes.topk) if sizes.apart else ranks)
        end = template.struct_named(STRUCTS, "Signals").size

        def reserve(size: int) -> int:
            nonlocal end
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + size
            return start

        def pair(size: int) -> tuple[int, int]:
            return reserve(size), reserve(size)

        rows, scales = pair(places * sizes.hidden * 2), pair(places * max(1, -(-sizes.hidden // GROUP)) * 4)
        ids, weights = pair(places * sizes.topk * 4), pair(places * sizes.topk * 4)
        partial, flags = reserve(rows_returned * sizes.hidden * 2), reserve(rows_returned * sizes.flags * 4)
        lines = reserve(ranks * sizes.line_tokens * sizes.lines * LINE_BYTES)
        return cls(rows, scales, ids, weights, partial, flags, lines, end)
