"""Padding: the twin against masks and loops, the kernels against the twin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cukern
import cukern.runtime.compile as compiler
from benchmarks import bench_padding, harness
from cukern.ops import padding as op
from cukern.ops.padding import choose as kernels
from cukern.reference import padding as twin
from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from tests.buffers import Buffer, normal, on_gpu, place, same_bits
from tests.pretended import PretendedGPU, pretended  # noqa: F401

Array = NDArray[Any]
NAN, INF = np.nan, np.inf
DTYPES = ("float32", "float16", "bfloat16")


# --- inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A batch of sequences; `heads` divides `hidden`."""

    lengths: tuple[int, ...]
    seq: int
    hidden: int
    heads: int = 1
    skip: int = 0  # elements between a 256-byte boundary and each array
    apart: int = 0  # elements between rows that may be strided

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def words(self) -> int:
        return sum(self.lengths)

    @property
    def mask(self) -> Array:
        """[batch, seq]: which rows hold words."""
        return np.arange(self.seq) < np.array(self.lengths, int).reshape(-1, 1)


def draw_lengths(rng: np.random.Generator, batch: int, seq: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, seq + 1, batch).tolist())


def offsets(case: Case) -> Array:
    return twin.build_sequence_length_padding_offset(np.array(case.lengths, np.int32), case.seq)[0]


def same_values(got: Any, want: Array) -> None:
    """As `same_bits`, but any NaN equals any other: the bits of a NaN that a sum gives are not defined."""
    got = arrays.library_of(got).to_numpy(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64))


# --- worked examples ----------------------------------------------------------------------------------

# Three sequences of 2, 0 and 3 words in rows of 4: words 0 and 1 stay, the others move 6 rows down.
EXAMPLE = Case((2, 0, 3), 4, 2)
OFFSETS = [0, 0, 6, 6, 6]


def test_offsets_by_hand(put: Callable[[Any], Any]) -> None:
    lengths = put(np.array(EXAMPLE.lengths, np.int32))
    for words in (None, 5):
        got = cukern.build_sequence_length_padding_offset(lengths, 4, valid_word_num=words)
        assert got[2] == 5 and type(got[2]) is int
        same_bits(got[0], np.array(OFFSETS, np.int32))
        same_bits(got[1], np.array([0, 2, 2, 5], np.int32))


def test_the_rows_by_hand(put: Callable[[Any], Any]) -> None:
    padding_offset = put(np.array(OFFSETS, np.int32))
    padded = np.full((3, 4, 2), NAN, np.float32)
    words = np.arange(10, dtype=np.float32).reshape(5, 2)
    padded[0, :2], padded[2, :3] = words[:2], words[2:]
    same_bits(cukern.remove_sequence_length_padding(put(padded), padding_offset), words)
    same_bits(cukern.rebuild_sequence_length_padding(put(words), padding_offset, 3, 4, fill=NAN), padded)

    by_head = np.ascontiguousarray(padded.reshape(3, 4, 2, 1).transpose(0, 2, 1, 3))
    same_bits(cukern.transpose_remove_padding(put(by_head), padding_offset), words)
    biases = [np.array([100, 200], np.float32), np.array([-1, 0], np.float32), np.zeros(2, np.float32)]
    results = cukern.add_qkv_bias_rebuild_padding(*[put(words)] * 3, *map(put, biases), padding_offset, 3, 4, 2)
    for result, bias in zip(results, biases, strict=True):
        want = np.zeros((3, 2, 4, 1), np.float32)
        want[0, :, :2, 0] = (words[:2] + bias).T
        want[2, :, :3, 0] = (words[2:] + bias).T
        same_bits(result, want)


def test_halves_are_added_in_float32_and_rounded_once(put: Callable[[Any], Any]) -> None:
    # 2048 + 1.5 is 2049.5 in float32 and 2050 in float16; 1 + 2**-9 is a float32 but no bfloat16.
    for dtype, x, bias, want in (("float16", 2048, 1.5, 2050), ("bfloat16", 1, 2**-9, 1), ("bfloat16", 1, 1.5, 2.5)):
        one, other = (
            put(np.full(shape, value, arrays.numpy_dtype(dtype))) for shape, value in (((1, 1), x), (1, bias))
        )
        nothing = put(np.zeros(1, np.int32))
        results = cukern.add_qkv_bias_rebuild_padding(one, one, one, other, other, other, nothing, 1, 1, 1)
        for result in results:
            same_bits(result, np.full((1, 1, 1, 1), want, arrays.numpy_dtype(dtype)))


