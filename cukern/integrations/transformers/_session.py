"""A decoding loop with one CUDA graph for a step: the model's forward pass with a static cache, and sampling.

Replays avoid the launches of the kernels. In transformers' `generate` at batch size 1, the launches take several times
as long as the GPU's work.
"""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import torch

import cukern
from cukern.integrations.transformers import _attention
from cukern.integrations.transformers._cache import CACHE_NAME, CACHE_NAMES, static_cache
from cukern.integrations.transformers._options import Sampling
from cukern.integrations.transformers._rewrite import undecorated_forward
from cukern.integrations.transformers._sampling import draw
from cukern.integrations.transformers._state import running
from cukern.models._steps import StepGraphs


class Session:
    """The buffers, the cache and the CUDA graph of a decoding step for one batch size."""

    def __init__(self, model: Any, batch: int, tokens: int, sampling: Sampling) -> None:
        device = next(model.parameters()).device
        self.model, self.batch, self.tokens, self.sampling, self.device = model, batch, tokens, sampling, device
        self._make_counters(batch, device)
        found = static_cache(model, tokens, self.counters[0], self.counters[2 + batch :])
        if isinstance(found, str):
            raise RuntimeError(found)
        self.cache, self.slots = found
        self.why = "" if device.type == "cuda" else "the model is on the CPU"
        self.is_ready = False

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token, self.padding = zeros(batch, 1), zeros(batch, tokens)
        self.mask = zeros(batch, 1, 1, tokens, dtype=torch.bool)
        self.starts, self.finished, self.seed = zeros(batch), zeros(batch, dtype=torch.bool), zeros(1)
        self.rows = torch.arange(batch, device=device)  # sampled tokens get the dtype of the indices
        self.angles: dict[Any, torch.Tensor | None] = {}  # cos and sin of all positions, by module and dtype
        self.stop = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
        # Pass PAGE as the shortest length. Shorter sequences need no check, because the cache has a page of unused
        # tokens after each sequence.
        self.mask.__dict__["_cukern_rows"] = _attention.Rows(self.starts, self.lengths, _attention.PAGE)
        self._tables: dict[int, torch.Tensor] = {}
        self.min_new_tokens = zeros(batch)
        self.occurred: torch.Tensor | None = None  # [batch, vocab], for a repetition penalty
        layers: Any = SimpleNamespace(is_cuda_torch=device.type == "cuda", device=device)
        self.graphs = StepGraphs(layers)
        parameters = inspect.signature(undecorated_forward(model)).parameters
        self.parameter_names = {name for name in ("position_ids", "logits_to_keep") if name in parameters}
        # A `forward` without an argument for the cache takes the cache in `**kwargs`, and passes it on.
        self._cache_name = next((name for name in parameters if name in CACHE_NAMES), CACHE_NAME)

    def _make_counters(self, batch: int, device: torch.device) -> None:
        """Create a step's counters in one int32 array, so that one kernel increments all of them.

        The int64 counters are the numbers of cached and of sampled tokens, the positions and the slots. Only their
        lower 32 bits are incremented, because these do not overflow. The lengths are int32 counters.
        """
        wide = 2 + 2 * batch
        counts = torch.zeros(2 * wide + batch + batch % 2, dtype=torch.int32, device=device)
        self._counts, self._ones = counts, torch.ones_like(counts)
        self._ones[1 : 2 * wide : 2] = 0
        self.counters, self.lengths = counts[: 2 * wide].view(torch.int64), counts[2 * wide : 2 * wide + batch]
        self.sample_count, self.positions = self.counters[1:2], self.counters[2 : 2 + batch, None]

    @property
    def captures(self) -> bool:
        return not self.why

    def block_tables(self, distance: int) -> torch.Tensor:
        """Return the block tables of all steps. Sequences are `distance` tokens apart."""
        if distance not in self._tables:
            pages = self.tokens // _attention.PAGE
            self._tables[distance] = _attention.tables(self.starts, distance, pages)
        return self._tables[distance]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits [batch, vocab] after the last token."""
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: options[name] for name in self.parameter_names} | {self._cache_name: self.cache}
        with running(self):
            out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        logits: torch.Tensor = out.logits
        return logits[:, -1]

    def _penalize(self, logits: torch.Tensor) -> torch.Tensor:
        sampling = self.sampling
        if sampling.repetition_penalty != 1:
            self.occurred = torch.zeros_like(logits, dtype=torch.bool) if self.occurred is None else self.occurred
            logits = cukern.apply_penalties(  # type: ignore[assignment]
                logits.float(), repetition_penalty=sampling.repetition_penalty, prompt_mask=self.occurred
            )
        if sampling.delays_stop:
            early = (self.sample_count < self.min_new_tokens)[:, None]
            logits = logits.index_copy(1, self.stop, logits[:, self.stop].masked_fill(early, float("-inf")))
        return logits

    def _sample(self, logits: torch.Tensor) -> None:
        logits = self._penalize(logits).contiguous()
        draw(self.sampling, logits, self.token, self.finished, self.stop, self.seed, self.sample_count, self.rows)
        if self.occurred is not None:
            self.occurred.scatter_(1, self.token, True)

    def ready(self) -> None:
        """Run a step on an empty cache, which loads kernels and lets cuBLAS choose algorithms. Then capture a step."""
        if self.device.type != "cuda" or self.is_ready:
            return
        self.is_ready = True
        if self.captures:
            self._clear()
            self._prepare_steps(0)
            self.run()
            self.run()

    def _clear(self) -> None:
        for buffer in (self.mask, self.finished, self._counts, self.token, self.starts):
            buffer.zero_()
        self.padding.fill_(1)

    def _prepare_steps(self, count: int) -> None:
        """Prepare the steps after `count` tokens per sequence. The lengths of a step include its new token."""
        self.slots.prepare_step(count)
        self.lengths += 1

    def _load_prompts(
        self, prompts: list[torch.Tensor], seed: int, min_new_tokens: list[int], pad: int
    ) -> torch.Tensor:
        """Initialize the buffers. Return the token ids [batch, tokens], padded on the left."""
        count = max(map(len, prompts))
        ids = torch.stack([torch.cat([x.new_full((count - len(x),), pad), x]) for x in prompts])
        lengths = torch.tensor([len(x) for x in prompts], device=self.device)
        self._clear()
        self.seed.fill_(seed)
        self.min_new_tokens.copy_(torch.tensor(min_new_tokens))
        self.starts.copy_(count - lengths)
        self.lengths.copy_(lengths)
        self.positions.copy_(lengths[:, None])
        seen = torch.arange(count, device=self.device) >= self.starts[:, None]
        self.padding[:, :count] = seen
        self.mask[:, 0, 0, :count] = seen
        for distance, table in self._tables.items():
            table.copy_(_attention.tables(self.starts, distance, table.shape[1]))
        return ids

    def _record_tokens(self, prompts: list[torch.Tensor], like: torch.Tensor) -> None:
        if self.sampling.repetition_penalty == 1:
            return
        if self.occurred is None:
            self.occurred = torch.zeros_like(like, dtype=torch.bool)
        self.occurred.zero_()
        for row, prompt in zip(self.occurred, prompts, strict=True):
            row[prompt] = True

    def prefill(self, prompts: list[torch.Tensor], seed: int, min_new_tokens: list[int], pad: int = 0) -> torch.Tensor:
        """Run the prompts, and sample the first new token of each. Return the logits."""
        ids = self._load_prompts(prompts, seed, min_new_tokens, pad)
        count = ids.shape[1]
        padding = self.padding[:, :count]
        self.slots.prepare_prefill(count)
        logits = self._forward(ids, (padding.cumsum(1) - 1).clamp(min=0), padding)
        self._record_tokens(prompts, logits)
        self._sample(logits)
        self.sample_count += 1
        self._prepare_steps(count)
        return logits

    def advance(self) -> torch.Tensor:
        """Run the model on the latest token, and sample the next one. Return the logits."""
        self.mask.index_fill_(3, self.slots.positions, True)
        logits = self._forward(self.token, self.positions, self.padding)
        self._sample(logits)
        self._counts += self._ones
        return logits

    def step(self) -> None:
        """Run a decoding step. `run` captures this call in a CUDA graph if it can."""
        self.advance()

    def run(self) -> None:
        if not self.captures:
            self.step()
            return
        try:
            self.graphs.run("step", self.step)
        except RuntimeError as error:
            # The capture failed, so none of its kernels has run.
            self.why = f"its step cannot be captured ({str(error).splitlines()[0]})"
            warnings.warn(f"generate: {self.why}", stacklevel=3)
            torch.cuda.synchronize(self.device)
            self.step()
