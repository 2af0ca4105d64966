"""Bias and penalties for logits, before a token is drawn."""

from __future__ import annotations

import functools
from typing import Any

from cukern.ops.decoding.state import MAX_VOCAB, check_batch, check_output_ids, check_words
from cukern.reference import decoding as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray
from cukern.runtime.describe import (
    Array,
    Result,
    dtype_name,
    expect,
    expect_array,
    expect_place,
    expect_row_stride,
    expect_strided,
)
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import op
from cukern.runtime.plan import asked, begin_together, launch, outputs, run_twin, write_into
from cukern.runtime.vectors import ceil_div, why_width

DTYPES = ("float32", "float16", "bfloat16")
VARIANTS = ("auto", "wide", "narrow")
_LARGEST_FLOAT = 3.4028234663852886e38
_SMALLEST_FLOAT = 2.0**-126  # normal, so its reciprocal is finite
_MAX_COUNT = 2**29 - 1  # the kernel packs a count and flags into 32 bits
_THREADS = 256
_PACKS = 4
_TOKENS = 8192

_update_logits = Kernel("decoding/update_logits", "update_logits")
_apply_penalties = Kernel("decoding/apply_penalties", "apply_penalties")


def _wide_width(dtype: str) -> int:
    """Return how many logits fit in 16 bytes."""
    return 16 // arrays.ITEM_SIZE[dtype]


def _update_variant(dtype: str, width: int) -> Variant:
    return _update_logits.variant(arrays.CUDA_TYPE[dtype], width, _THREADS, _PACKS)


def _penalty_variant(dtype: str, width: int, penalized: bool, all_logits: bool) -> Variant:
    # A kernel that writes only the penalized tokens loads and stores single elements.
    return _apply_penalties.variant(
        arrays.CUDA_TYPE[dtype], width if all_logits else 1, _THREADS, _TOKENS, penalized, all_logits
    )


_update_logits.specialized = [_update_variant(d, w).instance for d in DTYPES for w in (_wide_width(d), 1)]
_update_logits.at_import = [_update_variant(d, _wide_width(d)).instance for d in ("float32", "bfloat16")]
_apply_penalties.specialized = [
    _penalty_variant(d, w, *flags).instance
    for d in DTYPES
    for flags, widths in (
        ((True, True), (_wide_width(d), 1)),
        ((False, True), (_wide_width(d), 1)),
        ((True, False), (1,)),
    )
    for w in widths
]
_apply_penalties.at_import = [_penalty_variant(d, _wide_width(d), True, True).instance for d in ("float32", "bfloat16")]


def _check_logits(logits: Any) -> tuple[Any, int]:
    batch, vocab = expect_array("logits", logits, DTYPES, ("batch", "vocab")).shape
    if not 1 <= vocab <= MAX_VOCAB:
        check.fail("the vocabulary of logits", f"in [1, {MAX_VOCAB}]", vocab)
    expect_row_stride("logits", logits)
    return check_batch("logits", batch), vocab


def _logits_out(out: Any, logits: Array) -> Array:
    if out is None:
        return outputs(None, logits, "logits", _like_logits(logits))
    expect_strided("out", out, logits, "logits", (logits.dtype,), logits.shape, "[batch, vocab]")
    batch, vocab = logits.shape
    row_stride = expect_row_stride("out", out)
    if abs(row_stride) < vocab and batch > 1:
        check.fail("out", "of rows that do not overlap", f"strides {row_stride, 1} (in elements)")
    write_into(out)
    return out


def _width(variant: str, logits: Array, out: Array, *others: Array) -> int:
    """Return the number of logits per load and store."""
    if variant == "narrow":
        return 1
    width, (batch, vocab) = _wide_width(logits.dtype), logits.shape
    aligned = vocab % width == 0 and all(x.alignment == 16 for x in (logits, out, *others))
    if aligned and ((logits.strides[0] | out.strides[0]) % width == 0 or batch == 1):
        return width
    if variant == "wide":
        wanted = "'auto' or 'narrow' where rows are not 16-byte aligned or not a multiple of 16 bytes long"
        check.fail("variant", wanted, "'wide'")
    return 1


