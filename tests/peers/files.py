"""The test files of the families that cukern has, below a folder of each peer, and what they take."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple


class Load(NamedTuple):
    """What the cases of a file take, or those of them that `cases` matches."""

    seconds: float  # of one process, for all of them, beside 15 other processes on an H200
    most: int = 1000  # processes that may run them at the same time
    cases: str = ""  # a pattern of names
    limit: float = 0.0  # seconds that one of them may take, where it is more than what is given for all
    waits: bool = False  # most of the time is waiting for the GPU, thousands of times in a case
    first: str = ""  # a pattern of those that take longest, which are begun first


class Job(NamedTuple):
    """Cases of a file that several processes share."""

    folder: Path
    file: str
    load: Load
    others: tuple[str, ...] = ()  # patterns of the cases that are another job's
    every: int = 1  # of the cases of each test, one in so many
    rank: int = 0  # jobs of a higher one are begun before others

    @property
    def name(self) -> str:
        """The file's name, as it is in a table of several folders."""
        return f"{self.folder.name}/{self.file}"

    def has(self, case: str) -> bool:
        """Whether a case of the file is one of the job's."""
        return bool(re.search(self.load.cases, case)) and not any(re.search(other, case) for other in self.others)


#: By file one load, or several with patterns and one for the rest. GPUs that several processes use are theirs in
#: turns, of some milliseconds each: cases that keep one busy for seconds run one at a time, or all others wait for
#: their turn at each synchronization. Cases that wait thousands of times have the last GPU of several for themselves.
FILES = {
    # vLLM 0.33.0
    "tests/kernels/attention/test_attention.py": [Load(2)],
    "tests/kernels/attention/test_cache.py": [
        Load(100, 1, r"^test_concat_and_cache_ds_mla\[", 150, True),  # a synchronization for each of 21504 numbers
        Load(170, first=r"^test_swap_blocks\[.*-10000-"),
    ],
    "tests/kernels/attention/test_flash_attn.py": [Load(60)],
    "tests/kernels/attention/test_flashmla.py": [Load(650, 4, first=r"-16384-[12]-128\]$")],
    "tests/kernels/attention/test_merge_attn_states.py": [Load(1500)],
    "tests/kernels/core/test_activation.py": [Load(5)],
    "tests/kernels/core/test_fused_quant_layernorm.py": [Load(30)],
    "tests/kernels/core/test_fused_silu_mul_block_quant.py": [Load(10)],
    "tests/kernels/core/test_layernorm.py": [Load(20)],
    "tests/kernels/moe/test_batched_moe.py": [Load(260)],
    "tests/kernels/moe/test_block_fp8.py": [Load(450, 4, first=r"-4608-7168\]$")],
    "tests/kernels/moe/test_fused_topk.py": [Load(10)],
    "tests/kernels/moe/test_grouped_topk.py": [Load(20)],
    "tests/kernels/moe/test_moe.py": [Load(200, 6, first="-32768-")],
    "tests/kernels/moe/test_moe_align_block_size.py": [
        Load(1900, waits=True, first=r"_with_expert_map\[|-(2256|4096)\]$")
    ],
    "tests/kernels/moe/test_moe_permute_unpermute.py": [Load(900, waits=True, first=r"-5000\]$")],
    "tests/kernels/moe/test_silu_mul_fp8_quant_deep_gemm.py": [Load(5)],
    "tests/kernels/moe/test_topk_softplus_sqrt.py": [Load(15)],
    "tests/kernels/moe/test_triton_moe_ptpc_fp8.py": [Load(10)],
    "tests/kernels/quantization/test_block_fp8.py": [Load(40)],
    "tests/kernels/quantization/test_fp8_quant.py": [Load(10)],
    "tests/kernels/quantization/test_int8_quant.py": [Load(20)],
    "tests/kernels/quantization/test_nvfp4_quant.py": [Load(1)],
    "tests/kernels/quantization/test_per_token_group_quant.py": [Load(10)],
    "tests/kernels/test_apply_repetition_penalties.py": [Load(220, waits=True)],
    "tests/kernels/test_cache_kernels.py": [Load(1)],
    "tests/kernels/test_cp_gather_fp8.py": [Load(40)],
    "tests/kernels/test_fused_quant_activation.py": [Load(15)],
    # FlashInfer
    "tests/utils/test_sampling.py": [
        Load(400, 1, r"^test_sampling_from_logits\[", 150, True),  # 15000 synchronizations each
        Load(300, 2, r"_freq\["),
        Load(
            3600,
            cases=r"^test_(top_k_top_p_joint_sampling\w*|(top_p|top_k|min_p)_sampling(_with_variable_k)?|sampling)\[",
            waits=True,
            first="^test_top_k_top_p_joint|^test_top_[pk]_sampling",
        ),
        Load(900, first="mask_logits"),
    ],
    "tests/utils/test_norm.py": [Load(95)],
    "tests/utils/test_activation.py": [Load(90)],
    "tests/attention/test_page.py": [Load(10)],
    # SGLang
    "sgl-kernel/tests/test_activation.py": [Load(40)],
    "sgl-kernel/tests/test_flashmla.py": [Load(520)],
    "sgl-kernel/tests/test_kimi_k2_moe_fused_gate.py": [Load(5)],
    "sgl-kernel/tests/test_merge_state_v2.py": [Load(80)],
    "sgl-kernel/tests/test_moe_align.py": [Load(250)],
    "sgl-kernel/tests/test_moe_fused_gate.py": [Load(10)],
    "sgl-kernel/tests/test_moe_topk_sigmoid.py": [Load(10)],
    "sgl-kernel/tests/test_moe_topk_softmax.py": [Load(10)],
    "sgl-kernel/tests/test_norm.py": [Load(10)],
    "sgl-kernel/tests/test_per_token_group_quant_8bit.py": [Load(80)],
    "sgl-kernel/tests/test_per_token_quant_fp8.py": [Load(10)],
    "sgl-kernel/tests/test_sampling.py": [Load(800, waits=True, first=r"^test_(min_p|top_k_top_p_joint)")],
    # FlashMLA
    "tests/test_flash_mla.py": [Load(30)],
    "tests/test_flash_mla_dense_decoding.py": [Load(1400)],
    "tests/test_flash_mla_sparse_decoding.py": [Load(1120)],
}
#: The same of vLLM 0.10.2, where it differs: by a part of the folder's name.
OF_FOLDERS = {
    "0.10.2": {
        "tests/kernels/attention/test_attention.py": [Load(60)],
        "tests/kernels/attention/test_cache.py": [Load(170, first=r"^test_swap_blocks\[.*-10000-")],
        "tests/kernels/attention/test_flashmla.py": [Load(490, 4, first=r"-16384-[12]-128\]$")],
        "tests/kernels/attention/test_merge_attn_states.py": [Load(160)],
        "tests/kernels/core/test_layernorm.py": [Load(30)],
        "tests/kernels/moe/test_batched_moe.py": [Load(500)],
        "tests/kernels/moe/test_moe_align_block_size.py": [Load(600, waits=True, first=r"-(2256|4096)\]$")],
        "tests/kernels/moe/test_moe_permute_unpermute.py": [Load(900, waits=True, first=r"-(1024|2048|4096)\]$")],
    }
}
_UNKNOWN = [Load(30)]


