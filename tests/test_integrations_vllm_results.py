"""`cukern.integrations.vllm`: results on the CPU, by the NumPy references, against formulas in float32."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import cukern
import cukern.integrations.vllm as engine
from tests import vllm_stand_in
from tests.test_integrations_vllm import (
    MOE,
    REPLACED,
    TESTED,
    Modules,
    found,
    log_fixture,  # noqa: F401
    logged,
    moe_config,
    nothing_is_said,  # noqa: F401
    own,
    vllm_fixture,  # noqa: F401
)

# --- the results of experts ---------------------------------------------------------------------------

TOKENS, EXPERTS, TOPK, HIDDEN, INTER = 7, 4, 2, 256, 128


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def routing(topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:topk] for _ in range(TOKENS)]).int()
    return torch.rand(TOKENS, topk, generator=generator) + 0.5, ids


def expected(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, *,
    biases: Any = (None, None), swigluoai: bool = False, rounds: Any = torch.Tensor.float,
) -> torch.Tensor:  # fmt: skip
    """The layer in float32, expert by expert. `rounds` rounds the activations before each product."""
    out = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            sums = rounds(x[token]) @ w1[expert].float().T
            sums += 0 if biases[0] is None else biases[0][expert].float()
            if swigluoai:
                gate, up = sums[::2].clamp(max=7.0), sums[1::2].clamp(-7.0, 7.0)
                activated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                gate, up = sums.chunk(2)
                activated = torch.nn.functional.silu(gate) * up
            result = rounds(activated) @ w2[expert].float().T
            result += 0 if biases[1] is None else biases[1][expert].float()
            out[token] += weight * result
    return out


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3, with one scale per 128 elements."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def apply(
    kind: Any, config: Any, quant: Any, x: Any, w1: Any, w2: Any, weights: Any, ids: Any, on_input: bool
) -> torch.Tensor:
    """Call `apply` as vLLM's modular kernel does: `workspace13` and `output` are the same memory."""
    experts = kind(config, quant)
    size = experts.moe_problem_size(x, w1, w2, ids) or (w1.shape[0], len(x), w1.shape[1], x.shape[1], ids.shape[1])
    assert size == (EXPERTS, TOKENS, 2 * INTER, HIDDEN, ids.shape[1])
    _, m, n, k, topk = size
    first, second, shape = experts.workspace_shapes(m, n, k, topk, EXPERTS, EXPERTS, None, config.activation)
    common = torch.full((max(map(math.prod, (first, shape))),), torch.nan, dtype=x.dtype, device=x.device)
    output = common.view(shape)
    experts.apply(
        output=output, hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=config.activation,
        global_num_experts=EXPERTS, expert_map=None, a1q_scale=None, a2_scale=None,
        workspace13=common[: math.prod(first)], workspace2=torch.empty(second, device=x.device),
        expert_tokens_meta=None, apply_router_weight_on_input=on_input,
    )  # fmt: skip
    assert experts.expects_unquantized_inputs
    assert type(experts.finalize_weight_and_reduce_impl()).__name__ == "TopKWeightAndReduceNoOP"
    return output


def quant_config(**values: Any) -> Any:
    names = ("w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_clamp_limit")
    return types.SimpleNamespace(**dict.fromkeys(names) | values)


