"""Tile configurations and launches of the grouped GEMMs of FP8 activations and FP8 weights on Hopper."""

from __future__ import annotations

import functools
from typing import NamedTuple

from cukern.formats.quantized import BLOCK
from cukern.ops.moe_gemm.kernels import _ACTIVATIONS_AHEAD, _HOPPER_BYTES, why_not_wgmma
from cukern.ops.moe_gemm.product import STREAM_ROWS, Product
from cukern.runtime import arrays, gpu
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import launch

_fp8_wgmma = Kernel("moe_gemm/fp8_wgmma", "gemm_fp8_wgmma")
_fp8_blocks = Kernel("moe_gemm/fp8_blocks", "gemm_fp8_blocks", compile_s=1)

#: {rows per tile: stages}. All stages of a tile take 192 KiB of shared memory, or 208 KiB for 288 rows (256 rows and a
#: tail of 32).
_FP8_STAGES = {288: 4, 256: 4, 128: 6}
#: Up to this many expected rows per group, large tiles have a tail of 32 more rows (with scales by blocks, without an
#: activation). With random routing of 256 rows per group on average, half of the groups have up to 32 more rows, for
#: which a second tile would read all weights again. On an H200 tails save 6% to 13% of the time for 256 rows, and
#: nothing for 1024 rows. If all tiles are full, tails cost 1% to 3%.
FP8_TAIL_ROWS = 600
#: The rows of a small and of a large tile without a tail. Small tiles are used if their cost is below _RATIO times the
#: cost of large tiles.
_SMALL, _LARGE, _RATIO = 128, 256, 0.9
#: A strip is the result columns of a tile. From this many strips on, clusters of two blocks also serve an odd number of
#: strips, where one block of the last cluster is idle.
_MANY_STRIPS = 16
#: The minimum cost of a tile, in boxes of 64 rows. A tile of few rows costs this much because it reads all its weights.
_FP8_LEAST_BOXES = 1.2


def _alone(box: int = 0) -> Launched:
    """Return the launch configuration of a block that takes all shared memory of its multiprocessor."""
    return Launched(_fp8_wgmma.constant("FP8_THREADS"), _HOPPER_BYTES, box=box)


class Fp8Wgmma(NamedTuple):
    """Template arguments of `gemm_fp8_wgmma`."""

    tokens: int  # per tile: 128, 256, or 288 (256 and a tail of 32)
    cluster: int  # 1 or 2

    @property
    def box(self) -> int:
        """The number of rows in a TMA box."""
        return _fp8_wgmma.constant("FP8_TAIL" if self.tokens == 288 else "FP8_BOX")

    def variant(self, out_dtype: str, is_by_blocks: bool, activation: int) -> Variant:
        arguments = self.tokens, self.cluster, _FP8_STAGES[self.tokens], is_by_blocks, activation
        return _fp8_wgmma.variant(arrays.CUDA_TYPE[out_dtype], *arguments, launched=_alone(self.box))


_fp8_wgmma.specialized = [
    Fp8Wgmma(tokens, cluster).variant("bfloat16", True, 0).instance
    for tokens, cluster in ((288, 2), (256, 2), (128, 2), (128, 1))
]


