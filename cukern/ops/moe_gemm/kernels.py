"""Kernels of a grouped GEMM: tile configurations ("forms"), their choice, and launches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import MXFP4_GROUP, NVFP4_GROUP
from cukern.formats.weights import UNIT_ROWS
from cukern.ops.moe_gemm.product import Product
from cukern.runtime import activation as activations
from cukern.runtime import arrays, gpu
from cukern.runtime.describe import Array
from cukern.runtime.each import Each
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import launch, tensor_map

_wgmma = Kernel("moe_gemm/wgmma", "gemm_wgmma", compile_s=1.5)
_mma = Kernel("moe_gemm/mma", "gemm_mma")
_stream = Kernel("moe_gemm/stream", "gemm_stream")
_fp4_wgmma = Kernel("moe_gemm/fp4_wgmma", "gemm_fp4_wgmma", compile_s=2)
_prepare = Kernel("moe_gemm/prepare", "prepare_weights")
_restore = Kernel("moe_gemm/restore", "restore_weights")

_ACTIVATIONS_AHEAD = 0, activations.number("silu")  # compiled ahead of time
_HOPPER_BYTES = gpu.BY_ARCH["90a"].shared_per_block
_RESERVED_BYTES = 1 << 10  # of each block's shared memory, by CUDA


def epilogue(
    activation: int,
    *,
    is_gated: bool,
    interleaved: bool = False,
    biased: bool = False,
    bounded: bool = False,
    scale_of_expert: bool = False,
) -> int:
    """Return the template argument ACTIVATION (`moe_gemm/epilogue.cuh`)."""
    flags = {
        "UNGATED": activation and not is_gated,
        "INTERLEAVED": interleaved,
        "BIASED": biased,
        "BOUNDED": bounded,
        "EXPERT_SCALE": scale_of_expert,
    }
    return activation + sum(_mma.constant(name) for name, is_set in flags.items() if is_set)


# --- 16-bit weights, with WGMMA ---------------------------------------------------------------------------

_BAND_TILES = 8  # consecutive token tiles with the same weights
_DEVIATIONS = 2.5  # few groups have more rows than the mean plus 2.5 standard deviations
_FULL_TILE_TOKENS = 256  # of the largest form, if a group has several tiles


def box_of(tokens: int) -> int:
    """Return the number of tokens in a TMA box, for tiles of `tokens` tokens."""
    return 32 if tokens >= 64 else max(tokens // 2, 8)


def staged_rows(tokens: int) -> int:
    """Return the number of tokens that the epilogue stages in shared memory at a time."""
    return 32 if tokens > 128 else 64 if tokens == 128 else 16 if tokens >= 16 else 8


def _wgmma_weights() -> int:
    return _wgmma.constant("WARPGROUPS") * 64


class Wgmma(NamedTuple):
    """Template arguments of `gemm_wgmma`."""

    tokens: int  # per tile: 8, 16, 32, 64, 96, 128 or 288
    stages: int  # as many as fit in shared memory
    cluster: int = 1  # 1 or 2
    blocks: int = 1  # resident, per multiprocessor
    is_streamed: bool = False

    @property
    def box(self) -> int:
        return box_of(self.tokens)

    def shared_bytes(self, gathers: bool) -> int:
        rows = self.stages * (_wgmma_weights() + self.tokens) + _wgmma.constant("WARPGROUPS") * 2 * staged_rows(
            self.tokens
        )
        barriers = -(-(16 * self.stages + 8) // 16) * 16 + 16 * self.stages
        # The largest tiles need a sorted list of experts. With gathered rows each producer warp has its own list, and
        # the row indices take memory, too.
        sorted_lists = (4 if gathers else 1) * _wgmma.constant("MAX_SORTED") if self.tokens > 128 else 0
        sources = self.tokens // self.cluster * 4 if gathers else 0
        return 1024 + rows * _wgmma.constant("ROW_BYTES") + barriers + sorted_lists + sources

    def threads(self, gathers: bool) -> int:
        warpgroup_tokens = 64 if gathers else 129  # from here on the producer is a warpgroup
        producer = _wgmma.constant("WARPGROUP") if self.tokens >= warpgroup_tokens else 32
        return _wgmma.constant("WARPGROUPS") * _wgmma.constant("WARPGROUP") + producer

    def variant(self, dtype: str, activation: int, gathers: bool = False, is_transposed: bool = False) -> Variant:
        flags = [self.is_streamed, gathers, *[True] * is_transposed]
        arguments: list[Any] = [arrays.CUDA_TYPE[dtype], activation, *self[:4], *flags]
        launched = Launched(self.threads(gathers), self.shared_bytes(gathers), box=self.box)
        return _wgmma.variant(*arguments, launched=launched)


#: In ascending order of tokens.
WGMMA_FORMS = (
    Wgmma(8, 4, blocks=3, is_streamed=True),
    Wgmma(16, 5, blocks=2, is_streamed=True),
    Wgmma(32, 5, blocks=2, is_streamed=True),
    Wgmma(64, 4, cluster=2, blocks=2, is_streamed=True),
    Wgmma(96, 3, cluster=2, blocks=2, is_streamed=True),
    Wgmma(128, 6, cluster=2),
    Wgmma(288, 4, cluster=2),
)
#: The tile configurations for weights in memory as [experts, k, n], with gates and ups in separate halves of n. Each
#: warpgroup of a block computes a part of the tile's tokens.
_WGMMA_BY_TOKENS = *WGMMA_FORMS[1:-1], WGMMA_FORMS[-1]._replace(tokens=256)
_wgmma.specialized = [
    *(form.variant("bfloat16", x).instance for x in _ACTIVATIONS_AHEAD for form in WGMMA_FORMS),
    *(form.variant("bfloat16", _ACTIVATIONS_AHEAD[-1], gathers=True).instance for form in WGMMA_FORMS),
]
_wgmma.at_import = [WGMMA_FORMS[-1].variant("bfloat16", x).instance for x in _ACTIVATIONS_AHEAD]


@functools.cache
def _mean_for(most: int) -> int:
    """Return the largest mean group size for which few groups have more than `most` rows, with random routing."""
    return max(rows for rows in range(1, most + 1) if rows + _DEVIATIONS * rows**0.5 <= most)


def _form_of(forms: Sequence[Any], x: Product, multiprocessors: int, is_exact: bool = False) -> tuple[Any, str]:
    """Return the tile configuration for the expected rows, and the reason.

    `forms` ascend by tokens per tile. `is_exact`: no group has more than the expected rows.
    """
    most = 0
    for form in forms[:-1]:
        most = form.tokens if x.is_batched or is_exact else _mean_for(form.tokens)
        if x.expects(most):
            return form, f"tiles of {form.tokens} rows (up to {x.row_limit(most)} an expert)"
    # The largest tiles read the fewest bytes, but are not used if there would be fewer tiles than multiprocessors.
    tiles = multiprocessors // (2 * x.experts * -(-x.n // 128))
    if tiles and x.expects(tiles * _FULL_TILE_TOKENS):
        few = f"larger ones would not be enough for {multiprocessors} multiprocessors"
        return forms[-2], f"tiles of {forms[-2].tokens} rows (up to {tiles * _FULL_TILE_TOKENS} an expert: {few})"
    return forms[-1], f"tiles of {forms[-1].tokens} rows (from {most + 1} an expert on)"


def _wgmma_forms(x: Product, multiprocessors: int) -> Sequence[Wgmma]:
    """Return the tile configurations to choose from.

    Tiles of 96 tokens are left out if a multiprocessor gets only one block. That block would have half as many bytes in
    flight as a block with tiles of 128 tokens.
    """
    forms = _WGMMA_BY_TOKENS if x.is_transposed and x.has_halves else WGMMA_FORMS
    if x.experts * -(-x.n // _wgmma_weights()) >= 2 * multiprocessors:
        return forms
    return [form for form in forms if form.tokens != 96]


def why_not_wgmma(x: Product) -> str:
    """Return why `gemm_wgmma` (with FP8 weights `gemm_fp8_wgmma`) cannot compute the grouped GEMM; empty if it can."""
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


def resident_blocks(x: Product, form: Any, weights: int, parts: int = 1) -> int:
    """Return the grid of a persistent kernel. `weights`: rows of weights of a tile. `parts`: blocks that divide k."""
    strips, cluster = -(-x.n // (form.cluster * weights)), form.cluster * parts
    blocks = x.tiles(min(form.tokens, _FULL_TILE_TOKENS), strips * cluster)
    return min(blocks, max(x.a.gpu.multiprocessors * form.blocks // cluster, 1) * cluster)


def wgmma(x: Product) -> None:
    count, gathers = x.a.gpu.multiprocessors, x.row_token is not None
    (form, why), weights = _form_of(_wgmma_forms(x, count), x, count), _wgmma_weights()
    # For weights that are read once, an L2 promotion of 128 bytes is 3% faster than 256 bytes (H200).
    promotion = 128 if form.is_streamed and not x.is_transposed else 256
    maps: dict[str, Any] = x.maps(weights, form.box, promotion, is_gated=x.is_gated)
    if gathers:
        maps["a_map"] = x.row_map()
    launch(
        form.variant(x.a.dtype, x.epilogue, gathers, x.is_transposed),
        resident_blocks(x, form, weights),
        why=f"{x.why}; {why}",
        **x.fields(_BAND_TILES),
        **maps,
    )


# --- prepared 4-bit weights, with WGMMA -----------------------------------------------------------------


class Fp4Wgmma(NamedTuple):
    """Template arguments of `gemm_fp4_wgmma`."""

    tokens: int  # per tile: 8, 16, 32, 64, 96, 128 or 288
    units: int  # units of 64 elements along k in a stage
    cluster: int = 1  # 1 or 2
    blocks: int = 1  # resident, per multiprocessor
    sides: int = 2  # warpgroups along n, 64 rows of weights each: 1 or 2
    halves: int = 1  # half units that a warpgroup converts at once: 1 or 2
    parts: int = 1  # blocks of a cluster along k (split-K): 1 or 2
    is_streamed: bool = False

    @property
    def weights(self) -> int:
        """The number of weight rows in a tile."""
        return self.sides * 64

    @property
    def threads(self) -> int:
        warpgroup = _fp4_wgmma.constant("WARPGROUP")
        return self.sides * warpgroup + (warpgroup if self.tokens > 128 else 32)

    @property
    def box(self) -> int:
        return 8 if self.units > 1 else box_of(self.tokens)

    def _sizes(self, weights: str) -> tuple[int, int]:
        """Return the bytes of a stage (with its barriers), and the bytes of all other shared memory."""
        row_bytes, warpgroup = _fp4_wgmma.constant("ROW_BYTES"), _fp4_wgmma.constant("WARPGROUP")
        unit = _fp4_wgmma.constant(f"UNIT_{weights}") * self.weights // UNIT_ROWS
        stage = self.units * (self.tokens * row_bytes + unit) + 16
        staging, sums = self.sides * 2 * staged_rows(self.tokens) * row_bytes, warpgroup * self.tokens * 2
        return stage, 1024 + staging + (self.parts - 1) * self.sides * sums + _fp4_wgmma.constant("FP4_SHARED")

    def stages(self, weights: str) -> int:
        stage, rest = self._sizes(weights)
        block_bytes = (_HOPPER_BYTES + _RESERVED_BYTES) // self.blocks - _RESERVED_BYTES
        return (block_bytes - rest) // stage

    def shared_bytes(self, weights: str) -> int:
        stage, rest = self._sizes(weights)
        return self.stages(weights) * stage + rest

    def variant(self, dtype: str, weights: str, activation: int, gathers: bool) -> Variant:
        sizes = self.tokens, self.units, self.stages(weights), *self[2:7]
        arguments: tuple[Any, ...] = *sizes, self.is_streamed, gathers
        format = arrays.CUDA_TYPE[dtype], weights, activation
        launched = Launched(self.threads, self.shared_bytes(weights), box=self.box)
        return _fp4_wgmma.variant(*format, *arguments, launched=launched)


#: In ascending order of tokens.
FP4_FORMS = (
    Fp4Wgmma(8, 4, blocks=2, halves=2, is_streamed=True),
    Fp4Wgmma(16, 4, blocks=2, halves=2, is_streamed=True),
    Fp4Wgmma(32, 2, blocks=2, halves=2, is_streamed=True),
    Fp4Wgmma(64, 1, cluster=2, blocks=2, is_streamed=True),
    Fp4Wgmma(96, 1, cluster=2, blocks=2),
    Fp4Wgmma(128, 1, cluster=2, halves=2),
    Fp4Wgmma(288, 1, cluster=2, halves=2),
)
#: The forms for few tiles: two blocks divide k. On an H200, one matrix of 8192 x 8192 and 1, 16, 32, 64, 96 and 128
#: rows take 15, 16, 18, 22, 32 and 38 us, and 22, 26, 36, 48, 56 and 57 us with FP4_FORMS.
FP4_SPLIT_FORMS = (
    Fp4Wgmma(8, 4, blocks=4, sides=1, halves=2, parts=2, is_streamed=True),
    Fp4Wgmma(16, 4, blocks=2, halves=2, parts=2, is_streamed=True),
    Fp4Wgmma(32, 4, halves=2, parts=2, is_streamed=True),
    Fp4Wgmma(64, 4, halves=2, parts=2, is_streamed=True),
    Fp4Wgmma(96, 1, halves=2, parts=2),
    Fp4Wgmma(128, 1, parts=2),
)
#: By tokens: a form of FP4_SPLIT_FORMS is used if its tiles need at most this many thread blocks per multiprocessor,
#: with two for each tile. On an H200, 16 experts of 2880 x 2880 with a row each (11 blocks) take 26 us, and 27 us with
#: FP4_FORMS. 32 experts of 5760 x 2880 with four rows each (44 blocks) take 89 and 87 us.
_SPLIT_BLOCKS = {8: 16, 16: 2, 32: 2, 64: 2, 96: 1, 128: 1}
#: Tiles of this many tokens also replace larger tiles, if they need at most one block per multiprocessor. On an H200,
#: one matrix of 4096 x 7168 with 96 rows takes 18 us in tiles of 64 rows, and 27 us in tiles of 96 rows.
_SMALLER_TOKENS = 64
_FP4_ALL = *FP4_SPLIT_FORMS, *FP4_FORMS
_fp4_ahead = [form.variant("bfloat16", x, 0, False).instance for x in ("MXFP4", "NVFP4") for form in _FP4_ALL]
#: For gpt-oss: the first GEMM of a layer has interleaved gates and biases, the second has biases.
_GPT_OSS = (
    epilogue(activations.number("swigluoai"), is_gated=True, interleaved=True, biased=True),
    epilogue(0, is_gated=False, biased=True),
)
_fp4_ahead += [form.variant("bfloat16", "MXFP4", x, False).instance for x in _GPT_OSS for form in _FP4_ALL]
_fp4_wgmma.specialize_by_arch({arch: _fp4_ahead if arch == "90a" else [] for arch in gpu.BY_ARCH})


def why_not_prepared(variant: str, x: Product) -> str:
    """Return why prepared weights cannot be used; empty if they can."""
    if x.a.gpu.arch != "90a":
        return f"this GPU is of sm_{x.a.gpu.arch}, not sm_90a"
    return "" if variant in ("auto", "wgmma") else f"variant {variant!r} takes others"


def _split_form(x: Product, tokens: int, multiprocessors: int) -> Fp4Wgmma | None:
    """Return the form that divides k instead of the form with `tokens`, or None if there are enough tiles."""
    for form in FP4_SPLIT_FORMS:
        blocks = form.parts * x.tiles_to_divide(form.tokens, -(-x.n // form.weights))
        most = _SPLIT_BLOCKS[form.tokens] if form.tokens == tokens else 1
        # Each block has at least two stages. The kernel requires at least one.
        is_deep = x.k >= 2 * form.parts * form.units * _fp4_wgmma.constant("UNIT_K")
        if min(tokens, _SMALLER_TOKENS) <= form.tokens <= tokens and is_deep and blocks <= most * multiprocessors:
            return form
    return None


def fp4_wgmma(x: Product) -> None:
    count, gathers = x.a.gpu.multiprocessors, x.row_token is not None
    form, why = _form_of(FP4_FORMS, x, count, is_exact=x.experts == 1)
    split = _split_form(x, form.tokens, count)
    if split is not None:
        form = split
        why += f"; instead, tiles of {form.tokens} rows with k divided between {form.parts} blocks, as there are few"
    if gathers:
        form = (FP4_FORMS[-2] if form is FP4_FORMS[-1] else form)._replace(cluster=1)
        why += f", of {form.tokens} and without multicast as rows are gathered"
    promotion = 128 if form.is_streamed else 256
    launch(
        form.variant(x.a.dtype, x.weights, x.epilogue, gathers),
        resident_blocks(x, form, form.weights, form.parts),
        why=f"{x.why}; {why}",
        **x.fields(_BAND_TILES),
        b_map=_prepared_map(x, form, promotion),
        a_map=None if gathers else _token_map(x, form, promotion),
    )


def _token_map(x: Product, form: Fp4Wgmma, promotion: int) -> Each:
    """Return the tensor map of the tokens. If k is a whole number of units, a TMA box has all units of a stage."""
    unit = 128 // x.a.item_size
    if form.units == 1 or x.k % unit:
        return x.a_map(form.box, promotion)
    between, all_rows = x.k * x.a.item_size, x.all_rows * x.k * x.a.item_size
    dims, strides = (unit, x.all_rows, x.k // unit, 1), (between, 128, all_rows)
    return tensor_map(x.a, x.a.dtype, dims, strides, (unit, form.box, form.units, 1), promotion)


def _prepared_map(x: Product, form: Any, promotion: int) -> Each:
    """Return the tensor map of prepared weights. A TMA box has the weights of one stage.

    If gates and ups are halves of n, a box holds 8 rows of gates, then the 8 rows of their ups, and so on.
    """
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


def convert(weights: str, b: Array, b_scale: Array, prepared: Array, k: int, restores: bool = False) -> None:
    units, threads = prepared.size // prepared.shape[-1], _prepare.constant("PREPARE_THREADS")
    launch(
        prepare_variant(weights, restores),
        -(-units * _prepare.constant("UNIT_WORDS") // threads),
        threads,
        why=f"{weights}: a scale for {MXFP4_GROUP if weights == 'MXFP4' else NVFP4_GROUP} numbers of a row",
        b=b,
        b_scale=b_scale,
        prepared=prepared,
        units=units,
        k=k,
    )


# --- every GPU ------------------------------------------------------------------------------------------


class Mma(NamedTuple):
    """Template arguments of `gemm_mma`."""

    tokens: int  # per tile
    weights: int  # per tile
    token_warps: int
    weight_warps: int
    step: int  # elements along k in a stage
    stages: int  # an upper bound; `fit` reduces it
    blocks: int  # resident, per multiprocessor

    def stage_bytes(self, weights: str, is_by_blocks: bool) -> int:
        """Return the bytes of a stage, which is BYTES of `LdmatrixLayout` or `Fp4Layout` in the kernel."""
        a_line = b_line = self.step if weights == "FP8" else self.step * 2
        scales = (self.tokens + self.weights // 8) * 4 if is_by_blocks else 0
        if weights in ("MXFP4", "NVFP4"):
            b_line, groups = self.step // 2, self.step // (MXFP4_GROUP if weights == "MXFP4" else NVFP4_GROUP)
            scales = self.weights * (groups // 4 + 1) * 4
        return -(-(self.tokens * a_line + self.weights * b_line + scales) // 128) * 128

    def fit(self, weights: str, is_by_blocks: bool, most: int) -> Mma:
        """Return this configuration with as many stages as fit in `most` bytes of shared memory.

        If fewer than 3 stages fit, reduce the number of resident blocks. With 16-bit weights also halve the size of a
        stage.
        """
        form, each = self, self.stage_bytes(weights, is_by_blocks)

        def block_bytes(blocks: int) -> int:
            # CUDA reserves 1 KiB per block. Static shared memory and alignment take up to another 1 KiB.
            return (most + _RESERVED_BYTES) // blocks - 2 * _RESERVED_BYTES

        blocks = form.blocks
        while blocks > 1 and min(form.stages, 3) * each > block_bytes(blocks):
            blocks -= 1
        if weights in ("PLAIN", "TRANSPOSED") and block_bytes(blocks) // each < 3:
            form = form._replace(step=form.step // 2, stages=form.stages * 2)
            each //= 2
        return form._replace(stages=min(form.stages, block_bytes(blocks) // each), blocks=blocks)

    def variant(self, out_dtype: str, weights: str, is_by_blocks: bool, activation: int) -> Variant:
        shared_bytes = self.stages * self.stage_bytes(weights, is_by_blocks)
        arguments = arrays.CUDA_TYPE[out_dtype], weights, *self, activation, is_by_blocks
        return _mma.variant(*arguments, launched=Launched(self.token_warps * self.weight_warps * 32, shared_bytes))


_MMA_4 = (
    Mma(16, 256, 1, 4, 128, 3, 3),
    Mma(32, 256, 1, 4, 128, 4, 2),
    Mma(64, 256, 1, 8, 128, 5, 1),
    Mma(128, 128, 2, 4, 128, 5, 1),
)
#: In ascending order of tokens.
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
#: With a float16 `a`, the separate sums of each 32 elements along k need more registers. So the largest tile has 4
#: warps along the tokens and 2 along the weights.
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
    """Return the reason for tiles of `tokens` rows."""
    if tokens == sizes[-1]:
        return f"tiles of {tokens} rows (from {x.row_limit(sizes[-2]) + 1} an expert on)"
    return f"tiles of {tokens} rows (up to {x.row_limit(tokens)} an expert)"


def why_not_mma(x: Product) -> str:
    """Return why `gemm_mma` cannot compute the grouped GEMM; empty if it can."""
    return "rows of b have a stride" if x.is_strided else ""


# --- few rows per expert --------------------------------------------------------------------------------


class _Stream(NamedTuple):
    """Template arguments of `gemm_stream`."""

    pairs: int  # of weight rows that a warp processes at a time
    warps: int
    loads: int  # of 16 bytes of each row, in flight
    blocks: int  # resident, per multiprocessor


#: Rows of `a` per tile.
_STREAM_TOKENS = (1, 2, 4, 8)
STREAM_FORMS = {"PLAIN": _Stream(2, 4, 4, 3), "FP8": _Stream(1, 8, 2, 2)}
#: For tiles of one row this is 6% to 13% faster than STREAM_FORMS["FP8"] on an H200. Larger tiles would need too many
#: registers.
_STREAM_FP8_ONE = _Stream(2, 4, 2, 4)
_MAX_GRID_Y = 2**16 - 1


def _stream_form(tokens: int, weights: str) -> _Stream:
    if weights == "FP8" and tokens == 1:
        return _STREAM_FP8_ONE
    form = STREAM_FORMS[weights]
    # The largest tiles need more registers, so one block less is resident.
    return form._replace(blocks=form.blocks - 1) if tokens == _STREAM_TOKENS[-1] else form


def stream_variant(tokens: int, out_dtype: str, weights: str, is_by_blocks: bool, activation: int) -> Variant:
    form = _stream_form(tokens, weights)
    flags = weights, is_by_blocks, tokens, activation
    return _stream.variant(arrays.CUDA_TYPE[out_dtype], *flags, *form)


def _stream_ahead(weights: str, is_by_blocks: bool, activation: int) -> list[Any]:
    return [stream_variant(x, "bfloat16", weights, is_by_blocks, activation).instance for x in _STREAM_TOKENS]


_of_16_bits = [_stream_ahead("PLAIN", False, x) for x in _ACTIVATIONS_AHEAD]
_of_8_bits = _stream_ahead("FP8", True, 0)
_stream.specialized = [*_of_16_bits[0], *_of_16_bits[1], *_of_8_bits]
_stream.at_import = [instances[0] for instances in _of_16_bits]
# sm_80 has no instruction that converts FP8, so "auto" does not use these instances there.
_stream.unused = {"80": _of_8_bits}


def _stream_tokens(x: Product) -> int:
    return next((tokens for tokens in _STREAM_TOKENS[:-1] if x.expects(tokens)), _STREAM_TOKENS[-1])


def why_not_stream(x: Product) -> str:
    """Return why `gemm_stream` cannot compute the grouped GEMM; empty if it can."""
    if x.is_transposed:
        return "b lies as [experts, k, n]"
    if x.weights not in STREAM_FORMS:
        return "weights are of 4 bits"
    if x.is_strided:
        return "rows of b have a stride"
    tokens, groups = _stream_tokens(x), x.experts if x.is_batched else 1
    # `most` is the largest number of rows whose tiles fit in the y dimension of the grid.
    most = _MAX_GRID_Y // groups * tokens if x.is_batched else (_MAX_GRID_Y + 1) * tokens - 1 - x.experts * (tokens - 1)
    if x.rows > most:
        return "there may be too many groups of rows"
    # The kernel indexes the 16-byte vectors of `a` and of an expert's weights with 32 bits.
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
