"""The launch of plain functions: its device, thread, stream and struct; and what is read of arrays."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.ops.moe_gate import choose as gates
from cukern.ops.moe_gate import launch as gate_calls
from cukern.runtime import arrays, kernel, template
from cukern.runtime.decisions import Decisions
from cukern.runtime.view import READERS, read, read_like
from tests.buffers import OnlyDLPack
from tests.pretended import PretendedGPU, pretended  # noqa: F401

X, BIAS = torch.zeros(3, 256), torch.zeros(256)


def call(x: Any = X, bias: Any = BIAS, **options: Any) -> Any:
    return cukern.moe_fused_gate(x, bias, 8, 4, 8, **options)


def test_the_device_of_the_arrays(pretended: PretendedGPU) -> None:  # noqa: F811
    pretended.device = 1
    call()
    pretended.device = 0
    call()
    assert [(x.device, x.stream) for x in pretended.launches] == [(1, 78), (0, 77)]
    assert pretended.current == 0


def test_a_thread_gets_a_context_at_its_first_launch_on_a_device(pretended: PretendedGPU) -> None:  # noqa: F811
    for _ in range(2):
        call()
    assert pretended.set_devices == [0]
    threads = [threading.Thread(target=lambda: [call(), call()]) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert pretended.set_devices == [0, 0, 0] and len(pretended.launches) == 6


def test_nothing_is_launched_for_no_rows(pretended: PretendedGPU) -> None:  # noqa: F811
    weights, ids = call(X[:0])
    assert weights.shape == ids.shape == (0, 8) and not pretended.launches


def test_gradients_are_refused_at_every_call(pretended: PretendedGPU) -> None:  # noqa: F811
    out = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int32)
    call(out=out)
    for name, arguments in (
        ("bias", {"bias": BIAS.clone().requires_grad_()}),
        (r"out\[0\]", {"out": (out[0].clone().requires_grad_(), out[1])}),
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"^{name} must be a tensor that does not require grad"):
                call(**arguments)
        with torch.no_grad():
            call(**arguments)
    assert len(pretended.launches) == 3


def test_results_go_into_what_out_has(pretended: PretendedGPU) -> None:  # noqa: F811
    ids = torch.zeros(3, 8, dtype=torch.int32)
    weights, returned = call(out=(None, ids))
    assert returned is ids and weights.shape == (3, 8)
    (launched,) = pretended.launches
    assert (launched.fields["weights"], launched.fields["ids"]) == (weights.data_ptr(), ids.data_ptr())


def test_a_variant_is_loaded_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    variant, loads = gates._dynamic("float32", 16, 16), list[int]()
    monkeypatch.setattr(kernel.Variant, "launcher", lambda self, device: f"launcher {device}")
    monkeypatch.setattr(kernel.Variant, "load", lambda self, device: loads.append(device) or 100 + device)
    ready = kernel._Ready(variant)
    assert [ready[device] for device in (0, 1, 0)] == [("launcher 0", 100), ("launcher 1", 101), ("launcher 0", 100)]
    assert loads == [0, 1]


def test_every_field_has_a_value() -> None:
    file, function = "moe_gate/gate_by_thread", "gate_by_thread"
    names = [*template.params(file, function).fields]
    pack = template.packer(file, function, ["bias", *reversed(names[2:])], dict.fromkeys(names[:2], 7))
    assert pack.order is not None and pack.fixed == {"logits": 7, "weights": 7}
    values = (0, *range(len(names) - 2))
    assert pack.fields(values) == {"logits": 7, "weights": 7} | dict(zip(reversed(names[2:]), values[1:], strict=True))
    buffer = bytearray(template.params(file, function).size)
    pack.into(buffer, 0, *pack.order(values + pack.known))
    layout = template.params(file, function)
    ordered = template.packer(file, function, names, {})
    again = bytearray(layout.size)
    assert ordered.order is None
    ordered.into(again, 0, *[pack.fields(values)[name] for name in names], *ordered.known)
    assert again == buffer
    with pytest.raises(template.TemplateError, match="gate_by_thread has the field tokens, which no call gives"):
        template.packer(file, function, [name for name in names if name != "tokens"], {})


# --- decisions ------------------------------------------------------------------------------------------


@pytest.fixture
def chosen(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: F811
    """The calls of gates that check and choose, as a list that grows."""
    found: list[Any] = []
    decide = gate_calls._decide
    monkeypatch.setattr(gate_calls, "_decide", lambda *args: [found.append(args), decide(*args)][1])
    monkeypatch.setattr(gate_calls, "DECISIONS", Decisions((0,), (0,), (0,), (), ()))
    return found


def test_a_call_like_one_before_does_not_choose(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    for rows in (3, 2, 3, 512):
        call(torch.zeros(rows, 256))
    assert len(chosen) == 1
    for rows in (0, 0, 3):
        call(torch.zeros(rows, 256))
    assert len(chosen) == 2
    for rows in (513, 513):  # of another class
        call(torch.zeros(rows, 256))
    call(torch.zeros(3, 257)[:, 1:])  # of other alignment and strides
    assert len(chosen) == 4
    assert [x.fields["tokens"] for x in pretended.launches] == [3, 2, 3, 512, 3, 513, 513, 3]
    assert [x.fields["row_stride"] for x in pretended.launches] == [256] * 7 + [257]


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.zeros(3, 256, dtype=torch.bfloat16)},
        {"x": torch.zeros(3, 512)[:, :256]},
        {"bias": torch.zeros(256, dtype=torch.float64)},
        {"scoring_func": "softmax"},
        {"renormalize": False},
        {"num_token_non_padded": torch.zeros(1, dtype=torch.int32)},
        {"out": (torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int32))},
        {"out": (None, torch.zeros(3, 8, dtype=torch.int32))},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_another_call_chooses(chosen: list[Any], pretended: PretendedGPU, changes: Any) -> None:  # noqa: F811
    call()
    call(**changes)
    assert len(chosen) == 2
    call(**changes)
    call()
    assert len(chosen) == 2
    with pytest.raises((TypeError, ValueError)):
        cukern.moe_fused_gate(X, BIAS, 8, 4, True)
    with pytest.raises((TypeError, ValueError)):
        cukern.moe_fused_gate(X, BIAS, 8, 4, 8.0)  # type: ignore[arg-type]


def test_what_a_decision_does_not_hold_is_checked_at_every_call(pretended: PretendedGPU) -> None:  # noqa: F811
    out = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.int32)
    call(out=out)
    call(num_token_non_padded=2)
    assert pretended.launches[-1].fields["valid"] == 2
    with pytest.raises(ValueError, match=r"^out\[0\] must be of shape \[tokens, topk\] = \[2, 8\], got \[3, 8\]"):
        call(X[:2], out=out)
    with pytest.raises(ValueError, match=r"^out\[1\] must be of shape"):
        call(X[:2], out=(out[0][:2], out[1]))
    for count in (-1, 4):
        with pytest.raises(ValueError, match=r"^num_token_non_padded must be an integer in \[0, 3\]"):
            call(num_token_non_padded=count)
    for other in (BIAS.tolist(), BIAS[:255], BIAS.numpy(), BIAS.long()):
        with pytest.raises((TypeError, ValueError), match=r"^bias must be"):
            call(bias=other)
    assert len(pretended.launches) == 2


def test_strides_of_few_rows_are_no_strides_of_many(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    wide = torch.zeros(3, 16), torch.zeros(3, 16, dtype=torch.int32)
    out = wide[0][:, :8], wide[1][:, :8]
    call(X[:1], out=(out[0][:1], out[1][:1]))
    with pytest.raises(ValueError, match=r"^out\[0\] must be contiguous"):
        call(out=out)
    sparse = torch.zeros(3, 512)[:, ::2]
    call(sparse[:0])
    with pytest.raises(ValueError, match=r"^input must be contiguous along its last dimension"):
        call(sparse)
    assert len(pretended.launches) == 1


def test_one_misaligned_row_is_not_many(chosen: list[Any], pretended: PretendedGPU) -> None:  # noqa: F811
    rows = torch.zeros(600, 257)[:, :256]
    for x in (rows, rows[:1], rows[:100]):
        call(x)
    kernels = [str(launched.variant).partition("<")[0] for launched in pretended.launches]
    assert kernels == ["Variant(moe_gate", "Variant(gate_by_warp", "Variant(moe_gate"]


def test_more_tokens_than_a_decision_takes(pretended: PretendedGPU) -> None:  # noqa: F811
    call(X[:1].expand(600, 256), BIAS)
    with pytest.raises(ValueError, match=r"^input must be of at most 1073741824 tokens"):
        call(X[:1].expand(2**30 + 1, 256), BIAS)


def test_a_number_that_may_change_is_read_at_every_call(pretended: PretendedGPU) -> None:  # noqa: F811
    factor = np.array(2.0)
    for value in (2.0, 5.0):
        factor[()] = value
        cukern.moe_fused_gate(X, BIAS, 8, 4, 8, 0, factor, apply_routed_scaling_factor_on_output=True)  # type: ignore[arg-type]
    assert [launched.fields["output_scale"] for launched in pretended.launches] == [2.0, 5.0]


def test_an_array_for_a_number_is_refused(pretended: PretendedGPU) -> None:  # noqa: F811
    with pytest.raises(TypeError, match=r"^routed_scaling_factor must be a number, got an array \(Tensor\)"):
        cukern.moe_fused_gate(X, BIAS, 8, 4, 8, 0, torch.tensor(2.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^topk must be an integer of at least 1, got an array \(Tensor\)"):
        cukern.moe_fused_gate(X, BIAS, 8, 4, torch.tensor(8))  # type: ignore[arg-type]
    assert not pretended.launches


def test_one_tensor_twice_is_like_itself_twice(pretended: PretendedGPU) -> None:  # noqa: F811
    library = arrays.library_of(X)
    assert library is not None
    free: tuple[int, ...]
    for free, other, wanted in (((0,), X[:2], True), ((), X[:2], False), ((0,), X.long(), False), ((0,), BIAS, False)):
        is_alike = type(library).alike(library, [X, X], [free, free])
        assert is_alike(X, X) and is_alike(other, X) is wanted


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_alike_arrays_differ_in_addresses_and_rows_alone(make: Any) -> None:
    array, other = np.zeros((4, 6), np.float32), np.zeros(7, np.int32)
    library = arrays.library_of(make(array))
    assert library is not None
    is_alike = library.alike([make(array), make(other)], [(0,), ()])
    for one, two, wanted in (
        (array[:2], other.copy(), True),
        (array[:0], other, True),
        (array[:, :5], other, False),
        (array[::2], other, False),
        (array.astype(np.float64), other, False),
        (array, other[:6], False),
        (array, other[None], False),
        (array[:, :, None], other, False),
    ):
        assert is_alike(make(one), make(two)) is wanted
    is_alike = library.alike([make(array)], [(0, 1)])  # such as a table: the distance of its rows is free too
    assert is_alike(make(array[:3, :5])) and not is_alike(make(array[:, ::2])) and not is_alike(make(array[0]))


def test_decisions_are_bounded() -> None:
    decisions = Decisions((0,), ())
    library = arrays.library_of(X)
    assert library is not None
    for width in range(1, 40):
        decisions.keep((1,), (torch.zeros(2, width), None), library, 0, width)
    found = decisions.find((1,), (torch.zeros(5, 39), None))
    assert found is not None and found.own == 39
    assert decisions.find((1,), (torch.zeros(5, 2), None)) is None
    assert decisions.find(([],), (X,)) is None
    for number in range(3000):
        decisions.keep((number,), (X,), library, 0, 1)
    assert len(decisions._found) <= 1024


# --- views ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, OnlyDLPack], ids=["numpy", "torch", "foreign"])
def test_what_is_read_of_an_array(make: Any) -> None:
    array = make(np.zeros((4, 6), np.float32)[::2, 1:])
    view = read("x", array, ("float32",), ("rows", "columns"))
    assert view[3:7] == ("float32", (2, 5), (12, 1), None) and not view.is_contiguous
    assert (view.foreign or view.array) is array if make is OnlyDLPack else view.foreign is None and view.array is array


def test_what_is_no_array_is_refused_by_its_type() -> None:
    like = read("x", np.zeros(2, np.float32))
    for value in ([1.0], None, "x", 3, np.float32(3)):
        with pytest.raises(TypeError, match=f"^y must be a NumPy array like x, got {type(value).__module__}."):
            read_like("y", value, like, "x", ("float32",), (2,), "[n]")
        assert type(value) not in READERS


@pytest.mark.parametrize(
    ("shape", "strides", "wanted"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (5, 1), False),
        ((1, 4), (9, 1), True),
        ((3, 1), (1, 7), True),
        ((0, 4), (9, 9), True),
        ((), (), True),
        ((3,), (2,), False),
        ((2, 3, 4), (12, 4, 1), True),
    ],
)
def test_contiguous_views(shape: tuple[int, ...], strides: tuple[int, ...], wanted: bool) -> None:
    assert arrays.View(None, arrays.NUMPY, 0, "float32", shape, strides, None).is_contiguous is wanted


def test_a_plain_function_in_the_explanation_of_several() -> None:
    x = np.zeros((3, 256), np.float32)
    said = cukern.explain(cukern.grouped_topk, None, x[:, 1:], 4, True, arch="90a")
    (launched,) = said.launches
    assert re.search("not 16-byte aligned|no specialized", launched.why)
    assert launched.fields["logits"] == "gating_output" and launched.fields["weights"] == "weights"
