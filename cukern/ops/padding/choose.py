"""The kernels of `padding`, and the division of rows among blocks."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import forget_plans
from cukern.runtime.plan import asked, launch
from cukern.runtime.vectors import divisor, why_width

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "specialized", "dynamic")
WIDTHS = (16, 8, 4, 2)  # bytes of a vector: the widest that the alignment allows


class Config(NamedTuple):
    hidden: int
    head_dim: int


#: Specialized sizes, and their models.
SPECIALIZED = {
    Config(768, 64): "BERT-base, RoBERTa-base, ViT-B",
    Config(1024, 64): "BERT-large, XLM-RoBERTa-large, BGE-M3",
    Config(4096, 128): "Llama-3-8B and the embedding models made of Mistral-7B",
}

_build = Kernel("padding/build_padding_offset", "build_padding_offset")
_remove = Kernel("padding/remove_padding", "remove_padding")
_rebuild = Kernel("padding/rebuild_padding", "rebuild_padding")
_add_bias = Kernel("padding/add_bias_rebuild_padding", "add_bias_rebuild_padding")

# For each kernel: threads per block, and vectors per thread. These numbers are the fastest on an H200.
THREADS_ITEMS = {"remove": (256, 2), "transpose_remove": (256, 2), "rebuild": (256, 2), "add_bias": (128, 4)}
_MAX_COLUMNS = 1024  # 16-byte vectors of a specialized row
_FEW_SEQUENCES = 1024  # sequences in one tile of a block of 256 threads
_MAX_BUILD_BLOCKS = 256


def _shape(kernel: str, columns: int) -> tuple[int, int]:
    """Return the threads with which a block copies a whole row of `columns` vectors, and the vectors per thread."""
    threads, items = THREADS_ITEMS[kernel]
    while threads * items < columns:
        threads *= 2
    return threads, items


def variant_of(kernel: str, dtype: str, width: int, columns: int = 0, head_columns: int = 0) -> Variant:
    shape = _shape(kernel, columns)
    if kernel == "add_bias":
        return _add_bias.variant(arrays.CUDA_TYPE[dtype], width, columns, head_columns, *shape)
    if kernel == "rebuild":
        return _rebuild.variant(width, columns, *shape)
    if kernel == "remove":
        return _remove.variant(width, columns, False, 0, *shape)
    return _remove.variant(width, columns, True, head_columns, *shape)


def _variants(config: Config, dtype: str) -> list[Instance]:
    per_unit = WIDTHS[0] // arrays.ITEM_SIZE[dtype]
    columns, head_columns = config.hidden // per_unit, config.head_dim // per_unit
    return [variant_of(kernel, dtype, WIDTHS[0], columns, head_columns).instance for kernel in THREADS_ITEMS]


#: The pairs (sizes, bytes of an element) for which this process has specialized instances.
registered: set[tuple[Config, int]] = set()


def _list_instances() -> None:
    by_function: dict[str, dict[Instance, None]] = {}
    for dtype in DTYPES:
        dynamic = [variant_of(kernel, dtype, WIDTHS[0]).instance for kernel in THREADS_ITEMS]
        # Instances for other vector widths, and specialized float32 instances, are compiled at first use.
        specialized = [i for config in SPECIALIZED for i in _variants(config, dtype)]
        registered.update((config, arrays.ITEM_SIZE[dtype]) for config in SPECIALIZED)
        for instance in dynamic + (specialized if dtype != "float32" else []):
            by_function.setdefault(instance.function, {})[instance] = None
        for kernel in (_remove, _rebuild, _add_bias):
            missing = [i for i in specialized if i.function == kernel.function and i not in kernel.specialized]
            kernel.specialized = kernel.specialized + missing
    for kernel in (_remove, _rebuild, _add_bias):
        kernel.at_import = list(by_function[kernel.function])
    _build.at_import = [_build.variant(threads).instance for threads in (256, 1024)]


_list_instances()


def specialize(*, hidden: int, head_dim: int = 64, dtype: str = "float16") -> list[Instance]:
    """Register instances for these sizes, and return them; see `cukern.specialize`.

    Raises ValueError unless hidden is a multiple of head_dim, a head is a multiple of 16 bytes, and a row has at most
    1024 * 16 bytes.
    """
    check.one_of("dtype", dtype, DTYPES)
    check.integer("hidden", hidden, 1)
    check.integer("head_dim", head_dim, 1, hidden)
    item_size = arrays.ITEM_SIZE[dtype]
    if not _lays_out(hidden, head_dim, item_size):
        most = _MAX_COLUMNS * WIDTHS[0] // item_size
        wanted = f"a multiple of head_dim up to {most}, and head_dim one of {WIDTHS[0] // item_size}"
        check.fail("hidden", wanted, f"{hidden} with head_dim {head_dim}")
    config = Config(hidden, head_dim)
    registered.add((config, item_size))
    forget_plans()
    return _variants(config, dtype)


def _lays_out(hidden: int, head_dim: int, item_size: int) -> bool:
    """Return whether the specialized kernels can process rows of these sizes."""
    fits = hidden * item_size <= _MAX_COLUMNS * WIDTHS[0]
    return fits and hidden % head_dim == 0 and head_dim * item_size % WIDTHS[0] == 0


# --- layouts ------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    variant: Variant
    threads: int
    tile_rows: int
    chunks: int  # tiles per row
    geometry: dict[str, Any]  # fields of the template's Geometry, except `rows`
    head_columns: int
    why: str

    def heads(self, heads: Any, max_seq_len: Any) -> dict[str, Any]:
        """Return the fields of the kernel's struct `Heads`."""
        by_sizes = {"by_max_seq_len": divisor(max_seq_len), "by_head_columns": divisor(max(self.head_columns, 1))}
        return {"heads": heads, "max_seq_len": max_seq_len, "head_columns": self.head_columns} | by_sizes


