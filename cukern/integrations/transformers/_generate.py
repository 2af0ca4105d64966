"""`generate`: continue prompts with a model of transformers. If possible, a step is the replay of a CUDA graph.

The host reads the tokens of a step while the next step runs, so the GPU does not wait for the host.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin, PreTrainedModel

from cukern.integrations.transformers import _attention, _fit, _options
from cukern.integrations.transformers._growing import Growing
from cukern.integrations.transformers._options import Options, Sampling
from cukern.integrations.transformers._session import Session
from cukern.integrations.transformers._state import ATTRIBUTE, State
from cukern.models._steps import watch
from cukern.runtime import check
from cukern.runtime.progress import progress as progress_bar

#: The cache length is rounded up to a multiple of this, so that calls with similar prompt lengths share a graph.
_CAPACITY = 256
#: Maximum number of sessions that a model keeps, each with a cache and a graph.
_SESSIONS = 4


@dataclass(frozen=True)
class Generated:
    """The result of `generate`."""

    tokens: list[list[int]]  # the new tokens of each prompt, including a stop token
    steps: int  # the number of steps, which is the largest number of new tokens of a prompt
    ready_s: float  # seconds to capture a step; about 0 if a session of these sizes already exists
    prefill_s: float  # seconds from the capture until the first token of each prompt
    decode_s: float  # seconds for all further tokens
    captured: bool  # whether the steps were replays of a CUDA graph
    why: str  # the reason why the steps were not replays; empty if they were

    @property
    def tokens_per_s(self) -> float:
        """Return the decoding throughput of the batch in tokens/s. The first token of each prompt does not count."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.decode_s if self.decode_s > 0 else 0.0


# --- inputs ---------------------------------------------------------------------------------------------


def _vocabulary(model: Any, embeddings: Any) -> int:
    weight = getattr(embeddings, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return len(weight)
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _row(prompt: Any) -> torch.Tensor:
    """Return the token ids of one prompt as an integer tensor."""
    if isinstance(prompt, (str, bytes)):
        check.fail("prompts", "of token ids, which a tokenizer makes of texts", type(prompt).__name__, TypeError)
    try:
        row = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        check.fail("prompts", "sequences of integers", type(prompt).__name__, TypeError)
    if len(row.flatten()) and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool):
        check.fail("prompts", "integers", str(row.dtype).removeprefix("torch."), TypeError)
    return row.flatten().long()


def _prompts(prompts: Any, attention_mask: Any, vocab: int, device: torch.device) -> list[torch.Tensor]:
    """Check the prompts. Return the tokens of each prompt, without padding, on the device."""
    if isinstance(prompts, torch.Tensor):
        rows = _rows(prompts, attention_mask)
    else:
        if attention_mask is not None:
            check.fail("attention_mask", "None with prompts of their own lengths", type(attention_mask).__name__)
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            check.fail("prompts", "a tensor or a sequence of prompts", type(prompts).__name__, TypeError)
        rows = [_row(x) for x in prompts]
        if not rows or min(map(len, rows)) < 1:
            check.fail("prompts", "of at least one prompt, each of at least one token", [len(x) for x in rows])
    least, most = torch.stack([x.aminmax()[i].cpu() for x in rows for i in (0, 1)]).aminmax()
    for value in (int(least), int(most)):
        if not 0 <= value < vocab:
            check.fail("prompts", f"of ids in the vocabulary, [0, {vocab - 1}]", value)
    return [x.to(device) for x in rows]


def _rows(prompts: torch.Tensor, attention_mask: Any) -> list[torch.Tensor]:
    if prompts.dim() != 2 or prompts.is_floating_point() or 0 in prompts.shape:
        check.fail("prompts", "integers of shape [batch, tokens], none of them 0", list(prompts.shape))
    prompts = prompts.long()
    if attention_mask is None:
        return list(prompts)
    mask = torch.as_tensor(attention_mask)
    if tuple(mask.shape) != tuple(prompts.shape):
        check.fail("attention_mask", f"of the shape of prompts, {list(prompts.shape)}", list(mask.shape))
    mask = mask.to(prompts.device) != 0
    if not bool((mask.long().diff(dim=1) >= 0).all()) or not bool(mask[:, -1].all()):
        check.fail("attention_mask", "of prompts that are padded on the left alone", "zeros elsewhere")
    return [row[own] for row, own in zip(prompts, mask, strict=True)]


