"""How an op runs: plans that alike calls repeat, structs by name, descriptions of arrays."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.runtime import check, compile, describe, gpu, sources, template
from cukern.runtime.describe import Array, Result, expect, expect_array
from cukern.runtime.each import Each
from cukern.runtime.kernel import KERNELS, Kernel, Launched
from cukern.runtime.op import OPS, Op, op
from cukern.runtime.plan import begin_together, check_each_call, each_call, empty, launch, outputs, run_twin
from cukern.runtime.template import TemplateError
from tests.plans import plan_of
from tests.pretended import PretendedGPU, pretended  # noqa: F401

H200 = gpu.of_arch("90a")


# --- structs ------------------------------------------------------------------------------------------

SOURCE = """
constexpr int COUNT = 3, TWICE = COUNT * 2, SHIFTED = 1 << (TWICE);
enum Kind { FIRST, SECOND = 5, THIRD };
struct Pair { int low; float high; __device__ int sum() const { if (low) { return low; } return 0; } };
template <typename T> struct PerRow { const T* values; T value; };
struct alignas(64) Map { unsigned long long words[16]; };
struct Base { const void* in; /* a comment; with = signs */ int first, second; };
struct Params : Base {
    char* out[COUNT];      // int not_a_field;
    unsigned char flag;
    Pair pair;
    PerRow<int> lengths;
    Map map;
    long long stride;
};
template <int N> __global__ void __launch_bounds__(N) fill(const __grid_constant__ Params p) {}
"""


@pytest.fixture
def stem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "toy.cu").write_text(SOURCE)
    monkeypatch.setattr(sources, "CUDA_SRC", tmp_path)
    yield "toy"
    for cached in (template.text, template.constants, template.params, template.struct_named, sources.source):
        cached.cache_clear()
    KERNELS.pop("toy", None)


def test_a_struct_is_read_as_the_compiler_lays_it_out(stem: str) -> None:
    layout = template.params(stem, "fill")
    offsets = {name: offset for name, (offset, _) in layout.fields.items()}
    assert offsets == {
        "in": 0, "first": 8, "second": 12, "out": 16, "flag": 40, "pair": 44, "lengths": 56, "map": 128, "stride": 256,
    }  # fmt: skip
    assert (layout.size, layout.alignment) == (320, 64)
    assert template.constants(stem) == {
        "COUNT": 3, "TWICE": 6, "SHIFTED": 64, "FIRST": 0, "SECOND": 5, "THIRD": 6,
    }  # fmt: skip
    if reason := compile.available():
        pytest.skip(reason)
    compile.cubin(compile.Instance(stem, "fill", (32,)), "90a")


def test_the_compiler_refuses_a_struct_that_was_misread(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := compile.available():
        pytest.skip(reason)
    monkeypatch.setitem(template._SCALARS, "float", "d")
    with pytest.raises(compile.CompileError, match="Params::lengths"):
        compile.cubin(compile.Instance(stem, "fill", (64,)), "90a")


FIELDS = {
    "in": 1, "first": 2, "second": 3, "out": (4, 5, 6), "flag": 7, "pair": {"low": 8, "high": 0.5}, "lengths": (9, 10),
    "map": bytes(range(128)), "stride": 11,
}  # fmt: skip


def bytes_of(stem: str, fields: dict[str, Any]) -> bytes:
    layout = template.params(stem, "fill")
    pack, parts = template.packing(layout, template.named_leaves(layout, fields), lambda value: isinstance(value, Each))
    return pack.pack(*[x.function(40) if isinstance(x, Each) else x for x in parts])


def test_fields_are_packed_where_they_belong(stem: str) -> None:
    data = bytes_of(stem, FIELDS)
    assert len(data) == 320
    assert struct.unpack_from("=Qii3QB3xif4xQi", data) == (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 9, 10)
    assert data[128:256] == bytes(range(128)) and struct.unpack_from("=q", data, 256) == (11,)
    assert bytes_of(stem, FIELDS | {"pair": 0, "map": None, "out": None, "lengths": None})[44:52] == bytes(8)
    opened = FIELDS | {
        "second": Each(1, int), "pair": (Each(1, int), Each(0.5, lambda n: n / 2)),
        "out": (1, Each(2, lambda n: 2 * n), 3), "map": Each(bytes(128), lambda n: bytes([n] * 128)),
    }  # fmt: skip
    data = bytes_of(stem, opened)
    assert struct.unpack_from("=Qii3QB3xif4xQi", data) == (1, 2, 40, 1, 80, 3, 7, 40, 20.0, 9, 10)
    assert data[128:256] == bytes([40] * 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thrid": 1}, "there is an unknown thrid"),
        ({"first": ...}, "there is no first"),
        ({"pair": {"low": 1}}, "there is no high"),
        ({"pair": (1, 2, 3)}, "pair must be the fields low, high"),
        ({"out": (1, 2)}, "out must be 3 values"),
        ({"map": b"short"}, "map must be 128 bytes, got 5"),
        ({"first": 2**31}, "Params::first"),
        ({"first": 0.5}, "Params::first"),
    ],
)
def test_a_wrong_field_is_named(stem: str, changes: dict[str, Any], message: str) -> None:
    fields = {name: value for name, value in (FIELDS | changes).items() if value is not ...}
    with pytest.raises(TemplateError, match=message):
        bytes_of(stem, fields)


def test_what_a_template_lacks_is_named(stem: str) -> None:
    with pytest.raises(TemplateError, match=r"toy\.cu has no kernel empty"):
        template.params(stem, "empty")
    with pytest.raises(TemplateError, match=r"toy\.cu declares no struct Absent"):
        template.struct_named(stem, "Absent")


def test_constants_are_read_in_the_order_of_the_includes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.cu").write_text('#include "base.cuh"\n#include "uses.cuh"\nconstexpr int LAST = USED + 1;\n')
    (tmp_path / "uses.cuh").write_text('#include "base.cuh"\nconstexpr int USED = 3 * BASE;\n')
    (tmp_path / "base.cuh").write_text("constexpr int BASE = 128;\n")
    monkeypatch.setattr(sources, "CUDA_SRC", tmp_path)
    template.text.cache_clear(), template.constants.cache_clear()
    try:
        assert template.constants("toy") == {"BASE": 128, "USED": 384, "LAST": 385}
    finally:
        template.text.cache_clear(), template.constants.cache_clear()


def test_every_kernel_declares_its_struct() -> None:
    for kernels in KERNELS.values():
        for kernel in kernels:
            assert template.params(kernel.file, kernel.function).fields


# --- plans --------------------------------------------------------------------------------------------


@pytest.fixture
def toy(stem: str) -> Op:
    """An op of one kernel. `bodies` counts the runs of its body."""
    kernel, bodies = Kernel(stem, "fill"), []

    @op(lambda x, step: x + step, numbers=("step",))
    def toy_fill(x: Any, step: int, *, wide: bool = False, out: Any = None, variant: str = "auto") -> Any:
        bodies.append(wide)
        expect_array("x", x, ("float32",), ("rows", "columns"))
        rows, columns = x.shape
        given, out = out, outputs(out, x, "x", Result((rows, columns), "float32", "[rows, columns]"))
        if x.on_host:
            return run_twin(variant, ("auto",))
        scratch, doubled = empty((rows, 2), "int32"), check_each_call(_doubled, step)
        in_place = given is not None and begin_together(out, x)
        launch(
            kernel.variant(64 if wide else 32, launched=Launched(64, 128, (1001,), 128)), -(-rows // 4), 64,
            128 if rows > 1000 else 0,
            **(FIELDS | {"in": x, "out": (out, scratch, x[1:]), "first": rows, "second": doubled, "flag": in_place}),
        )  # fmt: skip
        return out

    made = OPS.pop("toy_fill")
    made.bodies = bodies  # type: ignore[attr-defined]
    return made


def _doubled(step: Any) -> int:
    return 2 * check.integer("step", step, 0, 99)


def bodies_of(toy: Op) -> int:
    return len(toy.bodies)  # type: ignore[attr-defined]


def test_alike_calls_repeat_a_plan(toy: Op, pretended: PretendedGPU) -> None:  # noqa: F811
    for step in range(10):
        toy.call(torch.zeros(4, 8), step)
    assert bodies_of(toy) == 2  # a plan is kept from the second call on
    assert [x.fields["second"] for x in pretended.launches] == [*range(0, 20, 2)]
    for rows in (5, 5, 5, 4):
        toy.call(torch.zeros(rows, 8), 1)
    assert bodies_of(toy) == 4
    assert [x.fields["first"] for x in pretended.launches[10:]] == [5, 5, 5, 4]
    with pytest.raises(ValueError, match=r"step must be an integer in \[0, 99\], got 100"):
        toy.call(torch.zeros(4, 8), 100)
    with pytest.raises(TypeError, match="step must be an integer"):
        toy.call(torch.zeros(4, 8), "1")
    assert len(pretended.launches) == 14


def test_each_call_has_its_own_memory(toy: Op, pretended: PretendedGPU) -> None:  # noqa: F811
    given = [torch.zeros(6, 8) for _ in range(4)]
    results = [toy.call(x, 1) for x in given]
    for x, result, launched in zip(given, results, pretended.launches, strict=True):
        out, scratch, second_row = launched.fields["out"]
        assert (launched.fields["in"], out, second_row) == (x.data_ptr(), result.data_ptr(), x.data_ptr() + 32)
        assert scratch not in (0, out) and launched.grid == (2, 1, 1) and launched.block == (64, 1, 1)
    assert len({x.data_ptr() for x in results}) == 4


def test_what_decides_is_part_of_the_signature(toy: Op, pretended: PretendedGPU) -> None:  # noqa: F811
    x = torch.zeros(4, 8)
    for other, options, bodies in (
        (x, {}, 2),
        (torch.zeros(4, 9), {}, 2),
        (torch.zeros(4, 16)[:, :8], {}, 1),  # of a shape and with options that have come before
        (torch.zeros(40)[1:33].reshape(4, 8), {}, 1),  # not aligned
        (x, {"wide": True}, 2),
        (x, {"out": torch.zeros(4, 8)}, 2),
        (x, {"out": x}, 1),  # which begins at the same address
    ):
        before = bodies_of(toy)
        for _ in range(4):
            toy.call(other, 1, **options)
        assert bodies_of(toy) == before + bodies
        assert pretended.launches[-1].fields["flag"] == (options.get("out") is x)
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        toy.call(x.double(), 1)
    with pytest.raises(ValueError, match=r"out must be of shape \[rows, columns\] = \[4, 8\], got \[3, 8\]"):
        toy.call(x, 1, out=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="out must be contiguous"):
        toy.call(x, 1, out=torch.zeros(8, 4).T)


def test_equal_numbers_of_other_types_are_told_apart(toy: Op, pretended: PretendedGPU) -> None:  # noqa: F811
    x = torch.zeros(4, 8)
    for wide in (True, 1, 1.0, np.int64(1), np.True_):
        before = bodies_of(toy)
        for _ in range(3):
            toy.call(x, 1, wide=wide)
        assert bodies_of(toy) == before + 2


@pytest.mark.parametrize(
    "number", [np.array(30.0), np.array([30.0]), torch.tensor(30.0)], ids=["0-dim", "1-dim", "torch"]
)
def test_an_array_for_a_number_is_refused_by_its_type(number: Any) -> None:
    for x in host_arrays(2, 8):
        for call in (lambda x: cukern.softcap_logits(x, number), lambda x: cukern.rms_norm(x, None, number)):
            with pytest.raises(TypeError, match=rf"must be a number, got an array \({type(number).__name__}\)$"):
                call(x)


def test_python_says_what_does_not_fit_the_signature(toy: Op) -> None:
    x = torch.zeros(4, 8)
    for args, options, message in (
        ((x,), {}, "missing a required argument: 'step'"),
        ((x, 1, True), {}, "too many positional arguments"),
        ((x, 1), {"step": 2}, "multiple values for argument 'step'"),
        ((x, 1), {"width": 2}, "unexpected keyword argument 'width'"),
    ):
        for _ in range(2):
            with pytest.raises(TypeError, match=message):
                toy.call(*args, **options)
    with pytest.raises(TypeError, match="x must be an array"):
        toy.call([1.0], 2)


def test_plans_are_bounded(
    toy: Op, pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    monkeypatch.setattr("cukern.runtime.op._MAX_RUNS", 10)
    for columns in range(1, 40):
        for _ in range(2):
            toy.call(torch.zeros(2, columns), 1)
    (kind,) = {*toy.kinds.values()}
    assert len(kind.plans) <= 10
    toy.forget()
    assert not toy.kinds
    monkeypatch.setattr("cukern.runtime.op._MAX_RUNS", 1000)
    x = torch.zeros(4, 8)
    for between in range(8, 80):
        for _ in range(3):
            toy.call(x.new_zeros(4, between)[:, :8], 1)
    (kind,) = {*toy.kinds.values()}
    (kept,) = kind.plans.values()
    assert len(kept) <= 16


def test_plans_are_forgotten_while_another_thread_calls(toy: Op, pretended: PretendedGPU) -> None:  # noqa: F811
    x, errors, ends = torch.zeros(4, 8), [], threading.Event()

    def call() -> None:
        while not ends.is_set():
            try:
                toy.call(x, 1)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    for _ in range(200):
        toy.forget()
    ends.set()
    thread.join()
    assert not errors


def test_what_a_plan_says(toy: Op) -> None:
    x = torch.zeros(6, 8)
    trace, returned = plan_of(toy, x, 5)
    assert trace.made == [((6, 8), "float32"), ((6, 2), "int32")] and returned.source == trace.first_made
    (launched,) = trace.steps
    assert (launched.grid, launched.block, launched.shared_bytes) == ((2, 1, 1), (64, 1, 1), 0)
    assert launched.fields["in"].address == x.data_ptr() and launched.fields["second"].value == 10


def test_an_op_in_a_plan_becomes_a_part_of_it() -> None:
    def gated(x: Any) -> Any:
        return cukern.silu_and_mul(cukern.silu_and_mul(x))

    trace, returned = plan_of(Op(gated, None), torch.zeros(6, 32))
    assert [str(step.variant.instance) for step in trace.steps] == ["moe_activation<float, 1, 16, 2>"] * 2
    assert returned.shape == (6, 8)


def test_each_call_is_each_call(pretended: PretendedGPU) -> None:  # noqa: F811
    drawn, seen = iter(range(100)), []

    def draws(x: Any) -> None:
        value = each_call(lambda: next(drawn), 99)
        assert value.value == 99  # a plan draws nothing
        each_call(lambda *operands: seen.append(operands), None, value, x, 7)

    own = Op(draws, None)
    given = [torch.zeros(3) for _ in range(3)]
    for x in given:
        own.call(x)
    assert seen == [(i, x.data_ptr(), 7) for i, x in enumerate(given)]


# --- descriptions -------------------------------------------------------------------------------------


def described(array: torch.Tensor) -> Array:
    return plan_of(Op(lambda x: x, None), array)[1]


@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (0, 4), (3, 1), (2, 3, 4), (5,), ()])
def test_contiguity_is_torchs(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    assert described(x).is_contiguous
    wide = torch.zeros((*shape[:-1], 2 * (shape[-1] if shape else 1)))[..., ::2]
    if shape:
        assert described(wide).is_contiguous == wide.is_contiguous()
    if len(shape) > 1:
        assert described(x.transpose(0, 1)).is_contiguous == x.transpose(0, 1).is_contiguous()


def test_parts_of_an_array() -> None:
    x = described(torch.zeros(6, 8))
    assert x[2:].shape == (4, 8) and x[2:].offset == 64 and x[:3].shape == (3, 8) and x[2:5].shape == (3, 8)
    assert x.reshape(2, -1, 8).shape == (2, 3, 8) and x.view((4,), "int32", 16).offset == 16
    assert x[1:].view((2,), "int32", 16).offset == 48
    assert x.alignment == 16 and described(torch.zeros(6, 7))[1:].alignment == 4


FLOATS = ("float32", "float16")


def all_described(*given: Any) -> list[Array]:
    """Descriptions of several arrays of one call, in host memory."""
    made, named = Op(lambda **arrays: list(arrays.values()), None), {f"array_{i}": x for i, x in enumerate(given)}
    return made.record(made.kind_of((), named), given)[1]


def host_arrays(*shape: int, dtype: str = "float32") -> list[Any]:
    return [np.zeros(shape, dtype), torch.zeros(shape, dtype=getattr(torch, dtype))]


def test_the_first_array_of_a_call() -> None:
    for array in host_arrays(2, 3):
        (x,) = all_described(array)
        assert expect_array("x", x) is x is expect_array("x", x, FLOATS, ("m", "n"))
        assert x.on_host and str(x.place) == "the CPU" and describe.type_name(x) == type(array).__name__
        with pytest.raises(TypeError, match=r"^x must be float16 or int8, got float32$"):
            expect_array("x", x, ("float16", "int8"))
        with pytest.raises(ValueError, match=r"^x must be of shape \[n\], got \[2, 3\]$"):
            expect_array("x", x, FLOATS, ("n",))
    for value, kind in (([1.0], "list"), (None, "NoneType"), (1.5, "float"), (np.float32(1), "float32")):
        message = f"x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got {kind}"
        with pytest.raises(TypeError, match=re.escape(message)):
            expect_array("x", value)
    with pytest.raises(ValueError, match=r"\w+ must be on a CUDA device or the CPU, got one on meta"):
        all_described(torch.zeros(1, device="meta"))


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0), (), (1, 1), (2, 1, 3)], ids=str)
def test_an_expected_array_passes(shape: tuple[int, ...]) -> None:
    for array in host_arrays(*shape, dtype="float16"):
        x, a = all_described(array, array)
        assert expect("x", x, a, "a", FLOATS, shape, "[m, n]") is x


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.tolist(), TypeError, "x must be a {library} array like a, got builtins.list"),
        (lambda x: None, TypeError, "x must be a {library} array like a, got builtins.NoneType"),
        (lambda x: x > 0, TypeError, "x must be float32 or float16, got bool"),
        (lambda x: x[:1], ValueError, "x must be of shape [m, n] = [2, 3], got [1, 3]"),
        (lambda x: x[0], ValueError, "x must be of shape [m, n] = [2, 3], got [3]"),
        (lambda x: x.reshape(3, 2).T, ValueError, "x must be contiguous, got strides (1, 2) (in elements)"),
    ],
    ids=["a list", "None", "dtype", "a shorter one", "dimensions", "strides"],
)
def test_an_unexpected_array_is_refused(change: Any, error: type[Exception], message: str) -> None:
    for array in host_arrays(2, 3):
        a, x = all_described(array, change(array))
        with pytest.raises(error, match=f"^{re.escape(message.format(library=a.place.library.name))}$"):
            expect("x", x, a, "a", FLOATS, (2, 3), "[m, n]")


def test_arrays_must_be_in_one_place() -> None:
    x, other = all_described(np.zeros(1), torch.zeros(1))
    with pytest.raises(TypeError, match=r"^b must be a NumPy array like a, got torch\.Tensor$"):
        describe.expect_place("b", other, x, "a")
    there = described(torch.zeros(1))
    with pytest.raises(ValueError, match=r"^b must be on CUDA device 0 like a, got one on the CPU$"):
        describe.expect_place("b", other, there, "a")
    with pytest.raises(ValueError, match=r"^b must be on the CPU like a, got one on CUDA device 0$"):
        describe.expect_place("b", there, other, "a")


def test_the_distance_between_rows() -> None:
    for array in host_arrays(4, 6):
        for view, wanted in ((array, 6), (array[:, 1:3], 6), (array[::2], 12), (array[:1, ::6], 6), (array[:0].T, 1)):
            assert describe.expect_row_stride("x", all_described(view)[0]) == wanted
        for view, strides in ((array[:, ::2], "(6, 2)"), (array.T, "(1, 6)")):
            message = f"x must be contiguous along its last dimension, got strides {strides} (in elements)"
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                describe.expect_row_stride("x", all_described(view)[0])


def test_what_is_contiguous() -> None:
    fine: list[Any] = [
        lambda x: x, lambda x: x[:2], lambda x: x[:0, ::2], lambda x: x[:, :0, ::2], lambda x: x[:1, :1, :1],
        lambda x: x[0, 0, 0],
    ]  # fmt: skip
    refused: list[Any] = [
        (lambda x: x[:, :, :2], "(20, 5, 1)"),
        (lambda x: x[:, ::2], "(20, 10, 1)"),
        (lambda x: x[::2], "(40, 5, 1)"),
        (lambda x: x.swapaxes(0, 1), "(5, 20, 1)"),
        (lambda x: x[0, :, 0], "(5,)"),
    ]
    for array in host_arrays(3, 4, 5, dtype="int32"):
        for view in fine:
            if hasattr(view(array), "__dlpack__") and not isinstance(view(array), np.generic):
                describe.expect_contiguous("x", all_described(view(array))[0])
        for view, strides in refused:
            message = f"x must be contiguous, got strides {strides} (in elements)"
            with pytest.raises(ValueError, match=re.escape(message)):
                describe.expect_contiguous("x", all_described(view(array))[0])
    for array, strides in ((np.zeros(3)[::-1], "-1"), (torch.zeros(1).expand(3), "0")):
        with pytest.raises(ValueError, match=rf"strides \({strides},\)"):
            describe.expect_contiguous("x", all_described(array)[0])
    describe.expect_contiguous("x", all_described(torch.zeros(1).expand(1, 1))[0])


def test_tables_of_rows() -> None:
    table = torch.zeros(4, 6, dtype=torch.int32)
    x, wide, short, floats = all_described(table, table[:, 1:4], table[:3], table.float())
    assert describe.expect_table("table", x, x, "x", 4, ("batch", "pages")) == (6, 6)
    assert describe.expect_table("table", wide, x, "x", 4, ("batch", "pages")) == (3, 6)
    with pytest.raises(ValueError, match=r"table must be of shape \[batch, pages\] = \[4, 6\], got \[3, 6\]"):
        describe.expect_table("table", short, x, "x", 4, ("batch", "pages"))
    with pytest.raises(TypeError, match="table must be int32, got float32"):
        describe.expect_table("table", floats, x, "x", 4, ("batch", "pages"))


def test_host_arrays_run_the_twin() -> None:
    seen: list[Any] = []

    def twin(x: Any, count: int, scale: Any = None, *, written: Any = None) -> Any:
        seen.append((x, count, scale, written))
        if written is not None:
            written += 1
        return x * 2, count, np.arange(3, dtype=np.int32)

    def doubled(x: Any, count: int, scale: Any = None, *, written: Any = None, out: Any = None) -> Any:
        results = Result(x.shape, "float32"), Result((3,), "int32")
        outputs(out, x, "x", results[0], Result((), "int64"), results[1], names="three arrays")
        return run_twin()

    call = op(twin)(doubled)
    del OPS["doubled"]
    for array in host_arrays(2, 3):
        array += 1
        like = type(array)
        made, count, numbers = call(array, 7)
        assert isinstance(made, like) and isinstance(numbers, like)
        assert type(count) is int and count == 7
        assert made.tolist() == [[2] * 3] * 2 and numbers.tolist() == [0, 1, 2]
        assert seen[-1][1:] == (7, None, None) and isinstance(seen[-1][0], np.ndarray)
        # What the twin writes reaches the caller: it is the caller's memory.
        call(array, 7, written=array)
        assert array.tolist() == [[2] * 3] * 2 and isinstance(seen[-1][3], np.ndarray)

        out = (np.zeros((2, 3), np.float32), np.zeros((), np.int64), np.zeros(3, np.int32))
        given = out if like is np.ndarray else tuple(map(torch.from_numpy, out))
        assert call(array, 5, out=given) is given
        assert [x.tolist() for x in given] == [[[4] * 3] * 2, 5, [0, 1, 2]]
        with pytest.raises(TypeError, match=f"out must be three arrays, got {like.__name__}"):
            call(array, 5, out=given[0])


@pytest.mark.gpu
def test_arrays_on_a_gpu_are_described() -> None:
    from cukern.runtime.cuda import cupy

    for array in (cupy.zeros((2, 3), np.float32), torch.zeros(2, 3, device="cuda")):
        x, short = all_described(array, array[:, ::2])
        assert (x.place.device, x.shape, x.strides, x.dtype, x.alignment) == (0, (2, 3), (3, 1), "float32", 16)
        assert x.gpu.arch == "90a" and x.gpu.multiprocessors > 100 and not x.on_host
        assert expect("x", x, x, "a", FLOATS, (2, 3), "[m, n]") is x
        with pytest.raises(ValueError, match=r"x must be contiguous, got strides \(3, 2\)"):
            describe.expect_contiguous("x", short)
