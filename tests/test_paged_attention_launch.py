"""Calls of paged attention on a GPU that is not there: what a call like one before repeats, and what it checks."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch

import cukern
from cukern.ops import paged_attention as op
from cukern.ops.paged_attention import choose as kernels
from cukern.ops.paged_attention import launch as calls
from cukern.ops.paged_attention import merge
from cukern.runtime import gpu
from cukern.runtime.decisions import Decisions
from tests.pretended import PretendedGPU, pretended  # noqa: F401

HALF = {"dtype": torch.float16}
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 64, 16
KEYS, VALUES = torch.zeros(9, KV_HEADS, DIM // 8, BLOCK, 8, **HALF), torch.zeros(9, KV_HEADS, DIM, BLOCK, **HALF)
ONE = torch.ones(1)


class GPU(NamedTuple):
    """An H200 that is not there, and the calls that were checked."""

    pretended: PretendedGPU
    checked: list[Any]

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the last launch."""
        return self.pretended.launches[-1].fields


@pytest.fixture
def h200(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> GPU:  # noqa: F811
    checked: list[Any] = []
    for module, name in ((calls, "_check_call"), (merge, "_decide")):
        check = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, check=check: [checked.append(args), check(*args)][1])
    monkeypatch.setattr(gpu, "of_device", lambda device: gpu.of_arch("H200"))
    for module, name in ((calls, "DECISIONS"), (merge, "_BY_TOKENS"), (merge, "_BY_HEADS")):
        monkeypatch.setattr(module, name, Decisions(*getattr(module, name)._free))
    return GPU(pretended, checked)


def batch(seqs: int, width: int = 8, row: int = 0) -> tuple[torch.Tensor, ...]:
    """The arrays of `paged_attention` but for the caches. Rows of the tables are `row` elements apart, or `width`."""
    tables = torch.zeros(seqs, max(row, width), dtype=torch.int32)[:, :width]
    return torch.zeros(seqs, HEADS, DIM, **HALF), tables, torch.zeros(seqs, dtype=torch.int32)


def attend(x: tuple[torch.Tensor, ...], **options: Any) -> Any:
    query, *places = x
    return cukern.paged_attention(query, KEYS, VALUES, *places, **options)


def v1(x: tuple[torch.Tensor, ...], out: Any = None, spaces: Any = (), **changes: Any) -> None:
    query, tables, lengths = x
    given = {"scale": 0.25, "max_seq_len": 128, "k_scale": None, "v_scale": None, **changes}
    function = cukern.paged_attention_v2 if spaces else cukern.paged_attention_v1
    function(
        torch.empty_like(query) if out is None else out, *spaces, query, KEYS, VALUES, KV_HEADS, given["scale"], tables,
        lengths, BLOCK, given["max_seq_len"], None, "auto", given["k_scale"], given["v_scale"],
    )  # fmt: skip


def spaces_of(seqs: int, partitions: int) -> tuple[torch.Tensor, ...]:
    shape = seqs, HEADS, partitions
    return torch.zeros(shape), torch.zeros(shape), torch.zeros(*shape, DIM, **HALF)


# --- what is repeated -----------------------------------------------------------------------------------

#: Sequences, width of the tables, and the distance of their rows: in clusters, pairs, blocks each, and a queue.
SIZES = [
    (3, 8, 0),
    (1, 8, 0),
    (3, 300, 0),
    (40, 8, 11),
    (40, 300, 300),
    (200, 9, 0),
    (999, 700, 703),
    (0, 8, 0),
    (7, 0, 0),
]
POINTERS = ("query", "tables", "lengths", "out", "lse", "partial", "maxima", "sums", "taken", "arrived", "counters")


def launches_of(h200: GPU, *args: Any, **options: Any) -> list[Any]:
    """What a call launches, but for the addresses of what it makes and of what differs between equal calls."""
    start = len(h200.pretended.launches)
    attend(*args, **options)
    return [
        launch._replace(fields={name: x for name, x in launch.fields.items() if name not in POINTERS or not x})
        for launch in h200.pretended.launches[start:]
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_lse": True},
        {"window": 5, "softcap": 2, "k_scale": 0.5, "v_scale": ONE},
        {"split": 64},
        {"k_scale": ONE},
    ],
    ids=str,
)
def test_a_call_of_other_sizes_launches_what_a_first_one_does(h200: GPU, options: dict[str, Any]) -> None:
    first = []
    for sizes in SIZES:
        first.append(launches_of(h200, batch(*sizes), **options))
        calls.DECISIONS.clear()
    attend(batch(5), **options)
    del h200.checked[:]
    again = [launches_of(h200, batch(*sizes), **options) for sizes in SIZES]
    assert again == first and not h200.checked
    assert [len(launches) for launches in again].count(2) >= 2 and again[-2] == []
    assert len({launches[-1].variant for launches in again if launches}) >= (1 if "split" in options else 3)


