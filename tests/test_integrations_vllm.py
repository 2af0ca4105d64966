"""`cukern.integrations.vllm`: its classes against vLLM's signatures, `register`, and results on the CPU.

vLLM is not installed. Modules made from tests/vllm_signatures.json stand in for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
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

import cukern.integrations.vllm as engine
from tests import vllm_signatures, vllm_stand_in

ROOT = Path(__file__).parents[1]
RELEASES = tuple(vllm_stand_in.TABLE)
TESTED = "0.26.0"
MOE = "vllm.model_executor.layers.fused_moe"
_QUANT = "vllm.model_executor.layers.quantization"
_EXPERTS = f"{MOE}.modular_kernel", "FusedMoEExpertsModular"
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
    (f"{MOE}.unquantized_fused_moe_method", "select_unquantized_moe_backend"),
    (f"{MOE}.oracle.fp8", "backend_to_kernel_cls"),
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


@pytest.fixture(name="vllm")
def vllm_fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    made = vllm_stand_in.install(monkeypatch, TESTED)
    _give_bodies(made)
    yield made
    for name in [x for x in sys.modules if x.startswith(f"{engine.__name__}._")]:
        del sys.modules[name]


def _give_bodies(made: Modules) -> None:
    """Give the stand-ins the methods that decide, as vLLM's own do."""
    experts: Any = vars(made[f"{MOE}.modular_kernel"])["FusedMoEExpertsModular"]
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
    vars(made[f"{MOE}.oracle.fp8"])["backend_to_kernel_cls"] = lambda backend: [f"stock of {backend.name}"]
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


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if record.name == "vllm.cukern")


@pytest.fixture(name="log")
def log_fixture(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "vllm.cukern")
    return caplog


def test_register_installs_each_seam_once(vllm: Modules, log: pytest.LogCaptureFixture) -> None:
    before = {place: found(*place) for place in REPLACED}
    engine.register()
    first = {place: found(*place) for place in REPLACED}
    assert all(first[place] != before[place] for place in REPLACED)
    engine.register()
    assert {place: found(*place) for place in REPLACED} == first
    assert logged(log).count("experts: offers") == logged(log).count("attention: offers") == 1
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
        assert f"cukern {seam}: off (CUKERN_VLLM={value})" in logged(log)


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
    assert "leaves everything" not in logged(log)


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
    activation = found(f"{MOE}.activation", "MoEActivation").SILU
    parallel = types.SimpleNamespace(ep_size=other.pop("ep_size", 1), use_all2all_kernels=False)
    config = {
        "num_experts": 8, "hidden_dim": 256, "intermediate_size_per_partition": 128, "activation": activation,
        "in_dtype": torch.bfloat16, "moe_backend": "auto", "swiglu_limit": None, "moe_parallel_config": parallel,
    } | other  # fmt: skip
    fields = vllm_stand_in.TABLE[TESTED][f"{MOE}.config"]
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
    backends, kind = module.fp8.Fp8MoeBackend, module.CukernFp8BlockExperts
    assert found(*REPLACED[1])(backends.TRITON) == [kind, "stock of TRITON"]
    assert found(*REPLACED[1])(backends.CPU) == ["stock of CPU"]
    scheme = keys["kFp8Static128BlockSym"], keys["kFp8Dynamic128Sym"]
    assert kind.is_supported_config(kind, moe_config(), *scheme, kind.activation_format()) == (True, None)
    oai = moe_config(activation=module.MoEActivation.SWIGLUOAI)
    assert found(*REPLACED[2])(oai) == (module.Mxfp4MoeBackend.CPU, module.CukernMxfp4Experts)
    for what in ("16-bit", "FP8 block", "MXFP4"):
        assert logged(log).count(f"cukern experts: takes {what} experts, 8 of 256 x 128") == 1
    # Other layers of the same sizes do not log again.
    found(*REPLACED[0])(moe_config())
    assert logged(log).count("takes 16-bit") == 1


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
    assert f"cukern experts: leaves 16-bit experts, {sizes} to vLLM: {why}" in logged(log)


@pytest.mark.parametrize("changed", [0, 1])
def test_another_fp8_scheme_stays(vllm: Modules, changed: int, log: pytest.LogCaptureFixture) -> None:
    keys, kind = vars(vllm[f"{_QUANT}.utils.quant_utils"]), own("_experts.CukernFp8BlockExperts")
    scheme = [keys["kFp8Static128BlockSym"], keys["kFp8Dynamic128Sym"]]
    scheme[changed] = object()
    says = "kernel does not support quantization scheme"
    assert kind.is_supported_config(kind, moe_config(), *scheme, kind.activation_format()) == (False, says)
    assert f"cukern experts: leaves otherwise quantized experts, 8 of 256 x 128 to vLLM: {says}" in logged(log)


def test_another_gpu_stays(vllm: Modules, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    platform = type(vars(vllm["vllm.platforms"])["current_platform"])
    monkeypatch.setattr(platform, "is_device_capability", lambda self, number: number == (8, 0))
    engine.register()
    assert found(*REPLACED[0])(moe_config()) is None
    assert "kernel does not support device" in logged(log)


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
    assert logged(log).count("cukern attention: takes attention, heads of 128 in bfloat16") == 1
    assert "cukern attention: takes attention with a window and sinks, heads of 64 in bfloat16" in logged(log)


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
    assert f" to vLLM: {why}" in logged(log)
