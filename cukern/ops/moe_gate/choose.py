"""The kernels of the MoE gates, and the choice of a kernel for a call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cukern.runtime import arrays, check
from cukern.runtime.compile import Instance
from cukern.runtime.kernel import Kernel, Launched, Variant

DTYPES = ("float32", "float16", "bfloat16")
#: Every instance takes a bias in float32 or in the dtype of the logits. For other bias dtypes an instance is compiled
#: at the first call.
BIAS_DTYPES = (*DTYPES, "float64")
_BIAS_TYPE = arrays.CUDA_TYPE | {"float64": "double"}
SCORING = ("sigmoid", "softmax", "sqrtsoftplus")
VARIANTS = ("auto", "specialized", "dynamic")
#: A token has up to 32 lanes, and a lane up to 32 experts, because a lane has a 32-bit mask of its experts.
MAX_EXPERTS = 1024
MAX_TOPK = 512
MAX_TOKENS = 2**30
# Every GPU from sm_80 on allows this much shared memory per block. The largest dynamic sizes need nearly as much.
_MAX_SHARED_BYTES = 99 * 1024
#: {lanes per token: largest number of tokens for which this number of lanes is the fastest on an H200}
UP_TO_TOKENS = {32: 4096, 16: 16384, 8: MAX_TOKENS, 4: MAX_TOKENS}
#: gate_by_warp fills the slots of a token one after the other, so it is used up to _BY_WARP_TOPK slots. gate_by_thread,
#: with one thread per token, is used for exactly _BY_THREAD_EXPERTS experts, without groups and without a bias.
_BY_WARP_TOPK, _BY_THREAD_EXPERTS = 12, 8
#: On an H200, for up to _BY_WARP_TOKENS tokens, gate_by_warp is faster than moe_gate with 32 lanes per token. With up
#: to _BY_WARP_EXPERTS experts gate_by_warp is faster for any number of tokens, because each lane sorts only a few
#: experts.
_BY_WARP_TOKENS, _BY_WARP_EXPERTS = 512, 128
#: Pairs (lanes per token, experts per lane) of the dynamic variants. A call uses the first that fits its experts.
_DYNAMIC_LAYOUTS = ((16, 16), (16, 32), (32, 32))
#: The dynamic variant `LANE_ALIGNED` is faster than the other dynamic variants only if every lane has 16 experts. On an
#: H200, 65536 tokens with 256 experts in 8 groups take 39 us with `LANE_ALIGNED` and 56 us without it, but 8192 tokens
#: with 160 experts (10 per lane) take 16 us with `LANE_ALIGNED` and 9.7 us without it.
_LANE_ALIGNED_LAYOUT = (16, 16)

#: Advice for a caller whose rows of logits do not begin at multiples of 16 bytes.
PADDED = "a view [:, :experts] of rows that are padded to a multiple of 16 bytes is"


class Config(NamedTuple):
    """The compile-time constants of a specialized variant."""

    experts: int
    groups: int
    scoring: str  # "any" without a bias, because the logits order the experts
    biased: bool


#: The specialized sizes, and the models that have them.
SPECIALIZED = {
    Config(256, 8, "sigmoid", biased=True): "DeepSeek-V3, DeepSeek-R1, Ling",
    Config(256, 16, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Config(128, 4, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Config(128, 8, "sigmoid", biased=True): "a size of SGLang's moe_fused_gate",
    Config(384, 1, "sigmoid", biased=True): "Kimi-K2",
    Config(256, 1, "sigmoid", biased=True): "MiniMax-M2",
    Config(160, 1, "sigmoid", biased=True): "GLM-4.5",
    Config(128, 1, "sigmoid", biased=True): "GLM-4.5-Air",
    Config(512, 1, "any", biased=False): "Qwen3-Next",
    Config(256, 1, "any", biased=False): "256 experts without groups",
    Config(128, 1, "any", biased=False): "Qwen3-30B-A3B, Qwen3-235B-A22B, Llama-4-Maverick, gpt-oss-120b",
    Config(64, 1, "any", biased=False): "OLMoE",
    Config(32, 1, "any", biased=False): "gpt-oss-20b",
    Config(8, 1, "any", biased=False): "Mixtral",
}

_kernel = Kernel("moe_gate/moe_gate", "moe_gate", compile_s=1.3)
_by_warp = Kernel("moe_gate/gate_by_warp", "gate_by_warp")
_by_thread = Kernel("moe_gate/gate_by_thread", "gate_by_thread")


def of_template(name: str) -> int:
    return _kernel.constant(name)


def _threads() -> int:
    return of_template("WARPS_PER_BLOCK") * 32


def _shared_bytes(lanes: int, capacity: int, row_chunks: int, block_chunks: int = 0) -> int:
    """Return the bytes of shared memory per block of moe_gate. `row_chunks` and `block_chunks` count 16-byte chunks."""
    list_chunks = capacity + capacity // 4 + 2
    return (block_chunks + (list_chunks + row_chunks) * (_threads() // lanes)) * 16


def _staged_chunks(values: int, lanes: int, item_size: int) -> int:
    """Return how many 16-byte chunks a row takes in shared memory (struct `Staging` of the template)."""
    chunks = values * item_size // 16
    return lanes * (chunks if chunks % 2 else chunks + 1)


def _dynamic_sizes(lanes: int, values: int, experts: int, groups: int, routed: int) -> tuple[dict[str, int], int]:
    """Return the fields that only the dynamic variants read, and the bytes of shared memory per block."""
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


def lanes_of(config: Config) -> tuple[int, ...]:
    """Return the possible numbers of lanes per token, ordered from few tokens to many; empty if none fits the experts.

    With fewer than 32 lanes per token, a warp executes most instructions once for several tokens. Without groups, the
    best experts of the lanes determine a threshold. With fewer than 16 lanes, too many experts would pass the
    threshold. More than 16 experts per lane would need too many registers.
    """
    fewest, most_experts = (8, 32) if config.groups > 1 else (16, 16)
    # A lane has at most 32 experts, all of one group.
    even = [n for n in (32, 16, 8, 4) if config.experts % n == 0 and n % config.groups == 0]
    fitting = [n for n in even if config.experts // n <= 32]
    return tuple(n for n in fitting if n >= fewest and config.experts // n <= most_experts) or tuple(fitting[:1])


def _variant(dtype: str, config: Config, lanes: int, bias_types: tuple[str, ...] = ()) -> Variant:
    experts, groups, scoring, biased = config
    values, item_size = experts // lanes, arrays.ITEM_SIZE[dtype]
    row = bias = 0
    if lanes <= of_template("STAGED_LANES") and values > 1 and values * item_size % 16 == 0:
        bias = _staged_chunks(values, lanes, 4) if biased else 0
        # With a bias, the row in shared memory holds float32 scores, which replace the logits.
        row = _staged_chunks(values, lanes, 4 if biased and values <= of_template("MAX_CACHED_SCORES") else item_size)
    shared_bytes = _shared_bytes(lanes, of_template("CAPACITY"), row, bias)
    arguments = arrays.CUDA_TYPE[dtype], experts, groups, scoring.upper(), lanes, values, biased
    return _kernel.variant(*arguments, *bias_types, launched=Launched(_threads(), shared_bytes))


def _is_by_thread(config: Config) -> bool:
    return config.groups == 1 and not config.biased and config.experts == _BY_THREAD_EXPERTS


def _by_warp_variant(dtype: str, config: Config, bias_types: tuple[str, ...] = ()) -> Variant:
    experts, groups, scoring, biased = config
    sizes = experts, groups, scoring.upper(), biased
    return _by_warp.variant(arrays.CUDA_TYPE[dtype], *sizes, *bias_types)


def _by_thread_variant(dtype: str, config: Config, scoring: str) -> Variant:
    return _by_thread.variant(arrays.CUDA_TYPE[dtype], config.experts, "SOFTMAX" if scoring == "softmax" else "ANY")


def variants_of(config: Config, dtypes: tuple[str, ...] = DTYPES) -> list[Instance]:
    """Return the instances of a configuration, except the instances for more than _BY_WARP_TOPK slots."""
    if _is_by_thread(config):
        forms = itertools.product(dtypes, ("softmax", "any"))
        return [_by_thread_variant(dtype, config, scoring).instance for dtype, scoring in forms]
    few = [_by_warp_variant(dtype, config).instance for dtype in dtypes if 32 in lanes_of(config)]
    others = [n for n in lanes_of(config) if n < 32 or config.experts > _BY_WARP_EXPERTS]
    return few + [_variant(dtype, config, n).instance for dtype in dtypes for n in others]


def _dynamic(
    dtype: str, lanes: int, values: int, bias_types: tuple[str, ...] = (), *, lane_aligned: bool = False
) -> Variant:
    sizes = 0, "LANE_ALIGNED" if lane_aligned else 0, "ANY", lanes, values
    arguments: tuple[int | str, ...] = (arrays.CUDA_TYPE[dtype], *sizes, False, *bias_types)
    if lane_aligned:
        shared_bytes = _shared_bytes(lanes, of_template("CAPACITY"), lanes * (values + 4) // 4)
        return _kernel.variant(*arguments, launched=Launched(_threads(), shared_bytes))
    experts, groups, routed = lanes * values - 24, 8, 70  # example sizes for the compiler's check of the shared memory
    fields, shared_bytes = _dynamic_sizes(lanes, values, experts, groups, routed)
    at = fields["capacity"], groups, fields["group_magic"], fields["log2_lanes_per_group"]
    return _kernel.variant(*arguments, launched=Launched(_threads(), shared_bytes, at, _MAX_SHARED_BYTES))


for _own in (_kernel, _by_warp, _by_thread):
    _all = [instance for config in SPECIALIZED for instance in variants_of(config)]
    _own.specialized = [instance for instance in _all if instance.function == _own.function]
    _own.at_import = [*_own.specialized]
_kernel.at_import += [_dynamic(dtype, *size).instance for dtype in DTYPES for size in _DYNAMIC_LAYOUTS]
_kernel.at_import += [_dynamic(dtype, *_LANE_ALIGNED_LAYOUT, lane_aligned=True).instance for dtype in DTYPES]

registered = set(SPECIALIZED)


class Choice(NamedTuple):
    """A variant and its launch configuration. `fields` are the fields of Params that only the dynamic variant reads."""

    variant: Variant
    lanes: int
    shared_bytes: int
    threads: int
    fields: Mapping[str, int] = dict.fromkeys(("capacity", "group_size", "log2_lanes_per_group", "group_magic"), 0)
    max_tokens: int = MAX_TOKENS


class Choices(NamedTuple):
    """The variants for a call, which depend on its scalar arguments only."""

    dynamic: Choice
    specialized: list[Choice]  # in ascending order of max_tokens
    why: str  # the specialized variants' sizes, or why there are none


#: A tuple (groups, topk_group, topk including shared experts, number of shared experts).
Sizes = tuple[int, int, int, int]


def _dynamic_choice(
    dtype: str, experts: int, groups: int, routed: int, layout: tuple[int, int], bias_types: tuple[str, ...]
) -> Choice:
    fields, shared_bytes = _dynamic_sizes(*layout, experts, groups, routed)
    return Choice(_dynamic(dtype, *layout, bias_types), layout[0], shared_bytes, _threads(), fields)


def _lane_aligned_choice(
    dtype: str, experts: int, groups: int, routed: int, bias_types: tuple[str, ...]
) -> Choice | None:
    """Return the dynamic variant LANE_ALIGNED, or None unless every lane has 16 experts, all of one group."""
    lanes, values = _LANE_ALIGNED_LAYOUT
    if groups == 1 or lanes % groups or experts != lanes * values or routed > lanes:
        return None
    fields = {
        "capacity": of_template("CAPACITY"),
        "group_size": 0,
        "log2_lanes_per_group": (lanes // groups).bit_length() - 1,
        "group_magic": 0,
    }
    variant = _dynamic(dtype, lanes, values, bias_types, lane_aligned=True)
    return Choice(variant, lanes, variant.launched.shared_bytes, _threads(), fields)


def _all_specialized(
    dtype: str, config: Config, scoring: str, routed: int, bias_types: tuple[str, ...]
) -> list[Choice]:
    """Return the specialized kernels, ordered from few tokens to many. `routed` is topk without the shared experts."""
    if _is_by_thread(config):
        threads = _by_thread.constant("THREADS")
        return [Choice(_by_thread_variant(dtype, config, scoring), 1, 0, threads)]
    found = []
    for lanes in lanes_of(config):
        most = UP_TO_TOKENS[lanes]
        if lanes == 32 and routed <= _BY_WARP_TOPK:
            threads = 32 * _by_warp.constant("WARPS")
            by_warp = Choice(_by_warp_variant(dtype, config, bias_types), lanes, 0, threads)
            if config.experts <= _BY_WARP_EXPERTS:
                found.append(by_warp._replace(max_tokens=most))
                continue
            found.append(by_warp._replace(max_tokens=_BY_WARP_TOKENS))
        # With at most 2 * lanes slots, a lane holds at most two slots, so the weights are summed in the same order for
        # every number of lanes.
        if routed <= min(of_template("CAPACITY"), 2 * lanes):
            variant = _variant(dtype, config, lanes, bias_types)
            found.append(Choice(variant, lanes, variant.launched.shared_bytes, _threads(), max_tokens=most))
    return found


@functools.lru_cache(maxsize=1024)
def choose(dtype: str, experts: int, sizes: Sizes, scoring: str, bias_dtype: str | None, softcap: bool) -> Choices:
    """Check the scalar arguments, and choose the variants for them."""
    biased = bias_dtype is not None
    bias_types = (_BIAS_TYPE[bias_dtype],) if bias_dtype and bias_dtype not in ("float32", dtype) else ()
    groups, topk_group, topk, shared = sizes
    if not 1 <= experts <= MAX_EXPERTS:
        check.fail("the number of experts", f"in [1, {MAX_EXPERTS}]", experts)
    check.one_of("scoring_func", scoring, SCORING)
    check.integer("num_expert_group", groups, 1, experts)
    if experts % groups:
        check.fail("num_expert_group", f"a divisor of the {experts} experts", groups)
    check.integer("topk_group", topk_group, 1, groups, "num_expert_group")
    check.integer("num_fused_shared_experts", shared, 0)
    group_size = experts // groups
    reachable = min(topk_group * group_size, MAX_TOPK)
    why = f"the experts of the kept groups, at most {MAX_TOPK}, plus shared ones"
    check.integer("topk", topk, 1 + shared, reachable + shared, why)

    routed = topk - shared
    # With fewer lanes than routed slots, the threshold for candidates would be too low: for most rows the list of
    # candidates would overflow.
    layout = next((n, v) for n, v in _DYNAMIC_LAYOUTS if n * v >= experts and (routed <= n or n == 32))
    lane_aligned = _lane_aligned_choice(dtype, experts, groups, routed, bias_types)
    dynamic = lane_aligned or _dynamic_choice(dtype, experts, groups, routed, layout, bias_types)
    if dynamic.shared_bytes > _MAX_SHARED_BYTES:
        check.fail("topk and num_expert_group", "such that a block's lists fit shared memory", f"{topk} and {groups}")
    config = Config(experts, groups, scoring if biased else "any", biased)
    specialized = []
    if config in registered and not softcap:
        specialized = _all_specialized(dtype, config, scoring, routed, bias_types)
    why = f"specialized for {_named(config)} ({SPECIALIZED.get(config, 'by cukern.specialize')})"
    if not specialized:
        why = _why_dynamic(dtype, config, routed, softcap)
    return Choices(dynamic, specialized, why)


def _named(config: Config) -> str:
    groups = f" in {config.groups} groups" if config.groups > 1 else ""
    return f"{config.experts} experts{groups} {f'by {config.scoring} with' if config.biased else 'without'} a bias"


def _why_dynamic(dtype: str, config: Config, routed: int, softcap: bool) -> str:
    """Return why a call has no specialized instance, and the call of `cukern.specialize` that would compile one."""
    if softcap:
        return "only the dynamic kernel has a softcap"
    if not lanes_of(config):
        return f"no specialized kernel lays out {_named(config)}: a group must be whole lanes of at most 32 experts"
    most = min(of_template("CAPACITY"), 2 * max(lanes_of(config)))
    if routed > most:
        return f"the specialized kernels for {_named(config)} choose at most {most}, not {routed}"
    if config.experts * arrays.ITEM_SIZE[dtype] % 16:
        rows = f"rows of {config.experts} {dtype} logits"
        return f"{rows} are not 16-byte aligned, as a specialized kernel needs: {PADDED}"
    op = "moe_fused_gate" if config.biased else "topk_softmax"
    sizes = f"experts={config.experts}, groups={config.groups}, "
    sizes += f"scoring_func={config.scoring!r}" if config.biased else "biased=False"
    return f'no specialized instance is for {_named(config)}: cukern.specialize("{op}", {sizes}) compiles one'


#: Fields that the `Params` of the kernel `moe_gate` has, but not the `Params` of the other two kernels.
_OF_ANY_SIZES = (
    *("experts", "groups", "group_by_two", "softcap"),
    *("capacity", "group_size", "log2_lanes_per_group", "group_magic"),
)
_WITHOUT = {
    _kernel.function: (),
    _by_warp.function: _OF_ANY_SIZES,
    _by_thread.function: (*_OF_ANY_SIZES, "bias", "topk_group", "bias_is_float"),
}


def fields_of(variant: Variant, fields: dict[str, Any]) -> dict[str, Any]:
    without = _WITHOUT[variant.instance.function]
    return {name: value for name, value in fields.items() if name not in without}
