"""Time sampling beside its floor (one read of the row), PyTorch, FlashInfer and SGLang.

The logits are normally distributed. They have no peak, so top-p keeps tens of thousands of tokens and needs all rounds.
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
# The share of a probability that may depend on the order of a sum.
_LAST_TOKEN = 1e-3
# The allowed deviation of the mean of uniform numbers, in standard deviations.
_DEVIATIONS = 6
_WHOLE_ROWS = ("softmax", "top_k_renorm_probs", "top_p_renorm_probs")


# --- the same from torch operators ----------------------------------------------------------------------


def _drawn(probs: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(probs, 1)[:, 0]


def eager_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Compute the softmax, then draw."""
    return _drawn(logits.float().softmax(dim=-1))


def eager_race(logits: torch.Tensor) -> torch.Tensor:
    """Draw with the Gumbel-max trick. A compiler can fuse all of it into the pass that finds the largest number."""
    times = torch.empty_like(logits, dtype=torch.float32).exponential_()
    return (logits.float() - times.log()).argmax(dim=-1)


def eager_top_k(probs: torch.Tensor) -> torch.Tensor:
    """Draw from the k best tokens."""
    best, ids = probs.topk(TOP_K, dim=-1)
    return ids.gather(1, torch.multinomial(best, 1))[:, 0]


def eager_top_p(probs: torch.Tensor) -> torch.Tensor:
    """Sort the tokens, and draw from the tokens before which the sum has not reached p."""
    best, ids = probs.sort(dim=-1, descending=True)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_joint(logits: torch.Tensor) -> torch.Tensor:
    """Draw from the k best tokens before which the sum has not reached p."""
    best, ids = logits.float().softmax(dim=-1).topk(TOP_K, dim=-1)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_sample(logits: torch.Tensor) -> torch.Tensor:
    """Apply the temperature, then top-k, then top-p of the rest, and draw."""
    best, ids = logits.float().topk(TOP_K, dim=-1)
    best = (best / TEMPERATURE).softmax(dim=-1)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return ids.gather(1, torch.multinomial(kept, 1))[:, 0]


def eager_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(dim=-1)


def eager_top_k_renorm(probs: torch.Tensor) -> torch.Tensor:
    best, ids = probs.topk(TOP_K, dim=-1)
    return torch.zeros_like(probs).scatter_(1, ids, best / best.sum(dim=-1, keepdim=True))


def eager_top_p_renorm(probs: torch.Tensor) -> torch.Tensor:
    best, ids = probs.sort(dim=-1, descending=True)
    kept = best.masked_fill(best.cumsum(dim=-1) - best >= TOP_P, 0)
    return torch.zeros_like(probs).scatter_(1, ids, kept / kept.sum(dim=-1, keepdim=True))


# --- the baselines ----------------------------------------------------------------------------------------


def _torch(function: Call) -> Baseline:
    return Baseline(lambda: function)


def _compiled(function: Call) -> Baseline:
    def load() -> Call:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def _flashinfer(call: Callable[[Any, torch.Tensor], torch.Tensor]) -> Baseline:
    """Return a baseline of FlashInfer. `call` takes the module `flashinfer.sampling`."""

    def load() -> Call:
        from flashinfer import sampling

        return lambda values: call(sampling, values)

    return Baseline(load)


# Pass a seed and an offset, because a capture cannot read them from a generator.
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
}


