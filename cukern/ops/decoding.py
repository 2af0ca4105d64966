"""What a decoding step does around the choice of a token: FasterTransformer's pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

from cukern.reference import decoding as twin
from cukern.runtime import arrays, check
from cukern.runtime.kernel import Kernel, Variant

__all__ = [
    "apply_penalties",
    "decoding_init",
    "stop_words_criterion",
    "topp_init",
    "update_finished",
    "update_logits",
]

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "wide", "narrow")
MAX_VOCAB = 2**20
MAX_BATCH = 2**24
#: The mark of a token holds its count in 30 bits.
MAX_LENGTH = 2**30 - 1
_LARGEST_FLOAT = 3.4028234663852886e38
_SMALLEST_FLOAT = 2.0**-126  # the smallest normal number: it has a finite reciprocal
# The template parameters of these names.
_THREADS = 256
_WARPS_PER_BLOCK = 4
_ITEMS = 8
_PACKS = 4
_TOKENS = 8192

_decoding_init = Kernel("decoding", "decoding_init", "7P3i")
_update_logits = Kernel("decoding", "update_logits", "4P2q3i")
_apply_penalties = Kernel("decoding", "apply_penalties", "6P" + 4 * "Pfi" + "Pii" + "4q6i")
_stop_words_criterion = Kernel("decoding", "stop_words_criterion", "4P2q3i")
_update_finished = Kernel("decoding", "update_finished", "3P2i")


def _wide(dtype: str) -> int:
    """Tokens in 16 bytes."""
    return 16 // arrays.ITEM_SIZE[dtype]


def _update_variant(dtype: str, width: int) -> Variant:
    return _update_logits.variant(arrays.CUDA_TYPE[dtype], width, _THREADS, _PACKS)


def _penalty_variant(dtype: str, width: int, counted: bool, whole: bool) -> Variant:
    flags = ("true" if counted else "false", "true" if whole else "false")
    # Where single tokens are written there are no packs.
    return _apply_penalties.variant(arrays.CUDA_TYPE[dtype], width if whole else 1, _THREADS, _TOKENS, *flags)


def _init_variant(sorted_: bool) -> Variant:
    return _decoding_init.variant(_THREADS, _ITEMS, "true" if sorted_ else "false")


_update_logits.specialized = [_update_variant(d, w).instance for d in DTYPES for w in (_wide(d), 1)]
_update_logits.at_import = [_update_variant(d, _wide(d)).instance for d in ("float32", "bfloat16")]
_apply_penalties.specialized = [
    _penalty_variant(d, w, *flags).instance
    for d in DTYPES
    for flags, widths in (((True, True), (_wide(d), 1)), ((False, True), (_wide(d), 1)), ((True, False), (1,)))
    for w in widths
]
_apply_penalties.at_import = [_penalty_variant(d, _wide(d), True, True).instance for d in ("float32", "bfloat16")]
_decoding_init.specialized = [_init_variant(flag).instance for flag in (False, True)]
_stop_words_criterion.specialized = [_stop_words_criterion.variant(_WARPS_PER_BLOCK).instance]
_update_finished.specialized = [_update_finished.variant(_THREADS).instance]


class _Rows(NamedTuple):
    """What a call needs to know of the logits."""

    library: arrays.Library
    device: int | None
    dtype: str
    batch: int
    vocab: int
    row_stride: int


def _check_logits(logits: Any) -> _Rows:
    library, device, dtype = arrays.leader("logits", logits, DTYPES, ("batch", "vocab"))
    batch, vocab = logits.shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail("the vocabulary of logits", f"in [1, {MAX_VOCAB}]", vocab)
    _check_batch("logits", batch)
    return _Rows(library, device, dtype, batch, vocab, arrays.row_stride("logits", logits, library))


def _check_out(out: Any, rows: _Rows) -> int:
    """The row stride of `out`, an array like logits."""
    arrays.same_place("out", out, "logits", rows.library, rows.device)
    dtype = rows.library.dtype(out)
    if dtype != rows.dtype:
        check.dtype("out", dtype, (rows.dtype,))
    if tuple(out.shape) != (rows.batch, rows.vocab):
        check.shape("out", tuple(out.shape), (rows.batch, rows.vocab), "[batch, vocab]")
    row_stride = arrays.row_stride("out", out, rows.library)
    if rows.batch > 1 and abs(row_stride) < rows.vocab:
        check.fail("out", "of rows that do not overlap", f"strides {row_stride, 1} (in elements)")
    return row_stride


def _width(variant: str, rows: _Rows, out_row_stride: int, addresses: int) -> int:
    """Tokens per load and store; `addresses` are those of all arrays, or-ed."""
    if variant == "narrow":
        return 1
    width = _wide(rows.dtype)
    strides = rows.row_stride | out_row_stride if rows.batch > 1 else 0
    if not (addresses % 16 or (strides | rows.vocab) % width):
        return width
    if variant == "wide":
        wanted = "'auto' or 'narrow' where rows are not 16-byte aligned or not a multiple of 16 bytes long"
        check.fail("variant", wanted, "'wide'")
    return 1


def _check_variant(variant: str, device: int | None) -> None:
    if device is None:
        check.host_variant(variant, VARIANTS)
    elif variant not in VARIANTS:
        check.one_of("variant", variant, VARIANTS)


def _check_ids(name: str, ids: Any) -> tuple[arrays.Library, int | None, int]:
    """Library, device and batch of an array [batch] of int32 that leads a call."""
    library, device, _ = arrays.leader(name, ids, ("int32",), ("batch",))
    arrays.contiguous(name, ids, library)
    return library, device, _check_batch(name, ids.shape[0])


def _check_batch(name: str, batch: int) -> int:
    if batch > MAX_BATCH:
        check.fail(f"the batch of {name}", f"at most {MAX_BATCH}", batch)
    return batch


_STATE = (("word_ids", "int32"), ("sequence_length", "int32"), ("finished", "bool"), ("cum_log_probs", "float32"))


def _init(start_ids: Any, vocab: int | None, out: Any) -> tuple[Any, ...]:
    """decoding_init, and with a vocabulary topp_init."""
    library, device, batch = _check_ids("start_ids", start_ids)
    wanted: list[tuple[str, str, tuple[int, ...], str]]
    wanted = [(name, dtype, (batch,), "[batch]") for name, dtype in _STATE]
    if vocab is not None:
        wanted.append(("offsets", "int32", (batch + 1,), "[batch + 1]"))
        wanted.append(("id_vals", "int32", (batch, vocab), "[batch, vocab]"))
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != len(wanted):
            names = ", ".join(name for name, *_ in wanted)
            check.fail("out", f"{len(wanted)} arrays ({names})", _description(out), TypeError)
        for i, (array, (_, dtype, shape, symbols)) in enumerate(zip(out, wanted, strict=True)):
            arrays.expect(f"out[{i}]", array, "start_ids", library, device, (dtype,), shape, symbols)
    if device is None:
        if vocab is None:
            return arrays.on_host(twin.decoding_init, start_ids, start_ids, out=out)
        return arrays.on_host(twin.topp_init, start_ids, start_ids, vocab, out=out)
    results = out if out is not None else tuple(library.empty(s, d, start_ids) for _, d, s, _ in wanted)
    addresses = [library.address(x) for x in (start_ids, *results)]
    if vocab is None:
        slices, blocks = 0, -(-batch // _THREADS)
        addresses += [0, 0]
    else:
        slices = -(-vocab // (_THREADS * _ITEMS))
        blocks = max(batch, 1) * slices  # the last offset is written even where there are no rows
    if blocks:
        _init_variant(vocab is not None).launch(
            device,
            library.stream(device),
            (blocks, 1, 1),
            (_THREADS, 1, 1),
            0,
            *addresses,
            batch,
            vocab or 0,
            slices,
        )
    return tuple(results)


def _description(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__


@arrays.takes_dlpack
def decoding_init(start_ids: Any, *, out: Any = None) -> tuple[Any, Any, Any, Any]:
    """The state of a batch of sequences before their first step, in one launch.

    Args:
        start_ids: the token that each sequence starts from, int32 [batch].
        out: four arrays to write into and return. The first may be `start_ids`.

    Returns:
        word_ids int32 [batch] = start_ids, sequence_length int32 [batch] = 0, finished bool [batch] = False and
        cum_log_probs float32 [batch] = 0, in the library and on the device of `start_ids`.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides or devices that do not fit.

    This is what FasterTransformer's decoding starts with (`init_kernel`), there with one `start_id` for all.
    """
    return _init(start_ids, None, out)  # type: ignore[return-value]


@arrays.takes_dlpack
def topp_init(start_ids: Any, vocab: int, *, out: Any = None) -> tuple[Any, Any, Any, Any, Any, Any]:
    """`decoding_init`, and what a segmented sort of [batch, vocab] probabilities starts from, in one launch.

    The sampling of cukern sorts nothing and needs none of the latter.

    Args:
        start_ids: the token that each sequence starts from, int32 [batch].
        vocab: tokens in the vocabulary; batch * vocab is less than 2**31, for the offsets are int32.
        out: six arrays to write into and return. The first may be `start_ids`.

    Returns:
        word_ids, sequence_length, finished and cum_log_probs as `decoding_init` does, then offsets int32
        [batch + 1] with offsets[b] = b * vocab and id_vals int32 [batch, vocab] with id_vals[b, i] = i.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit.

    This is FasterTransformer's `topp_initialization_kernel`.
    """
    vocab = check.integer("vocab", vocab, 1, MAX_VOCAB)
    _, _, batch = _check_ids("start_ids", start_ids)
    if batch * vocab >= 2**31:
        check.fail("batch * vocab", "less than 2**31", batch * vocab)
    return _init(start_ids, vocab, out)  # type: ignore[return-value]


@arrays.takes_dlpack
def update_logits(
    logits: Any,
    bias: Any = None,
    finished: Any = None,
    end_id: int | None = None,
    *,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Add the bias to the logits, and let finished sequences get `end_id` for ever.

    A row that goes on becomes logits + bias, added in float32. A finished one becomes the largest finite number of the
    dtype at `end_id` and the lowest at all other tokens, whatever its logits, which are not read. A temperature below 1
    may then make infinities of these; `sample` still draws `end_id`.

    Args:
        logits: [batch, vocab], float32, float16 or bfloat16, contiguous along vocab; rows may be strided. The
            vocabulary has at most 2**20 tokens.
        bias: [vocab], of the dtype of `logits`, or None.
        finished: which sequences have finished, bool [batch], or None for none.
        end_id: the token that ends a sequence; needed with `finished`.
        out: an array like `logits` to write into and return; it may be `logits`.
        variant: "auto", or a kernel by name: "wide" (16-byte loads and stores, for aligned rows) or "narrow". Both
            return the same bits.

    Returns:
        the new logits [batch, vocab], in the dtype and library and on the device of `logits`. Arrays in host memory go
        through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides, devices or sizes that do not fit.

    This is FasterTransformer's `update_logits_without_softmax`.
    """
    rows = _check_logits(logits)
    library, device, dtype, batch, vocab, row_stride = rows
    _check_variant(variant, device)
    if bias is not None:
        arrays.expect("bias", bias, "logits", library, device, (dtype,), (vocab,), "[vocab]")
    if finished is not None:
        arrays.expect("finished", finished, "logits", library, device, ("bool",), (batch,), "[batch]")
        if end_id is None:
            check.fail("end_id", "an integer where finished is given", "None", TypeError)
    if end_id is not None:
        end_id = check.integer("end_id", end_id, 0, vocab - 1)
    out_row_stride = vocab if out is None else _check_out(out, rows)
    if device is None:
        return arrays.on_host(twin.update_logits, logits, logits, bias, finished, end_id, out=out)
    if out is None:
        out = library.empty((batch, vocab), dtype, logits)
    if batch == 0:
        return out
    address, out_address = library.address(logits), library.address(out)
    bias_address = 0 if bias is None else library.address(bias)
    width = _width(variant, rows, out_row_stride, address | out_address | bias_address)
    slices = -(-vocab // (_THREADS * _PACKS * width))
    _update_variant(dtype, width).launch(
        device,
        library.stream(device),
        (batch * slices, 1, 1),
        (_THREADS, 1, 1),
        0,
        address,
        bias_address,
        0 if finished is None else library.address(finished),
        out_address,
        row_stride,
        out_row_stride,
        vocab,
        slices,
        end_id or 0,
    )
    return out


def _per_row(
    name: str, value: Any, off: float, low: float, wanted: str, rows: _Rows, dtype: str = "float32"
) -> tuple[int, Any, int]:
    """Address, number and stride of a parameter that is a number or an array, as `PerRow` of the template has them.

    `off` stands for None; a number must be at least `low`.
    """
    if value is None:
        return 0, off, 0
    if arrays.is_array(value):
        shape = (rows.batch,) if len(value.shape) else ()
        arrays.expect(name, value, "logits", rows.library, rows.device, (dtype,), shape, "[batch]")
        return rows.library.address(value), off, len(shape)
    if dtype == "int32":
        return 0, check.integer(name, value, int(low), 2**31 - 1), 0
    number = check.number(name, value)
    if not low <= number <= _LARGEST_FLOAT:
        check.fail(name, wanted, number)
    return 0, number, 0


def _check_words(name: str, words: Any, like: str, library: arrays.Library, device: int | None, batch: int) -> int:
    """How far the lists of two rows are apart: 0 where all have the same."""
    arrays.same_place(name, words, like, library, device)
    check.dtype(name, library.dtype(words), ("int32",))
    shape = tuple(words.shape)
    if len(shape) not in (2, 3) or shape[-2] != 2 or (len(shape) == 3 and shape[0] != batch):
        check.fail(name, f"of shape [2, size] or [batch, 2, size] with batch = {batch}", list(shape))
    if shape[-1] > MAX_LENGTH:
        check.fail(f"the size of {name}", f"at most {MAX_LENGTH}", shape[-1])
    arrays.contiguous(name, words, library)
    return 2 * shape[-1] if len(shape) == 3 else 0


def _check_output_ids(
    output_ids: Any, like: str, library: arrays.Library, device: int | None, batch: int
) -> tuple[int, int]:
    """Columns and row stride of the array of the sequences."""
    arrays.same_place("output_ids", output_ids, like, library, device)
    check.dtype("output_ids", library.dtype(output_ids), ("int32",))
    shape = tuple(output_ids.shape)
    if len(shape) != 2 or shape[0] != batch:
        check.fail("output_ids", f"of shape [batch, max_length] with batch = {batch}", list(shape))
    if shape[1] > MAX_LENGTH:
        check.fail("max_length of output_ids", f"at most {MAX_LENGTH}", shape[1])
    return shape[1], arrays.row_stride("output_ids", output_ids, library)


@arrays.takes_dlpack
def apply_penalties(
    logits: Any,
    *,
    temperature: Any = None,
    repetition_penalty: Any = None,
    presence_penalty: Any = None,
    frequency_penalty: Any = None,
    output_ids: Any = None,
    sequence_length: Any = None,
    prompt_length: Any = None,
    min_length: Any = None,
    end_id: int | None = None,
    bad_words: Any = None,
    out: Any = None,
    variant: str = "auto",
) -> Any:
    """Change the logits by what the sequence already holds, then divide them by the temperature, in one launch.

    In vLLM's order, in float32, rounded to the dtype once at the end:

    1. tokens of the sequence, the prompt included: a logit above 0 times (1 / repetition_penalty), any other times
       repetition_penalty (CTRL, arXiv:1909.05858);
    2. generated tokens: logit - frequency_penalty * count - presence_penalty (OpenAI's API);
    3. -inf for a token that would complete a bad word, and for `end_id` before `min_length` tokens are generated;
    4. all tokens: logit * (1 / temperature), which is left out where the temperature is 0 (or, in an array, not a
       positive normal number), for then the greedy choice is wanted.

    In place (`out=logits`) and without a temperature, only the tokens concerned are read and written. Counts are exact
    and each token is penalized once, so that the same input gives the same bits.

    Args:
        logits: [batch, vocab], float32, float16 or bfloat16, contiguous along vocab; rows may be strided. The
            vocabulary has at most 2**20 tokens.
        temperature: at least 0. This and the next three are finite numbers, or float32 arrays [batch] or [] on the
            device of `logits`.
        repetition_penalty: positive; 1 is none.
        presence_penalty: 0 is none.
        frequency_penalty: 0 is none.
        output_ids: the sequences, int32 [batch, max_length], contiguous along max_length; rows may be strided. Ids
            outside of [0, vocab) are padding: no token, but they have a place in the sequence.
        sequence_length: how many of them there are, int32 [batch]; taken as within [0, max_length].
        prompt_length: how many of those are the prompt, int32 [batch], or None for none.
        min_length: tokens that must be generated before `end_id`; an int, or an int32 array [batch] or [].
        end_id: the token that ends a sequence; needed with `min_length`.
        bad_words: words (of one or more tokens each) that must not be generated, int32 [2, size] for all rows or
            [batch, 2, size], in FasterTransformer's layout: the tokens of all words one after the other, then where
            each word ends there, then -1. The words [7], [3, 4] and [9] are [[7, 3, 4, 9], [1, 3, 4, -1]].
        out: an array like `logits` to write into and return; it may be `logits`.
        variant: "auto", or a kernel by name: "wide" (16-byte loads and stores, for aligned rows) or "narrow". Both
            return the same bits.

    Returns:
        the new logits [batch, vocab], in the dtype and library and on the device of `logits`. Arrays in host memory go
        through the NumPy twin.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken; an argument without those it needs.
        ValueError: shapes, strides, devices or sizes that do not fit.
    """
    rows = _check_logits(logits)
    library, device, dtype, batch, vocab, row_stride = rows
    _check_variant(variant, device)
    counts = not (repetition_penalty is None and presence_penalty is None and frequency_penalty is None)
    temperature_row = _per_row("temperature", temperature, 1.0, 0.0, "a float32 of at least 0", rows)
    repetition_row = _per_row(
        "repetition_penalty", repetition_penalty, 1.0, _SMALLEST_FLOAT, "a positive normal float32", rows
    )
    presence_row = _per_row("presence_penalty", presence_penalty, 0.0, -_LARGEST_FLOAT, "a float32", rows)
    frequency_row = _per_row("frequency_penalty", frequency_penalty, 0.0, -_LARGEST_FLOAT, "a float32", rows)
    min_length_row = _per_row("min_length", min_length, 0, 0, "", rows, "int32")

    max_length = ids_row_stride = words_stride = words_size = 0
    if output_ids is not None:
        max_length, ids_row_stride = _check_output_ids(output_ids, "logits", library, device, batch)
    elif counts or bad_words is not None:
        check.fail(
            "output_ids", "given with repetition, presence or frequency penalties or bad words", "None", TypeError
        )
    for name, lengths in (("sequence_length", sequence_length), ("prompt_length", prompt_length)):
        if lengths is not None:
            arrays.expect(name, lengths, "logits", library, device, ("int32",), (batch,), "[batch]")
    if sequence_length is None and not (output_ids is None and min_length is None and prompt_length is None):
        check.fail("sequence_length", "given with output_ids, min_length or prompt_length", "None", TypeError)
    if end_id is not None:
        end_id = check.integer("end_id", end_id, 0, vocab - 1)
    elif min_length is not None:
        check.fail("end_id", "an integer where min_length is given", "None", TypeError)
    if bad_words is not None:
        words_stride = _check_words("bad_words", bad_words, "logits", library, device, batch)
        words_size = bad_words.shape[-1]
    out_row_stride = vocab if out is None else _check_out(out, rows)

    if device is None:
        return arrays.on_host(
            twin.apply_penalties,
            logits,
            logits,
            temperature=temperature,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            output_ids=output_ids,
            sequence_length=sequence_length,
            prompt_length=prompt_length,
            min_length=min_length,
            end_id=end_id,
            bad_words=bad_words,
            out=out,
        )
    if out is None:
        out = library.empty((batch, vocab), dtype, logits)
    if batch == 0:
        return out
    address, out_address = library.address(logits), library.address(out)
    width = _width(variant, rows, out_row_stride, address | out_address)
    counted = counts or words_size > 0 or min_length is not None
    scales = temperature_row[0] != 0 or temperature_row[1] not in (0.0, 1.0)
    whole = scales or address != out_address or (batch > 1 and row_stride != out_row_stride)
    if not (counted or whole):
        return out
    slices = -(-vocab // _TOKENS)
    _penalty_variant(dtype, width, counted, whole).launch(
        device,
        library.stream(device),
        (batch * slices, 1, 1),
        (_THREADS, 1, 1),
        0,
        address,
        out_address,
        0 if output_ids is None else library.address(output_ids),
        0 if sequence_length is None else library.address(sequence_length),
        0 if prompt_length is None else library.address(prompt_length),
        library.address(bad_words) if words_size else 0,
        *temperature_row,
        *repetition_row,
        *presence_row,
        *frequency_row,
        *min_length_row,
        row_stride,
        out_row_stride,
        ids_row_stride,
        words_stride,
        vocab,
        slices,
        max_length,
        words_size,
        -1 if end_id is None else end_id,
        counts,
    )
    return out


@arrays.takes_dlpack
def stop_words_criterion(output_ids: Any, sequence_length: Any, stop_words: Any, finished: Any) -> Any:
    """Note which sequences end with a stop word, in place: `finished` becomes True there.

    Args:
        output_ids: the sequences, int32 [batch, max_length], contiguous along max_length; rows may be strided.
        sequence_length: how many tokens each holds, int32 [batch]; taken as within [0, max_length].
        stop_words: words of one or more tokens, int32 [2, size] for all rows or [batch, 2, size], in the layout of
            the `bad_words` of `apply_penalties`.
        finished: bool [batch], which is changed.

    Returns:
        `finished`.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides or devices that do not fit.

    This is FasterTransformer's stop-words criterion.
    """
    library, device = arrays.place("output_ids", output_ids)
    if len(output_ids.shape) != 2:
        check.dimensions("output_ids", tuple(output_ids.shape), ("batch", "max_length"))
    batch = _check_batch("output_ids", output_ids.shape[0])
    max_length, row_stride = _check_output_ids(output_ids, "output_ids", library, device, batch)
    arrays.expect("sequence_length", sequence_length, "output_ids", library, device, ("int32",), (batch,), "[batch]")
    words_stride = _check_words("stop_words", stop_words, "output_ids", library, device, batch)
    arrays.expect("finished", finished, "output_ids", library, device, ("bool",), (batch,), "[batch]")
    if device is None:
        arrays.on_host(twin.stop_words_criterion, finished, output_ids, sequence_length, stop_words, finished)
        return finished
    words_size = stop_words.shape[-1]
    if batch and words_size:
        _stop_words_criterion.variant(_WARPS_PER_BLOCK).launch(
            device,
            library.stream(device),
            (-(-batch // _WARPS_PER_BLOCK), 1, 1),
            (_WARPS_PER_BLOCK * 32, 1, 1),
            0,
            library.address(output_ids),
            library.address(sequence_length),
            library.address(stop_words),
            library.address(finished),
            row_stride,
            words_stride,
            batch,
            max_length,
            words_size,
        )
    return finished


@arrays.takes_dlpack
def update_finished(word_ids: Any, finished: Any, sequence_length: Any, end_id: int) -> tuple[Any, Any]:
    """End a step, in place: count the new token of each sequence that goes on, and note which ones it ends.

    sequence_length += not finished, then finished |= word_ids == end_id.

    Args:
        word_ids: the new tokens, int32 [batch].
        finished: bool [batch], which is changed.
        sequence_length: int32 [batch], which is changed.
        end_id: the token that ends a sequence; -1 for none.

    Returns:
        `finished` and `sequence_length`.

    Raises:
        TypeError: a dtype, or a mixture of libraries, that is not taken.
        ValueError: shapes, strides or devices that do not fit.

    FasterTransformer does this at the end of its sampling kernels, where a finished sequence goes on if it gets another
    token than `end_id`; here it stays finished.
    """
    library, device, batch = _check_ids("word_ids", word_ids)
    arrays.expect("finished", finished, "word_ids", library, device, ("bool",), (batch,), "[batch]")
    arrays.expect("sequence_length", sequence_length, "word_ids", library, device, ("int32",), (batch,), "[batch]")
    end_id = check.integer("end_id", end_id, -1, 2**31 - 1)
    if device is None:
        arrays.on_host(twin.update_finished, word_ids, word_ids, finished, sequence_length, end_id)
    elif batch:
        _update_finished.variant(_THREADS).launch(
            device,
            library.stream(device),
            (-(-batch // _THREADS), 1, 1),
            (_THREADS, 1, 1),
            0,
            library.address(word_ids),
            library.address(finished),
            library.address(sequence_length),
            batch,
            end_id,
        )
    return finished, sequence_length


# --- for PyTorch --------------------------------------------------------------------------------------


def _state(start_ids: Any) -> list[tuple[Any, tuple[int, ...], str]]:
    return [(start_ids, (start_ids.shape[0],), dtype) for _, dtype in _STATE]


def _sort_state(start_ids: Any, vocab: int) -> list[tuple[Any, tuple[int, ...], str]]:
    batch = start_ids.shape[0]
    return [*_state(start_ids), (start_ids, (batch + 1,), "int32"), (start_ids, (batch, vocab), "int32")]


def _like_logits(logits: Any, *_: Any, **__: Any) -> list[tuple[Any, tuple[int, ...], str]]:
    return [(logits, tuple(logits.shape), str(logits.dtype).removeprefix("torch."))]


#: For `cukern.torch_ops`: the schema of each operator, and of what shape and dtype its results are.
TORCH_OPS: dict[str, Any] = {
    "decoding_init(Tensor start_ids) -> (Tensor word_ids, Tensor sequence_length, Tensor finished, "
    "Tensor cum_log_probs)": _state,
    "topp_init(Tensor start_ids, SymInt vocab) -> (Tensor word_ids, Tensor sequence_length, Tensor finished, "
    "Tensor cum_log_probs, Tensor offsets, Tensor id_vals)": _sort_state,
    "update_logits(Tensor logits, Tensor? bias=None, Tensor? finished=None, int? end_id=None, *, "
    "str variant='auto') -> Tensor updated": _like_logits,
    "apply_penalties(Tensor logits, *, Tensor? temperature=None, Tensor? repetition_penalty=None, "
    "Tensor? presence_penalty=None, Tensor? frequency_penalty=None, Tensor? output_ids=None, "
    "Tensor? sequence_length=None, Tensor? prompt_length=None, Tensor? min_length=None, int? end_id=None, "
    "Tensor? bad_words=None, str variant='auto') -> Tensor penalized": _like_logits,
    "stop_words_criterion(Tensor output_ids, Tensor sequence_length, Tensor stop_words, Tensor(a!) finished) -> ()": (
        None
    ),
    "update_finished(Tensor word_ids, Tensor(a!) finished, Tensor(b!) sequence_length, int end_id) -> ()": None,
}