def test_a_choice_is_made_once_for_sizes(h200: GPU) -> None:
    kernels.choose.cache_clear()
    for _ in range(3):
        for seqs in (3, 4, 5):
            attend(batch(seqs))
    attend(batch(3), window=4)
    attend(batch(3, 9))
    assert kernels.choose.cache_info().misses == 5 and len(h200.checked) == 2


def test_a_cache_without_blocks_has_room_for_no_token(h200: GPU) -> None:
    for seqs in (3, 4):
        query, *places = batch(seqs)
        cukern.paged_attention(query, KEYS[:0], VALUES[:0], *places)
        assert (h200.fields["blocks"], h200.fields["max_blocks"], h200.fields["seqs"]) == (0, 0, seqs)


def test_choices_are_bounded(h200: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_MOST_CHOICES", 4)
    for seqs in (3, 4, 5, 6, 7, 8, 3):
        attend(batch(seqs))
        assert h200.fields["seqs"] == seqs
    (decisions,) = calls.DECISIONS._found.values()
    assert len(decisions[0].choices) <= 4 and len(h200.checked) == 1


def test_scales_may_differ_at_each_call(h200: GPU) -> None:
    x = batch(3)
    for scale, key, value in ((0.5, 2, 3.0), (2, 0.25, 1), (None, None, None), (1.0, None, 7)):
        attend(x, scale=scale, k_scale=key, v_scale=value)
        wanted = (DIM**-0.5 if scale is None else scale) * (1 if key is None else key), 1 if value is None else value
        assert (h200.fields["scale"], h200.fields["out_scale"]) == wanted
        v1(x, scale=scale or 3, k_scale=key, v_scale=value)
        assert h200.fields["scale"] == (scale or 3) * (key or 1)
    attend(x, k_scale=ONE, v_scale=ONE)
    attend(x, k_scale=ONE, v_scale=ONE)
    assert h200.fields["key_scale"] == h200.fields["value_scale"] == ONE.data_ptr()
    other = torch.ones(1)
    attend(x, k_scale=ONE, v_scale=other)
    assert (h200.fields["key_scale"], h200.fields["value_scale"]) == (ONE.data_ptr(), other.data_ptr())


def test_results_go_into_what_out_has(h200: GPU) -> None:
    x = batch(3)
    out, lse = torch.zeros(3, HEADS, DIM, **HALF), torch.zeros(3, HEADS)
    for pair in ((out, lse), (out, None), (None, lse)):
        for _ in range(2):
            found = attend(x, return_lse=True, out=pair)
            assert (found is pair) == (None not in pair)
            assert all(given is None or given is got for given, got in zip(pair, found, strict=True))
            assert [*map(list, (y.shape for y in found))] == [[3, HEADS, DIM], [3, HEADS]]
            assert (h200.fields["out"], h200.fields["lse"]) == tuple(y.data_ptr() for y in found)
    for _ in range(2):
        assert attend(x, out=out) is out and h200.fields["lse"] == 0
    assert attend(x).shape == out.shape


def test_what_is_specialized_later_is_chosen(h200: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "registered", set())
    monkeypatch.setattr(op, "DECISIONS", calls.DECISIONS)
    kernels.choose.cache_clear()
    found = []
    for _ in range(2):
        attend(batch(3))
        found.append(h200.pretended.launches[-1].variant.instance.arguments[3])
        op.specialize(head_dim=DIM, block_size=BLOCK)
    assert found == [0, DIM]
    kernels.choose.cache_clear()


# --- what is checked at every call ----------------------------------------------------------------------


def test_what_a_decision_does_not_hold_is_checked_at_every_call(h200: GPU) -> None:
    x, out, lse = batch(3), torch.zeros(3, HEADS, DIM, **HALF), torch.zeros(3, HEADS)
    query, tables, lengths = x
    for _ in range(2):
        attend(x, out=(out, lse), return_lse=True, k_scale=0.5)
    good = {"out": (out, lse), "return_lse": True, "k_scale": 0.5}
    count = len(h200.pretended.launches)
    flat = torch.zeros(3 * HEADS * DIM + 1, **HALF)
    odd = [
        ((query, tables, lengths[:2]), {}, "seq_lens must be of shape [seqs] = [3], got [2]"),
        ((query, tables[:2], lengths), {}, "block_tables must be of shape [seqs, max_blocks] = [3, 8], got [2, 8]"),
        ((query[:2], tables, lengths), {}, "block_tables must be of shape [seqs, max_blocks] = [2, 8], got [3, 8]"),
        ((query, torch.zeros(3, 16, dtype=torch.int32)[:, ::2], lengths), {}, "block_tables must be contiguous along"),
        (x, {"out": (out[:2], lse)}, "out[0] must be of shape query's = [3, 8, 64], got [2, 8, 64]"),
        (x, {"out": (out, lse[:2])}, "out[1] must be of shape query's without head_dim = [3, 8], got [2, 8]"),
        (x, {"out": (flat[1:].view(out.shape), lse)}, "out[0] must be at a multiple of 16 bytes, got an address"),
        (x, {"scale": float("inf")}, "scale must be a finite number, got inf"),
        (x, {"scale": torch.ones(())}, "scale must be a number, got an array (Tensor)"),
        (x, {"scale": "1"}, "scale must be a number, got '1' (str)"),
        (x, {"k_scale": float("nan")}, "k_scale must be a finite number, got nan"),
        (x, {"v_scale": True}, "v_scale must be a number, got True (bool)"),
        (x, {"scale": 1e20, "k_scale": 1e20}, "scale must be of at most 1e+30, with k_scale, got 1e+40"),
        (x, {"k_scale": torch.ones(2)}, "k_scale must be a number or an array of one element"),
        (x, {"window": torch.ones((), dtype=torch.int32)}, "window must be a number, got an array (Tensor)"),
        (x, {"window": True}, "window must be an integer of at least 1, got True (bool)"),
        (x, {"return_lse": 2}, "return_lse must be one of False, True, got 2"),
        (x, {"variant": "specialized", "softcap": 0}, "softcap must be in [1e-30, 1e30], got 0.0"),
    ]  # fmt: skip
    for args, changes, message in odd:
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
                attend(args, **good | changes)
    assert len(h200.pretended.launches) == count
    del h200.checked[:]
    attend(x, **good)
    assert not h200.checked


def test_the_alignment_of_a_call_is_its_own(h200: GPU) -> None:
    _, *places = batch(3)
    flat = torch.zeros(3 * HEADS * DIM + 8, **HALF)
    functions = []
    for start in (0, 1, 8, 1):
        attend((flat[start : start + 3 * HEADS * DIM].view(3, HEADS, DIM), *places))
        functions.append(h200.pretended.launches[-1].variant.instance.function)
    assert functions == ["attend", "attend_scalar", "attend", "attend_scalar"] and len(h200.checked) == 1
    attend(batch(3), variant="dynamic")
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^variant must be 'auto' or 'scalar' here, got 'dynamic': an array or one"
        ):
            attend((flat[1 : 1 + 3 * HEADS * DIM].view(3, HEADS, DIM), *places), variant="dynamic")


