"""Sampling: draw a token from each row of logits or probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from cukern.ops.sampling.choose import (
    any_top_k,
    draw,
    ids_of,
    like_rows,
    probabilities_of,
    verified,
    verify,
    whole_rows,
)
from cukern.reference import sampling as twin
from cukern.runtime.arrays import AnyArray, Generator, WrittenArray
from cukern.runtime.op import op

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sample",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

_F = TypeVar("_F", bound=Callable[..., Any])
#: Arguments whose values may differ at each call of a plan, unless they are arrays.
_NUMBERS = "seed", "offset", "generator"


def _declare(names: str, results: Callable[..., Any] = ids_of) -> Callable[[_F], _F]:
    """Declare a sampling op. Its torch operator returns only the ids."""

    def declare(function: _F) -> _F:
        name, parameters = function.__name__, inspect.signature(function).parameters
        numbers = [x for x in parameters if x in _NUMBERS]
        return op(twin.refusing(getattr(twin, name)), names, results, numbers=numbers)(function)

    return declare


@_declare("ids")
def sampling_from_logits(
    logits: AnyArray,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from the softmax of each row.

    Args:
        logits: [rows, vocab], float32, float16 or bfloat16, contiguous along the vocabulary, of at most 2^20 tokens;
            rows may be strided. +inf counts as the largest finite number.
        seed: an int, or an int32 or int64 array, [batch] or of one element. With one seed for the batch, the random
            numbers of a row also depend on its index in the batch (as in FlashInfer, by the subsequence of Philox).
            With a seed per row, a row draws the same token at any index of any batch. None: `generator` gives the seed
            and the offset.
        offset: the position in the stream of random numbers, an int or an array like `seed`; None is 0. Pass another
            offset at each step. Only with `seed`.
        generator: a `torch.Generator` of the device for tensors; a `Generator` or a `RandomState` of `numpy.random` or
            `cupy.random` for NumPy's or CuPy's arrays. None: the library's default generator. The host never waits for
            the GPU. For CUDA tensors, the call equals a call with
            `seed=generator.initial_seed(), offset=generator.get_offset()`, and adds 4 to the generator's offset. While
            a CUDA graph is captured, an additional kernel draws the seed instead, anew at each replay. CuPy draws the
            seed on the device, and cannot do so during a capture.
        indices: int32 or int64 [batch]: the row of each token; clamped to the rows. None: row i for token i.
        return_valid: also return bool [batch]: False, with id 0, for a row with NaN or without a token that can be
            drawn.
        return_logprobs: also return float32 [batch]: log-probabilities, after the temperature and before any filter.
        out: the array, or the tuple of arrays, to write into and return.
        variant: "auto", "cluster" (8 blocks per row, sm_90 and later) or "block". The tokens are the same.

    Returns:
        ids [batch], int32 or of the dtype of `indices`; with return_valid or return_logprobs a tuple. Arrays in host
        memory go through the NumPy reference.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or numbers that do not fit. Parameters in arrays on a device are clamped
            instead.
        RuntimeError: `seed` is None for CuPy's arrays during the capture of a CUDA graph.

    The arguments are FlashInfer's. The Gumbel-max trick draws a group of 32 tokens. Then a token of this group is
    drawn. The random numbers are from Philox (Salmon et al., 2011).
    """
    return draw("logits", logits, (seed, offset, generator), indices, return_valid, return_logprobs, out, variant)


