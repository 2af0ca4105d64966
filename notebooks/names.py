"""Print the paths of the notebooks of stems. `python -m notebooks.names [stem ...]`.

A stem has `<stem>.ipynb`, and a notebook `<stem>_<lesson>.ipynb` per further lesson.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def owner(name: str, stems: Collection[str]) -> str:
    """Return the longest of `stems` that a notebook's name is or extends by a lesson, or the name if there is none."""
    return max((stem for stem in stems if f"{name}_".startswith(f"{stem}_")), key=len, default=name)


def of_stem(stem: str) -> list[str]:
    """Return the names of a stem's notebooks. The notebook of the stem's own name, which lists the others, is first."""
    stems = {stem, *(path.stem for path in (FOLDER.parent / "tests" / "specs").glob("[!_]*.py"))}
    names = sorted(path.stem for path in FOLDER.glob(f"{stem}_*.ipynb"))
    return [stem, *(name for name in names if owner(name, stems) == stem)]


if __name__ == "__main__":
    print(*(f"notebooks/{name}.ipynb" for stem in sys.argv[1:] for name in of_stem(stem)))
