"""Time models of transformers beside every experts implementation of transformers: steps, prefills and generations.

Weights are random, in bfloat16. The wall clock times a step. Its cache holds `length` tokens of each sequence, and
grows by one token at each call. Tokens are random, so the tokens of a batch go to different experts. The stock model
shares its weights with the enabled model. Stock steps run as the stock `generate` runs them over a dynamic cache, and
compiled ("reduce-overhead") over a static cache.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Baseline, Case
from benchmarks.kernels import kernels_of

#: Steps until a cache starts again at its length.
STEPS = 2048
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
#: The fastest implementation of models with experts (compiled for one token), and the only one of dense models.
FASTEST = ("grouped_mm", "")
_NEW_TOKENS = 128
#: Limit in seconds for a compiled implementation. Others get half of it, and a whole generation three times as much.
_LIMIT_S = 40.0


@dataclass(frozen=True, eq=False)
class Models:
    """Two copies of a model with shared weights: `ours` is enabled, `stock` is unchanged."""

    name: str
    ours: Any
    stock: Any

    @property
    def is_moe(self) -> bool:
        return experts_of(self.stock.config) > 0


def experts_of(config: Any) -> int:
    return int(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0)


_kept: dict[tuple[str, torch.device], Models] = {}


def models(name: str, device: torch.device) -> Models:
    """Return a model by its configuration. It is kept until a case needs another model."""
    if (name, device) not in _kept:
        # A GPU cannot hold two of the largest models.
        _kept.clear()
        _our_step.cache_clear()
        gc.collect()
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _kept[name, device] = _made(name, device)
    return _kept[name, device]


def _made(name: str, device: torch.device) -> Models:
    from transformers import AutoModelForCausalLM

    import cukern.integrations.transformers as ck
    from cukern.integrations.transformers import _shapes

    ours = _shapes.random_model(_shapes.configuration(name), device=device)
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(_shapes.configuration(name), dtype=torch.bfloat16)
    stock.load_state_dict(ours.state_dict(), assign=True)
    _shapes._restore_angles(stock, device)
    stock.tie_weights()
    ck.enable(ours)
    return Models(name, ours, stock.eval())


def _ids(config: Any, batch: int, tokens: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), device=generator.device, generator=generator)


# --- what is read, and computed -------------------------------------------------------------------------


def bytes_of_step(config: Any, batch: int, length: int) -> int:
    """Return the bytes that a step must read, in bfloat16: active weights, the head, and the cache."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = hidden * head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    experts, topk = experts_of(config), getattr(config, "num_experts_per_tok", 0)
    inter = getattr(config, "moe_intermediate_size", None) if experts else None
    inter = inter or config.intermediate_size
    # The expected number of different experts if tokens choose at random.
    met = experts * (1 - (1 - topk / experts) ** batch) if experts else 1
    layer = attention + met * 3 * hidden * inter + experts * hidden
    cache = 2 * batch * length * config.num_key_value_heads * head_dim
    return int(2 * (layers * (layer + cache) + hidden * config.vocab_size))


def flops_of_tokens(config: Any, tokens: int, length: int) -> int:
    """Return the flops of a prefill of `tokens` in sequences of `length`, without the head, which sees few tokens."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    attention = hidden * head_dim * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    experts, topk = experts_of(config), getattr(config, "num_experts_per_tok", 0)
    inter = (getattr(config, "moe_intermediate_size", None) if experts else None) or config.intermediate_size
    layer = attention + (topk if experts else 1) * 3 * hidden * inter + experts * hidden
    scores = 2 * config.num_attention_heads * head_dim * length / 2
    return int(2 * tokens * layers * (layer + scores))


# --- steps ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _our_step(made: Models, batch: int, length: int) -> Callable[[], torch.Tensor]:
    """Return a step of `generate`'s session. After two runs it is a CUDA graph."""
    from cukern.integrations.transformers import _generate, _options

    state = made.ours.__dict__["_cukern"]
    state.sessions.clear()
    sampling = _options.Sampling()
    own = _generate._session(state, made.ours, batch, length + STEPS, sampling)
    device = next(made.ours.parameters()).device
    prompt = _ids(made.ours.config, batch, length, torch.Generator(device).manual_seed(1))
    left = 0
    with torch.no_grad():
        own.ready()

    @torch.no_grad()
    def step() -> torch.Tensor:
        nonlocal left
        if not left:
            own.prefill(list(prompt), 0, [0] * batch)
            left = STEPS - 1
        own.run()
        left -= 1
        return own.token

    return step


