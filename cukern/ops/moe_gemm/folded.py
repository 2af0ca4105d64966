"""Tile configurations and launches of the grouped GEMM of FP8 activations and MXFP4 weights on Hopper."""

from __future__ import annotations

from typing import NamedTuple

from cukern.ops.moe_gemm.kernels import (
    _ACTIVATIONS_AHEAD,
    _BAND_TILES,
    _HOPPER_BYTES,
    _RESERVED_BYTES,
    _form_of,
    _prepared_map,
    box_of,
    resident_blocks,
    staged_rows,
)
from cukern.ops.moe_gemm.product import Product
from cukern.runtime import arrays, gpu
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.plan import launch

_folded_wgmma = Kernel("moe_gemm/folded_wgmma", "gemm_folded_wgmma")
_prepare = Kernel("moe_gemm/prepare_folded", "prepare_folded")
_restore = Kernel("moe_gemm/restore_folded", "restore_folded")


class FoldedWgmma(NamedTuple):
    """Template arguments of `gemm_folded_wgmma`."""

    tokens: int  # per tile: 8, 16, 32, 128 or 256
    cluster: int = 1  # 1 or 2
    blocks: int = 1  # resident, per multiprocessor
    is_streamed: bool = False

    @property
    def units(self) -> int:
        """The number of units in a stage. A unit is 128 elements along k."""
        return 1

    @property
    def weights(self) -> int:
        """The number of weight rows in a tile."""
        return _folded_wgmma.constant("WARPGROUPS") * 64

    def _sizes(self) -> tuple[int, int]:
        """Return the bytes of a stage (with its barriers), and the bytes of all other shared memory."""
        scaled = min(self.tokens, 128)
        scales = self.tokens // scaled * 4 * (scaled + 16)
        rows = self.tokens * _folded_wgmma.constant("FOLDED_K")
        weights = self.weights // _folded_wgmma.constant("FOLDED_ROWS") * _folded_wgmma.constant("FOLDED_UNIT_BYTES")
        stage = rows + weights + scales + 32
        warpgroups = _folded_wgmma.constant("WARPGROUPS")
        staging = warpgroups * 2 * staged_rows(self.tokens) * _folded_wgmma.constant("ROW_BYTES")
        kept = 16 * warpgroups * _folded_wgmma.constant("WARPGROUP") // 32
        # 1024, 128 and 256 bytes align the stages, the results and the table. The other 256 are the table.
        return stage, 1024 + staging + 128 + 256 + 256 + kept

    @property
    def stages(self) -> int:
        stage, rest = self._sizes()
        block_bytes = (_HOPPER_BYTES + _RESERVED_BYTES) // self.blocks - _RESERVED_BYTES
        return (block_bytes - rest) // stage

    @property
    def shared_bytes(self) -> int:
        stage, rest = self._sizes()
        return self.stages * stage + rest

    @property
    def box(self) -> int:
        return box_of(self.tokens)

    @property
    def threads(self) -> int:
        warpgroup = _folded_wgmma.constant("WARPGROUP")
        return _folded_wgmma.constant("WARPGROUPS") * warpgroup + (warpgroup if self.tokens >= 128 else 64)

    def variant(self, out_dtype: str, epilogue: int) -> Variant:
        arguments = self.tokens, self.stages, self.cluster, self.blocks, self.is_streamed
        launched = Launched(self.threads, self.shared_bytes, box=self.box)
        return _folded_wgmma.variant(arrays.CUDA_TYPE[out_dtype], epilogue, *arguments, launched=launched)


#: The tile configurations, in ascending order of tokens. There are no tiles of 64 tokens, because tiles of 128 tokens
#: are faster.
FOLDED_FORMS = (
    FoldedWgmma(8, blocks=3, is_streamed=True),
    FoldedWgmma(16, blocks=2, is_streamed=True),
    FoldedWgmma(32, blocks=2, is_streamed=True),
    FoldedWgmma(128, cluster=2),
    FoldedWgmma(256, cluster=2),
)
_ahead = [form.variant("bfloat16", x).instance for x in _ACTIVATIONS_AHEAD for form in FOLDED_FORMS]
_folded_wgmma.specialize_by_arch({arch: _ahead if arch == "90a" else [] for arch in gpu.BY_ARCH})


def folded_wgmma(x: Product) -> None:
    (form, why), medium = _form_of(FOLDED_FORMS, x, x.a.gpu.multiprocessors), FOLDED_FORMS[-2]
    # The largest tiles are faster only if groups are expected to have more than 128 rows.
    if form is FOLDED_FORMS[-1] and x.expects(medium.tokens):
        form, why = medium, f"tiles of {medium.tokens} rows (up to {x.row_limit(medium.tokens)} an expert)"
    promotion = 128 if form.is_streamed else 256
    launch(
        form.variant(x.out.dtype, x.epilogue),
        resident_blocks(x, form, form.weights),
        why=f"{x.why}; {why}",
        **x.fields(_BAND_TILES),
        b_map=_prepared_map(x, form, promotion),
        a_map=x.a_map(form.box, promotion),
    )


def prepare_variant(restores: bool = False) -> Variant:
    return (_restore if restores else _prepare).variant()


def convert(b: Array, b_scale: Array, prepared: Array, k: int, restores: bool = False) -> None:
    eights = prepared.shape[0] * prepared.shape[1]
    launch(
        prepare_variant(restores),
        eights,
        _prepare.constant("FOLDED_THREADS"),
        why="MXFP4 for FP8 rows: a block for each 8 rows of weights",
        b=b,
        b_scale=b_scale,
        prepared=prepared,
        k=k,
    )
