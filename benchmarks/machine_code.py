"""Compare the machine code of the kernels with another checkout. Instances with equal code need no new timing.

    python -m benchmarks.machine_code OTHER_CHECKOUT [--arch 90a] [--op STEM ...]

Compares the machine code, the registers and the spills of each instance that is specialized or compiled at import.
Needs NVRTC and no GPU. The exit status is 1 if any instance differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The sections of a kernel's instructions, and of the constants that the compiler made for them.
_KERNEL_SECTIONS = ".text.", ".nv.constant2.", ".nv.constant3", ".nv.constant4."


def sections(elf: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Yield name, bytes and `sh_info` of each section of a 64-bit ELF file. For code, `sh_info` holds the registers."""
    start, size, count, names = struct.unpack_from("<Q10xHHH", elf, 0x28)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, start + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, length, _, info, _, _ in headers:
        first = strings + name
        occupies_file = kind != 8  # SHT_NOBITS
        yield (
            elf[first : elf.index(b"\0", first)].decode(),
            elf[offset : offset + length] if occupies_file else b"",
            info,
        )


def code_digest(cubin: Path) -> str:
    """Return the digest of a kernel's instructions and constants, independent of the names of their sections."""
    digest = hashlib.sha256()
    for name, content, info in sections(cubin.read_bytes()):
        if name.startswith(_KERNEL_SECTIONS):
            digest.update(f"{name.split('.')[1]} {info >> 24} {len(content)} ".encode() + content)
    return digest.hexdigest()


def instances(arch: str, ops: Sequence[str]) -> dict[str, list[Any]]:
    """Return code digest, registers and spilled bytes of this checkout's instances, by stem and expression."""
    import cukern
    from cukern.commands import resources
    from cukern.runtime import compile
    from cukern.runtime.kernel import KERNELS

    # Make sure that the other checkout is imported, not this one.
    assert Path(cukern.__file__).is_relative_to(Path.cwd())
    found: dict[str, Any] = {}
    for stem in ops or KERNELS:
        for kernel in KERNELS[stem]:
            unused = kernel.unused.get(arch, ())
            for instance in dict.fromkeys([*kernel.at_import, *kernel.specialized]):
                if instance not in unused:
                    found[f"{stem}: {instance}"] = instance
    compile.compile_all([(instance, arch) for instance in compile.missing(found.values(), arch)])
    described = {}
    for name, instance in found.items():
        path, _ = compile.cubin(instance, arch)
        taken = resources(compile.read_note(path) or {})
        described[name] = [code_digest(path), taken.registers, taken.spill_bytes]
    return described


def _of(checkout: Path, arch: str, ops: Sequence[str]) -> dict[str, list[Any]]:
    """Return `instances` of a checkout, computed in a separate process."""
    program = (
        f"import json, sys; sys.path[:0] = [{str(checkout)!r}]; import importlib.util as u;"
        f"s = u.spec_from_file_location('machine_code', {str(Path(__file__).resolve())!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        f"json.dump(m.instances({arch!r}, {list(ops)!r}), sys.stdout)"
    )
    environment = os.environ | {"CUKERN_COMPILE": "lazy", "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(done.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_code", description=__doc__)
    parser.add_argument("other", type=Path, help="the root of the checkout to compare with")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--op", nargs="*", default=[], metavar="STEM")
    args = parser.parse_args(argv)
    before, after = (_of(path.resolve(), args.arch, args.op) for path in (args.other, ROOT))
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            print(f"{'only here' if old is None else 'only there':>10}  {name}")
        elif old != new:
            print(f"{'differs':>10}  {name}: {old[1]} to {new[1]} registers, {old[2]} to {new[2]} bytes spilled")
    both = before.keys() & after.keys()
    equal = sum(before[name] == after[name] for name in both)
    print(f"{equal} of {len(both)} instances are the same on sm_{args.arch}")
    return int(equal < len(both) or before.keys() != after.keys())


if __name__ == "__main__":
    sys.exit(main())
