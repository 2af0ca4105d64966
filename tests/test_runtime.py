"""What every op stands on: arrays, checks, the compile cache, launches, and the import itself."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cukern
import cukern.runtime.compile as compiler
from cukern import testing
from cukern.ops.moe_gate import choose as gates
from cukern.runtime import arrays, check, describe, gpu, kernel, nvrtc, plan, sources, vectors
from cukern.runtime.compile import CompileError, Instance
from cukern.runtime.cuda import INSTALL, cupy
from cukern.runtime.describe import Array, Result, expect, expect_array
from cukern.runtime.op import OPS, op
from cukern.runtime.plan import outputs, run_twin
from cukern.runtime.rows import tile as tile_of
from cukern.runtime.tolerance import Tolerance
from cukern.testing import assert_matches

ROOT = Path(__file__).resolve().parents[1]
TINY = """// A template that compiles at once.
template <typename T, int N> __global__ void tiny(T* out) { out[0] = T(N); }
"""
ONE, TWO = Instance("tiny", "tiny", ("float", 1)), Instance("tiny", "tiny", ("int", 2))
#: Every route to a cache folder but the one a test takes.
NO_CACHE = {"CUKERN_CACHE_DIR": None, "XDG_CACHE_HOME": None, "CUPY_CACHE_DIR": None}


def run_python(code: str, status: int = 0, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter; None takes a variable out of its environment."""
    inherited = {k: v for k, v in os.environ.items() if k not in environment}
    given = {k: v for k, v in environment.items() if v is not None}
    done = subprocess.run([sys.executable, "-c", code], env=inherited | given, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


# --- arrays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["_cuda_getCurrentRawStream", "_cuda_getDevice", "_dynamo", "all"])
def test_torch_s_own_names_have_substitutes(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):  # a build without CUDA has neither
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    if gone == "all":
        monkeypatch.delattr(torch, "_C")
    else:
        monkeypatch.delattr(torch._C, gone)
    library = arrays._Torch()
    if gone in ("_cuda_getCurrentRawStream", "all"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device))
        assert library.stream(7) == 77
    if gone in ("_cuda_getDevice", "all"):
        monkeypatch.setattr(arrays.runtime, "getDevice", lambda: 5)
        assert library.current_device() == 5
    if gone in ("_dynamo", "all"):
        library._empty = lambda shape, dtype, device: (shape, dtype, device)
        made = library.maker((3, 4), "float16", 1)()
        assert made == ((3, 4), torch.float16, torch.device("cuda", 1))
        x, y = torch.zeros(2, 3), torch.zeros(2, 3)
        assert library.alike([x, x])(y, y) and not library.alike([x, y])(x, y.half())


def test_the_library_of_an_array() -> None:
    class Sub(np.ndarray[Any, Any]):
        pass

    assert arrays.library_of(np.zeros(2)) is arrays.library_of(np.zeros(2).view(Sub)) is arrays.NUMPY
    of_torch = arrays.library_of(torch.zeros(2))
    assert of_torch is not None and of_torch.name == "torch"
    assert arrays.library_of(torch.nn.Parameter(torch.zeros(2))) is of_torch
    for other in ([1.0], 3, "x", None, np.float32(1), memoryview(b"")):
        assert arrays.library_of(other) is None
    if cupy is not None:
        assert arrays._find(cupy.ndarray) is arrays.CUPY


def test_the_names_of_dtypes() -> None:
    for name, size in arrays.ITEM_SIZE.items():
        assert arrays.numpy_dtype(name).itemsize == size
        assert arrays.numpy_dtype(name).name == name
    assert arrays.numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    with pytest.raises(TypeError):
        arrays.numpy_dtype("float3")


@pytest.mark.parametrize("name", arrays.ITEM_SIZE)
def test_torch_and_numpy_share_bits(name: str, rng: np.random.Generator) -> None:
    library = arrays.library_of(torch.zeros(1))
    assert library is not None
    values = rng.integers(0, 2, (4, 6)).astype(arrays.numpy_dtype(name))
    tensor = library.from_numpy(values, torch.empty(0))
    assert tensor.dtype == getattr(torch, name)
    assert library.dtype(tensor) == name
    np.testing.assert_array_equal(library.to_numpy(tensor).view(np.uint8), values.view(np.uint8))
    # Not contiguous, either way.
    np.testing.assert_array_equal(library.to_numpy(tensor.t()).astype(float), values.T.astype(float))
    for view in (values.T, values[::-1, ::2]):
        np.testing.assert_array_equal(
            library.to_numpy(library.from_numpy(view, tensor)).astype(float), view.astype(float)
        )
    made = library.empty((3, 5), name, tensor)
    assert (made.shape, made.dtype, made.device) == ((3, 5), tensor.dtype, tensor.device)
    assert arrays.NUMPY.empty((3, 5), name, values).dtype == values.dtype


def test_a_tensor_that_requires_grad_is_only_read() -> None:
    library = arrays.library_of(torch.zeros(1))
    assert library is not None
    assert library.to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_strides_count_elements() -> None:
    for array in (np.zeros((3, 10), np.float16)[:, ::2], torch.zeros((3, 10), dtype=torch.float16)[:, ::2]):
        library = arrays.library_of(array)
        assert library is not None
        assert library.strides(array) == (10, 2)
        assert library.device(array) is None
        assert library.address(array) % 2 == 0
    assert arrays.NUMPY.address(np.zeros(3)[1:]) % 8 == 0


class Foreign:
    def __init__(self, device: tuple[int, int], array: Any = None) -> None:
        self._device, self._array = device, array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def test_foreign_arrays_enter_and_leave() -> None:
    known = np.arange(3.0)
    assert arrays.enter("x", known) is known
    entered = arrays.enter("x", Foreign((1, 0), known))
    assert np.shares_memory(entered, known)
    assert arrays.leave(known, Foreign((1, 0))) is known

    class WithNamespace(Foreign):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=lambda array: ["theirs", array])

    assert arrays.leave(known, WithNamespace((1, 0))) == ["theirs", known]


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (Foreign((4, 0)), ValueError, "x must be on a CUDA device or in host memory, got DLPack device type 4"),
        ([1], TypeError, "x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got list"),
        (None, TypeError, "x must be an array (NumPy, CuPy, torch, or any with __dlpack__), got NoneType"),
    ],
    ids=["OpenCL", "a list", "None"],
)
def test_what_cannot_enter_is_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        arrays.enter("x", value)