def test_a_stride_that_one_sequence_does_not_need_is_checked_for_more(h200: GPU) -> None:
    def every_other(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x], 1)[:, 0]

    query, tables, lengths = batch(4)
    out, lse = torch.zeros_like(query), torch.zeros(4, HEADS)
    good: dict[str, Any] = {"lengths": lengths, "out": out, "lse": lse}
    for name, message in (("lengths", "seq_lens"), ("out", r"out\[0\]"), ("lse", r"out\[1\]")):
        own = {**good, name: every_other(good[name])}
        attend((query[:1], tables[:1], own["lengths"][:1]), out=(own["out"][:1], own["lse"][:1]), return_lse=True)
        with pytest.raises(ValueError, match=f"^{message} must be contiguous, got strides"):
            attend((query, tables, own["lengths"]), out=(own["out"], own["lse"]), return_lse=True)
    # The same for columns, of which there may be one, and for a query of no sequence.
    wide = torch.zeros(4, 16, dtype=torch.int32)[:, ::2]
    attend((query, wide[:, :1], lengths))
    with pytest.raises(ValueError, match=r"^block_tables must be contiguous along its last dimension"):
        attend((query, wide, lengths))
    wide = torch.zeros(4, HEADS, 2 * DIM, **HALF)[..., ::2]
    attend((wide[:0], tables[:0], lengths[:0]))
    with pytest.raises(ValueError, match=r"^query must be contiguous along its last dimension"):
        attend((wide, tables, lengths))


