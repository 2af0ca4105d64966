"""Helpers of the notebooks: the setup, array conversion, and printing of sources. `speed.py` measures times."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from cukern.runtime import arrays, kernel, template

ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")
_on_gpu = False


def begin(*, with_torch: bool = False) -> bool:
    """Set up the plots and the printing of a notebook, and print where it runs.

    Returns whether there is a GPU. `with_torch`: PyTorch must also be able to use the GPU.
    """
    global _on_gpu
    _on_gpu = kernel.device_count() > 0
    if with_torch:
        import torch

        _on_gpu = _on_gpu and torch.cuda.is_available()
    # transformers imports tqdm, which warns if Jupyter widgets are missing. The notebooks use no widgets.
    warnings.filterwarnings("ignore", "IProgress not found")
    np.set_printoptions(precision=4, suppress=True, linewidth=120)
    plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    if _on_gpu:
        from cupy.cuda import runtime

        print("Running on", runtime.getDeviceProperties(0)["name"].decode())
    else:
        print("No GPU can be used here: the NumPy reference does the work, on smaller sizes.")
    return _on_gpu


def on_device(array: Any) -> Any:
    """Copy a NumPy array to the GPU, if there is one. None stays None.

    CuPy has no FP8 dtypes, so FP8 arrays become uint8.
    """
    if array is None or not _on_gpu:
        return array
    import cupy

    is_fp8 = array.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    return cupy.asarray(array.view(np.uint8) if is_fp8 else array)


def on_host(array: Any) -> np.ndarray:
    """Convert an array of any library to NumPy."""
    return arrays.library_of(array).to_numpy(array)


def read(name: str) -> list[str]:
    """Return the lines of a file. `name` is its path in the checkout."""
    return (ROOT / name).read_text().splitlines()


def the_one(found: list[T], wanted: str, name: str = "the file") -> T:
    """Return the only entry of `found`, the matches of `wanted` in the file `name`; otherwise raise LookupError."""
    if len(found) != 1:
        raise LookupError(f"{len(found)} places in {name} match {wanted!r}, wanted one")
    return found[0]


def print_lines(lines: list[str], start: int, stop: int, name: str = "") -> None:
    """Print lines[start:stop] of the file `name` with their line numbers, without blank lines at the end."""
    while stop > start and not lines[stop - 1].strip():
        stop -= 1
    if name:
        print(name)
    print("\n".join(f"{i + 1:4}  {lines[i]}" for i in range(start, stop)))


@dataclass(frozen=True)
class Lesson:
    """Prints and checks the sources that a notebook explains.

    `kernel` is a file or folder of the checkout, such as "cuda_src/moe_gate.cu" or "cuda_src/mla_decode". The methods
    search it, or the file or folder `name`. They raise LookupError unless exactly one place matches.
    """

    kernel: str
    # If set, `definition` stops at the first section heading: the notebook prints the kernel section by section.
    in_sections: bool = False

    def files(self, name: str | None = None) -> list[str]:
        """Return the files of the kernel, or of `name`."""
        place = ROOT / (name or self.kernel)
        paths = sorted(place.glob("*.cu*")) if place.is_dir() else [place]
        return [path.relative_to(ROOT).as_posix() for path in paths]

    def definition(self, text: str, name: str | None = None) -> None:
        """Print the definition whose first line contains `text` and is not indented.

        The comment, decorators and template header directly above the definition are printed too.
        """
        file, first = self._find(lambda line: text in line and not line.startswith((" ", "//", "#")), text, name)
        lines, start = read(file), first
        headings = _headings(lines)
        # The second line of a template header is indented to its first parameter.
        above = ("//", "template", " " * len("template <"), "__", "@")
        while lines[start - 1].startswith(above) and start - 1 not in headings:
            start -= 1
        print_lines(lines, start, _end(lines, first, headings if self.in_sections else {}), file)

    def member(self, text: str, name: str | None = None) -> None:
        """Print the member function whose first line contains `text`, with the comment above it."""
        file, first = self._find(lambda line: text in line and bool(re.match(r"    [\w~]", line)), text, name)
        lines, start = read(file), first
        while lines[start - 1].startswith(("    //", "    template", "    __")):
            start -= 1
        is_short = lines[first].endswith("}")
        stop = first if is_short else next(i for i in range(first, len(lines)) if lines[i] == "    }")
        print_lines(lines, start, stop + 1, file)

    def section(self, heading: str, name: str | None = None) -> None:
        """Print the section under the `// --- heading ---` that starts with `heading`.

        The section ends at the next heading, at the end of the function, or at the end of the file. If the heading is
        not indented, only its comment is printed.
        """

        def starts(line: str) -> bool:
            return any(text.startswith(heading) for text in _headings([line]).values())

        file, start = self._find(starts, f"// --- {heading}", name)
        lines = read(file)
        headings = _headings(lines)
        if lines[start].startswith("//"):
            stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("//"))
        else:
            ends = (i for i in range(start + 1, len(lines) - 1) if i in headings or lines[i] == "}")
            stop = next(ends, len(lines))
        print_lines(lines, start, stop, file)

    def opening(self, name: str | None = None) -> None:
        """Print the header comment of the only file of `name`: the formula, the work of each block, the bound."""
        (file,) = self.files(name)
        lines = read(file)
        print_lines(lines, 0, next(i for i, line in enumerate(lines) if not line.startswith("//")), file)

    def contents(self, name: str | None = None) -> None:
        """Print each file of the kernel, or of `name`, with the first sentence of its header comment."""
        told = {Path(file).name: _first_sentence(read(file)) for file in self.files(name)}
        wide = max(map(len, told))
        for file, sentence in told.items():
            print(f"{file:{wide}}  {sentence}")

    def excerpt(self, first: str, last: str, name: str | None = None, *, through: bool = False) -> None:
        """Print from the line with `first` up to the next line with `last`. `through`: include the latter line."""
        file, start = self._find(lambda line: first in line, first, name)
        lines = read(file)
        stop = next(i for i in range(start + 1, len(lines)) if last in lines[i])
        print_lines(lines, start, stop + through, file)

    def constant(self, name: str) -> Any:
        """Return the value of the constant `name` of the kernels."""
        found = set()
        for file in self.files():
            stem = Path(file).relative_to("cuda_src").with_suffix("").as_posix()
            if file.endswith(".cu") and name in template.constants(stem):
                found.add(template.constants(stem)[name])
            found.update(float(x) for x in re.findall(rf"constexpr float {name} = ([\d.]+)f;", "\n".join(read(file))))
        return the_one(sorted(found), f"constexpr {name}", self.kernel)

    def rely_on(self, *snippets: str, name: str | None = None) -> None:
        """Raise LookupError unless the sources contain all `snippets`. The notebook's explanation relies on them.

        Line breaks and indentation are ignored.
        """
        texts = [" ".join(" ".join(read(file)).split()) for file in self.files(name)]
        for snippet in snippets:
            if not any(" ".join(snippet.split()) in text for text in texts):
                raise LookupError(f"{name or self.kernel} no longer has {snippet!r}")

    def _find(self, wanted: Any, text: str, name: str | None) -> tuple[str, int]:
        """Return the file and the line index of the only line that satisfies `wanted`."""
        found = [(file, i) for file in self.files(name) for i, line in enumerate(read(file)) if wanted(line)]
        return the_one(found, text, name or self.kernel)


def _first_sentence(lines: list[str]) -> str:
    """Return the first sentence of the header comment of a file."""
    comment = " ".join(line[2:].strip() for line in lines[: next(i for i, x in enumerate(lines) if x in ("", "//"))])
    return re.split(r"(?<=[^.]\.) ", comment)[0].removesuffix(".")


def _headings(lines: list[str]) -> dict[int, str]:
    """Return {line index: text} of each `// --- heading ---`."""
    found = {i: re.match(r"\s*// ---+ (.*?)[ -]*$", line) for i, line in enumerate(lines)}
    return {i: match[1] for i, match in found.items() if match}


def _end(lines: list[str], first: int, headings: dict[int, str]) -> int:
    """Return the index after the last line of the definition that begins with line `first`.

    The last line is the closing bracket in the first column, or the line before a heading. A Python function ends
    before the next line that is not indented.
    """
    if lines[first].startswith("def "):
        return next(i for i in range(first + 1, len(lines)) if lines[i] and not lines[i].startswith((" ", ")")))
    if lines[first].endswith(("}", ";")):
        return first + 1
    return next(i + 1 for i in range(first, len(lines)) if lines[i] in ("}", "};", "]", ")") or i + 1 in headings)