def _like_logits(logits: Any, *_: Any, **__: Any) -> Result:
    return Result(tuple(logits.shape), dtype_name(logits), "[batch, vocab]")


@op(twin.update_logits, "updated", _like_logits)
def update_logits(
    logits: AnyArray, bias: AnyArray | None = None, finished: AnyArray | None = None, end_id: int | None = None,
    *, out: AnyArray | None = None, variant: str = "auto",
) -> AnyArray:  # fmt: skip
    """Add the bias to the logits, and force finished sequences to `end_id`.

    The row of a running sequence becomes logits + bias, added in float32. The row of a finished sequence becomes the
    largest finite number of the dtype at `end_id` and the lowest elsewhere. A temperature below 1 may turn these
    numbers into infinities; `sample` still draws `end_id`.

    Args:
        logits: [batch, vocab], float32, float16 or bfloat16, contiguous along vocab, of at most 2**20 tokens; rows may
            be strided.
        bias: [vocab], of the dtype of `logits`, or None.
        finished: bool [batch], or None.
        end_id: the token that ends a sequence; needed with `finished`.
        out: an array like `logits` to write into and return; it may be `logits`.
        variant: "auto", "wide" (16-byte loads and stores, for aligned rows) or "narrow". The bits are the same.

    Returns the new logits [batch, vocab], like `logits`. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: an unsupported dtype, arrays of different libraries, or an argument without another that it needs.
        ValueError: shapes, strides, devices or sizes that do not fit.

    The function is FasterTransformer's `update_logits_without_softmax`.
    """
    batch, vocab = _check_logits(logits)
    if bias is not None:
        expect("bias", bias, logits, "logits", (logits.dtype,), (vocab,), "[vocab]")
    if finished is not None:
        expect("finished", finished, logits, "logits", ("bool",), (batch,), "[batch]")
        if end_id is None:
            check.fail("end_id", "an integer where finished is given", "None", TypeError)
    if end_id is not None:
        end_id = check.integer("end_id", end_id, 0, vocab - 1)
    out = _logits_out(out, logits)
    if logits.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if batch == 0:
        return out
    width = _width(variant, logits, out, *() if bias is None else (bias,))
    slices = ceil_div(vocab, _THREADS * _PACKS * width)
    launch(
        _update_variant(logits.dtype, width), batch * slices, _THREADS,
        why=asked(variant) or why_width(width * logits.item_size, "rows of logits and out, and bias"),
        logits=logits, bias=bias, finished=finished, out=out,
        row_stride=logits.strides[0], out_row_stride=out.strides[0],
        vocab=vocab, slices=slices, end_id=end_id or 0,
    )  # fmt: skip
    return out


def _why_penalties(variant: str, width: int, all_logits: bool) -> str:
    blocks = f"a block for each {_TOKENS} tokens of a row"
    if not all_logits:
        why = "in place without a temperature: it writes only the tokens that a penalty changes"
        return f"{asked(variant, '; ')}{blocks}, {why}"
    return f"{blocks}; {asked(variant) or why_width(width, 'rows of logits and out')}"


def _per_row(
    name: str, value: Any, neutral: float, minimum: float, wanted: str, logits: Array, dtype: str = "float32"
) -> tuple[Any, Any, int]:
    """Return the fields of `PerRow`: an array, a number (`neutral` if `value` is None), and the array's stride."""
    if value is None:
        return None, neutral, 0
    if isinstance(value, Array):
        shape = logits.shape[: len(value.shape[:1])]
        expect(name, value, logits, "logits", (dtype,), shape, "[batch]")
        return value, neutral, len(shape)
    if dtype == "int32":
        return None, check.integer(name, value, int(minimum), 2**31 - 1), 0
    number = check.number(name, value)
    if not minimum <= number <= _LARGEST_FLOAT:
        check.fail(name, wanted, number)
    return None, number, 0


