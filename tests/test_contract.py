"""What every function does, whatever it computes: one test per promise, over the calls of all functions."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch

from cukern.runtime import arrays
from cukern.runtime.cuda import cupy
from cukern.testing import assert_matches
from tests.buffers import OnlyDLPack, same_bits
from tests.spec import COLUMNS, ROWS, Call, Tolerances, as_list, copied, floats, poisoned
from tests.specs import ALL, CALLS, FUNCTIONS, calls_of, parameters, why_exempt

HOST, GPU = ("numpy", "cpu", "foreign"), ("cupy", "cuda", "foreign cuda")


def _with(promise: str, condition: Callable[[Call], bool] = lambda call: True, small: bool = False) -> Any:
    """A parametrization over the calls that a promise is made for."""
    keys = [key for key in calls_of(promise) if condition(ALL[key]) and (key in CALLS or not small)]
    return pytest.mark.parametrize("key", parameters(keys))


def has_out(call: Call) -> bool:
    # Where vLLM's functions have `out`, it is an argument like the others, and written.
    parameter = inspect.signature(call.function).parameters.get("out")
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


# --- results ------------------------------------------------------------------------------------------


def values(result: Any) -> Any:
    """A result in NumPy; what is no array as it is. FP8 as its bytes, as which CuPy has it."""
    result = result.array if isinstance(result, OnlyDLPack) else result
    if not arrays.is_array(result):
        return result
    library = arrays.library_of(result)
    assert library is not None
    with result.device if library is arrays.CUPY else nullcontext():
        array = library.to_numpy(result)
    return array.view(np.uint8) if array.dtype.name.startswith("float8") else array


def assert_same(got: list[Any], want: list[Any]) -> None:
    """The same bits, and the same of what is no array."""
    assert len(got) == len(want) > 0
    for ours, theirs in zip(map(values, got), map(values, want), strict=True):
        if isinstance(theirs, np.ndarray):
            same_bits(ours, theirs)
        else:
            assert type(ours) is type(theirs)
            assert ours == theirs


def tolerances(key: str) -> Tolerances:
    return ALL[key].tolerance or FUNCTIONS[ALL[key].name].tolerance


def assert_close(allowed: Tolerances, got: list[Any], want: list[Any]) -> None:
    """The same values, or as close to them as is allowed."""
    assert len(got) == len(want) > 0
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        name = allowed[i] if isinstance(allowed, tuple) else allowed
        if not arrays.is_array(theirs):
            assert (type(ours), ours) == (type(theirs), theirs)
        elif name is None:
            ours, theirs = values(ours), values(theirs)
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(ours, theirs)
        elif arrays.library_of(theirs).dtype(theirs) == "float8_e4m3fn":  # type: ignore[union-attr]
            fp8 = arrays.numpy_dtype("float8_e4m3fn")
            assert_matches(name, values(ours).view(fp8), values(theirs).view(fp8))
        else:
            assert_matches(name, values(ours), values(theirs))


def assert_of_place(results: list[Any], place: str) -> None:
    """The arrays among the results are of the caller's library, on the caller's device."""
    library, _, index = place.partition(":")
    for result in results:
        if not arrays.is_array(result):
            continue
        if library in ("cpu", "cuda"):
            assert type(result) is torch.Tensor
            assert result.device == torch.device(library, int(index or 0) if library == "cuda" else None)
        elif library in ("cupy", "foreign cuda"):
            assert type(result) is cupy.ndarray
            assert result.device.id == int(index or 0)
        else:
            assert type(result) is np.ndarray


def returned_by(call: Call, results: list[Any]) -> list[Any]:
    """What of `call.run()` the function returned, without the arguments that it writes."""
    return results[: len(results) - len(call.writes)]


def halved(call: Call) -> Call:
    """With float16 in place of bfloat16, which NumPy cannot exchange by DLPack."""
    return call.changed(lambda _, x: x.half() if x.dtype == torch.bfloat16 else x)


@_with("twin", small=True)
def test_tensors_in_host_memory_go_through_the_twin(key: str) -> None:
    on_numpy, on_cpu = CALLS[key].on("numpy"), CALLS[key].on("cpu")
    want, got = on_numpy.run(), on_cpu.run()
    assert_same(got, want)
    assert_of_place(want, "numpy")
    assert_of_place(got, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("key", parameters(ALL))
def test_every_library_gets_the_same_on_the_gpu(key: str) -> None:
    got, tensors = ALL[key].on("cupy").run(), ALL[key].on("cuda").run()
    assert_of_place(got, "cupy")
    assert_of_place(tensors, "cuda")
    assert_same(tensors, got)


@pytest.mark.gpu
@_with("twin", small=True)
def test_the_gpu_gives_what_the_twin_gives(key: str) -> None:
    # Those of larger calls are compared in each function's own tests.
    assert_close(tolerances(key), ALL[key].on("cupy").run(), ALL[key].on("numpy").run())


# --- foreign arrays -----------------------------------------------------------------------------------


def check_foreign(key: str, place: str, known: str) -> None:
    call = halved(ALL[key])
    want = call.on(known).run()
    foreign = call.on(place)
    got = foreign.run()
    assert_same(got, want)
    # A foreign array that cannot take its own comes back in the library that it entered by.
    assert_of_place(returned_by(foreign, got) if foreign.results else [], place)


@_with("foreign", small=True)
def test_foreign_arrays_in_host_memory(key: str) -> None:
    check_foreign(key, "foreign", "numpy")


@pytest.mark.gpu
@_with("foreign")
def test_foreign_arrays_on_the_gpu(key: str) -> None:
    check_foreign(key, "foreign cuda", "cupy")


# --- out= ---------------------------------------------------------------------------------------------


def _one_or_all(results: list[Any]) -> Any:
    return tuple(results) if len(results) > 1 else results[0]


def check_out(key: str, place: str) -> None:
    call = halved(ALL[key]) if place.startswith("foreign") else ALL[key]
    plain = call.on("cpu" if place in HOST else "cuda")
    want = plain.run()
    results = [x for x in returned_by(plain, want) if isinstance(x, torch.Tensor)]
    out = [copied(poisoned(x).cpu(), place) for x in results]
    given = call.on(place)
    returned = given.function(*given.args, **given.options, out=_one_or_all(out))
    arrays_of_it = [x for x in as_list(returned) if x is not None and not isinstance(x, int)]
    assert len(arrays_of_it) == len(out) and all(map(operator.is_, arrays_of_it, out))
    assert_same([*out, *given.writes], [*results, *plain.writes])


@pytest.mark.parametrize("place", HOST)
@_with("out", has_out, small=True)
def test_results_go_into_out(key: str, place: str) -> None:
    check_out(key, place)


@pytest.mark.gpu
@pytest.mark.parametrize("place", GPU)
@_with("out", has_out)
def test_results_go_into_out_on_the_gpu(key: str, place: str) -> None:
    check_out(key, place)


# --- arrays that lie or are elsewhere -----------------------------------------------------------------


def names_of_arrays(call: Call) -> list[str]:
    is_array = lambda x: isinstance(x, torch.Tensor)  # noqa: E731
    return [name for name, value in call.given.items() if any(map(is_array, as_list(value)))]


def attempt(call: Call) -> list[Any] | str:
    """What a call gives, or the message by which it is refused."""
    try:
        return call.run()
    except (TypeError, ValueError) as error:
        return str(error)


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with 3 others between two rows."""
    if tensor.ndim < 2:
        return tensor
    return torch.cat([tensor, tensor[..., :1].expand(*tensor.shape[:-1], 3)], dim=-1)[..., : tensor.shape[-1]]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with another one between any two."""
    return torch.stack([tensor, tensor.flip(-1)], dim=-1)[..., 0] if tensor.ndim else tensor


def check_strides(key: str, place: str) -> None:
    call = ALL[key]
    want = call.on(place).run()
    for name, change in itertools.product(names_of_arrays(call), (apart, strided)):
        laid = call.changed(lambda own, x, name=name, change=change: change(x) if own == name else x)
        if all(x.stride() == y.stride() for x, y in zip(laid.arrays, call.arrays, strict=True)):
            continue
        got = attempt(laid.on(place))
        if isinstance(got, str):
            assert name in got, f"{name} is refused by: {got}"
        else:
            assert_close(tolerances(key), got, want)


@pytest.mark.parametrize("place", ["numpy", "cpu"])
@_with("strides", small=True)
def test_no_strides_give_a_wrong_answer(key: str, place: str) -> None:
    check_strides(key, place)


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cupy", "cuda"])
@_with("strides", small=True)
def test_no_strides_give_a_wrong_answer_on_the_gpu(key: str, place: str) -> None:
    check_strides(key, place)


def check_places(key: str, place: str, others: tuple[str, ...]) -> None:
    call = ALL[key]
    names = [name for name in names_of_arrays(call) if not why_exempt(key, f"places {name}")]
    changes: list[tuple[str, str, Call]] = []
    for name, other in itertools.product(names, others):
        if len(names) > 1:  # one alone says where the call runs
            given = call.changed(lambda own, x, name=name, other=other: copied(x, other if own == name else place))
            changes.append((name, other, given))
    if has_out(call):
        plain = call.on("cuda" if place in GPU else "cpu")
        results = [x.cpu() for x in returned_by(plain, plain.run()) if isinstance(x, torch.Tensor)]
        for i, other in itertools.product(range(len(results)), others):
            out = [copied(x, other if i == j else place) for j, x in enumerate(results)]
            given = call.on(place)
            changes.append(("out", other, given._replace(options={**given.options, "out": _one_or_all(out)})))
    for name, other, given in changes:
        got = attempt(given)
        assert isinstance(got, str), f"{name} of {other} was taken"
        assert name in got, f"{name} of {other} is refused by: {got}"


@pytest.mark.parametrize(("place", "other"), [("numpy", "cpu"), ("cpu", "numpy")])
@_with("places", small=True)
def test_an_array_of_another_library_is_refused(key: str, place: str, other: str) -> None:
    check_places(key, place, (other,))


@pytest.mark.gpu
@pytest.mark.parametrize(("place", "others"), [("cupy", ("numpy", "cuda")), ("cuda", ("cpu", "numpy", "cupy"))])
@_with("places", small=True)
def test_an_array_of_another_place_is_refused(key: str, place: str, others: tuple[str, ...]) -> None:
    check_places(key, place, others)
    if place == "cuda" and torch.cuda.device_count() > 1:
        check_places(key, "cuda", ("cuda:1",))


# --- streams, graphs, devices -------------------------------------------------------------------------

#: How long inputs are late, in cycles of the GPU: 10 ms, in which the host is through with every call.
LATE = 20_000_000


def zeroed(call: Call) -> Call:
    """The call on zeros, in the same layout."""
    return call.changed(lambda _, x: copied(x, "cpu").zero_())


def copy_into(call: Call, given: Call) -> None:
    """Give a call the values of another one, in the memory that it has, on the current stream."""
    for to, value in zip(call.arrays, given.arrays, strict=True):
        if isinstance(to, torch.Tensor):
            to.copy_(value)
            continue
        to, value = (x.array if isinstance(x, OnlyDLPack) else x for x in (to, value))
        if to.flags.c_contiguous and value.flags.c_contiguous:
            to.data.copy_from_device_async(value.data, value.nbytes)
        else:
            to[...] = value


@_with("stream")
def test_zeros_have_other_results(key: str) -> None:
    # So that a call that does not wait for its inputs shows.
    call = ALL[key]._replace(options={name: x for name, x in ALL[key].options.items() if name != "variant"})
    want = call.on("numpy").run()
    with suppress(ValueError), pytest.raises(AssertionError):
        assert_same(zeroed(call).on("numpy").run(), want)


@pytest.mark.gpu
@pytest.mark.parametrize("place", GPU)
@_with("stream")
def test_the_callers_stream(key: str, place: str) -> None:
    call = halved(ALL[key]) if place == "foreign cuda" else ALL[key]
    real, late = call.on(place), zeroed(call).on(place)
    want = call.on(place).run()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), cupy.cuda.ExternalStream(stream.cuda_stream):
        # The kernels are loaded, and the stream has its memory, with results of zeros in it.
        late.run()
        torch.cuda._sleep(LATE)
        copy_into(late, real)
        got = late.run()
    stream.synchronize()
    assert_same(got, want)


@pytest.mark.gpu
@_with("graph")
def test_a_cuda_graph_follows_its_inputs(key: str) -> None:
    call = ALL[key]
    other = call.changed(lambda _, x: x.flip(0) if x.is_floating_point() and x.ndim else x)
    static = zeroed(call).on("cuda")
    plain = call.on("cuda")
    like = returned_by(plain, plain.run())
    out = [torch.empty_like(x) for x in like if isinstance(x, torch.Tensor)]
    # What is written would be written twice.
    into_out = has_out(call) and not static.writes
    static.run()  # loads the kernels, as a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = static.run()
        if into_out:
            static.run(out=_one_or_all(out))
    made = [x for x in returned_by(static, results) if isinstance(x, torch.Tensor)]
    for given in (call, other, call):
        fresh = given.on("cuda")
        want = fresh.run()
        wanted = [x for x in returned_by(fresh, want) if isinstance(x, torch.Tensor)]
        for to, value in zip((*made, *out), (*wanted, *wanted), strict=True):
            to.copy_(poisoned(value))
        copy_into(static, given.on("cuda"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, want)
        if into_out:
            assert_same(out, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "cuda"])
@_with("device")
def test_the_device_of_the_arrays(key: str, library: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    want, got = ALL[key].on(f"{library}:0").run(), ALL[key].on(f"{library}:1").run()
    assert torch.cuda.current_device() == cupy.cuda.runtime.getDevice() == 0
    assert_of_place(got, f"{library}:1")
    assert_same(got, want)


@pytest.mark.gpu
@_with("bits")
def test_the_same_bits_every_time(key: str) -> None:
    call = ALL[key].on("cuda")
    first = call.outcome()
    bits = lambda x: x.contiguous().view(-1).view(torch.uint8)  # noqa: E731
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(99):
        for ours, theirs in zip(call.outcome(), first, strict=True):
            if isinstance(theirs, torch.Tensor) and theirs.numel():
                different += (bits(ours) != bits(theirs)).any()
    assert different.item() == 0


# --- rows of a batch ------------------------------------------------------------------------------------

_SHARED = "key_cache", "value_cache"  # arrays that all rows read, however many blocks they have
_MOST_ROWS = 4096


def _of_rows(call: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    """The call with each array changed whose first dimension is that of the first one, the batch."""
    rows = call.arrays[0].shape[0]
    return call.changed(lambda name, x: change(x) if name not in _SHARED and x.shape[:1] == (rows,) else x)


def _check_rows(call: Call, times: int) -> None:
    """Check that rows have the same bits in a batch of so many times as many, and the first and the last one alone."""
    rows = call.arrays[0].shape[0]
    times = max(2, min(times, _MOST_ROWS // rows))
    want = call.outcome()
    assert any(torch.is_tensor(x) and x.shape[:1] == (rows,) for x in want)

    def check(changed: Call, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for ours, theirs in zip(changed.outcome(), want, strict=True):
            if torch.is_tensor(theirs):
                expected = change(theirs) if theirs.shape[:1] == (rows,) else theirs
                same_bits(*(x.contiguous().view(torch.uint8).cpu().numpy() for x in (ours, expected)))

    repeat = lambda x: x.repeat(times, *[1] * (x.dim() - 1))  # noqa: E731
    check(_of_rows(call, repeat), repeat)
    if "indices" in call.given:
        return  # which name rows of the batch
    for row in {0, rows - 1}:
        alone = lambda x, row=row: x[row : row + 1].clone()  # noqa: E731
        check(_of_rows(call, alone), alone)


@_with("rows", lambda call: "variant" not in call.options)
def test_a_row_of_the_twin_has_the_same_bits_in_any_batch(key: str) -> None:
    _check_rows(ALL[key], 9)


@pytest.mark.gpu
@_with("rows")
def test_a_row_has_the_same_bits_in_any_batch(key: str) -> None:
    _check_rows(ALL[key].on("cuda"), 400)


# --- more than 2^31 elements ----------------------------------------------------------------------------

MANY_ROWS = {f"{name} {i}": call for name, own in FUNCTIONS.items() for i, call in enumerate(own.many_rows)}


@pytest.mark.gpu
@pytest.mark.large(17)
@pytest.mark.parametrize("key", parameters(MANY_ROWS))
def test_more_than_2_31_elements(key: str) -> None:
    # Not for the sanitizer, which would take minutes. Up to four arrays like x are there at once.
    boundary = 2**31 // COLUMNS
    # At the start, around the boundary, and at the end; all else is 0.
    rows = np.r_[0:8, boundary - 8 : boundary + 8, ROWS - 8 : ROWS]
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16, device="cuda")
    x[torch.from_numpy(rows).cuda()] = floats(len(rows), COLUMNS, dtype=x.dtype).cuda()
    few = arrays.library_of(x).to_numpy(x[torch.from_numpy(rows).cuda()])  # type: ignore[union-attr]
    got = []
    for result in as_list(MANY_ROWS[key](x)):
        if arrays.is_array(result) and result.shape[0] > 1:
            each = ROWS // result.shape[0]
            result = result[torch.from_numpy(rows[::each] // each).cuda()]
        got.append(result)
    assert_close(FUNCTIONS[key.split()[0]].tolerance, got, as_list(MANY_ROWS[key](few)))
