"""RMS norm and layer norm of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cukern.formats.quantized import SMALLEST, SMALLEST_FP8
from cukern.ops.norm import rows as parts
from cukern.ops.norm.rows import DTYPES, VARIANTS
from cukern.reference import norm as twin
from cukern.runtime import arrays, check
from cukern.runtime.arrays import AnyArray, WrittenArray
from cukern.runtime.compile import Instance
from cukern.runtime.describe import Array, Result, dtype_name, expect, expect_array
from cukern.runtime.fp8 import scale_of, scales_result
from cukern.runtime.kernel import Kernel, Variant
from cukern.runtime.op import OPS, op
from cukern.runtime.plan import begin_together, launch, outputs, run_twin
from cukern.runtime.rows import MAX_ROW

__all__ = [
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_quant",
    "layer_norm",
    "rms_norm",
    "rms_norm_quant",
]

FP8 = "float8_e4m3fn"
#: How many columns may share a scale. A few lanes of a warp hold such a group of columns.
GROUPS = (32, 64, 128)

#: Widths with specialized variants of RMS norm: heads and latents, whose norms do not add a residual.
SPECIALIZED_HEADS = {
    128: "the heads of q and k in Qwen3",
    512: "DeepSeek-V3's kv_a",
    1536: "DeepSeek-V3's q_a",
}
SPECIALIZED = {
    2048: "Qwen3-30B-A3B, Llama-3.2-1B",
    2880: "gpt-oss",
    4096: "Llama-3-8B, Qwen3-8B, Mixtral-8x7B",
    5120: "Qwen3-32B, Llama-4",
    7168: "DeepSeek-V3, Kimi-K2",
    8192: "Llama-3-70B",
}
#: Widths with specialized variants of layer norm.
SPECIALIZED_LAYER_NORM = {
    384: "all-MiniLM-L6, BGE-small, E5-small",
    512: "Marian (opus-mt), T5-small's sizes",
    768: "BERT-base, RoBERTa-base, DistilBERT, all-mpnet, BART-base, BGE-base, E5-base",
    1024: "BERT-large, XLM-R-large, BART-large, BGE-large, E5-large",
}

_kernel = Kernel("norm/rms_norm", "rms_norm", compile_s=0.8)
_layer_kernel = Kernel("norm/layer_norm", "layer_norm")


class _Operation(NamedTuple):
    dtype: str
    weight_dtype: str
    add: bool = False
    result: str = "PLAIN"
    group: int = 0
    round_sum: bool = True

    @property
    def sum(self) -> str:
        """The template argument SUM."""
        return ("ROUNDED" if self.round_sum else "UNROUNDED") if self.add else "ALONE"


def _arguments(operation: _Operation, own: Sequence[str | int], width: int, fixed: bool, wide: bool) -> list[str | int]:
    """Return the template arguments of a norm. `own`: the arguments between the types and the sizes."""
    tile = parts.tile(operation.dtype, width, fixed, wide, operation.group)
    types = [arrays.CUDA_TYPE[x] for x in (operation.dtype, operation.weight_dtype)]
    load_bytes = 16 if wide else arrays.ITEM_SIZE[operation.dtype]
    return [*types, *own, width if fixed else 0, tile.threads, tile.items, load_bytes, tile.block]


def _variant(operation: _Operation, width: int, fixed: bool, wide: bool) -> Variant:
    own = operation.result, operation.group, operation.sum
    return _kernel.variant(*_arguments(operation, own, width, fixed, wide))


def _layer_variant(operation: _Operation, width: int, fixed: bool, wide: bool) -> Variant:
    return _layer_kernel.variant(*_arguments(operation, (operation.add,), width, fixed, wide))


_registered: set[int] = set()
_registered_layer_norm: set[int] = set()
_BOTH = (False, True)  # without and with a residual


def _variants(width: int, dtype: str, adds: tuple[bool, ...] = _BOTH) -> list[Instance]:
    return [_variant(_Operation(dtype, dtype, add), width, True, True).instance for add in adds]


def _layer_variants(width: int, dtype: str) -> list[Instance]:
    return [_layer_variant(_Operation(dtype, dtype, add), width, True, True).instance for add in _BOTH]


def _list_instances() -> None:
    adds = dict.fromkeys(SPECIALIZED_HEADS, (False,)) | dict.fromkeys(SPECIALIZED, _BOTH)
    _registered.update(adds)
    # Instances for other dtypes, float32 weights, FP8 and other widths are compiled at their first use.
    _kernel.at_import = [x for width in adds for x in _variants(width, "bfloat16", adds[width])]
    quantized = ("BY_TENSOR", 0), ("BY_ROW", 0), ("BY_GROUP", 128)
    fp8 = [_Operation("bfloat16", "bfloat16", add, *quantization) for add in _BOTH for quantization in quantized]
    unrounded = [
        _Operation(x, x, True, *quantization, False) for x in DTYPES[1:] for quantization in (("PLAIN", 0), *quantized)
    ]
    dynamic = [
        (_Operation(x, x, add), width, False, True) for x in DTYPES for width in (64, 8192, 65536) for add in _BOTH
    ]
    _kernel.specialized = [
        *(x for dtype in DTYPES for width in adds for x in _variants(width, dtype, adds[width])),
        *(_variant(operation, 7168, True, True).instance for operation in (*fp8, *unrounded)),
        *(_variant(*variant_args).instance for variant_args in dynamic),
        *(_variant(operation, 65536, False, True).instance for operation in unrounded),
    ]
    _registered_layer_norm.update(SPECIALIZED_LAYER_NORM)
    # Most encoders have one of these two widths, and float16.
    _layer_kernel.at_import = [x for width in (384, 768) for x in _layer_variants(width, "float16")]
    _layer_kernel.specialized = [
        *(x for dtype in DTYPES for width in SPECIALIZED_LAYER_NORM for x in _layer_variants(width, dtype)),
        *(_layer_variant(*variant_args).instance for variant_args in dynamic),
    ]


_list_instances()


def _chosen(
    variant_of: Callable[..., Variant], operation: _Operation, width: int, layout: parts.Layout, variant: str,
    registered: set[int], models: dict[int, str],
) -> tuple[Variant, int, int, str]:  # fmt: skip
    """Return the instance, the grid, the threads per block and the reason."""
    fixed, wide = parts.is_fixed(variant, width, layout.wide, registered), layout.wide and variant != "scalar"
    tile = parts.tile(operation.dtype, width, fixed, wide, operation.group)
    why = parts.reason(variant, operation.dtype, width, layout.wide, fixed, models)
    return variant_of(operation, width, fixed, wide), parts.blocks(layout.total, tile), tile.block, why


def specialize(*, width: int, dtype: str = "bfloat16") -> list[Instance]:
    """Register variants of RMS norm and layer norm for a width, and return them; see `cukern.specialize`."""
    check.one_of("dtype", dtype, DTYPES)
    check.integer("width", width, 1, MAX_ROW)
    if width % twin.VECTOR:
        check.fail("width", f"a multiple of {twin.VECTOR}", width)
    _registered.add(width)
    _registered_layer_norm.add(width)
    for name in __all__:
        OPS[name].forget()
    return _variants(width, dtype) + _layer_variants(width, dtype)


# --- RMS norm -----------------------------------------------------------------------------------------


class _Norm(NamedTuple):
    """The checked arguments of an RMS norm."""

    input: Array
    residual: Array | None
    weight: Array | None
    epsilon: float
    weight_offset: float
    width: int
    variant: str
    round_sum: bool

    def launch(
        self, out: Array, result: str = "PLAIN", group: int = 0, scales: Array | None = None, scale: Any = (None, 0.0)
    ) -> None:
        """Launch the norm, which writes to `out`. A quantized norm writes its scales to `scales`, or uses the given
        `scale`."""
        weight_dtype = self.input.dtype if self.weight is None else self.weight.dtype
        operation = _Operation(self.input.dtype, weight_dtype, self.residual is not None, result, group, self.round_sum)
        layout = parts.layout(self.width, (self.weight,), input=self.input, residual=self.residual, out=out)
        if (layout.total == 0 or self.width == 0) and result == "PLAIN":
            return
        models = SPECIALIZED_HEADS | SPECIALIZED
        kernel, grid, block, why = _chosen(_variant, operation, self.width, layout, self.variant, _registered, models)
        launch(
            kernel,
            grid,
            block,
            why=why,
            weight=self.weight,
            scales=scales,
            scale=scale,
            epsilon=self.epsilon,
            offset=self.weight_offset,
            smallest=float(SMALLEST if result == "BY_GROUP" else SMALLEST_FP8),
            **layout.fields,
        )


def _check(
    input: Any, residual: Any, weight: Any, epsilon: float, weight_offset: float, variant: str, adds: bool,
    round_sum: bool = True,
) -> _Norm:  # fmt: skip
    expect_array("input", input, DTYPES)
    width = parts.width_of("input", input)
    if adds:
        parts.expect_like("residual", residual, input)
    if weight is not None:
        expect("weight", weight, input, "input", dict.fromkeys((input.dtype, "float32")), (width,), "[width]")
    epsilon, offset = parts.expect_epsilon(epsilon), check.number("weight_offset", weight_offset)
    # A float32 sum is never rounded, so one kernel serves both values of round_sum.
    round_sum = bool(round_sum) or input.dtype == "float32"
    return _Norm(input, residual if adds else None, weight, epsilon, offset, width, variant, round_sum)


def _normalized(input: Any, *_: Any, **__: Any) -> Result:
    return Result(input.shape, dtype_name(input), "[..., width]")


@op(twin.rms_norm, "normalized", _normalized)
def rms_norm(
    input: AnyArray,
    weight: AnyArray | None,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Divide rows by the root of the mean of their squares, and multiply them by a weight.

        out = input * (1 / sqrt(mean(input**2) + epsilon)) * (weight + weight_offset)

    Args:
        input: [..., width], float32, float16 or bfloat16. Each row is contiguous. Rows may have two strides, as in the
            slice of a QKV projection's output that holds q.
        weight: [width], in the dtype of `input` or float32; None: all weights are 1.
        epsilon: at least 0.
        weight_offset: added to the weight; 1 for models that store the weight minus 1, as Gemma does.
        out: an array to write into and return; may be strided like `input`, and may be `input` itself.
        variant: "auto", "specialized" (a width of `cukern.ops.norm.SPECIALIZED` or added by `cukern.specialize`),
            "dynamic" (any multiple of 8; needs aligned rows) or "scalar". All variants give the same bits.

    Returns:
        [..., width], computed in float32 and rounded once at the end, as in FlashInfer and PyTorch. (vLLM, and Llama in
        transformers, also round before the multiplication by the weight.) The bits of a row do not depend on the other
        rows. A row with NaN becomes NaN. An infinity becomes NaN, and all other elements of its row become 0. If the
        sum of squares overflows float32, all elements become 0. Arrays in host memory go through the NumPy reference.

    Raises:
        TypeError: an unsupported dtype, or arrays of different libraries.
        ValueError: shapes, strides, devices or numbers that do not fit.

    vLLM's function of the same name takes `out` first.
    """
    norm = _check(input, None, weight, epsilon, weight_offset, variant, False)
    given = out
    if out is None:
        out = outputs(None, input, "input", _normalized(input))
    else:
        parts.expect_like("out", out, input)
    if input.on_host:
        run_twin(variant, VARIANTS)
        return given
    check.one_of("variant", variant, VARIANTS)
    norm.launch(out)
    return out


