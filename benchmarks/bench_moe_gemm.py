"""Time grouped products beside PyTorch's, a loop over the experts, DeepGEMM, CUTLASS, Marlin and triton_kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks import peers
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE
from cukern.runtime.kernel import arch_of_device, device_count

FP8 = "float8_e4m3fn"
_BLOCK = 128
#: The room of a batch, as a multiple of its rows.
_ROOM = 4
_TOLERANCE = 0.02


class Sizes(NamedTuple):
    """`m` rows for each of `experts`. The weights of an expert are [n, k]."""

    experts: int
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"  # of the rows, and of the weights unless `weights` names their format
    batched: bool = False
    scales: str = "block"  # of FP8: "block", or "row" for a scale per row of `a` and per row of the weights
    weights: str = ""  # "mxfp4" or "nvfp4"
    activation: str | None = None
    gathered: int = 0  # rows per token if the rows are gathered

    @property
    def op(self) -> str:
        return "moe_gemm_batched" if self.batched else "moe_gemm"

    @property
    def case(self) -> dict[str, int | str]:
        """The sizes, and the options that differ from the defaults."""
        usual = Sizes(0, 0, 0, 0)._asdict()
        sizes = {key: self._asdict()[key] for key in ("experts", "m", "n", "k", "dtype")}
        named = ("scales", "weights", "activation", "gathered")
        activations = {"activations": FP8} if self.is_folded else {}
        return {**sizes, **{key: value for key in named if (value := getattr(self, key)) != usual[key]}, **activations}

    @property
    def is_folded(self) -> bool:
        """Whether rows are FP8 and weights MXFP4."""
        return self.dtype == FP8 and self.weights != ""

    @property
    def rows(self) -> int:
        return self.experts * self.m

    @property
    def tokens(self) -> int:
        """The rows of `a`."""
        return self.rows // self.gathered if self.gathered else self.rows

    @property
    def bytes(self) -> int:
        """The bytes of the weights, the tokens (each read once), the result and the scales."""
        item = ITEM_SIZE[self.dtype]
        columns = self.n // (2 if self.activation else 1)
        weights = self.experts * self.n * self.k
        total = self.tokens * self.k * item + self.rows * columns * 2
        if self.weights:
            group = {"mxfp4": 32, "nvfp4": 16}[self.weights]
            if self.is_folded:
                total += 4 * self.tokens * -(-self.k // _BLOCK)
            return total + weights // 2 + weights // group
        if self.dtype == FP8:
            blocks = -(-self.k // _BLOCK)
            block, row = (
                self.tokens * blocks + self.experts * -(-self.n // _BLOCK) * blocks,
                self.tokens + self.experts * self.n,
            )
            total += 4 * (block if self.scales == "block" else row)
        return total + weights * item

    @property
    def flops(self) -> int:
        """The flops at the rate of bfloat16. FP8 has twice the rate, so its flops count half."""
        return 2 * self.rows * self.n * self.k // (2 if self.dtype == FP8 else 1)

    @property
    def small(self) -> Sizes:
        """Sizes for the NumPy reference."""
        return self._replace(
            experts=min(self.experts, 3), m=min(self.m, 4), n=256, k=256, gathered=min(self.gathered, 2)
        )


#: The products of DeepSeek-V3's experts, up and down. FP8 cases have the sizes that DeepGEMM's users measure.
LARGE = (Sizes(8, 1024, 4096, 7168), Sizes(8, 4096, 4096, 7168), Sizes(8, 1024, 7168, 2048))
FEW_ROWS = (Sizes(64, 64, 4096, 7168), Sizes(256, 8, 4096, 7168))
#: The up product of gpt-oss-20b's experts, with few rows per expert.
GPT_OSS = Sizes(32, 4, 5760, 2880)
LARGE_FP8 = (
    Sizes(4, 8192, 4096, 7168, FP8),
    Sizes(8, 1024, 4096, 7168, FP8),
    Sizes(8, 1024, 7168, 2048, FP8),
    Sizes(4, 256, 4096, 7168, FP8, batched=True),
    Sizes(4, 256, 7168, 2048, FP8, batched=True),
)
#: One token: two of Mixtral's 8 experts and eight of Qwen3-30B-A3B's, up and down.
ONE_TOKEN = (
    Sizes(2, 1, 28672, 4096),
    Sizes(2, 1, 4096, 14336),
    Sizes(8, 1, 1536, 2048),
    Sizes(8, 1, 2048, 768),
)


class Inputs(NamedTuple):
    """The inputs of a call, or of a baseline."""

    a: torch.Tensor
    b: torch.Tensor
    offsets: torch.Tensor
    scales: dict[str, torch.Tensor]
    row_token: torch.Tensor | None
    rowwise: tuple[torch.Tensor, torch.Tensor] | None  # the FP8 scales, per row of `a` and per row of the weights
    prepared: torch.Tensor | None = None  # 4-bit weights, prepared for Hopper


def _normal(generator: torch.Generator, dtype: str, *shape: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if kind.itemsize > 1:
        return torch.empty(shape, dtype=kind, device=generator.device).normal_(generator=generator)
    numbers = torch.empty(shape, dtype=kind, device=generator.device)
    for part in numbers:
        part.copy_(torch.empty(shape[1:], dtype=torch.bfloat16, device=generator.device).normal_(generator=generator))
    return numbers


def _fp8_scales(
    sizes: Sizes, generator: torch.Generator, shape: tuple[int, ...]
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return FP8 scales that are constant along k, so that baselines with a scale per row compute the same result."""
    device, blocks = generator.device, -(-sizes.k // _BLOCK)
    of_rows = torch.rand(shape, generator=generator, device=device) + 0.5
    of_blocks = torch.rand(sizes.experts, -(-sizes.n // _BLOCK), generator=generator, device=device) + 0.5
    of_columns = of_blocks.repeat_interleave(_BLOCK, 1)[:, : sizes.n].contiguous()
    if sizes.scales == "row":
        return {"a_scale": of_rows, "b_scale": of_columns}, (of_rows, of_columns)
    scales = {
        "a_scale": of_rows[..., None].repeat(*[1] * len(shape), blocks),
        "b_scale": of_blocks[..., None].repeat(1, 1, blocks),
    }
    return scales, (of_rows, of_columns)


def inputs_of(sizes: Sizes) -> Callable[[torch.Generator], tuple[Inputs]]:
    def inputs(generator: torch.Generator) -> tuple[Inputs]:
        device, experts = generator.device, sizes.experts
        shape: tuple[int, ...] = (sizes.tokens,)
        if sizes.batched:
            shape = experts, sizes.m * _ROOM
        a = _normal(generator, sizes.dtype, *shape, sizes.k)
        scales: dict[str, torch.Tensor] = {}
        rowwise = row_token = None
        if sizes.weights:
            random = {"generator": generator, "device": device, "dtype": torch.uint8}
            b = torch.randint(0, 256, (experts, sizes.n, sizes.k // 2), **random)
            group = {"mxfp4": 32, "nvfp4": 16}[sizes.weights]
            # Scales around 1: powers of two, or numbers of e4m3.
            low, high = {"mxfp4": (125, 130), "nvfp4": (0x30, 0x40)}[sizes.weights]
            scales["b_scale"] = torch.randint(low, high, (experts, sizes.n, sizes.k // group), **random)
            if sizes.weights == "nvfp4":
                scales["b_global_scale"] = torch.rand(experts, generator=generator, device=device)
        else:
            b = _normal(generator, sizes.dtype, experts, sizes.n, sizes.k)
            if sizes.dtype == FP8:
                scales, rowwise = _fp8_scales(sizes, generator, shape)
        if sizes.gathered:
            many = torch.arange(sizes.tokens, device=device, dtype=torch.int32).repeat(sizes.gathered)
            row_token = many[torch.randperm(sizes.rows, generator=generator, device=device)]
        counts = torch.full((experts,), sizes.m, dtype=torch.int32, device=device)
        offsets = counts if sizes.batched else torch.arange(experts + 1, dtype=torch.int32, device=device) * sizes.m
        prepared = None
        if sizes.weights and has_wgmma():
            a_dtype = FP8 if sizes.is_folded else None
            prepared = cukern.prepare_weights(b, scales["b_scale"], a_dtype=a_dtype)
        if sizes.is_folded:
            scales["a_scale"] = torch.rand(*shape, -(-sizes.k // _BLOCK), generator=generator, device=device) + 0.5
        return (Inputs(a, b, offsets, scales, row_token, rowwise, prepared),)

    return inputs


# --- baselines ----------------------------------------------------------------------------------------


def _ends(given: Inputs) -> torch.Tensor:
    return given.offsets[1:]


def grouped_mm(given: Inputs) -> torch.Tensor:
    """Compute PyTorch's grouped product."""
    return torch._grouped_mm(given.a, given.b.transpose(1, 2), offs=_ends(given))


def scaled_grouped_mm(given: Inputs) -> torch.Tensor:
    """Compute PyTorch's grouped product of FP8, with scales per row."""
    assert given.rowwise is not None
    options = {"offs": _ends(given), "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_grouped_mm(given.a, given.b.transpose(1, 2), *given.rowwise, **options)


def _of_expert(given: Inputs, sizes: Sizes, expert: int) -> tuple[Any, ...]:
    """Return an expert's rows, and their index in `a`."""
    place = (expert, slice(sizes.m)) if sizes.batched else (slice(expert * sizes.m, (expert + 1) * sizes.m),)
    return given.a[place], place


def _loop(sizes: Sizes) -> Callable[[Inputs], torch.Tensor]:
    """Return a loop over the experts on the host, which must know the rows of each group."""

    def multiply(given: Inputs) -> torch.Tensor:
        out = given.a.new_empty(*given.a.shape[:-1], sizes.n, dtype=torch.bfloat16)
        for expert, weights in enumerate(given.b):
            rows, place = _of_expert(given, sizes, expert)
            if given.rowwise is None:
                torch.mm(rows, weights.T, out=out[place])
                continue
            of_rows, of_columns = given.rowwise[0][place][:, None], given.rowwise[1][expert : expert + 1]
            options = {"out_dtype": torch.bfloat16, "use_fast_accum": True, "out": out[place]}
            torch._scaled_mm(rows, weights.T, of_rows, of_columns, **options)
        return out

    return multiply


def _baselines(sizes: Sizes) -> dict[str, Baseline]:
    """Return the baselines of PyTorch, or none if PyTorch needs several steps."""
    if sizes.weights or sizes.activation or sizes.gathered:
        return {}
    baselines = {"torch loop": Baseline(lambda: _loop(sizes))}
    if not sizes.batched:
        grouped = scaled_grouped_mm if sizes.dtype == FP8 else grouped_mm
        baselines = {"torch grouped": Baseline(lambda: grouped), **baselines}
    return baselines


Run = Callable[[], torch.Tensor]
Prepare = Callable[[Inputs], Run]


def _deep_gemm(sizes: Sizes) -> Callable[[], Prepare]:
    """Return DeepGEMM 2.5: the contiguous layout if groups are whole blocks of rows, else the masked layout."""

    def load() -> Prepare:
        import deep_gemm

        contiguous = not sizes.batched and sizes.m % deep_gemm.get_mk_alignment_for_contiguous_layout() == 0
        kind = "fp8" if sizes.dtype == FP8 else "bf16"
        function = getattr(deep_gemm, f"m_grouped_{kind}_gemm_nt_{'contiguous' if contiguous else 'masked'}")

        def prepare(given: Inputs) -> Run:
            a, device = given.a, given.a.device
            if contiguous:
                places: tuple[Any, ...] = (peers.rows_by_expert(sizes.experts, sizes.m, device)[:, 0].contiguous(),)
            else:
                a = a.view(sizes.experts, -1, sizes.k)
                places = torch.full((sizes.experts,), sizes.m, dtype=torch.int32, device=device), sizes.m
            rows, weights = a, given.b
            if kind == "fp8":
                of_rows = given.scales["a_scale"].view(*a.shape[:-1], -1)
                rows = a, deep_gemm.get_mn_major_tma_aligned_tensor(of_rows)
                weights = given.b, given.scales["b_scale"]

            def run() -> torch.Tensor:
                out = torch.empty(*a.shape[:-1], sizes.n, dtype=torch.bfloat16, device=device)
                function(rows, weights, out, *places)
                return out.view(*given.a.shape[:-1], sizes.n)

            return run

        return prepare

    return load


def _vllm_cutlass(sizes: Sizes) -> Callable[[], Prepare]:
    """Return vLLM 0.26's CUTLASS product, with scales per row."""

    def load() -> Prepare:
        from vllm import _custom_ops as ops

        def prepare(given: Inputs) -> Run:
            device, experts = given.a.device, sizes.experts
            assert given.rowwise is not None
            of_rows, of_columns = given.rowwise[0][:, None], given.rowwise[1][..., None]
            first = given.offsets[:-1].long()
            whole = torch.tensor([(sizes.m, sizes.n, sizes.k)] * experts, dtype=torch.int32, device=device)
            strides = [torch.full((experts,), size, device=device) for size in (sizes.k, sizes.k, sizes.n)]

            def run() -> torch.Tensor:
                out = torch.empty(sizes.rows, sizes.n, dtype=torch.bfloat16, device=device)
                ops.cutlass_moe_mm(out, given.a, given.b, of_rows, of_columns, first, whole, *strides, True, True)
                return out

            return run

        return prepare

    return load


def _sglang_cutlass(sizes: Sizes) -> Callable[[], Prepare]:
    """Return sglang-kernel 0.4's CUTLASS product, with scales per block."""

    def load() -> Prepare:
        from sgl_kernel import fp8_blockwise_scaled_grouped_mm

        def prepare(given: Inputs) -> Run:
            device, experts = given.a.device, sizes.experts
            pointers = [torch.empty(experts, dtype=torch.int64, device=device) for _ in range(5)]
            layouts = [torch.empty(experts, 5, dtype=torch.int32, device=device) for _ in range(2)]
            strides = [torch.full((experts,), size, device=device) for size in (sizes.k, sizes.k, sizes.n)]
            whole = torch.tensor([(sizes.m, sizes.n, sizes.k)] * experts, dtype=torch.int32, device=device)
            workspace = torch.empty(90000, dtype=torch.uint8, device=device)
            weights, of_weights = given.b.transpose(1, 2), given.scales["b_scale"].transpose(1, 2)
            numbers = given.a, weights, given.scales["a_scale"], of_weights
            places = given.offsets[:-1].contiguous(), workspace

            def run() -> torch.Tensor:
                out = torch.empty(sizes.rows, sizes.n, dtype=torch.bfloat16, device=device)
                fp8_blockwise_scaled_grouped_mm(out, *pointers, *numbers, *strides, *layouts, whole, *places)
                return out

            return run

        return prepare

    return load


def _of_four_bits(module: str, function: Callable[..., Run]) -> Baseline:
    def load() -> Prepare:
        importlib.import_module(module)
        return lambda given: function(given.a, given.b, given.scales["b_scale"])

    return Baseline(load, slow=True, prepared=True)


def _vllm_triton() -> Prepare:
    importlib.import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    return lambda given: peers.vllm_triton_grouped(given.a, given.b)


def _peers(sizes: Sizes) -> dict[str, Baseline]:
    """Return the kernels of other libraries, or none if they need several steps."""
    if sizes.activation or sizes.gathered or sizes.dtype == "float16" or sizes.weights == "nvfp4" or sizes.is_folded:
        return {}
    if sizes.weights:
        return {
            "vLLM Marlin": _of_four_bits("vllm", peers.marlin_grouped),
            "triton_kernels": _of_four_bits("triton_kernels", peers.triton_kernels_grouped),
        }
    found = {}
    # DeepGEMM compiles a kernel for each shape, and needs blocks of 8 rows.
    if sizes.scales == "block" and sizes.m >= 8:
        found["DeepGEMM"] = Baseline(_deep_gemm(sizes), slow=True, prepared=True)
    if sizes.dtype == FP8 and not sizes.batched:
        found["vLLM CUTLASS"] = Baseline(_vllm_cutlass(sizes), prepared=True)
        if sizes.scales == "block":
            found["SGLang CUTLASS"] = Baseline(_sglang_cutlass(sizes), prepared=True)
    if sizes.dtype == "bfloat16" and not sizes.batched and sizes.m <= 64:
        found["vLLM Triton"] = Baseline(_vllm_triton, slow=True, prepared=True)
    return found


def _agree(sizes: Sizes) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Return a function that decides whether the rows of the groups agree up to rounding."""

    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        rows = slice(sizes.m) if sizes.batched else slice(None)
        mine, other = (x[..., rows, :].float() for x in (ours, theirs))
        return bool((mine - other).abs().max() <= _TOLERANCE * other.abs().max())

    return agree


# --- one matrix of weights ----------------------------------------------------------------------------


class Dense(NamedTuple):
    """A product with one matrix of quantized weights, [n, k]."""

    m: int
    n: int
    k: int
    weights: str  # FP8 with scales by blocks, or "mxfp4"
    dtype: str  # of the rows

    @property
    def bytes(self) -> int:
        """The bytes of the weights, the rows and the result, with the scales."""
        blocks = -(-self.k // _BLOCK)
        weights = self.n * self.k // 2 + self.n * self.k // 32 if self.weights == "mxfp4" else self.n * self.k
        scales = 4 * blocks * -(-self.n // _BLOCK) if self.weights == FP8 else 0
        of_rows = 4 * blocks * self.m if self.dtype == FP8 else 0
        return weights + scales + of_rows + self.m * self.k * ITEM_SIZE[self.dtype] + 2 * self.m * self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k // (2 if self.weights == FP8 else 1)


#: A product of DeepSeek-V3's attention, from rows in FP8 and from rows in bfloat16, and Humming's MXFP4 case.
DENSE = (
    *(Dense(m, 7168, 4096, FP8, dtype) for dtype in (FP8, "bfloat16") for m in (1, 64, 4096)),
    *(Dense(m, 8192, 8192, "mxfp4", "bfloat16") for m in (1, 16, 64, 4096)),
)


def _dense_inputs(sizes: Dense) -> Callable[[torch.Generator], tuple[Any, ...]]:
    """Return a function that makes the rows, the weights, their scales and the scales of the rows."""

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        random: dict[str, Any] = {"generator": generator, "device": generator.device}
        x, blocks = _normal(generator, sizes.dtype, sizes.m, sizes.k), -(-sizes.k // _BLOCK)
        x_scale = torch.rand(sizes.m, blocks, **random) + 0.5 if sizes.dtype == FP8 else None
        if sizes.weights == FP8:
            w_scale = torch.rand(-(-sizes.n // _BLOCK), blocks, **random) + 0.5
            return x, _normal(generator, FP8, sizes.n, sizes.k), w_scale, x_scale
        packed = torch.randint(0, 256, (1, sizes.n, sizes.k // 2), **random, dtype=torch.uint8)
        scales = torch.randint(125, 130, (1, sizes.n, sizes.k // 32), **random, dtype=torch.uint8)
        if has_wgmma():
            return x, cukern.prepare_weights(packed, scales), None, None
        return x, packed[0], scales[0], None

    return inputs


def _cublas() -> Prepare:
    """Multiply by dequantized weights, in bfloat16."""

    def prepare(x: torch.Tensor, w: torch.Tensor, w_scale: Any, _: Any) -> Run:
        if w_scale is None:
            w, w_scale = (y[0] for y in cukern.restore_weights(w))
        dequantized = cukern.dequantize_mxfp4(w, w_scale, "bfloat16")
        return lambda: torch.mm(x, dequantized.T)

    return prepare  # type: ignore[return-value]


def _deep_gemm_dense() -> Prepare:
    """Return DeepGEMM 2.5's product of FP8."""
    import deep_gemm

    def prepare(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, x_scale: torch.Tensor) -> Run:
        rows = x, deep_gemm.get_mn_major_tma_aligned_tensor(x_scale)

        def run() -> torch.Tensor:
            out = torch.empty(len(x), len(w), dtype=torch.bfloat16, device=x.device)
            deep_gemm.fp8_gemm_nt(rows, (w, w_scale), out)
            return out

        return run

    return prepare  # type: ignore[return-value]


def dense(sizes: Dense) -> Case:
    """Return a case of `quantized_matmul`."""

    def call(x: torch.Tensor, w: torch.Tensor, w_scale: Any, x_scale: Any) -> torch.Tensor:
        return cukern.quantized_matmul(x, w, w_scale, x_scale=x_scale)

    def agree(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
        return bool((ours.float() - theirs.float()).abs().max() <= _TOLERANCE * theirs.float().abs().max())

    baselines, libraries = {}, {}
    if sizes.weights == "mxfp4":
        baselines = {"cuBLAS bfloat16": Baseline(_cublas, prepared=True)}
    elif sizes.dtype == FP8:
        libraries = {"DeepGEMM": Baseline(_deep_gemm_dense, slow=True, prepared=True)}
    return Case(
        "quantized_matmul",
        sizes._asdict(),
        "auto",
        _dense_inputs(sizes),
        call,
        sizes.bytes,
        sizes.flops,
        baselines=baselines,
        peers=libraries,
        agree=agree,
        host=sizes.m == 1,
    )


# --- cases --------------------------------------------------------------------------------------------


def product(sizes: Sizes, variant: str = "auto", compared: bool = False, host: bool = False) -> Case:
    """Return a case of `moe_gemm` or `moe_gemm_batched`, with its baselines if `compared`."""
    function = getattr(cukern, sizes.op)

    def call(given: Inputs) -> torch.Tensor:
        options: dict[str, Any] = {**given.scales, "activation": sizes.activation}
        b = given.b
        if given.prepared is not None and variant == "auto":
            b = given.prepared
            del options["b_scale"]
        if given.row_token is not None:
            options["row_token"] = given.row_token
        # The CPU, where the tests run, has no variants.
        return function(given.a, b, given.offsets, **options, variant=variant if given.a.is_cuda else "auto")

    return Case(
        sizes.op,
        sizes.case,
        variant,
        inputs_of(sizes),
        call,
        sizes.bytes,
        sizes.flops,
        baselines=_baselines(sizes) if compared else {},
        peers=_peers(sizes) if compared else {},
        agree=_agree(sizes),
        host=host,
    )


def has_wgmma() -> bool:
    """Return whether "wgmma" is measured: on Hopper; also listed on a machine without a GPU."""
    return not device_count() or arch_of_device(0) == "90a"


def _all_cases() -> Iterator[tuple[Sizes, str, bool, bool]]:
    """Yield the sizes, the variant, whether to measure baselines, and whether to time the host."""
    for sizes in (*LARGE, *FEW_ROWS, *LARGE_FP8):
        yield sizes, "auto", True, False
    for sizes in ONE_TOKEN:
        yield sizes, "auto", True, sizes == ONE_TOKEN[-1]
    if has_wgmma():
        for sizes in (*LARGE[:1], *FEW_ROWS, LARGE_FP8[1], LARGE_FP8[3], *ONE_TOKEN[:1]):
            yield sizes, "wgmma", False, False
    for sizes in (LARGE[0], *FEW_ROWS, LARGE_FP8[1]):
        yield sizes, "mma", False, False
    yield FEW_ROWS[1], "stream", False, False
    gated = LARGE[0]._replace(activation="silu")
    yield gated, "auto", False, False
    yield gated._replace(gathered=8), "auto", False, False
    yield ONE_TOKEN[2]._replace(activation="silu"), "auto", False, False
    yield LARGE[0]._replace(dtype="float16"), "auto", False, False
    yield LARGE_FP8[1]._replace(scales="row"), "auto", True, False
    # The rows of the batches, stored one group after the other.
    for sizes in LARGE_FP8[3:]:
        yield sizes._replace(batched=False), "auto", True, False
    yield Sizes(8, 1024, 4096, 7168, batched=True), "auto", True, False
    # 4-bit weights are prepared, except for "mma".
    for sizes in (LARGE[0], FEW_ROWS[1], GPT_OSS, ONE_TOKEN[0]):
        yield sizes._replace(weights="mxfp4"), "auto", True, False
    for sizes in (LARGE[0], FEW_ROWS[1]):
        yield sizes._replace(weights="nvfp4"), "auto", False, False
        if has_wgmma():
            yield sizes._replace(weights="mxfp4"), "mma", False, False
            yield sizes._replace(weights="mxfp4", dtype=FP8), "auto", False, False


def cases(small: bool = False) -> list[Case]:
    """Return the cases: many and few rows per expert, in 16, 8 and 4 bits. `small`: sizes for the NumPy reference."""
    return [
        product(sizes.small if small else sizes, variant, compared, host)
        for sizes, variant, compared, host in _all_cases()
    ] + [dense(sizes._replace(m=min(sizes.m, 4), n=256, k=256) if small else sizes) for sizes in DENSE]
