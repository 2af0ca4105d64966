"""`load`: checkpoints in their own formats, against the dequantized model, and the errors of broken ones."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

import cukern
import cukern.integrations.transformers as ck
from cukern.integrations.transformers import _load, _packed, _products
from cukern.integrations.transformers._packed import Mxfp4Experts, ScaledExperts, ScaledLinear
from tests import checkpoints
from tests.checkpoints import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:the model is on the CPU", "ignore:.*generation flags.*")

NEW_TOKENS = 3
#: The largest error of packed weights, in errors of the stock model in bfloat16.
FACTOR = 1.15
#: By the format: how to make a checkpoint in a directory.
FORMATS: dict[str, Callable[[Path], Checkpoint]] = {
    "fp8 qwen3_moe": lambda folder: checkpoints.fp8(folder, "qwen3_moe", **checkpoints.MOE),
    "fp8 ue8m0 qwen3_moe": lambda folder: checkpoints.fp8(folder, "qwen3_moe", scale_fmt="ue8m0", **checkpoints.MOE),
    "fp8 qwen2": lambda folder: checkpoints.fp8(folder, "qwen2"),  # has biases
    "fp8 deepseek_v3": lambda folder: checkpoints.fp8(folder, "deepseek_v3", **checkpoints.DEEPSEEK),
    "fp8 static llama": lambda folder: checkpoints.fp8(folder, "llama", static=True),
    "fp8 tensor llama": lambda folder: checkpoints.fp8(folder, "llama", by="tensor"),
    "fp8 tensor static llama": lambda folder: checkpoints.fp8(folder, "llama", by="tensor", static=True),
    "mxfp4 gpt_oss": checkpoints.mxfp4,
    "compressed-tensors channel": lambda folder: checkpoints.compressed(folder, "channel"),
    "compressed-tensors tensor": lambda folder: checkpoints.compressed(folder, "tensor"),
    "compressed-tensors static": lambda folder: checkpoints.compressed(folder, "tensor", static=True),
    "compressed-tensors block": lambda folder: checkpoints.compressed(folder, "block"),
    "compressed-tensors channel qwen3_moe": lambda folder: checkpoints.compressed(
        folder, "channel", "qwen3_moe", **checkpoints.MOE
    ),
    "compressed-tensors tensor qwen3_moe": lambda folder: checkpoints.compressed(
        folder, "tensor", "qwen3_moe", **checkpoints.MOE
    ),
}
#: The modules that hold a format's packed weights.
PACKED = {"fp8": (FP8Linear, FP8Experts), "mxfp4": (Mxfp4Experts,), "compressed-tensors": (ScaledLinear, ScaledExperts)}


@pytest.fixture
def made(request: Any, tmp_path: Path) -> Checkpoint:
    return FORMATS[request.param](tmp_path / "checkpoint")


all_formats = pytest.mark.parametrize("made", FORMATS, indirect=True)
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _ids(rows: int = 8) -> torch.Tensor:
    return torch.randint(3, 90, (rows, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=_ids().to(model.device)).logits.float().cpu()


def _decided(made: Checkpoint) -> tuple[torch.Tensor, list[list[int]]]:
    """Return prompts and the reference's tokens, where the best token of each step leads by most.

    Elsewhere two tokens are nearly as good, so that rounding decides between them. Prompts whose tokens differ for the
    stock model in bfloat16 are left out.
    """
    ids = _ids(64)
    options = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    exact, rounded = (
        made.reference(dtype).generate(ids, max_new_tokens=NEW_TOKENS, attention_mask=torch.ones_like(ids), **options)
        for dtype in (torch.float32, torch.bfloat16)
    )
    best = torch.stack(exact.logits, 1).topk(2).values
    agree = (exact.sequences == rounded.sequences).all(1)
    chosen = torch.where(agree, (best[..., 0] - best[..., 1]).amin(1), -1).topk(3).indices
    assert agree[chosen].all()
    return ids[chosen], exact.sequences[chosen, ids.shape[1] :].tolist()


def _errors(made: Checkpoint, model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances of a model and of the stock model in bfloat16 from the reference, for the median token.

    A token whose router chooses another expert, as two are nearly as good, differs far more in either model.
    """
    exact = _logits(made.reference())
    models = model, made.reference(torch.bfloat16)
    ours, theirs = ((_logits(x) - exact).norm(dim=-1).median() for x in models)
    return ours, theirs


