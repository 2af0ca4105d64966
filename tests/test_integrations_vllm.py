"""`cukern.integrations.vllm`: its classes against vLLM's signatures, `register`, and results on the CPU.

vLLM is not installed. Modules made from tests/vllm_signatures.json stand in for it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import cukern
import cukern.integrations.vllm as engine
from tests import vllm_signatures, vllm_stand_in

ROOT = Path(__file__).parents[1]
RELEASES = tuple(vllm_stand_in.TABLE)
TESTED = "0.26.0"
_MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_EXPERTS = f"{_MOE}.modular_kernel", "FusedMoEExpertsModular"
#: Each own class with its base in vLLM.
CLASSES = {
    "_experts.CukernBf16Experts": _EXPERTS,
    "_experts.CukernFp8BlockExperts": _EXPERTS,
    "_experts.CukernMxfp4Experts": _EXPERTS,
    "_attention_backend.CukernAttentionBackend": (
        "vllm.v1.attention.backends.flash_attn",
        "FlashAttentionBackend",
    ),
    "_attention_backend.CukernMetadataBuilder": ("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    "_attention_backend.CukernAttentionImpl": ("vllm.v1.attention.backend", "AttentionImpl"),
}
#: The functions of vLLM that `register` replaces.
REPLACED = (
    (f"{_MOE}.unquantized_fused_moe_method", "select_unquantized_moe_backend"),
    (f"{_QUANT}.fp8", "select_fp8_moe_backend"),
    (f"{_QUANT}.mxfp4", "select_mxfp4_moe_backend"),
    (f"{_QUANT}.mxfp4", "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"),
    ("vllm.platforms.cuda.CudaPlatformBase", "get_attn_backend_cls"),
)
Modules = dict[str, types.ModuleType]


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine.say.cache_clear()
    monkeypatch.delenv(engine.VARIABLE, raising=False)
    monkeypatch.setattr("cukern.runtime.cuda.cupy", object())


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    made = vllm_stand_in.install(monkeypatch, TESTED)
    _give_bodies(made)
    yield made
    for name in [x for x in sys.modules if x.startswith(f"{engine.__name__}._")]:
        del sys.modules[name]


def _give_bodies(made: Modules) -> None:
    """Give the stand-ins the methods that decide, as vLLM's own do."""
    experts: Any = vars(made[f"{_MOE}.modular_kernel"])["FusedMoEExpertsModular"]
    for name in ("w1_scale", "w2_scale", "w1_bias", "w2_bias"):
        setattr(experts, name, property(lambda self, name=name: getattr(self.quant_config, name)))

    def is_supported_config(cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, form: Any) -> Any:
        for has, what in (
            (cls._supports_current_device(), "device"),
            (cls._supports_activation(moe_config.activation), "activation"),
            (cls._supports_quant_scheme(weight_key, activation_key), "quantization scheme"),
            (cls._supports_parallel_config(moe_config.moe_parallel_config), "parallel config"),
            (form == cls.activation_format(), "activation format"),
        ):
            if not has:
                return False, f"kernel does not support {what}"
        return True, None

    experts.is_supported_config = staticmethod(is_supported_config)
    vars(made["vllm.utils.torch_utils"])["canonicalize_singleton_dim_strides"] = lambda x: x