def test_vllms_workspaces_are_checked_at_every_call(h200: GPU) -> None:
    for seqs, partitions in ((3, 2), (5, 7), (3, 1), (3, 2)):
        exp_sums, max_logits, tmp_out = spaces = spaces_of(seqs, partitions)
        v1(batch(seqs), None, spaces, max_seq_len=512 * partitions)
        fields = [h200.fields[name] for name in ("partial", "maxima", "sums", "max_splits", "split", "vllm_workspace")]
        assert fields == [tmp_out.data_ptr(), max_logits.data_ptr(), exp_sums.data_ptr(), partitions, 512, 1]
    assert len(h200.checked) == 1
    exp_sums, max_logits, tmp_out = spaces_of(3, 2)
    shifted = torch.zeros(tmp_out.numel() + 1, **HALF)[1:].view(tmp_out.shape)
    count = len(h200.pretended.launches)
    for given, most, message in (
        ((exp_sums, max_logits, tmp_out), 1025, "exp_sums must be of at least 3 partitions (of 512 of max_seq_len"),
        ((exp_sums, max_logits, tmp_out), -1, "max_seq_len must be an integer of at least 0, got -1"),
        ((exp_sums, max_logits, tmp_out), None, "max_seq_len must be an integer of at least 0, got None (NoneType)"),
        ((exp_sums, max_logits, tmp_out), ONE, "max_seq_len must be a number, got an array (Tensor)"),
        ((exp_sums[:2], max_logits, tmp_out), 9, "exp_sums must be of shape [seqs, heads, max_partitions] = [3, 8, 2]"),
        ((exp_sums, max_logits[..., :1], tmp_out), 9, "max_logits must be of shape"),
        ((exp_sums[..., :1], max_logits[..., :1], tmp_out[..., :1, :]), 9, "exp_sums must be contiguous"),
        ((exp_sums, max_logits, spaces_of(3, 3)[2][:, :, :2]), 9, "tmp_out must be contiguous"),
        ((spaces_of(3, 3)[0][..., :2], max_logits, tmp_out), 9, "exp_sums must be contiguous"),
        ((exp_sums, spaces_of(3, 3)[1][..., :2], tmp_out), 9, "max_logits must be contiguous"),
        ((exp_sums, max_logits, shifted), 9, "tmp_out must be at a multiple of 16 bytes, got an address"),
        ((exp_sums, None, tmp_out), 9, "max_logits must be a torch array like query, got builtins.NoneType"),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
                v1(batch(3), None, given, max_seq_len=most)
    for most in (-1, 2.0, None):
        with pytest.raises((TypeError, ValueError), match=r"^max_seq_len must be an integer of at least 0"):
            v1(batch(3), max_seq_len=most)
    for out, message in ((torch.zeros(2, HEADS, DIM, **HALF), "of shape"), (None, None)):
        v1(batch(3), out if message is None else None)
        if message:
            with pytest.raises(ValueError, match=f"^out must be {message}"):
                v1(batch(3), out)
    with pytest.raises(TypeError, match=r"^scale must be a number, got None \(NoneType\)"):
        v1(batch(3), scale=None)
    assert len(h200.pretended.launches) == count + 2


def test_gradients_are_refused_at_every_call(h200: GPU) -> None:
    query, *places = batch(3)
    attend((query, *places))
    learned = query.clone().requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^query must be a tensor that does not require grad"):
            attend((learned, *places))
        with torch.no_grad():
            attend((learned, *places))
    side = torch.zeros(3, 2, 8), torch.zeros(3, 2)
    cukern.merge_attention_states(*side, *side)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^out_b must be a tensor that does not require grad"):
            cukern.merge_attention_states(*side, side[0].clone().requires_grad_(), side[1])


def test_two_devices(h200: GPU) -> None:
    for device in (0, 1, 0, 1):
        h200.pretended.device = device
        attend(batch(40, 300))
    launches = h200.pretended.launches
    assert [(x.device, x.stream) for x in launches] == [(d, 77 + d) for d in (0, 0, 1, 1) * 2]
    assert len(h200.checked) == 2 and h200.pretended.current == 0


# --- merging --------------------------------------------------------------------------------------------


def sides(
    tokens: int, heads: int = 4, dim: int = 8, heads_first: bool = False, outer: tuple[int, ...] = ()
) -> list[Any]:
    by = (heads, tokens) if heads_first else (tokens, heads)
    return [torch.zeros(*outer, *shape) for shape in ((tokens, heads, dim), by) * 2]


@pytest.mark.parametrize("outer", [(), (2,)], ids=["", "outer"])
@pytest.mark.parametrize("heads_first", [False, True], ids=["", "heads first"])
def test_the_number_of_states_is_free(h200: GPU, heads_first: bool, outer: tuple[int, ...]) -> None:
    given = {"lse_heads_first": heads_first}
    cukern.merge_attention_states(*sides(5, heads_first=heads_first, outer=outer), **given)
    for tokens in (5, 1, 0, 700, 3) if not outer else (5,) * 3:
        a = sides(tokens, heads_first=heads_first, outer=outer)
        out, lse = cukern.merge_attention_states(*a, **given)
        assert out.shape == a[0].shape and lse.shape == a[1].shape
        if tokens:
            fields, launch = h200.fields, h200.pretended.launches[-1]
            assert fields["rows"] == out[..., 0].numel() and fields["out_b"] == a[2].data_ptr()
            assert fields["tokens"] == (tokens if heads_first else 0)
            assert launch.grid == (-(-out.numel() // (4 * 128)), 1, 1)
    # An empty array has other strides than an array with elements.
    assert len(h200.checked) == 1 + (heads_first and not outer)


def test_states_are_checked_at_every_call(h200: GPU) -> None:
    a = sides(3)
    out = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    assert cukern.merge_attention_states(*a, out=out) is out
    assert cukern.merge_attention_states(*a, out=(a[0], out[1]))[0] is a[0]
    assert h200.fields["out"] == h200.fields["out_a"] == a[0].data_ptr()
    count = len(h200.pretended.launches)
    for i, name in enumerate(("out_a", "lse_a", "out_b", "lse_b")):
        changed = [x[:2] if i == j else x for j, x in enumerate(a)]
        with pytest.raises(ValueError, match=f"^{name if i else 'out_b'} must be of shape"):
            cukern.merge_attention_states(*changed, out=out)
    for pair, message in (
        ((out[0][:2], out[1]), r"out\[0\] must be of shape"),
        ((out[0], out[1][:2]), r"out\[1\] must be of shape"),
        ((out[0], a[1]), r"out\[1\] must be another array than lse_a and lse_b"),
        ((out[0], a[3]), r"out\[1\] must be another array than lse_a and lse_b"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^{message}"):
                cukern.merge_attention_states(*a, out=pair)
    first = sides(3, heads_first=True)
    cukern.merge_attention_states(*first, lse_heads_first=True)
    wide = torch.zeros(4, 6)[:, :3]
    with pytest.raises(ValueError, match=r"^lse_b must be contiguous"):
        cukern.merge_attention_states(*first[:3], wide, lse_heads_first=True)
    for shape in ((4, 2), (5, 3)):
        with pytest.raises(ValueError, match=r"^lse_a must be of shape \[..., heads, tokens\] of out_a = \[4, 3\]"):
            cukern.merge_attention_states(first[0], torch.zeros(shape), *first[2:], lse_heads_first=True)
    assert len(h200.pretended.launches) == count + 1


def test_a_stride_that_one_state_does_not_need_is_checked_for_more(h200: GPU) -> None:
    a = sides(3)
    for i, name in enumerate(("out_a", "lse_a", "out_b", "lse_b")):
        own = [torch.stack([x, x], 1)[:, 0] if i == j else x for j, x in enumerate(a)]
        cukern.merge_attention_states(*[x[:1] for x in own])
        with pytest.raises(ValueError, match=f"^{name} must be contiguous"):
            cukern.merge_attention_states(*own)


def test_the_kernel_of_states_follows_from_alignment_and_number(h200: GPU, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_MANY_MERGED", 100)
    found = []
    flat = torch.zeros(5 * 32 + 1)
    for tokens, start in ((3, 0), (3, 1), (5, 0), (5, 1), (3, 0)):
        a = sides(tokens)
        a[2] = flat[start : start + tokens * 32].view(tokens, 4, 8)
        cukern.merge_attention_states(*a)
        found.append(h200.pretended.launches[-1].variant.instance.arguments[1:])
    assert found == [(4, "false", 1, "true"), (1, "false"), (4, "false", 2, "true"), (1, "false"), found[0]]
    assert len(h200.checked) == 4


def test_one_tensor_may_be_several_arguments(h200: GPU) -> None:
    a = sides(3)
    for given in (a, [a[0], a[1], a[0], a[1]], a, [a[0], a[1], a[0], a[1]], [x.clone() for x in a]):
        cukern.merge_attention_states(*given)
        fields = h200.fields
        assert [fields[name] for name in ("out_a", "lse_a", "out_b", "lse_b")] == [x.data_ptr() for x in given]
    assert len(h200.checked) == 2
