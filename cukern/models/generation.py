"""Check the settings of a call, which have the names of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cukern.models.checkpoint import content
from cukern.runtime import check

DEFAULTS: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "do_sample": False,
    "max_length": None,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": None,
    "early_stopping": False,
    "length_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "renormalize_logits": False,
    "decoder_start_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
#: The default of transformers.
_DEFAULT_NEW_TOKENS = 20
#: The settings that are not implemented, and for each setting the values that have no effect.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "constraints": (),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": (),
    "guidance_scale": (1,),
    "max_time": (),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "prompt_lookup_num_tokens": (),
    "remove_invalid_values": (False,),
    "sequence_bias": (),
    "begin_suppress_tokens": (),
    "stop_strings": (),
    "suppress_tokens": (),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


class Settings(NamedTuple):
    """Checked settings. Lengths include the start token, as in transformers."""

    start: int
    ends: tuple[int, ...]
    pad: int
    max_length: int
    min_length: int
    beams: int
    copies: int  # rows per source: beams or samples
    returned: int  # generated sequences per source
    sampled: bool
    early_stopping: bool | str
    length_penalty: float
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    ngram_size: int  # tokens in an n-gram that must not repeat; 0: no limit
    bad_words: tuple[tuple[int, ...], ...]
    stop_words: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]  # forced in the first step; may be empty
    last: tuple[int, ...]  # forced in the last step; may be empty
    renormalized: bool

    @property
    def steps(self) -> int:
        return self.max_length - 1

    @property
    def needs_history(self) -> bool:
        """Whether penalties, n-grams or bad words make a row's next token depend on its earlier tokens."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return bool(self.bad_words or self.ngram_size) or any(x is not None for x in penalties)


def defaults_of(config: Mapping[str, Any], generation_config: Any) -> dict[str, Any]:
    """Return a model's default settings, which are in its generation configuration.

    Older models have the settings in the model's configuration, which may also contain the token ids.
    """
    source = config if generation_config is None else content("generation_config", generation_config)
    found = {key: source[key] for key in (*DEFAULTS, *_UNSUPPORTED) if source.get(key) is not None}
    if generation_config is None and config.get("force_bos_token_to_be_generated"):
        found.setdefault("forced_bos_token_id", config.get("bos_token_id"))
    for key in DEFAULTS:
        if key.endswith("token_id") and not key.startswith("forced") and config.get(key) is not None:
            found.setdefault(key, config[key])
    return found


def _ids(name: str, value: Any, vocab: int) -> tuple[int, ...]:
    several = value if isinstance(value, Iterable) else () if value is None else (value,)
    return tuple(dict.fromkeys(check.integer(name, x, 0, vocab - 1, "the vocabulary") for x in several))


def _words(name: str, value: Any, vocab: int) -> tuple[tuple[int, ...], ...]:
    words = []
    for word in () if value is None else value:
        if not isinstance(word, Sequence) or not word:
            check.fail(name, "a list of lists of token ids, none of them empty", repr(word))
        words.append(tuple(check.integer(name, x, 0, vocab - 1, "the vocabulary") for x in word))
    return tuple(words)


def _within(name: str, value: Any, low: float, high: float) -> float:
    number = check.number(name, value)
    if not low <= number <= high:
        check.fail(name, f"in [{low:g}, {high:g}]", number)
    return number


def _unless(value: float, off: float) -> float | None:
    return None if value == off else value


def _lengths(found: Mapping[str, Any], max_positions: int) -> tuple[int, int]:
    if found["max_new_tokens"] is not None:
        longest = check.integer("max_new_tokens", found["max_new_tokens"], 1) + 1
    elif found["max_length"] is not None:
        longest = check.integer("max_length", found["max_length"], 2)
    else:
        longest = min(_DEFAULT_NEW_TOKENS + 1, max_positions)
    if longest - 1 > max_positions:
        check.fail("max_length", f"at most {max_positions + 1}, for the model has {max_positions} positions", longest)
    if found["min_new_tokens"] is not None:
        return longest, check.integer("min_new_tokens", found["min_new_tokens"], 0) + 1
    return longest, check.integer("min_length", found["min_length"], 0)


