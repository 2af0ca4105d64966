"""Time `import cukern` in a new process: `python -m cukern bench import`.

Cold: the kernel cache is empty, and all kernels are compiled. Warm: the cache has all kernels. The floor is the import
of the libraries that cukern imports. Byte code exists in both cases, as in an installed package.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OP = "import"
_RUNS = {"cold": 3, "warm": 7}
_LIBRARIES = "import ml_dtypes, numpy, rich\ntry:\n    import cupy\nexcept ImportError:\n    pass\n"
_CLOCK = f"""
import time
start = time.perf_counter()
{_LIBRARIES}
libraries = time.perf_counter()
import cukern
print(libraries - start, time.perf_counter() - libraries)
"""


def _import(cache: str, byte_code: str) -> tuple[float, float]:
    """Return the seconds that the import of the libraries takes, and the seconds of `import cukern` after it."""
    unwanted = ("CUKERN_COMPILE", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"CUKERN_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": byte_code}
    done = subprocess.run(
        [sys.executable, "-c", _CLOCK], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    libraries, own = map(float, done.stdout.split())
    return libraries, own


def rows(runs: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """Return the rows for the results: the median of `runs` imports, cold and warm."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    result = []
    with tempfile.TemporaryDirectory(prefix="cukern-import-") as folder:
        byte_code = os.path.join(folder, "byte-code")
        _import(os.path.join(folder, "warm"), byte_code)
        for state, count in (runs or _RUNS).items():
            caches = ["warm" if state == "warm" else f"cold-{i}" for i in range(count)]
            times = [_import(os.path.join(folder, cache), byte_code) for cache in caches]
            libraries, own = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
            row: dict[str, Any] = {"op": OP, "case": {"cache": state, "cores": cores}, "variant": "cukern"}
            row |= {"us": round(libraries + own), "floor_us": round(libraries), "baselines": {}, "host_us": None}
            result.append(row)
    return result