class Theirs:
    """An array of a library that cukern does not know, which knows how to take one."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda array: Theirs(np.from_dlpack(array)))


def _twin_of_shifted(x: Any, others: Any = (), *, by: Any = 1, count: bool = False) -> Any:
    shifted = x + by + sum(len(other) for other in others)
    return (shifted, len(x)) if count else shifted


@pytest.fixture
def shifted() -> Iterator[Any]:
    """An op that has a twin alone."""

    def _shifted(x: Any, others: Any = (), *, by: Any = 1, out: Any = None, count: bool = False) -> Any:
        """What the ops do with their arrays: check, run the twin."""
        expect_array("x", x)
        for other in (*others, *([by] if isinstance(by, Array) else [])):
            expect("other", other, x, "x", ("float32",), x.shape, "[n]")
        outputs(out, x, "x", Result(x.shape, "float32", "[n]"))
        return run_twin()

    yield op(_twin_of_shifted)(_shifted)
    del OPS["_shifted"]


def test_foreign_arrays_pass_through_a_function(shifted: Any) -> None:
    x = np.arange(3, dtype=np.float32)
    got = shifted(Theirs(x))
    assert isinstance(got, Theirs) and got.array.tolist() == [1, 2, 3]
    # By keyword, in tuples and lists, with numbers and None; a number among the results is a number.
    got, count = shifted(x=Theirs(x), others=(Theirs(x), x), by=Theirs(x), out=None, count=True)
    assert isinstance(got, Theirs) and got.array.tolist() == [6, 8, 10] and count == 3
    assert shifted(Theirs(x), [Theirs(x)], by=2).array.tolist() == [5, 6, 7]
    empty = shifted(Theirs(x[:0]))
    assert isinstance(empty, Theirs) and empty.array.shape == (0,)
    # A library without a namespace gets NumPy's array.
    assert type(shifted(Foreign((1, 0), x))) is np.ndarray


def test_nothing_leaves_where_nothing_is_returned() -> None:
    def shift(x: Any) -> None:
        x += 1

    def _shift_in_place(x: Any) -> Any:
        expect_array("x", x)
        return run_twin()

    x = np.arange(3, dtype=np.float32)
    in_place = op(shift)(_shift_in_place)
    del OPS["_shift_in_place"]
    for array in (Theirs(x), Foreign((1, 0), x), x, torch.from_numpy(x)):
        assert in_place(array) is None
    assert in_place(x=Theirs(x)) is None
    assert x.tolist() == [5, 6, 7]


def test_results_are_written_into_foreign_arrays(shifted: Any) -> None:
    x, out = np.arange(3, dtype=np.float32), np.zeros(3, np.float32)
    theirs = Theirs(out)
    assert shifted(Theirs(x), out=theirs) is theirs
    assert out.tolist() == [1, 2, 3]
    same = Theirs(x)
    assert shifted(same, out=same) is same
    assert x.tolist() == [1, 2, 3]


def test_known_arrays_pass_as_they_are(shifted: Any) -> None:
    x = torch.zeros(2)
    out = torch.ones(2)
    assert shifted(x, out=out) is out
    assert isinstance(shifted(x), torch.Tensor)
    assert shifted.__name__ == "_shifted" and "the ops do" in str(shifted.__doc__)
    # The first array decides: another's library is refused, also where it is a foreign one.
    with pytest.raises(TypeError, match=r"other must be a torch array like x, got .*Theirs"):
        shifted(x, [Theirs(np.zeros(2, np.float32))])
    with pytest.raises(TypeError, match=r"x must be an array \(NumPy, CuPy, torch, or any with __dlpack__\), got list"):
        shifted([1.0, 2.0])
    with pytest.raises(ValueError, match="x must be on a CUDA device or in host memory, got DLPack device type 4"):
        shifted(x=Foreign((4, 0)))
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        shifted()


def test_bfloat16_tensors_reach_the_twin_with_their_memory() -> None:
    def twin(x: Any) -> Any:
        assert x.dtype == ml_dtypes.bfloat16
        x[1] = 3
        return x + x

    def doubled(x: Any, *, out: Any = None) -> Any:
        outputs(out, expect_array("x", x), "x", Result(x.shape, x.dtype))
        return run_twin()

    call = op(twin)(doubled)
    del OPS["doubled"]
    x = torch.ones(4, dtype=torch.bfloat16)
    got = call(x)
    assert got.dtype == torch.bfloat16 and got.tolist() == [2, 6, 2, 2]
    assert x.tolist() == [1, 3, 1, 1]
    assert call(x, out=x) is x
    assert x.tolist() == [2, 6, 2, 2]


@pytest.mark.gpu
def test_foreign_arrays_on_a_gpu_pass_through_an_op() -> None:
    logits = cupy.asarray(np.eye(4, 16, dtype=np.float32))
    wanted = cupy.asnumpy(cukern.softmax(logits))

    class OnGPU(Theirs):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=lambda array: OnGPU(cupy.from_dlpack(array)))

    got = cukern.softmax(OnGPU(logits))
    assert isinstance(got, OnGPU)
    np.testing.assert_array_equal(cupy.asnumpy(got.array), wanted)
    out = OnGPU(cupy.full_like(logits, np.nan))
    assert cukern.softmax(OnGPU(logits), out=out) is out
    np.testing.assert_array_equal(cupy.asnumpy(out.array), wanted)


# --- checks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check.fail("x", "y", "z"), ValueError, "x must be y, got z"),
        (lambda: check.fail("x", "y", "z", TypeError), TypeError, "x must be y, got z"),
        (lambda: check.integer("n", 0, 1), ValueError, "n must be an integer of at least 1, got 0"),
        (lambda: check.integer("n", 9, 1, 8), ValueError, "n must be an integer in [1, 8], got 9"),
        (lambda: check.integer("n", 9, 1, 8, "why"), ValueError, "n must be an integer in [1, 8] (why), got 9"),
        (lambda: check.element("n", np.array([9]), 1, 8), ValueError, "n must be an integer in [1, 8], got 9"),
        (lambda: check.integer("n", True, 0), TypeError, "n must be an integer of at least 0, got True (bool)"),
        (lambda: check.integer("n", 1.0, 0), TypeError, "n must be an integer of at least 0, got 1.0 (float)"),
        (lambda: check.number("f", "x"), TypeError, "f must be a number, got 'x' (str)"),
        (lambda: check.number("f", float("nan")), ValueError, "f must be a finite number, got nan"),
        (lambda: check.number("f", float("-inf")), ValueError, "f must be a finite number, got -inf"),
        (lambda: check.number("f", np.float32("inf")), ValueError, "f must be a finite number, got inf"),
        (lambda: check.one_of("s", "c", ("a", "b")), ValueError, "s must be one of 'a', 'b', got 'c'"),
        (lambda: check.host_variant("c", ("auto", "b")), ValueError, "variant must be one of 'auto', 'b', got 'c'"),
        (lambda: check.host_variant("b", ("auto", "b")), ValueError,
         "variant must be 'auto' for arrays in host memory, where the NumPy reference runs, got 'b'"),
        (lambda: check.dtype("x", "int8", ("a", "b")), TypeError, "x must be a or b, got int8"),
        (lambda: check.dtype("x", "int8", ("a", "b", "a")), TypeError, "x must be a or b, got int8"),
        (lambda: check.shape("x", (1, 2), (2, 2), "[m, n]"), ValueError,
         "x must be of shape [m, n] = [2, 2], got [1, 2]"),
        (lambda: check.dimensions("x", (1,), ("m", "n")), ValueError, "x must be of shape [m, n], got [1]"),
    ],
)  # fmt: skip
def test_a_failed_check_says_what_was_wanted(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert str(raised.value) == message


def test_checks_give_plain_values() -> None:
    for value, wanted in ((np.int64(3), 3), (3, 3)):
        assert type(check.integer("n", value, 0, 3)) is int
        assert check.integer("n", value, 0, 3) == wanted
        assert check.element("n", np.array([value], np.int32), 0, 3) == check.element("n", value, 0, 3) == wanted
    for number in (2.5, np.float32(2.5), np.float64(2.5)):
        assert type(check.number("f", number)) is float
        assert check.number("f", number) == 2.5
    assert check.number("f", 2) == 2.0
    with pytest.raises(TypeError, match=r"f must be a number, got '2.5' \(str\)"):
        check.number("f", "2.5")
    assert check.one_of("s", "a", ("a", "b")) == "a"
    check.host_variant("auto", ("auto", "b"))


# --- what the sizes decide ------------------------------------------------------------------------------


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_the_multiplication_divides(divisor: int, number: int) -> None:
    multiplier, shift = vectors.divisor(divisor)
    assert 0 < multiplier < 2**32
    for n in (number, number // divisor * divisor, number // divisor * divisor - 1, 2**31 - 1):
        if n >= 0:
            assert n * multiplier >> shift == n // divisor


# --- comparing results ----------------------------------------------------------------------------------


@pytest.fixture
def tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"float32": Tolerance(0.1, 0.5), "bfloat16": Tolerance(0.5, 0), "float64": Tolerance(0, 0)}
    monkeypatch.setattr(testing, "tolerances", lambda stem: {"x": values})


def _floats(*values: float, dtype: Any = np.float32) -> Any:
    return np.array(values, dtype)


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (_floats(1, 10, 0, -10), _floats(1.5, 11.5, 0.5, -11.5)),  # at the edge of what is allowed
        (_floats(NAN, INF, -INF), _floats(NAN, INF, -INF)),
        (torch.ones(3), _floats(1, 1, 1)),
        (_floats(1.5, dtype=ml_dtypes.bfloat16), _floats(1, dtype=ml_dtypes.bfloat16)),
        (np.arange(3), np.arange(3)),
        (np.array(True), np.array(True)),
        (np.zeros((0, 3)), np.zeros((0, 3))),
    ],
    ids=["close", "NaN and infinities", "tensors", "bfloat16", "integers", "booleans", "nothing"],
)
def test_what_matches(got: Any, want: Any, tolerance: None) -> None:
    assert_matches("a.x", got, want)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (_floats(1, 2), _floats(1, 3), "in 1 of 2 values, most at [1]: got 2.0, want 3.0, difference 1, allowed 0.5"),
        (_floats(1, 2, 9), _floats(3, 4, 4), "differs in 3 of 3 values, most at [2]: got 9.0, want 4.0, difference 5"),
        (_floats(NAN, 1), _floats(1, 1), "most at [0]: got nan, want 1.0"),
        (_floats(1, 1), _floats(1, NAN), "most at [1]: got 1.0, want nan"),
        (_floats(INF), _floats(1), "got inf, want 1.0"),
        (_floats(1), _floats(INF), "got 1.0, want inf"),
        (_floats(INF), _floats(-INF), "got inf, want -inf"),
        (np.array([[1, 2], [3, 4]]), np.array([[1, 2], [4, 4]]), "[1, 0]: got 3, want 4, difference 1, allowed none"),
        (np.array([2**62]), np.array([2**62 + 1]), f"got {2**62}, want {2**62 + 1}"),
        (np.array([True]), np.array([False]), "got True, want False"),
        (_floats(1, dtype=np.float64), _floats(1), "is of dtype float64, not float32"),
        (_floats(1), _floats(1, 1), "is of shape (1,), not (2,)"),
    ],
)  # fmt: skip
def test_what_does_not_match(got: Any, want: Any, message: str, tolerance: None) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_matches("a.x", got, want)


def test_floats_need_an_entry_in_the_table() -> None:
    with pytest.raises(KeyError, match="unheard_of"):
        assert_matches("moe_gate.unheard_of", _floats(1), _floats(1))


# --- sources and their digests --------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, which does not exist yet."""
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def templates(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of cuda_src that a test may change, with a template `tiny`; the cache is the test's own."""
    folder = tmp_path / "cuda_src"
    shutil.copytree(sources.CUDA_SRC, folder)
    (folder / "tiny.cu").write_text(TINY)
    monkeypatch.setattr(sources, "CUDA_SRC", folder)
    forget_sources()
    yield folder
    forget_sources()


def forget_sources() -> None:
    sources.source.cache_clear()
    compiler._source_digest.cache_clear()
    compiler._cuda_header_digest.cache_clear()


def test_targets() -> None:
    capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
    assert [compiler.arch_of(c) for c in capabilities] == ["80", "86", "89", "90a", "100a", "120a"]


def test_a_cubin_is_named_by_all_that_determines_it(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [compiler.cached_path(ONE, "80")]

    def changed(instance: Instance = ONE, arch: str = "80") -> None:
        forget_sources()
        paths.append(compiler.cached_path(instance, arch))

    changed(arch="90a")
    changed(TWO)
    (templates / "tiny.cu").write_text(TINY + "\n")
    changed()
    (templates / "tiny.cu").write_text('#include "common/inner.cuh"\n#include <cuda_fp16.h>\n' + TINY)
    inner, innermost = (templates / "common" / name for name in ("inner.cuh", "innermost.cuh"))
    inner.write_text('  #  include "common/innermost.cuh"\n')
    innermost.write_text("")
    changed()
    inner.write_text(inner.read_text() + "\n")
    changed()
    innermost.write_text("\n")
    changed()
    cuda_headers = templates.parent / "include"
    cuda_headers.mkdir()
    monkeypatch.setattr(compiler, "cuda_include_directory", lambda: str(cuda_headers))
    for name in ("cuda_fp16.h", "cuda_fp16.hpp"):
        (cuda_headers / name).write_text("")
        changed()
    options = compiler._options
    monkeypatch.setattr(compiler, "_options", lambda arch: [*options(arch), "-lineinfo"])
    changed()
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9.9")
    changed()
    assert len(set(paths)) == len(paths)
    # And by nothing else: where the sources and the cache lie does not matter, nor does what it does not include.
    for other in (templates / "other.cu", templates / "common" / "warp.cuh", cuda_headers / "cuda_bf16.h"):
        other.write_text("")
    forget_sources()
    assert compiler.cached_path(ONE, "80") == paths[-1]
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(templates.parent / "elsewhere"))
    assert compiler.cached_path(ONE, "80").name == paths[-1].name


def test_a_cubin_has_a_name_one_can_read(templates: Path) -> None:
    assert re.fullmatch(r"tiny_float_1-sm_90a-[0-9a-f]{20}\.cubin", compiler.cached_path(ONE, "90a").name)
    assert str(ONE) == "tiny<float, 1>"


def test_nvrtc_tells_its_build_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = compiler.nvrtc_version.__wrapped__
    built = nvrtc.build()
    assert re.fullmatch(r"\d+\.\d+\.\d+", built) and version() == built
    (note,) = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "build", lambda: "99.9.9")
        assert version() == built
        # A spoilt note is not believed, nor one for another file.
        note.write_text("13")
        assert version() == "99.9.9" == note.read_text()
        note.write_text(built)
        patch.setattr(compiler, "_nvrtc_library", lambda: ROOT / "README.md")
        assert version() == "99.9.9"
        assert len(list(cache.iterdir())) == 2
        patch.setattr(compiler, "_nvrtc_library", lambda: None)
        assert version() == "99.9.9"
    library = compiler._nvrtc_library()
    assert library is not None and library.is_file()


