"""A decoding loop with one CUDA graph for a whole step: the model's forward pass with a static cache, and sampling.

In transformers' `generate`, at batch size 1, a step takes several times as long on the host as on the GPU. Here the
host launches the kernels of a step once, to capture them in a graph, and then replays the graph.
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
from cukern.integrations.transformers._rewrite import written
from cukern.integrations.transformers._sampling import draw
from cukern.integrations.transformers._state import running
from cukern.models._steps import StepGraphs


class Session:
    """The buffers and the cache for one batch size, and the CUDA graph of a decoding step."""

    def __init__(self, model: Any, batch: int, tokens: int, sampling: Sampling) -> None:
        device = next(model.parameters()).device
        self.model, self.batch, self.tokens, self.sampling, self.device = model, batch, tokens, sampling, device
        self._count(batch, device)
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
        self.rows = torch.arange(batch, device=device)  # int64, because sampled tokens get the dtype of the indices
        self.angles: dict[Any, torch.Tensor | None] = {}  # cos and sin of all positions, keyed by module and dtype
        self.stop = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
        # PAGE, because the cache has a page of unused tokens after each sequence.
        self.mask.__dict__["_cukern_rows"] = _attention.Rows(self.starts, self.lengths, _attention.PAGE)
        self._tables: dict[int, torch.Tensor] = {}
        self.fewest = zeros(batch)
        self.mentioned: torch.Tensor | None = None  # [batch, vocab]: which tokens have occurred, if they are penalized
        layers: Any = SimpleNamespace(is_cuda_torch=device.type == "cuda", device=device)
        self.graphs = StepGraphs(layers)
        takes = inspect.signature(written(model)).parameters
        self.takes = {name for name in ("position_ids", "logits_to_keep") if name in takes}
        # If `forward` does not have an argument for the cache, it passes the cache on in its keyword arguments.
        self._cache_name = next((name for name in takes if name in CACHE_NAMES), CACHE_NAME)

    def _count(self, batch: int, device: torch.device) -> None:
        """Create the counters of a step in one array, so that one kernel increments all of them.

        They are the number of tokens in the cache, the number of sampled tokens, positions, slots and lengths. The
        lengths are int32, and the others are int64. Only the lower 32 bits of an int64 are incremented. They do not
        overflow.
        """
        wide = 2 + 2 * batch
        counts = torch.zeros(2 * wide + batch + batch % 2, dtype=torch.int32, device=device)
        self._counts, self._ones = counts, torch.ones_like(counts)
        self._ones[1 : 2 * wide : 2] = 0
        self.counters, self.lengths = counts[: 2 * wide].view(torch.int64), counts[2 * wide : 2 * wide + batch]
        self.drawn, self.positions = self.counters[1:2], self.counters[2 : 2 + batch, None]

    @property
    def captures(self) -> bool:
        return not self.why

    def block_tables(self, distance: int) -> torch.Tensor:
        """Return the block tables for sequences that are `distance` tokens apart. All steps use the same tables."""
        if distance not in self._tables:
            pages = self.tokens // _attention.PAGE
            self._tables[distance] = _attention.tables(self.starts, distance, pages)
        return self._tables[distance]

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Run the model on these tokens. Return the logits [batch, vocab] after the last token."""
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: options[name] for name in self.takes} | {self._cache_name: self.cache}
        with running(self):
            out = self.model(input_ids=ids, attention_mask=mask, use_cache=True, **options)
        logits: torch.Tensor = out.logits
        return logits[:, -1]

    def _penalize(self, logits: torch.Tensor) -> torch.Tensor:
        """Apply the repetition penalty, and forbid stop tokens before the minimum length. Return the logits."""
        own = self.sampling
        if own.repetition_penalty != 1:
            self.mentioned = torch.zeros_like(logits, dtype=torch.bool) if self.mentioned is None else self.mentioned
            logits = cukern.apply_penalties(  # type: ignore[assignment]
                logits.float(), repetition_penalty=own.repetition_penalty, prompt_mask=self.mentioned
            )
        if own.delays_stop:
            early = (self.drawn < self.fewest)[:, None]
            logits = logits.index_copy(1, self.stop, logits[:, self.stop].masked_fill(early, float("-inf")))
        return logits

    def _draw(self, logits: torch.Tensor) -> None:
        """Sample a token for each sequence, and update which sequences are finished."""
        logits = self._penalize(logits).contiguous()
        draw(self.sampling, logits, self.token, self.finished, self.stop, self.seed, self.drawn, self.rows)
        if self.mentioned is not None:
            self.mentioned.scatter_(1, self.token, True)

    def ready(self) -> None:
        """Run a step on an empty cache, which loads kernels and lets cuBLAS choose algorithms. Then capture a step."""
        if self.device.type != "cuda" or self.is_ready:
            return
        self.is_ready = True
        if self.captures:
            self._clear()
            self._follow(0)
            self.run()
            self.run()

    def _clear(self) -> None:
        for buffer in (self.mask, self.finished, self._counts, self.token, self.starts):
            buffer.zero_()
        self.padding.fill_(1)

    def _follow(self, count: int) -> None:
        """Prepare decoding steps after `count` tokens per sequence. The lengths of a step include its new token."""
        self.slots.follow(count)
        self.lengths += 1

    def _begin(self, prompts: list[torch.Tensor], seed: int, fewest: list[int], pad: int) -> torch.Tensor:
        """Initialize the buffers for these prompts. Return the token ids [batch, tokens], padded on the left."""
        count = max(map(len, prompts))
        ids = torch.stack([torch.cat([x.new_full((count - len(x),), pad), x]) for x in prompts])
        lengths = torch.tensor([len(x) for x in prompts], device=self.device)
        self._clear()
        self.seed.fill_(seed)
        self.fewest.copy_(torch.tensor(fewest))
        self.starts.copy_(count - lengths)
        self.lengths.copy_(lengths)
        self.positions.copy_(lengths[:, None])
        seen = torch.arange(count, device=self.device) >= self.starts[:, None]
        self.padding[:, :count] = seen
        self.mask[:, 0, 0, :count] = seen
        for distance, table in self._tables.items():
            table.copy_(_attention.tables(self.starts, distance, table.shape[1]))
        return ids

    def _mention(self, prompts: list[torch.Tensor], like: torch.Tensor) -> None:
        """Record which tokens occur in the prompts, if a repetition penalty applies to them."""
        if self.sampling.repetition_penalty == 1:
            return
        if self.mentioned is None:
            self.mentioned = torch.zeros_like(like, dtype=torch.bool)
        self.mentioned.zero_()
        for row, prompt in zip(self.mentioned, prompts, strict=True):
            row[prompt] = True

    def prefill(self, prompts: list[torch.Tensor], seed: int, fewest: list[int], pad: int = 0) -> torch.Tensor:
        """Start a generation: run the prompts, and sample the first new token of each. Return the logits."""
        ids = self._begin(prompts, seed, fewest, pad)
        count = ids.shape[1]
        padding = self.padding[:, :count]
        self.slots.begin(count)
        logits = self._forward(ids, (padding.cumsum(1) - 1).clamp(min=0), padding)
        self._mention(prompts, logits)
        self._draw(logits)
        self.drawn += 1
        self._follow(count)
        return logits

    def advance(self) -> torch.Tensor:
        """Run the model on the last sampled token, and sample the next one. Return the logits."""
        self.mask.index_fill_(3, self.slots.places, True)
        logits = self._forward(self.token, self.positions, self.padding)
        self._draw(logits)
        self._counts += self._ones
        return logits

    def step(self) -> None:
        """Run a step without returning the logits. This is the function that is captured in a graph."""
        self.advance()

    def run(self) -> None:
        """Run a step. If possible, replay the graph."""
        if not self.captures:
            self.step()
            return
        try:
            self.graphs.run("step", self.step)
        except RuntimeError as error:
            # The capture failed, so none of the captured kernels has run. Run the step without a graph.
            self.why = f"its step cannot be captured ({str(error).splitlines()[0]})"
            warnings.warn(f"generate: {self.why}", stacklevel=3)
            torch.cuda.synchronize(self.device)
            self.step()