def files_of(folder: Path, only: str = "") -> list[str]:
    """The files of a folder that are known, or all of one without known ones.

    `only` has parts of names with commas between them: files with one of them, and without those after a "-".
    """
    names = [name for name in FILES if (folder / name).exists()] or sorted(x.name for x in folder.glob("test_*.py"))
    if not names:
        raise SystemExit(f"FOLDER must hold test files of a peer, got {folder} (see tests.peers.files.FILES)")
    words = [word for word in only.split(",") if word]
    wanted, unwanted = ([w for w in words if not w.startswith("-")], [w[1:] for w in words if w.startswith("-")])
    return [
        name
        for name in names
        if (not wanted or any(word in f"{folder.name}/{name}" for word in wanted))
        and not any(word in f"{folder.name}/{name}" for word in unwanted)
    ]


def jobs_of(folder: Path, only: str = "", every: int = 1, seconds: float = math.inf) -> list[Job]:
    """The jobs of a folder, those that take longest first: one case in `every`, or fewer to take `seconds` a file."""
    jobs = []
    for name in files_of(folder, only):
        own = next((files for part, files in OF_FOLDERS.items() if part in folder.name), {})
        loads = own.get(name) or FILES.get(name, _UNKNOWN)
        for load in loads:
            others = () if load.cases else tuple(other.cases for other in loads if other.cases)
            share = max(every, math.ceil(sum(load.seconds for load in loads) / seconds))
            jobs.append(Job(folder, name, load, others, share))
    return sorted(jobs, key=lambda job: -job.load.seconds)