def _fp8_wgmma_cost(rows: int, form: Fp8Wgmma, experts: int, strips: int, multiprocessors: int) -> float:
    """Return the cost for groups of `rows` rows: how many boxes a multiprocessor multiplies one after the other."""
    tiles = -(-rows // form.tokens) * experts * -(-strips // form.cluster)
    boxes = -(-min(rows, form.tokens) // _fp8_wgmma.constant("FP8_BOX"))
    return -(-tiles // max(multiprocessors // form.cluster, 1)) * max(boxes, _FP8_LEAST_BOXES)


def _is_small_cheaper(rows: int, cluster: int, *sizes: int) -> bool:
    small, large = (_fp8_wgmma_cost(rows, Fp8Wgmma(tokens, cluster), *sizes) for tokens in (_SMALL, _LARGE))
    return small < _RATIO * large


def _fp8_wgmma_cluster(strips: int, is_one_box: bool) -> int:
    # Each block of a cluster computes one strip.
    return 2 if (strips % 2 == 0 or strips >= _MANY_STRIPS) and not is_one_box else 1


def _fp8_wgmma_form(x: Product, strips: int, multiprocessors: int) -> tuple[Fp8Wgmma, str]:
    """Return the cheapest tile configuration and the reason. `strips`: result columns divided by a tile's columns."""
    cluster = _fp8_wgmma_cluster(strips, x.expects(_fp8_wgmma.constant("FP8_BOX")))

    def is_small_cheaper(rows: int) -> bool:
        return _is_small_cheaper(rows, cluster, x.experts, strips, multiprocessors)

    large = 288 if x.is_by_blocks and not x.epilogue and x.expects(FP8_TAIL_ROWS) else _LARGE
    if x.expects(_SMALL):
        return Fp8Wgmma(_SMALL, cluster), f"tiles of {_SMALL} rows (up to {_SMALL} an expert)"
    if x.by_expected_rows(is_small_cheaper):
        fewer = f"{multiprocessors} multiprocessors are expected to take less than {_RATIO} of the time of {_LARGE}"
        return Fp8Wgmma(_SMALL, cluster), f"tiles of {_SMALL} rows, with which {fewer}"
    tail = f", a tail among them (scales by blocks, up to {FP8_TAIL_ROWS} an expert)" if large != _LARGE else ""
    return Fp8Wgmma(large, cluster), f"tiles of {large} rows{tail} (from {_SMALL + 1} an expert on)"


def why_not_fp8_wgmma(x: Product) -> str:
    """Return why `gemm_fp8_wgmma` cannot compute the grouped GEMM; empty if it can."""
    if reason := why_not_wgmma(x):
        return reason
    if x.is_gated and x.interleaved:
        return "gates and ups are interleaved, in FP8"
    box = _fp8_wgmma.constant("FP8_BOX")
    if x.is_gated and x.is_by_blocks and x.n % (2 * box):
        return f"the halves of n ({x.n}) are no multiples of {box}, with scales by blocks"
    return ""


def fp8_wgmma(x: Product) -> None:
    count = x.a.gpu.multiprocessors
    # With a gate, two rows of weights give one result column.
    columns = _fp8_wgmma.constant("FP8_COLUMNS") // (2 if x.is_gated else 1)
    strips = -(-x.out.shape[-1] // columns)
    form, why = _fp8_wgmma_form(x, strips, count)
    alone = f"1 up to {_fp8_wgmma.constant('FP8_BOX')} rows an expert, or for odd strips below {_MANY_STRIPS}"
    why += f"; clusters of {form.cluster} for {strips} strips of {columns} columns ({alone})"
    blocks = x.tiles(min(form.tokens, 256), -(-strips // form.cluster) * form.cluster)
    launch(
        form.variant(x.out.dtype, x.is_by_blocks, x.epilogue),
        min(blocks, max(count // form.cluster, 1) * form.cluster),
        why=f"{x.why}; {why}",
        **x.fields(),
        **x.maps(columns, form.box),
    )


# --- with a fused activation and quantization -----------------------------------------------------------

#: `gemm_fp8_blocks` fuses a layer's first GEMM, activation and quantization. Between FP8_QUANTIZED_ROWS and
#: FP8_TAIL_ROWS rows per group two separate kernels are faster, because the tiles of `gemm_fp8_wgmma` have tails. For
#: 32 experts of 256 rows on average with random routing, an H200 takes 429 us for the GEMM plus about 20 us for the
#: activation, but 508 us for `gemm_fp8_blocks`.
FP8_QUANTIZED_ROWS = 128
#: Up to this many rows per group, `gemm_fp8_blocks` has no clusters. A cluster computes a tile of 256 rows. With random
#: routing of 256 rows per group on average, half of the groups would need a second tile for a few rows.
_FP8_ALONE = 256


def fp8_blocks_variant(out_dtype: str, cluster: int, activation: int) -> Variant:
    return _fp8_blocks.variant(arrays.CUDA_TYPE[out_dtype], cluster, activation, launched=_alone())


_fp8_blocks.specialized = [fp8_blocks_variant("bfloat16", x, _ACTIVATIONS_AHEAD[1]).instance for x in (1, 2)]


@functools.lru_cache(1 << 12)
def _is_fused_cheaper(rows: int, experts: int, n: int, multiprocessors: int) -> bool:
    """Return whether, by estimate, `gemm_fp8_blocks` costs at most as much as the GEMM alone in `gemm_fp8_wgmma`."""
    if FP8_QUANTIZED_ROWS < rows <= FP8_TAIL_ROWS:
        return False
    box, columns = _fp8_blocks.constant("FP8_BOX"), _fp8_blocks.constant("FP8_COLUMNS")
    strips = n // columns
    sizes = experts, strips, multiprocessors
    narrow = _fp8_wgmma_cluster(strips, rows <= box)
    tokens = 128 if rows <= 128 or _is_small_cheaper(rows, narrow, *sizes) else 256
    cluster = 1 if rows <= _FP8_ALONE else 2
    tiles = -(-rows // (128 * cluster)) * experts * strips // 2
    boxes = -(-min(rows, 128 * cluster) // (box * cluster))
    # A tile of `gemm_fp8_blocks` has twice as many weights as a tile of `gemm_fp8_wgmma`, so a box costs twice as much.
    cost = -(-tiles // max(multiprocessors // cluster, 1)) * 2 * max(boxes, _FP8_LEAST_BOXES)
    return cost <= _fp8_wgmma_cost(rows, Fp8Wgmma(tokens, narrow), *sizes)


def quantizes(expected_rows: int, experts: int, n: int, gpu: gpu.Gpu | None) -> bool:
    """Return whether, on Hopper, a GEMM with scales by blocks should also apply the activation and quantize the result.

    The number of result columns must be a multiple of 128, the group of a scale. `expected_rows` is per group.
    """
    if gpu is None or gpu.arch != "90a" or n % (2 * BLOCK) or expected_rows <= STREAM_ROWS:
        return False
    return _is_fused_cheaper(expected_rows, experts, n, gpu.multiprocessors)


def fp8_quantized(x: Product, out_scale: Array, dtype: str, smallest: float) -> None:
    """Launch `gemm_fp8_blocks`, which rounds the sums to `dtype` before the activation."""
    cluster = 1 if x.expects(_FP8_ALONE) else 2
    columns, box = _fp8_blocks.constant("FP8_COLUMNS"), _fp8_blocks.constant("FP8_BOX")
    blocks = x.tiles(128 * cluster, x.out.shape[-1] // columns * cluster)
    why = f"clusters of {cluster} (1 up to {_FP8_ALONE} an expert)"
    launch(
        fp8_blocks_variant(dtype, cluster, x.epilogue),
        min(blocks, max(x.a.gpu.multiprocessors // cluster, 1) * cluster),
        why=f"{x.why}; {why}",
        out_scale=out_scale,
        smallest=smallest,
        **x.fields(),
        **x.maps(columns, box),
    )
