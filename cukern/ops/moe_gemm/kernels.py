"""The kernels of a grouped product: the sizes of their tiles, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import UNIT_ROWS
from cukern.runtime import activation as activations
from cukern.runtime import arrays, gpu, template
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import Library
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.performance import advise
from cukern.runtime.template import Packer, packer
from cukern.runtime.tensor_map import TENSOR_MAP_BYTES, Maps

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
    """A grouped product in plain numbers: what it is, and how many rows a call has."""

    a_dtype: str
    out_dtype: str  # of the sums that are rounded, where the activation is quantized
    weights: str  # a `Format` of the templates; TRANSPOSED: `b` lies as [experts, k, n]; FOLDED: MXFP4 for FP8 rows
    a_scales: str  # "", "block", "row", "one" or "expert"
    b_scales: str  # "", "block", "column", "one" or "group"
    is_batched: bool
    gathers: bool  # row_token names the row of `a` for each row
    experts: int
    n: int
    k: int
    epilogue: int  # ACTIVATION of the templates, by `epilogue`
    is_gated: bool
    interleaved: bool  # gated: rows 2 j and 2 j + 1 of the weights are gate j and its up; else each has a half of n
    quantizes: bool  # the activation, by blocks
    b_item_size: int
    b_strides: tuple[int, ...]  # elements of `b` from an expert's weights, and from a row (TRANSPOSED: a step along k)
    is_strided: bool  # rows of weights (TRANSPOSED: steps along k) have gaps between them
    prepared: tuple[int, ...]  # shape of prepared weights of 4 bits, else empty
    is_aligned: bool  # `a`, `b` and `out` begin at multiples of 16 bytes
    offset_words: int  # 32-bit words of an offset
    bias_is_float: bool
    alpha: float
    limit: float
    gpu: gpu.Gpu
    variant: str
    rows: int = 0  # of the result; batched: those that each expert has room for
    tokens: int = 0  # rows of `a`; batched: those that each expert has room for
    expected_m: int | None = None  # the most rows that a group is expected to have
    without_counts: Any = None  # the same Product for all numbers of rows

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.is_gated else self.n

    @property
    def a_size(self) -> int:
        """Bytes of an element of `a`."""
        return arrays.ITEM_SIZE[self.a_dtype]

    @property
    def has_halves(self) -> bool:
        return self.is_gated and not self.interleaved

    @property
    def is_transposed(self) -> bool:
        """Whether the weights lie as [experts, k, n]."""
        return self.weights == "TRANSPOSED"

    @property
    def unit(self) -> int:
        """Numbers along k of a unit of 16 bytes."""
        return 32 if self.weights in ("MXFP4", "NVFP4") else 16 // self.a_size

    @property
    def is_of_units(self) -> bool:
        """Whether arrays begin, and rows are made of, whole units of 16 bytes; strides of weights do not count."""
        return self.is_aligned and self.k % self.unit == 0 == self.columns % UNIT_COLUMNS

    @property
    def is_by_blocks(self) -> bool:
        return self.b_scales == "block"

    @property
    def all_rows(self) -> int:
        return self.rows * self.experts if self.is_batched else self.rows

    def of(self, rows: int, tokens: int, expected_m: int | None) -> Product:
        """The product with these numbers of rows."""
        return self._replace(rows=rows, tokens=tokens, expected_m=expected_m, without_counts=self)

    def tiles(self, tokens: int, strips: int = 1) -> int:
        """The most tiles of `tokens` rows that there can be, times `strips`: each group's last one may not be full."""
        rows, experts = self.rows, self.experts
        if self.is_batched:
            return experts * -(-rows // tokens) * strips
        return (rows + min(experts, rows) * (tokens - 1)) // tokens * strips

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

    @property
    def expected_rows(self) -> int:
        """The rows that `expects` compares, where these are more than STREAM_ROWS."""
        if self.expected_m is not None:
            return self.expected_m
        return -(-self.rows // (1 if self.is_batched else self.experts))


# --- a launch -------------------------------------------------------------------------------------------

#: The fields of GemmParams and its kin that each call gives, in this order: addresses, rows and tensor maps.
FIELDS = (
    "a", "b", "offsets", "a_scale", "b_scale", "b_global_scale", "row_token", "bias", "out", "out_scale",
    "rows", "tokens", "max_tokens", "b_map", "a_map",
)  # fmt: skip


_NO_MAP = bytes(TENSOR_MAP_BYTES)


class Config(NamedTuple):
    """What the launches of a product have in common, whatever their numbers of rows."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    pack: Packer
    b_map: Maps | None
    a_map: Maps | None
    reason: str = ""


class Chosen(NamedTuple):
    """The launch of a product."""

    config: Config
    grid: tuple[int, int, int]
    rows: tuple[int, int, int]  # `rows`, `tokens` and `max_tokens` of GemmParams
    a_rows: int  # of `a` in memory
    why: str
    advice: str = ""  # what makes it faster


def config_of(
    x: Product, variant: Variant, threads: int = 0, together: int = 0, b_map: Maps | None = None,
    a_map: Maps | None = None, **own: Any,
) -> Config:  # fmt: skip
    """The configuration of a kernel for a product; `own` are the fields that this kernel's struct has beside others.

    `threads` of a block, where the variant does not say.
    """
    fields = {
        "experts": x.experts, "n": x.n, "k": x.k, "offset_words": x.offset_words,
        "a_scale_step": int(x.a_scales == "row"), "b_scale_step": int(x.b_scales == "column"), "together": together,
        "alpha": x.alpha, "limit": x.limit, "bias_is_float": int(x.bias_is_float), **own,
    }  # fmt: skip
    pack = packer(variant.instance.file, variant.instance.function, FIELDS, fields)
    launched = variant.launched
    return Config(variant, (threads or launched.threads, 1, 1), launched.shared_bytes, pack, b_map, a_map)


def chosen(x: Product, config: Config, why: str, blocks: int, y: int = 1) -> Chosen:
    rows = x.all_rows, x.tokens, x.rows if x.is_batched else 0
    return Chosen(config, (blocks, y, 1), rows, x.tokens * x.experts if x.is_batched else x.tokens, why)


def launch(chosen: Chosen, library: Library, device: int, addresses: Sequence[int]) -> None:
    """Launch a product; `addresses` are the first ten of FIELDS, and 0 stands for a missing array."""
    config, grid, rows, a_rows, why, advice = chosen
    b_map = a_map = _NO_MAP
    if config.b_map is not None:
        b_map = config.b_map.find(library, addresses[1])
    if config.a_map is not None:
        a_map = config.a_map.find(library, addresses[0], a_rows)
    if library.recorder is not None:
        config = config._replace(reason=why.replace("{", "{{").replace("}", "}}"))
    if advice:
        advise(library, advice)
    runtime.launch(config, library, device, grid, (*addresses, *rows, b_map, a_map))


def b_map_of(x: Product, weights: int, promotion: int = 256, is_gated: bool = False) -> Maps:
    """The map of weights, with boxes of `weights` rows of 128 bytes.

    `is_gated`: a box of weights is 8 gates, their 8 ups, the next 8 gates, and so on.
    """
    size = x.a_size
    dtype, line = "uint8" if size == 1 else x.a_dtype, 128 // size
    of_expert, between = (stride * size for stride in x.b_strides)
    if x.is_transposed:
        # Of 64 steps along k a box has `line` weights, those of a warpgroup.
        turned = (x.n, x.k, x.experts, 1), (between, of_expert, x.experts * of_expert)
        return Maps(dtype, (line, 64, 1, 1), lambda _: turned, promotion)
    dims: tuple[int, ...] = (x.k, x.n, x.experts, 1)
    strides: tuple[int, ...] = (between, of_expert, x.experts * of_expert)
    box: tuple[int, ...] = (line, weights, 1, 1)
    if is_gated:
        # From a gate to the next, to its up, and to the gate 8 further on.
        rows_apart = (2, 1, 16) if x.interleaved else (1, x.n // 2, 8)
        dims = x.k, 8, 2, x.n // 16, x.experts
        strides = (*(apart * between for apart in rows_apart), of_expert)
        box = line, 8, 2, weights // 16, 1
    return Maps(dtype, box, lambda _: (dims, strides), promotion)


def a_map_of(x: Product, rows: int, promotion: int) -> Maps:
    """The map of `a` with boxes of `rows` rows of 128 bytes."""
    k, size = x.k, x.a_size
    dtype, box = "uint8" if size == 1 else x.a_dtype, (128 // size, rows, 1, 1)
    return Maps(dtype, box, lambda n: ((k, n, 1, 1), (k * size, n * k * size, n * k * size)), promotion)


def _row_map(x: Product) -> Maps:
    """The map of `a`, whose rows are gathered, with boxes of 128 bytes of one row."""
    k, size = x.k, x.a_size
    return Maps(x.a_dtype, (128 // size, 1), lambda n: ((k, n), (k * size,)), 256)


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
    if x.gpu.arch != "90a":
        return f"this GPU is of sm_{x.gpu.arch}, not sm_90a"
    if x.weights in ("MXFP4", "NVFP4"):
        return "weights are of 4 bits"
    if x.gathers and x.weights == "FP8":
        return "rows of FP8 are gathered"
    line = x.n if x.is_transposed else x.k
    if x.is_strided and any(stride * x.b_item_size % 16 or stride < line for stride in x.b_strides):
        return "rows of b lie at no multiples of 16 bytes, or overlap"
    return ""


@functools.lru_cache(maxsize=1024)
def _wgmma_config(x: Product, form: Wgmma) -> Config:
    # Weights that are read once are fetched to L2 by 128 bytes, not 256 (3% faster on an H200).
    promotion = 128 if form.is_streamed and not x.is_transposed else 256
    b_map = b_map_of(x, _wgmma_weights(), promotion, is_gated=x.is_gated)
    a_map = _row_map(x) if x.gathers else a_map_of(x, form.box, promotion)
    variant = form.variant(x.a_dtype, x.epilogue, x.gathers, x.is_transposed)
    return config_of(x, variant, together=_TOGETHER, b_map=b_map, a_map=a_map)


def wgmma(x: Product, why: str) -> Chosen:
    count = x.gpu.multiprocessors
    form, of_form = _form_of(_wgmma_forms(x, count), x, count)
    blocks = x.tiles(min(form.tokens, _TOKENS_OF_TILES), -(-x.n // (form.cluster * _wgmma_weights())) * form.cluster)
    blocks = min(blocks, count * form.blocks // form.cluster * form.cluster)
    return chosen(x, _wgmma_config(x.without_counts, form), f"{why}; {of_form}", blocks)


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
#: The form for few tiles: a multiprocessor has one at a time, and its warpgroups share the k.
FP4_FEW_TILES = Fp4Wgmma(8, 4, sides=1, split=4, halves=2, is_streamed=True)
#: Tiles of the first form for each multiprocessor that count as few.
_FEW_TILES = 12
_FP4_ALL = FP4_FEW_TILES, *FP4_FORMS
_fp4_ahead = [form.variant("bfloat16", x, 0, False).instance for x in ("MXFP4", "NVFP4") for form in _FP4_ALL]
#: The epilogues of gpt-oss: gates and ups in pairs and biases of the first product, biases of the second.
_GPT_OSS = (
    epilogue(activations.number("swigluoai"), is_gated=True, interleaved=True, biased=True),
    epilogue(0, is_gated=False, biased=True),
)
_fp4_ahead += [form.variant("bfloat16", "MXFP4", x, False).instance for x in _GPT_OSS for form in _FP4_ALL]
_fp4_wgmma.specialize_by_arch({arch: _fp4_ahead if arch == "90a" else [] for arch in gpu.BY_ARCH})


def why_not_prepared(variant: str, x: Product) -> str:
    """The reason why prepared weights cannot be used; empty if they can."""
    if x.gpu.arch != "90a":
        return f"this GPU is of sm_{x.gpu.arch}, not sm_90a"
    return "" if variant in ("auto", "wgmma") else f"variant {variant!r} takes others"


@functools.lru_cache(maxsize=1024)
def _fp4_config(x: Product, form: Fp4Wgmma) -> Config:
    promotion = 128 if form.is_streamed else 256
    a_map = None if x.gathers else _token_map(x, form, promotion)
    variant = form.variant(x.a_dtype, x.weights, x.epilogue, x.gathers)
    return config_of(x, variant, together=_TOGETHER, b_map=prepared_map(x, form, promotion), a_map=a_map)


def fp4_wgmma(x: Product, why: str) -> Chosen:
    count = x.gpu.multiprocessors
    form, of_form = _form_of(FP4_FORMS, x, count)
    if form is FP4_FORMS[0] and x.tiles(form.tokens, -(-x.n // form.weights)) <= _FEW_TILES * count:
        form = FP4_FEW_TILES
        of_form += f", one at a time with its k shared out (up to {_FEW_TILES} tiles a multiprocessor)"
    if x.gathers:
        form = (FP4_FORMS[-2] if form is FP4_FORMS[-1] else form)._replace(cluster=1)
        of_form += f", of {form.tokens} and without clusters as rows are gathered"
    strips = -(-x.n // (form.cluster * form.weights))
    blocks = x.tiles(min(form.tokens, _TOKENS_OF_TILES), strips * form.cluster)
    blocks = min(blocks, count * form.blocks // form.cluster * form.cluster)
    return chosen(x, _fp4_config(x.without_counts, form), f"{why}; {of_form}", blocks)


def _token_map(x: Product, form: Fp4Wgmma, promotion: int) -> Maps:
    """A map of the tokens. Where k is whole units, a box has all those of a stage."""
    k, size, unit = x.k, x.a_size, 128 // x.a_size
    if form.units == 1 or k % unit:
        return a_map_of(x, form.box, promotion)

    def sizes(rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (unit, rows, k // unit, 1), (k * size, 128, rows * k * size)

    return Maps(x.a_dtype, (unit, form.box, form.units, 1), sizes, promotion)


def prepared_map(x: Product, form: Any, promotion: int) -> Maps:
    """A map of prepared weights, with boxes of a stage, where gates of a half and their ups alternate by 8 rows."""
    _, eights, units, unit = x.prepared
    words, line, eight = unit // 8, form.units * (unit // 8), units * unit
    eights_of_box, of_expert = form.weights // UNIT_ROWS, eights * eight
    if x.has_halves:
        dims = units * words, 2, eights // 2, x.experts
        strides, box = (of_expert // 2, eight, of_expert), (line, 2, eights_of_box // 2, 1)
    else:
        dims = units * words, eights, x.experts, 1
        strides, box = (eight, of_expert, x.experts * of_expert), (line, eights_of_box, 1, 1)
    return Maps("uint64", box, lambda _: (dims, strides), promotion, swizzled=False)


def prepare_variant(weights: str, restores: bool = False) -> Variant:
    return (_restore if restores else _prepare).variant(weights)


#: The fields of PrepareParams that each call gives.
_PREPARE_FIELDS = "b", "b_scale", "prepared", "units", "k"


class Prepare(NamedTuple):
    """The launch that prepares or restores weights of 4 bits."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    pack: Packer
    reason: str


def prepare(
    weights: str, library: Library, device: int, addresses: tuple[int, int, int], units: int, k: int, restores: bool
) -> None:
    """Prepare weights of 4 bits, or restore them: the addresses of `b`, `b_scale` and `units` prepared units."""
    variant, threads = prepare_variant(weights, restores), constant(_prepare, "PREPARE_THREADS")
    pack = packer(variant.instance.file, variant.instance.function, _PREPARE_FIELDS, {})
    grid = -(-units * constant(_prepare, "UNIT_WORDS") // threads), 1, 1
    config = Prepare(variant, (threads, 1, 1), 0, pack, _of_scales(weights))
    runtime.launch(config, library, device, grid, (*addresses, units, k))


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


@functools.lru_cache(maxsize=1024)
def _mma_config(x: Product, form: Mma) -> Config:
    return config_of(x, form.variant(x.out_dtype, x.weights, x.is_by_blocks, x.epilogue))


def mma(x: Product, why: str) -> Chosen:
    forms = _MMA_MXFP4_FLOAT16 if (x.weights, x.a_dtype) == ("MXFP4", "float16") else MMA_FORMS[x.weights]
    form = next((form for form in forms[:-1] if x.expects(form.tokens)), forms[-1])
    why = f"{why}; {tiles_of([form.tokens for form in forms], form.tokens, x)}"
    form = form.fit(x.weights, x.is_by_blocks, x.gpu.shared_per_block)
    config = _mma_config(x.without_counts, form)
    return chosen(x, config, why, x.tiles(form.tokens, -(-x.n // form.weights)))


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
    units = x.k * x.a_size // 16
    if x.n * units > 2**32 or x.tokens > 2**32 // (groups * units):
        return "a, or the weights of one expert, are larger than 64 GiB"
    return ""


@functools.lru_cache(maxsize=1024)
def _stream_config(x: Product, tokens: int) -> Config:
    variant = stream_variant(tokens, x.out_dtype, x.weights, x.is_by_blocks, x.epilogue)
    return config_of(x, variant, 32 * _stream_form(tokens, x.weights).warps)


def stream(x: Product, why: str) -> Chosen:
    tokens = _stream_tokens(x)
    form = _stream_form(tokens, x.weights)
    why = f"{why}; {tiles_of(_STREAM_TOKENS, tokens, x)}"
    config = _stream_config(x.without_counts, tokens)
    return chosen(x, config, why, -(-x.n // (2 * form.warps * form.pairs)), x.tiles(tokens))