def _check_sequences(
    logits: Array, output_ids: Any, sequence_length: Any, prompt_length: Any, need_ids: str, need_length: bool
) -> tuple[int, int]:
    """Return the columns and the row stride of `output_ids`, or zeros if it is None. A nonempty `need_ids` says why
    `output_ids` is required."""
    batch, sizes = logits.shape[0], (0, 0)
    if output_ids is not None:
        sizes = check_output_ids(output_ids, logits, "logits")
    elif need_ids:
        check.fail("output_ids", f"given with {need_ids}", "None", TypeError)
    for name, lengths in (("sequence_length", sequence_length), ("prompt_length", prompt_length)):
        if lengths is not None:
            expect(name, lengths, logits, "logits", ("int32",), (batch,), "[batch]")
    if sequence_length is None and (need_length or output_ids is not None or prompt_length is not None):
        check.fail("sequence_length", "given with output_ids, min_length or prompt_length", "None", TypeError)
    return sizes


def _check_masks(logits: Array, output_ids: Any, prompt_mask: Any, output_mask: Any) -> dict[str, Array]:
    """Return the masks that are not None."""
    given = {name: x for name, x in zip(_MASKS, (prompt_mask, output_mask), strict=True) if x is not None}
    for name, mask in given.items():
        expect(name, mask, logits, "logits", ("bool",), logits.shape, "[batch, vocab]")
    if output_mask is not None and output_ids is not None:
        shape = expect_place("output_ids", output_ids, logits, "logits").shape
        if shape and shape[-1] > _MAX_COUNT:
            check.fail("max_length of output_ids", f"at most {_MAX_COUNT} beside output_mask", shape[-1])
    return given


_MASKS = ("prompt_mask", "output_mask")