@torch.no_grad()
def _check_layers(made: Checkpoint, model: Any) -> None:
    """Compare each packed module alone with the reference, on random rows."""
    exact, rounded = made.reference(), made.reference(torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    for name in made.quantized or [name for name, x in model.named_modules() if isinstance(x, Mxfp4Experts)]:
        layer, device = model.get_submodule(name), model.device
        if name.endswith("experts"):
            x = torch.randn(96, model.config.hidden_size, generator=generator).bfloat16()
            weights, ids = torch.rand(96, 8, generator=generator).topk(2)
            given: tuple[torch.Tensor, ...] = (x, ids, weights.bfloat16())
        else:
            given = (torch.randn(96, layer.in_features, generator=generator).bfloat16(),)
        got = layer(*(x.to(device) for x in given)).float().cpu()
        in_float = (x.float() if x.is_floating_point() else x for x in given)
        want, other = exact.get_submodule(name)(*in_float), rounded.get_submodule(name)(*given).float()
        assert (got - want).norm() <= FACTOR * (other - want).norm(), name


@all_formats
@on_each_device
def test_a_loaded_model_is_as_near_to_the_reference_as_bfloat16(made: Checkpoint, device: str) -> None:
    model = ck.load(made.write(files=3), device=device)
    _check_layers(made, model)
    ours, theirs = _errors(made, model)
    assert ours <= FACTOR * theirs, (ours, theirs)
    prompts, tokens = _decided(made)
    for _ in range(2):  # the second time from the kept graph
        out = ck.generate(model, prompts.to(device), max_new_tokens=NEW_TOKENS, eos_token_id=None)
        assert out.tokens == tokens
        assert out.captured == (device == "cuda"), out.why


@all_formats
@on_each_device
def test_weights_stay_packed_and_disable_gives_the_modules_back(made: Checkpoint, device: str) -> None:
    model = cukern.load(made.write(), device=device)
    kinds = PACKED[made.quantization["quant_method"]]
    packed = {name: x for name, x in model.named_modules() if isinstance(x, kinds)}
    assert {*packed} >= {*made.quantized} and packed
    for name, x in packed.items():
        own = {k: v for k, v in x.named_parameters() if "scale" not in k and "bias" not in k}
        assert all(v.dtype.itemsize == 1 for v in own.values()), name
    size = sum(x.nbytes for x in {x.data_ptr(): x for x in model.state_dict().values()}.values())
    assert size <= 1.02 * sum(x.nbytes for x in made.tensors.values())
    ck.disable(model)
    for x in packed.values():
        assert not [name for name in x.__dict__ if name == "forward" or name.startswith("_cukern")]
    assert "_cukern" not in model.__dict__
    if kinds[0] is not FP8Linear:  # the modules of cukern run also then
        ours, theirs = _errors(made, model)
        assert ours <= FACTOR * theirs, (ours, theirs)


@all_formats
@on_each_device
def test_a_saved_model_is_the_checkpoint(made: Checkpoint, device: str, tmp_path: Path) -> None:
    model = ck.load(made.write(files=2), device=device)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert {*saved} == {*made.tensors}
    for name, x in made.tensors.items():
        got = saved[name].reshape(x.shape)
        # Scales of 16 bits, and what transformers keeps in float32, are saved in float32.
        if got.dtype != x.dtype:
            assert any(part in name for part in ("scale", *model._keep_in_fp32_modules_strict))
            assert got.dtype == torch.float32
            x = x.float()
        assert torch.equal(got.view(-1).view(torch.uint8), x.reshape(-1).view(torch.uint8)), name
    assert torch.equal(_logits(ck.load(tmp_path / "again", device=device)), _logits(model))


@pytest.mark.parametrize("made", [x for x in FORMATS if "moe" in x or "deepseek" in x], indirect=True)
def test_scales_without_sizes_of_1_are_read(made: Checkpoint) -> None:
    """transformers before 5.23 saves the scales of an expert so."""
    wanted = _logits(ck.load(made.write()))
    for name, x in made.tensors.items():
        if ".experts." in name and "scale" in name:
            made.tensors[name] = x.squeeze()
    assert torch.equal(_logits(ck.load(made.write())), wanted)


@on_each_device
def test_mxfp4_weights_that_are_not_prepared(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs other than Hopper's take the weights as the checkpoint has them."""
    made = checkpoints.mxfp4(tmp_path / "checkpoint")
    prepared = ck.load(made.write(), device=device)
    monkeypatch.setattr(_packed, "takes_prepared", lambda device: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cukern.PerformanceWarning)
        plain = ck.load(made.folder, device=device)
        _check_layers(made, plain)
        torch.testing.assert_close(_logits(plain), _logits(prepared), rtol=0.05, atol=0.05)
    saved = prepared.state_dict()
    assert {*saved} == {*plain.state_dict()}
    assert all(torch.equal(x, saved[name]) for name, x in plain.state_dict().items())


def test_the_state_of_packed_experts_is_loaded(tmp_path: Path) -> None:
    first, second = (ck.load(checkpoints.mxfp4(tmp_path / str(i)).write()) for i in range(2))
    wanted, biases = _logits(first), torch.ones_like(second.model.layers[0].mlp.experts.gate_up_proj_bias)
    with torch.no_grad():
        for x in second.parameters():
            x.zero_()
    second.load_state_dict(first.state_dict())
    assert torch.equal(_logits(second), wanted)
    second.load_state_dict({"model.layers.0.mlp.experts.gate_up_proj_bias": biases}, strict=False)
    assert not torch.equal(_logits(second), wanted)


@pytest.mark.gpu
def test_the_peak_of_memory_is_the_weights_and_a_file(tmp_path: Path) -> None:
    sizes = {**checkpoints.MOE, "hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 6}
    made = checkpoints.fp8(tmp_path / "checkpoint", "qwen3_moe", **sizes)
    ck.load(made.write(), device="cpu").save_pretrained(tmp_path / "again", max_shard_size="10MB")
    files = [x.stat().st_size for x in (tmp_path / "again").glob("*.safetensors")]
    assert len(files) > 4
    ck.load(tmp_path / "again", device="cuda")  # loads kernels
    gc.collect()  # frees this model
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = ck.load(tmp_path / "again", device="cuda")
    peak, now = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    assert now <= 1.05 * sum(files)
    assert peak <= now + 1.05 * max(files)
    del model


def test_enable_runs_what_transformers_keeps_packed(tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "qwen3_moe", **checkpoints.MOE)
    model = ck.load(made.write())
    wanted = _logits(model)
    ck.disable(model)
    report = ck.enable(model)
    assert {"FP8Linear", "FP8Experts"} <= {x.what for x in report.replaced}
    assert torch.equal(_logits(model), wanted)
    # A gradient that may be needed runs the code of transformers, which needs a kernel from the hub.
    layer = next(x for x in model.modules() if type(x) is FP8Linear)
    with pytest.raises(ImportError, match="finegrained-fp8"):
        layer(torch.randn(2, layer.in_features, requires_grad=True))


@torch.no_grad()
def test_fp8_layers_with_one_input_are_joined(tmp_path: Path) -> None:
    model = ck.load(checkpoints.fp8(tmp_path / "checkpoint", "llama").write())
    layer = model.model.layers[1]
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for module, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))):
        joined = _products.joined_weights(module, names)
        assert joined is not None
        assert torch.equal(joined.product(x), torch.cat([getattr(module, name)(x) for name in names], 1))
    torch.testing.assert_close(layer.mlp(x), type(layer.mlp).forward(layer.mlp, x), rtol=2**-4, atol=2**-5)
    report = model.__dict__["_cukern"].report
    assert {x.what for x in report.replaced if "one product" in x.how} == {"LlamaAttention", "LlamaMLP"}
    ck.disable(model)
    assert _products.joined_weights(layer.mlp, ("gate_proj", "up_proj")) is None