def test_a_kernel_without_nvrtc(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "RuntimeError: CuPy failed to load libnvrtc.so.13: OSError: not found"
    monkeypatch.setattr(compiler, "available", lambda: f"{reason}\nand much more")
    for call in (compiler.nvrtc_version, lambda: compiler.cubin(ONE, "80")):
        compiler.nvrtc_version.cache_clear()
        with pytest.raises(RuntimeError) as refused:
            call()
        assert str(refused.value) == f"a kernel needs NVRTC: {INSTALL} ({reason})"


def test_threads_may_compile_first_at_once(tmp_path: Path) -> None:
    code = """
import threading
import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc
failed = []
def work(i):
    try:
        (compiler.cuda_include_directory, nvrtc.build, compiler.nvrtc_version)[i % 3]()
        nvrtc.compile_cubin("template <int N> __global__ void f() {}", "f.cu", f"f<{i}>", ["-arch=sm_80"])
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failed, failed
"""
    for i in range(4):
        run_python(code, CUKERN_COMPILE="lazy", CUKERN_CACHE_DIR=str(tmp_path / str(i)))


def test_headers_in_the_working_directory_are_not_taken(cache: Path, tmp_path: Path) -> None:
    hostile = tmp_path / "hostile"
    headers = [path.relative_to(sources.CUDA_SRC) for path in sources.CUDA_SRC.rglob("*.cuh")]
    for path in (*headers, *(Path(p.name) for p in headers), *map(Path, ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"))):
        (hostile / path).parent.mkdir(parents=True, exist_ok=True)
        (hostile / path).write_text("#error taken from the working directory\n")
    code = """
import os
import cukern
import cukern.runtime.compile as compiler
from cukern.runtime.kernel import KERNELS
os.chdir(sys.argv[1])
assert KERNELS
for kernels in KERNELS.values():
    compiler.cubin(next(i for own in kernels for i in (*own.at_import, *own.specialized)), "90a")
"""
    run_python(f"import sys; sys.argv = ['', {str(hostile)!r}]\n{code}", CUKERN_COMPILE="lazy")


def test_the_version_of_the_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert compiler.nvrtc_version().startswith(compiler.headers_version() + ".")
    (tmp_path / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  12080\n")
    monkeypatch.setattr(compiler, "cuda_include_directory", lambda: str(tmp_path))
    assert compiler.headers_version() == "12.8"


def test_kernels_have_names_of_their_own() -> None:
    # By which the doctor tells what is in the cache.
    functions = [own.function for kernels in kernel.KERNELS.values() for own in kernels]
    assert functions and len(set(functions)) == len(functions)


# --- the cache folder -----------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    monkeypatch.setenv("HOME", "/d")
    assert compiler._default_cache_directory() == Path("/a/b")
    monkeypatch.setenv("CUKERN_CACHE_DIR", "")
    assert compiler._default_cache_directory() == Path("/c/cukern")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compiler._default_cache_directory() == Path("/d/.cache/cukern")


def test_the_folder_is_private(cache: Path) -> None:
    assert compiler.cache_directory() == cache
    assert compiler.cache_problem() is None and compiler.folders() == [cache]
    # All users read what root makes, as in the image of a container.
    assert stat.S_IMODE(cache.stat().st_mode) == (0o700 if os.getuid() else 0o755)


def test_only_the_owner_may_write_the_folder(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o775)
    assert compiler.cache_directory() == cache
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755


def forget_cache() -> None:
    """A new process looks at the folder again."""
    compiler._cache.cache_clear()
    compiler._warn.cache_clear()


def owned_by(monkeypatch: pytest.MonkeyPatch, owner: int, user: int) -> None:
    """What this user owns belongs to `owner`, while `user` runs the process."""
    real, me = os.stat, os.getuid()

    def stat_of(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        fields = {name: getattr(found, name) for name in dir(found) if name.startswith("st_")}
        return SimpleNamespace(**fields | {"st_uid": owner if found.st_uid == me else found.st_uid})

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "getuid", lambda: user)


def test_a_folder_of_someone_else_is_not_used(templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = compiler.cubin(ONE, "80")
    forget_cache()
    with monkeypatch.context() as patch:
        owned_by(patch, owner=1001, user=1002)
        folder = compiler.cache_directory()
    assert folder != cache and folder.is_dir() and compiler.folders() == [folder]
    assert compiler.cache_problem() == "it belongs to user 1001"
    assert compiler.cache_directory() == folder  # the same all along
    assert compiler.missing([ONE], "80") == [ONE]
    with pytest.warns(RuntimeWarning, match=rf"{cache} cannot be used: it belongs to user 1001\..*CUKERN_CACHE_DIR"):
        assert compiler.cubin(ONE, "80")[0] == folder / path.name


def test_a_folder_of_root_is_read(templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = compiler.cubin(ONE, "80")
    damaged, _ = compiler.cubin(TWO, "80")
    damaged.write_bytes(b"")
    before = {p.name: p.stat().st_mtime_ns for p in cache.iterdir()}
    forget_cache()
    owned_by(monkeypatch, owner=0, user=1002)
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("error")
        refuse_to_compile(patch)
        assert compiler.cubin(ONE, "80") == (path, name)
        assert compiler.missing([ONE], "80") == [] and compiler.missing([ONE], "90a") == [ONE]
        assert compiler.cache_problem() == "it belongs to root" and not compiler._temporary.get(cache)
    with pytest.warns(RuntimeWarning, match=rf"{cache} cannot be written: it belongs to root\. .* this process only"):
        again, _ = compiler.cubin(TWO, "80")
    assert again.parent == compiler.cache_directory() != cache and compiler.folders() == [cache, again.parent]
    compiler.compile_all([(ONE, "80"), (ONE, "90a")])
    assert compiler.is_intact(compiler.cached_path(ONE, "90a")) and compiler.cached_path(ONE, "80") == path
    assert {p.name: p.stat().st_mtime_ns for p in cache.iterdir()} == before


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_of_root_that_others_may_write_is_not_read(
    mode: int, templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.cubin(ONE, "80")
    cache.chmod(mode)
    forget_cache()
    owned_by(monkeypatch, owner=0, user=1002)
    assert compiler.cache_problem() == f"users beside its owner may write it (mode {mode:o})"
    assert compiler.folders() == [] and compiler.missing([ONE], "80") == [ONE]


def test_a_folder_on_a_read_only_mount_is_read(templates: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = compiler.cubin(ONE, "80")
    forget_cache()

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(compiler.tempfile, "TemporaryFile", refuse)
        assert compiler.cache_problem() == "Read-only file system"
    refuse_to_compile(monkeypatch)
    assert compiler.cubin(ONE, "80") == (path, name) and compiler.folders() == [cache]
    # A file that others may write is not loaded from it.
    path.chmod(0o666)
    assert compiler.cached_path(ONE, "80").parent != cache and not compiler.is_intact(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_reads_what_root_has_baked(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are private
        os.chmod(folder, 0o755)
        monkeypatch.setenv("CUKERN_CACHE_DIR", f"{folder}/cache")
        path, name = compiler.cubin(ONE, "80")
        forget_cache()
        child = os.fork()
        if not child:
            try:
                os.setresuid(65534, 65534, 65534)
                assert compiler.cubin(ONE, "80") == (path, name)
                assert compiler.cache_problem() == "it belongs to root" and not compiler._temporary.get(path.parent)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_way_of_the_folder(below: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("")
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(cache / below))
    folder = compiler.cache_directory()
    assert re.match("File exists|Not a directory", compiler.cache_problem() or "")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_relative_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKERN_CACHE_DIR", "some/relative/folder")
    assert (compiler.cache_problem() or "").startswith("it is not an absolute path")
    assert compiler.cache_directory().is_absolute()
    assert not Path("some").exists()


# --- writing --------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    nvrtc.write_atomically(str(path), b"old")

    def fail(*paths: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            nvrtc.write_atomically(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    nvrtc.write_atomically(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = {bytes([letter]) * 300_000 for letter in b"ab"}
    nvrtc.write_atomically(str(path), next(iter(contents)))
    done = threading.Event()

    def write(content: bytes) -> None:
        while not done.is_set():
            nvrtc.write_atomically(str(path), content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    try:
        for _ in range(200):
            assert path.read_bytes() in contents
    finally:
        done.set()
        for writer in writers:
            writer.join()


# --- compiling into the cache ---------------------------------------------------------------------------


def refuse_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(job: dict[str, Any]) -> None:
        raise AssertionError(f"compiled {job['expression']}")

    monkeypatch.setattr(nvrtc, "compile_to_cache", refuse)


def test_a_cubin_is_compiled_once(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, name = compiler.cubin(ONE, "80")
    assert path == compiler.cached_path(ONE, "80")
    assert path.read_bytes().startswith(b"\x7fELF")
    assert re.fullmatch(r"_Z4tinyIfLi1EEvPT_", name)
    note = compiler.read_note(path)
    assert note is not None
    assert (note["expression"], note["arch"], note["name"]) == ("tiny<float, 1>", "80", name)
    assert "registers" in note["log"]
    assert {f.name for f in path.parent.glob("*.cubin*")} == {path.name, path.name + ".json"}
    refuse_to_compile(monkeypatch)
    assert compiler.cubin(ONE, "80") == (path, name)
    assert compiler.missing([ONE, TWO], "80") == [TWO]
    assert compiler.missing([ONE], "90a") == [ONE]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _without_hash(path: Path) -> None:
    note = json.loads(_note(path).read_text())
    del note["sha256"]
    _note(path).write_text(json.dumps(note))


@pytest.mark.parametrize(
    "spoil",
    [
        _truncate,
        _damage,
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: _note(path).unlink(),
        lambda path: _note(path).write_bytes(b"\xff{"),
        lambda path: _note(path).write_text("[1]"),
        lambda path: _truncate(_note(path)),
        _without_hash,
    ],
    ids=[
        "truncated", "a bit flipped", "empty", "no cubin", "no note", "note in no encoding", "note of something else",
        "note truncated", "note without the hash",
    ],
)  # fmt: skip
def test_a_spoilt_file_is_compiled_again(spoil: Callable[[Path], None], templates: Path) -> None:
    path, name = compiler.cubin(ONE, "80")
    good = path.read_bytes()
    spoil(path)
    assert compiler.cubin(ONE, "80") == (path, name)
    assert path.read_bytes() == good
    assert compiler.is_intact(path)


def test_a_file_of_someone_else_is_compiled_again(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = compiler.cubin(ONE, "80")
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "distrust", lambda file: file.suffix == ".json")
        assert compiler.read_note(path) is None
        patch.setattr(nvrtc, "distrust", lambda file: file.suffix != ".json")
        assert not compiler.is_intact(path)
    assert compiler.is_intact(path)


@pytest.mark.parametrize("where", ["moe_gate/moe_gate.cu", "common/warp.cuh"])
def test_an_error_cites_the_file_and_the_line(where: str, templates: Path) -> None:
    file = templates / where
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("constexpr")) + 1
    lines.insert(at, "constexpr int broken = undeclared;")
    file.write_text("\n".join(lines))
    instance = kernel.KERNELS["moe_gate"][0].at_import[0]
    with pytest.raises(CompileError) as raised:
        compiler.cubin(instance, "80")
    assert f'{where}({at + 1}): error: identifier "undeclared" is undefined' in str(raised.value)
    assert str(instance) in str(raised.value)
    assert not list(compiler.cache_directory().glob("*.cubin*"))


def test_an_unknown_target_is_a_compile_error(templates: Path) -> None:
    with pytest.raises(CompileError, match="arch"):
        compiler.cubin(ONE, "12345")


def test_the_headers_are_asked_for_where_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.cuda_include_directory.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "isfile", lambda path: False)
        with pytest.raises(
            RuntimeError, match=r"no folder with cuda_fp16\.h was found: .*cupy-cuda13x\[ctk\].*CUDA_PATH"
        ):
            compiler.cuda_include_directory()
    assert os.path.isfile(os.path.join(compiler.cuda_include_directory(), "cuda_fp16.h"))


# --- many at once ---------------------------------------------------------------------------------------

MANY = [Instance("tiny", "tiny", ("float", i)) for i in range(6)]
WORK = [(instance, "80") for instance in MANY]


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[str]]:
    """Work is given to two processes; the list of those that were started."""
    started: list[subprocess.Popen[str]] = []
    start = compiler._start_worker

    def start_and_note() -> subprocess.Popen[str]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(compiler, "_worker_count", lambda jobs: 2)
    monkeypatch.setattr(compiler, "_start_worker", start_and_note)
    return started


def assert_all_compiled() -> None:
    assert all(compiler.is_intact(compiler.cached_path(*item)) for item in WORK)
    assert len(list(compiler.cache_directory().glob("tiny*"))) == 2 * len(WORK)


def test_workers_do_the_work(
    templates: Path, two_workers: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_compile(monkeypatch)  # in this process
    reported: list[tuple[Instance, str]] = []
    compiler.compile_all(WORK, lambda instance, arch: reported.append((instance, arch)))
    assert_all_compiled()
    assert sorted(map(str, reported)) == sorted(map(str, WORK))
    assert len(two_workers) == 2
    assert all(worker.wait(10) is not None for worker in two_workers)


def test_one_core_works_by_itself(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(compiler, "_start_worker", refuse)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    compiler.compile_all(WORK)
    assert_all_compiled()


def test_workers_are_as_many_as_cores_and_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert [compiler._worker_count(jobs) for jobs in (0, 1, 3, 4, 16, 100)] == [1, 1, 1, 2, 8, 8]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(200)), raising=False)
    assert compiler._worker_count(1000) == 32


def _cannot_start() -> subprocess.Popen[str]:
    raise OSError("no more processes")


def _dies(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)


@pytest.mark.parametrize(
    "start",
    [_cannot_start, lambda: _dies(""), lambda: _dies("input()")],
    ids=["cannot be started", "die at once", "die over their first job"],
)
def test_workers_may_fail(
    start: Callable[[], subprocess.Popen[str]], templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_worker_count", lambda jobs: 2)
    monkeypatch.setattr(compiler, "_start_worker", start)
    reported: list[Instance] = []
    compiler.compile_all(WORK, lambda instance, arch: reported.append(instance))
    assert_all_compiled()
    assert len(reported) == len(WORK)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_is_raised_after_all_have_been_tried(
    workers: int, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_worker_count", lambda jobs: workers)
    bad = Instance("tiny", "tiny", ("no_such_type", 1))
    reported: list[Instance] = []
    with pytest.raises(CompileError, match=r"tiny<no_such_type, 1>(.|\n)*no_such_type"):
        compiler.compile_all([(bad, "80"), *WORK], lambda instance, arch: reported.append(instance))
    assert_all_compiled()
    assert len(reported) == len(WORK) + 1


def test_a_worker_answers_each_line(templates: Path) -> None:
    worker = compiler._start_worker()
    job = compiler._job(ONE, "80")
    bad = compiler._job(Instance("tiny", "tiny", ("nothing", 1)), "80")
    lines = ["no json", json.dumps({}), json.dumps(job), json.dumps(bad)]
    output, _ = worker.communicate("\n".join(lines) + "\n", timeout=60)
    answers = [json.loads(line) for line in output.splitlines()]
    assert ["error" in answer for answer in answers] == [True, True, False, True]
    assert "nothing" in answers[3]["error"]
    assert compiler.is_intact(compiler.cached_path(ONE, "80"))


def test_processes_may_fill_one_cache_at_once(cache: Path) -> None:
    code = """
import cukern.runtime.compile as compiler
from cukern.ops.moe_gate import choose
instances = [i for i in choose._kernel.specialized if i.arguments[1] == 64]
assert instances
for instance in instances:
    path, name = compiler.cubin(instance, "80")
    assert compiler.is_intact(path)
print(len(instances))
"""
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len(list(cache.glob("*.cubin*"))) == 2 * int(outputs[0])


# --- launches, on a machine that only says it has GPUs --------------------------------------------------


class FakeGPUs:
    """Stands in for the CUDA runtime and driver, and notes what is asked of them."""

    CUDARuntimeError = RuntimeError

    def __init__(self) -> None:
        self.current = threading.local()
        self.set_to: list[int] = []
        self.launches: list[dict[str, Any]] = []
        self.failing = False

    def getDevice(self) -> int:
        return getattr(self.current, "device", 0)

    def setDevice(self, device: int) -> None:
        self.current.device = device
        self.set_to.append(device)

    @contextlib.contextmanager
    def current_device(self, device: int) -> Iterator[None]:
        before, self.current.device = self.getDevice(), device
        try:
            yield
        finally:
            self.current.device = before

    def getDeviceCount(self) -> int:
        return 2

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        attributes = {75: (8, 9), 76: (6, 0), 16: (84, 132), 81: (100 << 10, 228 << 10), 97: (99 << 10, 227 << 10)}
        return attributes[attribute][device]

    def launchKernel(self, function: int, *sizes: int) -> None:
        *geometry, shared_bytes, stream, address, extra = sizes
        assert extra == 0
        if self.failing:
            raise RuntimeError("launch failed")
        packed = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches.append(
            {
                "function": function,
                "device": self.getDevice(),
                "geometry": geometry,
                "shared_bytes": shared_bytes,
                "stream": stream,
                # As `Params` of cuda_src/moe_activation.cu begins.
                "params": struct.unpack_from("=QQQqii", ctypes.string_at(packed, 40)),
                "packed": packed,
            }
        )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGPUs:
    fake = FakeGPUs()
    monkeypatch.setattr(kernel, "cupy", SimpleNamespace())
    monkeypatch.setattr(kernel, "runtime", fake)
    monkeypatch.setattr(gpu, "runtime", fake)
    monkeypatch.setattr(plan, "runtime", fake)
    monkeypatch.setattr(plan, "current_device", fake.current_device)
    monkeypatch.setattr(plan, "_thread", plan._Thread())
    ready = {device: (fake.launchKernel, 100 + device) for device in (0, 1)}
    monkeypatch.setattr(kernel.Variant, "ready", property(lambda self: ready, lambda self, of: None))
    monkeypatch.setattr(kernel, "_archs_from_nvml", lambda: None)
    return fake


class FakeLibrary(arrays.Library):
    """Arrays that are their addresses, on the fake GPUs."""

    name = "fake"

    def __init__(self, gpus: FakeGPUs) -> None:
        self.current_device = gpus.getDevice  # type: ignore[method-assign]
        self.made: list[tuple[Any, ...]] = []

    def address(self, array: Any) -> int:
        return array

    def stream(self, device: int) -> int:
        return 77 + device

    def allocate(self, shape: tuple[int, ...], dtype: str, device: int | None) -> int:
        self.made.append((shape, dtype, device))
        return 0xF000 + len(self.made)


def make_plan(gpus: FakeGPUs, device: int = 0) -> plan.Plan:
    """The plan of an activation of 6 rows."""
    place = describe.Place(FakeLibrary(gpus), device, gpu.of_arch("90a"))
    trace = plan.Trace(place, [0xABC0], 0)
    x = Array("float32", (6, 64), (64, 1), 16, place, 0, 0xABC0)
    return plan.Plan(trace, plan.run_traced(trace, lambda: cukern.moe_activation(x)), [(0, None)])


def test_a_launch_packs_its_arguments(gpus: FakeGPUs) -> None:
    made = make_plan(gpus)
    for step in range(1, 10):
        assert made.run([None], [None], [0xABC0 + step]) == 0xF000 + step
    assert made.library.made == [((6, 32), "float32", 0)] * 9  # type: ignore[attr-defined]
    tile = tile_of(8, 2)
    for step, launch in enumerate(gpus.launches, 1):
        assert (launch["function"], launch["device"]) == (100, 0)
        assert launch["geometry"] == [-(-6 // tile.rows), tile.chunks, 1, tile.threads, 1, 1]
        assert (launch["shared_bytes"], launch["stream"]) == (0, 77)
        assert launch["params"] == (0xABC0 + step, 0xF000 + step, 0, 256, 6, 1)
    # The thread's context is made once.
    assert gpus.set_to == [0]


def test_a_launch_goes_to_its_device_and_comes_back(gpus: FakeGPUs) -> None:
    plans = [make_plan(gpus, device) for device in (0, 1)]
    order = (1, 0, 1, 0, 0, 1, 0)
    for device in order:
        plans[device].run([None], [None], [64])
        assert gpus.getDevice() == 0
    with gpus.current_device(1):
        plans[0].run([None], [None], [64])
    order += (0,)
    assert [(launch["function"], launch["device"]) for launch in gpus.launches] == [(100 + x, x) for x in order]
    assert [launch["stream"] for launch in gpus.launches] == [77 + x for x in order]
    # The context manager makes another device the current one; `setDevice` would leave it the current one.
    assert gpus.set_to == [0]
    gpus.failing = True
    with pytest.raises(RuntimeError, match="launch failed"):
        plans[1].run([None], [None], [64])
    assert gpus.getDevice() == 0


def test_results_are_on_the_device_of_the_call(gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_current(self: FakeLibrary, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[], int]:
        return lambda: self.allocate(shape, dtype, self.current_device())

    monkeypatch.setattr(FakeLibrary, "maker", on_current)
    made = make_plan(gpus, 1)
    # As torch's, whose current device stays a device without a context while another context is pushed.
    made.library.current_device = lambda: 0  # type: ignore[method-assign]
    made.run([None], [None], [64])
    assert made.library.made == [((6, 32), "float32", 1)]  # type: ignore[attr-defined]
    assert [launch["device"] for launch in gpus.launches] == [1]


def test_each_thread_packs_its_own_arguments(gpus: FakeGPUs) -> None:
    made = make_plan(gpus)
    made.run([None], [None], [64])
    thread = threading.Thread(target=made.run, args=([None], [None], [64]))
    thread.start()
    thread.join()
    here, there = gpus.launches
    assert here["packed"] != there["packed"]
    # The new thread had no context.
    assert gpus.set_to == [0, 0]


def test_a_variant_is_one_object() -> None:
    own = kernel.Kernel("runtime_test", "tiny")
    try:
        made = own.variant("float", 1)
        assert made is own.variant("float", 1) is not own.variant("float", 2)
        assert made.instance == Instance("runtime_test", "tiny", ("float", 1))
        assert repr(made) == "Variant(tiny<float, 1>)"
        assert kernel.KERNELS["runtime_test"] == [own]
    finally:
        del kernel.KERNELS["runtime_test"]


def test_the_devices_and_their_targets(gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.device_count() == 2
    assert [kernel.arch_of_device(device) for device in range(2)] == ["86", "90a"]
    # Past the cache, which outlives these devices.
    assert [gpu.of_device.__wrapped__(device) for device in range(2)] == [
        gpu.Gpu("86", 84, 100 << 10, 99 << 10), gpu.Gpu("90a", 132, 228 << 10, 227 << 10)
    ]  # fmt: skip

    def fail() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(gpus, "getDeviceCount", fail)
    assert kernel.device_count() == 0
    monkeypatch.setattr(kernel, "cupy", None)
    monkeypatch.setattr(gpus, "getDeviceCount", lambda: 2)
    assert kernel.device_count() == 0


def test_the_archs_come_from_nvml_or_else_from_cuda(gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert kernel.present_archs() == ["86", "90a"]
    monkeypatch.setattr(kernel, "_archs_from_nvml", lambda: ["80"])
    assert kernel.present_archs() == ["80"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert kernel.present_archs() == []


@pytest.mark.parametrize(
    "op", ["no_such_op", "specialize", "CompileError", len, pytest.param(run_python, id="own"), None]
)
def test_specialize_takes_only_ops(op: Any) -> None:
    with pytest.raises(TypeError, match="op must be a function of cukern with specialized variants, or its name, got "):
        cukern.specialize(op, experts=8)


def test_specialize_names_the_sizes_of_an_op() -> None:
    sizes = "experts, groups, scoring_func, biased"
    for wrong in ({"expert": 96}, {}, {"experts": 96, "topk": 4}):
        with pytest.raises(TypeError, match=rf"the sizes of moe_fused_gate are {sizes}: (missing|got an unexpected)"):
            cukern.specialize(cukern.moe_fused_gate, **wrong)


def test_specialize_says_that_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "available", lambda: "ImportError: no cupy")
    before = set(gates.registered)
    with pytest.raises(RuntimeError, match=r"compiles, and NVRTC cannot be used here \(ImportError: no cupy\)"):
        cukern.specialize("moe_fused_gate", experts=96, groups=4)
    assert gates.registered == before


def test_specialize_compiles_for_every_gpu(gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    compiled: list[tuple[Instance, str]] = []
    monkeypatch.setattr(compiler, "compile_all", compiled.extend)
    made = cukern.specialize("moe_fused_gate", experts=256, groups=8)
    assert made and {*made} == {str(instance) for instance, _ in compiled}
    assert {arch for _, arch in compiled} == {"86", "90a"}
    assert all(instance.arguments[1:3] == (256, 8) for instance, _ in compiled)


def test_specialize_fits_the_named_function(gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(compiler, "compile_all", lambda work: None)
    before = set(gates.registered)
    try:
        for name, scoring, biased in (
            ("topk_softmax", "any", False), ("grouped_topk", "any", False), ("topk_sigmoid", "any", False),
            ("biased_grouped_topk", "sigmoid", True),
        ):  # fmt: skip
            cukern.specialize(name, experts=60)
            config = gates.Config(60, 1, scoring, biased)
            assert config in gates.registered - before
            gates.registered.discard(config)
        cukern.specialize("topk_softmax", experts=60, biased=True)
        assert gates.registered - before == {gates.Config(60, 1, "softmax", True)}
        # The call of the function, and not only one that it could make.
        cukern.specialize("topk_softmax", experts=60)
        own = np.zeros((64, 60), np.float32)
        written = np.zeros((64, 4), np.float32), np.zeros((64, 4), np.int32)
        assert "EXPERTS=60" in str(cukern.explain(cukern.topk_softmax, *written, own, arch="90a"))
    finally:
        gates.registered.intersection_update(before)
        gates.choose.cache_clear()


# --- compiling at import --------------------------------------------------------------------------------


@pytest.fixture
def compiled_at_import(gpus: FakeGPUs, cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Instance, str]]:
    """What an import would compile on a machine with two GPUs and an empty cache."""
    compiled: list[tuple[Instance, str]] = []
    monkeypatch.delenv("CUKERN_COMPILE", raising=False)
    monkeypatch.setattr(kernel, "compile_with_progress", compiled.extend)
    return compiled


def test_an_import_compiles_all_for_every_gpu(compiled_at_import: list[tuple[Instance, str]]) -> None:
    kernel.compile_at_import()
    at_import = list(kernel.instances())
    assert len(at_import) == len(set(at_import)) > 0
    assert set(compiled_at_import) == {(instance, arch) for instance in at_import for arch in ("86", "90a")}


def test_a_warm_import_compiles_nothing(
    compiled_at_import: list[tuple[Instance, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiler.cache_directory()
    for instance in kernel.instances():
        for arch in ("86", "90a"):
            (folder / (compiler.cached_path(instance, arch).name + ".json")).touch()
    kernel.compile_at_import()
    assert not compiled_at_import
    monkeypatch.setattr(compiler, "_file_name", lambda *args: "another")
    kernel.compile_at_import()
    assert compiled_at_import


def test_a_lazy_import_compiles_nothing(
    compiled_at_import: list[tuple[Instance, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUKERN_COMPILE", "lazy")
    kernel.compile_at_import()
    assert not compiled_at_import
    monkeypatch.setenv("CUKERN_COMPILE", "import")
    kernel.compile_at_import()
    assert compiled_at_import


def test_an_import_without_a_gpu_compiles_nothing(
    compiled_at_import: list[tuple[Instance, str]], gpus: FakeGPUs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "getDeviceCount", lambda: 0)
    kernel.compile_at_import()
    assert not compiled_at_import


def test_an_import_without_a_cache_compiles_nothing(
    compiled_at_import: list[tuple[Instance, str]], cache: Path
) -> None:
    cache.write_text("")
    kernel.compile_at_import()
    assert not compiled_at_import


def test_an_import_survives_a_failure(
    compiled_at_import: list[tuple[Instance, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(work: Any) -> None:
        raise CompileError("moe_gate.cu(3): error")

    monkeypatch.setattr(kernel, "compile_with_progress", fail)
    with pytest.warns(RuntimeWarning, match=r"moe_gate\.cu\(3\): error\nRun `python -m cukern doctor`"):
        kernel.compile_at_import()


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal(
    terminal: bool, templates: Path, two_workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    kernel.compile_with_progress(WORK)
    assert_all_compiled()
    assert ("compiling kernels" in screen.getvalue()) == terminal
    assert (f"{len(WORK)}/{len(WORK)}" in screen.getvalue()) == terminal


def test_an_unknown_mode_is_refused() -> None:
    for mode in ("never", ""):
        done = run_python("import cukern", status=1, CUKERN_COMPILE=mode)
        assert done.stderr.endswith(f"ValueError: CUKERN_COMPILE must be 'import' or 'lazy', got {mode!r}\n")


# --- the import -----------------------------------------------------------------------------------------

ROUTE = """
import numpy as np, cukern
weights, ids = cukern.moe_fused_gate(np.zeros((2, 16), np.float32), np.arange(16, dtype=np.float32), 4, 2, 3)
assert ids.tolist() == [[15, 14, 13]] * 2, ids
"""


def test_the_import_brings_little() -> None:
    code = (
        "import sys, cukern; print(*{m.split('.')[0] for m in sys.modules} & {'torch', 'rich', 'matplotlib', 'scipy'})"
    )
    assert run_python(code).stdout.split() == []


def test_the_import_without_cupy() -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "cupy_backends"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
{ROUTE}
import torch
from cukern.runtime import arrays, compile, kernel
assert arrays.cupy is None and kernel.device_count() == 0
assert "cupy" in compile.available(), compile.available()
assert cukern.grouped_topk(None, torch.tensor([[1.0, 3.0]]), 1, True)[1].tolist() == [[1]]
class CUDA:
    def __dlpack__(self, **options): raise AssertionError
    def __dlpack_device__(self): return 2, 0
from cukern.runtime import gpu
for call in (lambda: cukern.grouped_topk(None, CUDA(), 1, True), lambda: gpu.of_device(0)):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    done = run_python(code)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"{what} on a GPU needs the package cupy: {INSTALL}" for what in ("an array", "a call")
    ]


@pytest.mark.parametrize("home", ["{file}", "{file}/below", "/proc"])
def test_a_home_that_cannot_be_used(home: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code = f"""
{ROUTE}
import os
from cukern.runtime import compile, nvrtc
from cukern.runtime.kernel import KERNELS
instance = [i for i in KERNELS["moe_gate"][0].specialized if i.arguments[1] == 64][:1]
compile.compile_all([(instance[0], "80")])
path, _ = compile.cubin(instance[0], "80")
print(path.parent, os.environ["CUPY_CACHE_DIR"], sep="\\n")
"""
    code = "import sys\n" + code
    done = run_python(code, **NO_CACHE, HOME=home.format(file=file))
    folders = [Path(line) for line in done.stdout.splitlines()]
    assert len(folders) == 2
    # They go with the process.
    assert not any(folder.exists() for folder in folders)
    assert re.search(r"RuntimeWarning: CuPy's cache folder \S+ cannot be made: \w", done.stderr)
    assert re.search(r"RuntimeWarning: the cache folder \S+ cannot be used: \w", done.stderr)


def test_a_forked_child_leaves_the_temporary_folders_of_its_parent(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code = """
import os, sys
import cukern
from cukern.runtime import compile
folders = str(compile.cache_directory()), os.environ["CUPY_CACHE_DIR"]
child = os.fork()
if not child:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert all(map(os.path.isdir, folders)), folders
print(*folders, sep="\\n")
"""
    folders = run_python(code, **NO_CACHE, HOME=str(file)).stdout.splitlines()
    assert len(folders) == 2 and not any(map(os.path.exists, folders))


def test_workers_start_without_a_home(tmp_path: Path) -> None:
    # They import CuPy too, in a new process.
    file = tmp_path / "file"
    file.write_text("")
    code = """
import cukern.runtime.compile as compiler
from cukern.runtime import nvrtc
from cukern.runtime.kernel import KERNELS
def refuse(job):
    raise AssertionError("compiled here")
nvrtc.compile_to_cache = refuse
compiler._worker_count = lambda jobs: 2
work = [(i, "80") for i in KERNELS["moe_gate"][0].specialized if i.arguments[1] == 64][:2]
compiler.compile_all(work)
assert all(compiler.is_intact(compiler.cached_path(*item)) for item in work)
"""
    run_python(code, **NO_CACHE, HOME=str(file))


def test_a_cache_folder_of_cupy_that_can_be_used_is_left_alone(tmp_path: Path) -> None:
    code = "import os, cukern, cupy; print(os.environ.get('CUPY_CACHE_DIR'))"
    done = run_python(code, **NO_CACHE, HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == ("None\n", "")
    assert (tmp_path / ".cupy" / "kernel_cache").is_dir()
    own = tmp_path / "own"
    done = run_python(code, **NO_CACHE | {"CUPY_CACHE_DIR": str(own)}, HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"{own}\n", "")
    done = run_python(code, **NO_CACHE | {"CUPY_CACHE_DIR": "/proc/own"}, HOME=str(tmp_path))
    assert "CuPy's cache folder /proc/own cannot be made" in done.stderr


# --- with a GPU -----------------------------------------------------------------------------------------

CONTEXTS = """
import ctypes
def contexts():
    cuda = ctypes.CDLL("libcuda.so.1")
    assert cuda.cuInit(0) == 0
    count, states = ctypes.c_int(), []
    assert cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    for i in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert cuda.cuDeviceGet(ctypes.byref(device), i) == 0
        assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        states.append(active.value)
    return states
"""
ON_GPU = """
def route():
    x = cupy.asarray(np.arange(32, dtype=np.float32).reshape(4, 8))
    weights, ids = cukern.grouped_topk(None, x, 2, True)
    assert cupy.asnumpy(ids).tolist() == [[7, 6]] * 4
"""
IMPORT = f"""
import numpy as np, cupy, cukern
{CONTEXTS}{ON_GPU}
after_import = contexts()
route()
after_call = contexts()
import json
print(json.dumps([after_import, after_call]))
"""


@pytest.mark.gpu
def test_nvml_and_cuda_know_the_same_gpus() -> None:
    assert kernel._archs_from_nvml() == sorted({kernel.arch_of_device(d) for d in range(kernel.device_count())})


@pytest.mark.gpu
def test_the_import_on_a_gpu(cache: Path) -> None:
    environment = {"CUKERN_COMPILE": None}
    after_import, after_call = json.loads(run_python(IMPORT, **environment).stdout)
    # The probe sees a context where there is one.
    assert not any(after_import)
    assert after_call[0] == 1 and not any(after_call[1:])
    cubins = list(cache.glob("*.cubin"))
    assert len(cubins) == len(list(kernel.instances()))
    assert all(compiler.is_intact(path) for path in cubins)
    times = {path: path.stat().st_mtime_ns for path in cubins}

    after_import, _ = json.loads(run_python(IMPORT, **environment).stdout)
    assert not any(after_import)
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.cubin")} == times

    # Spoilt files, found by the first launch.
    for path in cubins:
        _truncate(path)
    run_python(IMPORT, **environment)


@pytest.mark.gpu
def test_a_lazy_call_compiles_what_it_needs(cache: Path) -> None:
    run_python(IMPORT, CUKERN_COMPILE="lazy")
    assert len(list(cache.glob("*.cubin"))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["{file}", "/proc"])
def test_a_gpu_without_a_home(home: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    code = f"import cukern, cupy, numpy as np\n{ON_GPU}\nroute()"
    done = run_python(code, **NO_CACHE, CUKERN_COMPILE=None, HOME=home.format(file=file))
    assert re.search(r"RuntimeWarning: the cache folder \S+ cannot be used: \w", done.stderr)


@pytest.mark.gpu
def test_a_launch_from_a_new_thread() -> None:
    x = cupy.asarray(np.arange(32, dtype=np.float32).reshape(4, 8))
    out = cupy.asarray(np.zeros((4, 2), np.float32)), cupy.asarray(np.full((4, 2), -5, np.int32))
    cupy.cuda.runtime.deviceSynchronize()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            # Its first act: nothing has given this thread a context.
            cukern.grouped_topk(None, x, 2, True, out=out)
        except BaseException as error:
            errors.append(error)

    for _ in range(3):
        out[1][...] = -5
        cupy.cuda.runtime.deviceSynchronize()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert not errors, errors[0]
        cupy.cuda.runtime.deviceSynchronize()
        assert cupy.asnumpy(out[1]).tolist() == [[7, 6]] * 4


USES_OF_ANOTHER_GPU = {
    "CuPy, its GPU current": """
cupy.cuda.Device(1).use()
route()
before = [0, 1]
""",
    "torch, the other GPU current": """
import torch
x = torch.arange(32, dtype=torch.float32, device="cuda:1").reshape(4, 8)
before = contexts()
weights, ids = cukern.grouped_topk(None, x, 2, True)
assert ids.tolist() == [[7, 6]] * 4
assert torch.cuda.current_device() == 0
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("use", USES_OF_ANOTHER_GPU.values(), ids=USES_OF_ANOTHER_GPU)
def test_a_gpu_that_is_not_used_has_no_context(use: str) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine has one GPU")
    code = f"""
import cukern, cupy, numpy as np
{CONTEXTS}{ON_GPU}{use}
assert before[1] == 1
print(contexts()[:2] == before[:2])
"""
    assert run_python(code).stdout == "True\n"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 5), (0, 8), (4, 0), (7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", ["float32", "int32", "bfloat16"])
def test_results_come_from_the_callers_library(shape: tuple[int, ...], name: str) -> None:
    for like in (torch.empty(1, device="cuda"), cupy.asarray(np.zeros(1))):
        library = arrays.library_of(like)
        assert library is not None
        made = library.empty(shape, name, like)
        assert isinstance(made, type(like))
        assert (tuple(made.shape), library.dtype(made), library.device(made)) == (shape, name, 0)
        wanted = np.empty(shape, np.int8).strides if 0 not in shape else library.strides(made)
        assert library.strides(made) == wanted
        values = np.ones(shape, arrays.numpy_dtype(name))
        np.testing.assert_array_equal(library.to_numpy(library.from_numpy(values, like)), values)


@pytest.mark.gpu
def test_the_current_stream_is_the_librarys() -> None:
    stream = torch.cuda.Stream()
    of_torch = arrays.library_of(torch.empty(1, device="cuda"))
    assert of_torch is not None
    assert of_torch.stream(0) == torch.cuda.current_stream().cuda_stream != stream.cuda_stream
    with torch.cuda.stream(stream):
        assert of_torch.stream(0) == stream.cuda_stream
    own = cupy.cuda.Stream(non_blocking=True)
    assert arrays.CUPY.stream(0) == cupy.cuda.get_current_stream().ptr != own.ptr
    with own:
        assert arrays.CUPY.stream(0) == own.ptr