def settle(
    defaults: Mapping[str, Any], given: Mapping[str, Any], stop_words: Any, vocab: int, positions: int
) -> Settings:
    """Combine the model's settings with a call's settings, which take precedence, by the rules of transformers.

    Raises TypeError for an unknown setting, and ValueError for an unimplemented setting or an invalid value.
    """
    for name in given:
        if name not in DEFAULTS and name not in _UNSUPPORTED:
            raise TypeError(f"{name!r} is no setting; there are {', '.join(DEFAULTS)}")
    given = {name: value for name, value in given.items() if value is not None}
    found = {**DEFAULTS, **defaults, **given}
    if "max_length" in given and "max_new_tokens" not in given:
        found["max_new_tokens"] = None
    if "min_length" in given and "min_new_tokens" not in given:
        found["min_new_tokens"] = None
    for name, neutral in _UNSUPPORTED.items():
        if found.get(name) is not None and found[name] not in neutral:
            wanted = "left out" + "".join(f" or {x}" for x in neutral[:1])
            check.fail(name, f"{wanted}: it is not implemented", repr(found[name]))
    ends = _ids("eos_token_id", found["eos_token_id"], vocab)
    if not ends:
        check.fail("eos_token_id", "the id of the token that ends a sequence", "None")
    begin = found["decoder_start_token_id"] if found["decoder_start_token_id"] is not None else found["bos_token_id"]
    start = check.integer("decoder_start_token_id", begin, 0, vocab - 1, "the vocabulary")
    pad = check.integer("pad_token_id", ends[0] if found["pad_token_id"] is None else found["pad_token_id"], 0)
    beams, returned = (check.integer(name, found[name], 1) for name in ("num_beams", "num_return_sequences"))
    sampled = bool(found["do_sample"])
    if beams > 1 and sampled:
        check.fail("do_sample", "False with num_beams above 1: beams that are drawn are not implemented", "True")
    if beams > 1 and returned > beams:
        check.fail("num_return_sequences", f"at most num_beams ({beams})", returned)
    if beams == 1 and returned > 1 and not sampled:
        check.fail("num_return_sequences", "1 without beams and without do_sample", returned)
    longest, shortest = _lengths(found, positions)
    top_k = check.integer("top_k", found["top_k"], 0)
    stops = _words("stop_words", stop_words, vocab)
    if stops and beams > 1:
        check.fail("stop_words", "None with num_beams above 1", stop_words)
    positive = {name: _within(name, found[name], 1e-30, 1e30) for name in ("repetition_penalty",)}
    return Settings(
        start, ends, pad, longest, shortest, beams, beams if beams > 1 else returned, returned, sampled,
        check.one_of("early_stopping", found["early_stopping"], (False, True, "never")),
        check.number("length_penalty", found["length_penalty"]),
        _within("temperature", found["temperature"], 0, 1e30),
        min(top_k, vocab) or None,
        _unless(_within("top_p", found["top_p"], 0, 1), 1.0),
        None if found["min_p"] is None else _within("min_p", found["min_p"], 0, 1),
        _unless(positive["repetition_penalty"], 1.0),
        _unless(check.number("presence_penalty", found["presence_penalty"]), 0.0),
        _unless(check.number("frequency_penalty", found["frequency_penalty"]), 0.0),
        check.integer("no_repeat_ngram_size", found["no_repeat_ngram_size"], 0),
        tuple(x for x in _words("bad_words_ids", found["bad_words_ids"], vocab) if x not in {(end,) for end in ends}),
        stops,
        _ids("forced_bos_token_id", found["forced_bos_token_id"], vocab),
        _ids("forced_eos_token_id", found["forced_eos_token_id"], vocab),
        bool(found["renormalize_logits"]),
    )  # fmt: skip
