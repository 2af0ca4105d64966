"""FlashInfer's `flashinfer.sampling`: the names, orders and defaults of the arguments, and the results.

The signatures are those of flashinfer-python 0.7.2.post1. All functions of that module are covered.

What differs: the tokens that a seed gives are cukern's. All draws are deterministic, so `deterministic` and
`is_deterministic` change nothing; nor does `enable_pdl`, which speaks of the launch. Ties at a threshold of top-k go to
the lower id, so exactly k tokens are kept. `check_nan` waits for the device, as in FlashInfer. A row without a seed of
its own draws by its index too. Without `seed`, the draw takes its numbers from `generator`, or from torch's default one
for the device (one more launch), so `torch.manual_seed` counts, also in a CUDA graph.
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

__getattr__ = not_covered("cukern.compat.flashinfer.sampling", ("get_seed_and_offset",), __all__)

#: An odd number far from all small ones (2**64 divided by the golden ratio, signed): rows get seeds this far apart.
_STEP = 0x9E3779B97F4A7C15 - 2**64


def _draws(values: Any, indices: Any, generator: Any, seed: Any, offset: Any) -> dict[str, Any]:
    """`seed` and `offset` of a draw with a stream of its own for each row, unless it has a seed of its own."""
    rows = values.shape[0] if indices is None else indices.shape[0]
    on = {"dtype": torch.int64, "device": values.device}
    if seed is None:
        return {"seed": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator, **on), "offset": 0}
    if isinstance(offset, torch.Tensor) and offset.numel() == 1:
        offset = offset.reshape(())
    if isinstance(seed, torch.Tensor):
        if seed.numel() != 1:
            return {"seed": seed, "offset": 0 if offset is None else offset}
        first = seed.reshape(())
    else:
        seed = int(seed) % 2**64
        first = seed - 2**64 if seed >= 2**63 else seed
    return {"seed": torch.arange(rows, **on) * _STEP + first, "offset": 0 if offset is None else offset}


def _refuse_nan(check_nan: bool, name: str, values: Any) -> None:
    if check_nan and bool(torch.any(torch.isnan(values))):
        raise ValueError(f"Input {name} contains NaN.")


def _parameter(name: str, given: Any, values: Any, indices: Any = None) -> Any:
    """A parameter as cukern takes it: top-k at most the vocabulary, the others in float32.

    Raises ValueError, with FlashInfer's words, for a tensor that is not [batch].
    """
    vocab, counts = values.shape[-1], name == "top_k"
    if not isinstance(given, torch.Tensor):
        return min(given, vocab) if counts else given
    rows = values.shape[0] if indices is None else indices.shape[0]
    if given.ndim > 1:
        raise ValueError(f"Expected a 1D tensor or scalar for {name}, got a {given.ndim}D tensor.")
    if given.ndim == 0:
        raise ValueError(
            f"Expected a 1D tensor of shape (batch_size,) or scalar for {name}, got a 0-dimensional tensor."
        )
    if given.shape[0] != rows:
        raise ValueError(f"Sampling parameter tensor batch size mismatch: {name} has {given.shape[0]} for {rows} rows.")
    if not counts:
        return given.float()
    # The kernels clamp; the twins, which can see the numbers, refuse.
    return given if given.is_cuda else given.clamp(max=vocab)


def _drawn(
    function: Any, name: str, values: Any, filters: dict[str, Any], draw: tuple[Any, ...], **options: Any
) -> Any:
    """Draw ids of the dtype of `indices`; `draw` is (indices, generator, check_nan, seed, offset)."""
    indices, generator, check_nan, seed, offset = draw
    _refuse_nan(check_nan, name, values)
    converted = [_parameter(each, given, values, indices) for each, given in filters.items()]
    found = function(values, *converted, indices=indices, **options, **_draws(values, indices, generator, seed, offset))
    if indices is None:
        return found
    ids, *more = found if isinstance(found, tuple) else (found,)
    ids = ids.to(indices.dtype)
    return (ids, *more) if more else ids


def softmax(logits: AnyArray, temperature: AnyArray | float | None = None, enable_pdl: bool | None = None) -> AnyArray:
    """`cukern.softmax`."""
    return cukern.softmax(logits, _parameter("temperature", temperature, logits))


def sampling_from_logits(
    logits: AnyArray,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
) -> AnyArray:
    """`cukern.sampling_from_logits`; ids int32, or of the dtype of `indices`."""
    draw = indices, generator, check_nan, seed, offset
    return _drawn(cukern.sampling_from_logits, "logits", logits, {}, draw)


def sampling_from_probs(
    probs: AnyArray,
    indices: AnyArray | None = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: int | AnyArray | None = None,
    offset: int | AnyArray | None = None,
    return_valid: bool = False,
) -> Any:
    """`cukern.sampling_from_probs`; with `return_valid` a pair (ids, valid)."""
    draw = indices, generator, check_nan, seed, offset
    return _drawn(cukern.sampling_from_probs, "probs", probs, {}, draw, return_valid=return_valid)


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
) -> Any:
    """`cukern.top_p_sampling_from_probs`; with `return_valid` a pair (ids, valid)."""
    draw, filters = (indices, generator, check_nan, seed, offset), {"top_p": top_p}
    return _drawn(cukern.top_p_sampling_from_probs, "probs", probs, filters, draw, return_valid=return_valid)


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
) -> Any:
    """`cukern.top_k_sampling_from_probs`; with `return_valid` a pair (ids, valid)."""
    draw, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k}
    return _drawn(cukern.top_k_sampling_from_probs, "probs", probs, filters, draw, return_valid=return_valid)


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
) -> Any:
    """`cukern.min_p_sampling_from_probs`; with `return_valid` a pair (ids, valid)."""
    draw, filters = (indices, generator, check_nan, seed, offset), {"min_p": min_p}
    return _drawn(cukern.min_p_sampling_from_probs, "probs", probs, filters, draw, return_valid=return_valid)


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
    """`cukern.top_k_top_p_sampling_from_logits`."""
    draw, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k, "top_p": top_p}
    options = {"filter_apply_order": filter_apply_order}
    return _drawn(cukern.top_k_top_p_sampling_from_logits, "logits", logits, filters, draw, **options)


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
) -> Any:
    """`cukern.top_k_top_p_sampling_from_probs`; with `return_valid` a pair (ids, valid)."""
    draw, filters = (indices, generator, check_nan, seed, offset), {"top_k": top_k, "top_p": top_p}
    options = {"filter_apply_order": filter_apply_order, "return_valid": return_valid}
    return _drawn(cukern.top_k_top_p_sampling_from_probs, "probs", probs, filters, draw, **options)


def top_p_renorm_probs(probs: AnyArray, top_p: AnyArray | float, is_deterministic: bool = False) -> AnyArray:
    """`cukern.top_p_renorm_probs`."""
    return cukern.top_p_renorm_probs(probs, _parameter("top_p", top_p, probs))


def top_k_renorm_probs(probs: AnyArray, top_k: AnyArray | int, is_deterministic: bool = False) -> AnyArray:
    """`cukern.top_k_renorm_probs`."""
    return cukern.top_k_renorm_probs(probs, _parameter("top_k", top_k, probs))


top_p_renorm_prob = top_p_renorm_probs
top_k_renorm_prob = top_k_renorm_probs


def top_k_mask_logits(logits: AnyArray, top_k: AnyArray | int) -> AnyArray:
    """`cukern.top_k_mask_logits`."""
    return cukern.top_k_mask_logits(logits, _parameter("top_k", top_k, logits))


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
    """`cukern.chain_speculative_sampling`; counts are added to the arrays that are given for them."""
    draws = _draws(draft_probs, None, generator, seed, offset)
    drafts = draft_token_ids.int() if isinstance(draft_token_ids, torch.Tensor) else draft_token_ids
    ids, accepted, emitted = cukern.chain_speculative_sampling(draft_probs, drafts, target_probs, **draws)
    if maybe_output_accepted_token_num is not None:
        accepted = maybe_output_accepted_token_num.add_(accepted)
    if maybe_output_emitted_draft_token_num is not None:
        emitted = maybe_output_emitted_draft_token_num.add_(emitted)
    return ids, accepted, emitted
