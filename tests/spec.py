"""The spec of a family: the facts about its functions that the shared suites need, and calls of the functions.

`tests/specs/<stem>.py` defines `SPEC`, a `Spec`. The suites and the documentation find it by its file name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import cukern
import cukern.torch_ops
from cukern.runtime import arrays
from cukern.runtime.compile import Instance
from cukern.runtime.cuda import cupy
from cukern.runtime.kernel import Variant
from tests.buffers import OnlyDLPack

#: Libraries and devices of a call's arrays. Tensors and CuPy arrays may be on another GPU: "cuda:1", "cupy:1". The
#: arrays of "foreign" and "foreign cuda" only support DLPack.
PLACES = ("numpy", "cpu", "foreign", "cupy", "cuda", "foreign cuda")

BF16 = torch.bfloat16
DTYPES = ("float32", "float16", "bfloat16")
#: Dynamic shared memory per block on the smaller Ampere and Ada GPUs, on an A100 and on Hopper.
SHARED_BYTES = {"99 KiB": 99 << 10, "163 KiB": 163 << 10, "227 KiB": 227 << 10}
#: A parameter with one value for all rows.
SHARE = torch.tensor(0.7)

#: The promises that each call keeps unless it or its function is exempt. The keys are the words of `exempt`.
PROMISES = {
    "call": "the suites can call the function by itself",
    "twin": "the GPU and tensors in host memory give the results of the twin",
    "foreign": "arrays that are known by DLPack alone give the same results",
    "out": "results go into `out`",
    "strides": "strided arrays give the same results or are refused by name",
    "places": "an array of another library or device is refused by name",
    "stream": "the call waits for earlier work of the caller's stream",
    "graph": "a CUDA graph of the call follows its inputs",
    "device": "the call runs on the GPU of its arrays",
    "bits": "the call gives the same bits every time",
    "rows": "a row has the same bits in any batch",
    "batch": "one graph of torch.compile serves any batch",
    "late": "every call checks the scalar, which follows the word",
    "many rows": "arrays may have more than 2^31 elements",
}
#: Reasons why a function has no `many_rows`.
IN_ITS_FILE = {"many rows": "the tests of the family index what is far apart in its arrays"}
SMALL = {"many rows": "no array of its calls has so many elements"}

#: Names in `cukern.testing` of the tolerances of a call's results: one name for all results, or one for each result.
#: None means exact.
Tolerances = str | tuple[str | None, ...] | None


class Bits(NamedTuple):
    """A row of a table of docs/batch_invariance.md: the inputs that the bits of a result depend on."""

    #: The table: "row" if a row depends only on itself, "copies" for copies and integers, "batch" for all others.
    table: str
    #: The result whose bits the row describes, such as "a token". `on` is the input that they depend on.
    of: str = ""
    on: str = ""


COPIES = Bits("copies")


@dataclass(frozen=True)
class Function:
    """The facts of a public function."""

    #: The arguments that grow with the batch. The batch is dimension 0, or the number after a colon: "ids:1 lengths".
    batch: str = ""
    #: None if the text of docs/batch_invariance.md describes the function.
    bits: Bits | None = None
    #: By argument: how to make its values for a batch that is N times as large, if copies of the values are wrong.
    grown: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = field(default_factory=dict)
    tolerance: Tolerances = None
    #: Calls on x, bfloat16 [rows, COLUMNS], with more than 2^31 elements. A row of a result depends on its row of x.
    many_rows: Sequence[Callable[[Any], Any]] = ()
    #: The promises that no call keeps, with the reason. "places" may be followed by the argument that is exempt.
    exempt: Mapping[str, str] = field(default_factory=dict)
    #: The ops that a composition calls.
    parts: Sequence[str] = ()

    @property
    def batch_dims(self) -> dict[str, int]:
        """Return the batch dimension of each argument that has one."""
        pairs = (word.partition(":") for word in self.batch.split())
        return {argument: int(dim or 0) for argument, _, dim in pairs}


class Call(NamedTuple):
    """The name of a function of cukern, and its arguments. The arrays of a spec are tensors in host memory."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    #: The argument that is a tensor in an overload of the operator, and a number in the default overload.
    late: str = ""
    #: A name for the call among the calls of its function. By default its options name it.
    note: str = ""
    #: The tolerance, if it differs from the function's.
    tolerance: Tolerances = None
    #: The promises that this call does not keep, with the reason.
    exempt: Mapping[str, str] = {}

    def operator(self, overload: str = "default") -> Any:
        if self.late:
            overload = self.late if overload == "default" else f"{self.late}_{overload}"
        return getattr(getattr(torch.ops.cukern, self.name), overload)

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(cukern, self.name)

    @property
    def results(self) -> list[str]:
        """Return the names of the operator's results; none if it only writes arguments."""
        return [result.name for result in self.operator()._schema.returns]

    @property
    def written(self) -> list[str]:
        """Return the names of the arguments that the operator writes if they are given."""
        arguments = self.operator()._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @property
    def given(self) -> dict[str, Any]:
        """Return the arguments by name."""
        names = [a.name for a in self.operator()._schema.arguments]
        return dict(zip(names, self.args, strict=False)) | self.options

    def changed(self, change: Callable[[str, Any], Any]) -> Call:
        """Return the call with each array x replaced by `change(name, x)`, also in lists."""

        def change_all(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [change_all(name, x) for x in value]
            return change(name, value) if hasattr(value, "__dlpack__") else value

        given = {name: change_all(name, value) for name, value in self.given.items()}
        args, options = tuple(given.values())[: len(self.args)], {name: given[name] for name in self.options}
        return self._replace(args=args, options=options)

    def on(self, place: str) -> Call:
        """Return the call with its arrays copied to one of `PLACES`."""
        return self.changed(lambda _, array: copied(array, place))

    @property
    def arrays(self) -> list[Any]:
        """Return all arrays among the arguments, also in lists."""
        return [x for value in self.given.values() for x in as_list(value) if hasattr(x, "__dlpack__")]

    @property
    def writes(self) -> list[Any]:
        """Return the arguments that the call writes."""
        given = self.given
        return [x for name in self.written if given.get(name) is not None for x in as_list(given[name])]

    def run(self, function: Callable[..., Any] | None = None, **options: Any) -> list[Any]:
        """Call `function`. Return its results, then the arguments that it writes."""
        returned = (function or self.function)(*self.args, **self.options, **options)
        return (as_list(returned) if self.results else []) + self.writes

    def outcome(self, function: Callable[..., Any] | None = None) -> list[Any]:
        """Call `run` on copies of the written arguments, so that the arguments of this call do not change."""
        return self.changed(lambda name, x: _copied(x, x.device) if name in self.written else x).run(function)

    def expected(self) -> list[Any]:
        """Return the outcome of the call's own function."""
        return self.outcome()

    def poisoned_results(self) -> dict[str, torch.Tensor]:
        """Return poisoned tensors for the results of the overload `.out`."""
        return {name: poisoned(x) for name, x in zip(self.results, self.expected(), strict=False)}


def as_list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def poisoned(wanted: torch.Tensor) -> torch.Tensor:
    """Return a tensor like `wanted` whose elements are all wrong."""
    if wanted.dtype == torch.bool:
        return ~wanted
    if wanted.itemsize == 1:
        return (~wanted.view(torch.uint8)).view(wanted.dtype)
    return torch.full_like(wanted, torch.nan if wanted.is_floating_point() else -7)


def _copied(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy `tensor` with its strides. The bytes between its elements are 0xFF: NaN or -1."""
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.full((elements * tensor.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def copied(tensor: torch.Tensor, place: str) -> Any:
    """Copy a tensor in host memory, with its strides, to one of `PLACES`."""
    if place.startswith("foreign"):
        return OnlyDLPack(copied(tensor, "cupy" if place == "foreign cuda" else "numpy"))
    library, _, index = place.partition(":")
    if library in ("cpu", "cuda"):
        return _copied(tensor, place)
    copy = _copied(tensor, "cpu")
    # NumPy has bfloat16 only through ml_dtypes, so copy the bits as integers.
    extended = copy.dtype == torch.bfloat16
    array = copy.view(torch.int16).numpy().view(arrays.numpy_dtype("bfloat16")) if extended else copy.numpy()
    if library == "numpy":
        return array
    memory = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage())
    with cupy.cuda.Device(int(index or 0)):
        # Copy bytes, because dtype and strides are arbitrary.
        return cupy.ndarray(array.shape, array.dtype, cupy.asarray(memory.numpy()).data, array.strides)


@dataclass(frozen=True)
class Spec:
    """The facts about a family that the shared suites need."""

    functions: Mapping[str, Function] = field(default_factory=dict)
    #: Small calls, with seeds for random draws. Each optional argument that is written has a call.
    calls: Sequence[Call] = ()
    #: Calls that reach other variants of the kernels: rows in parts, variants by name.
    large_calls: Sequence[Call] = ()
    #: Return one instance of each code path of the templates that compiles at its first use.
    at_first_use: Callable[[], Iterable[Variant]] = tuple
    #: Whether the instances of `at_first_use` do not spill registers either.
    none_spills: bool = False
    #: Bytes that a release of NVRTC spills, by kernel and architecture. These kernels need a few registers more than a
    #: thread can have, or more than the 128 that let a multiprocessor hold two blocks.
    allowed_spills: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    #: For architectures other than sm_90a the tests compile every N-th specialized instance. If N divides no number of
    #: values of a template parameter, the compiled instances cover each value of each parameter.
    alike: int = 1
    #: Return whether an instance of `at_first_use` needs a cluster of blocks, which sm_80 does not have.
    needs_cluster: Callable[[Instance], bool] = lambda instance: False
    #: The notebooks, if they do not have the name of the stem.
    notebooks: Sequence[str] = ()


# --- the arrays of a spec ---------------------------------------------------------------------------------


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def drawn(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return random integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def outputs(tokens: int, topk: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return poisoned weights and ids of a gate, so that an element that is not written shows."""
    weights = torch.full((tokens, topk), torch.nan, device=device)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=device)


def fp8_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `x` rounded to FP8. They are uint8 because opcheck cannot multiply FP8 numbers."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def in_variants(call: Call, *variants: str) -> list[Call]:
    return [call._replace(options={**call.options, "variant": variant}) for variant in variants]


def widths(dtype: str) -> Iterator[int]:
    """Yield the bytes of a load, from 16 down to the size of one element."""
    return (width for width in (16, 8, 4, 2, 1) if width >= arrays.ITEM_SIZE[dtype])


def continued(sums: torch.Tensor, times: int) -> torch.Tensor:
    """Continue cumulative sums for a batch that is `times` as large."""
    return torch.cat([sums[:1], *(sums[1:] + i * sums[-1] for i in range(times))])


#: The shape of x in `Function.many_rows`.
ROWS, COLUMNS = 2**19 + 64, 4096


def row_numbers(x: Any) -> Any:
    """Return the row numbers of x, int32 [rows, 1]."""
    if isinstance(x, torch.Tensor):
        return torch.arange(x.shape[0], dtype=torch.int32, device=x.device).view(-1, 1)
    return np.arange(x.shape[0], dtype=np.int32).reshape(-1, 1)


def zeros_like(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else np.zeros_like(x)