#: Steps of a compiled model before it is timed. It compiles and captures its graphs in these steps.
_COMPILES = 3


def _stock_step(implementation: str, compiled: bool) -> Callable[[], Callable[..., Any]]:
    def load() -> Callable[..., Any]:
        @functools.lru_cache(maxsize=1)  # prepare is called twice, and compiling takes half a minute
        def prepare(made: Models, batch: int, length: int) -> Callable[[], torch.Tensor]:
            from transformers import DynamicCache, StaticCache

            from cukern.integrations.transformers._cache import CACHE_NAME

            torch.compiler.reset()
            _set(made, implementation)
            device = next(made.stock.parameters()).device
            prompt = _ids(made.stock.config, batch, length, torch.Generator(device).manual_seed(1))
            forward = torch.compile(made.stock.forward, mode="reduce-overhead") if compiled else made.stock.forward
            left, cache, token, place = 0, None, prompt[:, -1:], torch.zeros(1, 1, dtype=torch.int64, device=device)

            @torch.no_grad()
            def step() -> torch.Tensor:
                nonlocal left, cache, token
                if not left:
                    config = made.stock.config
                    cache = StaticCache(config, length + STEPS) if compiled else DynamicCache(config=config)
                    out = made.stock(input_ids=prompt, use_cache=True, logits_to_keep=1, **{CACHE_NAME: cache})
                    place.fill_(length)
                    token, left = out.logits[:, -1:].argmax(-1), STEPS - 1
                out = forward(input_ids=token, position_ids=place, use_cache=True, **{CACHE_NAME: cache})
                token = out.logits[:, -1:].argmax(-1)
                place.add_(1)
                left -= 1
                return token

            for _ in range(_COMPILES if compiled else 0):
                step()
            return step

        return prepare

    return load


def _set(made: Models, implementation: str) -> None:
    # Free the memory of another implementation, which may have run out of memory.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    made.stock.set_attn_implementation("sdpa")
    if made.is_moe:
        made.stock.set_experts_implementation(implementation)


def _stocks(
    name: str,
    make: Callable[[str, bool], Callable[[], Callable[..., Any]]],
    compiles: bool,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    once: bool = False,
) -> dict[str, Baseline]:
    """Return the implementations of transformers, with and without torch.compile. A dense model has only one.

    The fastest implementation is not marked slow, so a quick run includes it.
    """
    from cukern.integrations.transformers._shapes import configuration

    names = implementations if experts_of(configuration(name)) else ("",)
    limit_s = _LIMIT_S * (3 if once else 1)
    return {
        f"transformers {own}".strip() + " compiled" * compiled: Baseline(
            make(own, compiled), slow=own not in FASTEST or compiled != compiles, prepared=True, once=once,
            limit_s=limit_s if compiled or once else _LIMIT_S / 2,
        )
        for compiled in ((False, True) if compiles else (False,))
        for own in names
    }  # fmt: skip


def agree(ours: Any, theirs: Any) -> bool:
    """Compare shapes only: with random weights small differences change the routing. The tests compare the models."""
    return bool(ours.shape == theirs.shape)


#: The parts of a step. A kernel belongs to the first part with a word that is in the kernel's name.
_PARTS = {
    "attention": ("attend",),
    "norms": ("rms_norm",),
    "heads and cache": ("norm_rotate_store", "rotary_embedding", "store_rows"),
    "dense products": ("stream_one", "nvjet", "cublas", "splitK", "gemv", "cutlass"),
    "gates": ("gate_by",),
    "experts": ("gemm_", "sort_", "permute_rows"),
}


def part_of(kernel: str) -> str:
    return next((part for part, words in _PARTS.items() if any(word in kernel for word in words)), "other")


def _parts(made: Models, batch: int, length: int) -> dict[str, float]:
    """Return the GPU time of each part of a step, by torch's profiler. A product that runs once is the head."""
    step = _our_step(made, batch, length)
    step()
    totals: dict[str, list[float]] = {}
    for name, us in kernels_of(step):
        totals.setdefault(name, []).append(us)
    parts: dict[str, float] = {}
    for name, times in totals.items():
        part = part_of(name)
        if part == "dense products" and len(times) == 1 and times[0] > 20:
            part = "head"
        parts[part] = parts.get(part, 0.0) + sum(times)
    return parts


