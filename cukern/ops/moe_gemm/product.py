"""`Product`: the checked arguments of a grouped GEMM, and derived values."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.plan import tensor_map

#: "auto" chooses "stream" if `expected_m` is at most STREAM_ROWS or, without `expected_m`, if the mean number of rows
#: per group is at most STREAM_MEAN. "stream" is the fastest variant if every group has two rows, or if the largest
#: group has four rows and most groups have fewer.
STREAM_ROWS, STREAM_MEAN = 4, 2
#: Result columns in 16 bytes.
VECTOR_COLUMNS = 8


class Product(NamedTuple):
    a: Array
    b: Array
    out: Array
    offsets: Array
    a_scale: Array | None
    b_scale: Array | None
    b_global_scale: Array | None
    row_token: Array | None
    is_batched: bool
    rows: int  # of the result; if is_batched, max_tokens
    experts: int
    n: int
    k: int
    weights: str  # a `Format` of the templates; TRANSPOSED: `b` is [experts, k, n] in memory
    a_scales: str  # "", "block", "row", "expert" or "one"
    b_scales: str  # "", "block", "column", "one" or "group"
    epilogue: int  # the template argument ACTIVATION
    is_gated: bool
    expected_m: int | None  # the largest number of rows expected in a group
    is_prepared: bool  # by `prepare_weights`
    interleaved: bool  # gated: rows 2 j and 2 j + 1 of the weights are gate j and up j; False: the first half is gates
    bias: Array | None
    alpha: float
    limit: float
    is_fixed: bool  # the caller names the variant and expected_m, so the bits of a row must not depend on `rows`
    why: str = ""  # for `cukern.explain`

    @property
    def has_halves(self) -> bool:
        return self.is_gated and not self.interleaved

    @property
    def is_transposed(self) -> bool:
        return self.weights == "TRANSPOSED"

    @property
    def in_memory(self) -> Array:
        """The weights, with their dimensions in the order of memory."""
        return self.b.transposed if self.is_transposed else self.b

    @property
    def is_strided(self) -> bool:
        """Whether there are gaps between the rows of the weights in memory."""
        return not self.in_memory.is_contiguous

    @property
    def b_strides(self) -> tuple[int, int]:
        """The distances between experts, and between rows of the weights in memory, in elements.

        Transposed weights have a row for each index along k. The strides of contiguous weights are computed from the
        shape, because the stride of a dimension of size 1 may be any number.
        """
        b = self.in_memory
        if self.is_strided:
            return b.strides[0], b.strides[1]
        _, lines, line = b.shape[:3]
        return lines * line, line

    @property
    def vector_elements(self) -> int:
        """Elements along k in 16 bytes."""
        return 32 if self.weights in ("MXFP4", "NVFP4") else 16 // self.a.item_size

    @property
    def is_of_vectors(self) -> bool:
        """Whether all addresses and row sizes are multiples of 16 bytes."""
        is_aligned = self.k % self.vector_elements == 0 == self.out.shape[-1] % VECTOR_COLUMNS
        return is_aligned and all(x.alignment >= 16 for x in (self.a, self.b, self.out))

    @property
    def is_by_blocks(self) -> bool:
        return self.b_scales == "block"

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def tiles(self, tokens: int, strips: int = 1) -> int:
        """Return an upper bound for the number of tiles of `tokens` rows, in all groups and `strips` strips of n."""
        if self.is_batched:
            return self.experts * -(-self.rows // tokens) * strips
        return (self.rows + min(self.experts, self.rows) * (tokens - 1)) // tokens * strips

    def tiles_to_divide(self, tokens: int, strips: int) -> int:
        """Return the tiles that kernels compare with the multiprocessors, to divide k if there are few."""
        if not self.is_fixed:
            return self.tiles(tokens, strips)
        return self.experts * -(-(self.expected_m or 1) // tokens) * strips

    def row_limit(self, rows: int) -> int:
        """Return the limit with which `expects` compares the expected rows per group.

        The limit is `rows`, with one exception. Without `expected_m` only the mean is known, and some groups have more
        rows than the mean. So for `rows` above STREAM_MEAN and at most STREAM_ROWS the limit is STREAM_MEAN.
        """
        return STREAM_MEAN if self.expected_m is None and STREAM_MEAN < rows <= STREAM_ROWS else rows

    def expects(self, rows: int) -> bool:
        """Return whether at most `rows` rows per group are expected, by `expected_m` or by the mean."""
        most = self.row_limit(rows)
        if self.expected_m is not None:
            return self.expected_m <= most
        return self.rows <= (most if self.is_batched else most * self.experts)

    @property
    def expected(self) -> str:
        """The expected number of rows, for `cukern.explain`."""
        if self.expected_m is not None:
            return f"{self.expected_m} rows an expert by expected_m"
        if self.is_batched:
            return f"room for {self.rows} rows an expert"
        return f"{self.rows} rows for {self.experts} experts, {self.rows / self.experts:.4g} an expert"

    def by_expected_rows(self, function: Any) -> Any:
        """Return `function(rows)` for the expected rows per group. Valid only above STREAM_ROWS rows."""
        if self.expected_m is not None:
            return function(self.expected_m)
        return function(-(-self.rows // (1 if self.is_batched else self.experts)))

    def fields(self, band_tiles: int = 0) -> dict[str, Any]:
        arguments = self._asdict()
        names = "a", "b", "out", "offsets", "a_scale", "b_scale", "b_global_scale", "row_token", "experts", "n", "k"
        return {
            **{name: arguments[name] for name in (*names, "bias", "alpha", "limit")},
            "rows": self.all_rows,
            "tokens": self.a.shape[-2],
            "offset_stride": 2 if self.offsets.dtype == "int64" else 1,
            "max_tokens": self.rows if self.is_batched else 0,
            "a_scale_stride": int(self.a_scales == "row"),
            "b_scale_stride": int(self.b_scales == "column"),
            "band_tiles": band_tiles,
            "bias_is_float": int(self.bias is not None and self.bias.dtype == "float32"),
        }

    def maps(self, weights: int, rows: int, promotion: int = 256, is_gated: bool = False) -> dict[str, Each]:
        """Return the tensor maps of `b`, in boxes of `weights` rows, and of `a`, in boxes of `rows` rows of 128 bytes.

        With `is_gated` a box of weights holds 8 rows of gates, the 8 rows of their ups, the next 8 rows of gates and so
        on.
        """
        size = self.a.item_size
        dtype, line = "uint8" if size == 1 else self.a.dtype, 128 // size
        expert_stride, row_stride = (stride * size for stride in self.b_strides)
        dims: tuple[int, ...] = (self.k, self.n, self.experts, 1)
        strides: tuple[int, ...] = (row_stride, expert_stride, self.experts * expert_stride)
        box: tuple[int, ...] = (line, weights, 1, 1)
        if self.is_transposed:
            # A box is the tile of one warpgroup: 64 elements along k, times `line` elements along n.
            dims, box = (self.n, self.k, self.experts, 1), (line, 64, 1, 1)
        elif is_gated:
            # The distances in rows from a gate to the next gate, to its up, and to the 8th gate after it.
            gate_strides = (2, 1, 16) if self.interleaved else (1, self.n // 2, 8)
            dims = self.k, 8, 2, self.n // 16, self.experts
            strides = (*(stride * row_stride for stride in gate_strides), expert_stride)
            box = line, 8, 2, weights // 16, 1
        return {"b_map": tensor_map(self.b, dtype, dims, strides, box, promotion), "a_map": self.a_map(rows, promotion)}

    def a_map(self, rows: int, promotion: int) -> Each:
        """Return the tensor map of `a`. A box has `rows` rows of 128 bytes."""
        size = self.a.item_size
        row_stride, all_rows = self.k * size, self.all_rows * self.k * size
        dims, strides = (self.k, self.all_rows, 1, 1), (row_stride, all_rows, all_rows)
        dtype = "uint8" if size == 1 else self.a.dtype
        return tensor_map(self.a, dtype, dims, strides, (128 // size, rows, 1, 1), promotion)

    def row_map(self) -> Each:
        """Return the tensor map of `a` for gathered rows. A box has 128 bytes of one row."""
        size = self.a.item_size
        dims, strides = (self.k, self.a.shape[-2]), (self.k * size,)
        return tensor_map(self.a, self.a.dtype, dims, strides, (128 // size, 1), 256)