def own(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{engine.__name__}.{module}"), attribute)


def found(path: str, name: str) -> Any:
    """Return what a module or a class of the stand-ins has."""
    owner: Any = sys.modules.get(path)
    if owner is None:
        module, _, attribute = path.rpartition(".")
        owner = getattr(sys.modules[module], attribute)
    return getattr(owner, name)


# --- contracts ----------------------------------------------------------------------------------------


def _shape_of(function: Any) -> list[tuple[str, Any, bool]]:
    parameters = inspect.signature(function).parameters.values()
    return [(x.name, x.kind, x.default is not inspect.Parameter.empty) for x in parameters]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_fulfils_the_contract_of_its_base(name: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_stand_in.install(monkeypatch, release)
    module, base_name = CLASSES[name]
    base, kind = getattr(made[module], base_name), own(name)
    assert issubclass(kind, base) and not inspect.isabstract(kind), kind.__abstractmethods__
    overridden = {k: v for x in kind.__mro__ if x.__module__.startswith("cukern") for k, v in vars(x).items()}
    overridden = {k: v for k, v in overridden.items() if k in vars(base) and callable(getattr(base, k))}
    assert overridden
    for method, function in overridden.items():
        if method.startswith("__") and method != "__init__":
            continue
        stock = vars(base)[method]
        for wrapper in (staticmethod, classmethod):
            assert isinstance(function, wrapper) == isinstance(stock, wrapper), method
        given, wanted = (_shape_of(getattr(x, "__func__", x)) for x in (function, stock))
        assert given[: len(wanted)] == wanted, method
        assert all(has_default for _, _, has_default in given[len(wanted) :]), method


@pytest.mark.parametrize("release", RELEASES)
def test_properties_stay_properties(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_stand_in.install(monkeypatch, release)
    for name, (module, base_name) in CLASSES.items():
        base = getattr(made[module], base_name)
        for key, value in vars(base).items():
            if isinstance(value, property):
                assert isinstance(inspect.getattr_static(own(name), key), property), (name, key)


@pytest.mark.parametrize("release", RELEASES)
def test_a_replaced_function_takes_the_arguments_of_the_stock(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = vllm_stand_in.install(monkeypatch, release)
    _give_bodies(made)
    before = {place: found(*place) for place in REPLACED}
    monkeypatch.setattr(engine, "TESTED", (release.rpartition(".")[0],))
    engine.register()
    for place, stock in before.items():
        parameters = inspect.signature(stock).parameters
        replaced = inspect.signature(found(*place), follow_wrapped=False)
        replaced.bind(*parameters)
        replaced.bind(**dict.fromkeys(parameters))
        required = [k for k, v in parameters.items() if v.default is inspect.Parameter.empty]
        replaced.bind(**dict.fromkeys(required))
        assert getattr(found(*place), engine.STOCK) == stock


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_is_in_the_table(release: str) -> None:
    for module, names in vllm_signatures.NAMES.items():
        assert set(vllm_stand_in.TABLE[release][module]) == set(names)


def test_tested_releases_are_in_the_table() -> None:
    assert {x.rpartition(".")[0] for x in RELEASES} >= set(engine.TESTED)
    text = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r"vllm>=([\d.]+),", text) == [engine.TESTED[0]]
    assert '[project.entry-points."vllm.general_plugins"]\ncukern = "cukern.integrations.vllm:register"' in text
    assert all(x in (ROOT / "docs/guides/engine.md").read_text() for x in engine.TESTED)


# --- register -----------------------------------------------------------------------------------------


def _log(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "vllm.cukern")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "vllm.cukern")
    return caplog


def test_register_installs_each_seam_once(vllm: Modules, log: pytest.LogCaptureFixture) -> None:
    before = {place: found(*place) for place in REPLACED}
    engine.register()
    first = {place: found(*place) for place in REPLACED}
    assert all(first[place] != before[place] for place in REPLACED)
    engine.register()
    assert {place: found(*place) for place in REPLACED} == first
    assert _log(log).count("experts: offers") == _log(log).count("attention: offers") == 1
    assert "vllm.v1.attention.backends.flash_attn" not in _imports_of("_attention")


def _imports_of(module: str) -> set[str]:
    """Return the modules that importing a module of the integration imports by name at its top."""
    text = (ROOT / "cukern/integrations/vllm" / f"{module}.py").read_text()
    return set(re.findall(r"^from (vllm\S*) import", text, re.M))


@pytest.mark.parametrize(
    ("value", "seams"),
    [(None, ("experts", "attention")), ("", ("experts", "attention")), ("1", ("experts", "attention")), ("0", ()),
     ("attention", ("attention",)), (" attention , experts,", ("experts", "attention"))],
)  # fmt: skip
def test_the_variable_chooses_the_seams(
    vllm: Modules, value: str | None, seams: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    assert engine.chosen_seams(value) == seams
    if value is not None:
        monkeypatch.setenv(engine.VARIABLE, value)
    before = {place: found(*place) for place in REPLACED}
    engine.register()
    changed = {place for place in REPLACED if found(*place) != before[place]}
    wanted = {"experts": REPLACED[:4], "attention": REPLACED[4:]}
    assert changed == {place for seam in seams for place in wanted[seam]}
    for seam in set(engine.SEAMS) - set(seams):
        assert f"cukern {seam}: off (CUKERN_VLLM={value})" in _log(log)


def test_an_unknown_seam_is_refused(vllm: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.VARIABLE, "experts,atention")
    with pytest.raises(ValueError, match=r"^CUKERN_VLLM must be 0, 1 or names of experts, attention, got 'atention'$"):
        engine.register()


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.33.0", "0.1.dev1+g123", "dev"])
def test_an_untested_release_stays_as_it_is(
    version: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    vllm_stand_in.install(monkeypatch, TESTED, version)
    before = {place: found(*place) for place in REPLACED}
    engine.register()
    engine.register()
    assert {place: found(*place) for place in REPLACED} == before
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"cukern leaves everything to vLLM: vLLM {version} is not one of the tested releases 0.26"
    )


def test_a_local_version_is_its_release(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    vllm_stand_in.install(monkeypatch, TESTED, "0.26.1+cu129")
    engine.register()
    assert "leaves everything" not in _log(log)


def test_without_cuda_or_cupy_everything_stays(
    vllm: Modules, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    before = {place: found(*place) for place in REPLACED}
    monkeypatch.setattr("cukern.runtime.cuda.cupy", None)
    engine.register()
    monkeypatch.setattr(type(vars(vllm["vllm.platforms"])["current_platform"]), "is_cuda", lambda self: False)
    engine.register()
    assert {place: found(*place) for place in REPLACED} == before
    lines = [record.getMessage() for record in log.records]
    assert lines[0].startswith("cukern leaves everything to vLLM: the kernels need the package cupy: pip install ")
    assert lines[1:] == ["cukern leaves everything to vLLM: the platform is not CUDA"]


def test_register_in_several_processes() -> None:
    """A parent registers and forks, as vLLM's front end does; the child registers again, and so does a new process."""
    code = f"""
import os, pytest
import cukern.runtime.cuda
cukern.runtime.cuda.cupy = object()
from tests import test_integrations_vllm as t, vllm_stand_in
import cukern.integrations.vllm as engine
vllm_stand_in.install(pytest.MonkeyPatch(), {TESTED!r})
def names():
    return [t.found(*place) for place in t.REPLACED]
stock = names()
engine.register()
first = names()
child = os.fork()
engine.register()
own = names() == first and [getattr(x, engine.STOCK) for x in first] == stock
if child == 0:
    os._exit(0 if own else 1)
print(own, os.waitpid(child, 0)[1])
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.stdout == "True 0\n", done.stderr


def test_an_import_needs_neither_vllm_nor_torch() -> None:
    code = """
import sys
sys.modules["vllm"] = sys.modules["torch"] = None
import cukern.integrations.vllm as engine
print(engine.SEAMS)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "('experts', 'attention')\n", done.stderr


# --- the choice of experts ----------------------------------------------------------------------------


def moe_config(**other: Any) -> Any:
    """A layer's configuration, with fields of vLLM's class alone."""
    activation = found(f"{_MOE}.activation", "MoEActivation").SILU
    parallel = types.SimpleNamespace(ep_size=other.pop("ep_size", 1), use_all2all_kernels=False)
    config = {
        "num_experts": 8, "hidden_dim": 256, "intermediate_size_per_partition": 128, "activation": activation,
        "in_dtype": torch.bfloat16, "moe_backend": "auto", "swiglu_limit": None, "moe_parallel_config": parallel,
    } | other  # fmt: skip
    fields = vllm_stand_in.TABLE[TESTED][f"{_MOE}.config"]
    assert set(config) <= {*fields["FusedMoEConfig"]["fields"], *fields["FusedMoEConfig"]["methods"]}
    assert set(vars(parallel)) <= {
        *fields["FusedMoEParallelConfig"]["fields"], *fields["FusedMoEParallelConfig"]["methods"]
    }  # fmt: skip
    return types.SimpleNamespace(**config)


def test_each_quantization_gets_its_class(vllm: Modules, log: pytest.LogCaptureFixture) -> None:
    engine.register()
    module = importlib.import_module(f"{engine.__name__}._experts")
    keys = vars(vllm[f"{_QUANT}.utils.quant_utils"])
    assert found(*REPLACED[0])(moe_config()) == (module.UnquantizedMoeBackend.TRITON, module.CukernBf16Experts)
    chosen = found(*REPLACED[1])(
        config=moe_config(), weight_key=keys["kFp8Static128BlockSym"], activation_key=keys["kFp8Dynamic128Sym"],
        allow_vllm_cutlass=False,
    )  # fmt: skip
    assert chosen == (module.Fp8MoeBackend.TRITON, module.CukernFp8BlockExperts)
    oai = moe_config(activation=module.MoEActivation.SWIGLUOAI)
    assert found(*REPLACED[2])(oai) == (module.Mxfp4MoeBackend.CPU, module.CukernMxfp4Experts)
    for what in ("16-bit", "FP8 block", "MXFP4"):
        assert _log(log).count(f"cukern experts: takes {what} experts, 8 of 256 x 128") == 1
    # Other layers of the same sizes do not log again.
    found(*REPLACED[0])(moe_config())
    assert _log(log).count("takes 16-bit") == 1


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ep_size": 2}, "ep_size is 2, and expert parallelism is not tested"),
        ({"moe_backend": "triton"}, "moe_backend=triton is asked for by name"),
        ({"in_dtype": torch.float32}, "the dtype is torch.float32"),
        ({"hidden_dim": 260}, "hidden_dim is 260, not a multiple of 8"),
        ({"intermediate_size_per_partition": 4}, "intermediate_size_per_partition is 4, not a multiple of 8"),
        ({"swiglu_limit": 10.0}, "silu has the limit 10.0"),
        ({"activation": "relu2"}, "kernel does not support activation"),
    ],
)
def test_other_experts_stay(
    vllm: Modules, changed: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    module, name = REPLACED[0]
    monkeypatch.setitem(vars(vllm[module]), name, lambda moe_config: ("stock", moe_config))
    engine.register()
    config = moe_config(**changed)
    assert found(*REPLACED[0])(config) == ("stock", config)
    sizes = f"8 of {config.hidden_dim} x {config.intermediate_size_per_partition}"
    assert f"cukern experts: leaves 16-bit experts, {sizes} to vLLM: {why}" in _log(log)


@pytest.mark.parametrize("name", ["weight_key", "activation_key"])
def test_another_fp8_scheme_stays(vllm: Modules, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function = REPLACED[1]
    monkeypatch.setitem(vars(vllm[module]), function, lambda *args, **kwargs: (args, kwargs))
    engine.register()
    keys = vars(vllm[f"{_QUANT}.utils.quant_utils"])
    given = {"weight_key": keys["kFp8Static128BlockSym"], "activation_key": keys["kFp8Dynamic128Sym"], name: object()}
    config = moe_config()
    chosen = found(*REPLACED[1])(config=config, **given, allow_vllm_cutlass=True)
    assert chosen == ((config, *given.values()), {"allow_vllm_cutlass": True})


def test_another_gpu_stays(vllm: Modules, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    platform = type(vars(vllm["vllm.platforms"])["current_platform"])
    monkeypatch.setattr(platform, "is_device_capability", lambda self, number: number == 80)
    engine.register()
    assert found(*REPLACED[0])(moe_config()) is None
    assert "kernel does not support device" in _log(log)


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
    activation = found(f"{_MOE}.activation", "MoEActivation")
    return moe_config(activation=activation.SWIGLUOAI if swigluoai else activation.SILU)


def _fp8_layer() -> Layer:
    codes = [
        rand(EXPERTS, *shape, seed=seed, scale=100).to(torch.float8_e4m3fn)
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
    kind = own(f"_experts.{layer.name}")
    x = TOKENS_IN.to(device)
    return apply(kind, layer.config, quant, x, w1, w2, weights, ids, on_input=layer.on_input)


@pytest.mark.parametrize("name", LAYERS)
def test_experts(vllm: Modules, name: str, log: pytest.LogCaptureFixture) -> None:
    engine.register()
    layer = LAYERS[name]()
    close(run_layer(layer), layer.wanted, layer.tolerance)
    says = "cukern experts: prepares MXFP4 weights a tensor at a time, with 0 MiB more at the peak"
    assert (says in _log(log)) == (name == "MXFP4")


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


# --- the choice of attention --------------------------------------------------------------------------


class SelectorConfig(types.SimpleNamespace):
    def _asdict(self) -> dict[str, Any]:
        return vars(self)


def selector_config(**other: Any) -> SelectorConfig:
    config = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": False, "has_sink": False,
        "attn_type": "decoder", "has_sliding_window": False,
    } | other  # fmt: skip
    assert set(config) == set(
        vllm_stand_in.TABLE[TESTED]["vllm.v1.attention.selector"]["AttentionSelectorConfig"]["fields"]
    )
    return SelectorConfig(**config)


@pytest.fixture
def choose(vllm: Modules, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the platform's method, where vLLM itself chooses FlashAttention. The stand-in model has no ALiBi."""
    backend: Any = vars(vllm["vllm.v1.attention.backends.flash_attn"])["FlashAttentionBackend"]

    def validate_configuration(cls: Any, head_size: Any, dtype: Any, kv_cache_dtype: Any, device_capability: Any,
                               attn_type: Any, **other: Any) -> list[str]:  # fmt: skip
        checks = {
            "head_size not supported": cls.supports_head_size(head_size),
            "kv_cache_dtype not supported": cls.supports_kv_cache_dtype(kv_cache_dtype),
            "compute capability not supported": cls.supports_compute_capability(device_capability),
            f"attention type {attn_type} not supported": cls.supports_attn_type(attn_type),
        }
        combination = cls.supports_combination(head_size, dtype, kv_cache_dtype, None, False, False, False, False, None)
        return [why for why, has in checks.items() if not has] + [combination] * (combination is not None)

    backend.validate_configuration = classmethod(validate_configuration)
    stock = importlib.import_module(f"{engine.__name__}._attention").STOCK_BACKEND
    model = types.SimpleNamespace(uses_alibi=False, rswa_window=None)
    parallel = types.SimpleNamespace(decode_context_parallel_size=1)
    config = types.SimpleNamespace(model_config=model, parallel_config=parallel)
    monkeypatch.setattr(f"{engine.__name__}._attention.get_current_vllm_config", lambda: config)
    platform: Any = type(vars(vllm["vllm.platforms"])["current_platform"])
    platform.get_attn_backend_cls = classmethod(lambda cls, selected, attn_selector_config, num_heads=None: stock)
    engine.register()

    def call(selected: Any = None, returns: str = stock, **other: Any) -> str:
        model.uses_alibi = other.pop("uses_alibi", False)
        model.rswa_window = other.pop("rswa_window", None)
        parallel.decode_context_parallel_size = other.pop("ranks", 1)
        nonlocal stock
        stock = returns
        config = selector_config(**other)
        return str(platform.get_attn_backend_cls(selected, attn_selector_config=config, num_heads=8))

    return call


def test_attention_is_taken(choose: Any, log: pytest.LogCaptureFixture) -> None:
    path = choose()
    module, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(module), name) is own("_attention_backend.CukernAttentionBackend")
    assert choose(has_sliding_window=True, has_sink=True, head_size=64) == path
    choose()
    assert _log(log).count("cukern attention: takes attention, heads of 128 in bfloat16") == 1
    assert "cukern attention: takes attention with a window and sinks, heads of 64 in bfloat16" in _log(log)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"selected": types.SimpleNamespace(name="FLASH_ATTN")}, "the backend FLASH_ATTN is asked for by name"),
        ({"returns": "vllm.x.TritonAttentionBackend"}, "its backend is TritonAttentionBackend"),
        ({"ranks": 2}, "decode_context_parallel_size is 2"),
        ({"uses_alibi": True}, "the model has ALiBi"),
        ({"rswa_window": 128}, "the model has R-SWA"),
        ({"head_size": 512}, "head_size not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported, the cache is in fp8 and the layer in "),
        ({"kv_cache_dtype": "float16"}, "the cache is in float16 and the layer in torch.bfloat16"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
    ],
)
def test_other_attention_stays(choose: Any, changed: dict[str, Any], why: str, log: pytest.LogCaptureFixture) -> None:
    stock = changed.get("returns", own("_attention.STOCK_BACKEND"))
    assert choose(**changed) == stock
    assert f" to vLLM: {why}" in _log(log)


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
