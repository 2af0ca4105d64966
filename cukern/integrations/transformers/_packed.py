"""Layers with quantized weights: the modules of transformers with FP8 weights, and modules that transformers lacks.

transformers keeps FP8 weights packed in `FP8Linear` and `FP8Experts`. `enable` replaces their `forward`.
`cukern.load` makes the modules of this file for weights that transformers dequantizes, or that need other packages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

import cukern
from cukern.formats.quantized import BLOCK, MXFP4_GROUP
from cukern.formats.weights import UNIT_BYTES, UNIT_K, UNIT_ROWS
from cukern.integrations.transformers._deferred import Ids
from cukern.integrations.transformers._state import State, wants_gradient
from cukern.runtime import check
from cukern.runtime.gpu import of_device

FP8 = torch.float8_e4m3fn
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_SCALES = "_cukern_scales"


def content_of(x: torch.Tensor) -> Any:
    """Return a value that changes when kept results for a tensor become wrong.

    It is the address. Of E8M0 scales, whose float32 copies are kept, it also has the number of writes.
    """
    if x.dtype != torch.float8_e8m0fnu or x.is_inference():
        return x.data_ptr()
    return x.data_ptr(), x._version


def float_scale(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a module's scales in float32. Convert scales of another dtype once."""
    scale: torch.Tensor = getattr(module, name).detach()
    if scale.dtype == torch.float32 or torch.compiler.is_compiling():
        return scale.float()
    known, content = module.__dict__.setdefault(_SCALES, {}), content_of(scale)
    if name not in known or known[name][0] != content:
        known[name] = content, scale.float()
    return known[name][1]  # type: ignore[no-any-return]


def replace_forward(module: torch.nn.Module, forward: Any, state: State) -> None:
    """Replace a module's `forward`, and drop its kept scales with it."""
    state.undo.append(lambda: module.__dict__.pop(_SCALES, None))  # type: ignore[arg-type, return-value]
    state.replace_forward(module, forward)


def _refuse_gradients(**tensors: torch.Tensor) -> None:
    """Raise RuntimeError if a gradient may be needed by a module that transformers has no code for."""
    for name, x in tensors.items():
        if wants_gradient(x):
            check.refuse_gradient(name)


# --- linear layers --------------------------------------------------------------------------------------


