"""`cukern.integrations.vllm`: its classes against vLLM's signatures, `register`, and results on the CPU.

vLLM is not installed. Modules made from tests/vllm_signatures.json stand in for it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def apply(kind: Any, config: Any, quant_config: Any, x: Any, w1: Any, w2: Any, weights: Any, ids: Any, **other: Any):
    """Call `apply` as vLLM's modular kernel does: `workspace13` and `output` are the same memory."""
    experts = kind(config, quant_config)
    size = experts.moe_problem_size(x, w1, w2, ids) or (w1.shape[0], len(x), w1.shape[1], x.shape[1], ids.shape[1])
    assert size == (EXPERTS, TOKENS, 2 * INTER, HIDDEN, ids.shape[1])
    _, m, n, k, topk = size
    first, second, shape = experts.workspace_shapes(m, n, k, topk, EXPERTS, EXPERTS, None, config.activation)
    common = torch.full((max(torch.Size(first).numel(), torch.Size(shape).numel()),), torch.nan, dtype=x.dtype)
    output = common.view(shape)
    experts.apply(
        output=output, hidden_states=x, w1=w1, w2=w2, topk_weights=weights, topk_ids=ids, activation=config.activation,
        global_num_experts=EXPERTS, expert_map=None, a1q_scale=None, a2_scale=None,
        workspace13=common[: torch.Size(first).numel()], workspace2=torch.empty(second),
        expert_tokens_meta=None, apply_router_weight_on_input=other.get("on_input", False),
    )  # fmt: skip
    assert experts.expects_unquantized_inputs
    assert type(experts.finalize_weight_and_reduce_impl()).__name__ == "TopKWeightAndReduceNoOP"
    return output


def quant_config(**values: Any) -> Any:
    names = ("w1_scale", "w2_scale", "w1_bias", "w2_bias", "gemm1_alpha", "gemm1_clamp_limit")
    return types.SimpleNamespace(**dict.fromkeys(names) | values)


def close(result: torch.Tensor, wanted: torch.Tensor, share: float) -> None:
    assert (result.float() - wanted).abs().max() <= share * wanted.abs().max()


def test_bf16_experts(vllm: Modules) -> None:
    x, w1 = rand(TOKENS, HIDDEN, seed=1), rand(EXPERTS, 2 * INTER, HIDDEN, seed=2, scale=HIDDEN**-0.5)
    w2, (weights, ids) = rand(EXPERTS, HIDDEN, INTER, seed=3, scale=INTER**-0.5), routing()
    out = apply(own("_experts.CukernBf16Experts"), moe_config(), quant_config(), x, w1, w2, weights, ids)
    close(out, expected(x, w1, w2, weights, ids), 0.01)


def test_bf16_experts_with_weights_on_the_input(vllm: Modules) -> None:
    x, w1 = rand(TOKENS, HIDDEN, seed=1), rand(EXPERTS, 2 * INTER, HIDDEN, seed=2, scale=HIDDEN**-0.5)
    w2, (weights, ids) = rand(EXPERTS, HIDDEN, INTER, seed=3, scale=INTER**-0.5), routing(1)
    kind = own("_experts.CukernBf16Experts")
    out = apply(kind, moe_config(), quant_config(), x, w1, w2, weights, ids, on_input=True)
    close(out, expected(x, w1, w2, torch.ones_like(weights), ids), 0.01)


def test_bf16_experts_of_gpt_oss(vllm: Modules) -> None:
    x, w1 = rand(TOKENS, HIDDEN, seed=1), rand(EXPERTS, 2 * INTER, HIDDEN, seed=2, scale=3 * HIDDEN**-0.5)
    w2, (weights, ids) = rand(EXPERTS, HIDDEN, INTER, seed=3, scale=INTER**-0.5), routing()
    biases = rand(EXPERTS, 2 * INTER, seed=4), rand(EXPERTS, HIDDEN, seed=5)
    config = moe_config(activation=found(f"{_MOE}.activation", "MoEActivation").SWIGLUOAI)
    quant = quant_config(w1_bias=biases[0], w2_bias=biases[1])
    out = apply(own("_experts.CukernBf16Experts"), config, quant, x, w1, w2, weights, ids)
    close(out, expected(x, w1, w2, weights, ids, biases=biases, swigluoai=True), 0.01)