def _check_model(model: Any) -> State | None:
    if not isinstance(model, PreTrainedModel):
        check.fail("model", "a PreTrainedModel of transformers", type(model).__name__, TypeError)
    if not model.can_generate() or getattr(model.config, "is_encoder_decoder", False):
        check.fail("model", "a decoder that can generate", type(model).__name__)
    if type(model).generate is not GenerationMixin.generate:
        check.fail("model", "a decoder that generates as transformers' GenerationMixin does", type(model).__name__)
    if model.training:
        check.fail("model", "in evaluation mode (model.eval())", "one in training mode")
    if getattr(model.config, "is_decoder", None) is False and _fit.fit(model).sees_later:
        wanted = "a decoder, whose tokens see no later ones (config.is_decoder)"
        check.fail("model", wanted, type(model).__name__)
    state = model.__dict__.get(ATTRIBUTE)
    if state is None:
        warnings.warn(
            "the model is not enabled: its own kernels run (cukern.integrations.transformers.enable)", stacklevel=3
        )
    return state  # type: ignore[no-any-return]


# --- execution ------------------------------------------------------------------------------------------


def _session(state: State | None, model: Any, batch: int, tokens: int, sampling: Sampling) -> Session:
    """Return a session for these sizes: an existing session, or a new one."""
    tokens = -(-(tokens + _attention.PAGE) // _CAPACITY) * _CAPACITY
    if state is None:
        return Session(model, batch, tokens, sampling)
    # A graph holds the addresses of the weights, so drop the sessions if a weight has moved.
    places = hash(tuple(x.data_ptr() for x in (*model.parameters(), *model.buffers())))
    if state.places != places:
        state.sessions.clear()
        state.places = places
    key = batch, tokens, sampling
    found = state.sessions.pop(key, None)
    while len(state.sessions) >= _SESSIONS:
        del state.sessions[next(iter(state.sessions))]
    state.sessions[key] = found or Session(model, batch, tokens, sampling)
    return state.sessions[key]  # type: ignore[no-any-return]


def _why_growing(model: Any, lengths: list[int], options: Options) -> str:
    """Return the reason why a call must use the model's own cache (`Growing`). It is empty if a session can run it."""
    if options.config.use_cache is False:
        return "use_cache is False"
    if options.processed:
        return f"a processor of transformers serves {options.processed}"
    longest = max(x + most for x, most in zip(lengths, options.most, strict=True))
    if (limit := _fit.rope_limit(model)) is not None and longest > limit:
        if len(set(lengths)) > 1 and _fit.is_dynamic(model):
            wanted = f"of one length, since the rotary embedding remembers lengths above {limit}"
            check.fail("prompts", wanted, sorted(set(lengths)))
        return f"its rotary embedding depends on the length above {limit} tokens"
    fit = _fit.fit(model)
    if fit.why:
        return fit.why
    if len(set(lengths)) > 1 and not fit.pads:
        return "padding changes its logits"
    if _fit.drops_seen_tokens(model, longest):
        return "its cache drops tokens that its masks show"
    if not _fit.prepares_alike(model, min(lengths), longest - min(lengths)):
        return "it prepares the inputs of its steps itself"
    return ""


@torch.no_grad()
def generate(
    model: Any,
    prompts: torch.Tensor | Sequence[Any],
    *,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int | None = None,
    max_length: int | None = None,
    min_new_tokens: int | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | str | None = "model",
    top_p: float | str | None = "model",
    min_p: float | str | None = "model",
    repetition_penalty: float | None = None,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | str | None = "model",
    pad_token_id: int | None = None,
    on_token: Callable[[int, NDArray[np.int64]], Any] | None = None,
    progress: bool | None = False,
    **settings: Any,
) -> Generated:
    """Generate tokens with a model of transformers. If possible, each step is the replay of one CUDA graph.

    The default of an argument comes from the model's generation_config, or else from transformers.

    Args:
        model: an enabled decoder. Its steps are captured if it gives the same results with a static cache of keys and
            values. Otherwise, and on a CPU, a loop without a graph runs, and `Generated.why` gives the reason.
        prompts: token ids [batch, tokens], or a sequence of prompts of any lengths.
        attention_mask: [batch, tokens], 0 for padding. Only for `prompts` in one tensor, padded on the left.
        max_new_tokens: maximum new tokens of each prompt. The default is 128 if nothing else limits the tokens.
        max_length: maximum tokens of a prompt and its new tokens together, if max_new_tokens is not set.
        min_new_tokens: minimum new tokens of each prompt. No stop token is generated before.
        do_sample: whether to sample tokens. If not, each token is the token with the largest logit.
        temperature: the sampling temperature. With 0, each token is the token with the largest logit. A value above 0
            implies sampling, unless do_sample is False.
        top_k, top_p, min_p: as in `cukern.sample`. None turns a limit off; so do a `top_k` of 0, -1 or at least the
            vocabulary size, a `top_p` of 1, and a `min_p` of 0.
        repetition_penalty: applies to tokens that have already occurred in the sequence. Their positive logits are
            divided by this number, and their negative logits are multiplied by it.
        seed: the seed for sampling.
        eos_token_id: the token, or a list of tokens, that end a sequence. None: no token ends a sequence.
        pad_token_id: the token that pads short prompts. The results do not depend on it.
        on_token: called with the index of each step and its tokens, int64 [batch], while the next step runs. If it
            returns False, generation ends.
        progress: whether to show a progress bar; None: only on a terminal.
        settings: a `generation_config` that replaces the model's, and other settings of a GenerationConfig. A setting
            such as no_repeat_ngram_size needs a logits processor of transformers; then steps are not captured.

    Returns:
        The new tokens of each prompt, and the times.

    Raises:
        TypeError: not a model of transformers, not prompts, or an unknown setting.
        ValueError: a model that cannot generate on its own or is in training mode, an unsupported setting, or an
            invalid value.

    A session consists of a cache and a graph for one batch size, one number of tokens (prompt and new tokens, rounded
    up to a multiple of 256) and one set of sampling parameters. The model keeps its four latest sessions; `disable`
    frees them. The first call runs a few short random prompts, to find out whether a session gives the same results as
    the model.
    """
    state = _check_model(model)
    device = next(model.parameters()).device
    rows = _prompts(prompts, attention_mask, _vocabulary(model, model.get_input_embeddings()), device)
    lengths = [len(x) for x in rows]
    given = {
        "max_new_tokens": max_new_tokens, "max_length": max_length, "min_new_tokens": min_new_tokens,
        "do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "eos_token_id": eos_token_id,
    }  # fmt: skip
    limit = None if _fit.is_dynamic(model) else _fit.positions(model)
    vocab = _vocabulary(model, model.get_output_embeddings())
    options = _options.resolve(model, lengths, vocab, limit, given, settings)
    seed = check.integer("seed", seed, 0, 2**63 - 1)
    pad = 0 if pad_token_id is None else check.integer("pad_token_id", pad_token_id, 0, vocab - 1)
    if why := _why_growing(model, lengths, options):
        own: Any = Growing(model, len(rows), options, why)
    else:
        longest = max(lengths) + max(options.most)
        own = _session(state, model, len(rows), longest, options.sampling)
    return _decode(own, rows, (seed, options.fewest, pad), options.most, on_token, progress)


def _decode(
    own: Session | Growing, rows: list[torch.Tensor], begin: tuple[int, list[int], int], most: list[int], on_token: Any,
    progress: bool | None,
) -> Generated:  # fmt: skip
    columns: list[NDArray[np.int64]] = []
    layers: Any = SimpleNamespace(is_cuda_torch=own.device.type == "cuda", device=own.device, host=lambda x: x.numpy())
    seen, ended = watch(layers), False
    times = [time.perf_counter()]

    def passed() -> None:
        if own.device.type == "cuda":
            torch.cuda.synchronize(own.device)
        times.append(time.perf_counter())

    own.ready()
    passed()
    own.prefill(rows, *begin)
    passed()

    def take(found: Iterable[Any]) -> bool:
        """Store the tokens of the steps whose results are on the host. Return whether generation ends."""
        end = False
        for step, (tokens, finished) in found:
            columns.append(tokens[:, 0])
            advance(1)
            end |= on_token is not None and on_token(step, tokens[:, 0]) is False
            end |= bool(own.sampling.stop) and bool(finished.all())
        return end

    with progress_bar("generating", max(most), progress) as advance:
        for step in range(max(most)):
            if step:
                own.run()
            ended = take(seen.after(step, [own.token, own.finished]))
            if ended:
                break
        if not ended:
            take(seen.rest())
    times.append(time.perf_counter())
    ready_s, prefill_s, decode_s = (after - before for before, after in itertools.pairwise(times))
    drawn = np.stack(columns, axis=1)
    tokens = [_until(row.tolist(), own.sampling.stop)[:count] for row, count in zip(drawn, most, strict=True)]
    steps = max(map(len, tokens))
    return Generated(tokens, steps, ready_s, prefill_s, decode_s, own.captures, own.why)


def _until(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    """Return the tokens up to and including the first stop token."""
    end = next((i for i, x in enumerate(tokens) if x in stop), len(tokens))
    return tokens[: end + 1]
