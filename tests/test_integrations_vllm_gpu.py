"""vLLM's experts and attention on the GPU: results, CUDA graphs with lengths of the device, and no early context."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import cukern.integrations.vllm as engine
from tests.test_integrations_vllm import (
    ROOT,
    TESTED,
    Modules,
    nothing_is_said,  # noqa: F401
    vllm_fixture,  # noqa: F401
)
from tests.test_integrations_vllm_results import DECODES, FORMS, LAYERS, MIXED, Step, close, run_layer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", LAYERS)
def test_experts(vllm: Modules, name: str) -> None:
    engine.register()
    layer = LAYERS[name]()
    first, second = run_layer(layer, "cuda"), run_layer(layer, "cuda")
    close(first, layer.wanted, layer.tolerance)
    assert torch.equal(first, second)


@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_vllms_cache(
    vllm: Modules, form: str, sequences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    step = Step(form, sequences, "cuda")
    for batch_invariant in (False, True):
        monkeypatch.setitem(vars(vllm["vllm.envs"]), "VLLM_BATCH_INVARIANT", batch_invariant)
        output = torch.full_like(step.query, torch.nan)
        step.forward(step.metadata(), output)
        step.check(output)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_reads_the_lengths_of_its_replay(vllm: Modules, form: str) -> None:
    """vLLM captures a decode with arbitrary lengths, and writes the lengths of a step into the same tensors."""
    step = Step(form, DECODES, "cuda")
    metadata, output = step.metadata(), torch.full_like(step.query, torch.nan)
    lengths, table = metadata.seq_lens.clone(), metadata.block_table.clone()
    metadata.seq_lens.fill_(1)
    metadata.block_table.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.forward(metadata, output)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.forward(metadata, output)
    metadata.seq_lens.copy_(lengths)
    metadata.block_table.copy_(table)
    graph.replay()
    step.check(output)
    # A sequence of length 0 pads the batch of a graph.
    metadata.seq_lens[-1] = 0
    graph.replay()
    assert not output[step.total - 1].any()


def test_register_makes_no_context() -> None:
    """The front end of vLLM forks after `register`, and CUDA does not survive a fork."""
    code = f"""
import ctypes
import pytest
from tests import vllm_stand_in
import cukern.integrations.vllm as engine
vllm_stand_in.install(pytest.MonkeyPatch(), {TESTED!r})
engine.register()
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
print(cuda.cuCtxGetCurrent(ctypes.byref(context)))  # 3: CUDA is not initialized
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr
