"""What the notebooks share: how one begins, its arrays, and how it shows the sources. Times are in `speed.py`."""

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
    """Set up the pictures and the printing of a notebook, and say where it runs.

    Returns whether there is a GPU; `with_torch`: one that PyTorch can use.
    """
    global _on_gpu
    _on_gpu = kernel.device_count() > 0
    if with_torch:
        import torch

        _on_gpu = _on_gpu and torch.cuda.is_available()
    # tqdm, which transformers imports, misses the widgets of Jupyter, and nothing here shows any.
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
    """A NumPy array on the GPU, where there is one; None stays None.

    CuPy has no FP8, and takes its bytes.
    """
    if array is None or not _on_gpu:
        return array
    import cupy

    is_fp8 = array.dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    return cupy.asarray(array.view(np.uint8) if is_fp8 else array)


def on_host(array: Any) -> np.ndarray:
    """An array of any library in NumPy."""
    return arrays.library_of(array).to_numpy(array)


def read(name: str) -> list[str]:
    """The lines of a file, whose name is that in the checkout."""
    return (ROOT / name).read_text().splitlines()


def the_one(found: list[T], wanted: str, name: str = "the file") -> T:
    """The only entry of a list of what matches `wanted` in the file `name`; `LookupError` if it has none or more."""
    if len(found) != 1:
        raise LookupError(f"{len(found)} places in {name} match {wanted!r}, wanted one")
    return found[0]


def print_lines(lines: list[str], start: int, stop: int, name: str = "") -> None:
    """Print the lines from `start`, of which the first is 0, up to `stop`, each with its number in the file `name`."""
    while stop > start and not lines[stop - 1].strip():
        stop -= 1
    if name:
        print(name)
    print("\n".join(f"{i + 1:4}  {lines[i]}" for i in range(start, stop)))


@dataclass(frozen=True)
class Lesson:
    """What a notebook prints of the sources and says of them: those of one stem's kernels, unless it names a file.

    `kernel` is a file or a folder of the checkout, such as "cuda_src/moe_gate.cu" or "cuda_src/mla_decode"; so is
    `name` below. What is looked for has to be in one place of them, else it is a `LookupError`.
    """

    kernel: str
    # The kernel is shown section by section, so its definition up to the first of them.
    in_sections: bool = False

    def files(self, name: str | None = None) -> list[str]:
        """The files of the kernel, or of `name`."""
        place = ROOT / (name or self.kernel)
        paths = sorted(place.glob("*.cu*")) if place.is_dir() else [place]
        return [path.relative_to(ROOT).as_posix() for path in paths]

    def definition(self, text: str, name: str | None = None) -> None:
        """Print the definition whose first line, which is not indented, has `text`.

        With it comes what is above it without a gap: its comment, its decorators, the header of its template.
        """
        file, first = self._find(lambda line: text in line and not line.startswith((" ", "//", "#")), text, name)
        lines, start = read(file), first
        headings = _headings(lines)
        # The second line of a template's header is indented as far as its first parameter.
        above = ("//", "template", " " * len("template <"), "__", "@")
        while lines[start - 1].startswith(above) and start - 1 not in headings:
            start -= 1
        print_lines(lines, start, _end(lines, first, headings if self.in_sections else {}), file)

    def member(self, text: str, name: str | None = None) -> None:
        """Print the member function of a struct whose first line has `text`, with the comment above it."""
        file, first = self._find(lambda line: text in line and bool(re.match(r"    [\w~]", line)), text, name)
        lines, start = read(file), first
        while lines[start - 1].startswith(("    //", "    template", "    __")):
            start -= 1
        is_short = lines[first].endswith("}")
        stop = first if is_short else next(i for i in range(first, len(lines)) if lines[i] == "    }")
        print_lines(lines, start, stop + 1, file)

    def section(self, heading: str, name: str | None = None) -> None:
        """Print the part under the `// --- heading ---` that starts so.

        It goes on to the next heading, to the bracket that ends the function, or to the end of the file. Of a heading
        that is not indented it is the comment.
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
        """Print the comment that opens the only file of `name`: what it computes, who does what, its bound."""
        (file,) = self.files(name)
        lines = read(file)
        print_lines(lines, 0, next(i for i, line in enumerate(lines) if not line.startswith("//")), file)

    def contents(self, name: str | None = None) -> None:
        """Print each file of the kernel, or of `name`, with the first sentence of the comment that opens it."""
        told = {Path(file).name: _first_sentence(read(file)) for file in self.files(name)}
        wide = max(map(len, told))
        for file, sentence in told.items():
            print(f"{file:{wide}}  {sentence}")

    def excerpt(self, first: str, last: str, name: str | None = None, *, through: bool = False) -> None:
        """Print from the one line that has `first` up to the next one that has `last`; `through`: with that line."""
        file, start = self._find(lambda line: first in line, first, name)
        lines = read(file)
        stop = next(i for i in range(start + 1, len(lines)) if last in lines[i])
        print_lines(lines, start, stop + through, file)

    def constant(self, name: str) -> Any:
        """The number to which the kernels give this name."""
        found = set()
        for file in self.files():
            stem = Path(file).relative_to("cuda_src").with_suffix("").as_posix()
            if file.endswith(".cu") and name in template.constants(stem):
                found.add(template.constants(stem)[name])
            found.update(float(x) for x in re.findall(rf"constexpr float {name} = ([\d.]+)f;", "\n".join(read(file))))
        return the_one(sorted(found), f"constexpr {name}", self.kernel)

    def rely_on(self, *snippets: str, name: str | None = None) -> None:
        """Fail if the sources no longer have these lines, on which what follows in the notebook rests.

        How they are broken and indented makes no difference.
        """
        texts = [" ".join(" ".join(read(file)).split()) for file in self.files(name)]
        for snippet in snippets:
            if not any(" ".join(snippet.split()) in text for text in texts):
                raise LookupError(f"{name or self.kernel} no longer has {snippet!r}")

    def _find(self, wanted: Any, text: str, name: str | None) -> tuple[str, int]:
        """The file and the index of the one line for which `wanted` holds."""
        found = [(file, i) for file in self.files(name) for i, line in enumerate(read(file)) if wanted(line)]
        return the_one(found, text, name or self.kernel)


def _first_sentence(lines: list[str]) -> str:
    """The first sentence of the comment that opens a file."""
    comment = " ".join(line[2:].strip() for line in lines[: next(i for i, x in enumerate(lines) if x in ("", "//"))])
    return re.split(r"(?<=[^.]\.) ", comment)[0].removesuffix(".")


def _headings(lines: list[str]) -> dict[int, str]:
    """Line index and text of each `// --- heading ---`."""
    found = {i: re.match(r"\s*// ---+ (.*?)[ -]*$", line) for i, line in enumerate(lines)}
    return {i: match[1] for i, match in found.items() if match}


def _end(lines: list[str], first: int, headings: dict[int, str]) -> int:
    """The index after the last line of the definition that begins with line `first`.

    That is its closing bracket in the first column, or what is before a heading; of a Python function, what is before
    the next line that is not indented.
    """
    if lines[first].startswith("def "):
        return next(i for i in range(first + 1, len(lines)) if lines[i] and not lines[i].startswith((" ", ")")))
    if lines[first].endswith(("}", ";")):
        return first + 1
    return next(i + 1 for i in range(first, len(lines)) if lines[i] in ("}", "};", "]", ")") or i + 1 in headings)
