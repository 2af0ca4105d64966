"""The layout of a mixture-of-experts layer's activations, and its quantization."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, fields
from typing import Any

from cukern.formats.quantized import BLOCK
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime.describe import type_name

#: The formats of quantized weights: FP8 (e4m3), and the two of 4 bits; one of them also with FP8 activations.
QUANT_DTYPES = ("float8_e4m3fn", "mxfp4", "nvfp4", "mxfp4_fp8")
#: Numbers of a row, and rows and columns of a weight, that share a scale.
GROUP = BLOCK


class FusedMoEActivationFormat(enum.Enum):
    """The layout of the activations between prepare, experts and finalize."""

    #: One row per token, [tokens, hidden].
    Standard = "standard"
    #: The tokens of each expert together, [experts, max_tokens, hidden]; counts: `expert_num_tokens` [experts].
    BatchedExperts = "batched_experts"


@dataclass(frozen=True, eq=False)
class FusedMoEQuantConfig:
    """The number formats of the weights and of the activations that they multiply, with the scales.

    `FusedMoEQuantConfig()` is a layer in float16 or bfloat16; `fp8_block`, `fp8`, `mxfp4`, `nvfp4` and `mxfp4_fp8` make
    the others.

    Args:
        quant_dtype: None, "float8_e4m3fn" (weights and activations), or "mxfp4" or "nvfp4" (weights of 4 bits;
            the activations stay in 16 bits), or "mxfp4_fp8" (weights that `cukern.prepare_weights` has prepared for FP8
            rows; activations FP8, a scale for 128 of a row; on Hopper).
        per_act_token_quant: each row of activations has an FP8 scale of its own, computed when it is quantized.
        block_shape: (128, 128) for FP8 in blocks: a scale for 128 x 128 weights, and for 128 numbers of a row.
        w1_scale, w2_scale: FP8: float32 [experts] (per tensor), [experts, n] (per channel) or, in blocks,
            [experts, ceil(n / 128), ceil(k / 128)], for weights [experts, n, k]. MXFP4: uint8 (E8M0)
            [experts, n, k / 32]. NVFP4: uint8 (e4m3) [experts, n, k / 16]. Weights of 4 bits that
            `cukern.prepare_weights` has prepared hold theirs: then both are None.
        a1_scale, a2_scale: float32 [1], the static scales of what enters the first and the second product, for FP8 per
            tensor. Without a1_scale the first is computed from the tokens, without a2_scale the second from what the
            activation gives, of all tokens (of a chunk, where the layer has chunks).
        w1_global_scale, w2_global_scale: float32 [experts], for NVFP4.
        w1_bias, w2_bias: float32 or of the layer's dtype, [experts, n], added to the products. Each rank adds those of
            its experts.
        gemm1_alpha, gemm1_clamp_limit: alpha and limit of swigluoai.
        gemm1_interleaved: rows 2 j and 2 j + 1 of w1 (and w1_bias) are gate j and its up; else the gates come first.

    Raises:
        ValueError: arguments that do not fit each other; the message names the one that is missing or superfluous.
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
        """Whether the weights are of 4 bits and prepared, since they come without scales."""
        if self.quant_dtype == "mxfp4_fp8":
            return True
        return self.quant_dtype in ("mxfp4", "nvfp4") and self.w1_scale is None and self.w2_scale is None

    @property
    def is_in_groups(self) -> bool:
        """Whether activations are FP8 with a scale for each GROUP numbers of a row."""
        return self.block_shape is not None or self.quant_dtype == "mxfp4_fp8"

    @property
    def name(self) -> str | None:
        """None, one of `QUANTIZATIONS`, or "mxfp4_fp8"."""
        if self.quant_dtype == "float8_e4m3fn":
            return "fp8_block" if self.block_shape else "fp8"
        return self.quant_dtype

    @property
    def scales(self) -> dict[str, Any]:
        """The scales and biases that are not None, by name."""
        return {name: value for name in SCALES if (value := getattr(self, name)) is not None}

    @property
    def numbers(self) -> dict[str, Any]:
        """All else, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in SCALES}

    @functools.cached_property
    def facts(self) -> tuple[Any, ...]:
        """The values of `numbers`, which tell configurations apart but for their scales."""
        return tuple(self.numbers.values())

    @functools.cached_property
    def arrays(self) -> tuple[Any, ...]:
        """The scales and biases in the order of SCALES, None for those that are not given."""
        return tuple(getattr(self, name) for name in SCALES)

    @property
    def form(self) -> dict[str, Any]:
        """The arguments alpha, limit and interleaved of the first product."""
        numbers = self.gemm1_alpha, self.gemm1_clamp_limit, self.gemm1_interleaved
        return dict(zip(("alpha", "limit", "interleaved"), numbers, strict=True))

    def quantizes_activated(self, activation: str) -> bool:
        """Whether, in FP8, the first product rounds what it has activated, which then is quantized.

        Else it rounds gates and ups, and what is quantized is their activation in float32.
        """
        is_dynamic = self.name == "fp8" and not self.per_act_token_quant and self.a2_scale is None
        return is_dynamic or not activations.is_gated(activation) or self.form != NOT_QUANTIZED.form

    @classmethod
    def make(cls, name: str | None, **scales: Any) -> FusedMoEQuantConfig:
        """The quantization called `name`, one of `QUANTIZATIONS`, "mxfp4_fp8" or None, with these scales, biases and
        numbers.

        "fp8" without `a2_scale` gives each row of activations a scale of its own, unless `per_act_token_quant` is there
        and False.
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
        """FP8 with a scale per 128 x 128 weights and per 128 activations of a row, as in DeepSeek-V3."""
        return cls.make("fp8_block", w1_scale=w1_scale, w2_scale=w2_scale)

    @classmethod
    def fp8(cls, w1_scale: Any, w2_scale: Any, a1_scale: Any = None, a2_scale: Any = None) -> FusedMoEQuantConfig:
        """FP8 with a scale per expert or per channel of weights; of activations per token, or static (`a2_scale`)."""
        return cls.make("fp8", w1_scale=w1_scale, w2_scale=w2_scale, a1_scale=a1_scale, a2_scale=a2_scale)

    @classmethod
    def mxfp4(cls, w1_scale: Any = None, w2_scale: Any = None, **more: Any) -> FusedMoEQuantConfig:
        """Weights of 4 bits with a power of two per 32 of them; without scales, prepared ones. `more`: biases and what
        gpt-oss has besides.
        """
        return cls.make("mxfp4", w1_scale=w1_scale, w2_scale=w2_scale, **more)

    @classmethod
    def mxfp4_fp8(cls, **more: Any) -> FusedMoEQuantConfig:
        """MXFP4 weights that were prepared for FP8 rows, and FP8 activations with a scale for 128 of a row. `more`:
        biases and what gpt-oss has besides.

        The numbers are those of vLLM's backend DEEPGEMM_MXFP4. Its `mxfp4_w4a8_moe_quant_config` has static scales of
        whole tensors of activations, its `mxfp4_mxfp8_moe_quant_config` a power of two for 32 of a row.
        """
        return cls.make("mxfp4_fp8", **more)

    @classmethod
    def nvfp4(cls, w1_scale: Any, w2_scale: Any, w1_global_scale: Any, w2_global_scale: Any) -> FusedMoEQuantConfig:
        """Weights of 4 bits with an FP8 scale per 16 of them and a float32 one per expert; prepared ones have None for
        the former.
        """
        return cls.make(
            "nvfp4",
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            w1_global_scale=w1_global_scale,
            w2_global_scale=w2_global_scale,
        )


#: Those for weights of any GPU.
QUANTIZATIONS = ("fp8_block", "fp8", "mxfp4", "nvfp4")
SCALES = (
    "w1_scale", "w2_scale", "a1_scale", "a2_scale", "w1_global_scale", "w2_global_scale", "w1_bias", "w2_bias",
)  # fmt: skip
NOT_QUANTIZED = FusedMoEQuantConfig()
