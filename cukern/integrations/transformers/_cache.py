"""The static KV cache of `generate`, stored as pages. All layers share one length, a tensor on the device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_causal_mask

import cukern
from cukern.integrations.transformers._attention import PAGE

#: The names of the cache argument of a `forward`: from transformers 5.24 on, in earlier versions, and in Mamba models.
CACHE_NAMES = "cache", "past_key_values", "cache_params"
CACHE_NAME = next(name for name in inspect.signature(create_causal_mask).parameters if name in CACHE_NAMES)


class Slots:
    """The cache slots of the tokens of a forward pass, the same in all layers.

    `length`, int64 [], and `step_slots`, int64 [batch], are on the device, so that one CUDA graph serves all steps. The
    caller increments them after a step.
    """

    def __init__(self, tokens: int, length: torch.Tensor, step_slots: torch.Tensor) -> None:
        self.length, self._step_slots = length, step_slots
        self._first_slots = torch.arange(len(step_slots), device=length.device) * tokens
        self.positions, self.slots = length.view(1), step_slots

    def prepare_prefill(self, count: int) -> None:
        """Set the positions and slots of the first `count` tokens of each sequence."""
        self.positions = torch.arange(count, device=self.length.device)
        self.slots = (self._first_slots[:, None] + self.positions).flatten()

    def prepare_step(self, count: int) -> None:
        """Set the positions and slots of a step: one new token after `count` cached tokens of each sequence."""
        self.length.fill_(count)
        torch.add(self._first_slots, count, out=self._step_slots)
        self.positions, self.slots = self.length.view(1), self._step_slots


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape [batch, heads, tokens, dim] to [batch * tokens, heads, dim] with contiguous tokens."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows[0].is_contiguous() else rows.contiguous()


class PagedLayer(StaticLayer):  # type: ignore[misc]
    """A cache layer that stores keys and values as [batch, tokens, kv_heads, head_dim]. One kernel writes both.

    The layer behaves like a `StaticLayer` if keys and values have different head sizes.
    """

    is_sliding = False

    def __init__(self, max_cache_len: int, slots: Slots) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self._slots = slots
        self.pages: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[1:] != value_states.shape[1:] and key_states.shape[-1] != value_states.shape[-1]:
            super().lazy_initialization(key_states, value_states)
            return
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        self.batch_size, self.num_heads, self.k_head_dim, self.v_head_dim = batch, heads, dim, dim
        shape = batch * self.max_cache_len // PAGE, PAGE, heads, dim
        # Fill the cache with zeros, because sdpa multiplies masked values by zero, and zero times an uninitialized NaN
        # is NaN.
        self.pages = key_states.new_zeros(shape), key_states.new_zeros(shape)
        self.keys, self.values = (x.view(batch, self.max_cache_len, heads, dim).transpose(1, 2) for x in self.pages)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values to their slots. Return the whole cache."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.pages is None:
            keys, values = self.keys, self.values
            assert keys is not None and values is not None
            return (
                keys.index_copy_(2, self._slots.positions, key_states),
                values.index_copy_(2, self._slots.positions, value_states),
            )
        key, value = _token_rows(key_states), _token_rows(value_states)
        cukern.reshape_and_cache_flash(key, value, self.pages[0], self.pages[1], self._slots.slots, "auto", 1.0, 1.0)
        return self.keys, self.values

    def get_seq_length(self) -> torch.Tensor:
        return self._slots.length


def static_cache(model: Any, tokens: int, length: torch.Tensor, step_slots: torch.Tensor) -> tuple[Cache, Slots] | str:
    """Return a cache for CUDA graphs and its `Slots`, or the reason why the model has no such cache.

    `tokens` is a multiple of PAGE. Layers with a sliding window keep all tokens; their masks hide old tokens.
    """
    try:
        cache = StaticCache(config=model.config, max_cache_len=tokens)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        return f"transformers has no static cache for it ({error})"
    slots = Slots(tokens, length, step_slots)
    for i, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            return f"its cache has layers of {type(layer).__name__}, whose steps differ from each other on the host"
        cache.layers[i] = PagedLayer(tokens, slots)
    return cache, slots
