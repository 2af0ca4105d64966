"""Write constraints-newest.txt: the releases that `pip install` takes today where nothing is pinned.

python -m tests.newest
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "constraints-newest.txt"
WHAT = ".[cuda13,torch,dev]"


def resolved() -> list[str]:
    """The requirements `name==version` that pip would install into an empty environment, in the order of their names.

    Settings of this machine, such as constraints and folders of wheels, have no part in it.
    """
    own = {name: value for name, value in os.environ.items() if name in ("PIP_CERT",) or not name.startswith("PIP_")}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    environment = own | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([*command, WHAT], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for item in json.loads(done.stdout)["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        found[name] = f"{name}=={item['metadata']['version']}"
    del found["cukern"]
    return [found[name] for name in sorted(found)]


def main() -> None:
    """Resolve, and write the file."""
    lines = [
        f'# What `pip install "{WHAT}"` takes where nothing is pinned: Python {platform.python_version()},',
        f"# {datetime.date.today()}. `make newest` writes it, `make test-newest` tests it.",
        *resolved(),
    ]
    FILE.write_text("\n".join(lines) + "\n")
    print(f"{FILE.name}: {len(lines) - 2} releases")


if __name__ == "__main__":
    main()