def test_words_past_the_last_lead_nowhere(put: Callable[[Any], Any]) -> None:
    # On a GPU the number of words may be an upper bound. On the host that is refused, so the twin makes the offsets.
    lengths = np.array(EXAMPLE.lengths, np.int32)
    want = twin.build_sequence_length_padding_offset(lengths, 4, valid_word_num=7)
    assert want[0].tolist() == [*OFFSETS, 7, 7] and want[2] == 7
    if put is on_gpu:
        got = cukern.build_sequence_length_padding_offset(put(lengths), 4, valid_word_num=7)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
        assert got[2] == 7
        few = cukern.build_sequence_length_padding_offset(put(lengths), 4, valid_word_num=3)
        same_bits(few[0], want[0][:3])
        same_bits(few[1], want[1])
    padding_offset = put(want[0])
    padded = np.ones((3, 4, 2), np.float32)
    same_bits(cukern.remove_sequence_length_padding(put(padded), padding_offset)[5:], np.zeros((2, 2), np.float32))
    words = np.arange(14, dtype=np.float32).reshape(7, 2)
    same_bits(
        cukern.rebuild_sequence_length_padding(put(words), padding_offset, 3, 4),
        twin.rebuild_sequence_length_padding(words[:5], want[0][:5], 3, 4),
    )


