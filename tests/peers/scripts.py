"""FlashMLA's test files, which are programs: a function is called for each case, one after the other."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.peers import tally
from tests.peers.plugin import Part, refusal_of, with_memory

#: Fields of a case that ask for timings of FlashMLA's own kernels, by their names, and what leaves them out.
_WITHOUT_TIMES = {"test_performance": False, "num_runs": 0}


def is_script(file: Path) -> bool:
    """Whether a file is run by itself."""
    text = file.read_text()
    return "__main__" in text and "import pytest" not in text


class _Correct:
    """The result of a case for the program's own table: right, and 0 in all columns."""

    is_correct = True

    def __getattr__(self, _: str) -> float:
        return 0.0


def _outcome(function: Callable[[Any], Any], case: Any) -> tuple[str, str]:
    """What a case came to, and why."""
    try:
        result = with_memory(lambda: function(case))
    except Exception as error:
        reason = refusal_of(error)
        if reason is not None:
            return "refused", reason
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0]
    return ("passed", "") if getattr(result, "is_correct", True) else ("failed", "other results than the reference")


def run(file: Path, name: str, part: Part, every: int, path: Path | None) -> int:
    """Run a part of the cases, each of which is one in `every`; 1 if one failed."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    function, numbers, failed = module.test_flash_mla, itertools.count(), []

    def counted(case: Any) -> Any:
        number = next(numbers)
        if number % every == 0 and number // every % part.count == part.index:
            known = {field.name for field in dataclasses.fields(case)}
            case = dataclasses.replace(case, **{x: y for x, y in _WITHOUT_TIMES.items() if x in known})
            outcome, reason = _outcome(function, case)
            tally.append(path, tally.Case(name, str(case), outcome, reason))
            failed.extend([case] if outcome == "failed" else [])
        return _Correct()

    module.test_flash_mla = counted  # type: ignore[attr-defined]
    takes_dtype = bool(inspect.signature(module.main).parameters)
    module.main(*[torch.bfloat16] * takes_dtype)
    return int(bool(failed))
