"""Sampling against its floor, one read of the row, and against PyTorch and FlashInfer.

The logits are normally distributed: with no peak, top-p keeps tens of thousands of tokens and needs all its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

Inputs = Callable[[torch.Generator], tuple[Any, ...]]
Call = Callable[[torch.Tensor], torch.Tensor]

BATCHES = (1, 64, 256)
VOCAB, SMALL_VOCAB = 128256, 32000
TOP_K, TOP_P, TEMPERATURE = 40, 0.9, 0.8
SEED = 1


# --- the same from torch operators ----------------------------------------------------------------------


def _drawn(probs: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(probs, 1)[:, 0]


def eager_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Softmax, then a draw."""
    return _drawn(logits.float().softmax(dim=-1))


def eager_race(logits: torch.Tensor) -> torch.Tensor:
    """The Gumbel-max trick, all of which can be fused into the pass that finds the largest."""
    times = torch.empty_like(logits, dtype=torch.float32).exponential_()
    return (logits.float() - times.log()).argmax(dim=-1)


def eager_top_k(probs: torch.Tensor) -> torch.Tensor:
    """A draw from the k best."""
    best, ids = probs.topk(TOP_K, dim=-1)
    return ids.gather(1, torch.multinomial(best, 1))[:, 0]


def eager_top_p(probs: torch.Tensor) -> torch.Tensor:
    """A draw from the sorted tokens before which the sum has not reached p."""
    best, ids = probs.sort(dim=-1, descending=True)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_joint(logits: torch.Tensor) -> torch.Tensor:
    """A draw from those of the k best before which the sum has not reached p."""
    best, ids = logits.float().softmax(dim=-1).topk(TOP_K, dim=-1)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_sample(logits: torch.Tensor) -> torch.Tensor:
    """Temperature, then top-k, then top-p of what is left."""
    best, ids = logits.float().topk(TOP_K, dim=-1)
    best = (best / TEMPERATURE).softmax(dim=-1)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(dim=-1)


# --- the baselines ----------------------------------------------------------------------------------------


def _torch(function: Call) -> Baseline:
    return Baseline(lambda: function)


def _compiled(function: Call) -> Baseline:
    def load() -> Call:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _flashinfer(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Baseline:
    """`call` gets the module `flashinfer.sampling`."""

    def load() -> Call:
        from flashinfer import sampling

        return lambda values: call(sampling, values)

    return Baseline(load)


# A seed and an offset, because a generator cannot be asked for its own during a capture.
_STREAM = {"seed": SEED, "offset": 0}

FLASHINFER: Mapping[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "sampling_from_logits": lambda lib, logits: lib.sampling_from_logits(logits, **_STREAM),
    "sampling_from_probs": lambda lib, probs: lib.sampling_from_probs(probs, **_STREAM),
    "top_k_sampling_from_probs": lambda lib, probs: lib.top_k_sampling_from_probs(probs, TOP_K, **_STREAM),
    "top_p_sampling_from_probs": lambda lib, probs: lib.top_p_sampling_from_probs(probs, TOP_P, **_STREAM),
    "top_k_top_p_sampling_from_logits": lambda lib, logits: lib.top_k_top_p_sampling_from_logits(
        logits, TOP_K, TOP_P, filter_apply_order="joint", **_STREAM
    ),
    "softmax": lambda lib, logits: lib.softmax(logits),
    "sample": lambda lib, logits: lib.top_k_top_p_sampling_from_logits(
        logits.float() / TEMPERATURE, TOP_K, TOP_P, **_STREAM
    ),
}
TORCH: Mapping[str, Call] = {
    "sampling_from_logits": eager_from_logits,
    "sampling_from_probs": _drawn,
    "top_k_sampling_from_probs": eager_top_k,
    "top_p_sampling_from_probs": eager_top_p,
    "top_k_top_p_sampling_from_logits": eager_joint,
    "softmax": eager_softmax,
    "sample": eager_sample,
}
COMPILED: Mapping[str, Call] = {"sampling_from_logits": eager_race, "softmax": eager_softmax}


def same_probabilities(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-8)


# --- the cases ----------------------------------------------------------------------------------------------


def _call(op: str, variant: str) -> Call:
    arguments: tuple[Any, ...] = {
        "top_k_sampling_from_probs": (TOP_K,),
        "top_p_sampling_from_probs": (TOP_P,),
        "top_k_top_p_sampling_from_logits": (TOP_K, TOP_P),
    }.get(op, ())
    options: dict[str, Any] = {} if op == "softmax" else {"seed": SEED}
    if op == "top_k_top_p_sampling_from_logits":
        options["filter_apply_order"] = "joint"
    if op == "sample":
        options |= {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
    function = getattr(cukern, op)
    # On the CPU, where the tests run this, there are no variants.
    return lambda values: function(values, *arguments, **options, variant=variant if values.is_cuda else "auto")


def _case(op: str, batch: int, vocab: int = VOCAB, dtype: str = "float32", variant: str = "cluster") -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        values = torch.randn(batch, vocab, device=generator.device, generator=generator)
        if op.endswith("_from_probs"):
            values = values.softmax(dim=-1)
        return (values.to(getattr(torch, dtype)),)

    case: dict[str, int | str] = {"batch": batch, "vocab": vocab}
    if "top_k" in op or op == "sample":
        case["top_k"] = TOP_K
    if "top_p" in op or op == "sample":
        case["top_p"] = str(TOP_P)
    if op == "sample":
        case["temperature"] = str(TEMPERATURE)
    case["dtype"] = dtype

    baselines = {"torch": _torch(TORCH[op]), "FlashInfer": _flashinfer(FLASHINFER[op])}
    if op in COMPILED and (batch, vocab, dtype) == (64, VOCAB, "float32"):
        baselines["torch.compile"] = _compiled(COMPILED[op])
    read = batch * vocab * ITEM_SIZE[dtype]
    return Case(
        op,
        case,
        variant,
        inputs,
        _call(op, variant),
        read + batch * vocab * 4 if op == "softmax" else read + batch * 4,
        baselines=baselines,
        # Which tokens are drawn is each library's own affair.
        agree=same_probabilities if op == "softmax" else None,
        host=batch == 64 and vocab == VOCAB and op in ("sampling_from_logits", "sample"),
    )


def _variant() -> str:
    """The kernel for large vocabularies on this GPU."""
    clusters = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
    return "cluster" if clusters else "block"


def cases() -> list[Case]:
    """Llama 3's vocabulary at three batch sizes in float32, its logits in bfloat16, and a vocabulary of 32000."""
    variant = _variant()

    def all_cases() -> Iterator[Case]:
        for op in TORCH:
            if op == "sample":
                continue
            for batch in BATCHES:
                yield _case(op, batch, variant=variant)
        yield _case("sampling_from_logits", 64, dtype="bfloat16", variant=variant)
        yield _case("sample", 64, dtype="bfloat16", variant=variant)
        yield _case("top_k_top_p_sampling_from_logits", 64, SMALL_VOCAB, variant=variant)

    return list(all_cases())