def _flashinfer_sample() -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """Return FlashInfer's decoding step, with a `top_k` for each row as in a server."""
    from flashinfer import sampling

    def prepare(logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        top_k = torch.full((len(logits),), TOP_K, dtype=torch.int32, device=logits.device)
        function = sampling.top_k_top_p_sampling_from_logits
        return lambda: function(logits.float() / TEMPERATURE, top_k, TOP_P, **_STREAM)

    return prepare


def _sglang_top_k_renorm() -> Call:
    from sgl_kernel import top_k_renorm_prob

    return lambda probs: top_k_renorm_prob(probs, TOP_K)


def _sglang_top_p_renorm() -> Call:
    from sgl_kernel import top_p_renorm_prob

    return lambda probs: top_p_renorm_prob(probs, TOP_P)


#: Kernels of FlashInfer 0.7 and sglang-kernel 0.4.
PEERS: Mapping[str, Mapping[str, Baseline]] = {
    **{op: {"FlashInfer": _flashinfer(call)} for op, call in FLASHINFER.items()},
    "sample": {"FlashInfer": Baseline(_flashinfer_sample, prepared=True)},
    "top_k_renorm_probs": {"SGLang": Baseline(_sglang_top_k_renorm)},
    "top_p_renorm_probs": {"SGLang": Baseline(_sglang_top_p_renorm)},
}
TORCH: Mapping[str, Call] = {
    "sampling_from_logits": eager_from_logits,
    "sampling_from_probs": _drawn,
    "top_k_sampling_from_probs": eager_top_k,
    "top_p_sampling_from_probs": eager_top_p,
    "top_k_top_p_sampling_from_logits": eager_joint,
    "softmax": eager_softmax,
    "sample": eager_sample,
    "top_k_renorm_probs": eager_top_k_renorm,
    "top_p_renorm_probs": eager_top_p_renorm,
}
COMPILED: Mapping[str, Call] = {"sampling_from_logits": eager_race, "softmax": eager_softmax}


def same_probabilities(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-8)


def same_but_for_one(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether probabilities agree up to one last token, which rounding of the sum may keep or drop."""
    return bool((ours - theirs).abs().sum(dim=-1).max() < _LAST_TOKEN)


def kept_probabilities(op: str, values: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the tokens that the op's filters keep, 0 elsewhere."""
    probs = values.float()
    if not op.endswith("_from_probs"):
        probs = (probs / TEMPERATURE if op == "sample" else probs).softmax(dim=-1)
    best, ids = probs.sort(dim=-1, descending=True)
    kept = best
    if "top_k" in op or op == "sample":
        # A token that ties with the last kept token may replace it.
        kept = best * (best >= best[:, TOP_K - 1 : TOP_K])
    if "top_p" in op or op == "sample":
        of = kept / kept.sum(dim=-1, keepdim=True) if op == "sample" else best
        kept = kept * (of.cumsum(dim=-1) - of < TOP_P + _LAST_TOKEN)
        least = kept.masked_fill(kept == 0, torch.inf).amin(dim=-1, keepdim=True)
        kept = best * (best >= least)  # including ties with the last kept token
    return torch.zeros_like(probs).scatter_(1, ids, kept)


def plausible(op: str) -> Callable[[tuple[Any, ...], torch.Tensor], bool]:
    """Return a function that decides whether the op may have drawn tokens.

    Each library draws other tokens. Take the tokens that are more probable than the drawn token: their share of the
    kept probability is uniform between 0 and 1, so its mean over the rows is near 1/2. The mean is not checked for
    `sample`, because with one seed all rows have the same share.
    """

    def right(inputs: tuple[Any, ...], ids: torch.Tensor) -> bool:
        kept = kept_probabilities(op, inputs[0])
        index = ids.long()[:, None]
        if ids.shape != kept.shape[:1] or not bool(((index >= 0) & (index < kept.shape[1])).all()):
            return False
        drawn = kept.gather(1, index)
        above, beside = (kept * (kept > drawn)).sum(dim=1), (kept * (kept == drawn)).sum(dim=1)
        places = (above + beside / 2) / kept.sum(dim=1)
        return bool((drawn > 0).all()) and (
            op == "sample" or abs(float(places.mean()) - 0.5) < _DEVIATIONS * (12 * len(ids)) ** -0.5
        )

    return right


# --- the cases ----------------------------------------------------------------------------------------------


def _call(op: str, variant: str, seeded: bool = True) -> Call:
    arguments: tuple[Any, ...] = {
        "top_k_sampling_from_probs": (TOP_K,),
        "top_p_sampling_from_probs": (TOP_P,),
        "top_k_top_p_sampling_from_logits": (TOP_K, TOP_P),
        "top_k_renorm_probs": (TOP_K,),
        "top_p_renorm_probs": (TOP_P,),
    }.get(op, ())
    options: dict[str, Any] = {} if op in _WHOLE_ROWS or not seeded else {"seed": SEED}
    if op == "top_k_top_p_sampling_from_logits":
        options["filter_apply_order"] = "joint"
    if op == "sample":
        options |= {"temperature": TEMPERATURE, "top_k": TOP_K, "top_p": TOP_P}
    function = getattr(cukern, op)
    # The CPU, where the tests run, has no variants.
    return lambda values: function(values, *arguments, **options, variant=variant if values.is_cuda else "auto")


def _case(
    op: str, batch: int, vocab: int = VOCAB, dtype: str = "float32", variant: str = "cluster", seeded: bool = True
) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        values = torch.randn(batch, vocab, device=generator.device, generator=generator)
        if op.endswith("_probs"):
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
    if not seeded:
        # In a graph a separate kernel draws torch's seed.
        case["seed"] = "torch's generator"

    baselines = {"torch": _torch(TORCH[op])}
    if op in COMPILED and (batch, vocab, dtype) == (64, VOCAB, "float32"):
        baselines["torch.compile"] = _compiled(COMPILED[op])
    read = batch * vocab * ITEM_SIZE[dtype]
    return Case(
        op,
        case,
        variant,
        inputs,
        _call(op, variant, seeded),
        read + batch * vocab * 4 if op in _WHOLE_ROWS else read + batch * 4,
        baselines=baselines,
        peers=PEERS[op] if seeded else {},
        agree={"softmax": same_probabilities}.get(op, same_but_for_one) if op in _WHOLE_ROWS else None,
        right=None if op in _WHOLE_ROWS else plausible(op),
        host=batch == 64 and vocab == VOCAB and op in ("sampling_from_logits", "sample"),
    )


def eager_largest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=-1)


def largest(inputs: tuple[Any, ...], ids: torch.Tensor) -> bool:
    """Return whether the ids are ids of largest logits; torch may return any of several equal ones."""
    (logits,) = inputs
    return torch.equal(logits.gather(1, ids.long()[:, None])[:, 0], logits.amax(dim=-1))


def _greedy_case(batch: int, vocab: int, dtype: str, variant: str) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return (torch.randn(batch, vocab, device=generator.device, generator=generator).to(getattr(torch, dtype)),)

    def call(logits: torch.Tensor) -> torch.Tensor:
        form = variant if logits.is_cuda else "auto"
        ids: torch.Tensor = cukern.sample(logits, temperature=0, seed=SEED, variant=form)
        return ids

    case: dict[str, int | str] = {"batch": batch, "vocab": vocab, "temperature": 0, "dtype": dtype}
    size = batch * vocab * ITEM_SIZE[dtype] + batch * 4
    baselines = {"torch": Baseline(lambda: eager_largest)}
    return Case("sample", case, variant, inputs, call, size, baselines=baselines, right=largest)


def _variant() -> str:
    """Return the variant for large vocabularies on this GPU."""
    clusters = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (9, 0)
    return "cluster" if clusters else "block"


def cases() -> list[Case]:
    """Return cases: Llama 3's vocabulary in float32 (three batch sizes) and bfloat16 (one), a vocabulary of 32000, and
    greedy steps of Qwen3."""
    variant = _variant()

    def all_cases() -> Iterator[Case]:
        for op in TORCH:
            if op == "sample":
                continue
            for batch in BATCHES:
                yield _case(op, batch, variant=variant)
        yield _case("sampling_from_logits", 64, dtype="bfloat16", variant=variant)
        yield _case("sampling_from_logits", 64, variant=variant, seeded=False)
        yield _case("sample", 64, dtype="bfloat16", variant=variant)
        # A step of Qwen3 at temperature 0, for one sequence and for many.
        for batch in (1, 64):
            yield _greedy_case(batch, 151_936, "bfloat16", variant)
        yield _case("top_k_top_p_sampling_from_logits", 64, SMALL_VOCAB, variant=variant)

    return list(all_cases())
