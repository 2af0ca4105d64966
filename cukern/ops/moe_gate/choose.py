"""The kernels of the gates, and which of them takes a call."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from typing import Any, NamedTuple

from cukern.runtime import arrays, check, template
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Launched, Variant
from cukern.runtime.launch import asked
from cukern.runtime.template import Packer, packer

DTYPES = ("float32", "float16", "bfloat16")
#: A bias of float32 or of the logits' dtype uses a shared instance; any other dtype compiles its own.
BIAS_DTYPES = (*DTYPES, "float64")
_BIAS_TYPE = arrays.CUDA_TYPE | {"float64": "double"}
SCORING = ("sigmoid", "softmax", "sqrtsoftplus")
VARIANTS = ("auto", "specialized", "dynamic")
#: A lane keeps one bit for each of its experts in a 32-bit word.
MAX_EXPERTS = 1024
MAX_TOPK = 512
MAX_TOKENS = 2**30
_LARGEST = (2 - 2**-23) * 2.0**127  # of float32
# The shared memory that a block can have on every GPU from sm_80 on. The largest sizes of the dynamic variant need
# nearly all.
_MAX_SHARED_BYTES = 99 * 1024
#: By lanes per token, the most tokens for which they are faster than fewer lanes (measured on an H200; the bits are the
#: same).
UP_TO_TOKENS = {32: 4096, 16: 16384, 8: MAX_TOKENS, 4: MAX_TOKENS}
#: gate_by_warp deals at most 12 slots; gate_by_thread takes 8 experts.
_BY_WARP_TOPK, _BY_THREAD_EXPERTS = 12, 8
#: The most tokens for which gate_by_warp is faster than 32 lanes that share a token's experts (measured on an H200):
#: each lane sorts its own, so its work grows with them. Up to _BY_WARP_EXPERTS experts it is always faster.
_BY_WARP_TOKENS, _BY_WARP_EXPERTS = 512, 128
#: Lanes per token and experts per lane of the dynamic variants. A call takes the first that holds its experts.
_DYNAMIC = ((16, 16), (16, 32), (32, 32))
#: The same of the dynamic variant that hands choices on. On an H200 that is faster where every lane is full: with 256
#: experts in 8 groups 65536 tokens take 39 us, not 56. A lane holds 10 of 160 experts: there 8192 tokens take 16 us,
#: not 9.7.
_DYNAMIC_BY_LANES = (16, 16)

#: What aligns the rows of a router whose experts do not.
PADDED = "a view [:, :experts] of rows that are padded to a multiple of 16 bytes is"


class Sizes(NamedTuple):
    """Sizes with variants of their own. With a bias the scoring decides the order, so it is fixed too."""

    experts: int
    groups: int
    scoring: str  # "any" without a bias: the logits order the experts
    biased: bool


#: The sizes and the models that have them.
SPECIALIZED = {
    Sizes(256, 8, "sigmoid", biased=True): "DeepSeek-V3, DeepSeek-R1, Ling",
    Sizes(256, 16, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Sizes(128, 4, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Sizes(128, 8, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Sizes(384, 1, "sigmoid", biased=True): "Kimi-K2",
    Sizes(256, 1, "sigmoid", biased=True): "MiniMax-M2",
    Sizes(160, 1, "sigmoid", biased=True): "GLM-4.5",
    Sizes(128, 1, "sigmoid", biased=True): "GLM-4.5-Air",
    Sizes(512, 1, "any", biased=False): "Qwen3-Next",
    Sizes(256, 1, "any", biased=False): "256 experts without groups",
    Sizes(128, 1, "any", biased=False): "Qwen3-30B-A3B, Qwen3-235B-A22B, Llama-4-Maverick",
    Sizes(64, 1, "any", biased=False): "OLMoE",
    Sizes(8, 1, "any", biased=False): "Mixtral",
}

_kernel = Kernel("moe_gate/moe_gate", "moe_gate", compile_s=1.3)
_by_warp = Kernel("moe_gate/gate_by_warp", "gate_by_warp")
_by_thread = Kernel("moe_gate/gate_by_thread", "gate_by_thread")


def of_template(name: str) -> int:
    return template.constants(_kernel.file)[name]


def _threads() -> int:
    """Threads of a block of moe_gate."""
    return of_template("WARPS_PER_BLOCK") * 32


def _shared_bytes(lanes: int, capacity: int, row_units: int, block_units: int = 0) -> int:
    """Bytes of shared memory per block of moe_gate, as the template lays them out in units of 16."""
    list_units = capacity + capacity // 4 + 2
    return (block_units + (list_units + row_units) * (_threads() // lanes)) * 16


def _staged_units(values: int, lanes: int, item_size: int) -> int:
    """Units of a staged row (`Staging` of the template)."""
    chunks = values * item_size // 16
    return lanes * (chunks if chunks % 2 else chunks + 1)


def _dynamic_sizes(lanes: int, values: int, experts: int, groups: int, routed: int) -> tuple[dict[str, int], int]:
    """The fields that only the dynamic kernel reads, and its shared memory."""
    group_size, capacity = experts // groups, max(64, -(-routed // 4) * 4)
    log2_lanes_per_group = 0
    while group_size % (2 << log2_lanes_per_group) == 0 and (2 << log2_lanes_per_group) * groups <= lanes:
        log2_lanes_per_group += 1
    magic = -(-(1 << 20) // group_size)
    padded_groups = ((lanes * values - 1) * magic >> 20) + 1
    row_words = padded_groups + lanes * values + (padded_groups << log2_lanes_per_group)
    fields = {"capacity": capacity, "group_size": group_size, "log2_lanes_per_group": log2_lanes_per_group}
    shared_bytes = _shared_bytes(lanes, capacity, (groups + 5) // 2 + (row_words + 3) // 4)
    return fields | {"group_magic": magic}, shared_bytes


def _fits(sizes: Sizes, lanes: int) -> bool:
    """Whether `lanes` lanes per token can hold the experts in whole groups."""
    return sizes.experts % lanes == 0 and lanes % sizes.groups == 0 and sizes.experts // lanes <= 32


def lanes_of(sizes: Sizes) -> tuple[int, ...]:
    """Lanes per token, from few tokens to many; none where nothing fits.

    A whole warp per token takes the fewest steps. Several tokens per warp share the instructions of all phases but the
    pass over the experts. Without groups the threshold comes from the lanes: fewer than 16 would let too many
    candidates through, and more than 16 experts per lane take too many registers.
    """
    fewest, most_experts = (8, 32) if sizes.groups > 1 else (16, 16)
    fitting = [n for n in (32, 16, 8, 4) if _fits(sizes, n)]
    return tuple(n for n in fitting if n >= fewest and sizes.experts // n <= most_experts) or tuple(fitting[:1])


def _variant(dtype: str, sizes: Sizes, lanes: int, bias_types: tuple[str, ...] = ()) -> Variant:
    experts, groups, scoring, biased = sizes
    values, item_size = experts // lanes, arrays.ITEM_SIZE[dtype]
    row = bias = 0
    if lanes <= of_template("STAGED_LANES") and values > 1 and values * item_size % 16 == 0:
        bias = _staged_units(values, lanes, 4) if biased else 0
        # With a bias, scores of float32 replace the logits.
        row = _staged_units(values, lanes, 4 if biased and values <= of_template("KEPT_SCORES") else item_size)
    shared_bytes = _shared_bytes(lanes, of_template("CAPACITY"), row, bias)
    arguments = arrays.CUDA_TYPE[dtype], experts, groups, scoring.upper(), lanes, values, "true" if biased else "false"
    return _kernel.variant(*arguments, *bias_types, launched=Launched(_threads(), shared_bytes))


def _is_by_thread(sizes: Sizes) -> bool:
    """Whether one thread per token takes the experts, in loads of 16 bytes."""
    return sizes.groups == 1 and not sizes.biased and sizes.experts == _BY_THREAD_EXPERTS


def _by_warp_variant(dtype: str, sizes: Sizes, bias_types: tuple[str, ...] = ()) -> Variant:
    experts, groups, scoring, biased = sizes
    arguments = experts, groups, scoring.upper(), "true" if biased else "false"
    return _by_warp.variant(arrays.CUDA_TYPE[dtype], *arguments, *bias_types)


def _by_thread_variant(dtype: str, sizes: Sizes, scoring: str) -> Variant:
    return _by_thread.variant(arrays.CUDA_TYPE[dtype], sizes.experts, "SOFTMAX" if scoring == "softmax" else "ANY")


def variants_of(sizes: Sizes, dtypes: tuple[str, ...] = DTYPES) -> list[Instance]:
    """The instances of a configuration, but for those that only many slots take."""
    if _is_by_thread(sizes):
        forms = itertools.product(dtypes, ("softmax", "any"))
        return [_by_thread_variant(dtype, sizes, scoring).instance for dtype, scoring in forms]
    few = [_by_warp_variant(dtype, sizes).instance for dtype in dtypes if 32 in lanes_of(sizes)]
    others = [n for n in lanes_of(sizes) if n < 32 or sizes.experts > _BY_WARP_EXPERTS]
    return few + [_variant(dtype, sizes, n).instance for dtype in dtypes for n in others]


def _dynamic(
    dtype: str, lanes: int, values: int, bias_types: tuple[str, ...] = (), *, by_lanes: bool = False
) -> Variant:
    sizes = 0, "WHOLE_LANES" if by_lanes else 0, "ANY", lanes, values
    arguments: tuple[int | str, ...] = (arrays.CUDA_TYPE[dtype], *sizes, "false", *bias_types)
    if by_lanes:
        shared_bytes = _shared_bytes(lanes, of_template("CAPACITY"), lanes * (values + 4) // 4)
        return _kernel.variant(*arguments, launched=Launched(_threads(), shared_bytes))
    experts, groups, routed = lanes * values - 24, 8, 70  # an example of many
    fields, shared_bytes = _dynamic_sizes(lanes, values, experts, groups, routed)
    at = fields["capacity"], groups, fields["group_magic"], fields["log2_lanes_per_group"]
    return _kernel.variant(*arguments, launched=Launched(_threads(), shared_bytes, at, _MAX_SHARED_BYTES))


for _own in (_kernel, _by_warp, _by_thread):
    _all = [instance for sizes in SPECIALIZED for instance in variants_of(sizes)]
    _own.specialized = [instance for instance in _all if instance.function == _own.function]
    _own.at_import = [*_own.specialized]
_kernel.at_import += [_dynamic(dtype, *size).instance for dtype in DTYPES for size in _DYNAMIC]
_kernel.at_import += [_dynamic(dtype, *_DYNAMIC_BY_LANES, by_lanes=True).instance for dtype in DTYPES]

registered = set(SPECIALIZED)


#: The fields that each call gives, in this order. The decision fixes all others.
FIELDS = ("logits", "bias", "weights", "ids", "valid_on_device", "row_stride", "tokens", "valid")


class Config(NamedTuple):
    """What all calls of a decision launch. Each adds its arrays, its grid and its numbers."""

    variant: Variant
    block: tuple[int, int, int]
    shared_bytes: int
    tokens_per_block: int
    topk: int
    pack: Packer
    reason: str


#: Up to each of these numbers of tokens another kernel is the fastest. No kernel takes more than MAX_TOKENS.
TOKEN_CLASSES = (_BY_WARP_TOKENS, *sorted({*UP_TO_TOKENS.values()}), 2**63)


def token_class(tokens: int) -> int:
    """The least of the token classes that holds `tokens`: calls of one class share a decision."""
    return TOKEN_CLASSES[bisect_left(TOKEN_CLASSES, tokens)]


@functools.lru_cache(maxsize=4096)
def choose(
    dtype: str, experts: int, bias_dtype: str | None, groups: int, topk_group: int, topk: int, shared: int,
    factor: float, scales: bool, renormalize: bool, scoring: str, by_two: bool, softcap: float,
    count_dtype: str | None, aligned: bool, variant: str, up_to_tokens: int,
) -> Config:  # fmt: skip
    """The kernel of a gate, with all that does not differ between its calls.

    `topk` counts `shared` slots of shared experts; `by_two`: a group's score is the sum of its two best choices;
    `count_dtype` is the dtype of a number of tokens on the device, or None; `aligned`: the rows and the bias are
    16-byte aligned. Raises ValueError, with the argument's name, for words that are not known, for numbers that do not
    go together, and for a variant that these sizes do not have.
    """
    _check(experts, groups, topk_group, topk, shared, factor, scoring, variant)
    routed, sizes = topk - shared, Sizes(experts, groups, scoring if bias_dtype else "any", bias_dtype is not None)
    bias_types = (_BIAS_TYPE[bias_dtype],) if bias_dtype and bias_dtype not in ("float32", dtype) else ()
    fields = {
        "experts": experts, "groups": groups, "topk_group": topk_group, "topk": routed, "shared": shared,
        "scoring": of_template(scoring.upper()), "group_by_two": by_two, "renormalize": renormalize,
        "bias_is_float": bias_dtype == "float32", "valid_is_int64": count_dtype == "int64",
        "capacity": 0, "group_size": 0, "log2_lanes_per_group": 0, "group_magic": 0,
        "shared_scale": _in_float32(1 / factor if shared else 0.0),
        "output_scale": _in_float32(factor if scales else 1.0), "softcap": _in_float32(softcap),
    }  # fmt: skip
    dynamic, lanes, shared_bytes, own_fields = _dynamic_for(dtype, sizes, routed, bias_types)
    if shared_bytes > _MAX_SHARED_BYTES:
        check.fail("topk and num_expert_group", "such that a block's lists fit shared memory", f"{topk} and {groups}")
    forms = _specialized_forms(sizes, routed) if sizes in registered and not softcap else []
    why = _specialized_for(sizes) if forms else _why_dynamic(dtype, sizes, routed, softcap != 0)
    asks = [asked(variant)] if variant != "auto" else []
    if forms and aligned and variant != "dynamic":
        i = next((i for i, (most, *_) in enumerate(forms) if up_to_tokens <= most), len(forms) - 1)
        _, lanes, kernel = forms[i]
        chosen, threads = _specialized(kernel, dtype, sizes, scoring, lanes, bias_types)
        reason = "; ".join([*asks, f"{{tokens}} tokens: {_lanes_for(forms, i)}", why])
        return _config(chosen, threads, chosen.launched.shared_bytes, lanes, fields, reason)
    if variant == "specialized":
        check.fail(
            "variant",
            "'auto' or 'dynamic' here",
            f"'specialized': there is none for {experts} experts in {groups} groups with scoring {scoring} "
            f"{'with' if sizes.biased else 'without'} a bias, or the rows are not 16-byte aligned "
            "(cukern.specialize adds one)",
        )
    if forms:
        unaligned = "rows or the bias" if sizes.biased else "rows"
        why = f"the {unaligned} are not 16-byte aligned ({PADDED}), as the faster kernel needs ({why})"
    reason = asks[0] if asks else f"dynamic, {lanes} lanes per token: {why}"
    return _config(dynamic, _threads(), shared_bytes, lanes, fields | own_fields, reason)


def _lanes_for(forms: list[tuple[int, int, Kernel]], i: int) -> str:
    """The lanes of a specialized kernel, and the numbers of tokens that it takes, in words."""
    most, lanes, _ = forms[i]
    bounds = [f"from {forms[i - 1][0] + 1}"] * (i > 0) + [f"{'to' if i else 'up to'} {most}"] * (most < MAX_TOKENS)
    each = {1: "one thread", 32: "one warp"}.get(lanes, f"{lanes} lanes")
    return f"{each} per token" + (f" ({' '.join(bounds)} tokens)" if bounds else "")


def _in_float32(number: float) -> float:
    """A number that a float32 field takes: one past its range is infinite, as in the twin."""
    return number if abs(number) <= _LARGEST else math.copysign(math.inf, number)


def _check(
    experts: int, groups: int, topk_group: int, topk: int, shared: int, factor: float, scoring: str, variant: str
) -> None:
    """Raise ValueError for words that are not known, and for numbers that do not go together."""
    check.one_of("scoring_func", scoring, SCORING)
    check.one_of("variant", variant, VARIANTS)
    check.integer("num_expert_group", groups, 1, experts)
    if experts % groups:
        check.fail("num_expert_group", f"a divisor of the {experts} experts", groups)
    check.integer("topk_group", topk_group, 1, groups, "num_expert_group")
    check.integer("num_fused_shared_experts", shared, 0)
    reachable = min(topk_group * (experts // groups), MAX_TOPK)
    why = f"the experts of the kept groups, at most {MAX_TOPK}, plus shared ones"
    check.integer("topk", topk, 1 + shared, reachable + shared, why)
    if check.number("routed_scaling_factor", factor) == 0 and shared:
        check.fail("routed_scaling_factor", "nonzero with fused shared experts", factor)


def _config(
    variant: Variant, threads: int, shared_bytes: int, lanes: int, fields: dict[str, Any], reason: str
) -> Config:
    pack = packer(variant.instance.file, variant.instance.function, FIELDS, fields)
    topk = fields["topk"] + fields["shared"]
    return Config(variant, (threads, 1, 1), shared_bytes, threads // lanes, topk, pack, reason)


def _dynamic_for(
    dtype: str, sizes: Sizes, routed: int, bias_types: tuple[str, ...]
) -> tuple[Variant, int, int, dict[str, int]]:
    """The dynamic kernel for these sizes, its lanes per token, its shared memory, and the fields of its own."""
    experts, groups = sizes.experts, sizes.groups
    lanes, values = _DYNAMIC_BY_LANES
    if groups > 1 and lanes % groups == 0 and experts == lanes * values and routed <= lanes:
        fields = {"capacity": of_template("CAPACITY"), "log2_lanes_per_group": (lanes // groups).bit_length() - 1}
        variant = _dynamic(dtype, lanes, values, bias_types, by_lanes=True)
        return variant, lanes, variant.launched.shared_bytes, fields
    # With fewer lanes than ranks there is no threshold, and most rows would overflow the list.
    lanes, values = next((n, v) for n, v in _DYNAMIC if n * v >= experts and (routed <= n or n == 32))
    fields, shared_bytes = _dynamic_sizes(lanes, values, experts, groups, routed)
    return _dynamic(dtype, lanes, values, bias_types), lanes, shared_bytes, fields


def _specialized_forms(sizes: Sizes, routed: int) -> list[tuple[int, int, Kernel]]:
    """The specialized kernels for a number of routed experts, from few tokens to many.

    Each has the most tokens that it takes, and its lanes per token.
    """
    if _is_by_thread(sizes):
        return [(MAX_TOKENS, 1, _by_thread)]
    found = []
    for lanes in lanes_of(sizes):
        if lanes == 32 and routed <= _BY_WARP_TOPK:
            if sizes.experts <= _BY_WARP_EXPERTS:
                found.append((UP_TO_TOKENS[lanes], lanes, _by_warp))
                continue
            found.append((_BY_WARP_TOKENS, lanes, _by_warp))
        # Up to two ranks per lane, the order of the weights' sum is the same in all layouts.
        if routed <= min(of_template("CAPACITY"), 2 * lanes):
            found.append((UP_TO_TOKENS[lanes], lanes, _kernel))
    return found


def _specialized(
    kernel: Kernel, dtype: str, sizes: Sizes, scoring: str, lanes: int, bias_types: tuple[str, ...]
) -> tuple[Variant, int]:
    """The variant of a specialized kernel for these sizes, and its threads per block."""
    if kernel is _by_thread:
        return _by_thread_variant(dtype, sizes, scoring), template.constants(kernel.file)["THREADS"]
    if kernel is _by_warp:
        return _by_warp_variant(dtype, sizes, bias_types), 32 * template.constants(kernel.file)["WARPS"]
    return _variant(dtype, sizes, lanes, bias_types), _threads()


def _named(sizes: Sizes) -> str:
    groups = f" in {sizes.groups} groups" if sizes.groups > 1 else ""
    return f"{sizes.experts} experts{groups} {f'by {sizes.scoring} with' if sizes.biased else 'without'} a bias"


def _specialized_for(sizes: Sizes) -> str:
    return f"specialized for {_named(sizes)} ({SPECIALIZED.get(sizes, 'by cukern.specialize')})"


def _why_dynamic(dtype: str, sizes: Sizes, routed: int, softcap: bool) -> str:
    """Why no specialized instance takes a call, and what would compile one."""
    if softcap:
        return "only the dynamic kernel has a softcap"
    if not lanes_of(sizes):
        return f"no specialized kernel lays out {_named(sizes)}: a group must be whole lanes of at most 32 experts"
    most = min(of_template("CAPACITY"), 2 * max(lanes_of(sizes)))
    if routed > most:
        return f"the specialized kernels for {_named(sizes)} choose at most {most}, not {routed}"
    if sizes.experts * arrays.ITEM_SIZE[dtype] % 16:
        rows = f"rows of {sizes.experts} {dtype} logits"
        return f"{rows} are not 16-byte aligned, as a specialized kernel needs: {PADDED}"
    op = "moe_fused_gate" if sizes.biased else "topk_softmax"
    named = f"experts={sizes.experts}, groups={sizes.groups}, "
    named += f"scoring_func={sizes.scoring!r}" if sizes.biased else "biased=False"
    return f'no specialized instance is for {_named(sizes)}: cukern.specialize("{op}", {named}) compiles one'
