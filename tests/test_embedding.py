"""Embedding lookups: the twin against torch, the kernels against the twin."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
from cukern.ops import embedding as op
from cukern.reference import embedding as twin
from cukern.runtime import arrays, template
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.buffers import as_torch, normal, on_gpu, zeros
from tests.plans import plan_of

Array = NDArray[Any]
NAN = np.nan
ROWS = "embedding.rows"
SINE = "embedding_lookup_sine_position_encoding"


# --- the twin -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", op.INDEX_DTYPES)
@pytest.mark.parametrize("dtype", op.DTYPES)
def test_the_twin_is_torchs_embedding(dtype: str, index_dtype: str, rng: np.random.Generator) -> None:
    table, positions = normal(rng, (50, 12), dtype), normal(rng, (9, 12), dtype)
    own = getattr(torch, dtype)
    embed = torch.nn.functional.embedding
    for shape in ((7,), (3, 4), (2, 3, 5)):
        ids = rng.integers(0, 50, shape).astype(index_dtype)
        embedded = embed(torch.from_numpy(ids).long(), as_torch(table))
        assert_matches(ROWS, cukern.embedding_lookup(table, ids), embedded)
        # One position per sequence, one per word, one for all.
        at = 2 + (torch.arange(shape[-1]) if len(shape) > 1 else torch.zeros(1, dtype=torch.long))
        for position_ids in (None, rng.integers(0, 7, shape).astype(index_dtype), np.array([6], index_dtype)):
            at = at if position_ids is None else 2 + torch.from_numpy(position_ids).long()
            added = embed(at, as_torch(positions)).float()
            want = (embedded.float() + added).to(own)
            got = cukern.embedding_lookup(table, ids, positions, 2, position_ids=position_ids)
            assert_matches(ROWS, got, want)
            want = (embedded.float() * torch.tensor(12.0).sqrt() + added).to(own)
            got = getattr(cukern, SINE)(table, positions, ids, 2, position_ids=position_ids)
            assert_matches(ROWS, got, want)


def test_by_hand() -> None:
    table = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    encoding = np.array([[0, 0, 0, 0], [0.5, 0.25, 0, -1]], np.float32)
    ids = np.array([1, 0], np.int32)
    assert getattr(cukern, SINE)(table, encoding, ids, 1).tolist() == [[10.5, 12.25, 14, 15], [2.5, 4.25, 6, 7]]
    assert cukern.embedding_lookup(table, ids[None], encoding).tolist() == [[[5, 6, 7, 8], [1.5, 2.25, 3, 3]]]


def test_a_copy_is_of_the_bits(rng: np.random.Generator) -> None:
    for dtype in op.DTYPES:
        table = rng.integers(0, 256, (9, 40), np.uint8).view(arrays.numpy_dtype(dtype))
        ids = np.array([3, 3, 8], np.int64)
        np.testing.assert_array_equal(cukern.embedding_lookup(table, ids).view(np.uint8), table[ids].view(np.uint8))


def test_the_sum_is_rounded_once() -> None:
    # In bfloat16, a product rounded before the sum would give 0.150391.
    table = np.full((1, 2), 0.0625, arrays.numpy_dtype("bfloat16"))
    got = getattr(cukern, SINE)(table, table, np.array([0], np.int32), 0)
    assert got.astype(np.float32).tolist() == [[0.1513671875] * 2]


def test_the_twin_has_zero_rows_out_of_range(rng: np.random.Generator) -> None:
    table, positions = normal(rng, (5, 4), "float32"), normal(rng, (3, 4), "float32")
    ids = np.array([4, 5, -1, 0, 2**31 - 1], np.int32)
    got = twin.embedding_lookup(table, ids)
    assert got[[1, 2, 4]].tolist() == [[0] * 4] * 3
    np.testing.assert_array_equal(got[[0, 3]], table[[4, 0]])
    got = twin.embedding_lookup(table, ids, positions, 1, position_ids=np.array([0, 0, 0, 2, 0]))
    assert got[1:].tolist() == [[0] * 4] * 4
    np.testing.assert_array_equal(got[0], table[4] + positions[1])


# --- arrays in host memory, and bad arguments -----------------------------------------------------------


def test_nothing_to_look_up() -> None:
    table = np.zeros((5, 4), np.float32)
    assert cukern.embedding_lookup(table, np.zeros(0, np.int32)).shape == (0, 4)
    assert cukern.embedding_lookup(table, np.zeros((0, 3), np.int32), table).shape == (0, 3, 4)
    assert cukern.embedding_lookup(np.zeros((5, 0), np.float32), np.zeros(2, np.int32)).shape == (2, 0)


def _bad_calls() -> Iterator[Any]:
    ids = zeros(2, 3, dtype=np.int32)
    for name in op.__all__:
        positions = "position_encoding" if name == SINE else "position_table"
        for changes, error, message in (
            ({"embedding_table": [1]}, TypeError, "embedding_table must be an array (NumPy, CuPy, torch, or any with"),
            ({"embedding_table": zeros(5, 4, dtype=int)}, TypeError, "embedding_table must be float32 or float16 or"),
            ({"embedding_table": zeros(4)}, ValueError, "embedding_table must be of shape [vocab, hidden], got [4]"),
            ({"embedding_table": zeros(4, 5).T}, ValueError, "embedding_table must be contiguous, got strides (1, 5)"),
            ({"word_ids": 3}, TypeError, "word_ids must be an array [batch] or [batch, ...], got int"),
            ({"word_ids": np.array(3)}, TypeError, "word_ids must be an array [batch] or [batch, ...], got []"),
            ({"word_ids": zeros(2, 3)}, TypeError, "word_ids must be int32 or int64, got float32"),
            ({"word_ids": ids[:, ::2]}, ValueError, "word_ids must be contiguous, got strides (3, 2)"),
            ({"word_ids": torch.zeros(3).int()}, TypeError, "word_ids must be a NumPy array like embedding_table"),
            ({"word_ids": ids + 5}, ValueError, "word_ids must be in [0, 5) (vocab), got 5 to 5"),
            ({"word_ids": ids - 1}, ValueError, "word_ids must be in [0, 5) (vocab), got -1 to -1"),
            ({positions: zeros(9)}, ValueError, f"{positions} must be of shape [positions, hidden], got [9]"),
            ({positions: zeros(9, 3)}, ValueError, f"{positions} must be of shape [positions, hidden] = [9, 4], got"),
            ({positions: zeros(9, 4, dtype=np.float16)}, TypeError, f"{positions} must be float32, got float16"),
            ({positions: zeros(2, 4)}, ValueError, f"{positions} must be of at least 3 positions, got 2"),
            ({"step": 7}, ValueError, "step must be an integer in [0, 6] (positions, less those of a sequence), got 7"),
            ({"step": -1}, ValueError, "step must be an integer in [0, 6]"),
            ({"step": 1.0}, TypeError, "step must be an integer in [0, 6]"),
            ({"position_ids": ids[:1]}, ValueError, "position_ids must be of shape that of word_ids, or [1] = [2, 3]"),
            ({"position_ids": zeros(2, 3)}, TypeError, "position_ids must be int32 or int64, got float32"),
            ({"position_ids": ids + 9}, ValueError, "position_ids must be in [0, 9) (positions), got 9 to 9"),
            (
                {"position_ids": ids + 5, "step": 4},
                ValueError,
                "position_ids must be in [0, 9) (positions) after adding step = 4, got 5 to 5",
            ),
            ({"out": zeros(2, 4)}, ValueError, "out must be of shape [*word_ids.shape, hidden] = [2, 3, 4], got"),
            ({"variant": "fast"}, ValueError, "variant must be one of 'auto', 'wide', 'narrow', got 'fast'"),
            ({"variant": "wide"}, ValueError, "variant must be 'auto' for arrays in host memory"),
        ):
            yield pytest.param(name, changes, error, message, id=f"{name} {message[:45]}")
    for changes, error, message in (
        ({"position_table": None, "step": 1}, ValueError, "step must be 0 without a position_table, got 1"),
        ({"position_table": None, "position_ids": ids}, ValueError, "position_ids must be None without a position_tab"),
    ):
        yield pytest.param("embedding_lookup", changes, error, message, id=message)
    message = "position_encoding must be an array [positions, hidden], got None"
    yield pytest.param(SINE, {"position_encoding": None}, TypeError, message, id=message)


@pytest.mark.parametrize(("name", "changes", "error", "message"), list(_bad_calls()))
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    positions = "position_encoding" if name == SINE else "position_table"
    good = {"embedding_table": zeros(5, 4), positions: zeros(9, 4), "word_ids": zeros(2, 3, dtype=np.int32)}
    good |= {"step": 0, "out": np.full((2, 3, 4), NAN, np.float32)}
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**good | changes)
    assert np.isnan(good["out"]).all()
    assert getattr(cukern, name)(**good) is good["out"]
    assert not good["out"].any()


# --- the choice of a variant ----------------------------------------------------------------------------


def launched(table: Array, *args: Any, **options: Any) -> Any:
    """The launch for these arrays, as if on an H200."""
    (step,) = plan_of("embedding_lookup", table, *args, **options)[0].steps
    return step


def aligned(hidden: int, alignment: int, dtype: str) -> Array:
    """A table of one row at an address that no larger power of two than `alignment` divides, up to 16."""
    kind = arrays.numpy_dtype(dtype)
    memory = np.zeros(hidden * kind.itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 32 + alignment % 16
    return memory[start : start + hidden * kind.itemsize].view(kind).reshape(1, hidden)


@given(
    hidden=st.integers(1, 20_000),
    alignment=st.sampled_from([2, 4, 8, 16]),
    dtype=st.sampled_from(op.DTYPES),
    variant=st.sampled_from(["auto", "narrow"]),
)
def test_a_plan_covers_the_row(hidden: int, alignment: int, dtype: str, variant: str) -> None:
    item_size = arrays.ITEM_SIZE[dtype]
    alignment = max(alignment, item_size)
    table, ids = aligned(hidden, alignment, dtype), np.zeros(1000, np.int32)
    step = launched(table, ids, table, variant=variant)
    (blocks, parts, _), (threads, *_), fields, instance = step.grid, step.block, step.fields, step.variant.instance
    width = instance.arguments[1]
    assert fields["chunks"] * width == hidden * item_size and alignment % width == 0
    row_threads = 1 << fields["log2_threads_per_row"]
    assert parts * row_threads >= fields["chunks"] > (parts - 1) * row_threads
    assert blocks * (threads // row_threads * template.constants(instance.file)["ROWS_AT_ONCE"]) >= 1000
    if variant == "narrow":
        assert width == item_size


def test_the_width_of_a_load() -> None:
    ids = np.zeros(3, np.int32)
    for dtype, hidden, alignment, width in (
        ("bfloat16", 1024, 16, 16),
        ("bfloat16", 1024, 8, 8),
        ("bfloat16", 770, 16, 4),
        ("bfloat16", 771, 16, 2),
        ("float32", 771, 16, 4),
        ("float32", 770, 16, 8),
    ):
        assert launched(aligned(hidden, alignment, dtype), ids).variant.instance.arguments == (width,)
    with pytest.raises(ValueError, match="'wide': rows of 1540 bytes at addresses that are multiples of 16"):
        launched(aligned(770, 16, "bfloat16"), ids, variant="wide")


def test_a_launch_has_the_step_and_the_batch_of_its_call() -> None:
    table, positions = np.zeros((5, 64), np.float32), np.zeros((99, 64), np.float32)
    for batch in (1, 2, 700):
        ids = np.zeros((batch, 3), np.int32)
        for step in (0, 1, 96):
            (launch,) = plan_of(SINE, table, positions, ids, step)[0].steps
            fields = [launch.fields[name] for name in ("step", "rows", "period", "positions")]
            assert fields == [step, 3 * batch, 3, 99]
        with pytest.raises(ValueError, match=re.escape("step must be an integer in [0, 96]")):
            plan_of(SINE, table, positions, ids, 97)


# --- the kernels against the twin -----------------------------------------------------------------------

GUARD = 64


def launch(name: str, *arguments: Any, skip: int = 0, **options: Any) -> Array:
    """Run on the GPU, into poison between words that must stay; the tables begin `skip` elements late."""
    device = [on_gpu(x, skip if i < 2 else 0) for i, x in enumerate(arguments)]
    table, ids = arguments[0], arguments[2 if name == SINE else 1]
    shape = (*ids.shape, table.shape[1])
    size = int(np.prod(shape))
    buffer = cupy.asarray(np.full(size + 2 * GUARD + skip, NAN, table.dtype))
    out = buffer[GUARD + skip : GUARD + skip + size].reshape(shape)
    options = {key: on_gpu(value) for key, value in options.items()}
    assert getattr(cukern, name)(*device, out=out, **options) is out
    words = cupy.asnumpy(buffer)
    part = slice(GUARD + skip, GUARD + skip + size)
    assert np.isnan(np.delete(words, part)).all(), "written outside of the result"
    return words[part].reshape(shape)


def compare(table: Array, positions: Array, ids: Array, step: int, position_ids: Array | None = None) -> None:
    """Check that every variant of every function gives what the twin gives."""
    wide = table.shape[1] * table.itemsize % 16 == 0
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("embedding_lookup", (table, ids), {}),
        ("embedding_lookup", (table, ids, positions, step), {"position_ids": position_ids}),
        (SINE, (table, positions, ids, step), {"position_ids": position_ids}),
    ]
    for name, arguments, options in calls:
        want = getattr(twin, name)(*arguments, **options)
        for variant in ("auto", "narrow", *(["wide"] if wide else [])):
            assert_matches(ROWS, launch(name, *arguments, **options, variant=variant), want)
        if name == SINE:
            assert_matches(ROWS, launch(name, *arguments, **options, skip=1), want)


#: hidden, the shape of the ids, and why the case is there.
SIZES = {
    "a part of a block": (64, (5,)),
    "one block": (1024, (64,)),
    "several blocks": (4096, (3, 7)),
    "the last part is not full": (1160, (9,)),
    "one word": (512, (1,)),
    "many short rows": (8, (1000,)),
    "one element": (1, (37,)),
    "odd": (771, (6, 3)),
    "even": (770, (19,)),
    "three dimensions": (128, (2, 3, 4)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", op.INDEX_DTYPES)
@pytest.mark.parametrize("dtype", op.DTYPES)
@pytest.mark.parametrize(("hidden", "shape"), SIZES.values(), ids=SIZES)
def test_sizes(hidden: int, shape: tuple[int, ...], dtype: str, index_dtype: str, rng: np.random.Generator) -> None:
    table, positions = normal(rng, (300, hidden), dtype), normal(rng, (20, hidden), dtype)
    ids = rng.integers(0, 300, shape).astype(index_dtype)
    compare(table, positions, ids, 3)
    compare(table, positions, ids, 3, rng.integers(0, 17, shape).astype(index_dtype))
    compare(table, positions, ids, 3, np.array([16], index_dtype))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("hidden", [64, 33, 1160])
def test_out_of_range_rows_are_zeros(hidden: int, rng: np.random.Generator) -> None:
    table, positions = normal(rng, (7, hidden), "bfloat16"), normal(rng, (5, hidden), "bfloat16")
    for index_dtype in op.INDEX_DTYPES:
        limits = np.iinfo(index_dtype)
        ids = np.array([0, 6, 7, -1, limits.max, limits.min, 3, 3, 3, 3, 3], index_dtype)
        position_ids = np.array([0, 2, 0, 0, 0, 0, 3, -3, limits.max, limits.min, -2], index_dtype)
        compare(table, positions, ids, 2, position_ids)
        want = twin.embedding_lookup(table, ids, positions, 2, position_ids=position_ids)
        assert want.any(axis=1).tolist() == [True, True] + [False] * 8 + [True]


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(op.DTYPES))
    hidden, vocab, count = (data.draw(st.integers(1, high)) for high in (3000, 500, 30))
    shape = data.draw(st.sampled_from([(count,), (count, 3), (2, count)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    step = data.draw(st.integers(0, 10))
    table, positions = normal(rng, (vocab, hidden), dtype), normal(rng, (step + 31, hidden), dtype)
    compare(table, positions, rng.integers(-1, vocab + 1, shape), step)


@pytest.mark.gpu
@pytest.mark.large(10)
def test_more_than_2_31_elements() -> None:
    """A large table whose rows are told apart by their bits, and as many results."""
    # Not for the sanitizer, which would take minutes.
    rows, hidden = 2**31 // 1024 + 100, 1024
    table = torch.arange(rows, device="cuda", dtype=torch.int32).view(torch.float32)[:, None].repeat(1, hidden // 2)
    table = table.view(torch.bfloat16)  # the bits tell the row
    ids = torch.arange(rows - 1, -1, -1, device="cuda", dtype=torch.int32)
    got = cukern.embedding_lookup(table, ids)
    assert torch.equal(got.view(torch.int32), ids[:, None].expand(rows, hidden // 2))