def close(result: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    assert (result.cpu().float() - wanted).abs().max() <= share * wanted.abs().max()


class Layer(NamedTuple):
    """A layer of experts as vLLM passes it to a class: the weights of the checkpoint, and the formula's result."""

    name: str
    config: Any
    quant: Any
    weights: tuple[Any, Any]
    wanted: torch.Tensor
    topk: int = TOPK
    tolerance: float = 0.01  # of the largest result
    on_input: bool = False
    routed: torch.dtype = torch.float32  # of the router's weights


def _bf16_layer(swigluoai: bool = False, on_input: bool = False) -> Layer:
    w1 = rand(EXPERTS, 2 * INTER, HIDDEN, seed=2, scale=(3 if swigluoai else 1) * HIDDEN**-0.5)
    w2 = rand(EXPERTS, HIDDEN, INTER, seed=3, scale=INTER**-0.5)
    biases = (rand(EXPERTS, 2 * INTER, seed=4), rand(EXPERTS, HIDDEN, seed=5)) if swigluoai else (None, None)
    topk = 1 if on_input else TOPK
    weights, ids = routing(topk)
    weights = torch.ones_like(weights) if on_input else weights  # vLLM multiplies the input by the weights
    wanted = expected(TOKENS_IN, w1, w2, weights, ids, biases=biases, swigluoai=swigluoai)
    quant = quant_config(w1_bias=biases[0], w2_bias=biases[1])
    return Layer("CukernBf16Experts", _config(swigluoai), quant, (w1, w2), wanted, topk, on_input=on_input)


def _config(swigluoai: bool) -> Any:
    activation = found(f"{MOE}.activation", "MoEActivation")
    return moe_config(activation=activation.SWIGLUOAI if swigluoai else activation.SILU)


def _fp8_layer() -> Layer:
    codes = [
        rand(EXPERTS, *shape, seed=seed, scale=100).clamp(-448, 448).to(torch.float8_e4m3fn)
        for seed, shape in ((2, (2 * INTER, HIDDEN)), (3, (HIDDEN, INTER)))
    ]
    generator = torch.Generator().manual_seed(8)
    scales = [
        torch.rand(EXPERTS, w.shape[1] // 128, w.shape[2] // 128, generator=generator) / (100 * w.shape[2] ** 0.5)
        for w in codes
    ]
    full = [
        w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2) for w, s in zip(codes, scales, strict=True)
    ]
    wanted = expected(TOKENS_IN, *full, *routing(), rounds=in_fp8)
    quant = quant_config(w1_scale=scales[0], w2_scale=scales[1])
    return Layer("CukernFp8BlockExperts", moe_config(), quant, (codes[0], codes[1]), wanted, tolerance=0.02)


def _mxfp4_layer() -> Layer:
    generator = torch.Generator().manual_seed(7)
    codes, scales, full = [], [], []
    for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER)):
        codes.append(torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, generator=generator))
        scales.append(torch.randint(119, 123, (EXPERTS, n, k // 32), dtype=torch.uint8, generator=generator))
        full.append(cukern.dequantize_mxfp4(codes[-1], scales[-1], "float32"))
    biases = rand(EXPERTS, 2 * INTER, seed=4), rand(EXPERTS, HIDDEN, seed=5)
    wanted = expected(TOKENS_IN, *full, *routing(), biases=biases, swigluoai=True)
    quant = quant_config(w1_scale=scales[0], w2_scale=scales[1], w1_bias=biases[0], w2_bias=biases[1])
    return Layer("CukernMxfp4Experts", _config(True), quant, (codes[0], codes[1]), wanted, tolerance=0.02)


TOKENS_IN = rand(TOKENS, HIDDEN, seed=1)
LAYERS: dict[str, Callable[[], Layer]] = {
    "16-bit": _bf16_layer,
    "16-bit of gpt-oss": lambda: _bf16_layer(swigluoai=True),
    "16-bit, weights on the input": lambda: _bf16_layer(on_input=True),
    "16-bit, weights in 16 bits": lambda: _bf16_layer()._replace(routed=torch.bfloat16),
    "FP8 block": _fp8_layer,
    "MXFP4": _mxfp4_layer,
}


def run_layer(layer: Layer, device: str = "cpu") -> torch.Tensor:
    """Load a layer onto a device, as vLLM does, and run it."""
    quant = types.SimpleNamespace(
        **{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(layer.quant).items()}
    )
    w1, w2 = (x.to(device) for x in layer.weights)
    if layer.name == "CukernMxfp4Experts":
        w1, w2, quant.w1_scale, quant.w2_scale = (
            torch.nn.Parameter(x, requires_grad=False) for x in (w1, w2, quant.w1_scale, quant.w2_scale)
        )
        tensors = w1, w2, quant.w1_scale, quant.w2_scale, quant.w1_bias, quant.w2_bias
        names = "w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale", "w13_bias", "w2_bias"
        converted = found(*REPLACED[3])(
            mxfp4_backend=own("_experts.Mxfp4MoeBackend").CPU, layer=None, **dict(zip(names, tensors, strict=True)),
            _cache_permute_indices={},
        )  # fmt: skip
        assert all(a is b for a, b in zip(converted, tensors, strict=True))
        assert w1.shape == (EXPERTS, 2 * INTER // 8, HIDDEN // 64, 272)
        assert quant.w1_scale.numel() == quant.w2_scale.numel() == 0
    weights, ids = (x.to(device) for x in routing(layer.topk))
    weights = weights.to(layer.routed)
    kind = own(f"_experts.{layer.name}")
    x = TOKENS_IN.to(device)
    return apply(kind, layer.config, quant, x, w1, w2, weights, ids, on_input=layer.on_input)


@pytest.mark.parametrize("name", LAYERS)
def test_experts(vllm: Modules, name: str, log: pytest.LogCaptureFixture) -> None:
    engine.register()
    layer = LAYERS[name]()
    close(run_layer(layer), layer.wanted, layer.tolerance)
    says = "cukern experts: prepares MXFP4 weights a tensor at a time, with 0 MiB more at the peak"
    assert (says in logged(log)) == (name == "MXFP4")


def test_weights_of_another_mxfp4_backend_are_converted_by_vllm(vllm: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name = REPLACED[3]
    monkeypatch.setitem(vars(vllm[module]), name, lambda *args, **kwargs: (args, kwargs))
    engine.register()
    backend = own("_experts.Mxfp4MoeBackend").TRITON
    args, kwargs = found(*REPLACED[3])(
        mxfp4_backend=backend, layer=1, w13_weight=2, w2_weight=3, w13_weight_scale=4, w2_weight_scale=5, w13_bias=6,
        w2_bias=7, _cache_permute_indices=8,
    )  # fmt: skip
    assert args == (backend, 1, 2, 3, 4, 5, 6, 7) and kwargs == {"_cache_permute_indices": 8}


# --- the results of attention -------------------------------------------------------------------------


def cache_of(blocks: int, block_size: int, heads: int, dim: int, layout: str) -> torch.Tensor:
    """An empty cache [blocks, heads, block_size, 2 * dim], with the memory order of vLLM's layout."""
    if layout == "HND":
        return torch.full((blocks, heads, block_size, 2 * dim), torch.nan, dtype=torch.bfloat16)
    return torch.full((blocks, block_size, heads, 2 * dim), torch.nan, dtype=torch.bfloat16).transpose(1, 2)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of the last queries of one sequence, in float32: q [n, heads, dim], k and v [m, kv_heads, dim]."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float() * scale, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], -1)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1)[..., :m], v)


#: Query tokens and tokens in the cache of each sequence: a decode, a chunk of a prefill, a whole prefill.
MIXED = ((1, 21), (5, 37), (18, 18))
DECODES = ((1, 21), (1, 1), (1, 48))
FORMS = {
    "plain": {},
    "one kv head": {"kv_heads": 1},
    "HND": {"layout": "HND"},
    "window": {"window": 7},
    "softcap": {"softcap": 2.0},
    "sinks and window": {"window": 16, "sinks": True},
}


class Step:
    """A step of an engine over the cache of one layer, on a device, and what it must give.

    `sequences` has the query tokens and the tokens in the cache of each sequence. The cache has NaN in free slots. The
    step has rows of padding after the last sequence.
    """

    HEADS, DIM, BLOCK_SIZE, BLOCKS, PADDING, SCALE = 4, 64, 16, 3, 3, 0.2

    def __init__(self, form: str, sequences: Any, device: str = "cpu") -> None:
        self.options: dict[str, Any] = {"kv_heads": 2, "layout": "NHD", "window": None, "softcap": 0, "sinks": False}
        self.options |= FORMS[form]
        self.sequences, self.device = sequences, device
        kv_heads, window, softcap = (self.options[x] for x in ("kv_heads", "window", "softcap"))
        self.sinks = rand(self.HEADS, seed=6) if self.options["sinks"] else None
        self.impl = own("_attention_backend.CukernAttentionImpl")(
            self.HEADS, self.DIM, self.SCALE, kv_heads, None, window, "auto", softcap,
            sinks=None if self.sinks is None else self.sinks.to(device),
        )  # fmt: skip
        self.impl.process_weights_after_loading(torch.bfloat16)
        blocks = self.BLOCKS * len(sequences)
        self.tables = torch.arange(1, 1 + blocks, dtype=torch.int32).flip(0).view(len(sequences), self.BLOCKS)
        self.cache = cache_of(1 + blocks, self.BLOCK_SIZE, kv_heads, self.DIM, self.options["layout"]).to(device)
        # A dimension of one kv head may have any stride, and `to` keeps the order of the others.
        self.keys, self.values = (
            [rand(m, kv_heads, self.DIM, seed=seed + i) for i, (_, m) in enumerate(sequences)] for seed in (10, 20)
        )
        self.total = sum(n for n, _ in sequences)
        self.query = rand(self.total + self.PADDING, self.HEADS, self.DIM, seed=30).to(device)
        for i, (n, m) in enumerate(sequences):
            self._store(self.keys[i][: m - n], self.values[i][: m - n], self._slots(i, 0, m - n))
        self.slot_mapping = torch.cat([self._slots(i, m - n, m) for i, (n, m) in enumerate(sequences)])
        padding = rand(self.PADDING, kv_heads, self.DIM, seed=1)
        new = (
            torch.cat([*(x[i][m - n :] for i, (n, m) in enumerate(sequences)), padding])
            for x in (self.keys, self.values)
        )
        self._store(*new, self.slot_mapping)  # fewer slots than rows

    def _slots(self, i: int, first: int, last: int) -> torch.Tensor:
        token = torch.arange(first, last)
        return self.tables[i][token // self.BLOCK_SIZE].long() * self.BLOCK_SIZE + token % self.BLOCK_SIZE

    def _store(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self.impl.do_kv_cache_update(
            None, *(x.to(self.device) for x in (keys, values)), self.cache, slots.to(self.device)
        )

    def metadata(self) -> Any:
        lengths = torch.tensor([n for n, _ in self.sequences])
        batch = types.SimpleNamespace(
            num_actual_tokens=self.total, num_reqs=len(self.sequences), max_query_len=int(lengths.max()), causal=True,
            query_start_loc=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int().to(self.device),
            seq_lens=torch.tensor([m for _, m in self.sequences], dtype=torch.int32).to(self.device),
            block_table_tensor=self.tables.to(self.device), slot_mapping=self.slot_mapping.to(self.device),
        )  # fmt: skip
        builder = own("_attention_backend.CukernMetadataBuilder")(None, ["layer"], None, torch.device(self.device))
        return builder.build(0, batch)

    def forward(self, metadata: Any, output: torch.Tensor) -> None:
        assert self.impl.forward(None, self.query, None, None, self.cache, metadata, output) is output

    def check(self, output: torch.Tensor) -> None:
        start = 0
        for i, (n, _) in enumerate(self.sequences):
            rows = slice(start, start + n)
            window, softcap = self.options["window"], self.options["softcap"]
            wanted = attend(
                self.query[rows].cpu(), self.keys[i], self.values[i], self.SCALE, window, softcap, self.sinks
            )
            torch.testing.assert_close(output[rows].cpu().float(), wanted, atol=2e-2, rtol=2e-2)
            start += n
        assert output[self.total :].isnan().all()


@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_vllms_cache(vllm: Modules, form: str, sequences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(form, sequences)
    for batch_invariant in (False, True):
        monkeypatch.setitem(vars(vllm["vllm.envs"]), "VLLM_BATCH_INVARIANT", batch_invariant)
        metadata, output = step.metadata(), torch.full_like(step.query, torch.nan)
        assert metadata.is_decode == (sequences is DECODES and not batch_invariant)
        step.forward(metadata, output)
        step.check(output)


def test_a_profiling_run_gives_zeros(vllm: Modules) -> None:
    impl = own("_attention_backend.CukernAttentionImpl")(2, 8, 1.0)
    output = torch.full((3, 2, 8), torch.nan)
    assert impl.forward(None, output, output, output, torch.empty(0), None, output) is output
    assert not output.any()
    with pytest.raises(NotImplementedError, match=r"^output_scale must be None"):
        impl.forward(None, output, output, output, torch.empty(0), None, output, torch.ones(1))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"alibi_slopes": [0.5]}, r"^alibi_slopes must be None, got \[0\.5\]$"),
        ({"kv_cache_dtype": "fp8"}, "^kv_cache_dtype must be auto or float16 or bfloat16, got fp8$"),
        ({"attn_type": "encoder"}, "^attn_type must be decoder, got encoder$"),
    ],
)
def test_a_layer_that_the_kernels_cannot_compute(vllm: Modules, options: dict[str, Any], says: str) -> None:
    kind = own("_attention_backend.CukernAttentionImpl")
    with pytest.raises(ValueError, match=says):
        kind(2, 8, 1.0, **options)


def test_metadata(vllm: Modules) -> None:
    builder = own("_attention_backend.CukernMetadataBuilder")(None, [], None, None)
    batch = types.SimpleNamespace(
        num_actual_tokens=4, num_reqs=4, max_query_len=1, causal=True, query_start_loc=1, seq_lens=2,
        block_table_tensor=3, slot_mapping=4,
    )  # fmt: skip
    fields = vllm_stand_in.TABLE[TESTED]["vllm.v1.attention.backend"]["CommonAttentionMetadata"]["fields"]
    assert set(vars(batch)) == set(fields)
    metadata = builder.build(0, batch)
    assert metadata.is_decode
    changed = builder.update_block_table(metadata, 5, 6)
    assert (changed.block_table, changed.slot_mapping, changed.seq_lens) == (5, 6, 2)
    batch.num_actual_tokens = 3  # one sequence has no token in this step
    assert not builder.build(0, batch).is_decode
    batch.causal = torch.ones(4)
    with pytest.raises(ValueError, match=r"^common_attn_metadata\.causal must be True, got tensor"):
        builder.build(0, batch)
    assert builder._cudagraph_support.name == "UNIFORM_BATCH"
