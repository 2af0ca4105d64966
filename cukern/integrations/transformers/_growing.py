"""A decoding loop with the model's own cache, for models whose steps cannot be captured in a CUDA graph.

transformers' `generate` prepares the first inputs, and the model's `prepare_inputs_for_generation` prepares the inputs
of each step. Prompts of the same length run as one batch, without padding.
"""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from cukern.integrations.transformers._options import Options
from cukern.integrations.transformers._rewrite import undecorated_forward
from cukern.integrations.transformers._sampling import draw
from cukern.integrations.transformers._state import running
from cukern.runtime import check


class _Group:
    def __init__(self, rows: list[int], ids: torch.Tensor, prepared: dict[str, Any]) -> None:
        self.rows, self.ids = torch.tensor(rows, device=ids.device), ids
        self.processors = prepared.pop("processors")
        self.inputs: dict[str, Any] = prepared
        self.is_first = True


def _return_inputs(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool = False,
    streamer: Any = None,
    **inputs: Any,
) -> dict[str, Any]:
    """Return the inputs. transformers' `generate` calls this as a custom decoding loop."""
    return {"processors": logits_processor, **inputs}


def _attribute_tensors(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, attribute): value
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


class Growing:
    captures = False

    def __init__(self, model: Any, batch: int, options: Options, why: str) -> None:
        self.model, self.sampling, self.why, self.options = model, options.sampling, why, options
        self.device = next(model.parameters()).device
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.finished = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.rows = torch.arange(batch, device=self.device)
        self.stop = torch.tensor(self.sampling.stop, dtype=torch.int64, device=self.device)
        self.groups: list[_Group] = []
        self.order = self.rows  # each prompt's row in the concatenated groups
        self.seed = self.sample_count = 0

    def ready(self) -> None:
        """Do nothing, because nothing is captured."""

    def _prepare(self, rows: list[int], ids: torch.Tensor) -> _Group:
        config = copy.deepcopy(self.options.config)
        config.update(
            do_sample=False, max_new_tokens=self.options.max_new_tokens[rows[0]], max_length=None, min_length=None,
            min_new_tokens=self.options.min_new_tokens[rows[0]] or None, cache_implementation=None,
        )  # fmt: skip
        # Pass a mask of ones, because transformers would otherwise treat prompt tokens with the pad id as padding.
        takes_mask = "attention_mask" in inspect.signature(undecorated_forward(self.model)).parameters
        mask = {"attention_mask": torch.ones_like(ids)} if takes_mask else {}
        made = self.model.generate(ids, generation_config=config, custom_generate=_return_inputs, **mask)
        return _Group(rows, ids, made)

    def prefill(self, prompts: list[torch.Tensor], seed: int, min_new_tokens: list[int], pad: int = 0) -> None:
        """Run the prompts, and sample their first new tokens. `min_new_tokens` and `pad` are not used."""
        self.seed = seed
        for length in dict.fromkeys(map(len, prompts)):
            rows = [i for i, x in enumerate(prompts) if len(x) == length]
            self.groups.append(self._prepare(rows, torch.stack([prompts[i] for i in rows])))
        self.order = torch.cat([group.rows for group in self.groups]).argsort()
        before = _attribute_tensors(self.model)
        self.run()
        holders = [key[0] for key, x in _attribute_tensors(self.model).items() if before.get(key) is not x]
        if len(self.groups) > 1 and holders:
            holder = type(self.model.get_submodule(holders[0])).__name__
            lengths = [group.ids.shape[1] for group in self.groups]
            check.fail("prompts", f"of one length, since {holder} holds the state of its sequences", lengths)

    def _logits(self, group: _Group) -> torch.Tensor:
        """Return float32 logits [rows, vocab] after transformers' logits processors."""
        if not group.is_first:
            group.ids = torch.cat([group.ids, self.token[group.rows]], dim=1)
        next_length = None if group.is_first or not group.inputs["use_cache"] else 1
        inputs = self.model.prepare_inputs_for_generation(
            group.ids, next_sequence_length=next_length, is_first_iteration=group.is_first, **group.inputs
        )
        with running(SimpleNamespace(mask=None, tokens=0)):
            out = self.model(**inputs, return_dict=True)
        group.is_first = False
        group.inputs = self.model._update_model_kwargs_for_generation(out, group.inputs, is_encoder_decoder=False)
        logits = out.logits[:, -1].to(self.device, torch.float32, copy=True)
        return group.processors(group.ids, logits)  # type: ignore[no-any-return]

    def run(self) -> None:
        found = [self._logits(group) for group in self.groups]
        logits = torch.cat(found)[self.order]
        draw(self.sampling, logits, self.token, self.finished, self.stop, self.seed, self.sample_count, self.rows)
        self.sample_count += 1
