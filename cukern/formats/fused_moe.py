"""Activation and quantization formats of a mixture-of-experts layer."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

from cukern.formats.quantized import BLOCK
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.describe import type_name

#: Quantized weights: FP8 (e4m3), MXFP4, NVFP4, and MXFP4 with FP8 activations.
QUANT_DTYPES = ("float8_e4m3fn", "mxfp4", "nvfp4", "mxfp4_fp8")
#: An FP8 scale covers this many elements of a row, or this many rows and columns of a weight.
GROUP = BLOCK


class FusedMoEActivationFormat(enum.Enum):
    """The layout of activations between prepare, experts and finalize."""

    #: One row per token, [tokens, hidden].
    Standard = "standard"
    #: Tokens grouped by expert, [experts, max_tokens, hidden], with counts `expert_num_tokens` [experts].
    BatchedExperts = "batched_experts"


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig:
    """The number formats of a layer's weights and activations, with the scales.

    `FusedMoEQuantConfig()` is for float16 or bfloat16 weights. The class methods `fp8_block`, `fp8`, `mxfp4`, `nvfp4`
    and `mxfp4_fp8` make configurations for quantized layers.

    Args:
        quant_dtype: None; "float8_e4m3fn" for weights and activations; "mxfp4" or "nvfp4" for 4-bit weights and 16-bit
            activations; "mxfp4_fp8" (on Hopper) for FP8 activations with one scale per 128 elements of a row, and MXFP4
            weights that `cukern.prepare_weights` prepares for FP8 activations.
        per_act_token_quant: whether each row of activations has an FP8 scale, computed at run time.
        block_shape: (128, 128) for one FP8 scale per 128 x 128 weights and per 128 activations of a row, otherwise
            None.
        w1_scale, w2_scale: for weights [experts, n, k]. FP8: float32 [experts] (per tensor), [experts, n] (per channel)
            or, in blocks, [experts, ceil(n / 128), ceil(k / 128)]. MXFP4: uint8 (E8M0) [experts, n, k / 32]. NVFP4:
            uint8 (e4m3) [experts, n, k / 16]. None for prepared 4-bit weights, which contain their scales.
        a1_scale, a2_scale: float32 [1], static scales of the first and the second GEMM's inputs, for FP8 per tensor.
            If a1_scale is None, the first scale is computed from the tokens. If a2_scale is None, the second scale is
            computed from the activations of all tokens, or of each chunk if the layer runs in chunks.
        w1_global_scale, w2_global_scale: float32 [experts], for NVFP4.
        w1_bias, w2_bias: [experts, n], float32 or of the layer's dtype, added to the GEMMs' results. Each rank adds the
            biases of its experts.
        gemm1_alpha, gemm1_clamp_limit: the constants alpha and limit of swigluoai.
        gemm1_interleaved: if True, rows `2 * j` and `2 * j + 1` of w1 (and w1_bias) are gate row j and up row j.
            Otherwise all gate rows come first.

    Raises:
        ValueError: arguments that do not match; the message names the missing or superfluous argument.
    """

    quant_dtype: str | None = None
    per_act_token_quant: bool = False
    block_shape: tuple[int, int] | None = None
    w1_scale: Any = None
    w2_scale: Any = None
    a1_scale: Any = None
    a2_scale: Any = None
    w1_global_scale: Any = None
    w2_global_scale: Any = None
    w1_bias: Any = None
    w2_bias: Any = None
    gemm1_alpha: float = activations.ALPHA
    gemm1_clamp_limit: float = activations.LIMIT
    gemm1_interleaved: bool = False

    def __post_init__(self) -> None:
        check.one_of("quant_dtype", self.quant_dtype, (None, *QUANT_DTYPES))
        fp8 = self.quant_dtype == "float8_e4m3fn"
        if self.block_shape is not None and (not fp8 or tuple(self.block_shape) != (GROUP, GROUP)):
            wanted = f"None, or ({GROUP}, {GROUP}) with float8_e4m3fn"
            check.fail("block_shape", wanted, f"{self.block_shape} with {self.quant_dtype}")
        if self.per_act_token_quant and (not fp8 or self.block_shape):
            wanted = "False unless the activations are FP8 without blocks"
            check.fail("per_act_token_quant", wanted, f"True with {self.name or 'no quantization'}")
        takes = set()
        if self.quant_dtype and not self.is_prepared:
            takes = {"w1_scale", "w2_scale"}
        if self.quant_dtype == "nvfp4":
            takes |= {"w1_global_scale", "w2_global_scale"}
        for name in sorted(takes):
            if getattr(self, name) is None:
                check.fail(name, f"the scales of {self.name}", "None")
        if fp8 and not self.block_shape and not self.per_act_token_quant:
            takes |= {"a1_scale", "a2_scale"}
        for name in SCALES:
            if name not in takes | {"w1_bias", "w2_bias"} and getattr(self, name) is not None:
                check.fail(name, f"None with {self.name or 'no quantization'}", type_name(getattr(self, name)))

    @property
    def is_prepared(self) -> bool:
        """Whether the weights are 4-bit and prepared, so that they contain their scales."""
        if self.quant_dtype == "mxfp4_fp8":
            return True
        return self.quant_dtype in ("mxfp4", "nvfp4") and self.w1_scale is None and self.w2_scale is None

    @property
    def is_in_groups(self) -> bool:
        """Whether activations are FP8 with one scale per GROUP elements of a row."""
        return self.block_shape is not None or self.quant_dtype == "mxfp4_fp8"

    @property
    def name(self) -> str | None:
        """The quantization: one of `QUANTIZATIONS`, "mxfp4_fp8", or None for 16-bit weights."""
        if self.quant_dtype == "float8_e4m3fn":
            return "fp8_block" if self.block_shape else "fp8"
        return self.quant_dtype

    @property
    def scales(self) -> dict[str, Any]:
        return {name: value for name in SCALES if (value := getattr(self, name)) is not None}

    @property
    def numbers(self) -> dict[str, Any]:
        """All fields except scales and biases."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in SCALES}

    @property
    def form(self) -> dict[str, Any]:
        """The first GEMM's arguments alpha, limit and interleaved."""
        numbers = self.gemm1_alpha, self.gemm1_clamp_limit, self.gemm1_interleaved
        return dict(zip(("alpha", "limit", "interleaved"), numbers, strict=True))

    def quantizes_activated(self, activation: str) -> bool:
        """Return whether an FP8 layer rounds activation results to 16 bits before quantizing them.

        If the result is False, the layer rounds gates and ups to 16 bits, activates in float32, and quantizes the
        float32 results.
        """
        is_dynamic = self.name == "fp8" and not self.per_act_token_quant and self.a2_scale is None
        return is_dynamic or not activations.is_gated(activation) or self.form != NOT_QUANTIZED.form

    @classmethod
    def make(cls, name: str | None, **scales: Any) -> FusedMoEQuantConfig:
        """Make the configuration of `name`: one of `QUANTIZATIONS`, "mxfp4_fp8" or None.

        `scales` may contain any field. If `name` is "fp8" and `a2_scale` is not given, each row of activations has a
        scale, unless `per_act_token_quant` is False.
        """
        if name is None:
            return cls(**scales)
        check.one_of("quant", name, (*QUANTIZATIONS, "mxfp4_fp8"))
        if name == "fp8_block":
            return cls("float8_e4m3fn", block_shape=(GROUP, GROUP), **scales)
        if name == "fp8":
            scales.setdefault("per_act_token_quant", scales.get("a2_scale") is None)
            return cls("float8_e4m3fn", **scales)
        return cls(name, **scales)

    @classmethod
    def fp8_block(cls, w1_scale: Any, w2_scale: Any) -> FusedMoEQuantConfig:
        """Make a configuration for FP8: a scale per 128 x 128 weights and per 128 activations, as in DeepSeek-V3."""
        return cls.make("fp8_block", w1_scale=w1_scale, w2_scale=w2_scale)

    @classmethod
    def fp8(cls, w1_scale: Any, w2_scale: Any, a1_scale: Any = None, a2_scale: Any = None) -> FusedMoEQuantConfig:
        """Make a configuration for FP8 with weight scales per expert or per channel.

        Activations have the static scale `a2_scale`, or without it one scale per token.
        """
        return cls.make("fp8", w1_scale=w1_scale, w2_scale=w2_scale, a1_scale=a1_scale, a2_scale=a2_scale)

    @classmethod
    def mxfp4(cls, w1_scale: Any = None, w2_scale: Any = None, **more: Any) -> FusedMoEQuantConfig:
        """Make a configuration for MXFP4 weights, with a power-of-two scale per 32 weights, and 16-bit activations.

        Prepared weights need no w1_scale and w2_scale. `more` may contain biases, and constants of swigluoai, gpt-oss's
        activation.
        """
        return cls.make("mxfp4", w1_scale=w1_scale, w2_scale=w2_scale, **more)

    @classmethod
    def mxfp4_fp8(cls, **more: Any) -> FusedMoEQuantConfig:
        """Make a configuration for FP8 activations, and MXFP4 weights that were prepared for FP8 activations.

        The activations have one scale per 128 elements of a row. `more` may contain biases, and constants of swigluoai,
        gpt-oss's activation.

        vLLM's DEEPGEMM_MXFP4 uses the same number formats. Its `mxfp4_w4a8_moe_quant_config` has static per-tensor
        activation scales, and its `mxfp4_mxfp8_moe_quant_config` a power-of-two scale per 32 elements of a row.
        """
        return cls.make("mxfp4_fp8", **more)

    @classmethod
    def nvfp4(cls, w1_scale: Any, w2_scale: Any, w1_global_scale: Any, w2_global_scale: Any) -> FusedMoEQuantConfig:
        """Make a configuration for NVFP4 weights and 16-bit activations.

        Each group of 16 weights has an FP8 scale. Each expert has a float32 scale. Prepared weights take None as
        w1_scale and w2_scale.
        """
        return cls.make(
            "nvfp4",
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            w1_global_scale=w1_global_scale,
            w2_global_scale=w2_global_scale,
        )


QUANTIZATIONS = ("fp8_block", "fp8", "mxfp4", "nvfp4")
SCALES = (
    "w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_global_scale", "w2_global_scale", "w1_bias", "w2_bias",
)  # fmt: skip
NOT_QUANTIZED = FusedMoEQuantConfig()