@op(twin.fused_add_rms_norm)
def fused_add_rms_norm(
    input: WrittenArray,
    residual: WrittenArray,
    weight: AnyArray | None,
    epsilon: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Compute `rms_norm` of a sum in place: `residual` becomes input + residual, and `input` the norm of this sum.

    Args:
        input, residual: [..., width], float32, float16 or bfloat16, both of the same dtype. Rows may be strided as in
            `rms_norm`. Both arrays are written and returned.
        weight, epsilon, weight_offset, variant: as in `rms_norm`.
        round_sum: True: normalize the rounded sum, as vLLM and transformers do. False: normalize the float32 sum, as
            FlashInfer and SGLang do, which is closer to the exact norm. `residual` becomes the rounded sum in both
            cases.

    Errors are as in `rms_norm`. The arguments are vLLM's.
    """
    norm = _check(input, residual, weight, epsilon, weight_offset, variant, True, round_sum)
    parts.expect_rows("input", input, written=True)
    if input.on_host:
        run_twin(variant, VARIANTS)
        return input, residual
    check.one_of("variant", variant, VARIANTS)
    norm.launch(input)
    return input, residual


def _quantized(input: Any, *_: Any, group_size: Any = 128, scale: Any = None, **__: Any) -> list[Result]:
    return [Result(input.shape, FP8, "[..., width]"), scales_result(input.shape, "width", group_size, scale)]


def _quantize(norm: _Norm, group_size: Any, scale: Any, out_q: Any, out_s: Any) -> Any:
    input = norm.input
    given = None if scale is None else scale_of("scale", scale, input, "input")
    if given is None and group_size is not None:
        check.one_of("group_size", group_size, GROUPS)
        if norm.width % group_size:
            check.fail("input", f"of whole groups of {group_size} along its last dimension", norm.width)
    results = _quantized(input, group_size=group_size, scale=scale)
    q, s = outputs((out_q, out_s), input, "input", *results, names=("out_q", "out_s"))
    if input.on_host:
        return run_twin(norm.variant, VARIANTS)
    check.one_of("variant", norm.variant, VARIANTS)
    if given is not None:
        norm.launch(q, "BY_TENSOR", scales=s, scale=given)
    elif group_size is None:
        norm.launch(q, "BY_ROW", scales=s)
    else:
        norm.launch(q, "BY_GROUP", group_size, s)
    return q, s


@op(twin.rms_norm_quant, "quantized, scales", _quantized)
def rms_norm_quant(
    input: AnyArray,
    weight: AnyArray | None,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: AnyArray | float | None = None,
    weight_offset: float = 0.0,
    out_q: WrittenArray | None = None,
    out_s: WrittenArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Compute `rms_norm` and quantize it to FP8 (e4m3), without rounding the norm to the dtype in between.

    The float32 norm is quantized with the scales of `cukern.silu_and_mul_quant`:

        scale = max(max |norm|, 1e-10) / 448 over a group, or max(max |norm|, 1 / 512) / 448 over a row, or `scale`
        q     = e4m3(norm / scale), rounded to nearest (ties to even), saturated to +-448; NaN stays NaN

    Args:
        input, weight, epsilon, weight_offset, variant: as in `rms_norm`.
        group_size: 32, 64 or 128, a divisor of the width; None: one scale per row.
        scale: one scale for all elements, instead of computed scales: a number, or a float32 array of one element on
            the device of `input`.
        out_q, out_s: arrays to write into and return; out_q is float8_e4m3fn, or uint8 for its bytes.

    Returns:
        q [..., width] in float8_e4m3fn (uint8 in CuPy), and scales float32 [..., width / group_size], [..., 1] or [1].

    Errors are as in `rms_norm`.
    """
    return _quantize(
        _check(input, None, weight, epsilon, weight_offset, variant, False), group_size, scale, out_q, out_s
    )


@op(twin.fused_add_rms_norm_quant, "quantized, scales", _quantized)
def fused_add_rms_norm_quant(
    input: AnyArray,
    residual: WrittenArray,
    weight: AnyArray | None,
    epsilon: float = 1e-6,
    *,
    group_size: int | None = 128,
    scale: AnyArray | float | None = None,
    weight_offset: float = 0.0,
    round_sum: bool = True,
    out_q: WrittenArray | None = None,
    out_s: WrittenArray | None = None,
    variant: str = "auto",
) -> tuple[AnyArray, AnyArray]:
    """Compute `rms_norm_quant` of input + residual. `residual` becomes the sum, rounded to the dtype.

    `residual` and `round_sum` are as in `fused_add_rms_norm`, all else as in `rms_norm_quant`. `input` is only read.
    """
    return _quantize(
        _check(input, residual, weight, epsilon, weight_offset, variant, True, round_sum),
        group_size,
        scale,
        out_q,
        out_s,
    )


# --- layer norm ---------------------------------------------------------------------------------------


def _layer_norm(
    input: Any,
    vectors: dict[str, Any],
    epsilon: float,
    out: Any,
    variant: str,
    residual: Any = None,
    sum_out: Any = None,
) -> Any:
    expect_array("input", input, DTYPES)
    width = parts.width_of("input", input)
    adds = "input_bias" in vectors
    if adds:
        parts.expect_like("residual", residual, input, written=False)
    weight, bias, input_bias = (vectors.get(name) for name in ("weight", "bias", "input_bias"))
    weight_dtypes = tuple(dict.fromkeys((input.dtype, "float32")))
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            expect(name, vector, input, "input", weight_dtypes, (width,), "[width]")
            weight_dtypes = (vector.dtype,)
    if input_bias is not None:
        expect("input_bias", input_bias, input, "input", (input.dtype,), (width,), "[width]")
    epsilon = parts.expect_epsilon(epsilon)
    if sum_out is not None:
        parts.expect_like("residual_out", sum_out, input)
    if out is not None:
        parts.expect_like("out", out, input)
        if sum_out is not None and begin_together(out, sum_out) and input.size:
            check.fail("out", "another array than residual_out", "the same")
    given = out
    if out is None:
        out = outputs(None, input, "input", _normalized(input))
    if input.on_host:
        run_twin(variant, VARIANTS)
        return given
    check.one_of("variant", variant, VARIANTS)
    layout = parts.layout(
        width, (weight, bias, input_bias), input=input, residual=residual, residual_out=sum_out, out=out
    )  # fmt: skip
    if layout.total == 0 or width == 0:
        return out
    operation = _Operation(input.dtype, weight_dtypes[0], adds)
    known = _registered_layer_norm, SPECIALIZED_LAYER_NORM
    kernel, grid, block, why = _chosen(_layer_variant, operation, width, layout, variant, *known)
    launch(
        kernel,
        grid,
        block,
        why=why,
        input_bias=input_bias,
        weight=weight,
        bias=bias,
        epsilon=epsilon,
        **layout.fields,
    )
    return out


@op(twin.layer_norm, "normalized", _normalized)
def layer_norm(
    input: AnyArray,
    weight: AnyArray | None,
    bias: AnyArray | None,
    epsilon: float = 1e-5,
    *,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Shift and scale rows to mean 0 and variance 1, multiply them by a weight and add a bias.

        out = (input - mean(input)) / sqrt(var(input) + epsilon) * weight + bias

    The method is Layer Normalization (Ba, Kiros and Hinton, 2016). The mean and the population variance are computed in
    two passes. The rounding error of the mean is corrected as by Chan, Golub and LeVeque (1983), so the result is
    accurate even if the mean is large compared with the standard deviation.

    Args:
        input: [..., width], float32, float16 or bfloat16; rows may be strided as in `rms_norm`.
        weight, bias: [width], both in the dtype of `input` or both in float32; None: a weight of 1, a bias of 0.
        epsilon: at least 0. BERT has 1e-12, most other models 1e-5.
        out: as in `rms_norm`.
        variant: as in `rms_norm`, with the widths of `cukern.ops.norm.SPECIALIZED_LAYER_NORM`.

    Returns:
        [..., width], computed in float32 and rounded once at the end. The bits of a row do not depend on the other
        rows. A row with NaN or an infinity becomes NaN, as does a row whose sum overflows float32. If only the sum of
        squares overflows, or if all elements are equal, the row becomes the bias.

    Errors are as in `rms_norm`. The arguments are as in `torch.nn.functional.layer_norm`, with [width] as
    `normalized_shape`.
    """
    return _layer_norm(input, {"weight": weight, "bias": bias}, epsilon, out, variant)


@op(twin.fused_add_layer_norm, "normalized", _normalized)
def fused_add_layer_norm(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray | None,
    bias: AnyArray | None,
    epsilon: float = 1e-5,
    *,
    input_bias: AnyArray | None = None,
    residual_out: WrittenArray | None = None,
    out: AnyArray | None = None,
    variant: str = "auto",
) -> AnyArray:
    """Add a bias and a residual to a layer's GEMM output, and compute `layer_norm` of the sum, in one kernel.

        sum          = input + input_bias + residual, added up in float32 from the left and rounded to the dtype
        residual_out = sum, if it is given
        out          = layer_norm(sum, weight, bias, epsilon)

    Post-norm models (BERT, BART, Marian) need only `out`. Pre-norm models (GPT-2, ViT) also need `residual_out`, the
    residual of the next sum.

    Args:
        input, residual: [..., width], float32, float16 or bfloat16, both of the same dtype. Rows may be strided as in
            `rms_norm`.
        weight, bias, epsilon, variant: as in `layer_norm`.
        input_bias: [width], in the dtype of `input`, such as the bias of the linear layer that computed `input`; None
            adds nothing.
        residual_out: an array to write the sum into; may be `input` or `residual` itself.
        out: an array to write into and return; may be `input` or `residual` itself, but not `residual_out`.

    Results and errors are as in `layer_norm`. FasterTransformer's `add_bias_input_layernorm` is this function with
    `input` as `out`.
    """
    vectors = {"weight": weight, "bias": bias, "input_bias": input_bias}
    return _layer_norm(input, vectors, epsilon, out, variant, residual, residual_out)
