"""`Product`: the checked arguments of a grouped product, and what the kernels' launches derive from them."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.plan import tensor_map

#: "auto" chooses "stream" if expected_m is at most STREAM_ROWS, or without expected_m if the mean rows per group are at
#: most STREAM_MEAN. "stream" is the fastest variant if all groups have two rows. It is also the fastest if the largest
#: group has four rows and most groups have fewer.
STREAM_ROWS, STREAM_MEAN = 4, 2
#: Columns of a result in 16 bytes (a result has 16-bit elements).
UNIT_COLUMNS = 8


class Product(NamedTuple):
    """The checked arguments of a call."""

    a: Array
    b: Array
    out: Array
    offsets: Array
    a_scale: Array | None
    b_scale: Array | None
    b_global_scale: Array | None
    row_token: Array | None
    is_batched: bool
    rows: int  # of the result; batched: max_tokens, the rows reserved for each expert
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
    interleaved: bool  # gated: rows 2 j and 2 j + 1 of the weights are gate j and up j; else gates are the first half
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
        """Whether there are gaps between rows of the weights (transposed: between steps along k)."""
        return not self.in_memory.is_contiguous

    @property
    def b_strides(self) -> tuple[int, int]:
        """The distances in elements between experts, and between rows (transposed: between steps along k), of `b`.

        A dimension of size one may have any stride.
        """
        b = self.in_memory
        if self.is_strided:
            return b.strides[0], b.strides[1]
        _, lines, line = b.shape[:3]
        return lines * line, line

    @property
    def unit(self) -> int:
        """Elements along k in 16 bytes: elements of the weights if they have 4 bits, otherwise of `a`."""
        return 32 if self.weights in ("MXFP4", "NVFP4") else 16 // self.a.item_size

    @property
    def is_of_units(self) -> bool:
        """Whether all addresses and rows are multiples of 16 bytes. Strides of the weights are not considered."""
        is_whole = self.k % self.unit == 0 == self.out.shape[-1] % UNIT_COLUMNS
        return is_whole and all(x.alignment >= 16 for x in (self.a, self.b, self.out))

    @property
    def is_by_blocks(self) -> bool:
        return self.b_scales == "block"

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def tiles(self, tokens: int, strips: int = 1) -> int:
        """Return the largest possible number of tiles of `tokens` rows in all groups, times `strips`.

        The last tile of each group may be partial.
        """
        if self.is_batched:
            return self.experts * -(-self.rows // tokens) * strips
        return (self.rows + min(self.experts, self.rows) * (tokens - 1)) // tokens * strips

    def most(self, rows: int) -> int:
        """Return the row count that `expects` compares with: usually `rows`.

        If `expected_m` is not given, only the mean is known, and some groups have more rows than the mean. STREAM_MEAN
        then replaces a `rows` between STREAM_MEAN and STREAM_ROWS.
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
        """Describe the number of rows that `expects` uses, for `cukern.explain`."""
        if self.expected_m is not None:
            return f"{self.expected_m} rows an expert by expected_m"
        if self.is_batched:
            return f"room for {self.rows} rows an expert"
        return f"{self.rows} rows for {self.experts} experts, {self.rows / self.experts:.4g} an expert"

    def by_expected_rows(self, function: Any) -> Any:
        """Call `function` with the expected rows of a group. Valid for more than STREAM_ROWS rows."""
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
        """Return the tensor maps for MappedGemmParams: a box of `b` has `weights` rows, a box of `a` has `rows` rows.

        A row of a box has 128 bytes. With `is_gated`, a box of weights holds 8 gates, their 8 ups, the next 8 gates,
        and so on.
        """
        size = self.a.item_size
        dtype, line = "uint8" if size == 1 else self.a.dtype, 128 // size
        of_expert, between = (stride * size for stride in self.b_strides)
        if self.is_transposed:
            # A box has 64 steps along k, each with `line` neighbouring weights along n: the tile of one warpgroup.
            turned = (self.n, self.k, self.experts, 1), (between, of_expert, self.experts * of_expert)
            b_map = tensor_map(self.b, dtype, *turned, (line, 64, 1, 1), promotion)
            return {"b_map": b_map, "a_map": self.a_map(rows, promotion)}
        dims: tuple[int, ...] = (self.k, self.n, self.experts, 1)
        strides: tuple[int, ...] = (between, of_expert, self.experts * of_expert)
        box: tuple[int, ...] = (line, weights, 1, 1)
        if is_gated:
            # The distances from a gate to the next gate, from a gate to its up, and from a gate to the gate 8 later.
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
