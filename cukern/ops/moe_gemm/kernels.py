"""The kernels of a grouped product: the sizes of their tiles, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import UNIT_ROWS
from cukern.runtime import activation as activations
from cukern.runtime import arrays, gpu, template
from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import launch, tensor_map

#: Rows of a group up to which "stream" is taken, by `expected_m` and by the mean. It is the fastest for groups that all
#: have two rows, and for groups of up to four, most of which have fewer.
STREAM_ROWS, STREAM_MEAN = 4, 2
#: Columns of a result in a unit of 16 bytes.
UNIT_COLUMNS = 8

_wgmma = Kernel("moe_gemm/wgmma", "gemm_wgmma", compile_s=1.5)
_mma = Kernel("moe_gemm/mma", "gemm_mma")
_stream = Kernel("moe_gemm/stream", "gemm_stream")
_fp4_wgmma = Kernel("moe_gemm/fp4_wgmma", "gemm_fp4_wgmma", compile_s=2)
_prepare = Kernel("moe_gemm/prepare", "prepare_weights")
_restore = Kernel("moe_gemm/restore", "restore_weights")

_ACTIVATIONS_AHEAD = 0, activations.number("silu")  # those compiled ahead
_HOPPER_BYTES = gpu.BY_ARCH["90a"].shared_per_block
_RESERVED_BYTES = 1 << 10  # of each block's shared memory, for the system


class Product(NamedTuple):
    """The arguments of a call, checked, and what follows from them."""

    a: Array
    b: Array
    out: Array
    offsets: Array
    a_scale: Array | None
    b_scale: Array | None
    b_global_scale: Array | None
    row_token: Array | None
    is_batched: bool
    rows: int  # of the result; batched: those that each expert has room for
    experts: int
    n: int
    k: int
    weights: str  # a `Format` of the templates; TRANSPOSED: `b` lies as [experts, k, n]
    a_scales: str  # "", "block", "row" or "one"
    b_scales: str  # "", "block", "column", "one" or "group"
    epilogue: int  # ACTIVATION of the templates, by `epilogue`
    is_gated: bool
    expected_m: int | None  # the most rows that a group is expected to have, or None
    is_prepared: bool  # weights of 4 bits by `prepare_weights`
    interleaved: bool  # gated: rows 2 j and 2 j + 1 of the weights are gate j and its up; else each has a half of n
    bias: Array | None
    alpha: float
    limit: float
    why: str = ""  # the reason for the kernel

    @property
    def has_halves(self) -> bool:
        return self.is_gated and not self.interleaved

    @property
    def is_transposed(self) -> bool:
        """Whether the weights lie as [experts, k, n]."""
        return self.weights == "TRANSPOSED"

    @property
    def in_memory(self) -> Array:
        """The weights, with the dimensions in the order of memory."""
        return self.b.transposed if self.is_transposed else self.b

    @property
    def is_strided(self) -> bool:
        """Whether rows of weights do not follow each other without gaps; transposed, steps along k."""
        return not self.in_memory.is_contiguous

    @property
    def b_strides(self) -> tuple[int, int]:
        """Elements of `b` from an expert's weights, and from a row (transposed: from a step along k), to the next.

        A dimension of one has any stride.
        """
        b = self.in_memory
        if self.is_strided:
            return b.strides[0], b.strides[1]
        _, lines, line = b.shape[:3]
        return lines * line, line

    @property
    def unit(self) -> int:
        """Numbers along k of a unit of 16 bytes."""
        return 32 if self.weights in ("MXFP4", "NVFP4") else 16 // self.a.item_size

    @property
    def is_of_units(self) -> bool:
        """Whether arrays begin, and rows are made of, whole units of 16 bytes; strides of weights do not count."""
        is_whole = self.k % self.unit == 0 == self.out.shape[-1] % UNIT_COLUMNS
        return is_whole and all(x.alignment >= 16 for x in (self.a, self.b, self.out))

    @property
    def is_by_blocks(self) -> bool:
        return self.b_scales == "block"

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def tiles(self, tokens: int, strips: int = 1) -> int:
        """The most tiles of `tokens` rows that there can be, times `strips`: each group's last one may not be full."""
        if self.is_batched:
            return self.experts * -(-self.rows // tokens) * strips
        return (self.rows + min(self.experts, self.rows) * (tokens - 1)) // tokens * strips

    def most(self, rows: int) -> int:
        """What `expects` compares with `rows`: a mean stands for groups of more rows."""
        return STREAM_MEAN if self.expected_m is None and STREAM_MEAN < rows <= STREAM_ROWS else rows

    def expects(self, rows: int) -> bool:
        """Whether a group is expected to have at most `rows` rows; the host sees no offsets."""
        most = self.most(rows)
        if self.expected_m is not None:
            return self.expected_m <= most
        return self.rows <= (most if self.is_batched else most * self.experts)

    @property
    def expected(self) -> str:
        """The rows that `expects` compares, in words."""
        if self.expected_m is not None:
            return f"{self.expected_m} rows an expert by expected_m"
        if self.is_batched:
            return f"room for {self.rows} rows an expert"
        return f"{self.rows} rows for {self.experts} experts, {self.rows / self.experts:.4g} an expert"

    def by_expected_rows(self, function: Any) -> Any:
        """`function` of the rows that `expects` compares, where these are more than STREAM_ROWS."""
        if self.expected_m is not None:
            return function(self.expected_m)
        return function(-(-self.rows // (1 if self.is_batched else self.experts)))

    def fields(self, together: int = 0) -> dict[str, Any]:
        """The fields of GemmParams, by name."""
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
        """The further fields of MappedGemmParams: maps with boxes of `weights` and of `rows` rows of 128 bytes.

        `is_gated`: a box of weights is 8 gates, their 8 ups, the next 8 gates, and so on.
        """
        size = self.a.item_size
        dtype, line = "uint8" if size == 1 else self.a.dtype, 128 // size
        of_expert, between = (stride * size for stride in self.b_strides)
        if self.is_transposed:
            # Of 64 steps along k a box has `line` weights, those of a warpgroup.
            turned = (self.n, self.k, self.experts, 1), (between, of_expert, self.experts * of_expert)
            b_map = tensor_map(self.b, dtype, *turned, (line, 64, 1, 1), promotion)
            return {"b_map": b_map, "a_map": self.a_map(rows, promotion)}
        dims: tuple[int, ...] = (self.k, self.n, self.experts, 1)
        strides: tuple[int, ...] = (between, of_expert, self.experts * of_expert)
        box: tuple[int, ...] = (line, weights, 1, 1)
        if is_gated:
            # From a gate to the next, to its up, and to the gate 8 further on.
            rows_apart = (2, 1, 16) if self.interleaved else (1, self.n // 2, 8)
            dims = self.k, 8, 2, self.n // 16, self.experts
            strides = (*(apart * between for apart in rows_apart), of_expert)
            box = line, 8, 2, weights // 16, 1
        return {"b_map": tensor_map(self.b, dtype, dims, strides, box, promotion), "a_map": self.a_map(rows, promotion)}

    def a_map(self, rows: int, promotion: int) -> Each:
        """The map of `a` with boxes of `rows` rows of 128 bytes."""
        size = self.a.item_size
        between, all_rows = self.k * size, self.all_rows * self.k * size
        dims, strides = (self.k, self.all_rows, 1, 1), (between, all_rows, all_rows)
        dtype = "uint8" if size == 1 else self.a.dtype
        return tensor_map(self.a, dtype, dims, strides, (128 // size, rows, 1, 1), promotion)

    def row_map(self) -> Each:
        """The map of `a`, whose rows are gathered, with boxes of 128 bytes of one row."""
        size = self.a.item_size
        dims, strides = (self.k, self.a.shape[-2]), (self.k * size,)
        return tensor_map(self.a, self.a.dtype, dims, strides, (128 // size, 1), 256)


def constant(kernel: Kernel, name: str) -> int:
    """The integer that a kernel's file, or what it includes, declares under this name."""
    return template.constants(kernel.file)[name]


def epilogue(
    activation: int,
    *,
    is_gated: bool,
    interleaved: bool = False,
    biased: bool = False,
    bounded: bool = False,
    scale_of_expert: bool = False,
) -> int:
    """ACTIVATION of the templates: the number of an activation, with the flags of `moe_gemm/epilogue.cuh`."""
    flags = {
        "UNGATED": activation and not is_gated,
        "INTERLEAVED": interleaved,
        "BIASED": biased,
        "BOUNDED": bounded,
        "EXPERT_SCALE": scale_of_expert,
    }
    return activation + sum(constant(_mma, name) for name, is_set in flags.items() if is_set)


def _flag(value: bool) -> str:
    return "true" if value else "false"


# --- 16 bits, by warpgroups -----------------------------------------------------------------------------

_TOGETHER = 8  # tiles of tokens that share a tile of weights before the next
_DEVIATIONS = 2.5  # standard deviations of random routing above the mean that few groups exceed
_TOKENS_OF_TILES = 256  # the most tokens of a tile of the largest form, where a group has several tiles


def box_of(tokens: int) -> int:
    """Rows of a box of the tokens of a tile."""
    return 32 if tokens >= 64 else max(tokens // 2, 8)


def staged_rows(tokens: int) -> int:
    """Rows of a round of the epilogue, for the tokens of a tile."""
    return 32 if tokens > 128 else 64 if tokens == 128 else 16 if tokens >= 16 else 8


def _wgmma_weights() -> int:
    return constant(_wgmma, "WARPGROUPS") * 64


class Wgmma(NamedTuple):
    """The template arguments of `gemm_wgmma` but the type and the activation."""

    tokens: int  # 8, 16, 32, 64, 96, 128 or 288
    stages: int  # as many as fit
    cluster: int = 1  # 1 or 2
    blocks: int = 1  # that fit a multiprocessor
    is_streamed: bool = False

    @property
    def box(self) -> int:
        """Rows of a box of tokens."""
        return box_of(self.tokens)

    def shared_bytes(self, gathers: bool) -> int:
        rows = self.stages * (_wgmma_weights() + self.tokens) + constant(_wgmma, "WARPGROUPS") * 2 * staged_rows(
            self.tokens
        )
        barriers = -(-(16 * self.stages + 8) // 16) * 16 + 16 * self.stages
        # The largest tiles have the order of experts of each warp that loads, gathered rows their sources.
        orders = (4 if gathers else 1) * constant(_wgmma, "MAX_SORTED") if self.tokens > 128 else 0
        sources = self.tokens // self.cluster * 4 if gathers else 0
        # The tiles begin at a multiple of 1024 bytes.
        return 1024 + rows * constant(_wgmma, "ROW_BYTES") + barriers + orders + sources

    def threads(self, gathers: bool) -> int:
        """Threads of a block: `gather_threads` or `gemm_threads`."""
        whole = 64 if gathers else 129  # the tokens from which on a whole warpgroup loads
        loading = constant(_wgmma, "WARPGROUP") if self.tokens >= whole else 32
        return constant(_wgmma, "WARPGROUPS") * constant(_wgmma, "WARPGROUP") + loading

    def variant(self, dtype: str, activation: int, gathers: bool = False, is_transposed: bool = False) -> Variant:
        flags = [_flag(self.is_streamed), _flag(gathers), *["true"] * is_transposed]
        arguments: list[Any] = [arrays.CUDA_TYPE[dtype], activation, *self[:4], *flags]
        launched = Launched(self.threads(gathers), self.shared_bytes(gathers), box=self.box)
        return _wgmma.variant(*arguments, launched=launched)


#: The forms, by the most rows that a group is likely to have. With few rows weights are streamed, each read once.
WGMMA_FORMS = (
    Wgmma(8, 4, blocks=3, is_streamed=True),
    Wgmma(16, 5, blocks=2, is_streamed=True),
    Wgmma(32, 5, blocks=2, is_streamed=True),
    Wgmma(64, 4, cluster=2, blocks=2, is_streamed=True),
    Wgmma(96, 3, cluster=2, blocks=2, is_streamed=True),
    Wgmma(128, 6, cluster=2),
    Wgmma(288, 4, cluster=2),
)
#: Those of weights that lie as [experts, k, n] and have gates and ups in halves: the warpgroups share out the tokens.
_WGMMA_BY_TOKENS = *WGMMA_FORMS[1:-1], WGMMA_FORMS[-1]._replace(tokens=256)
_wgmma.specialized = [
    *(form.variant("bfloat16", x).instance for x in _ACTIVATIONS_AHEAD for form in WGMMA_FORMS),
    *(form.variant("bfloat16", _ACTIVATIONS_AHEAD[-1], gathers=True).instance for form in WGMMA_FORMS),
]
# The other forms are compiled at their first use: which are needed depends on the model and on the GPU.
_wgmma.at_import = [WGMMA_FORMS[-1].variant("bfloat16", x).instance for x in _ACTIVATIONS_AHEAD]


@functools.cache
def _mean_for(most: int) -> int:
    """The largest mean with which few groups have more rows than `most`."""
    return max(rows for rows in range(1, most + 1) if rows + _DEVIATIONS * rows**0.5 <= most)


def _form_of(forms: Sequence[Any], x: Product, multiprocessors: int) -> tuple[Any, str]:
    """The one of `forms`, from few tokens of a tile to many, for a product, and why."""
    most = 0
    for form in forms[:-1]:
        most = form.tokens if x.is_batched else _mean_for(form.tokens)
        if x.expects(most):
            return form, f"tiles of {form.tokens} rows (up to {x.most(most)} an expert)"
    # Large tiles read least, but there may be fewer of them than multiprocessors.
    tiles = multiprocessors // (2 * x.experts * -(-x.n // 128))
    if tiles and x.expects(tiles * _TOKENS_OF_TILES):
        few = f"larger ones would not be enough for {multiprocessors} multiprocessors"
        return forms[-2], f"tiles of {forms[-2].tokens} rows (up to {tiles * _TOKENS_OF_TILES} an expert: {few})"
    return forms[-1], f"tiles of {forms[-1].tokens} rows (from {most + 1} an expert on)"


def _wgmma_forms(x: Product, multiprocessors: int) -> Sequence[Wgmma]:
    """The forms for a product: of 96 tokens only where every multiprocessor gets both blocks that fit it.

    A block alone has half as many bytes on their way with them as with 128 tokens.
    """
    forms = _WGMMA_BY_TOKENS if x.is_transposed and x.has_halves else WGMMA_FORMS
    if x.experts * -(-x.n // _wgmma_weights()) >= 2 * multiprocessors:
        return forms
    return [form for form in forms if form.tokens != 96]


def why_not_wgmma(x: Product) -> str:
    """The reason why `gemm_wgmma` cannot do it, and for FP8 neither `gemm_fp8_wgmma`; empty if one may."""
    if x.a.gpu.arch != "90a":
        return f"this GPU is of sm_{x.a.gpu.arch}, not sm_90a"
    if x.weights in ("MXFP4", "NVFP4"):
        return "weights are of 4 bits"
    if x.row_token is not None and x.weights == "FP8":
        return "rows of FP8 are gathered"
    line = x.n if x.is_transposed else x.k
    if x.is_strided and any(stride * x.b.item_size % 16 or stride < line for stride in x.b_strides):
        return "rows of b lie at no multiples of 16 bytes, or overlap"
    return ""


def wgmma(x: Product) -> None:
    count, gathers = x.a.gpu.multiprocessors, x.row_token is not None
    (form, why), weights = _form_of(_wgmma_forms(x, count), x, count), _wgmma_weights()
    strips = -(-x.n // (form.cluster * weights))
    blocks = x.tiles(min(form.tokens, _TOKENS_OF_TILES), strips * form.cluster)
    # Weights that are read once are fetched to L2 by 128 bytes, not 256 (3% faster on an H200).
    promotion = 128 if form.is_streamed and not x.is_transposed else 256
    maps: dict[str, Any] = x.maps(weights, form.box, promotion, is_gated=x.is_gated)
    if gathers:
        maps["a_map"] = x.row_map()
    launch(
        form.variant(x.a.dtype, x.epilogue, gathers, x.is_transposed),
        min(blocks, count * form.blocks // form.cluster * form.cluster),
        why=f"{x.why}; {why}",
        **x.fields(_TOGETHER),
        **maps,
    )


# --- prepared 4 bits, by warpgroups ---------------------------------------------------------------------


class Fp4Wgmma(NamedTuple):
    """The sizes among the template arguments of `gemm_fp4_wgmma` but the stages: there are as many as fit."""

    tokens: int  # 8, 16, 32, 64, 96, 128 or 288
    units: int  # of 64 numbers along k of a stage
    cluster: int = 1  # 1 or 2
    blocks: int = 1  # that fit a multiprocessor
    sides: int = 2  # warpgroups along the weights of a tile, 64 each: 1 or 2
    split: int = 1  # warpgroups along k of a tile: 1, 2 or 4
    halves: int = 1  # of a unit that are converted at once, 1 or 2
    is_streamed: bool = False

    @property
    def weights(self) -> int:
        """Rows of weights of a tile."""
        return self.sides * 64

    @property
    def threads(self) -> int:
        warpgroup = constant(_fp4_wgmma, "WARPGROUP")
        return self.sides * self.split * warpgroup + (warpgroup if self.tokens > 128 else 32)

    @property
    def box(self) -> int:
        """Rows of a box of tokens."""
        return 8 if self.units > 1 else box_of(self.tokens)

    def _sizes(self, weights: str) -> tuple[int, int]:
        """Bytes of shared memory, the places of `Fp4Layout`: of a stage and its barriers, and of the rest."""
        row_bytes, warpgroup = constant(_fp4_wgmma, "ROW_BYTES"), constant(_fp4_wgmma, "WARPGROUP")
        unit = constant(_fp4_wgmma, f"UNIT_{weights}") * self.weights // UNIT_ROWS
        stage = self.units * (self.tokens * row_bytes + unit) + 16
        staging, sums = self.sides * 2 * staged_rows(self.tokens) * row_bytes, warpgroup * self.tokens * 2
        # The rings begin at a multiple of 1024 bytes.
        return stage, 1024 + staging + (self.split - 1) * self.sides * sums + constant(_fp4_wgmma, "FP4_SHARED")

    def stages(self, weights: str) -> int:
        stage, rest = self._sizes(weights)
        room = (_HOPPER_BYTES + _RESERVED_BYTES) // self.blocks - _RESERVED_BYTES
        return (room - rest) // stage // self.split * self.split

    def shared_bytes(self, weights: str) -> int:
        stage, rest = self._sizes(weights)
        return self.stages(weights) * stage + rest

    def variant(self, dtype: str, weights: str, activation: int, gathers: bool) -> Variant:
        sizes = self.tokens, self.units, self.stages(weights), *self[2:7]
        arguments: tuple[Any, ...] = *sizes, *map(_flag, (self.is_streamed, gathers))
        format = arrays.CUDA_TYPE[dtype], weights, activation
        launched = Launched(self.threads, self.shared_bytes(weights), box=self.box)
        return _fp4_wgmma.variant(*format, *arguments, launched=launched)


#: The forms, by the most rows that a group is likely to have.
FP4_FORMS = (
    Fp4Wgmma(8, 4, blocks=3, sides=1, split=2, halves=2, is_streamed=True),
    Fp4Wgmma(16, 4, blocks=2, halves=2, is_streamed=True),
    Fp4Wgmma(32, 2, blocks=2, halves=2, is_streamed=True),
    Fp4Wgmma(64, 1, cluster=2, blocks=2, is_streamed=True),
    Fp4Wgmma(96, 1, cluster=2, blocks=2),
    Fp4Wgmma(128, 1, cluster=2, halves=2),
    Fp4Wgmma(288, 1, cluster=2, halves=2),
)
#: In place of the first form where that has few tiles: a multiprocessor has one at a time, its warpgroups share the k.
FP4_FEW_TILES = Fp4Wgmma(8, 4, sides=1, split=4, halves=2, is_streamed=True)
#: Tiles of the first form for each multiprocessor that count as few.
_FEW_TILES = 12
_FP4_ALL = FP4_FEW_TILES, *FP4_FORMS
_fp4_ahead = [form.variant("bfloat16", x, 0, False).instance for x in ("MXFP4", "NVFP4") for form in _FP4_ALL]
#: Those of gpt-oss: gates and ups in pairs and biases of the first product, biases of the second.
_GPT_OSS = (
    epilogue(activations.number("swigluoai"), is_gated=True, interleaved=True, biased=True),
    epilogue(0, is_gated=False, biased=True),
)
_fp4_ahead += [form.variant("bfloat16", "MXFP4", x, False).instance for x in _GPT_OSS for form in _FP4_ALL]
_fp4_wgmma.specialize_by_arch({arch: _fp4_ahead if arch == "90a" else [] for arch in gpu.BY_ARCH})


def why_not_prepared(variant: str, x: Product) -> str:
    """The reason why prepared weights cannot be used; empty if they can."""
    if x.a.gpu.arch != "90a":
        return f"this GPU is of sm_{x.a.gpu.arch}, not sm_90a"
    return "" if variant in ("auto", "wgmma") else f"variant {variant!r} takes others"


def fp4_wgmma(x: Product) -> None:
    count, gathers = x.a.gpu.multiprocessors, x.row_token is not None
    form, why = _form_of(FP4_FORMS, x, count)
    if form is FP4_FORMS[0] and x.tiles(form.tokens, -(-x.n // form.weights)) <= _FEW_TILES * count:
        form = FP4_FEW_TILES
        why += f", one at a time with its k shared out (up to {_FEW_TILES} tiles a multiprocessor)"
    if gathers:
        form = (FP4_FORMS[-2] if form is FP4_FORMS[-1] else form)._replace(cluster=1)
        why += f", of {form.tokens} and without clusters as rows are gathered"
    strips = -(-x.n // (form.cluster * form.weights))
    blocks = x.tiles(min(form.tokens, _TOKENS_OF_TILES), strips * form.cluster)
    promotion = 128 if form.is_streamed else 256
    launch(
        form.variant(x.a.dtype, x.weights, x.epilogue, gathers),
        min(blocks, count * form.blocks // form.cluster * form.cluster),
        why=f"{x.why}; {why}",
        **x.fields(_TOGETHER),
        b_map=_prepared_map(x, form, promotion),
        a_map=None if gathers else _token_map(x, form, promotion),
    )


def _token_map(x: Product, form: Fp4Wgmma, promotion: int) -> Each:
    """A map of the tokens. Where k is whole units, a box has all those of a stage."""
    unit = 128 // x.a.item_size
    if form.units == 1 or x.k % unit:
        return x.a_map(form.box, promotion)
    between, all_rows = x.k * x.a.item_size, x.all_rows * x.k * x.a.item_size
    dims, strides = (unit, x.all_rows, x.k // unit, 1), (between, 128, all_rows)
    return tensor_map(x.a, x.a.dtype, dims, strides, (unit, form.box, form.units, 1), promotion)


def _prepared_map(x: Product, form: Any, promotion: int) -> Each:
    """A map of prepared weights, with boxes of a stage, where gates of a half and their ups alternate by 8 rows."""
    _, eights, units, unit = x.b.shape
    words, line, eight = unit // 8, form.units * (unit // 8), units * unit
    eights_of_box, of_expert = form.weights // UNIT_ROWS, eights * eight
    if x.has_halves:
        dims = units * words, 2, eights // 2, x.experts
        strides, box = (of_expert // 2, eight, of_expert), (line, 2, eights_of_box // 2, 1)
    else:
        dims = units * words, eights, x.experts, 1
        strides, box = (eight, of_expert, x.experts * of_expert), (line, eights_of_box, 1, 1)
    return tensor_map(x.b, "uint64", dims, strides, box, promotion, swizzled=False)


def prepare_variant(weights: str, restores: bool = False) -> Variant:
    return (_restore if restores else _prepare).variant(weights)


def prepare(weights: str, b: Array, b_scale: Array, prepared: Array, k: int) -> None:
    units, threads = prepared.size // prepared.shape[-1], constant(_prepare, "PREPARE_THREADS")
    grid = -(-units * constant(_prepare, "UNIT_WORDS") // threads)
    fields = {"b": b, "b_scale": b_scale, "prepared": prepared, "units": units, "k": k}
    launch(prepare_variant(weights), grid, threads, why=_of_scales(weights), **fields)


def restore(weights: str, prepared: Array, b: Array, b_scale: Array, k: int) -> None:
    units, threads = prepared.size // prepared.shape[-1], constant(_restore, "PREPARE_THREADS")
    grid = -(-units * constant(_restore, "UNIT_WORDS") // threads)
    fields = {"b": b, "b_scale": b_scale, "prepared": prepared, "units": units, "k": k}
    launch(prepare_variant(weights, True), grid, threads, why=_of_scales(weights), **fields)


def _of_scales(weights: str) -> str:
    return f"{weights}: a scale for {MXFP4_GROUP if weights == 'MXFP4' else NVFP4_GROUP} numbers of a row"


# --- every GPU ------------------------------------------------------------------------------------------


class Mma(NamedTuple):
    """The sizes among the template arguments of `gemm_mma`."""

    tokens: int  # of a tile
    weights: int  # of a tile
    token_warps: int
    weight_warps: int
    step: int  # numbers along k
    stages: int  # at most
    blocks: int  # that fit a multiprocessor

    def stage_bytes(self, weights: str, is_by_blocks: bool) -> int:
        """The bytes of a stage: BYTES of `LdmatrixLayout` or `Fp4Layout`."""
        a_line = b_line = self.step if weights == "FP8" else self.step * 2
        scales = (self.tokens + self.weights // 8) * 4 if is_by_blocks else 0
        if weights in ("MXFP4", "NVFP4"):
            b_line, groups = self.step // 2, self.step // (MXFP4_GROUP if weights == "MXFP4" else NVFP4_GROUP)
            scales = self.weights * (groups // 4 + 1) * 4
        return -(-(self.tokens * a_line + self.weights * b_line + scales) // 128) * 128

    def fit(self, weights: str, is_by_blocks: bool, most: int) -> Mma:
        """The form with as many stages as fit, where a block can have `most` bytes of shared memory."""
        form, each = self, self.stage_bytes(weights, is_by_blocks)

        def room(blocks: int) -> int:
            # The system's part, and as much again for the kernel's own, before stages that are aligned to 1 KiB.
            return (most + _RESERVED_BYTES) // blocks - 2 * _RESERVED_BYTES

        blocks = form.blocks
        while blocks > 1 and min(form.stages, 3) * each > room(blocks):
            blocks -= 1
        if weights in ("PLAIN", "TRANSPOSED") and room(blocks) // each < 3:
            form = form._replace(step=form.step // 2, stages=form.stages * 2)
            each //= 2
        return form._replace(stages=min(form.stages, room(blocks) // each), blocks=blocks)

    def variant(self, out_dtype: str, weights: str, is_by_blocks: bool, activation: int) -> Variant:
        shared_bytes = self.stages * self.stage_bytes(weights, is_by_blocks)
        arguments = arrays.CUDA_TYPE[out_dtype], weights, *self, activation, _flag(is_by_blocks)
        return _mma.variant(*arguments, launched=Launched(self.token_warps * self.weight_warps * 32, shared_bytes))


_MMA_4 = (
    Mma(16, 256, 1, 4, 128, 3, 3),
    Mma(32, 256, 1, 4, 128, 4, 2),
    Mma(64, 256, 1, 8, 128, 5, 1),
    Mma(128, 128, 2, 4, 128, 5, 1),
)
#: The forms by the format of the weights, from few tokens to many.
MMA_FORMS = {
    "PLAIN": (
        Mma(16, 128, 1, 4, 64, 4, 3),
        Mma(32, 128, 1, 4, 64, 4, 2),
        Mma(64, 256, 1, 8, 64, 5, 1),
        Mma(128, 256, 2, 4, 64, 4, 1),
    ),
    "FP8": (
        Mma(16, 128, 1, 4, 128, 4, 3),
        Mma(32, 128, 1, 4, 128, 3, 3),
        Mma(64, 128, 2, 4, 128, 5, 1),
        Mma(128, 128, 2, 4, 128, 5, 1),
    ),
    "MXFP4": _MMA_4,
    "NVFP4": _MMA_4,
}
MMA_FORMS["TRANSPOSED"] = MMA_FORMS["PLAIN"]
#: MXFP4 with float16 has sums over 32 as well, which take registers.
_MMA_MXFP4_FLOAT16 = (*_MMA_4[:3], Mma(128, 128, 4, 2, 128, 5, 1))


def _mma_ahead(most: int) -> list[Any]:
    forms = [form.fit("PLAIN", False, most) for form in MMA_FORMS["PLAIN"]]
    return [form.variant("bfloat16", "PLAIN", False, 0).instance for form in forms]


_mma.specialize_by_arch({arch: _mma_ahead(of.shared_per_block) for arch, of in gpu.BY_ARCH.items()})


def mma(x: Product) -> None:
    forms = _MMA_MXFP4_FLOAT16 if (x.weights, x.a.dtype) == ("MXFP4", "float16") else MMA_FORMS[x.weights]
    form = next((form for form in forms[:-1] if x.expects(form.tokens)), forms[-1])
    why = f"{x.why}; {tiles_of([form.tokens for form in forms], form.tokens, x)}"
    form = form.fit(x.weights, x.is_by_blocks, x.a.gpu.shared_per_block)
    variant = form.variant(x.out.dtype, x.weights, x.is_by_blocks, x.epilogue)
    launch(variant, x.tiles(form.tokens, -(-x.n // form.weights)), why=why, **x.fields())


def tiles_of(sizes: Sequence[int], tokens: int, x: Product) -> str:
    """The reason for tiles of `tokens` rows, of all `sizes`: each is for groups of up to its own rows."""
    if tokens == sizes[-1]:
        return f"tiles of {tokens} rows (from {x.most(sizes[-2]) + 1} an expert on)"
    return f"tiles of {tokens} rows (up to {x.most(tokens)} an expert)"


def why_not_mma(x: Product) -> str:
    """The reason why `gemm_mma` cannot do it; empty if it can."""
    return "rows of b have a stride" if x.is_strided else ""


# --- few rows of each expert ----------------------------------------------------------------------------


class _Stream(NamedTuple):
    """The sizes among the template arguments of `gemm_stream` but the tokens."""

    pairs: int  # of rows of weights that a warp has
    warps: int
    loads: int  # of each row, under way at once
    blocks: int  # that fit a multiprocessor


#: Rows of a tile, which reads the weights once.
_STREAM_TOKENS = (1, 2, 4, 8)
STREAM_FORMS = {"PLAIN": _Stream(2, 4, 4, 3), "FP8": _Stream(1, 8, 2, 2)}
#: The form in FP8 for tiles of one row (6% to 13% faster on an H200). With more rows it has too few registers.
_STREAM_FP8_ONE = _Stream(2, 4, 2, 4)
_MAX_GRID_Y = 2**16 - 1


def _stream_form(tokens: int, weights: str) -> _Stream:
    if weights == "FP8" and tokens == 1:
        return _STREAM_FP8_ONE
    form = STREAM_FORMS[weights]
    # With one block more, tiles of many rows would have too few registers.
    return form._replace(blocks=form.blocks - 1) if tokens == _STREAM_TOKENS[-1] else form


def stream_variant(tokens: int, out_dtype: str, weights: str, is_by_blocks: bool, activation: int) -> Variant:
    form = _stream_form(tokens, weights)
    flags = weights, _flag(is_by_blocks), tokens, activation
    return _stream.variant(arrays.CUDA_TYPE[out_dtype], *flags, *form)


def _stream_ahead(weights: str, is_by_blocks: bool, activation: int) -> list[Any]:
    return [stream_variant(x, "bfloat16", weights, is_by_blocks, activation).instance for x in _STREAM_TOKENS]


_of_16_bits = [_stream_ahead("PLAIN", False, x) for x in _ACTIVATIONS_AHEAD]
_of_8_bits = _stream_ahead("FP8", True, 0)
_stream.specialized = [*_of_16_bits[0], *_of_16_bits[1], *_of_8_bits]
_stream.at_import = [instances[0] for instances in _of_16_bits]
# sm_80 has no instruction that converts FP8.
_stream.unused = {"80": _of_8_bits}


def _stream_tokens(x: Product) -> int:
    return next((tokens for tokens in _STREAM_TOKENS[:-1] if x.expects(tokens)), _STREAM_TOKENS[-1])


def why_not_stream(x: Product) -> str:
    """The reason why `gemm_stream` cannot do it; empty if it can."""
    if x.is_transposed:
        return "b lies as [experts, k, n]"
    if x.weights not in STREAM_FORMS:
        return "weights are of 4 bits"
    if x.is_strided:
        return "rows of b have a stride"
    tokens, groups = _stream_tokens(x), x.experts if x.is_batched else 1
    # The most rows whose tiles cannot be more than a grid has blocks along y.
    most = _MAX_GRID_Y // groups * tokens if x.is_batched else (_MAX_GRID_Y + 1) * tokens - 1 - x.experts * (tokens - 1)
    if x.rows > most:
        return "there may be too many groups of rows"
    # Units of 16 bytes of a row, which the kernel counts in 32 bits.
    units = x.k * x.a.item_size // 16
    if x.n * units > 2**32 or x.a.shape[-2] > 2**32 // (groups * units):
        return "a, or the weights of one expert, are larger than 64 GiB"
    return ""


def stream(x: Product) -> None:
    tokens = _stream_tokens(x)
    form = _stream_form(tokens, x.weights)
    grid = -(-x.n // (2 * form.warps * form.pairs)), x.tiles(tokens)
    variant = stream_variant(tokens, x.out.dtype, x.weights, x.is_by_blocks, x.epilogue)
    launch(variant, grid, 32 * form.warps, why=f"{x.why}; {tiles_of(_STREAM_TOKENS, tokens, x)}", **x.fields())
