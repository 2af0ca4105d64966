"""The options of `generate`. Its arguments override the model's generation_config, as in transformers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from cukern.runtime import check

#: Maximum new tokens if nothing else limits them.
DEFAULT_NEW_TOKENS = 128
#: Unsupported settings, and for each setting the values that have no effect.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "typical_p": (1.0,), "top_h": (),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "guidance_scale": (1.0,), "watermarking_config": (),
    "token_healing": (False,), "max_time": (), "stop_strings": (), "prompt_lookup_num_tokens": (), "use_mtp": (False,),
    "penalty_alpha": (0.0,), "dola_layers": (), "constraints": (), "force_words_ids": (), "assistant_early_exit": (),
}  # fmt: skip
#: Settings that need logits processors of transformers, and for each setting the values that have no effect.
_PROCESSED: dict[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,), "bad_words_ids": (), "sequence_bias": (), "suppress_tokens": (),
    "begin_suppress_tokens": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (), "remove_invalid_values": (False,),
    "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,),
}  # fmt: skip
#: The sampling filters, and the values that turn them off.
_UNLIMITED: dict[str, tuple[float, ...]] = {"top_k": (0, -1), "top_p": (1.0,), "min_p": (0.0,)}
#: Further accepted settings.
_ACCEPTED = "min_length", "use_cache", "bos_token_id", "renormalize_logits", "early_stopping", "length_penalty"


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters. A CUDA graph contains their values."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    delays_stop: bool = False  # whether min_new_tokens forbids stop tokens at first


@dataclass
class Options:
    sampling: Sampling
    max_new_tokens: list[int]  # of each prompt
    min_new_tokens: list[int]  # of each prompt
    config: GenerationConfig  # for transformers' logits processors
    processed: str  # a setting that needs a logits processor, or empty


def _stop_tokens(given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    many = [given] if isinstance(given, int) else list(given)
    return tuple(check.integer("eos_token_id", x, 0) for x in many)


def _is_unlimited(name: str, value: Any, vocab: int) -> bool:
    """Return whether a value turns a filter off in vLLM, SGLang, FlashInfer or transformers."""
    if value is None:
        return True
    if isinstance(value, (bool, str)):
        return False
    return value in _UNLIMITED[name] or (name == "top_k" and value >= vocab) or (name == "top_p" and value >= 1)


def _check_known(options: dict[str, Any]) -> None:
    known = GenerationConfig()
    for name, value in options.items():
        if not hasattr(known, name) or name.startswith("_"):
            taken = "its own arguments and the settings of a GenerationConfig"
            raise TypeError(f"generate of cukern takes {taken}, got {name}")
        if name in _REFUSED or name in _PROCESSED or name in _ACCEPTED:
            continue
        if value is not None and value is not False and value != getattr(known, name):
            check.fail(name, "left out, since generate of cukern does not serve it", repr(value))


def _merged(model: Any, generation_config: Any, options: dict[str, Any]) -> GenerationConfig:
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        check.fail("generation_config", "a GenerationConfig", type(generation_config).__name__, TypeError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config, _ = model._prepare_generation_config(generation_config, **options)
    for name, neutral in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            wanted = f"{neutral[0]}" if neutral else "None"
            check.fail(name, f"{wanted}, since generate of cukern does not serve it", repr(value))
    return config  # type: ignore[no-any-return]


def _needs_processor(config: GenerationConfig) -> str:
    for name, neutral in _PROCESSED.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            return name
    return ""


def _sampling_parameters(config: GenerationConfig, given: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Return the sampling parameters. A temperature above 0 implies sampling if `do_sample` is not given."""
    asked = given["temperature"]
    temperature = float(check.number("temperature", config.temperature if asked is None else asked))
    if temperature < 0:
        check.fail("temperature", "at least 0", temperature)
    samples = given["do_sample"]
    if samples is None:
        samples = config.do_sample if asked is None else True
    if not samples or temperature == 0:
        return {"temperature": 0.0}
    values = {name: getattr(config, name) if given[name] == "model" else given[name] for name in _UNLIMITED}
    found = {name: None if _is_unlimited(name, value, vocab) else value for name, value in values.items()}
    return {"temperature": temperature, **found}


def _first(name: str, low: int, *values: Any) -> int | None:
    """Return the first value that is not None."""
    value = next((x for x in values if x is not None), None)
    return None if value is None else check.integer(name, value, low, 2**24)


def _lengths(
    model: Any, generation_config: Any, given: dict[str, Any], prompts: list[int], limit: int | None
) -> tuple[list[int], list[int]]:
    def found(name: str, low: int) -> int | None:
        values = (getattr(x, name, None) for x in (generation_config, model.generation_config))
        return _first(name, low, given.get(name), *values)

    new, length = found("max_new_tokens", 1), found("max_length", 1)
    if new is not None:
        max_new_tokens = [new] * len(prompts)
    elif length is not None:
        if max(prompts) >= length:
            check.fail("max_length", f"more than the longest prompt has, {max(prompts)} tokens", length)
        max_new_tokens = [length - x for x in prompts]
    else:
        max_new_tokens = [
            DEFAULT_NEW_TOKENS if limit is None else max(1, min(DEFAULT_NEW_TOKENS, limit - x)) for x in prompts
        ]
    longest = max(x + new for x, new in zip(prompts, max_new_tokens, strict=True))
    if limit is not None and longest > limit:
        check.fail("prompts", f"of at most {limit} tokens with the new ones (max_position_embeddings)", longest)
    min_new_tokens = found("min_new_tokens", 0) or 0
    min_length = 0 if min_new_tokens else found("min_length", 0) or 0
    return max_new_tokens, [max(min_new_tokens, min_length - x) for x in prompts]


def resolve(
    model: Any, prompts: list[int], vocab: int, limit: int | None, given: dict[str, Any], others: dict[str, Any]
) -> Options:
    """Combine all settings of a `generate` call. `prompts` contains the prompts' lengths.

    `given` contains the named arguments, and `others` the settings of a GenerationConfig. Raises TypeError or
    ValueError for unsupported settings.
    """
    others = dict(others)
    generation_config = others.pop("generation_config", None)
    _check_known(others)
    max_new_tokens, min_new_tokens = _lengths(model, generation_config, {**others, **given}, prompts, limit)
    merged = {name: given[name] for name in ("do_sample", "repetition_penalty") if given[name] is not None}
    if given["eos_token_id"] != "model":
        stop = _stop_tokens(given["eos_token_id"])
        if max(stop, default=0) >= vocab:
            check.fail("eos_token_id", f"in the vocabulary of {vocab}", max(stop))
        merged["eos_token_id"] = list(stop) or None
    config = _merged(model, generation_config, {**others, **merged})
    # A generation_config may contain stop tokens outside the vocabulary.
    stop = tuple(x for x in _stop_tokens(config.eos_token_id) if x < vocab)
    penalty = (
        1.0
        if config.repetition_penalty is None
        else float(check.number("repetition_penalty", config.repetition_penalty))
    )
    if penalty <= 0:
        check.fail("repetition_penalty", "above 0", penalty)
    sampling = Sampling(
        **_sampling_parameters(config, given, vocab),
        stop=stop,
        repetition_penalty=penalty,
        delays_stop=bool(stop) and max(min_new_tokens) > 0,
    )
    return Options(sampling, max_new_tokens, min_new_tokens, config, _needs_processor(config))
