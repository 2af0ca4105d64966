"""The rule of the rooms: an op has one file in each room, under one stem; a kernel has a file, a function a page."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import cukern
from notebooks import names
from tests import function_lengths, gpu_record
from tests.gpu_record import compositions, integrations
from tests.specs import SPECS

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20

COMPOSITIONS, INTEGRATIONS = compositions(), integrations()
#: Integrations that an engine's own loop times.
ENGINES = ("vllm",)
#: The notebooks of the compositions.
NOTEBOOKS = [notebook for name in COMPOSITIONS for notebook in SPECS[name].notebooks]
ROOMS = {
    "cuda_src": "cuda_src/{}.cu",
    "ops": "cukern/ops/{}.py",
    "reference": "cukern/reference/{}.py",
    "notebooks": "notebooks/{}.ipynb",
    "benchmarks": "benchmarks/bench_{}.py",
    "tests": "tests/test_{}.py",
    "docs": "docs/families/{}.md",
}
# A large op is a package in its room, and several kernels are a folder.
OPS_PACKAGE = "cukern/ops/{}/__init__.py"
# A composition of ops has a package in place of kernels and an op's file. It may have several notebooks and files of
# tests, and has a twin for its functions: a class runs on NumPy arrays by itself.
COMPOSITION_ROOMS = {
    "package": "cukern/{}/__init__.py",
    "reference": "cukern/reference/{}.py",
    "benchmarks": "benchmarks/bench_{}.py",
    "tests": "tests/test_{}*.py",
}
# Arguments of a launch that its twin need not have.
LAUNCH_ONLY = {"out", "variant"}


def _stems_in(pattern: str) -> set[str]:
    prefix, suffix = pattern.rsplit("/", 1)[1].split("{}")
    paths = ROOT.glob(pattern.format("*"))
    stems = {path.name.removeprefix(prefix).removesuffix(suffix) for path in paths}
    if pattern == ROOMS["ops"]:
        stems |= {path.parent.name for path in ROOT.glob(OPS_PACKAGE.format("*"))}
    if pattern == ROOMS["cuda_src"]:
        stems |= {path.parent.name for path in ROOT.glob("cuda_src/*/*.cu")}
    if pattern == ROOMS["notebooks"]:
        stems = {names.owner(stem, {*SPECS, *NOTEBOOKS, *INTEGRATIONS}) for stem in stems}
    return {stem for stem in stems if not stem.startswith("_")}


# tests/ also holds tests of other things than ops, so it names no stem.
STEMS = sorted(
    set().union(*(_stems_in(pattern) for room, pattern in ROOMS.items() if room != "tests"))
    - {*COMPOSITIONS, *NOTEBOOKS, *INTEGRATIONS}
)


def _module(room: str, stem: str) -> ModuleType:
    if room == "ops" and stem in COMPOSITIONS:
        return importlib.import_module(f"cukern.{stem}")
    return importlib.import_module(f"cukern.{room}.{stem}")


def _public_functions() -> Iterator[tuple[str, str]]:
    for stem in sorted(_stems_in(ROOMS["ops"]) | {*COMPOSITIONS}):
        module = _module("ops", stem)
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)):
                yield stem, name


FUNCTIONS = list(_public_functions())


def _split(function: Callable[..., object]) -> tuple[list[tuple[str, object]], set[str]]:
    """The positional parameters with their defaults, and the names of the keyword-only ones."""
    parameters = inspect.signature(function).parameters.values()
    positional = [(p.name, p.default) for p in parameters if p.kind is not p.KEYWORD_ONLY]
    return positional, {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_there_are_ops() -> None:
    # Every test below runs over these lists: an empty one would pass them all.
    assert STEMS
    assert FUNCTIONS


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("stem", STEMS)
def test_each_room_has_each_stem(stem: str, room: str) -> None:
    path = ROOMS[room].format(stem)
    is_package = room == "ops" and (ROOT / OPS_PACKAGE.format(stem)).is_file()
    is_package |= room == "cuda_src" and (ROOT / "cuda_src" / stem).is_dir() and bool(gpu_record.templates(stem))
    assert is_package != (ROOT / path).is_file(), f"write {path}: other rooms have {stem} (docs/guides/adding.md)"


@pytest.mark.parametrize("room", COMPOSITION_ROOMS)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_each_room_has_each_composition(name: str, room: str) -> None:
    if room == "reference" and name not in {stem for stem, _ in FUNCTIONS}:
        return
    path = COMPOSITION_ROOMS[room].format(name)
    assert any(ROOT.glob(path)), f"{path} is missing"


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_each_composition_has_its_notebooks(notebook: str) -> None:
    assert (ROOT / ROOMS["notebooks"].format(notebook)).is_file(), f"{notebook} is missing"


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_each_room_has_each_integration(name: str) -> None:
    rooms = ["tests/test_integrations_{}.py", "tests/test_integrations_{}_gpu.py"]
    if name not in ENGINES:
        rooms += [ROOMS["benchmarks"], ROOMS["notebooks"]]
    assert not [room.format(name) for room in rooms if not (ROOT / room.format(name)).is_file()]
    assert any((ROOT / "cukern" / "integrations" / name).glob("__init__.py"))
    assert f"cukern.integrations.{name}" in (ROOT / "README.md").read_text()


def _imported(path: Path) -> set[str]:
    """The modules of cukern that a file imports, or takes names from."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").removeprefix("cukern.")
            imported.add(module)
            imported.update(f"{module}.{alias.name}" for alias in node.names)
    return imported