def fp8_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, static: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return x @ weight.T + bias for x [..., k] of 16 bits and FP8 weights [n, k].

    Args:
        x: bfloat16 or float16.
        weight: float8_e4m3fn [n, k].
        scale: float32 by blocks [ceil(n / 128), ceil(k / 128)], by rows [n, 1], or [] or [1].
        static: float32 [] or [1], the scale of x. None: a scale for each group of 128 elements of a row if `scale` is
            by blocks, otherwise for each row.
        bias: [n] or None.
    """
    shape = x.shape
    x = x.reshape(-1, shape[-1]).contiguous()
    rows, k = x.shape
    options: dict[str, Any] = {} if bias is None else {"bias": bias.detach().to(x.dtype)}
    is_by_blocks = scale.shape == (-(-len(weight) // BLOCK), -(-k // BLOCK))
    if not is_by_blocks:
        options["x_scale"] = static
    elif static is not None or k % BLOCK:
        options["out_dtype"] = str(x.dtype).removeprefix("torch.")
        if static is not None:
            x, _ = cukern.scaled_fp8_quant(x, static)
            x_scale = static.reshape(1, 1).expand(rows, scale.shape[1])
        else:
            x, x_scale = cukern.per_token_group_quant_fp8(F.pad(x, (0, -k % BLOCK)), BLOCK)
            x = x[:, :k].contiguous()
        options["x_scale"] = x_scale.contiguous()
    made: Any = cukern.quantized_matmul(x, weight.detach(), scale, **options)
    return made.view(*shape[:-1], len(weight))  # type: ignore[no-any-return]


def _in_16_bits(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in _HALF_DTYPES else x.bfloat16()


def fp8_linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """Run a `FP8Linear` of transformers on `quantized_matmul`."""
    if wants_gradient(input):
        return type(self).forward(self, input)  # type: ignore[no-any-return]
    with torch.no_grad():
        static = None if self.activation_scale is None else float_scale(self, "activation_scale")
        scale = float_scale(self, "weight_scale_inv")
        return fp8_product(_in_16_bits(input), self.weight, scale, static, self.bias).to(input.dtype)


def why_not_linear(module: FP8Linear) -> str:
    """Return why `fp8_linear_forward` cannot run a `FP8Linear`; empty if it can."""
    if type(module) is not FP8Linear:
        return f"{type(module).__name__} is not a plain linear layer"
    if module.weight.dtype != FP8:
        return f"weights of {str(module.weight.dtype).removeprefix('torch.')}"
    if module.block_size is not None and tuple(module.block_size) != (BLOCK, BLOCK):
        return f"blocks of {' x '.join(map(str, module.block_size))} weights"
    return ""


class ScaledLinear(torch.nn.Module):
    """A linear layer in the format of compressed-tensors: FP8 weights with a scale per row, per block or for all.

    `weight` is float8_e4m3fn [n, k]. `weight_scale` is [n, 1], [ceil(n / 128), ceil(k / 128)] or [1]. `input_scale` is
    None, or [1]: a static scale of the input.
    """

    def __init__(self, linear: torch.nn.Linear, scale_shape: tuple[int, ...], is_static: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        device, n, k = linear.weight.device, linear.out_features, linear.in_features
        self.weight = torch.nn.Parameter(torch.empty(n, k, dtype=FP8, device=device), requires_grad=False)
        scales = torch.empty(scale_shape, dtype=torch.float32, device=device)
        self.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
        self.register_parameter("input_scale", None)
        if is_static:
            static = torch.empty(1, dtype=torch.float32, device=device)
            self.input_scale = torch.nn.Parameter(static, requires_grad=False)
        self.register_parameter("bias", linear.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        _refuse_gradients(input=input)
        with torch.no_grad():
            static = None if self.input_scale is None else float_scale(self, "input_scale")
            scale = float_scale(self, "weight_scale")
            return fp8_product(_in_16_bits(input), self.weight, scale, static, self.bias).to(input.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


# --- experts --------------------------------------------------------------------------------------------


def _run_experts(
    experts: tuple[torch.Tensor, torch.Tensor], hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    x = _in_16_bits(hidden_states).contiguous()
    ids = (ids.raw if isinstance(ids, Ids) else ids).contiguous()
    w1, w2 = (w.detach() for w in experts)
    out: Any = cukern.fused_experts(x, w1, w2, weights.float().contiguous(), ids, **options)
    return out.to(hidden_states.dtype)  # type: ignore[no-any-return]


def _fp8_options(module: Any, names: dict[str, str]) -> dict[str, Any]:
    """Return the quantization of an experts module, and its scales, as `fused_experts` takes them.

    A scale for all weights of a projection becomes a scale for each of their rows, because gates and ups have scales of
    their own. `names` maps the names of the two weights to the names of their scales.
    """
    options: dict[str, Any] = {"quant": "fp8_block" if module.block_size is not None else "fp8"}
    for i, (weights, scales) in enumerate(names.items(), 1):
        scale, n = float_scale(module, scales), getattr(module, weights).shape[1]
        if module.block_size is None:
            scale = scale.flatten(1)
            if scale.shape[1] != n:
                scale = scale.repeat_interleave(n // scale.shape[1], 1)
        options[f"w{i}_scale"] = scale
    return options


def fp8_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run a `FP8Experts` of transformers on `fused_experts`. An id out of range adds nothing."""
    if wants_gradient(hidden_states, top_k_weights):
        return type(self).forward(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    with torch.no_grad():
        first = "gate_up_proj" if self.has_gate else "up_proj"
        options = _fp8_options(self, {name: f"{name}_scale_inv" for name in (first, "down_proj")})
        matched = self.__dict__["_cukern_activation"]
        return _run_experts(
            (getattr(self, first), self.down_proj), hidden_states, top_k_index, top_k_weights,
            activation=matched.activation, **matched.options, **options,
        )  # fmt: skip


def why_not_experts(module: FP8Experts) -> str:
    """Return why `fp8_experts_forward` cannot run a `FP8Experts`; empty if it can."""
    first, second = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if first.dtype != FP8:
        return f"weights of {str(first.dtype).removeprefix('torch.')}"
    if module.activation_scheme != "dynamic":
        return f"{module.activation_scheme} scales of its activations"
    if module.block_size is None:
        return ""
    if tuple(module.block_size) != (BLOCK, BLOCK):
        return f"blocks of {' x '.join(map(str, module.block_size))} weights"
    if sizes := [size for size in (first.shape[2], second.shape[2]) if size % BLOCK]:
        return f"rows of {sizes[0]} elements, no multiple of {BLOCK}"
    return ""


def takes_prepared(device: torch.device) -> bool:
    """Return whether a device multiplies by weights from `cukern.prepare_weights`."""
    return device.type == "cpu" or of_device(device.index or 0).arch == "90a"


class Mxfp4Experts(torch.nn.Module):
    """Experts with MXFP4 weights, which `forward` runs on `fused_experts`.

    On Hopper and on the CPU, `gate_up_proj` and `down_proj` are weights from `cukern.prepare_weights`. On other GPUs
    they are uint8 [experts, n, k / 2], with `gate_up_proj_scales` and `down_proj_scales`. The state dict has the names
    and shapes of gpt-oss' checkpoints in both cases: `gate_up_proj_blocks` [experts, n, k / 32, 16] and
    `gate_up_proj_scales` [experts, n, k / 32], and the same of `down_proj`.
    """

    def __init__(self, experts: Any, device: torch.device, activation: str, options: dict[str, Any]) -> None:
        """Make the module on the meta device. `experts` is the module of transformers, with 16-bit weights."""
        super().__init__()
        count, hidden, columns = experts.gate_up_proj.shape
        inter = experts.down_proj.shape[1]
        self.activation, self.options = activation, options
        self.sizes = {"gate_up_proj": (count, columns, hidden), "down_proj": (count, hidden, inter)}
        self.is_prepared = takes_prepared(device)
        for name, (_, n, k) in self.sizes.items():
            shapes: dict[str, tuple[int, ...]] = {"": (count, n, k // 2), "_scales": (count, n, k // MXFP4_GROUP)}
            if self.is_prepared:
                shapes = {"": (count, n // UNIT_ROWS, -(-k // UNIT_K), UNIT_BYTES[MXFP4_GROUP])}
            for suffix, shape in shapes.items():
                empty = torch.empty(shape, dtype=torch.uint8, device="meta")
                self.register_parameter(name + suffix, torch.nn.Parameter(empty, requires_grad=False))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))

    def fill(self, name: str, expert: int, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Write an expert's weights: blocks [n, k / 32, 16] and scales [n, k / 32] of the checkpoint."""
        blocks = blocks.flatten(1)
        if self.is_prepared:
            prepared = getattr(self, name).data[expert : expert + 1]
            cukern.prepare_weights(blocks[None].contiguous(), scales[None].contiguous(), out=prepared)
        else:
            getattr(self, name).data[expert] = blocks
            getattr(self, f"{name}_scales").data[expert] = scales

    def allocate(self, device: torch.device) -> None:
        """Move the weights from the meta device to uninitialized memory of `device`."""
        for name, x in list(self._parameters.items()):
            if x is not None and x.dtype == torch.uint8:
                self._parameters[name] = torch.nn.Parameter(torch.empty_like(x, device=device), requires_grad=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (count, n, k) in self.sizes.items():
            weights = destination.pop(prefix + name)
            scales = destination.pop(f"{prefix}{name}_scales", None)
            if weights.is_meta:
                scales = weights.new_empty(count, n, k // MXFP4_GROUP)
                weights = weights.new_empty(count, n, k // 2)
            elif scales is None:
                weights, scales = cukern.restore_weights(weights.detach(), k)
            destination[f"{prefix}{name}_blocks"] = weights.view(count, n, k // MXFP4_GROUP, -1)
            destination[f"{prefix}{name}_scales"] = scales

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        for name in self.sizes:
            blocks = state_dict.pop(f"{prefix}{name}_blocks", None)
            scales = state_dict.pop(f"{prefix}{name}_scales", None)
            if blocks is None or scales is None:
                continue
            device = getattr(self, name).device
            for expert in range(len(blocks)):
                self.fill(name, expert, blocks[expert].to(device), scales[expert].to(device))
            own = {name, f"{name}_scales"} & {*self._parameters}
            state_dict.update({prefix + x: self._parameters[x] for x in own})
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        _refuse_gradients(hidden_states=hidden_states, routing_weights=routing_weights)
        with torch.no_grad():
            options = dict(self.options)
            for i, name in enumerate(self.sizes, 1):
                if (bias := getattr(self, f"{name}_bias")) is not None:
                    options[f"w{i}_bias"] = bias.detach().to(_in_16_bits(hidden_states).dtype)
                if not self.is_prepared:
                    options[f"w{i}_scale"] = getattr(self, f"{name}_scales")
            return _run_experts(
                (self.gate_up_proj, self.down_proj), hidden_states, router_indices, routing_weights, quant="mxfp4",
                activation=self.activation, **options,
            )  # fmt: skip


class ScaledExperts(torch.nn.Module):
    """Experts in the format of compressed-tensors, with FP8 weights, which `forward` runs on `fused_experts`.

    `gate_up_proj` and `down_proj` are float8_e4m3fn [experts, n, k]. `gate_up_proj_scale` is [experts, n, 1] (by
    channels), [experts, 2] (by tensors) or [experts, n / 128, k / 128] (by blocks), and `down_proj_scale` likewise.
    """

    def __init__(self, experts: Any, strategy: str, activation: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.activation, self.options = activation, options
        self.block_size = (BLOCK, BLOCK) if strategy == "block" else None
        for name in ("gate_up_proj", "down_proj"):
            count, n, k = getattr(experts, name).shape
            shapes = {"tensor": (2 if name == "gate_up_proj" else 1,), "channel": (n, 1)}
            shape = shapes.get(strategy, (n // BLOCK, k // BLOCK))
            weights = torch.empty(count, n, k, dtype=FP8, device="meta")
            scales = torch.empty(count, *shape, dtype=torch.float32, device="meta")
            self.register_parameter(name, torch.nn.Parameter(weights, requires_grad=False))
            self.register_parameter(f"{name}_scale", torch.nn.Parameter(scales, requires_grad=False))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        _refuse_gradients(hidden_states=hidden_states, top_k_weights=top_k_weights)
        with torch.no_grad():
            options = _fp8_options(self, {name: f"{name}_scale" for name in ("gate_up_proj", "down_proj")})
            return _run_experts(
                (self.gate_up_proj, self.down_proj), hidden_states, top_k_index, top_k_weights,
                activation=self.activation, **self.options, **options,
            )  # fmt: skip
