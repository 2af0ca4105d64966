"""The launches of `moe_permute`: what alike calls repeat, what every call checks, and parts below the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.explain import _Call as Described
from cukern.ops.moe_permute import choose as kernels
from cukern.ops.moe_permute import permute_quantized, rows, sorting
from cukern.runtime import arrays, gpu
from cukern.runtime.decisions import Decisions
from cukern.runtime.view import read
from tests.buffers import OnlyDLPack
from tests.pretended import PretendedGPU, pretended  # noqa: F401

EXPERTS, TOPK, HIDDEN = 20, 8, 256


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def sort(tokens: int, **options: Any) -> Any:
    return cukern.moe_sort(zeros(tokens, TOPK), EXPERTS, **options)


def sort_into(tokens: int) -> Any:
    pairs = tokens * TOPK
    return sort(tokens, out=(zeros(EXPERTS + 1), zeros(pairs), zeros(tokens, TOPK)))


def sort_mapped(tokens: int) -> Any:
    return sort(tokens, expert_map=zeros(EXPERTS), num_local_experts=4)


def batched(tokens: int) -> Any:
    return cukern.moe_sort_batched(zeros(tokens, TOPK), EXPERTS, tokens + 1)


def batched_into(tokens: int) -> Any:
    out = zeros(EXPERTS), zeros(tokens, TOPK)
    return cukern.moe_sort_batched(zeros(tokens, TOPK), EXPERTS, 7, out=out)


def align(tokens: int) -> Any:
    return cukern.moe_align_block_size(zeros(tokens, TOPK), 4, EXPERTS, zeros(EXPERTS), pad_sorted_ids=True)


def align_into(tokens: int) -> Any:
    least = tokens * TOPK + EXPERTS * 3
    out = zeros(least + tokens), zeros(least + 1), zeros(1)
    return cukern.moe_align_block_size(zeros(tokens, TOPK), 4, EXPERTS, out=out)


def permute_rows(tokens: int) -> Any:
    return cukern.permute_rows(zeros(tokens, HIDDEN, dtype=torch.bfloat16), zeros(tokens, TOPK))


def permute_rows_into(tokens: int) -> Any:
    x, out = zeros(tokens, HIDDEN, dtype=torch.bfloat16), zeros(tokens + 3, HIDDEN, dtype=torch.bfloat16)
    return cukern.permute_rows(x, zeros(tokens * TOPK), tokens + 3, out=out)


def quantized(tokens: int) -> Any:
    pairs, x = tokens * TOPK, zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    q, scale = zeros(pairs, HIDDEN, dtype=torch.uint8), zeros(pairs, 2, dtype=torch.float32)
    return permute_quantized(x, zeros(tokens, TOPK), out_q=q, out_s=scale)


def permute(tokens: int) -> Any:
    x, scale = zeros(tokens, HIDDEN, dtype=torch.bfloat16), zeros(tokens, 2, dtype=torch.float32)
    return cukern.moe_permute(x, scale, zeros(tokens, TOPK), EXPERTS, align_block_size=4)


def permute_into(tokens: int) -> Any:
    x, out = (zeros(n, HIDDEN, dtype=torch.bfloat16) for n in (tokens, tokens * TOPK))
    return cukern.moe_permute(x, torch.tensor(1.0), zeros(tokens, TOPK), EXPERTS, permuted_hidden_states=out)


def unpermute(tokens: int) -> Any:
    out, x = (zeros(n, HIDDEN, dtype=torch.bfloat16) for n in (tokens, tokens * TOPK))
    weights = zeros(tokens, TOPK, dtype=torch.float32)
    return cukern.moe_unpermute(out, x, weights, zeros(tokens * TOPK), zeros(EXPERTS + 1, dtype=torch.int64))


def unpermute_in_order(tokens: int) -> Any:
    out, x = (zeros(n, HIDDEN, dtype=torch.bfloat16) for n in (tokens, tokens * TOPK))
    return cukern.moe_unpermute(out, x, zeros(tokens, TOPK, dtype=torch.float32), None)  # type: ignore[arg-type]


def add_up(tokens: int) -> Any:
    return cukern.moe_sum(zeros(tokens, TOPK, HIDDEN, dtype=torch.bfloat16))


def add_up_into(tokens: int) -> Any:
    x, out = zeros(tokens, TOPK, HIDDEN, dtype=torch.bfloat16), zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    return cukern.moe_sum(x, out)


CALLS = [
    sort, sort_into, sort_mapped, batched, batched_into, align, align_into, permute_rows, permute_rows_into, quantized,
    permute, permute_into, unpermute, unpermute_in_order, add_up, add_up_into,
]  # fmt: skip


@pytest.fixture
def chosen(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """The names of the functions that check and choose, as a list that grows with their calls."""
    found: list[str] = []

    def watched(name: str, decide: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: [found.append(name), decide(*args)][1]

    for module in (sorting, rows):
        for name, value in [*vars(module).items()]:
            if name.startswith("_decide"):
                monkeypatch.setattr(module, name, watched(name, value))
            elif isinstance(value, Decisions):
                monkeypatch.setattr(value, "_found", {})
    return found


def described(result: Any) -> Any:
    """The shapes and dtypes of results."""
    return [x if x is None else (x.shape, x.dtype) for x in (result if isinstance(result, tuple) else (result,))]


def comparable(launched: Any) -> Any:
    """A launch without the addresses of its arrays."""

    def without(fields: dict[str, Any]) -> dict[str, Any]:
        return {k: without(x) if isinstance(x, dict) else bool(x) if x > 2**32 else x for k, x in fields.items()}

    return launched._replace(fields=without(launched.fields))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_like_one_before_does_not_choose(
    call: Callable[[int], Any],
    chosen: list[str],
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    counts = (33, 40, 64, 50)  # of one class
    found, launched = [], []
    for tokens in counts:
        found.append(described(call(tokens)))
        launched.append([*map(comparable, pretended.launches)])
        pretended.launches.clear()
    assert len(chosen) == 1
    for tokens, results, launches in zip(counts, found, launched, strict=True):
        for decisions in (x for module in (sorting, rows) for x in vars(module).values() if isinstance(x, Decisions)):
            decisions.clear()
        assert described(call(tokens)) == results
        assert [*map(comparable, pretended.launches)] == launches and launches
        pretended.launches.clear()
    assert len(chosen) == 5
    call(0)
    before = len(chosen)
    for tokens in (33, 40):
        call(tokens)
    assert len(chosen) <= before + 1


@pytest.mark.parametrize("call", CALLS)
def test_a_decision_is_of_a_device(
    call: Callable[[int], Any],
    chosen: list[str],
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    for device in (1, 0, 1, 0):
        pretended.device = device
        call(33)
        assert {launched.device for launched in pretended.launches} == {device}
        pretended.launches.clear()
    assert len(chosen) == 2 and pretended.current == 0


X, IDS = zeros(6, HIDDEN, dtype=torch.bfloat16), zeros(6, TOPK)
ROWS = zeros(6 * TOPK, HIDDEN, dtype=torch.bfloat16)
WEIGHTS, SCALE = zeros(6, TOPK, dtype=torch.float32), zeros(6, 2, dtype=torch.float32)
SLOTS = zeros(6, TOPK, HIDDEN, dtype=torch.bfloat16)

#: Good calls, and changes that only the sizes of free dimensions, or free numbers, tell.
CHANGES: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (cukern.moe_sort, {"topk_ids": IDS, "num_experts": 9, "out": (zeros(10), zeros(48), IDS.clone())}, change, message)
    for change, message in (
        ({"topk_ids": IDS[:5]}, r"^out\[1\] must be of shape \[tokens \* topk\] = \[40\], got \[48\]"),
        ({"out": (zeros(10), zeros(48), zeros(5, TOPK))}, r"^out\[2\] must be of shape \[tokens, topk\] = \[6, 8\]"),
    )
]
CHANGES += [
    (
        cukern.moe_sort,
        {"topk_ids": IDS, "num_experts": 9, "out": (None, zeros(48), None)},
        {"topk_ids": IDS[:5]},
        r"^out\[1\] must be of shape \[tokens \* topk\] = \[40\], got \[48\]",
    )
]
CHANGES += [
    (cukern.moe_sort_batched, {"topk_ids": IDS, "num_experts": 9, "max_tokens": 3, "out": (zeros(9), IDS.clone())}, *x)
    for x in (
        ({"max_tokens": 0}, r"^max_tokens must be an integer in \[1, "),
        ({"max_tokens": 2**30}, r"^max_tokens must be an integer in \[1, "),
        ({"max_tokens": True}, r"^max_tokens must be an integer in \[1, .*got True \(bool\)"),
        ({"out": (zeros(9), zeros(7, TOPK))}, r"^out\[1\] must be of shape \[tokens, topk\]"),
    )
]
_ALIGNED = zeros(48 + 27), zeros(19), zeros(1)
CHANGES += [
    (cukern.moe_align_block_size, {"topk_ids": IDS, "block_size": 4, "num_experts": 9, "out": _ALIGNED}, *x)
    for x in (
        ({"out": (_ALIGNED[0][:74], *_ALIGNED[1:])}, r"^out\[0\] must be of at least 75 elements, got 74"),
        ({"out": (_ALIGNED[0], _ALIGNED[1][:17], _ALIGNED[2])}, r"^out\[1\] must be of at least 18 elements, got 17"),
        ({"topk_ids": zeros(7, TOPK)}, r"^out\[0\] must be of at least 83 elements, got 75"),
    )
]
CHANGES += [
    (cukern.permute_rows, {"hidden_states": X, "inverse": IDS, "rows": 48, "out": ROWS}, *x)
    for x in (
        ({"rows": -1}, r"^rows must be an integer in \[0, 1073741824\], got -1"),
        ({"rows": 48.0}, r"^rows must be an integer in .*got 48.0 \(float\)"),
        ({"rows": 47}, r"^out must be of shape \[rows, hidden\] = \[47, 256\], got \[48, 256\]"),
        ({"inverse": IDS[:5]}, r"^inverse must be of shape \[tokens, topk\]"),
    )
]
CHANGES += [
    (cukern.permute_rows, {"hidden_states": X, "inverse": zeros(48)}, {"inverse": zeros(47)}, r"^inverse must be of"),
    (
        permute_quantized,
        {
            "hidden_states": X, "inverse": IDS, "out_q": zeros(48, HIDDEN, dtype=torch.uint8),
            "out_s": zeros(48, 2, dtype=torch.float32),
        },
        {"out_s": zeros(47, 2, dtype=torch.float32)},
        r"^out_s must be of shape \[rows, hidden / 128\]",
    ),
]  # fmt: skip
CHANGES += [
    (
        cukern.moe_permute,
        {
            "hidden_states": X, "a1q_scale": SCALE, "topk_ids": IDS, "n_expert": 9, "permuted_hidden_states": ROWS,
        },
        *x,
    )
    for x in (
        ({"hidden_states": X[:5]}, r"^topk_ids must be of shape \[tokens, topk\] = \[5, 8\], got \[6, 8\]"),
        ({"a1q_scale": SCALE[:5]}, r"^a1q_scale must be of shape \[tokens, groups\] = \[6, 2\], got \[5, 2\]"),
        ({"permuted_hidden_states": ROWS[:47]}, r"^permuted_hidden_states must be of shape \[rows, hidden\]"),
    )
]  # fmt: skip
CHANGES += [
    (
        cukern.moe_unpermute,
        {"out": X, "permuted_hidden_states": ROWS, "topk_weights": WEIGHTS, "inv_permuted_idx": IDS},
        *x,
    )
    for x in (
        ({"topk_weights": WEIGHTS[:5]}, r"^topk_weights must be of shape \[tokens, topk\]"),
        ({"inv_permuted_idx": IDS[:5]}, r"^inv_permuted_idx must be of shape \[tokens, topk\]"),
        ({"out": X[:5]}, r"^inv_permuted_idx must be of shape \[tokens, topk\]"),
    )
]
CHANGES += [(cukern.moe_sum, {"input": SLOTS, "output": X}, {"output": X[:5]}, r"^output must be of shape")]


@pytest.mark.parametrize(("function", "arguments", "change", "message"), CHANGES)
def test_what_a_decision_does_not_hold_is_checked_at_every_call(
    function: Callable[..., Any],
    arguments: Any,
    change: Any,
    message: str,
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    for _ in range(2):
        function(**arguments)
    launched = len(pretended.launches)
    with pytest.raises((ValueError, TypeError), match=message):
        function(**arguments | change)
    assert len(pretended.launches) == launched


def test_gradients_are_refused_at_every_call(pretended: PretendedGPU) -> None:  # noqa: F811
    x, trained = torch.zeros(6, HIDDEN), torch.zeros(6, HIDDEN, requires_grad=True)
    for function, good, bad, name in (
        (cukern.permute_rows, (x, IDS), (trained, IDS), "hidden_states"),
        (cukern.moe_permute, (x, None, IDS, 9), (trained, None, IDS, 9), "hidden_states"),
        (cukern.moe_unpermute, (x, x, None, IDS), (x, trained, None, IDS), "permuted_hidden_states"),
        (cukern.moe_sum, (x[:, None],), (trained[:, None],), "input"),
    ):
        function(*good)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"^{name} must be a tensor that does not require grad"):
                function(*bad)
        with torch.no_grad():
            function(*bad)


def test_results_go_into_what_out_has(pretended: PretendedGPU) -> None:  # noqa: F811
    row_token = zeros(48)
    for _ in range(2):
        found = cukern.moe_sort(IDS, 9, out=(None, row_token, None))  # type: ignore[arg-type]
        assert found[1] is row_token and found[2].shape == (6, TOPK)
        names = ("offsets", "rows", "inverse")
        fields = pretended.launches[-1].fields
        assert [fields[name] for name in names] == [x.data_ptr() for x in found]
        out = [zeros(10), zeros(48), zeros(6, TOPK)]
        assert cukern.moe_sort(IDS, 9, out=out) is out  # type: ignore[arg-type, comparison-overlap]


def test_a_sum_reads_the_end_of_all_rows(pretended: PretendedGPU) -> None:  # noqa: F811
    for dtype in (torch.int32, torch.int64):
        for _ in range(2):
            offsets = zeros(10, dtype=dtype)
            cukern.moe_unpermute(X, ROWS, WEIGHTS, IDS, offsets)
            assert pretended.launches[-1].fields["offsets"] == offsets[9:].data_ptr()


def test_a_sort_of_many_pairs_counts_into_a_workspace(pretended: PretendedGPU) -> None:  # noqa: F811
    for _ in range(2):
        cukern.moe_sort(zeros(9000, TOPK), EXPERTS)
        counting, second = pretended.launches[-2:]
        functions = [launched.variant.instance.function for launched in (counting, second)]
        assert functions == ["count_pairs", "sort_pairs"]
        assert counting.grid == second.grid and counting.fields["counts"] == second.fields["counts"] != 0
        assert counting.fields["pairs_per_block"] == second.fields["pairs_per_block"]
    config = kernels.choose_sort("int32", TOPK, EXPERTS, EXPERTS, False, gpu.of_arch("H200"), 2**30)
    assert kernels.sort_workspace(config, 72000) == (counting.grid[0] * EXPERTS * 4,)
    few = kernels.choose_sort("int32", TOPK, EXPERTS, EXPERTS, False, gpu.of_arch("H200"), 512)
    assert kernels.sort_workspace(few, 512) == ()


def test_the_classes_of_pairs_are_where_choices_change() -> None:
    bounds = kernels.PAIRS_CLASSES[:-1]
    for pairs in {n + more for n in bounds for more in (-1, 0, 1)} - {bounds[-1] + 1}:
        for variant in ("auto", "one_block", "many_blocks", "counted"):
            for experts in (20, 600):
                arguments = "int32", 8, experts, experts, False, gpu.of_arch("90a")
                exact, config = (
                    kernels.choose_sort(*arguments, n, variant) for n in (pairs, kernels.pairs_class(pairs))
                )
                assert (exact.variant, exact.reason, exact.form) == (config.variant, config.reason, config.form)
                assert (exact.counting is None) == (config.counting is None)
    for copied in (0, 2**19 - 1, 2**19, 2**23 - 1, 2**23, 2**30):
        for width in (1, 2, 4, 8, 16):
            exact, config = (
                kernels.choose_permute("uint8", 2**10, 2, width, 0, n) for n in (copied, kernels.copied_class(copied))
            )
            assert exact.variant is config.variant


# --- parts, below the checks ------------------------------------------------------------------------------


def test_parts_launch_what_the_functions_launch(pretended: PretendedGPU) -> None:  # noqa: F811
    library, where = arrays.library_of(X), gpu.of_arch("H200")
    assert library is not None
    at = library.address

    def same_launches(count: int) -> None:
        once, again = pretended.launches[:count], pretended.launches[count:]
        assert once == again and count == len(again) > 0
        pretended.launches.clear()

    out, mapping = (zeros(5), zeros(48), zeros(6, TOPK)), zeros(EXPERTS)
    cukern.moe_sort(IDS, EXPERTS, expert_map=mapping, num_local_experts=4, out=out)
    sorts = kernels.choose_sort("int32", TOPK, EXPERTS, 4, True, where, kernels.pairs_class(48))
    workspace = [0 for _ in kernels.sort_workspace(sorts, 48)]
    sorting.launch_sort(sorts, library, 0, at(IDS), at(mapping), *map(at, out), 48, workspace)
    same_launches(1)

    cukern.permute_rows(X, IDS, out=ROWS)
    width = kernels.width_of("x", "bfloat16", HIDDEN, HIDDEN, at(X), at(ROWS))
    copies = kernels.choose_permute("bfloat16", HIDDEN, TOPK, width, 0, kernels.copied_class(X.nbytes))
    rows.launch_permute(copies, library, 0, at(X), at(IDS), at(ROWS), 6, 48, HIDDEN)
    assert pretended.launches[0].fields["row_stride"] == HIDDEN * 2 // width
    same_launches(1)

    q, scale = zeros(48, HIDDEN, dtype=torch.uint8), zeros(48, 2, dtype=torch.float32)
    permute_quantized(X, IDS, out_q=q, out_s=scale)
    quantizes = kernels.choose_permute_quantized("bfloat16", HIDDEN, TOPK)
    rows.launch_permute_quantized(quantizes, library, 0, at(X), at(IDS), at(q), at(scale), 6, 48, HIDDEN)
    same_launches(1)

    cukern.moe_unpermute(X, ROWS, WEIGHTS, IDS)
    sums = kernels.choose_unpermute("bfloat16", HIDDEN, TOPK, width)
    rows.launch_unpermute(sums, library, 0, at(X), at(ROWS), at(WEIGHTS), at(IDS), 0, 6, 48, HIDDEN)
    assert pretended.launches[0].fields["row_stride"] == HIDDEN * 2 // width
    same_launches(1)

    for launch, config in ((rows.launch_permute, copies), (rows.launch_permute_quantized, quantizes)):
        for tokens, count in ((0, 48), (6, 0)):
            launch(config, library, 0, *[1] * (3 if launch is rows.launch_permute else 4), tokens, count, HIDDEN)
    assert not pretended.launches


def test_parts_of_a_description_have_their_addresses() -> None:
    def layer(workspace: Any, x: Any, inverse: Any) -> Any:
        """Copies into a part, from a slice of rows of another one."""
        part = workspace.view((9, 24), "float16", 512)
        views = [read("a part", array) for array in (workspace, part, part[1:], part[3:7], workspace)]
        assert [view.address - views[0].address for view in views] == [0, 512, 512 + 48, 512 + 144, 0]
        assert [view.strides for view in views[1:4]] == [(24, 1)] * 3 and views[3].shape == (4, 24)
        cukern.permute_rows(part[1:3], inverse, out=x)
        short = workspace.view((9, 3), "float16", 512)
        cukern.permute_rows(short[1:3], inverse, out=workspace.view((4, 3), "float16", 1024))
        return x

    workspace, x, inverse = np.zeros(4096, np.uint8), np.zeros((4, 24), np.float16), np.zeros((2, 2), np.int32)
    skip = -workspace.ctypes.data % 16
    aligned = workspace[skip : skip + 2048]
    trace, _ = Described(layer, (aligned, x, inverse), {}).trace(gpu.of_arch("90a"))
    wide, narrow = trace.steps
    assert (wide.fields["src"].source, wide.fields["src"].offset) == (0, 560)
    assert (wide.fields["out"].source, wide.fields["out"].offset) == (1, 0)
    assert (narrow.fields["src"].offset, narrow.fields["out"].offset) == (518, 1024)
    assert [step.variant.instance.arguments[0] for step in (wide, narrow)] == [16, 2]


def test_arrays_that_are_known_by_dlpack_alone() -> None:
    ids, x = np.array([[1, 0], [0, 1]], np.int32), np.ones((2, 3), np.float32)
    out = tuple(OnlyDLPack(np.full(n, 7, np.int32)) for n in (3, 4, (2, 2)))
    assert cukern.moe_sort(OnlyDLPack(ids), 2, out=out) is out
    scale = OnlyDLPack(np.ones(1, np.float32))
    found = cukern.moe_permute(OnlyDLPack(x), scale, OnlyDLPack(ids), 2)
    assert found[1] is scale and found[4] is None


def test_choices_are_bounded(chosen: list[str], pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(sorting, "_MAX_CHOICES", 3)
    for topk in range(1, 8):
        cukern.permute_rows(X, zeros(6 * topk))
    (decision,) = rows.ROWS._found[()]
    assert len(chosen) == 7 and 1 <= len(decision.choices) <= 3