@pytest.mark.parametrize("fill", [0.0, -0.0, 1.5, -INF, NAN, 1e6, 1e-30, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fill(dtype: str, fill: float, put: Callable[[Any], Any], rng: np.random.Generator) -> None:
    case = Case((1, 3, 0), 3, 5)
    src = normal(rng, (4, 5), dtype)
    got = cukern.rebuild_sequence_length_padding(put(src), put(offsets(case)), 3, 3, fill=fill)
    want = torch.full((3, 3, 5), fill).to(getattr(torch, dtype))
    want[torch.from_numpy(case.mask)] = torch.from_numpy(src.astype(np.float32)).to(want.dtype)
    want = arrays._Torch().to_numpy(want)
    same_values(got, want)


def test_empty_batches(put: Callable[[Any], Any]) -> None:
    none = put(np.zeros(0, np.int32))
    for words in (None, 0):
        built = cukern.build_sequence_length_padding_offset(none, 7, valid_word_num=words)
        same_bits(built[0], np.zeros(0, np.int32))
        same_bits(built[1], np.zeros(1, np.int32))
        assert built[2] == 0
    for batch, seq, hidden in ((0, 4, 6), (3, 0, 6), (3, 4, 0), (3, 4, 6)):
        x, bias = put(np.ones((0, hidden), np.float32)), put(np.ones(hidden, np.float32))
        padded = put(np.ones((batch, seq, hidden), np.float32))
        assert cukern.remove_sequence_length_padding(padded, none).shape == (0, hidden)
        by_head = put(np.ones((batch, 2, seq, hidden // 2), np.float32))
        assert cukern.transpose_remove_padding(by_head, none).shape == (0, hidden)
        want = np.full((batch, seq, hidden), 3, np.float32)
        same_bits(cukern.rebuild_sequence_length_padding(x, none, batch, seq, fill=3), want)
        want = np.zeros((batch, 2, seq, hidden // 2), np.float32)
        for result in cukern.add_qkv_bias_rebuild_padding(x, x, x, bias, bias, bias, none, batch, seq, 2):
            same_bits(result, want)


# --- the twin against boolean masks, torch.nn.utils.rnn and loops ------------------------------------------


def _mask_of(lengths: list[int], seq: int) -> torch.Tensor:
    return torch.arange(seq) < torch.tensor(lengths).reshape(-1, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(0, 3))
def test_the_offsets_are_those_of_a_mask(lengths: list[int], more: int) -> None:
    seq = max(lengths) + more
    padding_offset, cu_seqlens, words = cukern.build_sequence_length_padding_offset(np.array(lengths, np.int32), seq)
    rows = _mask_of(lengths, seq).flatten().nonzero().flatten()
    assert words == len(rows)
    assert (padding_offset + np.arange(words)).tolist() == rows.tolist()
    assert cu_seqlens.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert padding_offset.dtype == cu_seqlens.dtype == np.int32
    # As the loop that defined it.
    loop = [b * seq - sum(lengths[:b]) for b, length in enumerate(lengths) for _ in range(length)]
    assert padding_offset.tolist() == loop


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_the_rows_are_those_of_a_mask(lengths: list[int], heads: int, dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seq, batch, hidden = max(lengths) + int(rng.integers(3)), len(lengths), heads * dim
    mask = _mask_of(lengths, seq)
    padding_offset = torch.from_numpy(offsets(Case(tuple(lengths), seq, hidden)))
    padded = torch.from_numpy(normal(rng, (batch, seq, hidden), "float32"))
    padded[~mask] = NAN
    words = cukern.remove_sequence_length_padding(padded, padding_offset)
    assert torch.equal(words, padded[mask])
    by_head = padded.view(batch, seq, heads, dim).transpose(1, 2).contiguous()
    assert torch.equal(cukern.transpose_remove_padding(by_head, padding_offset), padded[mask])
    want = torch.full_like(padded, 2.5)
    want[mask] = words
    assert torch.equal(cukern.rebuild_sequence_length_padding(words, padding_offset, batch, seq, fill=2.5), want)

    biases = [torch.from_numpy(normal(rng, (hidden,), "float32")) for _ in range(3)]
    projected = [words, 2 * words, -words]
    results = cukern.add_qkv_bias_rebuild_padding(*projected, *biases, padding_offset, batch, seq, heads)
    for result, x, bias in zip(results, projected, biases, strict=True):
        want = torch.zeros(batch, seq, hidden)
        want[mask] = x + bias
        assert torch.equal(result, want.view(batch, seq, heads, dim).transpose(1, 2))


def test_rebuilding_is_what_pad_sequence_does(rng: np.random.Generator) -> None:
    lengths = [3, 1, 7, 2]
    sequences = [torch.from_numpy(normal(rng, (n, 5), "float32")) for n in lengths]
    want = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=-1.0)
    padding_offset, *_ = cukern.build_sequence_length_padding_offset(torch.tensor(lengths, dtype=torch.int32), 7)
    got = cukern.rebuild_sequence_length_padding(torch.cat(sequences), padding_offset, 4, 7, fill=-1)
    assert torch.equal(got, want)
    assert torch.equal(
        cukern.remove_sequence_length_padding(want, padding_offset),
        torch.cat(torch.nn.utils.rnn.unpad_sequence(want, torch.tensor(lengths), batch_first=True)),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bias_is_added_as_torch_adds(dtype: str, rng: np.random.Generator) -> None:
    case = Case(draw_lengths(rng, 4, 6), 6, 24, 3)
    kind = getattr(torch, dtype)
    x, bias = (torch.from_numpy(normal(rng, s, "float32")).to(kind) for s in ((case.words, 24), (24,)))
    padding_offset = torch.from_numpy(offsets(case))
    results = cukern.add_qkv_bias_rebuild_padding(x, x, x, bias, bias, bias, padding_offset, 4, 6, 3)
    want = torch.zeros(4, 6, 24, dtype=kind)
    want[torch.from_numpy(case.mask)] = (x.float() + bias.float()).to(kind)
    for result in results:
        assert torch.equal(result, want.view(4, 6, 3, 8).transpose(1, 2))


# --- bad arguments --------------------------------------------------------------------------------------


def good_arguments(name: str) -> dict[str, Any]:
    x, bias = np.zeros((5, 6), np.float32), np.zeros(6, np.float32)
    padding_offset = np.array(OFFSETS, np.int32)
    sizes: dict[str, Any] = {"padding_offset": padding_offset, "batch": 3, "max_seq_len": 4}
    return {
        "build_sequence_length_padding_offset": {
            "sequence_length": np.array(EXAMPLE.lengths, np.int32), "max_seq_len": 4, "valid_word_num": 5,
        },
        "remove_sequence_length_padding": {"src": np.zeros((3, 4, 6), np.float32), "padding_offset": padding_offset},
        "transpose_remove_padding": {"src": np.zeros((3, 2, 4, 3), np.float32), "padding_offset": padding_offset},
        "rebuild_sequence_length_padding": {"src": x, **sizes, "fill": 1.0},
        "add_qkv_bias_rebuild_padding": {
            "q": x, "k": x, "v": x, "bias_q": bias, "bias_k": bias, "bias_v": bias, **sizes, "heads": 2,
        },
    }[name]  # fmt: skip


BUILD, REMOVE, TRANSPOSE, REBUILD, ADD = (
    "build_sequence_length_padding_offset",
    "remove_sequence_length_padding",
    "transpose_remove_padding",
    "rebuild_sequence_length_padding",
    "add_qkv_bias_rebuild_padding",
)


ANYTHING = "an array (NumPy, CuPy, torch, or any with __dlpack__), got list"
AT_ONE_DISTANCE = "contiguous along its last dimension, with all rows at one distance, got strides"
SHORT = "must be of shape [words, hidden] = [5, 6], got [4, 6]"


def integers(*values: int) -> Array:
    return np.array(values, np.int32)


def floats(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


# Calls with a bad argument: (function, changed arguments, error, message).


def _bad_lengths() -> Iterator[Any]:
    yield BUILD, {"sequence_length": [1, 2]}, TypeError, f"sequence_length must be {ANYTHING}"
    yield BUILD, {"sequence_length": np.zeros(3, np.int64)}, TypeError, "sequence_length must be int32, got int64"
    yield BUILD, {"sequence_length": integers(1, 2)[:, None]}, ValueError, "sequence_length must be of shape [batch]"
    yield BUILD, {"sequence_length": np.zeros(6, np.int32)[::2]}, ValueError, "sequence_length must be contiguous, got"
    yield BUILD, {"sequence_length": integers(2, 5, -1)}, ValueError, "sequence_length[1] must be in [0, 4] (max_seq_l"
    yield BUILD, {"sequence_length": integers(2, -1, 2)}, ValueError, "sequence_length[1] must be in [0, 4] (max_seq_l"
    yield BUILD, {"max_seq_len": 4.0}, TypeError, "max_seq_len must be an integer in [0, 2147479552], got 4.0 (float)"
    yield BUILD, {"max_seq_len": -1}, ValueError, "max_seq_len must be an integer in [0, 2147479552], got -1"
    yield BUILD, {"max_seq_len": 2**30}, ValueError, "batch * max_seq_len must be at most 2147479552, got 3221225472"
    yield BUILD, {"valid_word_num": 4}, ValueError, "valid_word_num must be 5, the sum of sequence_length, got 4"
    why = "(batch * max_seq_len)"
    yield BUILD, {"valid_word_num": 13}, ValueError, f"valid_word_num must be an integer in [0, 12] {why}, got 13"
    yield BUILD, {"valid_word_num": 5.0}, TypeError, f"valid_word_num must be an integer in [0, 12] {why}, got 5.0 (f"


def _bad_rows_or_offsets() -> Iterator[Any]:
    dtypes = "float32 or float16 or bfloat16, got float64"
    for name in (REMOVE, TRANSPOSE, REBUILD, ADD):
        src = "q" if name == ADD else "src"
        shape = good_arguments(name)[src].shape
        yield name, {src: [1.0]}, TypeError, f"{src} must be {ANYTHING}"
        yield name, {src: np.zeros(shape)}, TypeError, f"{src} must be {dtypes}"
        yield name, {src: floats(6)}, ValueError, f"{src} must be of shape [{'batch' if len(shape) > 2 else 'w'}"
        yield name, {"padding_offset": integers(*OFFSETS).astype(np.int64)}, TypeError, "padding_offset must be int32"
        yield name, {"padding_offset": integers(*OFFSETS)[:, None]}, ValueError, "padding_offset must be of shape [wor"
        yield name, {"padding_offset": np.zeros(10, np.int32)[::2]}, ValueError, "padding_offset must be contiguous"
        many = "padding_offset must be of at most the 12 rows of the padded batch, got 13"
        yield name, {"padding_offset": np.zeros(13, np.int32)}, ValueError, many
        yield (
            name,
            {"padding_offset": torch.tensor(OFFSETS)},
            TypeError,
            f"padding_offset must be a NumPy array like {src}",
        )
        yield name, {"padding_offset": OFFSETS}, TypeError, f"padding_offset must be a NumPy array like {src}"
        host = "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got 'dynamic'"
        yield name, {"variant": "dynamic"}, ValueError, host
        yield name, {"variant": "fast"}, ValueError, "variant must be one of 'auto', 'specialized', 'dynamic', got 'f"


def _bad_removals() -> Iterator[Any]:
    yield REMOVE, {"src": floats(3, 6, 4).swapaxes(1, 2)}, ValueError, f"src must be {AT_ONE_DISTANCE} (24, 1, 4)"
    yield REMOVE, {"src": floats(4, 3, 6).swapaxes(0, 1)}, ValueError, f"src must be {AT_ONE_DISTANCE} (6, 18, 1)"
    yield REMOVE, {"out": floats(5, 7)}, ValueError, "out must be of shape [words, hidden] = [5, 6], got [5, 7]"
    yield REMOVE, {"out": np.zeros((5, 6))}, TypeError, "out must be float32, got float64"
    yield REMOVE, {"out": floats(6, 5).T}, ValueError, "out must be contiguous, got strides (1, 5)"
    yield TRANSPOSE, {"src": floats(3, 4, 2, 3).swapaxes(1, 2)}, ValueError, "src must be contiguous, got str"
    yield TRANSPOSE, {"out": floats(5, 7)}, ValueError, "out must be of shape [words, heads * dim] = [5, 6]"


def _bad_padded_sizes() -> Iterator[Any]:
    for name in (REBUILD, ADD):
        for size in ("batch", "max_seq_len"):
            wanted = f"{size} must be an integer in [0, 2147479552], got"
            yield name, {size: 3.0}, TypeError, f"{wanted} 3.0 (float)"
            yield name, {size: True}, TypeError, f"{wanted} True (bool)"
            yield name, {size: -1}, ValueError, f"{wanted} -1"
        yield name, {"batch": 2**30}, ValueError, "batch * max_seq_len must be at most 2147479552, got 4294967296"
        yield name, {"batch": 1}, ValueError, "padding_offset must be of at most the 4 rows of the padded batch, got 5"


def _bad_rebuilds() -> Iterator[Any]:
    yield REBUILD, {"src": floats(4, 6)}, ValueError, f"src {SHORT}"
    yield REBUILD, {"src": floats(6, 5).T[:, :5]}, ValueError, f"src must be {AT_ONE_DISTANCE} (1, 5)"
    yield REBUILD, {"fill": "0"[:0]}, TypeError, "fill must be a number, got '' (str)"
    yield REBUILD, {"fill": None}, TypeError, "fill must be a number, got None (NoneType)"
    yield REBUILD, {"fill": np.zeros(1)}, TypeError, "fill must be a number, got ndarray"
    wanted = "out must be of shape [batch, max_seq_len, hidden] = [3, 4, 6], got [12, 6]"
    yield REBUILD, {"out": floats(12, 6)}, ValueError, wanted


def _bad_sums() -> Iterator[Any]:
    for name in ("q", "k", "v"):
        yield ADD, {name: floats(4, 6)}, ValueError, f"{name} {SHORT}"
        yield ADD, {name: floats(6, 5).T}, ValueError, f"{name} must be {AT_ONE_DISTANCE} (1, 5)"
        yield ADD, {f"bias_{name}": floats(5)}, ValueError, f"bias_{name} must be of shape [hidden] = [6], got [5]"
        yield ADD, {f"bias_{name}": np.zeros(6, np.float16)}, TypeError, f"bias_{name} must be float32, got float16"
        yield ADD, {f"bias_{name}": floats(12)[::2]}, ValueError, f"bias_{name} must be contiguous, got"
        yield ADD, {f"bias_{name}": None}, TypeError, f"bias_{name} must be a NumPy array like q, got"
    for name in ("k", "v"):
        yield ADD, {name: np.zeros((5, 6), np.float16)}, TypeError, f"{name} must be float32, got float16"
        yield ADD, {name: torch.zeros(5, 6)}, TypeError, f"{name} must be a NumPy array like q, got torch.Tensor"
    yield ADD, {"heads": 4}, ValueError, "heads must be a divisor of the hidden size 6, got 4"
    yield ADD, {"heads": 0}, ValueError, "heads must be an integer of at least 1, got 0"
    yield ADD, {"heads": 2.0}, TypeError, "heads must be an integer of at least 1, got 2.0 (float)"
    out = [floats(3, 2, 4, 3) for _ in range(3)]
    yield ADD, {"out": out[:2]}, TypeError, "out must be a triple (q, k, v), got list"
    yield ADD, {"out": out[0]}, TypeError, "out must be a triple (q, k, v), got ndarray"
    message = "out[1] must be of shape [batch, heads, max_seq_len, dim] = [3, 2, 4, 3], got [3, 4, 2, 3]"
    yield ADD, {"out": [out[0], out[1].reshape(3, 4, 2, 3), out[2]]}, ValueError, message


BAD_CALLS = [
    *_bad_lengths(),
    *_bad_rows_or_offsets(),
    *_bad_removals(),
    *_bad_padded_sizes(),
    *_bad_rebuilds(),
    *_bad_sums(),
]


@pytest.mark.parametrize(("name", "changes", "error", "message"), BAD_CALLS)
def test_a_bad_argument_is_named(name: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = good_arguments(name)
    getattr(cukern, name)(**arguments)
    with pytest.raises(error, match=re.escape(message)):
        getattr(cukern, name)(**arguments | changes)


def test_numpy_integers_are_taken() -> None:
    for name in (REBUILD, ADD):
        arguments = good_arguments(name)
        integers = {key: np.int64(value) for key, value in arguments.items() if type(value) is int}
        getattr(cukern, name)(**arguments | integers)


# --- the choice of a variant ------------------------------------------------------------------------------


def test_the_models_sizes_are_specialized() -> None:
    specialized = {*kernels._remove.specialized, *kernels._rebuild.specialized, *kernels._add_bias.specialized}
    for hidden, head_dim in kernels.SPECIALIZED:
        for dtype in DTYPES:
            for name in kernels.THREADS_ITEMS:
                dim = head_dim if name in ("transpose_remove", "add_bias") else 0
                for variant in ("auto", "specialized"):
                    assert kernels.layout_of(name, dtype, hidden, dim, 16, variant).variant.instance in specialized
                for variant, width in (("dynamic", 16), ("auto", 8)):
                    assert (
                        kernels.layout_of(name, dtype, hidden, dim, width, variant).variant.instance not in specialized
                    )
                with pytest.raises(ValueError, match="variant must be 'auto' or 'dynamic' here"):
                    kernels.layout_of(name, dtype, hidden, dim, 8, "specialized")
        other_heads = kernels.layout_of("transpose_remove", "float16", hidden, head_dim // 2, 16, "auto")
        assert other_heads.variant.instance not in specialized


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_the_multiplication_divides(divisor: int, number: int) -> None:
    multiplier, shift = kernels.divisor(divisor)
    assert 0 < multiplier < 2**32
    for n in (number, number // divisor * divisor, number // divisor * divisor - 1, 2**31 - 1):
        if n >= 0:
            assert n * multiplier >> shift == n // divisor


@given(st.sampled_from(sorted(kernels.THREADS_ITEMS)), st.integers(1, op.MAX_HIDDEN))
def test_a_tile_covers_a_row(kernel: str, hidden: int) -> None:
    plan = kernels.layout_of(kernel, "float32", hidden, 0, 4, "dynamic")
    columns, tile_rows, tile_columns = (plan.geometry[x] for x in ("columns", "tile_rows", "tile_columns"))
    assert columns == hidden and plan.chunks * tile_columns >= hidden > (plan.chunks - 1) * tile_columns
    threads, items = kernels.THREADS_ITEMS[kernel]
    assert tile_rows >= 1 and tile_rows * tile_columns <= threads * items
    assert plan.chunks < 2**16


@pytest.fixture
def own_configurations() -> Iterator[None]:
    """Forgets, after a test, what it registered by `specialize`."""
    before = set(kernels.registered)
    yield
    kernels.registered.clear()
    kernels.registered.update(before)


def test_specialize_adds_variants(own_configurations: None) -> None:
    assert kernels.layout_of("rebuild", "float16", 2048, 0, 16, "auto").variant.instance.arguments[1] == 0
    made = op.specialize(hidden=2048, head_dim=128)
    assert kernels.layout_of("rebuild", "float16", 2048, 0, 16, "auto").variant.instance in made
    assert kernels.layout_of("add_bias", "float16", 2048, 128, 16, "specialized").variant.instance in made
    assert kernels.layout_of("rebuild", "float32", 2048, 0, 16, "auto").variant.instance.arguments[1] == 0
    compiler.compile_all([(i, "90a") for i in compiler.missing(made, "90a")])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"hidden": 8256},
            "hidden must be a multiple of head_dim up to 8192, and head_dim one of 8, got 8256 with head",
        ),
        ({"hidden": 100, "head_dim": 64}, "hidden must be a multiple of head_dim"),
        ({"hidden": 60, "head_dim": 20}, "hidden must be a multiple of head_dim"),
        ({"hidden": 64, "head_dim": 128}, r"head_dim must be an integer in \[1, 64\], got 128"),
        ({"hidden": 64, "dtype": "int8"}, "dtype must be one of 'float32', 'float16', 'bfloat16', got 'int8'"),
    ],
)
def test_specialize_refuses(sizes: dict[str, Any], message: str, own_configurations: None) -> None:
    with pytest.raises(ValueError, match=message):
        op.specialize(**sizes)


# --- the benchmarks -----------------------------------------------------------------------------------


def test_the_baselines_compute_the_same() -> None:
    cases = bench_padding.cases()
    assert {case.op for case in cases} == set(op.__all__)
    rows = [(case.op, str(case.case), case.variant) for case in cases]
    assert len(set(rows)) == len(rows)
    assert len([b for case in cases for b in case.baselines.values() if b.slow]) <= 2
    for case in cases:
        if case.case["batch"] == bench_padding.SMALL.batch or case.op == BUILD:
            ours = case.call(*harness.inputs(case, 0, "cpu"))
            assert case.baselines
            for baseline in case.baselines.values():
                assert case.agree is not None and case.agree(ours, baseline.load()(*harness.inputs(case, 0, "cpu")))


# --- the kernels against the twin --------------------------------------------------------------------------


def compare(case: Case, dtype: str, rng: np.random.Generator, variant: str = "auto") -> None:
    """Check that all kernels give the twin's bits. Padding, which they must not read, is NaN."""
    batch, seq, hidden, heads, words = case.batch, case.seq, case.hidden, case.heads, case.words
    lengths = np.array(case.lengths, np.int32)
    want = twin.build_sequence_length_padding_offset(lengths, seq)
    for valid_word_num in (None, words):
        got = cukern.build_sequence_length_padding_offset(cupy.asarray(lengths), seq, valid_word_num=valid_word_num)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
        assert got[2] == words
    padding_offset, on_device = want[0], cupy.asarray(want[0])

    padded = normal(rng, (batch, seq, hidden), dtype)
    padded[~case.mask] = NAN
    out = Buffer((words, hidden), dtype, case.skip)
    src = place(padded, case.skip, case.apart)
    assert cukern.remove_sequence_length_padding(src, on_device, out=out.array, variant=variant) is out.array
    same_bits(out.numpy(), padded[case.mask])

    by_head = np.ascontiguousarray(padded.reshape(batch, seq, heads, hidden // heads).swapaxes(1, 2))
    out = Buffer((words, hidden), dtype, case.skip)
    cukern.transpose_remove_padding(place(by_head, case.skip), on_device, out=out.array, variant=variant)
    same_bits(out.numpy(), padded[case.mask])

    rows = normal(rng, (words, hidden), dtype)
    out = Buffer((batch, seq, hidden), dtype, case.skip)
    src = place(rows, case.skip, case.apart)
    options = {"fill": -1.5, "variant": variant}
    cukern.rebuild_sequence_length_padding(src, on_device, batch, seq, out=out.array, **options)
    same_bits(out.numpy(), twin.rebuild_sequence_length_padding(rows, padding_offset, batch, seq, fill=-1.5))

    qkv, biases = ([normal(rng, shape, dtype) for _ in range(3)] for shape in ((words, hidden), (hidden,)))
    outs = [Buffer((batch, heads, seq, hidden // heads), dtype, case.skip) for _ in range(3)]
    fused = place(np.concatenate(qkv, axis=1), case.skip)
    parts = [fused[:, i * hidden : (i + 1) * hidden] for i in range(3)]
    if not case.apart:
        parts = [place(x, case.skip) for x in qkv]
    own = [place(bias, case.skip) for bias in biases]
    given = {"out": tuple(out.array for out in outs), "variant": variant}
    cukern.add_qkv_bias_rebuild_padding(*parts, *own, on_device, batch, seq, heads, **given)
    wants = twin.add_qkv_bias_rebuild_padding(*qkv, *biases, padding_offset, batch, seq, heads)
    for out, expected in zip(outs, wants, strict=True):
        same_bits(out.numpy(), expected)


SOME = (17, 0, 40, 3, 40, 0, 0, 1, 25)
CASES = {
    "one element": Case((1,), 1, 1),
    "one word in one row": Case((1,), 1, 64, 2),
    "no word at all": Case((0, 0, 0), 5, 24, 3),
    "no padding at all": Case((9,) * 5, 9, 24, 3),
    "a row of one element": Case(SOME, 40, 1),
    "rows of 3": Case(SOME, 40, 3, 3),
    "rows of 8 elements": Case(SOME, 40, 8, 2),
    "a row takes no whole number of warps": Case(SOME, 40, 264, 11),
    "odd rows": Case(SOME, 40, 1023, 3),
    "a head of 80": Case(SOME, 40, 800, 10),
    "long rows, in several parts": Case((3, 0, 2), 4, 10_400, 2),
    "a row of 65536": Case((2, 1), 3, 65536, 1),
    "one long gap before the last word": Case((0,) * 50 + (1,), 70, 64, 1),
    "one long gap after the first word": Case((1,) + (0,) * 50, 70, 64, 1),
    "lengths of one, gaps of one": Case((1,) * 300, 2, 16, 1),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_sizes(case: Case, dtype: str, rng: np.random.Generator) -> None:
    compare(case, dtype, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["specialized", "dynamic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", kernels.SPECIALIZED, ids=lambda config: str(config.hidden))
def test_the_models_sizes(config: kernels.Config, dtype: str, variant: str, rng: np.random.Generator) -> None:
    case = Case(draw_lengths(rng, 13, 50), 50, config.hidden, config.hidden // config.head_dim)
    compare(case, dtype, rng, variant)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("skip", "apart"), [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 8), (3, 5)])
def test_arrays_off_alignment_and_rows_apart(skip: int, apart: int, dtype: str, rng: np.random.Generator) -> None:
    compare(Case(SOME, 40, 64, 4, skip, apart), dtype, rng)


SANITIZED = {
    "narrow rows": (Case((3, 0, 5, 1), 5, 3), "float16", "auto"),
    "parts of a row": (Case((2, 0, 1), 3, 4200, 2), "float32", "auto"),
    "specialized": (Case((5, 0, 7, 2), 7, 768, 12), "bfloat16", "specialized"),
    "dynamic": (Case((5, 0, 7, 2), 7, 768, 12), "float16", "dynamic"),
    "two bytes at a time": (Case((5, 0, 7, 2), 7, 16, 2, 1, 3), "float16", "auto"),
    "many sequences": (Case((1, 0, 2) * 400, 2, 8), "float32", "auto"),
}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("case", "dtype", "variant"), SANITIZED.values(), ids=SANITIZED)
def test_each_path_stays_inside_its_arrays(case: Case, dtype: str, variant: str, rng: np.random.Generator) -> None:
    compare(case, dtype, rng, variant)


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    seq, batch = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 40))
    heads, dim = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 70))
    skip, apart = data.draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (0, 8), (2, 6)]))
    case = Case(draw_lengths(rng, batch, seq), seq, heads * dim, heads, skip, apart)
    compare(case, data.draw(st.sampled_from(DTYPES)), rng)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "seq"),
    [(1, 100_000), (255, 9), (256, 9), (257, 9), (1023, 5), (1024, 5), (1025, 5), (4096, 3), (4097, 3), (65536, 40)],
)
def test_offsets_of_many_sequences(batch: int, seq: int, rng: np.random.Generator) -> None:
    # Sizes around that of a tile of lengths, for blocks of 256 and of 1024 threads.
    lengths = rng.integers(0, seq + 1, batch).astype(np.int32)
    total = int(lengths.sum())
    for words in (None, total, max(total - 1000, 0), min(total + 1000, batch * seq)):
        want = twin.build_sequence_length_padding_offset(lengths, seq, valid_word_num=words)
        got = cukern.build_sequence_length_padding_offset(cupy.asarray(lengths), seq, valid_word_num=words)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
        assert got[2] == want[2]


@pytest.mark.gpu
@pytest.mark.sanitize
def test_lengths_on_the_device_are_clamped() -> None:
    lengths = np.array([3, -5, 100, 2**31 - 1, -(2**31), 4], np.int32)
    want = twin.build_sequence_length_padding_offset(lengths, 7)
    assert want[2] == 3 + 7 + 7 + 4
    for words in (None, want[2]):
        got = cukern.build_sequence_length_padding_offset(cupy.asarray(lengths), 7, valid_word_num=words)
        same_bits(got[0], want[0])
        same_bits(got[1], want[1])
        assert got[2] == want[2]


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("kind", ["anything", "one row", "near"])
@pytest.mark.parametrize("hidden", [6, 64])
def test_bad_offsets_do_no_harm(kind: str, hidden: int, rng: np.random.Generator) -> None:
    case = Case((9, 0, 4, 12), 12, hidden, 2)
    bad = {
        "anything": rng.integers(-(2**31), 2**31, case.words),
        "one row": 7 - np.arange(case.words),
        "near": offsets(case) + rng.integers(-30, 30, case.words),
    }[kind]
    bad = bad.astype(np.int32)
    padding_offset = cupy.asarray(bad)
    padded, rows = normal(rng, (4, 12, hidden), "float16"), normal(rng, (case.words, hidden), "float16")
    by_head = padded.reshape(4, 2, 12, hidden // 2)
    out = Buffer((case.words, hidden), "float16")
    cukern.remove_sequence_length_padding(cupy.asarray(padded), padding_offset, out=out.array)
    same_bits(out.numpy(), twin.remove_sequence_length_padding(padded, bad))
    cukern.transpose_remove_padding(cupy.asarray(by_head), padding_offset, out=out.array)
    same_bits(out.numpy(), twin.transpose_remove_padding(by_head, bad))
    # Which rows are filled is undefined, but each holds a word or the padding.
    out = Buffer((4, 12, hidden), "float16")
    cukern.rebuild_sequence_length_padding(cupy.asarray(rows), padding_offset, 4, 12, fill=7, out=out.array)
    known = {row.tobytes() for row in (*rows, np.full(hidden, 7, np.float16))}
    assert {row.tobytes() for row in out.numpy().reshape(48, hidden)} <= known
    outs = [Buffer((4, 2, 12, hidden // 2), "float16") for _ in range(3)]
    x, bias = cupy.asarray(rows), cupy.zeros(hidden, "float16")
    cukern.add_qkv_bias_rebuild_padding(
        x, x, x, bias, bias, bias, padding_offset, 4, 12, 2, out=[o.array for o in outs]
    )
    for one in outs:
        assert np.isfinite(one.numpy()).all()


@pytest.mark.gpu
def test_special_values_are_copied_bit_for_bit(rng: np.random.Generator) -> None:
    case = Case((9, 0, 4, 12), 12, 64, 2)
    padded = rng.integers(0, 2**16, (4, 12, 64), np.uint16).view(np.float16)
    words = cukern.remove_sequence_length_padding(cupy.asarray(padded), cupy.asarray(offsets(case)))
    same_bits(words, padded[case.mask])
    again = cukern.rebuild_sequence_length_padding(words, cupy.asarray(offsets(case)), 4, 12, fill=NAN)
    same_bits(again[cupy.asarray(case.mask)], padded[case.mask])
    assert cupy.isnan(again[cupy.asarray(~case.mask)]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_special_values(dtype: str, rng: np.random.Generator) -> None:
    bits = rng.integers(0, 256, (40, 64 * arrays.ITEM_SIZE[dtype]), np.uint8).view(arrays.numpy_dtype(dtype))
    case = Case((9, 0, 20, 11), 20, 64, 2)
    padding_offset, bias = offsets(case), np.ascontiguousarray(bits[7])
    given = [cupy.asarray(x) for x in (bits, bits, bits, bias, bias, bias, padding_offset)]
    want = twin.add_qkv_bias_rebuild_padding(bits, bits, bits, bias, bias, bias, padding_offset, 4, 20, 2)
    for one, other in zip(cukern.add_qkv_bias_rebuild_padding(*given, 4, 20, 2), want, strict=True):
        same_values(one, other)


@pytest.mark.gpu
@pytest.mark.large(15)
@pytest.mark.parametrize("hidden", [1024, 1025])
def test_more_than_2_31_elements(hidden: int) -> None:
    """The last sequence lies past 2^31 elements both in the padded batch and among the words."""
    # Not for the sanitizer, which would take minutes.
    batch, seq = 9, 2**18
    lengths = torch.full((batch,), seq, dtype=torch.int32, device="cuda")
    lengths[3] = seq - 5
    offset, _, words = cukern.build_sequence_length_padding_offset(lengths, seq)
    src = torch.empty(batch, seq, hidden, dtype=torch.float16, device="cuda")
    src.view(-1)[: 2**20].normal_()
    src[-2:].normal_()
    got = cukern.remove_sequence_length_padding(src, offset)
    assert got.shape == (words, hidden) and torch.equal(got[-2 * seq :], src[-2:].view(-1, hidden))
    back = cukern.rebuild_sequence_length_padding(got, offset, batch, seq)
    assert torch.equal(back[-2:], src[-2:]) and not back[3, -5:].any()
    del back, got
    by_head = cukern.transpose_remove_padding(src.view(batch, 1, seq, hidden), offset)
    assert torch.equal(by_head[-2 * seq :], src[-2:].view(-1, hidden))


def test_the_fill_of_each_call(pretended: PretendedGPU) -> None:  # noqa: F811
    src, offset = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int32)
    for fill in (0.0, 0.0, 0.0, -0.0, 1.0):
        cukern.rebuild_sequence_length_padding(src, offset, 2, 3, fill=fill)
    assert [x.fields["fill"] for x in pretended.launches] == [0, 0, 0, 1 << 31, 0x3F800000]
    with pytest.raises(TypeError, match="fill must be a number"):
        cukern.rebuild_sequence_length_padding(src, offset, 2, 3, fill="x")
