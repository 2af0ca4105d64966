"""The state of the sequences: its creation, its update, and the end of sequences."""

from __future__ import annotations

from typing import Any

from cukern.reference import decoding as twin
from cukern.runtime import check
from cukern.runtime.arrays import AnyArray, Size, WrittenArray
from cukern.runtime.describe import (
    Array,
    Result,
    expect,
    expect_array,
    expect_contiguous,
    expect_place,
    expect_row_stride,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import launch, outputs, run_twin
from cukern.runtime.vectors import ceil_div

MAX_VOCAB = 2**20
MAX_BATCH = 2**24
#: The kernel counts tokens in 30 bits.
MAX_LENGTH = 2**30 - 1
_THREADS = 256
_WARPS_PER_BLOCK = 4
_ITEMS = 8

_decoding_init = Kernel("decoding/decoding_init", "decoding_init")
_stop_words_criterion = Kernel("decoding/stop_words_criterion", "stop_words_criterion")
_update_finished = Kernel("decoding/update_finished", "update_finished")


def _init_variant(sorted_: bool) -> Variant:
    return _decoding_init.variant(_THREADS, _ITEMS, sorted_)


_decoding_init.specialized = [_init_variant(flag).instance for flag in (False, True)]
_stop_words_criterion.specialized = [_stop_words_criterion.variant(_WARPS_PER_BLOCK).instance]
_update_finished.specialized = [_update_finished.variant(_THREADS).instance]


def check_batch(name: str, batch: Any) -> Any:
    if batch > MAX_BATCH:
        check.fail(f"the batch of {name}", f"at most {MAX_BATCH}", batch)
    return batch


def _check_ids(name: str, ids: Any) -> Any:
    expect_contiguous(name, expect_array(name, ids, ("int32",), ("batch",)))
    return check_batch(name, ids.shape[0])


def check_words(name: str, words: Any, like: Array, like_name: str) -> int:
    """Check lists of words. Return the stride from one row's list to the next; 0 if all rows share one list."""
    expect_place(name, words, like, like_name)
    check.dtype(name, words.dtype, ("int32",))
    shape, batch = words.shape, like.shape[0]
    if len(shape) not in (2, 3) or shape[-2] != 2 or (len(shape) == 3 and shape[0] != batch):
        check.fail(name, f"of shape [2, size] or [batch, 2, size] with batch = {batch}", list(shape))
    if shape[-1] > MAX_LENGTH:
        check.fail(f"the size of {name}", f"at most {MAX_LENGTH}", shape[-1])
    expect_contiguous(name, words)
    return 2 * shape[-1] if len(shape) == 3 else 0


def check_output_ids(output_ids: Any, like: Array, like_name: str) -> tuple[int, int]:
    expect_place("output_ids", output_ids, like, like_name)
    check.dtype("output_ids", output_ids.dtype, ("int32",))
    shape, batch = output_ids.shape, like.shape[0]
    if len(shape) != 2 or shape[0] != batch:
        check.fail("output_ids", f"of shape [batch, max_length] with batch = {batch}", list(shape))
    if shape[1] > MAX_LENGTH:
        check.fail("max_length of output_ids", f"at most {MAX_LENGTH}", shape[1])
    return shape[1], expect_row_stride("output_ids", output_ids)


_STATE = (("word_ids", "int32"), ("sequence_length", "int32"), ("finished", "bool"), ("cum_log_probs", "float32"))


def _state(start_ids: Any) -> list[Result]:
    return [Result((start_ids.shape[0],), dtype, "[batch]") for _, dtype in _STATE]


def _sort_state(start_ids: Any, vocab: int) -> list[Result]:
    batch = start_ids.shape[0]
    offsets = Result((batch + 1,), "int32", "[batch + 1]")
    return [*_state(start_ids), offsets, Result((batch, vocab), "int32", "[batch, vocab]")]


def _init(start_ids: Array, vocab: int | None, out: Any) -> Any:
    """Check and launch `topp_init`, or `decoding_init` if `vocab` is None."""
    batch, names = start_ids.shape[0], [name for name, _ in _STATE]
    results = _state(start_ids)
    if vocab is not None:
        names, results = [*names, "offsets", "id_vals"], _sort_state(start_ids, vocab)
    wanted = f"{len(names)} arrays ({', '.join(names)})"
    if isinstance(out, (tuple, list)) and len(out) != len(names):
        check.fail("out", wanted, f"{len(out)} of them", TypeError)
    out = outputs(out, start_ids, "start_ids", *results, names=wanted)
    if start_ids.on_host:
        return run_twin()
    slices, blocks = 0, ceil_div(batch, _THREADS)
    if vocab is not None:
        slices = ceil_div(vocab, _THREADS * _ITEMS)
        blocks = max(batch, 1) * slices  # one block writes offsets[batch] of an empty batch
    elif batch == 0:
        return out
    fields = {"offsets": None, "id_vals": None} | dict(zip(names, out, strict=True))
    launch(
        _init_variant(vocab is not None), blocks, _THREADS,
        why=f"one kernel for all sizes: {f'{_ITEMS} ids' if vocab else 'one sequence'} per thread",
        start_ids=start_ids, **fields, batch=batch, vocab=vocab or 0, slices=slices,
    )  # fmt: skip
    return out


@op(twin.decoding_init, "word_ids, sequence_length, finished, cum_log_probs", _state)
def decoding_init(
    start_ids: AnyArray, *, out: tuple[AnyArray, AnyArray, AnyArray, AnyArray] | None = None
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
    """Create the state of a batch of sequences before their first step, in one launch.

    Args:
        start_ids: the token that each sequence starts from, int32 [batch].
        out: four arrays to write into and return. The first may be `start_ids`.

    Returns word_ids int32 [batch] = start_ids, sequence_length int32 [batch] = 0, finished bool [batch] = False and
    cum_log_probs float32 [batch] = 0.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides or devices that do not fit.

    FasterTransformer's `init_kernel` creates the same state.
    """
    _check_ids("start_ids", start_ids)
    return _init(start_ids, None, out)


@op(twin.topp_init, "word_ids, sequence_length, finished, cum_log_probs, offsets, id_vals", _sort_state)
def topp_init(
    start_ids: AnyArray,
    vocab: Size,
    *,
    out: tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray, AnyArray] | None = None,
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, AnyArray, AnyArray]:
    """Run `decoding_init`, and create the input of a segmented sort of [batch, vocab] probabilities, in one launch.

    cukern's sampling functions do not sort, so they need neither of the additional results, offsets and id_vals.

    Args:
        start_ids: as in `decoding_init`, int32 [batch].
        vocab: batch * vocab is less than 2**31, because the offsets are int32.
        out: six arrays to write into and return. The first may be `start_ids`.

    Returns the results of `decoding_init`, then offsets int32 [batch + 1] with offsets[b] = b * vocab and id_vals int32
    [batch, vocab] with id_vals[b, i] = i.

    Errors are as in `decoding_init`. The function is FasterTransformer's `topp_initialization_kernel`.
    """
    vocab = check.integer("vocab", vocab, 1, MAX_VOCAB)
    batch = _check_ids("start_ids", start_ids)
    if batch > (2**31 - 1) // vocab:
        check.fail("batch * vocab", "less than 2**31", batch * vocab)
    return _init(start_ids, vocab, out)


@op(twin.stop_words_criterion)
def stop_words_criterion(
    output_ids: AnyArray, sequence_length: AnyArray, stop_words: AnyArray, finished: WrittenArray
) -> AnyArray:
    """Set `finished`, in place, for the sequences that end with a stop word, as in FasterTransformer.

    Args:
        output_ids: the sequences, int32 [batch, max_length], contiguous along max_length; rows may be strided.
        sequence_length: int32 [batch]; clamped to [0, max_length].
        stop_words: int32 [2, size] for all rows or [batch, 2, size], in the layout of the `bad_words` of
            `apply_penalties`.
        finished: bool [batch], updated and returned.

    Errors are as in `decoding_init`.
    """
    expect_array("output_ids", output_ids, symbols=("batch", "max_length"))
    batch = check_batch("output_ids", output_ids.shape[0])
    max_length, row_stride = check_output_ids(output_ids, output_ids, "output_ids")
    expect("sequence_length", sequence_length, output_ids, "output_ids", ("int32",), (batch,), "[batch]")
    words_stride = check_words("stop_words", stop_words, output_ids, "output_ids")
    expect("finished", finished, output_ids, "output_ids", ("bool",), (batch,), "[batch]")
    words_size = stop_words.shape[-1]
    if output_ids.on_host:
        run_twin()
    elif words_size and batch:
        launch(
            _stop_words_criterion.variant(_WARPS_PER_BLOCK),
            ceil_div(batch, _WARPS_PER_BLOCK), _WARPS_PER_BLOCK * 32,
            why="one kernel for all sizes: one warp per sequence",
            output_ids=output_ids, sequence_length=sequence_length, stop_words=stop_words, finished=finished,
            ids_row_stride=row_stride, stop_words_stride=words_stride,
            batch=batch, max_length=max_length, stop_words_size=words_size,
        )  # fmt: skip
    return finished


@op(twin.update_finished)
def update_finished(
    word_ids: AnyArray, finished: WrittenArray, sequence_length: WrittenArray, end_id: int
) -> tuple[AnyArray, AnyArray]:
    """End a step, in place: count the new token of each running sequence, and mark the sequences that this token ends.

    Args:
        word_ids: the new tokens, int32 [batch].
        finished: bool [batch], updated and returned.
        sequence_length: int32 [batch], updated and returned.
        end_id: the token that ends a sequence; -1 for none.

    Errors are as in `decoding_init`. A finished sequence stays finished. In FasterTransformer's sampling kernels, a
    finished sequence continues if its new token is not `end_id`.
    """
    batch = _check_ids("word_ids", word_ids)
    expect("finished", finished, word_ids, "word_ids", ("bool",), (batch,), "[batch]")
    expect("sequence_length", sequence_length, word_ids, "word_ids", ("int32",), (batch,), "[batch]")
    end_id = check.integer("end_id", end_id, -1, 2**31 - 1)
    if word_ids.on_host:
        run_twin()
    elif batch:
        launch(
            _update_finished.variant(_THREADS), ceil_div(batch, _THREADS), _THREADS,
            why="one kernel for all sizes: one thread per sequence",
            word_ids=word_ids, finished=finished, sequence_length=sequence_length, batch=batch, end_id=end_id,
        )  # fmt: skip
    return finished, sequence_length