@op(twin.apply_penalties, "penalized", _like_logits)
def apply_penalties(
    logits: AnyArray,
    *,
    temperature: AnyArray | float | None = None,
    repetition_penalty: AnyArray | float | None = None,
    presence_penalty: AnyArray | float | None = None,
    frequency_penalty: AnyArray | float | None = None,
    output_ids: AnyArray | None = None,
    sequence_length: AnyArray | None = None,
    prompt_length: AnyArray | None = None,
    min_length: AnyArray | int | None = None,
    end_id: int | None = None,
    bad_words: AnyArray | None = None,
    prompt_mask: AnyArray | None = None,
    output_mask: AnyArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Penalize logits by the tokens of the sequence so far, then divide them by the temperature, in one launch.

    The result is computed in float32 and rounded to the dtype once. The steps and their order are vLLM's:

    1. tokens of the sequence, the prompt included: a positive logit is multiplied by 1 / repetition_penalty, any other
    logit by repetition_penalty (CTRL, arXiv:1909.05858);
    2. generated tokens: logit - frequency_penalty * count - presence_penalty (OpenAI's API). A token that is only in
    `output_mask` has a count of 0;
    3. -inf for a token that would complete a bad word, and for `end_id` before `min_length` tokens are generated;
    4. all tokens: logit * (1 / temperature), unless the temperature is 0 (in an array: 0, negative or subnormal),
    because the caller then wants the largest logit.

    A logit that is too large for the dtype after the division by the temperature becomes an infinity, and the order of
    such logits is lost. `sample` keeps the order, because it first subtracts the largest logit.

    In place (`out=logits`) and without a temperature, only the affected tokens are read and written.

    Args:
        logits: [batch, vocab], as in `update_logits`.
        temperature: at least 0. The temperature and the three penalties are finite numbers, or float32 arrays [batch]
            or [] on the device of `logits`.
        repetition_penalty: positive; 1 turns the penalty off.
        presence_penalty, frequency_penalty: 0 turns the penalty off.
        output_ids: the sequences, int32 [batch, max_length], contiguous along max_length; rows may be strided. Ids
            outside of [0, vocab) are padding: they get no penalty, but count as positions of the sequence.
        sequence_length: int32 [batch]; clamped to [0, max_length].
        prompt_length: the length of each prompt within the sequence, int32 [batch], or None if there is no prompt.
        min_length: the number of tokens to generate before `end_id`; an int, or an int32 array [batch] or [].
        end_id: the token that ends a sequence; needed with `min_length`.
        bad_words: words of one or more tokens that must not be generated, int32 [2, size] for all rows or [batch, 2,
            size], in FasterTransformer's layout: first the tokens of all words, then the end of each word in that list,
            then -1. The words [7], [3, 4] and [9] are [[7, 3, 4, 9], [1, 3, 4, -1]].
        prompt_mask: bool [batch, vocab], contiguous: tokens of the prompt, besides those in `output_ids`. With a mask,
            repetition and presence penalties need no `output_ids`. The repetition penalty alone, in place, is vLLM's
            `apply_repetition_penalties`.
        output_mask: bool [batch, vocab], contiguous: generated tokens, besides those in `output_ids`.
        out, variant: as in `update_logits`.

    Results and errors are as in `update_logits`.
    """
    batch, vocab = _check_logits(logits)
    per_row = functools.partial(_per_row, logits=logits)
    counts = not (repetition_penalty is None and presence_penalty is None and frequency_penalty is None)
    temperatures = per_row("temperature", temperature, 1.0, 0.0, "a float32 of at least 0")
    repetition = per_row("repetition_penalty", repetition_penalty, 1.0, _SMALLEST_FLOAT, "a positive normal float32")
    presence = per_row("presence_penalty", presence_penalty, 0.0, -_LARGEST_FLOAT, "a float32")
    frequency = per_row("frequency_penalty", frequency_penalty, 0.0, -_LARGEST_FLOAT, "a float32")
    min_lengths = per_row("min_length", min_length, 0, 0, "", dtype="int32")

    masks = _check_masks(logits, output_ids, prompt_mask, output_mask)
    need_ids = "" if frequency_penalty is None else "frequency penalties, whose counts no mask has"
    if bad_words is not None or (counts and not masks):
        need_ids = "repetition, presence or frequency penalties or bad words"
    max_length, ids_row_stride = _check_sequences(
        logits, output_ids, sequence_length, prompt_length, need_ids, min_length is not None
    )
    if end_id is not None:
        end_id = check.integer("end_id", end_id, 0, vocab - 1)
    elif min_length is not None:
        check.fail("end_id", "an integer where min_length is given", "None", TypeError)
    words_stride = words_size = 0
    if bad_words is not None:
        words_stride, words_size = check_words("bad_words", bad_words, logits, "logits"), bad_words.shape[-1]
    given, out = out, _logits_out(out, logits)
    if logits.on_host:
        return run_twin(variant, VARIANTS)
    check.one_of("variant", variant, VARIANTS)
    if batch == 0:
        return out
    width = _width(variant, logits, out)
    penalized = counts or words_size > 0 or min_length is not None
    is_in_place = (
        given is not None and begin_together(logits, out) and (logits.strides[0] == out.strides[0] or batch == 1)
    )
    all_logits = not is_in_place or isinstance(temperature, Array) or temperatures[1] not in (0.0, 1.0)
    if not (penalized or all_logits):
        return out
    slices = ceil_div(vocab, _TOKENS)
    launch(
        _penalty_variant(logits.dtype, width, penalized, all_logits), batch * slices, _THREADS,
        why=_why_penalties(variant, width * logits.item_size, all_logits), logits=logits, out=out,
        output_ids=output_ids, sequence_length=sequence_length, prompt_length=prompt_length,
        bad_words=bad_words if words_size else None,
        temperature=temperatures, repetition=repetition, presence=presence, frequency=frequency,
        min_length=min_lengths,
        row_stride=logits.strides[0], out_row_stride=out.strides[0],
        ids_row_stride=ids_row_stride, bad_words_stride=words_stride,
        vocab=vocab, slices=slices, max_length=max_length, bad_words_size=words_size,
        end_id=-1 if end_id is None else end_id, counts=counts and output_ids is not None,
        **dict.fromkeys(_MASKS) | (masks if counts else {}),
    )  # fmt: skip
    return out
