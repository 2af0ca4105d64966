"""How an op runs: late numbers and their guards, plans by signature, structs by name."""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cukern
from cukern.runtime import check, compile, describe, gpu, sources, template
from cukern.runtime import op as runtime_op
from cukern.runtime.describe import Array, Result, expect, expect_array
from cukern.runtime.kernel import KERNELS, Kernel, Launched
from cukern.runtime.late import Guards, Late, ceil_div, late
from cukern.runtime.op import OPS, Op, op
from cukern.runtime.plan import Plan, each_call, empty, launch, outputs, run_twin
from cukern.runtime.template import TemplateError

H200 = gpu.of_arch("90a")


def said(function: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """What the plan of an op says for arrays as if they were on an H200."""
    made = OPS[function.__name__]
    return made.say(made.form(len(args), tuple(kwargs)), (*args, *kwargs.values()), on=H200)


def packed(trace: Any, environment: list[Any]) -> list[dict[str, Any]]:
    """The fields of each launch, as the kernel would find them, with arrays made at addresses from 4096 on."""
    environment = [*environment, *(4096 * (i + 1) for i in range(len(trace.made)))]
    launches = []
    for step in trace.steps:
        parts = [
            (x.address if isinstance(x, Array) else x).evaluate(environment) if isinstance(x, (Array, Late)) else x
            for x in step.packing.parts
        ]
        data = step.packing.struct.pack(*parts)
        layout = template.params(step.variant.instance.file, step.variant.instance.function)
        launches.append({name: unpacked(kind, data, offset) for name, (offset, kind) in layout.fields.items()})
    return launches


def unpacked(kind: Any, data: bytes, offset: int) -> Any:
    if isinstance(kind, template.Scalar):
        return struct.unpack_from(f"={kind.code}", data, offset)[0]
    if isinstance(kind, template.Array):
        return [unpacked(kind.of, data, offset + i * kind.of.size) for i in range(kind.count)]
    return {name: unpacked(inner, data, offset + at) for name, (at, inner) in kind.fields.items()}


# --- late numbers -------------------------------------------------------------------------------------


def number(value: Any, guards: Guards) -> Late:
    return Late.at(0, value, guards)


def test_a_late_number_is_computed_for_each_call() -> None:
    tokens = number(16, Guards())
    for expression, want in (
        (tokens * 8, lambda n: n * 8),
        (3 + tokens, lambda n: 3 + n),
        (ceil_div(tokens, 5), lambda n: -(-n // 5)),
        (100 - tokens // 3, lambda n: 100 - n // 3),
        (late(max, tokens, 20), lambda n: max(n, 20)),
        (late(lambda a, b, c: (a, b, c), tokens, 1, tokens * 2), lambda n: (n, 1, 2 * n)),
        (tokens.apply(divmod_by_7).apply(operator.itemgetter(1)), lambda n: n % 7),
        ((tokens + 2.5 * tokens**0.5), lambda n: n + 2.5 * n**0.5),
        (-tokens, lambda n: -n),
    ):
        assert expression.value == want(16)
        for other in (0, 1, 17, 5000):
            assert expression.evaluate([other]) == want(other)
    assert not tokens.guards.ranges and not tokens.guards.others


def divmod_by_7(value: int) -> tuple[int, int]:
    return divmod(value, 7)


COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)


@given(
    st.integers(0, 60),
    st.integers(0, 60),
    st.lists(st.tuples(st.sampled_from(COMPARISONS), st.integers(0, 60), st.booleans()), max_size=6),
)
def test_guards_hold_exactly_where_all_outcomes_are_the_same(value: int, other: int, asked: list[Any]) -> None:
    guards = Guards()
    size = number(value, guards)
    for compare, constant, derived in asked:
        assert compare(size * 2 if derived else size, constant) is compare(value * 2 if derived else value, constant)
    same = all(
        compare(other * (1 + d), constant) is compare(value * (1 + d), constant) for compare, constant, d in asked
    )
    for hold in (guards.hold, guards.straight()):
        assert hold([value])
        assert hold([other]) is same


def test_to_look_at_the_value_ties_the_plan_to_it() -> None:
    for look in (int, float, range, bin, lambda n: [10, 20, 30, 40][n]):
        guards = Guards()
        look(number(3, guards))
        assert guards.hold([3]) and not guards.hold([4])
    with pytest.raises(TypeError, match="unhashable"):
        hash(number(3, Guards()))
    assert f"{number(3, Guards())} {number(3, Guards()):>3}" == "3   3"


def test_late_scalars_are_checked_at_every_call() -> None:
    step = check.integer("step", number(4, Guards()), 0, 9)
    assert step.evaluate([9]) == 9
    with pytest.raises(ValueError, match=r"step must be an integer in \[0, 9\], got 10"):
        step.evaluate([10])
    with pytest.raises(ValueError, match=r"step must be an integer in \[0, 9\], got 12"):
        check.integer("step", number(12, Guards()), 0, 9)
    scale = check.number("scale", number(0.5, Guards()))
    with pytest.raises(ValueError, match="scale must be a finite number, got inf"):
        scale.evaluate([float("inf")])


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
    packing = template.Packing(layout, template.named_leaves(layout, fields), lambda value: isinstance(value, Late))
    return packing.struct.pack(*[x.evaluate([40]) if isinstance(x, Late) else x for x in packing.parts])


def test_fields_are_packed_where_they_belong(stem: str) -> None:
    data = bytes_of(stem, FIELDS)
    assert len(data) == 320
    assert struct.unpack_from("=Qii3QB3xif4xQi", data) == (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 9, 10)
    assert data[128:256] == bytes(range(128)) and struct.unpack_from("=q", data, 256) == (11,)
    assert bytes_of(stem, FIELDS | {"pair": 0, "map": None, "out": None, "lengths": None})[44:52] == bytes(8)
    size = number(1, Guards())
    opened = FIELDS | {
        "second": size, "pair": size.apply(lambda n: (n, n / 2)), "map": size.apply(lambda n: bytes([n] * 128)),
        "out": (1, size * 2, 3),
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
def toy(stem: str, monkeypatch: pytest.MonkeyPatch) -> Op:
    """An op of one kernel, whose plans are made for an H200 and never run."""
    kernel = Kernel(stem, "fill")

    @op(lambda x, step: x + step, rows={"rows": ("x", "out")}, late=("step",))
    def toy_fill(x: Any, step: int, *, wide: bool = False, out: Any = None, variant: str = "auto") -> Any:
        expect_array("x", x, ("float32",), ("rows", "columns"))
        rows, columns = x.shape
        out = outputs(out, x, "x", Result((rows, columns), "float32", "[rows, columns]"))
        if x.on_host:
            return run_twin(variant, ("auto",))
        scratch = empty((rows, 2), "int32")
        many = rows > 1000
        launch(
            kernel.variant(64 if wide else 32, launched=Launched(64, 128, (1001,), 128)), ceil_div(rows, 4), 64,
            128 if many else 0,
            **(FIELDS | {"in": x, "out": (out, scratch, None), "first": rows, "second": step, "stride": x.strides[0]}),
        )  # fmt: skip
        return out

    runs: list[tuple[Plan, list[Any]]] = []
    monkeypatch.setattr(Plan, "run", lambda self, values, environment: runs.append((self, environment)))
    made = OPS.pop("toy_fill")
    # A tensor in host memory, taken for one on a GPU.
    monkeypatch.setattr(made, "say", lambda *args: Op.say(made, *args, on=H200))
    made.runs = runs  # type: ignore[attr-defined]
    return made


def plans_of(toy: Op) -> int:
    return len({id(plan) for plan, _ in toy.runs})  # type: ignore[attr-defined]


def test_calls_that_differ_in_late_numbers_share_a_plan(toy: Op) -> None:
    for rows in (2, 3, 17, 999, 1000):
        for step in (1, 2, 30):
            toy.call(torch.zeros(rows, 8), step)
    assert plans_of(toy) == 1
    toy.call(torch.zeros(1001, 8), 1)
    toy.call(torch.zeros(5000, 8), 1)
    toy.call(torch.zeros(3, 8), 1)
    assert plans_of(toy) == 2


def test_what_decides_is_part_of_the_signature(toy: Op) -> None:
    x = torch.zeros(4, 8)
    toy.call(x, 1)
    for other, options in (
        (torch.zeros(4, 9), {}),
        (torch.zeros(4, 16)[:, :8], {}),
        (torch.zeros(40)[1:33].reshape(4, 8), {}),  # not aligned
        (x, {"wide": True}),
        (x, {"out": torch.zeros(4, 8)}),
    ):
        before = plans_of(toy)
        for _ in range(2):
            toy.call(other, 1, **options)
        assert plans_of(toy) == before + 1
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        toy.call(x.double(), 1)
    with pytest.raises(ValueError, match=r"out must be of shape \[rows, columns\] = \[4, 8\], got \[3, 8\]"):
        toy.call(x, 1, out=torch.zeros(3, 8))
    with pytest.raises(ValueError, match="out must be contiguous"):
        toy.call(x, 1, out=torch.zeros(8, 4).T)


@pytest.mark.parametrize(
    "values",
    [
        (torch.zeros(4, 8), 3),
        (torch.zeros(4, 8)[:, 1:], 3),
        (torch.nn.Parameter(torch.zeros(4, 8)), None),
        (torch.zeros(4), torch.zeros(())),
        (torch.zeros(40)[3:], 2.5),
        (torch.zeros(0, 8), np.int64(3)),
    ],
    ids=str,
)
def test_text_reads_arguments_as_the_loop_does(toy: Op, values: tuple[Any, ...]) -> None:
    for named, more in (((), ()), (("wide", "variant"), (True, "auto")), (("out",), (torch.zeros(4, 8)[1:],))):
        form = toy.form(2, named)
        given = (*values, *more)
        assert form.find_reader(toy, given)(given) == runtime_op._read(form, given)
    form = toy.form(2, ("out",))
    assert form.find_reader(toy, (*values, (values[0],))) is None  # tuples are left to the loop
    assert form.find_reader(toy, (np.zeros(3), 1, None)) is None
    form = toy.form(1, ("step",))
    given = (torch.zeros(()), 1)
    assert form.find_reader(toy, given)(given) is None  # without a first dimension


def test_equal_numbers_of_other_types_are_told_apart(toy: Op) -> None:
    x = torch.zeros(4, 8)
    for wide in (True, 1, 1.0, np.int64(1), np.True_):
        before = plans_of(toy)
        toy.call(x, 1, wide=wide)
        assert plans_of(toy) == before + 1
        toy.call(x, 1, wide=wide)
        assert plans_of(toy) == before + 1


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


def test_plans_are_bounded(toy: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cukern.runtime.op._MOST_PLANS", 10)
    for columns in range(1, 40):
        toy.call(torch.zeros(2, columns), 1)
    assert len(toy._ages) == 10 == sum(len(form.plans) for form in toy.forms.values())
    toy.call(torch.zeros(2, 39), 1)
    assert plans_of(toy) == 39
    toy.forget()
    assert not toy._ages and not any(form.plans for form in toy.forms.values())


def test_plans_are_forgotten_while_a_form_is_added(toy: Op) -> None:
    class Plans(dict[Any, Any]):
        def clear(self) -> None:
            """Do what another thread may do now."""
            toy.form(2, ("out",))
            super().clear()

    toy.call(torch.zeros(4, 8), 1)
    toy.call(torch.zeros(4, 8), 1, wide=True)
    for form in toy.forms.values():
        form.plans = Plans(form.plans)
    toy.forget()
    assert len(toy.forms) == 3 and not any(form.plans for form in toy.forms.values())


def test_late_scalars_are_checked_where_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(x: Any, step: int) -> None:
        expect_array("x", x)
        check.integer("step", step, 0, 9)

    made = Op(nothing, None, {}, ("step",))
    trace, returned, reader = made.say(made.form(2, ()), (torch.zeros(0), 3), on=H200)
    plan = Plan(trace, returned, reader.paths)
    monkeypatch.setattr(trace.place.library, "current_device", lambda: 0)
    monkeypatch.setattr("cukern.runtime.launch.THREAD", SimpleNamespace(state=(None, 0, {0})))
    assert plan.run((), [0, 9]) is None
    with pytest.raises(ValueError, match=r"step must be an integer in \[0, 9\], got 10"):
        plan.run((), [0, 10])


def test_what_a_plan_says(toy: Op) -> None:
    x = torch.zeros(6, 8)
    trace, _, _ = toy.say(toy.form(2, ()), (x, 5))
    assert [(tuple(map(int, shape)), dtype) for shape, dtype in trace.made[:1]] == [((6, 8), "float32")]
    (launched,) = trace.steps
    environment = [x.data_ptr(), 7, 30, 4096, 8192]
    assert launched.grid[0].evaluate(environment) == 2
    (fields,) = packed(trace, [x.data_ptr(), 7, 30])
    assert fields["in"] == x.data_ptr() and fields["out"] == [4096, 8192, 0]
    assert (fields["first"], fields["second"], fields["stride"]) == (7, 30, 8)


def test_an_op_in_a_plan_becomes_a_part_of_it() -> None:
    trace, returned, _ = said(cukern.silu_and_mul, torch.zeros(6, 16))
    assert [str(step.variant.instance) for step in trace.steps] == ["moe_activation<float, 1, 16, 2>"]
    assert returned.shape == (6, 8)


def test_each_call_is_each_call() -> None:
    from cukern.runtime.plan import Trace, follow

    drawn = iter(range(100))
    trace = Trace(describe.Place(None, 0, H200), 0, Guards(), 0)  # type: ignore[arg-type]
    value = follow(trace, lambda: each_call(lambda: next(drawn), 99))
    assert value.value == 99  # a plan draws nothing
    assert [value.evaluate([]) for _ in range(3)] == [0, 1, 2]


# --- descriptions -------------------------------------------------------------------------------------


def described(array: torch.Tensor) -> Array:
    made = Op(lambda x: x, None, {}, ())
    _, given, _ = made.say(made.form(1, ()), (array,), on=H200)
    return given


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
    made = Op(lambda **arrays: list(arrays.values()), None, {}, ())
    return made.say(made.form(0, tuple(f"array_{i}" for i in range(len(given)))), given)[1]


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
