"""A decoding loop with the model's own cache, for models whose steps cannot be captured in a CUDA graph.

transformers' `generate` prepares the first inputs, and the model's `prepare_inputs_for_generation` prepares the inputs
of each step. So the loop gives the same results as transformers, also for a model whose state is more than keys and
values. Prompts of the same length run as one batch, without padding.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from cukern.integrations.transformers._options import Options
from cukern.integrations.transformers._rewrite import written
from cukern.integrations.transformers._sampling import draw
from cukern.integrations.transformers._state import running
from cukern.runtime import check


class _Group:
    """The prompts of one length, which run as one batch, and the model's state for them."""

    def __init__(self, rows: list[int], ids: torch.Tensor, prepared: dict[str, Any]) -> None:
        self.rows, self.ids = torch.tensor(rows, device=ids.device), ids
        self.processors = prepared.pop("processors")
        self.inputs: dict[str, Any] = prepared
        self.is_first = True


def _hold(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> dict[str, Any]:
    """Return the prepared inputs instead of decoding. transformers' `generate` calls this as a custom decoding loop."""
    return {"processors": logits_processor, **inputs}


def _held(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors that are plain attributes of modules, keyed by module name and attribute name."""
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


class Growing:
    """The decoding loop for one batch of prompts: its buffers, and its prompts grouped by length."""

    captures = False

    def __init__(self, model: Any, batch: int, options: Options, why: str) -> None:
        self.model, self.sampling, self.why, self.options = model, options.sampling, why, options
        self.device = next(model.parameters()).device
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.rows = torch.arange(batch, device=self.device)
        self.stop = torch.tensor(self.sampling.stop, dtype=torch.int64, device=self.device)
        self.groups: list[_Group] = []
        self.order = self.rows  # for each prompt, the index of its row when the rows of all groups are concatenated
        self.seed = self.drawn = 0

    def ready(self) -> None:
        """Do nothing, because nothing is captured."""

    def _prepared(self, rows: list[int], ids: torch.Tensor) -> _Group:
        config = copy.deepcopy(self.options.config)
        config.update(
            do_sample=False, max_new_tokens=self.options.most[rows[0]], max_length=None, min_length=None,
            min_new_tokens=self.options.fewest[rows[0]] or None, cache_implementation=None,
        )  # fmt: skip
        # Pass a mask, because otherwise transformers treats prompt tokens with the pad id as padding.
        takes_mask = "attention_mask" in inspect.signature(written(self.model)).parameters
        mask = {"attention_mask": torch.ones_like(ids)} if takes_mask else {}
        made = self.model.generate(ids, generation_config=config, custom_generate=_hold, **mask)
        return _Group(rows, ids, made)

    def prefill(self, prompts: list[torch.Tensor], seed: int, fewest: list[int], pad: int = 0) -> None:
        """Run the prompts, and sample the first new token of each. `fewest` and `pad` are not used."""
        self.seed = seed
        for length in dict.fromkeys(map(len, prompts)):
            rows = [i for i, x in enumerate(prompts) if len(x) == length]
            self.groups.append(self._prepared(rows, torch.stack([prompts[i] for i in rows])))
        self.order = torch.cat([group.rows for group in self.groups]).argsort()
        before = _held(self.model)
        self.run()
        holders = [key[0] for key, x in _held(self.model).items() if before.get(key) is not x]
        if len(self.groups) > 1 and holders:
            holder = type(self.model.get_submodule(holders[0])).__name__
            lengths = [group.ids.shape[1] for group in self.groups]
            check.fail("prompts", f"of one length, since {holder} holds the state of its sequences", lengths)

    def _logits(self, group: _Group) -> torch.Tensor:
        """Run the model on a group. Return the logits of the next tokens, after transformers' logits processors.

        The logits are float32 [rows, vocab].
        """
        if not group.is_first:
            group.ids = torch.cat([group.ids, self.token[group.rows]], dim=1)
        many = None if group.is_first or not group.inputs["use_cache"] else 1
        inputs = self.model.prepare_inputs_for_generation(
            group.ids, next_sequence_length=many, is_first_iteration=group.is_first, **group.inputs
        )
        with running(SimpleNamespace(mask=None, tokens=0)):
            out = self.model(**inputs, return_dict=True)
        group.is_first = False
        group.inputs = self.model._update_model_kwargs_for_generation(out, group.inputs, is_encoder_decoder=False)
        logits = out.logits[:, -1].to(self.device, torch.float32, copy=True)
        return group.processors(group.ids, logits)  # type: ignore[no-any-return]

    def run(self) -> None:
        """Run one step of all groups: sample one token per prompt."""
        found = [self._logits(group) for group in self.groups]
        logits = torch.cat(found)[self.order]
        draw(self.sampling, logits, self.token, self.finished, self.stop, self.seed, self.drawn, self.rows)
        self.drawn += 1
