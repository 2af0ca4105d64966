"""`Product`: the checked arguments of a grouped GEMM, and the values that the launches derive from them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.plan import tensor_map

#: "auto" chooses "stream" if expected_m is at most STREAM_ROWS, or without expected_m if the mean number of rows per
#: group is at most STREAM_MEAN. "stream" is the fastest variant if all groups have two rows, and also if the largest
#: group has four rows and most groups have fewer.
STREAM_ROWS, STREAM_MEAN = 4, 2
#: The number of result columns in 16 bytes. A result has 16-bit elements.
UNIT_COLUMNS = 8


class Product(NamedTuple):
    """The checked arguments of a grouped GEMM."""

    a: Array
    b: Array
    out: Array
    offsets: Array
    a_scale: Array | None
    b_scale: Array | None
    b_global_scale: Array | None
    row_token: Array | None
    is_batched: bool
    rows: int  # rows of the result; if is_batched, max_tokens (the rows that each expert has room for)
    experts: int
    n: int
    k: int
    weights: str  # a `Format` of the templates; TRANSPOSED: `b` has the memory layout [experts, k, n]
    a_scales: str  # "", "block", "row", "expert" or "one"
    b_scales: str  # "", "block", "column", "one" or "group"
    epilogue: int  # the template argument ACTIVATION, made by `kernels.epilogue`
    is_gated: bool
    expected_m: int | None  # the largest number of rows that the caller expects in a group, or None
    is_prepared: bool  # whether `prepare_weights` made the 4-bit weights
    interleaved: bool  # gated: rows 2 j and 2 j + 1 of the weights are gate j and up j; False: the first half is gates
    bias: Array | None
    alpha: float
    limit: float
    why: str = ""  # the reason for the kernel, for `cukern.explain`

    @property
    def has_halves(self) -> bool:
        return self.is_gated and not self.interleaved

    @property
    def is_transposed(self) -> bool:
        """Whether the memory layout of the weights is [experts, k, n]."""
        return self.weights == "TRANSPOSED"

    @property
    def in_memory(self) -> Array:
        """The weights, with their dimensions in the order of memory."""
        return self.b.transposed if self.is_transposed else self.b

    @property
    def is_strided(self) -> bool:
        """Whether there are gaps between rows of the weights in memory. Transposed weights have a row for each k."""
        return not self.in_memory.is_contiguous

    @property
    def b_strides(self) -> tuple[int, int]:
        """The stride between experts and the stride between rows of the weights in memory, in elements.

        Transposed weights have a row in memory for each k. A dimension of size one may have any stride.
        """
        b = self.in_memory
        if self.is_strided:
            return b.strides[0], b.strides[1]
        _, lines, line = b.shape[:3]
        return lines * line, line

    @property
    def unit(self) -> int:
        """The number of elements along k in 16 bytes: 32 with 4-bit weights, otherwise the elements of `a`."""
        return 32 if self.weights in ("MXFP4", "NVFP4") else 16 // self.a.item_size

    @property
    def is_of_units(self) -> bool:
        """Whether all addresses and row sizes are multiples of 16 bytes. Strides of the weights are not considered."""
        is_whole = self.k % self.unit == 0 == self.out.shape[-1] % UNIT_COLUMNS
        return is_whole and all(x.alignment >= 16 for x in (self.a, self.b, self.out))

    @property
    def is_by_blocks(self) -> bool:
        return self.b_scales == "block"

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def tiles(self, tokens: int, strips: int = 1) -> int:
        """Return an upper bound for the number of tiles of `tokens` rows in all groups, times `strips` (tiles along n).

        The sizes of the groups are unknown, and the last tile of each group may be partial.
        """
        if self.is_batched:
            return self.experts * -(-self.rows // tokens) * strips
        return (self.rows + min(self.experts, self.rows) * (tokens - 1)) // tokens * strips

    def most(self, rows: int) -> int:
        """Return the number of rows that `expects` compares with: usually `rows`.

        Without `expected_m` only the mean is known, and some groups have more rows than the mean. If `rows` is then
        above STREAM_MEAN and at most STREAM_ROWS, return STREAM_MEAN.
        """
        return STREAM_MEAN if self.expected_m is None and STREAM_MEAN < rows <= STREAM_ROWS else rows

    def expects(self, rows: int) -> bool:
        """Return whether groups are expected to have at most `rows` rows.

        The host does not know the offsets, so it uses `expected_m` or the mean rows per group.
        """
        most = self.most(rows)
        if self.expected_m is not None:
            return self.expected_m <= most
        return self.rows <= (most if self.is_batched else most * self.experts)

    @property
    def expected(self) -> str:
        """Describe the expected number of rows, for `cukern.explain`."""
        if self.expected_m is not None:
            return f"{self.expected_m} rows an expert by expected_m"
        if self.is_batched:
            return f"room for {self.rows} rows an expert"
        return f"{self.rows} rows for {self.experts} experts, {self.rows / self.experts:.4g} an expert"

    def by_expected_rows(self, function: Any) -> Any:
        """Call `function` with the expected rows per group. Valid only if more than STREAM_ROWS rows are expected."""
        if self.expected_m is not None:
            return function(self.expected_m)
        return function(-(-self.rows // (1 if self.is_batched else self.experts)))

    def fields(self, together: int = 0) -> dict[str, Any]:
        """Return the fields of the struct GemmParams, by name."""
        arguments = self._asdict()
        names = "a", "b", "out", "offsets", "a_scale", "b_scale", "b_global_scale", "row_token", "experts", "n", "k"
        return {
            **{name: arguments[name] for name in names},
            "rows": self.all_rows,
            "tokens": self.a.shape[-2],
            "offset_words": 2 if self.offsets.dtype == "int64" else 1,
            "max_tokens": self.rows if self.is_batched else 0,
            "a_scale_step": int(self.a_scales == "row"),
            "b_scale_step": int(self.b_scales == "column"),
            "together": together,
            "bias": self.bias,
            "alpha": self.alpha,
            "limit": self.limit,
            "bias_is_float": int(self.bias is not None and self.bias.dtype == "float32"),
        }

    def maps(self, weights: int, rows: int, promotion: int = 256, is_gated: bool = False) -> dict[str, Each]:
        """Return the tensor maps of `b` and `a` for the struct MappedGemmParams.

        A box of `b` has `weights` rows, a box of `a` has `rows` rows, and a row of a box has 128 bytes. With `is_gated`
        a box of weights holds 8 gates, their 8 ups, the next 8 gates, and so on.
        """
        size = self.a.item_size
        dtype, line = "uint8" if size == 1 else self.a.dtype, 128 // size
        of_expert, between = (stride * size for stride in self.b_strides)
        if self.is_transposed:
            # A box is the tile of one warpgroup: 64 elements along k, and for each of them `line` elements along n.
            turned = (self.n, self.k, self.experts, 1), (between, of_expert, self.experts * of_expert)
            b_map = tensor_map(self.b, dtype, *turned, (line, 64, 1, 1), promotion)
            return {"b_map": b_map, "a_map": self.a_map(rows, promotion)}
        dims: tuple[int, ...] = (self.k, self.n, self.experts, 1)
        strides: tuple[int, ...] = (between, of_expert, self.experts * of_expert)
        box: tuple[int, ...] = (line, weights, 1, 1)
        if is_gated:
            # Distances in rows from a gate: to the next gate, to its up, and to the 8th gate after it.
            rows_apart = (2, 1, 16) if self.interleaved else (1, self.n // 2, 8)
            dims = self.k, 8, 2, self.n // 16, self.experts
            strides = (*(apart * between for apart in rows_apart), of_expert)
            box = line, 8, 2, weights // 16, 1
        return {"b_map": tensor_map(self.b, dtype, dims, strides, box, promotion), "a_map": self.a_map(rows, promotion)}

    def a_map(self, rows: int, promotion: int) -> Each:
        """Return the tensor map of `a`, with boxes of `rows` rows of 128 bytes."""
        size = self.a.item_size
        between, all_rows = self.k * size, self.all_rows * self.k * size
        dims, strides = (self.k, self.all_rows, 1, 1), (between, all_rows, all_rows)
        dtype = "uint8" if size == 1 else self.a.dtype
        return tensor_map(self.a, dtype, dims, strides, (128 // size, rows, 1, 1), promotion)

    def row_map(self) -> Each:
        """Return the tensor map of `a` for gathered rows: a box is 128 bytes of one row."""
        size = self.a.item_size
        dims, strides = (self.k, self.a.shape[-2]), (self.k * size,)
        return tensor_map(self.a, self.a.dtype, dims, strides, (128 // size, 1), 256)
