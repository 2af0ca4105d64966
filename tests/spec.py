"""A family's spec: what the shared suites know of its functions, and the calls that they make of them.

`tests/specs/<stem>.py` defines `SPEC`, a `Spec`. The suites and the documentation find it by its file.
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

#: Places of a call's arrays. Tensors and CuPy arrays may be on another GPU: "cuda:1", "cupy:1". Arrays of "foreign" and
#: "foreign cuda" are known by DLPack alone.
PLACES = ("numpy", "cpu", "foreign", "cupy", "cuda", "foreign cuda")

BF16 = torch.bfloat16
DTYPES = ("float32", "float16", "bfloat16")
#: The dynamic shared memory of a block on the smaller Ampere and Ada GPUs, on an A100 and on Hopper.
SHARED_BYTES = {"99 KiB": 99 << 10, "163 KiB": 163 << 10, "227 KiB": 227 << 10}
#: A parameter that is one number for all rows.
SHARE = torch.tensor(0.7)

#: What each call promises, unless it or its function is exempt, by the word that `exempt` takes.
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
#: Why functions have no call of `many_rows`.
IN_ITS_FILE = {"many rows": "the tests of the family index what is far apart in its arrays"}
SMALL = {"many rows": "no array of its calls has so many elements"}

#: Names in `cukern.testing` of the tolerances of a call's results: one for all or one for each. None is exact.
Tolerances = str | tuple[str | None, ...] | None


class Bits(NamedTuple):
    """What the bits of a result depend on: a line of a table of docs/batch_invariance.md."""

    #: The table: "row" for a row that depends on itself alone, "copies" for copies and integers, "batch" for the rest.
    table: str
    #: What has these bits, such as "a token".
    of: str = ""
    on: str = ""


COPIES = Bits("copies")


@dataclass(frozen=True)
class Function:
    """The facts of a public function."""

    #: The arguments that have the batch, each in its first dimension or in the one behind a colon: "ids:1 lengths".
    batch: str = ""
    #: None where the text of docs/batch_invariance.md tells it.
    bits: Bits | None = None
    #: The values of an argument in a larger batch, a given number of times as large, where copies are wrong.
    grown: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = field(default_factory=dict)
    tolerance: Tolerances = None
    #: Calls on x, bfloat16 [rows, COLUMNS] of more than 2^31 elements. Rows of the results depend on their rows of x.
    many_rows: Sequence[Callable[[Any], Any]] = ()
    #: The promises that no call makes, with why. A word may follow: the argument that is exempt from "places".
    exempt: Mapping[str, str] = field(default_factory=dict)
    #: The ops behind a function that is none.
    parts: Sequence[str] = ()

    @property
    def batch_dims(self) -> dict[str, int]:
        """The dimension that is the batch, by argument."""
        pairs = (word.partition(":") for word in self.batch.split())
        return {argument: int(dim or 0) for argument, _, dim in pairs}


class Call(NamedTuple):
    """A function of cukern by its name, and its arguments; the arrays of a spec are tensors in host memory."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    #: The argument that is a tensor where the default overload of the operator takes a number.
    late: str = ""
    #: What names the call among the calls of its function; by default its options.
    note: str = ""
    #: The tolerance, where the function has another one.
    tolerance: Tolerances = None
    #: The promises that this call does not make, with why.
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
        """The names of the operator's results; none if it only writes arguments."""
        return [result.name for result in self.operator()._schema.returns]

    @property
    def written(self) -> list[str]:
        """The names of the arguments that are written, where they are given."""
        arguments = self.operator()._schema.arguments
        return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by their names."""
        names = [a.name for a in self.operator()._schema.arguments]
        return dict(zip(names, self.args, strict=False)) | self.options

    def changed(self, change: Callable[[str, Any], Any]) -> Call:
        """This call with `change(name, array)` for each array, also those in lists."""

        def change_all(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [change_all(name, x) for x in value]
            return change(name, value) if hasattr(value, "__dlpack__") else value

        given = {name: change_all(name, value) for name, value in self.given.items()}
        args, options = tuple(given.values())[: len(self.args)], {name: given[name] for name in self.options}
        return self._replace(args=args, options=options)

    def on(self, place: str) -> Call:
        """This call on arrays of its own, of one of `PLACES`."""
        return self.changed(lambda _, array: copied(array, place))

    @property
    def arrays(self) -> list[Any]:
        """All arrays among the arguments, also those in lists."""
        return [x for value in self.given.values() for x in as_list(value) if hasattr(x, "__dlpack__")]

    @property
    def writes(self) -> list[Any]:
        """The arguments that are written."""
        given = self.given
        return [x for name in self.written if given.get(name) is not None for x in as_list(given[name])]

    def run(self, function: Callable[..., Any] | None = None, **options: Any) -> list[Any]:
        """What a call of `function` returns, then the arguments that it writes."""
        returned = (function or self.function)(*self.args, **self.options, **options)
        return (as_list(returned) if self.results else []) + self.writes

    def outcome(self, function: Callable[..., Any] | None = None) -> list[Any]:
        """`run` on copies of the arguments that are written, so that those of this call stay as they are."""
        return self.changed(lambda name, x: _copied(x, x.device) if name in self.written else x).run(function)

    def expected(self) -> list[Any]:
        """The outcome of the function."""
        return self.outcome()

    def poisoned_results(self) -> dict[str, torch.Tensor]:
        """Tensors for the results of the overload `.out`, poisoned."""
        return {name: poisoned(x) for name, x in zip(self.results, self.expected(), strict=False)}


def as_list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def poisoned(wanted: torch.Tensor) -> torch.Tensor:
    """A tensor like `wanted` of which no element is right."""
    if wanted.dtype == torch.bool:
        return ~wanted
    if wanted.itemsize == 1:
        return (~wanted.view(torch.uint8)).view(wanted.dtype)
    return torch.full_like(wanted, torch.nan if wanted.is_floating_point() else -7)


def _copied(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """A copy of `tensor` with its strides; the bytes between its elements are NaN or -1."""
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.full((elements * tensor.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def copied(tensor: torch.Tensor, place: str) -> Any:
    """A copy of a tensor in host memory, with its strides, as an array of one of `PLACES`."""
    if place.startswith("foreign"):
        return OnlyDLPack(copied(tensor, "cupy" if place == "foreign cuda" else "numpy"))
    library, _, index = place.partition(":")
    if library in ("cpu", "cuda"):
        return _copied(tensor, place)
    copy = _copied(tensor, "cpu")
    # NumPy knows bfloat16 only through ml_dtypes, so the bits travel as integers.
    extended = copy.dtype == torch.bfloat16
    array = copy.view(torch.int16).numpy().view(arrays.numpy_dtype("bfloat16")) if extended else copy.numpy()
    if library == "numpy":
        return array
    memory = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage())
    with cupy.cuda.Device(int(index or 0)):
        # Byte by byte, whatever the dtype and the strides.
        return cupy.ndarray(array.shape, array.dtype, cupy.asarray(memory.numpy()).data, array.strides)


@dataclass(frozen=True)
class Spec:
    """What the shared suites know of a family."""

    functions: Mapping[str, Function] = field(default_factory=dict)
    #: Small calls, with seeds for random draws, and one with each optional argument that is written.
    calls: Sequence[Call] = ()
    #: Calls that take other ways through the kernels: rows in parts, variants by name.
    large_calls: Sequence[Call] = ()
    #: Gives one instance of each path through the templates that is compiled at its first use.
    at_first_use: Callable[[], Iterable[Variant]] = tuple
    #: Whether no instance of `at_first_use` spills registers either.
    none_spills: bool = False
    #: Bytes that a release of NVRTC spills all the same, by kernel and architecture: a few registers beyond the most
    #: that a thread can have, or beyond the 128 with which a multiprocessor holds two blocks.
    allowed_spills: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)
    #: One of this many specialized instances is compiled for an architecture other than sm_90a. A number that divides
    #: no side of the product of the template parameters meets each of their values.
    alike: int = 1
    #: Whether an instance of `at_first_use` needs a cluster of blocks, which sm_80 has not.
    needs_cluster: Callable[[Instance], bool] = lambda instance: False
    #: The notebooks, where they are not one of the stem's name.
    notebooks: Sequence[str] = ()


# --- the arrays of a spec ---------------------------------------------------------------------------------


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def flags(*values: bool) -> torch.Tensor:
    return torch.tensor(values)


def drawn(high: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Integers below `high`."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def outputs(tokens: int, topk: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids of a gate, poisoned, so that an element that is not written shows."""
    weights = torch.full((tokens, topk), torch.nan, device=device)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=device)


