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
from cukern.runtime import arrays, kernel, template
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