def test_fp8_block_experts(vllm: Modules) -> None:
    x, (weights, ids) = rand(TOKENS, HIDDEN, seed=1), routing()
    codes = [rand(EXPERTS, *shape, seed=seed, scale=100).to(torch.float8_e4m3fn)
             for seed, shape in ((2, (2 * INTER, HIDDEN)), (3, (HIDDEN, INTER)))]  # fmt: skip
    scales = [torch.rand(EXPERTS, w.shape[1] // 128, w.shape[2] // 128) / (100 * w.shape[2] ** 0.5) for w in codes]
    full = [w.float() * s.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for w, s in zip(codes, scales, strict=True)]  # fmt: skip
    quant = quant_config(w1_scale=scales[0], w2_scale=scales[1])
    out = apply(own("_experts.CukernFp8BlockExperts"), moe_config(), quant, x, *codes, weights, ids)
    close(out, expected(x, *full, weights, ids, rounds=in_fp8), 0.02)


def test_mxfp4_experts_prepare_weights_in_place(vllm: Modules, log: pytest.LogCaptureFixture) -> None:
    engine.register()
    module = importlib.import_module(f"{engine.__name__}._experts")
    x, (weights, ids) = rand(TOKENS, HIDDEN, seed=1), routing()
    generator = torch.Generator().manual_seed(7)
    tensors, full = [], []
    for n, k in ((2 * INTER, HIDDEN), (HIDDEN, INTER)):
        codes = torch.randint(0, 256, (EXPERTS, n, k // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(119, 123, (EXPERTS, n, k // 32), dtype=torch.uint8, generator=generator)
        tensors.append([torch.nn.Parameter(t, requires_grad=False) for t in (codes, scale)])
        full.append(cukern.dequantize_mxfp4(codes, scale, "float32"))
    (w1, s1), (w2, s2) = tensors
    biases = rand(EXPERTS, 2 * INTER, seed=4), rand(EXPERTS, HIDDEN, seed=5)
    converted = found(*REPLACED[3])(
        mxfp4_backend=module.Mxfp4MoeBackend.CPU, layer=None, w13_weight=w1, w2_weight=w2, w13_weight_scale=s1,
        w2_weight_scale=s2, w13_bias=biases[0], w2_bias=biases[1], _cache_permute_indices={},
    )  # fmt: skip
    assert all(a is b for a, b in zip(converted, (w1, w2, s1, s2, *biases), strict=True))
    assert w1.shape == (EXPERTS, 2 * INTER // 8, HIDDEN // 64, 272) and s1.numel() == s2.numel() == 0
    assert "prepares MXFP4 weights a tensor at a time, with 0 MiB more at the peak" in _log(log)
    config = moe_config(activation=module.MoEActivation.SWIGLUOAI)
    quant = quant_config(w1_bias=biases[0], w2_bias=biases[1], w1_scale=s1, w2_scale=s2)
    out = apply(module.CukernMxfp4Experts, config, quant, x, w1, w2, weights, ids)
    close(out, expected(x, *full, weights, ids, biases=biases, swigluoai=True), 0.02)


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


@pytest.mark.parametrize("sequences", [MIXED, DECODES], ids=["mixed", "decode"])
@pytest.mark.parametrize("form", FORMS)
def test_attention_over_vllms_cache(vllm: Modules, form: str, sequences: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"kv_heads": 2, "layout": "NHD", "window": None, "softcap": 0, "sinks": False}
    options |= FORMS[form]
    heads, dim, block_size, kv_heads = 4, 32, 16, options["kv_heads"]
    sinks = rand(heads, seed=6) if options["sinks"] else None
    impl = own("_attention_backend.CukernAttentionImpl")(
        heads, dim, 0.2, kv_heads, None, options["window"], "auto", options["softcap"], sinks=sinks
    )
    impl.process_weights_after_loading(torch.bfloat16)
    tables = torch.arange(1, 1 + 3 * len(sequences), dtype=torch.int32).flip(0).view(len(sequences), 3)
    cache = cache_of(1 + tables.numel(), block_size, kv_heads, dim, options["layout"])
    # The cache holds the earlier tokens; the step stores the tokens of the queries.
    keys = [rand(m, kv_heads, dim, seed=10 + i) for i, (_, m) in enumerate(sequences)]
    values = [rand(m, kv_heads, dim, seed=20 + i) for i, (_, m) in enumerate(sequences)]

    def slots(i: int, first: int, last: int) -> torch.Tensor:
        token = torch.arange(first, last)
        return tables[i][token // block_size].long() * block_size + token % block_size

    for i, (n, m) in enumerate(sequences):
        impl.do_kv_cache_update(None, keys[i][: m - n], values[i][: m - n], cache, slots(i, 0, m - n))
    padding, total = 3, sum(n for n, _ in sequences)
    new_keys, new_values = (
        torch.cat([*(x[i][m - n :] for i, (n, m) in enumerate(sequences)), rand(padding, kv_heads, dim, seed=1)])
        for x in (keys, values)
    )
    slot_mapping = torch.cat([slots(i, m - n, m) for i, (n, m) in enumerate(sequences)])
    impl.do_kv_cache_update(None, new_keys, new_values, cache, slot_mapping)  # fewer slots than rows
    lengths = torch.tensor([n for n, _ in sequences])
    batch = types.SimpleNamespace(
        num_actual_tokens=total, num_reqs=len(sequences), max_query_len=int(lengths.max()), causal=True,
        query_start_loc=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        seq_lens=torch.tensor([m for _, m in sequences], dtype=torch.int32),
        block_table_tensor=tables, slot_mapping=slot_mapping,
    )  # fmt: skip
    builder = own("_attention_backend.CukernMetadataBuilder")(None, ["layer"], None, torch.device("cpu"))
    metadata = builder.build(0, batch)
    assert metadata.is_decode == (sequences is DECODES)
    query = rand(total + padding, heads, dim, seed=30)
    output = torch.full_like(query, torch.nan)
    monkeypatch.setitem(vars(vllm["vllm.envs"]), "VLLM_BATCH_INVARIANT", True)
    assert not builder.build(0, batch).is_decode
    assert impl.forward(None, query, new_keys, new_values, cache, metadata, output) is output
    start = 0
    for i, (n, _) in enumerate(sequences):
        wanted = attend(query[start : start + n], keys[i], values[i], 0.2, options["window"], options["softcap"], sinks)
        torch.testing.assert_close(output[start : start + n].float(), wanted, atol=2e-2, rtol=2e-2)
        start += n
    assert output[total:].isnan().all()


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