def fp8_bytes(x: torch.Tensor) -> torch.Tensor:
    """`x` rounded to FP8, as bytes: opcheck cannot multiply numbers of FP8."""
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def in_variants(call: Call, *variants: str) -> list[Call]:
    return [call._replace(options={**call.options, "variant": variant}) for variant in variants]


def widths(dtype: str) -> Iterator[int]:
    """Bytes of a load, from the widest to one element."""
    return (width for width in (16, 8, 4, 2, 1) if width >= arrays.ITEM_SIZE[dtype])


def continued(sums: torch.Tensor, times: int) -> torch.Tensor:
    """Cumulative sums of a batch that is so many times as large."""
    return torch.cat([sums[:1], *(sums[1:] + i * sums[-1] for i in range(times))])


#: Rows and columns of `Function.many_rows`.
ROWS, COLUMNS = 2**19 + 64, 4096


def row_numbers(x: Any) -> Any:
    """int32 [rows, 1]: the numbers of the rows of x."""
    if isinstance(x, torch.Tensor):
        return torch.arange(x.shape[0], dtype=torch.int32, device=x.device).view(-1, 1)
    return np.arange(x.shape[0], dtype=np.int32).reshape(-1, 1)


def zeros_like(x: Any) -> Any:
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else np.zeros_like(x)