@pytest.mark.parametrize("stem", STEMS)
def test_the_package_imports_each_op(stem: str) -> None:
    assert f"ops.{stem}" in _imported(ROOT / "cukern/__init__.py"), (
        f"import the functions of cukern.ops.{stem} in cukern/__init__.py"
    )


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_package_has_each_composition(name: str) -> None:
    code = f"import sys, cukern; print(cukern.{name}.__name__, 'torch' in sys.modules)"
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=settings, capture_output=True, text=True)
    assert done.stdout == f"cukern.{name} False\n", done.stderr


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_composition_has_no_kernels(name: str) -> None:
    assert not gpu_record.templates(name)


@pytest.mark.parametrize(("stem", "name"), FUNCTIONS)
def test_each_function_is_in_the_package(stem: str, name: str) -> None:
    own = getattr(_module("ops", stem), name)
    assert getattr(cukern, name, None) is own, f"import {name} of cukern.ops.{stem} in cukern/__init__.py"
    assert name in cukern.__all__, f"add {name!r} to `__all__` of cukern/__init__.py"


@pytest.mark.parametrize(("stem", "name"), FUNCTIONS)
def test_each_function_has_a_twin_with_its_arguments(stem: str, name: str) -> None:
    twin = getattr(_module("reference", stem), name, None)
    assert twin, f"write {name} in cukern/reference/{stem}.py: it defines the function in NumPy"
    positional, keywords = _split(getattr(_module("ops", stem), name))
    twin_positional, twin_keywords = _split(twin)
    assert twin_positional == positional
    assert twin_keywords - LAUNCH_ONLY == keywords - LAUNCH_ONLY


@pytest.mark.parametrize(("stem", "name"), FUNCTIONS)
def test_each_function_has_a_row_in_its_familys_page(stem: str, name: str) -> None:
    page = ROOT / "docs" / "families" / f"{stem}.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"docs/families/{page.name}: write one row that starts with `{name}`; it has {len(rows)}"
    assert "the same" not in rows[0].split("|")[2], "a row says in words of its own what the function does"


# --- the order of the rooms ---------------------------------------------------------------------------

#: The rooms of the host code, from the bottom up. A room imports itself and the rooms below it.
ORDER = (
    {"runtime"},
    {"formats"},
    {"reference"},
    {"ops"},
    {"fused_moe"},
    {"models"},
    {"cukern", "explain", "torch_ops", "testing", "integrations", "compat"},
    {"commands", "__main__"},
)