def _step(name: str, batch: int, length: int = 1024) -> Case:
    from cukern.integrations.transformers._shapes import configuration

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return models(name, generator.device), batch, length

    def call(made: Models, batch: int, length: int) -> torch.Tensor:
        return _our_step(made, batch, length)()

    sizes: Mapping[str, int | str] = {
        "model": name,
        "phase": "step",
        "batch": batch,
        "length": length,
        "dtype": "bfloat16",
    }
    config = configuration(name)
    return Case(
        "generate", sizes, "graph", inputs, call, bytes_of_step(config, batch, length),
        baselines=_stocks(name, _stock_step, compiles=True), agree=agree, eager=True, parts=_parts,
    )  # fmt: skip


# --- prefill, and whole generations ---------------------------------------------------------------------


def _prefill(name: str, batch: int, length: int) -> Case:
    from cukern.integrations.transformers._shapes import configuration

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = models(name, generator.device)
        return made, _ids(made.stock.config, batch, length, generator)

    @torch.no_grad()
    def call(made: Models, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = made.ours(input_ids=ids, use_cache=True, logits_to_keep=1).logits
        return out

    def stock(implementation: str, compiled: bool) -> Callable[[], Callable[..., Any]]:
        def load() -> Callable[..., Any]:
            def prepare(made: Models, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
                _set(made, implementation)

                @torch.no_grad()
                def run() -> torch.Tensor:
                    out: torch.Tensor = made.stock(input_ids=ids, use_cache=True, logits_to_keep=1).logits
                    return out

                return run

            return prepare

        return load

    config = configuration(name)
    sizes: Mapping[str, int | str] = {
        "model": name,
        "phase": "prefill",
        "batch": batch,
        "length": length,
        "dtype": "bfloat16",
    }
    return Case(
        "generate", sizes, "prefill", inputs, call, bytes_of_step(config, batch * length, 0),
        flops=flops_of_tokens(config, batch * length, length), baselines=_stocks(name, stock, compiles=False),
        agree=agree, eager=True,
    )  # fmt: skip


def _whole(name: str, batch: int, length: int = 64) -> Case:
    """Return a case of a generation of 128 tokens with the public functions."""
    from cukern.integrations.transformers._shapes import configuration

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        made = models(name, generator.device)
        return made, _ids(made.stock.config, batch, length, generator)

    def call(made: Models, ids: torch.Tensor) -> torch.Tensor:
        import cukern.integrations.transformers as ck

        return torch.tensor(ck.generate(made.ours, ids, max_new_tokens=_NEW_TOKENS, eos_token_id=None).tokens)

    def stock(implementation: str, compiled: bool) -> Callable[[], Callable[..., Any]]:
        def load() -> Callable[..., Any]:
            def prepare(made: Models, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
                _set(made, implementation)
                options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}

                def run() -> torch.Tensor:
                    out: torch.Tensor = made.stock.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS, do_sample=False,
                        pad_token_id=0, eos_token_id=None, **options,
                    )  # fmt: skip
                    return out[:, ids.shape[1] :].cpu()

                return run

            return prepare

        return load

    config = configuration(name)
    steps = sum(bytes_of_step(config, batch, length + i) for i in range(_NEW_TOKENS))
    sizes: Mapping[str, int | str] = {
        "model": name, "phase": "generation", "batch": batch, "length": length, "steps": _NEW_TOKENS,
        "dtype": "bfloat16",
    }  # fmt: skip
    return Case(
        "generate", sizes, "graph", inputs, call, steps, agree=agree, eager=True,
        # A stock call takes ten seconds or more, so only the fastest implementation runs, once. The rows of steps show
        # how much slower the other implementations are.
        baselines=_stocks(name, stock, compiles=True, implementations=("grouped_mm",), once=True),
    )  # fmt: skip


def cases() -> list[Case]:
    """Return cases: 12 layers of Qwen3-30B-A3B with the head, all 48 layers, Mixtral-8x7B, and the dense Qwen3-0.6B."""
    twelve = "qwen3-30b-a3b-12-layers"
    return [
        _step(twelve, 1),
        _prefill(twelve, 16, 1024),
        _step(twelve, 16),
        _whole("qwen3-30b-a3b", 1),
        _step("mixtral-8x7b", 1),
        _step("qwen3-0.6b", 1),
        _whole("qwen3-0.6b", 1),
    ]
