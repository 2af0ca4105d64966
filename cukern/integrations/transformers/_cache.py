"""The static KV cache of `generate`, which is stored as pages. All layers share one length, a tensor on the device."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_causal_mask

import cukern
from cukern.integrations.transformers._attention import PAGE

#: Names of the argument or result of a `forward` that is the cache. The first is used from transformers 5.24 on, the
#: second in earlier versions, and the third in Mamba models.
CACHE_NAMES = "cache", "past_key_values", "cache_params"
#: The name of the cache in the installed version of transformers.
CACHE_NAME = next(name for name in inspect.signature(create_causal_mask).parameters if name in CACHE_NAMES)


class Slots:
    """The cache slots to write the tokens of a forward pass to. All layers share them.

    `length`, int64 [], and the slots of a step, int64 [batch], are on the device, so that one CUDA graph works for all
    steps. The caller increments them after a step.
    """

    def __init__(self, tokens: int, length: torch.Tensor, of_step: torch.Tensor) -> None:
        self.length, self._of_step = length, of_step
        self._first = torch.arange(len(of_step), device=length.device) * tokens
        self.places, self.slots = length.view(1), of_step

    def begin(self, count: int) -> None:
        """Prepare a prefill: set the positions and slots of the first `count` tokens of each sequence."""
        self.places = torch.arange(count, device=self.length.device)
        self.slots = (self._first[:, None] + self.places).flatten()

    def follow(self, count: int) -> None:
        """Prepare decoding: set the position and slot of one new token per sequence, which follows `count` tokens."""
        self.length.fill_(count)
        torch.add(self._first, count, out=self._of_step)
        self.places, self.slots = self.length.view(1), self._of_step


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """Reshape [batch, heads, tokens, dim] to [batch * tokens, heads, dim]. Copy if a token is not contiguous."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if rows[0].is_contiguous() else rows.contiguous()


class PagedLayer(StaticLayer):  # type: ignore[misc]
    """A cache layer that stores keys and values as [batch, tokens, kv_heads, head_dim]. One kernel writes both.

    If keys and values have different head sizes, the layer behaves like a `StaticLayer`.
    """

    is_sliding = False

    def __init__(self, max_cache_len: int, slots: Slots) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self._slots = slots
        self.pages: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the layer for the head count, head size and dtype of the first keys and values."""
        if key_states.shape[1:] != value_states.shape[1:] and key_states.shape[-1] != value_states.shape[-1]:
            super().lazy_initialization(key_states, value_states)
            return
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, dim = key_states.shape
        self.batch_size, self.num_heads, self.k_head_dim, self.v_head_dim = batch, heads, dim, dim
        shape = batch * self.max_cache_len // PAGE, PAGE, heads, dim
        # Initialize with zeros: sdpa multiplies masked values by zero, and an uninitialized NaN would remain NaN.
        self.pages = key_states.new_zeros(shape), key_states.new_zeros(shape)
        self.keys, self.values = (x.view(batch, self.max_cache_len, heads, dim).transpose(1, 2) for x in self.pages)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values to their slots. Return all keys and values of the cache."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.pages is None:
            keys, values = self.keys, self.values
            assert keys is not None and values is not None
            return (
                keys.index_copy_(2, self._slots.places, key_states),
                values.index_copy_(2, self._slots.places, value_states),
            )
        key, value = _token_rows(key_states), _token_rows(value_states)
        cukern.reshape_and_cache_flash(key, value, self.pages[0], self.pages[1], self._slots.slots, "auto", 1.0, 1.0)
        return self.keys, self.values

    def get_seq_length(self) -> torch.Tensor:
        """Return the number of tokens that were in the cache before this forward pass."""
        return self._slots.length


def static_cache(model: Any, tokens: int, length: torch.Tensor, of_step: torch.Tensor) -> tuple[Cache, Slots] | str:
    """Return a cache and its slots for steps that a CUDA graph can capture, or the reason why the model has none.

    `tokens` is a multiple of PAGE. `length`, int64 [], is the number of tokens in the cache. `of_step`, int64 [batch],
    contains the slots of the next tokens. Layers with a sliding window keep all tokens; their masks hide old tokens.
    """
    try:
        cache = StaticCache(config=model.config, max_cache_len=tokens)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        return f"transformers has no static cache for it ({error})"
    slots = Slots(tokens, length, of_step)
    for i, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            return f"its cache has layers of {type(layer).__name__}, whose steps differ from each other on the host"
        cache.layers[i] = PagedLayer(tokens, slots)
    return cache, slots
