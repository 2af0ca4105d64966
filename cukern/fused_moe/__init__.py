"""The fused mixture-of-experts layer: as one function, and as exchangeable classes modeled on vLLM's modular kernel."""

from __future__ import annotations

from cukern.formats.fused_moe import QUANTIZATIONS, FusedMoEActivationFormat, FusedMoEQuantConfig
from cukern.fused_moe.experts import (
    AutoExperts,
    BatchedAutoExperts,
    BatchedFp8BlockExperts,
    BatchedGroupedGemmExperts,
    Fp4Experts,
    Fp8BlockExperts,
    Fp8Experts,
    GroupedGemmExperts,
)
from cukern.fused_moe.layer import fused_experts
from cukern.fused_moe.manager import All2AllManager
from cukern.fused_moe.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEModularKernel,
    FusedMoEPermuteExpertsUnpermute,
    FusedMoEPrepareAndFinalize,
    Prepared,
    SortedTokens,
    Workspaces,
)
from cukern.fused_moe.naive import NaiveBatchedExperts
from cukern.fused_moe.nccl import NcclPrepareAndFinalize, RowExchange
from cukern.fused_moe.prepare_finalize import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from cukern.fused_moe.push import PushPrepareAndFinalize
from cukern.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduce,
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNaiveBatched,
    TopKWeightAndReduceNoOp,
)
from cukern.fused_moe.two_level import TwoLevelPrepareAndFinalize

__all__ = [
    "QUANTIZATIONS",
    "All2AllManager",
    "AutoExperts",
    "BatchedAutoExperts",
    "BatchedFp8BlockExperts",
    "BatchedGroupedGemmExperts",
    "BatchedPrepareAndFinalize",
    "ExpertTokensMetadata",
    "Fp4Experts",
    "Fp8BlockExperts",
    "Fp8Experts",
    "FusedMoEActivationFormat",
    "FusedMoEModularKernel",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "FusedMoEQuantConfig",
    "GroupedGemmExperts",
    "MoEPrepareAndFinalizeNoEP",
    "NaiveBatchedExperts",
    "NcclPrepareAndFinalize",
    "Prepared",
    "PushPrepareAndFinalize",
    "RowExchange",
    "SortedTokens",
    "TopKWeightAndReduce",
    "TopKWeightAndReduceContiguous",
    "TopKWeightAndReduceDelegate",
    "TopKWeightAndReduceNaiveBatched",
    "TopKWeightAndReduceNoOp",
    "TwoLevelPrepareAndFinalize",
    "Workspaces",
    "fused_experts",
]