def layout_of(kernel: str, dtype: str, hidden: int, head_dim: int, width: int, variant: str) -> Layout:
    """Choose the instance and the tiles of rows. `head_dim` is 0 if rows are not divided into heads."""
    check.one_of("variant", variant, VARIANTS)
    item_size = arrays.ITEM_SIZE[dtype]
    columns, head_columns = hidden * item_size // width, head_dim * item_size // width
    known = width == WIDTHS[0] and any(
        size == item_size and config.hidden == hidden and head_dim in (0, config.head_dim)
        for config, size in registered
    )
    if variant == "specialized" and not known:
        by_head = f" in heads of {head_dim}" if head_dim else ""
        why = f"there is none for hidden {hidden}{by_head} in {dtype}, or the rows are not 16-byte aligned"
        check.fail("variant", "'auto' or 'dynamic' here", f"'specialized': {why} (cukern.specialize adds one)")
    fixed = known and variant != "dynamic"
    chosen = variant_of(kernel, dtype, width, columns, head_columns) if fixed else variant_of(kernel, dtype, width)
    threads, items = _shape(kernel, columns if fixed else 0)
    chunks = -(-columns // (threads * items))
    tile_columns = -(-columns // chunks)
    tile_rows = threads * items // tile_columns
    geometry: dict[str, Any] = {"columns": columns, "tile_rows": tile_rows, "tile_columns": tile_columns}
    geometry["by_tile_columns"] = divisor(tile_columns)
    why = _reason(dtype, hidden, head_dim, width, variant, fixed)
    return Layout(chosen, threads, tile_rows, chunks, geometry, head_columns, why)


def _reason(dtype: str, hidden: int, head_dim: int, width: int, variant: str, fixed: bool) -> str:
    sizes = f"hidden {hidden}{f' in heads of {head_dim}' if head_dim else ''}"
    if fixed:
        models = [
            x for config, x in SPECIALIZED.items() if config.hidden == hidden and head_dim in (0, config.head_dim)
        ]
        return f"{asked(variant, '; ')}specialized for {sizes} ({', '.join(models) or 'by cukern.specialize'})"
    if variant != "auto":
        return asked(variant)
    if width < WIDTHS[0]:
        return f"dynamic, {why_width(width, 'rows')}"
    head = head_dim or (64 if hidden % 64 == 0 else hidden)
    if not _lays_out(hidden, head, arrays.ITEM_SIZE[dtype]):
        return f"dynamic: no specialized kernel takes {sizes}, of more than {_MAX_COLUMNS} vectors of {WIDTHS[0]} bytes"
    op = '"remove_sequence_length_padding"'
    call = f"cukern.specialize({op}, hidden={hidden}, head_dim={head}, dtype={dtype!r})"
    return f"dynamic: no specialized instance has {sizes}; {call} compiles one"


def fill_bits(fill: Any, dtype: str) -> int:
    """Return the bits of `fill` in this dtype. A 16-bit value is repeated in 32 bits."""
    try:
        fill = float(fill)
    except (TypeError, ValueError):
        check.fail("fill", "a number", f"{fill!r} ({type(fill).__name__})", TypeError)
    return _element_bits(fill, math.copysign(1, fill), dtype)


@functools.lru_cache(maxsize=256)
def _element_bits(fill: float, sign: float, dtype: str) -> int:
    """Return the bits of `fill`. `sign` makes 0.0 and -0.0 different keys of `lru_cache`."""
    with np.errstate(over="ignore"):
        element = np.full(4 // arrays.ITEM_SIZE[dtype], fill, arrays.numpy_dtype(dtype))
    return int(element.view(np.uint32)[0])


# --- the launch of build_padding_offset -----------------------------------------------------------------


def launch_build(
    sequence_length: Array, max_seq_len: Any, padding_offset: Array | None, cu_seqlens: Array, words: Any, why: str = ""
) -> None:
    batch = sequence_length.shape[0]
    threads = 256 if batch <= _FEW_SEQUENCES else 1024
    words_per_block = threads * max(1, -(-words // (threads * _MAX_BUILD_BLOCKS)))
    in_tile = min(batch, threads * _build.constant("LENGTHS"))
    launch(
        _build.variant(threads),
        max(1, -(-words // words_per_block)),
        threads,
        why=f"{why}{batch} sequences: blocks of {threads} threads (of 256 up to {_FEW_SEQUENCES} sequences)",
        lengths=sequence_length,
        padding_offset=padding_offset,
        cu_seqlens=cu_seqlens,
        tokens=words,
        batch=batch,
        max_seq_len=max_seq_len,
        tokens_per_block=words_per_block,
        # The largest power of two below the number of sequences in a tile.
        first_step=1 << (in_tile - 1).bit_length() - 1 if in_tile > 1 else 0,
    )
