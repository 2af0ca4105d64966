"""A replacement for `flashinfer.sampling` of flashinfer-python 0.7.2.post1.

Differences:

- The same seed gives other tokens than in FlashInfer. With one seed per row, the tokens do not depend on the index of
  the row. In FlashInfer they do.
- A `seed` without `offset` uses the offset 0. FlashInfer takes the offset from the generator.
- If tokens tie at the top-k threshold, the tokens with lower ids are kept, so that exactly k tokens are kept.
- All functions are deterministic, so `deterministic` and `is_deterministic` are ignored, and `enable_pdl` too.

Without `seed` the random numbers come from `generator`, or from torch's default generator.
"""

from __future__ import annotations

from typing import Any

import torch

import cukern
from cukern.compat._limits import not_covered
from cukern.runtime.arrays import AnyArray

__all__ = [
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_prob",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_prob",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

__getattr__ = not_covered("cukern.compat.flashinfer.sampling", "flashinfer.sampling", names=("get_seed_and_offset",))

#: Parameters of dtypes that are not listed here are converted, as in FlashInfer.
_INTEGERS = torch.int32, torch.int64
_NUMBERS = torch.float32, *_INTEGERS


def _random_args(generator: Any, seed: Any, offset: Any) -> dict[str, Any]:
    """Return the keyword arguments for the random numbers. As in FlashInfer, `offset` needs a seed."""
    if seed is None:
        return {"generator": generator}
    if offset is not None and isinstance(seed, torch.Tensor) != isinstance(offset, torch.Tensor):
        raise ValueError("seed and offset must both be tensors or both be scalars")
    numbers = {"seed": seed, "offset": offset}
    for name, given in numbers.items():
        if isinstance(given, torch.Tensor) and given.dtype == torch.uint64:
            numbers[name] = given.view(torch.int64)
    return numbers


def _refuse_nan(check_nan: bool, name: str, values: Any) -> None:
    if check_nan and bool(torch.any(torch.isnan(values))):
        raise ValueError(f"Input {name} contains NaN.")


def _convert_parameter(name: str, given: Any, values: Any, indices: Any = None) -> Any:
    """Limit `top_k` to the vocabulary size, and convert dtypes that cukern does not support.

    Raises FlashInfer's ValueError for a tensor whose shape is not [batch].
    """
    vocab, is_top_k = values.shape[-1], name == "top_k"
    if not isinstance(given, torch.Tensor):
        return min(given, vocab) if is_top_k else given
    rows = values.shape[0] if indices is None else indices.shape[0]
    if given.ndim > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for {name}, got a {given.ndim}D tensor.")
    if given.ndim == 0:
        raise ValueError(
            f"Expected a 1D tensor of shape (batch_size,) or scalar for {name}, got a 0-dimensional tensor."
        )
    if given.shape[0] != rows:
        raise ValueError(f"Sampling parameter tensor batch size mismatch: {name} has {given.shape[0]} for {rows} rows.")
    if not is_top_k:
        return given if given.dtype in _NUMBERS else given.float()
    given = given if given.dtype in _INTEGERS else given.int()
    # The kernels clamp top_k to the vocabulary size; the NumPy references raise instead.
    return given if given.is_cuda else given.clamp(max=vocab)


def _sample(
    function: Any, name: str, values: Any, filters: dict[str, Any], common_args: tuple[Any, ...], **options: Any
) -> Any:
    """Call `function`. `common_args` is the tuple (indices, generator, check_nan, seed, offset)."""
    indices, generator, check_nan, seed, offset = common_args
    _refuse_nan(check_nan, name, values)
    converted = [_convert_parameter(parameter, given, values, indices) for parameter, given in filters.items()]
    return function(values, *converted, indices=indices, **_random_args(generator, seed, offset), **options)


def softmax(logits: AnyArray, temperature: AnyArray | float | None = None, enable_pdl: bool | None = None) -> AnyArray:
    """Call `cukern.softmax`."""
    return cukern.softmax(logits, _convert_parameter("temperature", temperature, logits))


def sampling_from_logits(
    logits: AnyArray,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
) -> AnyArray:
    """Call `cukern.sampling_from_logits`. The ids have the dtype of `indices`, or int32 without `indices`."""
    common_args = indices, generator, check_nan, seed, offset
    return _sample(cukern.sampling_from_logits, "logits", logits, {}, common_args)


def sampling_from_probs(
    probs: AnyArray,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> AnyArray:
    """Call `cukern.sampling_from_probs`."""
    common_args = indices, generator, check_nan, seed, offset
    return _sample(cukern.sampling_from_probs, "probs", probs, {}, common_args, return_valid=return_valid)


def top_p_sampling_from_probs(
    probs: AnyArray,
    top_p: AnyArray | float,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> AnyArray:
    """Call `cukern.top_p_sampling_from_probs`."""
    common_args, filters = (indices, generator, check_nan, seed, offset), {"top_p": top_p}
    return _sample(cukern.top_p_sampling_from_probs, "probs", probs, filters, common_args, return_valid=return_valid)


def top_k_sampling_from_probs(
    probs: AnyArray,
    top_k: AnyArray | int,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> AnyArray:
    """Call `cukern.top_k_sampling_from_probs`."""
    common_args, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k}
    return _sample(cukern.top_k_sampling_from_probs, "probs", probs, filters, common_args, return_valid=return_valid)


def min_p_sampling_from_probs(
    probs: AnyArray,
    min_p: AnyArray | float,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> AnyArray:
    """Call `cukern.min_p_sampling_from_probs`."""
    common_args, filters = (indices, generator, check_nan, seed, offset), {"min_p": min_p}
    return _sample(cukern.min_p_sampling_from_probs, "probs", probs, filters, common_args, return_valid=return_valid)


def top_k_top_p_sampling_from_logits(
    logits: AnyArray,
    top_k: AnyArray | int,
    top_p: AnyArray | float,
    indices: AnyArray | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
) -> AnyArray:
    """Call `cukern.top_k_top_p_sampling_from_logits`."""
    common_args, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k, "top_p": top_p}
    options = {"filter_apply_order": filter_apply_order}
    return _sample(cukern.top_k_top_p_sampling_from_logits, "logits", logits, filters, common_args, **options)


def top_k_top_p_sampling_from_probs(
    probs: AnyArray,
    top_k: AnyArray | int,
    top_p: AnyArray | float,
    indices: AnyArray | None = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> AnyArray:
    """Call `cukern.top_k_top_p_sampling_from_probs`."""
    common_args, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k, "top_p": top_p}
    options = {"filter_apply_order": filter_apply_order, "return_valid": return_valid}
    return _sample(cukern.top_k_top_p_sampling_from_probs, "probs", probs, filters, common_args, **options)


def top_p_renorm_probs(probs: AnyArray, top_p: AnyArray | float, is_deterministic: bool = False) -> AnyArray:
    """Call `cukern.top_p_renorm_probs`."""
    return cukern.top_p_renorm_probs(probs, _convert_parameter("top_p", top_p, probs))


def top_k_renorm_probs(probs: AnyArray, top_k: AnyArray | int, is_deterministic: bool = False) -> AnyArray:
    """Call `cukern.top_k_renorm_probs`."""
    return cukern.top_k_renorm_probs(probs, _convert_parameter("top_k", top_k, probs))


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def top_k_mask_logits(logits: AnyArray, top_k: AnyArray | int) -> AnyArray:
    """Call `cukern.top_k_mask_logits`."""
    return cukern.top_k_mask_logits(logits, _convert_parameter("top_k", top_k, logits))


def chain_speculative_sampling(
    draft_probs: AnyArray,
    draft_token_ids: AnyArray,
    target_probs: AnyArray,
    maybe_output_accepted_token_num: AnyArray | None = None,
    maybe_output_emitted_draft_token_num: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Call `cukern.chain_speculative_sampling`. Add both token counts to the arrays `maybe_output_...`, if given."""
    draws = _random_args(generator, seed, offset)
    drafts = draft_token_ids.int() if isinstance(draft_token_ids, torch.Tensor) else draft_token_ids
    ids, accepted, emitted = cukern.chain_speculative_sampling(draft_probs, drafts, target_probs, **draws)
    if maybe_output_accepted_token_num is not None:
        accepted = maybe_output_accepted_token_num.add_(accepted)
    if maybe_output_emitted_draft_token_num is not None:
        emitted = maybe_output_emitted_draft_token_num.add_(emitted)
    return ids, accepted, emitted
