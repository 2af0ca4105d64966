"""List the classes and quantizations that form a layer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cukern.formats.fused_moe import GROUP, NOT_QUANTIZED, QUANTIZATIONS, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe import experts, prepare_finalize
from cukern.fused_moe.modular_kernel import FusedMoEPermuteExpertsUnpermute, FusedMoEPrepareAndFinalize, refusal
from cukern.fused_moe.naive import NaiveBatchedExperts
from cukern.fused_moe.nccl import NcclPrepareAndFinalize
from cukern.fused_moe.push import PushPrepareAndFinalize
from cukern.ops.all_to_all import AllToAllState

#: The classes by name. The suffix ":batched" selects the batched format.
PREPARE_FINALIZE: dict[str, Callable[..., FusedMoEPrepareAndFinalize]] = {
    "MoEPrepareAndFinalizeNoEP": prepare_finalize.MoEPrepareAndFinalizeNoEP,
    "BatchedPrepareAndFinalize": prepare_finalize.BatchedPrepareAndFinalize,
    "PushPrepareAndFinalize": PushPrepareAndFinalize,
    "PushPrepareAndFinalize:batched": functools.partial(PushPrepareAndFinalize, batched=True),
    "NcclPrepareAndFinalize": NcclPrepareAndFinalize,
}
EXPERTS: dict[str, type[FusedMoEPermuteExpertsUnpermute]] = {
    kind.__name__: kind
    for kind in (
        experts.GroupedGemmExperts,
        experts.BatchedGroupedGemmExperts,
        experts.Fp8BlockExperts,
        experts.BatchedFp8BlockExperts,
        experts.Fp8Experts,
        experts.Fp4Experts,
        experts.AutoExperts,
        experts.BatchedAutoExperts,
        NaiveBatchedExperts,
    )
}


class Combination(NamedTuple):
    """The names of two classes and a quantization. `refusal` says why they cannot form a layer, or is None."""

    prepare_finalize: str
    experts: str
    quantization: str | None
    refusal: str | None


def make_prepare_finalize(
    name: str,
    max_num_tokens: int,
    num_local_experts: int,
    hidden: int = GROUP,
    topk: int = 1,
    device: int | None = None,
) -> FusedMoEPrepareAndFinalize:
    """Make an object of the class `name` for a single rank, on the CUDA `device` (None: host memory).

    "NcclPrepareAndFinalize" uses torch's default group.
    """
    parameters = inspect.signature(PREPARE_FINALIZE[name]).parameters
    sizes: dict[str, Any] = {
        "group": None, "num_experts": num_local_experts, "max_num_tokens": max_num_tokens,
        "num_local_experts": num_local_experts,
    }  # fmt: skip
    if "state" in parameters:
        (sizes["state"],) = AllToAllState.local(
            [device], max_tokens=max_num_tokens, hidden=hidden, topk=topk, num_experts=num_local_experts
        )
    return PREPARE_FINALIZE[name](**{key: value for key, value in sizes.items() if key in parameters})


def _for_table(name: str) -> FusedMoEPrepareAndFinalize:
    """Make an object that only `refusal` inspects, and that never runs."""
    kind = PREPARE_FINALIZE[name]
    # `NcclPrepareAndFinalize.__init__` needs a process group.
    return kind.__new__(kind) if kind is NcclPrepareAndFinalize else make_prepare_finalize(name, 1, 1)


def make_experts(
    name: str, config: FusedMoEQuantConfig, activation_format: FusedMoEActivationFormat
) -> FusedMoEPermuteExpertsUnpermute:
    kind: Any = EXPERTS[name]
    if "use_batched_format" in inspect.signature(kind).parameters:
        batched = activation_format is FusedMoEActivationFormat.BatchedExperts
        return kind(config, use_batched_format=batched)
    return kind(config)


def _dummy_config(quantization: str | None) -> FusedMoEQuantConfig:
    if quantization is None:
        return NOT_QUANTIZED
    one = np.ones(1, np.float32)
    names = ["w1_scale", "w2_scale", *(["w1_global_scale", "w2_global_scale"] if quantization == "nvfp4" else [])]
    return FusedMoEQuantConfig.make(quantization, **dict.fromkeys(names, one))


def combinations() -> Iterator[Combination]:
    for pf_name in PREPARE_FINALIZE:
        pf = _for_table(pf_name)
        for experts_name in EXPERTS:
            for quantization in (None, *QUANTIZATIONS):
                made = make_experts(experts_name, _dummy_config(quantization), pf.activation_format)
                yield Combination(pf_name, experts_name, quantization, refusal(pf, made))


def quantizations_of(pf_name: str, experts_name: str) -> tuple[list[str | None], str]:
    """Return the quantizations that two classes support, and why they refuse one of the others ("": no others)."""
    PREPARE_FINALIZE[pf_name], EXPERTS[experts_name]
    matching = [c for c in combinations() if (c.prepare_finalize, c.experts) == (pf_name, experts_name)]
    return [c.quantization for c in matching if not c.refusal], next((c.refusal for c in matching if c.refusal), "")