@_declare("ids")
def sampling_from_probs(
    probs: AnyArray,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from each row of `probs`, probabilities [rows, vocab].

    The sum of a row must be finite, but need not be 1. Negative elements count as 0. All else is as in
    `sampling_from_logits`.
    """
    return draw("probs", probs, (seed, offset, generator), indices, return_valid, return_logprobs, out, variant)


@_declare("ids")
def top_k_sampling_from_probs(
    probs: AnyArray,
    top_k: AnyArray | int | None,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from the `top_k` most probable tokens of each row.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`.
        top_k: an int in [1, vocab] or an int32 or int64 array [batch]; ties go to the lower id. None keeps all tokens.

    All else is as in `sampling_from_logits`.
    """
    return draw(
        "probs", probs, (seed, offset, generator), indices, return_valid, return_logprobs, out, variant, top_k=top_k
    )


@_declare("ids")
def top_p_sampling_from_probs(
    probs: AnyArray,
    top_p: AnyArray | float | None,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from the nucleus of each row: the smallest set of most probable tokens whose sum reaches `top_p`.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`. The sum of the kept tokens reaches `top_p` times the sum of
            the row.
        top_p: a float in [0, 1] or an array [batch], float32, int32 or int64. The most probable token is always kept.
            Ties go to the lower id. None keeps all tokens.

    All else is as in `sampling_from_logits`. The method is from "The curious case of neural text degeneration"
    (arXiv:1904.09751), with FlashInfer's rejection sampling.
    """
    return draw(
        "probs", probs, (seed, offset, generator), indices, return_valid, return_logprobs, out, variant, top_p=top_p
    )


@_declare("ids")
def min_p_sampling_from_probs(
    probs: AnyArray,
    min_p: AnyArray | float | None,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from the tokens that are at least `min_p` times as probable as the most probable one.

    Args:
        probs: [rows, vocab], as in `sampling_from_probs`.
        min_p: a float in [0, 1] or an array [batch], float32, int32 or int64. None keeps all tokens.

    All else is as in `sampling_from_logits`. The method is from "Turning up the heat: min-p sampling"
    (arXiv:2407.01082).
    """
    return draw(
        "probs", probs, (seed, offset, generator), indices, return_valid, return_logprobs, out, variant, min_p=min_p
    )


@_declare("ids")
def top_k_top_p_sampling_from_logits(
    logits: AnyArray,
    top_k: AnyArray | int | None,
    top_p: AnyArray | float | None,
    *,
    filter_apply_order: str = "top_k_first",
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Draw a token from the softmax of each row, among the tokens that both top-k and top-p keep.

    Args:
        logits: [rows, vocab], as in `sampling_from_logits`.
        top_k, top_p: as in `top_k_sampling_from_probs` and `top_p_sampling_from_probs`.
        filter_apply_order: "top_k_first": `top_p` is a fraction of the sum of the `top_k` tokens. "joint": `top_p` is a
            fraction of the sum of the whole row.

    All else is as in `sampling_from_logits`.
    """
    shared_args = (seed, offset, generator), indices, return_valid, return_logprobs, out, variant
    return draw("logits", logits, *shared_args, filter_apply_order, top_k=top_k, top_p=top_p)


@_declare("ids")
def top_k_top_p_sampling_from_probs(
    probs: AnyArray,
    top_k: AnyArray | int | None,
    top_p: AnyArray | float | None,
    *,
    filter_apply_order: str = "top_k_first",
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Like `top_k_top_p_sampling_from_logits`, for probabilities [rows, vocab] as in `sampling_from_probs`."""
    shared_args = (seed, offset, generator), indices, return_valid, return_logprobs, out, variant
    return draw("probs", probs, *shared_args, filter_apply_order, top_k=top_k, top_p=top_p)


@_declare("ids")
def sample(
    logits: AnyArray,
    *,
    temperature: AnyArray | float | None = 1.0,
    top_k: AnyArray | int | None = None,
    top_p: AnyArray | float | None = None,
    min_p: AnyArray | float | None = None,
    filter_apply_order: str = "top_k_first",
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    indices: AnyArray | None = None,
    bias: AnyArray | None = None,
    finished: WrittenArray | None = None,
    end_id: int | None = None,
    sequence_length: WrittenArray | None = None,
    return_valid: bool = False,
    return_logprobs: bool = False,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Run a decoding step's sampling in one kernel: bias, temperature, top-k, top-p, min-p, draw, and bookkeeping.

    Args:
        logits: [rows, vocab], as in `sampling_from_logits`.
        temperature: a float of at least 0 or an array [batch], float32, int32 or int64. With 0 the largest logit wins,
            on ties the lower id. Infinity makes all finite logits equally probable.
        top_k: as in `top_k_sampling_from_probs`. -1, 0 and values of at least the vocabulary size keep all tokens, also
            in an array, as in vLLM, SGLang, FlashInfer and transformers.
        top_p, filter_apply_order: as in `top_k_top_p_sampling_from_logits`.
        min_p: as in `min_p_sampling_from_probs`.
        bias: [vocab] of the dtype of `logits`, added to each row in float32.
        finished: bool [batch]. A finished row gets `end_id` and the log-probability 0. A row that draws `end_id`
            becomes finished, in place.
        end_id: the token that ends a sequence; only with `finished`.
        sequence_length: int32 [batch], increased in place for rows that were not finished.

    All else is as in `sampling_from_logits`. The arguments `bias`, `finished`, `end_id` and
    `sequence_length` are from FasterTransformer's sampling kernels.
    """
    shared_args = (seed, offset, generator), indices, return_valid, return_logprobs, out, variant
    step = bias, finished, end_id, sequence_length
    filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return draw("logits", logits, *shared_args, filter_apply_order, *step, any_top_k, **filters)


@_declare("probs", probabilities_of)
def softmax(
    logits: AnyArray, temperature: AnyArray | float | None = None, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Compute the softmax of logits / temperature, as FlashInfer does.

    Args:
        logits: [batch, vocab], as in `sampling_from_logits`.
        temperature: as in `sample`; None is 1.
        out: float32 [batch, vocab] to write into and return.
        variant: as in `sampling_from_logits`.

    Returns float32 [batch, vocab]. A row that holds NaN becomes NaN. A row whose logits are all -inf becomes 0. Errors
    are as in `sampling_from_logits`.
    """
    return whole_rows("SOFTMAX", "logits", logits, "temperature", temperature, out, variant)


@_declare("renormalized", like_rows)
def top_k_renorm_probs(
    probs: AnyArray, top_k: AnyArray | int | None, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Divide the `top_k` largest probabilities of each row by their sum, and set all others to 0, as FlashInfer does.

    Args:
        probs: [batch, vocab], as in `sampling_from_probs`.
        top_k: as in `top_k_sampling_from_probs`.
        out: an array like `probs` to write into and return; may be `probs` itself.
        variant: as in `sampling_from_logits`.

    Returns an array like `probs`. A row that holds NaN becomes NaN, and a row without a number above 0 becomes 0.
    Errors are as in `sampling_from_logits`.
    """
    return whole_rows("TOP_K_RENORM", "probs", probs, "top_k", top_k, out, variant)


@_declare("renormalized", like_rows)
def top_p_renorm_probs(
    probs: AnyArray, top_p: AnyArray | float | None, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Divide the probabilities in the nucleus of each row by their sum, and set all others to 0, as FlashInfer does.

    Args:
        probs: [batch, vocab], as in `sampling_from_probs`.
        top_p: as in `top_p_sampling_from_probs`.

    All else is as in `top_k_renorm_probs`.
    """
    return whole_rows("TOP_P_RENORM", "probs", probs, "top_p", top_p, out, variant)


@_declare("masked", like_rows)
def top_k_mask_logits(
    logits: AnyArray, top_k: AnyArray | int | None, *, out: AnyArray | None = None, variant: str = "auto"
) -> AnyArray:
    """Keep the `top_k` largest logits of each row, and set all others to -inf, as FlashInfer does.

    `logits` [batch, vocab] is as in `sampling_from_logits`, all else as in `top_k_renorm_probs`. Returns an array like
    `logits`. A row that holds NaN is returned unchanged.
    """
    return whole_rows("TOP_K_MASK", "logits", logits, "top_k", top_k, out, variant)


@_declare("ids, accepted, emitted", verified)
def chain_speculative_sampling(
    draft_probs: AnyArray,
    draft_token_ids: AnyArray,
    target_probs: AnyArray,
    *,
    seed: AnyArray | int | None = None,
    offset: AnyArray | int | None = None,
    generator: Generator | None = None,
    out: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Verify a chain of draft tokens, so that the emitted tokens have the distribution of the target model.

    A draft token is accepted with probability min(1, target / draft), the ratio of its probabilities in the two models.
    At the first rejection one token is drawn from max(target - draft, 0), renormalized. If all draft tokens are
    accepted, one more token is drawn from the last row of the target.

    Args:
        draft_probs: the draft model's probabilities [batch, drafts, vocab], float32, float16 or bfloat16, contiguous.
        draft_token_ids: int32 [batch, drafts]; an id out of the vocabulary is rejected.
        target_probs: the target model's probabilities [batch, drafts + 1, vocab], of the same dtype, contiguous.
        seed, offset, generator, variant: as in `sampling_from_logits`.
        out: the three arrays to write into and return.

    Returns:
        ids int32 [batch, drafts + 1]: the accepted drafts, the drawn token, then -1;
        accepted int32 [batch]: the number of drafts that pass the test, including those after the first rejection;
        emitted int32 [batch]: the number of drafts before the first rejection.

    Errors are as in `sampling_from_logits`. The method is from "Accelerating large
    language model decoding with speculative sampling" (arXiv:2302.01318).
    """
    return verify(draft_probs, draft_token_ids, target_probs, (seed, offset, generator), out, variant)
