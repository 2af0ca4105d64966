"""A type checker on a program that uses cukern: what it takes, what it refuses, and the types of results."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("torch")
api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).parents[1]
#: The words for types in the comments of the program.
TYPES = {
    "torch._tensor.Tensor": "Tensor",
    "numpy.ndarray[Any, Any]": "ndarray",
    "cukern.ops.mla_decode.first_call.": "",
}
#: A comment `T: type` has what mypy reveals in its line, `E: text` a part of the error there. No other line has one.
PROGRAM = """
import numpy as np
import torch

import cukern
from cukern.compat import flash_mla
from cukern.fused_moe import fused_experts
from cukern.models import Decoding, Encoder

x, bias = np.zeros((4, 256), np.float32), np.ones(256, np.float32)
t, w = torch.zeros(4, 256), torch.ones(256)
slots = torch.arange(4)

# Results are of the arguments' library.
reveal_type(cukern.rms_norm(t, w))  # T: Tensor
reveal_type(cukern.rms_norm(x, bias))  # T: ndarray
reveal_type(cukern.moe_fused_gate(t, w, 8, 4, 8))  # T: tuple[Tensor, Tensor]
reveal_type(cukern.fused_add_rms_norm(t, t, w))  # T: tuple[Tensor, Tensor]
reveal_type(cukern.silu_and_mul(x))  # T: ndarray
reveal_type(cukern.per_token_group_quant_fp8(t, 128))  # T: tuple[Tensor, Tensor]
reveal_type(cukern.moe_sort(slots[:, None], 256))  # T: tuple[Tensor, Tensor, Tensor]
reveal_type(cukern.build_sequence_length_padding_offset(slots, 8))  # T: tuple[Tensor, Tensor, int]
reveal_type(fused_experts(t, t, t, t, slots))  # T: Tensor
reveal_type(cukern.sample(t, temperature=w, top_k=50))  # T: Tensor
reveal_type(cukern.get_mla_metadata())  # T: tuple[FlashMLASchedMeta, None]
plan, splits = cukern.get_mla_metadata(slots, 128, 1)
reveal_type(plan)  # T: Tensor
reveal_type(cukern.flash_mla_with_kvcache(t, t, slots, slots, 512, plan, splits))  # T: tuple[Tensor, Tensor]
reveal_type(flash_mla.get_mla_metadata())  # T: tuple[FlashMLASchedMeta, None]
out, lse = cukern.flash_mla_with_kvcache(t, t, slots, slots, 512, *flash_mla.get_mla_metadata())
reveal_type(lse)  # T: Tensor

# They are used as what they are: ids are no floats, though the logits are.
weights, ids = cukern.moe_fused_gate(x, bias, 8, 4, 8)
rows: np.ndarray = x[ids] * weights[:, 0, None] + 1
on_host: torch.Tensor = cukern.softmax(t / 2).cpu()[0] + 1
x = cukern.softmax(x)

# What is no array, arrays of two libraries, and what a signature does not have.
cukern.rms_norm("x", w)  # E: of "rms_norm" cannot be
cukern.rms_norm([1.0, 2.0], bias)  # E: of "rms_norm" cannot be
cukern.rms_norm(t, bias)  # E: of "rms_norm" cannot be
cukern.rms_norm(t)  # E: Missing positional argument "weight"
cukern.rms_norm(t, w, eps=1e-5)  # E: Unexpected keyword argument "eps"
cukern.rms_norm(t, w).no_such_method()  # E: "Tensor" has no attribute
count: int = cukern.softmax(t)  # E: Incompatible types in assignment
cukern.swap_blocks(t, 1, 64, x)  # E: incompatible type "int"; expected "Array"

# Caches that are written, scales that are numbers.
reveal_type(cukern.reshape_and_cache_flash(t, t, t, t, slots, "auto", 1.0, w))  # T: None
cukern.reshape_and_cache_flash(t, t, "cache", t, slots, "auto", w, w)  # E: of "reshape_and_cache_flash" cannot be
cukern.swap_blocks(t, t.cuda(), 64, np.zeros((1, 2), np.int64))

# Models take ids of any library, and lists.
encoder, decoding = Encoder.from_directory("model"), Decoding.from_directory("model")
for given in (x, t, [[1, 2]]):
    encoder(given)
encoder(x, t)
encoder("a text")  # E: has incompatible type "str"
reveal_type(decoding([[1, 2]]))  # T: tuple[Any, Any, Any, fallback=cukern.models.decoding.Generated]
reveal_type(encoder.embed(["a text"]))  # T: Any
"""


def _checked(program: Path) -> dict[int, list[str]]:
    """What mypy says of a program, by line, with the options that it has by itself."""
    config = program.with_name("mypy.ini")
    # The sources are found as an installed package is: mypy says nothing of what is in them.
    config.write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n")
    options = ["--config-file", str(config), "--cache-dir", str(ROOT / ".mypy_cache" / "typing")]
    said, failed, _ = api.run([*options, str(program)])
    assert not failed, failed
    found = defaultdict(list)
    for line in said.splitlines():
        if match := re.match(r".*\.py:(\d+): (note: Revealed type is|error:) (.*)", line):
            found[int(match[1])].append(match[3])
    return found


def test_a_program_is_checked(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    found = _checked(program)
    for number, line in enumerate(PROGRAM.splitlines(), 1):
        _, kind, wanted = line.partition("  # T: ") if "  # T: " in line else line.partition("  # E: ")
        said = " ".join(found.pop(number, []))
        for long, short in TYPES.items():
            said = said.replace(long, short)
        assert said == f'"{wanted}"' if "T:" in kind else wanted in said and bool(wanted) == bool(said), (line, said)
    assert not found