def _floor(module: str) -> int:
    """The place in `ORDER` of a module's room. The package itself imports all rooms up to `explain`."""
    room = module.split(".")[1] if "." in module else module
    return next(i for i, rooms in enumerate(ORDER) if room in rooms)


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """The lines and the dotted names of the imports in a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}:{node.lineno} imports by a relative name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _host_files(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms or (".",) for path in (ROOT / "cukern" / room).rglob("*.py"))


def test_a_room_imports_no_room_above_it() -> None:
    wrong = []
    for path in _host_files():
        name = path.relative_to(ROOT).as_posix()
        own = _floor(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        for line, imported in _imports(path):
            if imported.split(".")[0] == "cukern" and _floor(imported) > own:
                wrong.append(f"{name}:{line} imports {imported}, whose room is above its own")
    assert not wrong, "\n".join([*wrong, "What both need belongs into the lower room."])


def test_ops_take_from_the_twins_nothing_but_their_modules() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {imported}: what a twin and an op share belongs into cukern.formats"
        for path in _host_files("ops", "fused_moe")
        for line, imported in _imports(path)
        if imported.startswith("cukern.reference.") and imported.count(".") > 2
    ]
    assert not wrong, "\n".join(wrong)


# --- one kernel a file, functions of a page -----------------------------------------------------------

CUDA_FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cuda_src").rglob("*.cu*"))
PYTHON_FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("cukern", "tests", "benchmarks", "notebooks", "examples", "docs")
    for path in (ROOT / folder).rglob("*.py")
)
MOST_LINES = 120


@pytest.mark.parametrize("file", CUDA_FILES)
def test_a_cu_file_has_one_kernel_and_a_header_none(file: str) -> None:
    lines = (line.partition("//")[0] for line in (ROOT / file).read_text().splitlines())
    assert sum(len(re.findall(r"\b__global__\b", line)) for line in lines) == file.endswith(".cu")


@pytest.mark.parametrize("folder", sorted({str(Path(x).parent) for x in CUDA_FILES} - {"cuda_src", "cuda_src/common"}))
def test_a_folder_has_several_files(folder: str) -> None:
    # One alone is a file of the stem's name.
    assert len(list((ROOT / folder).glob("*.cu*"))) > 1


@pytest.mark.parametrize("file", [*CUDA_FILES, *PYTHON_FILES])
def test_functions_are_no_longer_than_a_page(file: str) -> None:
    source = (ROOT / file).read_text()
    functions = function_lengths.of_python(source) if file.endswith(".py") else function_lengths.of_cuda(source)
    assert not [f"{file}:{x.line} {x.head[-60:]}: {x.length} lines" for x in functions if x.length > MOST_LINES]


PYTHON = """\
@cached
def f():
    return 1


class C:
    async def g(self):
        def h(): pass
        return h
"""


def test_the_lines_of_a_python_function_are_counted() -> None:
    functions = function_lengths.of_python(PYTHON)
    assert [(x.head, x.line, x.length) for x in functions] == [("f", 2, 2), ("g", 7, 3), ("h", 8, 1)]


CUDA = """\
// Comments { with braces
#define TWICE(x) \\
    { x; x; }
constexpr int TABLE[] = {
    1,
};
namespace shapes {
template <typename T> struct Tile {
    int rows;
    __device__ int size() const { return rows; }
    /* not
       counted */
    template <int N>
    __device__ void load(const T* from, // a comment in the head
                         int stride) {
        for (int i = 0; i < N; i++) {
            get(i);
        }
    }
};
} // namespace shapes
template <int N>
__global__ void __launch_bounds__(N)
    fill(const __grid_constant__ Params p) {
    auto each = [&](int i) {
        p.out[i] = 0;
    };
#pragma unroll

    each(threadIdx.x);
}
"""


def test_the_lines_of_a_cuda_function_are_counted_from_its_head_to_its_end() -> None:
    load, fill = function_lengths.of_cuda(CUDA)
    assert load.head == "template <int N> __device__ void load(const T* from, int stride) {"
    assert (load.line, load.length) == (13, 7)
    assert fill.head.endswith("fill(const __grid_constant__ Params p) {")
    assert (fill.line, fill.length) == (22, 10)


def test_a_cuda_function_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the body after `fill\(.* has no end"):
        list(function_lengths.of_cuda(CUDA.rstrip("}\n")))


def test_notebooks_are_small() -> None:
    large = {path.name: path.stat().st_size for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert not {name: size for name, size in large.items() if size > 2 * MIB}


def test_the_checkout_is_small() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are the project's")
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert sum(path.lstat().st_size for path in files if path.exists()) <= 64 * MIB
