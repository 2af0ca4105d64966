"""FlashMLA's test files, which are programs: a function is called for each case, one after the other."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.peers import tally
from tests.peers.plugin import LOST, is_lost, refusal_of, with_memory
from tests.peers.turns import SharedTurns, Turns

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


def _load(file: Path) -> Any:
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def _main(module: Any) -> None:
    takes_dtype, threads = bool(inspect.signature(module.main).parameters), torch.get_num_threads()
    module.main(*[torch.bfloat16] * takes_dtype)
    torch.set_num_threads(threads)  # a program asks for 32, which several processes do not have


def run(file: Path, name: str, turns: Turns) -> int:
    """Run those of the cases whose turn it is; 1 if one failed."""
    module, cases = _load(file), list[Any]()
    function, failed = module.test_flash_mla, 0

    def listed(case: Any) -> Any:
        known = {field.name for field in dataclasses.fields(case)}
        cases.append(dataclasses.replace(case, **{x: y for x, y in _WITHOUT_TIMES.items() if x in known}))
        return _Correct()

    module.test_flash_mla = listed
    random.seed(0)  # every process must list the same cases
    _main(module)
    numbered = [(f"{number} {case}", case) for number, case in enumerate(cases)]
    for words, case in turns.of(turns.chosen(numbered, [words for words, _ in numbered], [name] * len(numbered))):
        turns.begin(name, words)
        begin = time.monotonic()
        outcome, reason = _outcome(function, case)
        tally.append(turns.path, tally.Case(name, words, outcome, reason, round(time.monotonic() - begin, 3)))
        failed += outcome == "failed"
        if isinstance(turns, SharedTurns) and outcome == "failed" and is_lost(reason):
            os._exit(LOST)
    return int(failed > 0)