def test_fp8_layers_that_cannot_be_joined(tmp_path: Path) -> None:
    """Rows of k and v that end in a partial block share a scale in one matrix, but not in two."""
    sizes = {"head_dim": 32, "num_key_value_heads": 2}
    model = ck.load(checkpoints.fp8(tmp_path / "checkpoint", "llama", **sizes).write())
    assert _products.joined_weights(model.model.layers[1].self_attn, ("q_proj", "k_proj", "v_proj")) is None


@on_each_device
@pytest.mark.parametrize("scale_fmt", ["", "ue8m0"])
def test_scales_that_are_written_are_used(scale_fmt: str, device: str, tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama", scale_fmt=scale_fmt)
    model = ck.load(made.write(), device=device)

    def results() -> tuple[torch.Tensor, list[list[int]]]:
        out = ck.generate(model, _ids(2).to(device), max_new_tokens=NEW_TOKENS, eos_token_id=None)
        return _logits(model), out.tokens

    before, tokens_before = results()
    scales = {name: x for name, x in model.state_dict().items() if name.endswith("scale_inv")}
    model.load_state_dict({name: (2 * x.float()).to(x.dtype) for name, x in scales.items()}, strict=False)
    got, tokens = results()
    ck.disable(model)
    ck.enable(model)
    wanted, _ = results()
    # Layers whose E8M0 scales were written run alone, and round otherwise than joined layers.
    assert (got - wanted).norm() <= (0.2 if scale_fmt else 0) * (wanted - before).norm()
    assert tokens != tokens_before


@torch.no_grad()
@pytest.mark.parametrize("scale_fmt", ["", "ue8m0"])
def test_a_compiled_model_has_no_graph_breaks(scale_fmt: str, tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama", scale_fmt=scale_fmt)
    model = ck.load(made.write())
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)(input_ids=_ids(), use_cache=False)
    exact = _logits(made.reference())
    ours, others = ((x - exact).norm(dim=-1).median() for x in (compiled.logits.float(), _logits(model)))
    assert ours <= FACTOR * others


def test_fp8_layers_with_hooks_run_alone(tmp_path: Path) -> None:
    model = ck.load(checkpoints.fp8(tmp_path / "checkpoint", "llama").write())
    ck.disable(model)
    seen = []
    for name in ("mlp.gate_proj", "self_attn.k_proj"):
        layer = model.model.layers[1].get_submodule(name)
        layer.register_forward_hook(lambda module, given, out, name=name: seen.append(name))
    ck.enable(model)
    _logits(model)
    assert sorted(seen) == ["mlp.gate_proj", "self_attn.k_proj"]


@pytest.mark.parametrize("name", ["fp8 qwen3_moe", "mxfp4 gpt_oss", "compressed-tensors channel qwen3_moe"])
def test_a_model_runs_where_gradients_are_enabled(name: str, tmp_path: Path) -> None:
    model = ck.load(FORMATS[name](tmp_path / "checkpoint").write())
    with torch.enable_grad():
        logits = model(input_ids=_ids()).logits
    assert not logits.requires_grad and torch.equal(logits.float(), _logits(model))


@pytest.mark.parametrize("name", ["mxfp4 gpt_oss", "compressed-tensors channel qwen3_moe"])
def test_modules_of_cukern_refuse_gradients(name: str, tmp_path: Path) -> None:
    """A missing gradient would train an adapter wrongly."""
    model = ck.load(FORMATS[name](tmp_path / "checkpoint").write())
    hidden = torch.randn(3, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    for layer in model.modules():
        if not isinstance(layer, (Mxfp4Experts, ScaledExperts, ScaledLinear)):
            continue
        given = (hidden,) if isinstance(layer, ScaledLinear) else (hidden, ids, weights)
        with pytest.raises(RuntimeError, match="must be a tensor that does not require grad"):
            layer(*given)
        if len(given) > 1:
            with pytest.raises(RuntimeError, match="weights must be a tensor that does not require grad"):
                layer(hidden.detach(), ids, weights.clone().requires_grad_())


def test_what_fp8_modules_are_kept_and_why(tmp_path: Path) -> None:
    model = ck.load(checkpoints.fp8(tmp_path / "checkpoint", "qwen3_moe", **checkpoints.MOE).write())
    ck.disable(model)
    for x in model.modules():
        if isinstance(x, FP8Experts):
            x.activation_scheme = "static"
        elif isinstance(x, FP8Linear) and x.out_features == 128:
            x.block_size = (64, 64)
    kept = {x.what: x.how for x in ck.enable(model).kept}
    assert kept["FP8Experts"] == "static scales of its activations"
    assert kept["FP8Linear"] == "blocks of 64 x 64 weights"


def test_rows_that_end_in_a_partial_group(tmp_path: Path) -> None:
    """k = 192 is a group and a half."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(40, 192, generator=generator)
    q, scale, values = checkpoints.fp8_by(w, "block")
    layer = FP8Linear(192, 40, block_size=(128, 128), has_bias=True)
    layer.weight, layer.weight_scale_inv = (torch.nn.Parameter(x, requires_grad=False) for x in (q, scale))
    layer.bias.data.zero_()
    from cukern.integrations.transformers._packed import fp8_linear_forward

    x = torch.randn(3, 5, 192, generator=generator).bfloat16()
    padded = checkpoints.by_groups(torch.nn.functional.pad(x.float(), (0, 64)))[..., :192]
    torch.testing.assert_close(fp8_linear_forward(layer, x).float(), padded @ values.T, rtol=2**-7, atol=2**-7)


def test_scales_are_those_of_packed_weights() -> None:
    """A parameter of a model may have a name that ends like a scale's."""
    model = torch.nn.ModuleDict({"packed": FP8Linear(128, 128, (128, 128)), "other": torch.nn.Linear(2, 2)})
    model.other.logit_scale = torch.nn.Parameter(torch.ones(1))
    assert _load._scales(model, model.state_dict()) == {"packed.weight_scale_inv"}


@pytest.mark.parametrize("change", [lambda x: x.view(torch.uint8), lambda x: x.float()], ids=["bytes", "float32"])
def test_powers_of_two_in_other_dtypes(change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Some checkpoints of scale_fmt ue8m0 have scales in bytes, and DeepSeek-V3.1 has them in float32."""
    made = checkpoints.fp8(tmp_path / "checkpoint", "qwen3_moe", scale_fmt="ue8m0", **checkpoints.MOE)
    wanted = _logits(ck.load(made.write()))
    for name, x in made.tensors.items():
        if name.endswith("_scale_inv"):
            made.tensors[name] = change(x)
    assert torch.equal(_logits(ck.load(made.write())), wanted)


def test_a_checkpoint_of_16_bits(tmp_path: Path) -> None:
    stock = checkpoints.random_stock("qwen3_moe", **checkpoints.MOE, tie_word_embeddings=True)
    tensors = {name: x.bfloat16() for name, x in checkpoints._state(stock).items()}
    made = Checkpoint(tmp_path / "checkpoint", stock, tensors, {})
    model = ck.load(made.write(files=2), dtype=torch.float32)
    torch.testing.assert_close(_logits(model), _logits(stock), rtol=0, atol=1e-3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert ck.load(made.folder).dtype == torch.bfloat16


def test_tied_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """As stock: two tensors that differ are not tied, and either tensor alone serves for both."""
    embeddings, head = "model.embed_tokens.weight", "lm_head.weight"
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama", tie_word_embeddings=True)
    own = made.tensors[embeddings]
    made.tensors[head] = -own
    model = ck.load(made.write())
    assert torch.equal(model.lm_head.weight, -own) and torch.equal(model.model.embed_tokens.weight, own)
    del made.tensors[embeddings]
    model = ck.load(made.write())
    assert model.lm_head.weight is model.model.embed_tokens.weight and torch.equal(model.lm_head.weight, -own)
    del made.tensors[head]
    with pytest.raises(ValueError, match=f"has no tensor {embeddings} in model.safetensors"):
        ck.load(made.write())


# --- errors ---------------------------------------------------------------------------------------------

REFUSED = {
    "weights of AWQ with 4 bits": {"quant_method": "awq", "bits": 4},
    "weights of GPTQ with 4 bits": {"quant_method": "gptq", "bits": 4},
    "weights of BITSANDBYTES": {"quant_method": "bitsandbytes"},
    r"compressed-tensors weights of 4-bit int \(W4A16\)": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
    },
    r"FP8 weights with inputs of 16 bits \(W8A16\)": {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "experts of expert_dtype fp4": {"quant_method": "fp8", "expert_dtype": "fp4"},
    "FP8 weights in blocks of 64 x 64": {"quant_method": "fp8", "weight_block_size": [64, 64]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_format_that_is_not_read_is_named(message: str, tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama")
    made.quantization = REFUSED[message]
    with pytest.raises(ValueError, match=f"config.json names .*{message}, and cukern.load reads"):
        ck.load(made.write())


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Checkpoint], None]:
    def change_one(made: Checkpoint) -> None:
        made.tensors[name] = change(made.tensors[name])

    return change_one


def _without(name: str) -> Callable[[Checkpoint], None]:
    return lambda made: made.tensors.pop(name)  # type: ignore[return-value]


def _nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.view(-1)[-1] = 255 if x.dtype == torch.uint8 else torch.nan
    return x


_Q = "model.layers.1.self_attn.q_proj.weight"
_UP = "model.layers.1.mlp.experts.3.up_proj.weight"
_BLOCKS = "model.layers.1.mlp.experts.down_proj"
#: By the message: the format, and what is wrong.
BROKEN = {
    f"has no tensor {_Q} in model.safetensors, and config.json asks for it": ("fp8 qwen3_moe", _without(_Q)),
    f"has no tensor {_Q}_scale_inv in model.safetensors": ("fp8 qwen3_moe", _without(f"{_Q}_scale_inv")),
    f"has no {_UP}, beside .* in model.safetensors": ("fp8 qwen3_moe", _without(_UP)),
    f"has no {_UP}_scale_inv, beside": ("fp8 qwen3_moe", _without(f"{_UP}_scale_inv")),
    rf"{_Q}_scale_inv in .*model.safetensors must be of shape \[2, 1\], got \[4, 1\]": (
        "fp8 qwen3_moe", _with(f"{_Q}_scale_inv", lambda x: x.repeat(2, 1)),
    ),
    rf"{_UP}_scale_inv in .* must be of shape \[1, 1\], as the same tensors of other experts, got \[2, 1\]": (
        "fp8 qwen3_moe", _with(f"{_UP}_scale_inv", lambda x: x.repeat(2, 1)),
    ),
    f"{_Q}_scale_inv in .*model.safetensors has a scale that is NaN": (
        "fp8 qwen3_moe", _with(f"{_Q}_scale_inv", _nan),
    ),
    f"{_UP}_scale_inv in .*model.safetensors has a scale that is NaN": (
        "fp8 ue8m0 qwen3_moe", _with(f"{_UP}_scale_inv", lambda x: torch.full_like(x.float(), torch.nan).to(x.dtype)),
    ),
    f"{_Q} in .* must be float8_e4m3fn, as config.json says, got bfloat16": (
        "fp8 qwen3_moe", _with(_Q, lambda x: x.bfloat16()),
    ),
    "lm_head.weight in .* must be bfloat16, as config.json says, got float8_e4m3fn": (
        "fp8 qwen3_moe", _with("lm_head.weight", lambda x: x.to(torch.float8_e4m3fn)),
    ),
    f"has no tensor {_BLOCKS}_scales in": ("mxfp4 gpt_oss", _without(f"{_BLOCKS}_scales")),
    rf"{_BLOCKS}_scales in .* must be of shape \[8, 128, 3\], got \[8, 128, 2\]": (
        "mxfp4 gpt_oss", _with(f"{_BLOCKS}_scales", lambda x: x[..., :2].contiguous()),
    ),
    rf"{_BLOCKS}_blocks in .* must be of shape \[8, 128, 3, 16\], got \[7, 128, 3, 16\]": (
        "mxfp4 gpt_oss", _with(f"{_BLOCKS}_blocks", lambda x: x[:7]),
    ),
    f"{_BLOCKS}_scales in .* has a scale that is NaN": ("mxfp4 gpt_oss", _with(f"{_BLOCKS}_scales", _nan)),
    rf"{_Q}_scale in .* must be of shape \[256, 1\], got \[256\]": (
        "compressed-tensors channel", _with(f"{_Q}_scale", lambda x: x[:, 0]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_checkpoint_is_named(message: str, tmp_path: Path) -> None:
    name, spoil = BROKEN[message]
    made = FORMATS[name](tmp_path / "checkpoint")
    spoil(made)
    with pytest.raises(ValueError, match=message):
        ck.load(made.write())


@pytest.mark.parametrize("name", ["fp8 qwen3_moe", "mxfp4 gpt_oss"])
@pytest.mark.parametrize("kept", [0.5, 0.001, 0.0])
def test_a_truncated_file_is_named(kept: float, name: str, tmp_path: Path) -> None:
    folder = FORMATS[name](tmp_path / "checkpoint").write(files=2)
    file = folder / "model-00002-of-00002.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    wanted = r"model-00002-of-00002.safetensors is truncated: model\S+ ends at byte \d+" if kept == 0.5 else "truncated"
    with pytest.raises(ValueError, match=wanted):
        ck.load(folder)


def test_missing_and_other_files(tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama")
    folder = made.write(files=2)
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        ck.load(tmp_path / "nothing")
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model-00001-of-00002.safetensors, which model.safetensors.index"):
        ck.load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="must name files of its own directory"):
        ck.load(folder)
    index.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"but pytorch_model.bin, which may hold code"):
        ck.load(folder)
    (folder / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"[1, 2")
    with pytest.raises(ValueError, match="its header is not JSON"):
        ck.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config.json"):
        ck.load(folder)


def test_float16(tmp_path: Path) -> None:
    made = checkpoints.mxfp4(tmp_path / "checkpoint")
    model = ck.load(made.write(), dtype=torch.float16)
    assert model.dtype == torch.float16
    ours, theirs = _errors(made, model)
    assert ours <= theirs / 2, (ours, theirs)  # three more bits than bfloat16


def test_bad_arguments(tmp_path: Path) -> None:
    folder = checkpoints.fp8(tmp_path / "checkpoint", "llama").write()
    with pytest.raises(ValueError, match=r"dtype must be torch.bfloat16 or torch.float16 with packed weights, got"):
        ck.load(folder, dtype=torch.float32)
    with pytest.raises(ValueError, match="device must be the CPU or a CUDA device, got meta"):
        ck.load(folder, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device must be 'cpu', for torch finds no GPU here, got 'cuda'"):
            ck.load(folder, device="cuda")
    with pytest.raises(AttributeError, match="module 'cukern' has no attribute 'loads'"):
        cukern.loads(folder)


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama")
    made.tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM has no place for model.layers.0.self_attn.k_scale"):
        ck.load(made.write())


def test_a_model_does_not_read_its_files_after_it_is_loaded(tmp_path: Path) -> None:
    made = checkpoints.mxfp4(tmp_path / "checkpoint")
    model = ck.load(made.write())
    wanted = _logits(model)
    file = made.folder / "model.safetensors"
    save_file({name: torch.zeros_like(x) for name, x in made.tensors.items()}, file)
    assert torch.equal(_logits(model), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(made.folder)
    assert torch.equal(_logits(ck.load(made.folder)), wanted)
