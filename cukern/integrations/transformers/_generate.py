"""`generate`: continue prompts with a model of transformers, in replays of a CUDA graph if possible."""

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
from cukern.integrations.transformers._packed import content_of
from cukern.integrations.transformers._session import Session
from cukern.integrations.transformers._state import ATTRIBUTE, State
from cukern.models._steps import watch
from cukern.runtime import check
from cukern.runtime.progress import progress as progress_bar

#: The cache length is a multiple of this, so that calls with similar prompt lengths share a graph.
_CAPACITY = 256
#: Maximum sessions of a model, each with a cache and a graph.
_SESSIONS = 4


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]  # of each prompt, including a stop token
    steps: int  # the largest number of new tokens
    ready_s: float  # seconds to capture a step; about 0 if a session of these sizes exists
    prefill_s: float  # seconds until the first token of each prompt
    decode_s: float  # seconds for all further tokens
    captured: bool  # whether the steps replayed a CUDA graph
    why: str  # the reason if they did not, else empty

    @property
    def tokens_per_s(self) -> float:
        """Decoding throughput in tokens/s, without the first token of each prompt."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.decode_s if self.decode_s > 0 else 0.0


def _vocabulary(model: Any, embeddings: Any) -> int:
    weight = getattr(embeddings, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() == 2:
        return len(weight)
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _row(prompt: Any) -> torch.Tensor:
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
    smallest, largest = torch.stack([x.aminmax()[i].cpu() for x in rows for i in (0, 1)]).aminmax()
    for value in (int(smallest), int(largest)):
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
    return [row[visible] for row, visible in zip(prompts, mask, strict=True)]


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


def _session(state: State | None, model: Any, batch: int, tokens: int, sampling: Sampling) -> Session:
    tokens = -(-(tokens + _attention.PAGE) // _CAPACITY) * _CAPACITY
    if state is None:
        return Session(model, batch, tokens, sampling)
    # A graph holds the weights' addresses, so drop it if a weight has moved. It also holds copies of E8M0 scales.
    weights_hash = hash(tuple(map(content_of, (*model.parameters(), *model.buffers()))))
    if state.weights_hash != weights_hash:
        state.sessions.clear()
        state.weights_hash = weights_hash
    key = batch, tokens, sampling
    found = state.sessions.pop(key, None)
    while len(state.sessions) >= _SESSIONS:
        del state.sessions[next(iter(state.sessions))]
    state.sessions[key] = found or Session(model, batch, tokens, sampling)
    return state.sessions[key]  # type: ignore[no-any-return]


def _why_growing(model: Any, lengths: list[int], options: Options) -> str:
    """Return why a call needs the model's own cache (`Growing`), or "" if a session can run it."""
    if options.config.use_cache is False:
        return "use_cache is False"
    if options.processed:
        return f"a processor of transformers serves {options.processed}"
    longest = max(x + max_count for x, max_count in zip(lengths, options.max_new_tokens, strict=True))
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
    if not _fit.prepares_default_inputs(model, min(lengths), longest - min(lengths)):
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
    """Generate tokens with a model of transformers. If possible, each step replays one CUDA graph.

    The default of an argument comes from the model's generation_config, or else from transformers.

    Args:
        model: an enabled decoder. Its steps are captured in a CUDA graph if it gives the same results with a static KV
            cache. Otherwise, and on a CPU, a loop without a graph runs, and `Generated.why` gives the reason.
        prompts: token ids [batch, tokens], or a sequence of prompts of any lengths.
        attention_mask: [batch, tokens], 0 for padding. Only for `prompts` in one tensor, padded on the left.
        max_new_tokens: maximum new tokens of each prompt. The default is 128 if nothing else limits the tokens.
        max_length: maximum tokens of a prompt and its new tokens together, if max_new_tokens is not set.
        min_new_tokens: minimum new tokens of each prompt, before which stop tokens are forbidden.
        do_sample: whether to sample tokens instead of taking the largest logit.
        temperature: the sampling temperature. 0 takes the largest logit. A value above 0 implies sampling, unless
            do_sample is False.
        top_k, top_p, min_p: as in `cukern.sample`. None turns a limit off; so do a `top_k` of 0, -1 or at least the
            vocabulary size, a `top_p` of 1, and a `min_p` of 0.
        repetition_penalty: divides the positive logits, and multiplies the negative logits, of the sequence's tokens.
        seed: the seed for sampling.
        eos_token_id: the token, or a list of tokens, that end a sequence; None: no token.
        pad_token_id: the token that pads short prompts. The results do not depend on it.
        on_token: called with the index of each step and its tokens, int64 [batch], while the next step runs. If it
            returns False, generation ends.
        progress: whether to show a progress bar; None: only on a terminal.
        settings: a `generation_config` that replaces the model's, and other settings of a GenerationConfig. A setting
            that needs a logits processor of transformers, such as no_repeat_ngram_size, prevents the capture.

    Returns:
        The new tokens of each prompt, and the times.

    Raises:
        TypeError: not a model of transformers, not prompts, or an unknown setting.
        ValueError: a model that cannot generate on its own or is in training mode, an unsupported setting, or an
            invalid value.

    The model keeps its four latest sessions; `disable` frees them. A session consists of a cache and a graph for one
    batch size, one number of tokens (prompt and new tokens, rounded up to a multiple of 256) and one set of sampling
    parameters. The first call compares a session with the model on short random prompts.
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
        runner: Any = Growing(model, len(rows), options, why)
    else:
        longest = max(lengths) + max(options.max_new_tokens)
        runner = _session(state, model, len(rows), longest, options.sampling)
    return _decode(runner, rows, (seed, options.min_new_tokens, pad), options.max_new_tokens, on_token, progress)


def _decode(
    runner: Session | Growing, rows: list[torch.Tensor], prefill_arguments: tuple[int, list[int], int],
    limits: list[int], on_token: Any, progress: bool | None,
) -> Generated:  # fmt: skip
    columns: list[NDArray[np.int64]] = []
    layers: Any = SimpleNamespace(
        is_cuda_torch=runner.device.type == "cuda", device=runner.device, host=lambda x: x.numpy()
    )
    watcher, ended = watch(layers), False
    times = [time.perf_counter()]

    def record_time() -> None:
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        times.append(time.perf_counter())

    runner.ready()
    record_time()
    runner.prefill(rows, *prefill_arguments)
    record_time()

    def take(step_results: Iterable[Any]) -> bool:
        end = False
        for step, (tokens, finished) in step_results:
            columns.append(tokens[:, 0])
            advance(1)
            end |= on_token is not None and on_token(step, tokens[:, 0]) is False
            end |= bool(runner.sampling.stop) and bool(finished.all())
        return end

    with progress_bar("generating", max(limits), progress) as advance:
        for step in range(max(limits)):
            if step:
                runner.run()
            ended = take(watcher.after(step, [runner.token, runner.finished]))
            if ended:
                break
        if not ended:
            take(watcher.remaining())
    times.append(time.perf_counter())
    ready_s, prefill_s, decode_s = (after - before for before, after in itertools.pairwise(times))
    sampled = np.stack(columns, axis=1)
    tokens = [
        _through_stop(row.tolist(), runner.sampling.stop)[:count] for row, count in zip(sampled, limits, strict=True)
    ]
    steps = max(map(len, tokens))
    return Generated(tokens, steps, ready_s, prefill_s, decode_s, runner.captures, runner.why)


def _through_stop(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    end = next((i for i, x in enumerate(tokens) if x in stop), len(tokens))
    return tokens[: end + 1]
