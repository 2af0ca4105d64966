"""`cukern doctor`: report what works on this machine and how to fix the rest. Creates no CUDA context.

It compiles an instance of each kernel. So it reports a kernel that NVRTC refuses before a program needs this kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from cukern.commands import INSTALL, console, refusal
from cukern.runtime import compile, kernel
from cukern.runtime.compile import Instance
from cukern.runtime.gpu import BY_ARCH

#: The columns of the report at which the subject and the state of a line start.
_SUBJECT, _STATE = 9, 23
_OLDEST = (8, 0)
_OLDEST_NVRTC = (12, 8)
#: Compile target on a machine without a GPU.
_TRIED = "90a"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
#: The command that installs the NVRTC release with which the kernels are tested.
_TESTED = 'pip install "cuda-toolkit[cudart,nvrtc]==13.0.*"'
_PACKAGE_OF_CUDA = {12: "cukern[cuda12]", 13: "cukern[cuda13]"}


class Finding(NamedTuple):
    """A line of the report. `fix` is a command or advice. A problem always has a `fix`."""

    subject: str
    state: str
    kind: str = "ok"  # "ok", "note" or "problem"
    fix: str = ""


class Gpu(NamedTuple):
    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int

    @property
    def arch(self) -> str:
        return compile.arch_of(self.compute_capability)


class Driver(NamedTuple):
    """The NVIDIA driver. `cuda` is None without a driver; `error` tells why the driver cannot be used."""

    cuda: tuple[int, int] | None
    gpus: list[Gpu]
    error: str | None = None


def driver() -> Driver:
    """Query the driver library, without CuPy or a CUDA context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(None, [])
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    status = cuda.cuInit(0)
    if status == _NO_DEVICE:
        return Driver(version, [])
    if status:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        return Driver(version, [], f"{(text.value or b'unknown error').decode()} (CUDA error {status})")
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus = []
    for index in range(number.value):
        device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        capability = ctypes.c_int(), ctypes.c_int()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        for attribute, part in zip((75, 76), capability, strict=True):
            cuda.cuDeviceGetAttribute(ctypes.byref(part), attribute, device)
        gpus.append(Gpu(name.value.decode(), (capability[0].value, capability[1].value), memory.value))
    return Driver(version, gpus)


_VARIABLES = (
    "CUKERN_COMPILE", "CUKERN_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "CUDA_PATH", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING",
    "CUPY_CACHE_DIR", "LD_LIBRARY_PATH",
)  # fmt: skip


def look_at_software() -> list[Finding]:
    import cukern

    place = Path(cukern.__file__).parent
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "ml_dtypes", "rich"))
    libc = " ".join(platform.libc_ver())
    findings = [
        Finding("cukern", f"{cukern.__version__}, in {place}"),
        Finding("Python", f"{platform.python_version()}, {versions}"),
        Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}, {libc}"),
    ]
    if given := [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]:
        findings.append(Finding("variables", " ".join(given)))
    return findings


def _driver_release() -> str:
    try:
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return f" {found[1]}" if found else ""


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _extra_for(found: Driver) -> str:
    major = 13 if found.cuda is None or found.cuda[0] >= 13 else 12
    return f'pip install "{_PACKAGE_OF_CUDA[major]}"'


def look_at_driver(found: Driver) -> list[Finding]:
    if found.cuda is None:
        return [
            Finding("driver", "no NVIDIA driver: only arrays in host memory, by the NumPy references", "note"),
            Finding("GPU", "none", "note"),
        ]
    words = f"NVIDIA{_driver_release()}, CUDA {_text(found.cuda)}"
    if found.error:
        fix = "restart the machine after a driver update, or start the container with --gpus all; then nvidia-smi"
        return [Finding("driver", f"{words}: {found.error}", "problem", fix)]
    findings = [Finding("driver", words)]
    if not found.gpus:
        findings.append(Finding("GPU", "none visible", "note", "CUDA_VISIBLE_DEVICES may hide it: echo it"))
    for index, gpu in enumerate(found.gpus):
        state = f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB, sm_{gpu.arch}"
        if gpu.compute_capability < _OLDEST:
            hide = ",".join(str(i) for i, g in enumerate(found.gpus) if g.compute_capability >= _OLDEST)
            fix = f"use a GPU of compute capability 8.0 or later: export CUDA_VISIBLE_DEVICES={hide}"
            findings.append(Finding(f"GPU {index}", f"{state}: older than sm_80", "problem", fix))
        else:
            findings.append(Finding(f"GPU {index}", state))
    return findings


def cupy_packages() -> list[tuple[str, str]]:
    found = set()
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith("cupy-cuda"):
            found.add((name, distribution.version))
    return sorted(found)


def look_at_cupy(found: Driver, packages: list[tuple[str, str]], failure: Exception | None) -> list[Finding]:
    """Report whether CuPy works. `failure` is the error of its import, or None."""
    words = ", ".join(f"{name} {version}" for name, version in packages)
    if not packages and failure:
        kind = "problem" if found.gpus else "note"
        return [Finding("CuPy", "not installed: kernels can neither compile nor run", kind, _extra_for(found))]
    if failure:
        # An OSError means that CuPy cannot create its cache folder.
        fix = "export CUPY_CACHE_DIR=/a/folder/of/yours" if isinstance(failure, OSError) else _extra_for(found)
        reason = " ".join(str(failure).split()) or repr(failure)
        return [Finding("CuPy", f"{words} does not import: {reason}", "problem", fix)]
    if len(packages) > 1:
        names = " ".join(name for name, _ in packages)
        fix = f"pip uninstall -y {names} && {_extra_for(found)}"
        return [Finding("CuPy", f"{words}: they overwrite each other", "problem", fix)]
    match = re.search(r"cuda(\d+)x", packages[0][0]) if packages else None
    if match and found.cuda and found.gpus and int(match[1]) > found.cuda[0]:
        fix = f"pip uninstall -y {packages[0][0]} && {_extra_for(found)}   (or install a newer driver)"
        state = f"{words} needs CUDA {match[1]}, and the driver has {_text(found.cuda)}"
        return [Finding("CuPy", state, "problem", fix)]
    return [Finding("CuPy", words or "built from source")]


def look_at_nvrtc(found: Driver) -> list[Finding]:
    if reason := compile.available():
        return [Finding("NVRTC", f"cannot be loaded: {reason.splitlines()[0]}", "problem", _extra_for(found))]
    version = compile.nvrtc_version()
    findings = [Finding("NVRTC", version)]
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_NVRTC:
        state = f"{version}: older than {_text(_OLDEST_NVRTC)}, the oldest that the kernels are tested with"
        findings = [Finding("NVRTC", state, "note", _extra_for(found))]
    for arch in _archs_of(found):
        if why := refusal(arch):
            fix = f"install a newer CUDA: {INSTALL}"
            findings.append(Finding("NVRTC", f"cannot compile for sm_{arch}: {why}", "problem", fix))
    try:
        headers = f"{compile.headers_version()}, in {compile.cuda_include_directory()}"
        findings.append(Finding("CUDA headers", headers))
    except RuntimeError:
        findings.append(Finding("CUDA headers", "no folder with cuda_fp16.h", "problem", _extra_for(found)))
    return findings


def torch_build() -> tuple[str, str | None] | None:
    """Return the version of the installed torch and its CUDA version, without importing torch."""
    try:
        version = importlib.metadata.version("torch")
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).with_name("version.py").read_text()
    except (importlib.metadata.PackageNotFoundError, AssertionError, OSError):
        return None
    cuda = re.search(r"^cuda\b.*= *'([\d.]+)'", text, re.MULTILINE)
    return version, cuda[1] if cuda else None


def look_at_torch(found: Driver, build: tuple[str, str | None] | None) -> list[Finding]:
    if build is None:
        return [Finding("torch", "not installed (only needed for tensors)", "note")]
    version, cuda = build
    if not found.gpus or found.cuda is None:
        return [Finding("torch", f"{version}, {f'CUDA {cuda}' if cuda else 'CPU only'}")]
    advice = f"choose the build for CUDA {found.cuda[0]} on https://pytorch.org/get-started"
    if cuda is None:
        return [Finding("torch", f"{version}, CPU only: its tensors cannot be on the GPU", "note", advice)]
    if int(cuda.split(".")[0]) > found.cuda[0]:
        state = f"{version} is built for CUDA {cuda}, and the driver has {_text(found.cuda)}"
        return [Finding("torch", state, "problem", advice)]
    return [Finding("torch", f"{version}, CUDA {cuda}")]


def look_at_cache() -> list[Finding]:
    wanted, problem = compile._default_cache_directory(), compile.cache_problem()
    if wanted not in compile.folders():
        own = f"chown -R $USER {wanted} && chmod -R u+rwX,go-w {wanted}"
        fix = f"export CUKERN_CACHE_DIR=/a/folder/of/yours   (or: {own})"
        return [Finding("cache", f"{wanted} cannot be used: {problem}", "problem", fix)]
    count = sum(compile.read_note(path) is not None for path in wanted.glob("*.cubin"))
    size = sum(path.stat().st_size for path in wanted.iterdir())
    rights = stat.filemode(wanted.stat().st_mode)
    only = f"read-only ({problem}), " if problem else ""
    finding = Finding("cache", f"{wanted}, {rights}, {only}{count} kernels, {size / 2**20:.1f} MiB")
    if problem and not count:
        fix = "fill it where it can be written: cukern compile --arch ARCH --for MODEL"
        finding = finding._replace(kind="note", fix=fix)
    return [finding]


class Row(NamedTuple):
    stem: str
    arch: str
    present: int  # cached kernels of `import cukern`
    total: int  # kernels of `import cukern`
    first_use: int  # other cached kernels of the installed sources
    others: int  # cached kernels of other source versions


def _cached() -> tuple[dict[tuple[str, str], set[str]], Counter[tuple[str, str]]]:
    """Return cached instances of the installed sources, and counts of other cubins.

    The keys of both dictionaries are (family, architecture).
    """
    kernel_of = {k.function: k for kernels in kernel.KERNELS.values() for k in kernels}
    current: dict[tuple[str, str], set[str]] = defaultdict(set)
    others: Counter[tuple[str, str]] = Counter()
    for path in (path for folder in compile.folders() for path in folder.glob("*.cubin")):
        note: dict[str, Any] = compile.read_note(path) or {}
        expression, arch = str(note.get("expression", "")), str(note.get("arch", ""))
        function, _, arguments = expression.partition("<")
        own = kernel_of.get(function)
        if own is None or not arch:
            continue
        given = tuple(arguments.removesuffix(">").split(", "))
        instance = Instance(own.file, function, given, str(note.get("assertions", "")))
        if compile._file_name(instance, arch) == path.name:
            current[own.stem, arch].add(expression)
        else:
            others[own.stem, arch] += 1
    return current, others


def look_at_kernels(found: Driver) -> tuple[list[Row], list[Finding]]:
    current, others = _cached()
    here = _archs_of(found)
    rows: list[Row] = []
    findings = []
    for stem in kernel.KERNELS:
        wanted = {str(instance) for instance in kernel.instances(stem)}
        archs = {*here, *(a for s, a in (*current, *others) if s == stem)}
        for arch in sorted(archs, key=lambda a: (len(a.rstrip("a")), a)):
            cached = current[stem, arch]
            row = Row(stem, arch, len(cached & wanted), len(wanted), len(cached - wanted), others[stem, arch])
            rows.append(row)
    for arch in here:
        own = [row for row in rows if row.arch == arch]
        absent = {row.stem: row.total - row.present for row in own if row.present < row.total}
        if absent:
            total = sum(row.total for row in own)
            state = f"{sum(absent.values())} of {total} of the import not compiled for sm_{arch}: done at first use"
            compiled_at_import = [row.stem for row in own if row.total]
            ops = [] if len(absent) == len(compiled_at_import) else [f" --op {stem}" for stem in absent]
            findings.append(Finding("kernels", state, "note", f"python -m cukern compile{''.join(ops)} --arch {arch}"))
    return rows, findings


def _archs_of(found: Driver) -> list[str]:
    return sorted({gpu.arch for gpu in found.gpus if gpu.compute_capability >= _OLDEST})


def _sum_of(rows: list[Row], arch: str) -> Finding:
    own = [row for row in rows if row.arch == arch]
    present, total, first_use, others = (sum(column) for column in zip(*(row[2:] for row in own), strict=True))
    words = f"; {others} of other versions" if others else ""
    return Finding(
        "kernels", f"sm_{arch}: {present} of {total} of the import compiled, {first_use} of first use{words}"
    )


# --- one instance of each kernel ------------------------------------------------------------------------


def one_of_each(arch: str) -> list[Instance]:
    """Return one instance of each kernel, if possible a cached one.

    Candidates are the listed instances, and the instances of the smallest calls of well-known models.
    """
    from cukern.commands.serving import smallest_of

    found: dict[str, list[Instance]] = defaultdict(list)
    kernels = [own for kernels in kernel.KERNELS.values() for own in kernels]
    listed = [i for own in kernels for i in (*own.at_import, *own.specialized) if i not in own.unused.get(arch, ())]
    for instance in dict.fromkeys((*listed, *(smallest_of(arch) if arch in BY_ARCH else ()))):
        found[instance.function].append(instance)
    absent = {*compile.missing([i for instances in found.values() for i in instances], arch)}
    return [next((i for i in instances if i not in absent), instances[0]) for instances in found.values()]


def try_kernels(arch: str) -> list[Finding]:
    """Compile one instance of each kernel that has no cached instance. Report each family that fails."""
    tried = one_of_each(arch)
    with contextlib.suppress(compile.CompileError):
        kernel.compile_with_progress([(i, arch) for i in compile.missing(tried, arch)], f"trying kernels for sm_{arch}")
    failed: dict[str, list[Instance]] = defaultdict(list)
    for instance in compile.missing(tried, arch):
        failed[instance.file.partition("/")[0]].append(instance)
    if not failed:
        return [Finding("templates", f"one instance of each of {len(tried)} kernels compiles for sm_{arch}")]
    fix = f"report the line, or take another NVRTC than {compile.nvrtc_version()}: {_TESTED}"
    return [
        Finding("templates", f"{stem}: {_names(own)} for sm_{arch}: {_why(own[0], arch)}", "problem", fix)
        for stem, own in failed.items()
    ]


def look_at_templates(found: Driver) -> list[Finding]:
    """Try each kernel on this machine's GPUs, and report failures."""
    archs = [arch for arch in _archs_of(found) or [_TRIED] if refusal(arch) is None]
    try:
        compile.cuda_include_directory()
    except RuntimeError:
        return []
    return [] if compile.cache_problem() else [finding for arch in archs for finding in try_kernels(arch)]


def _names(instances: list[Instance]) -> str:
    return f"{', '.join(i.function for i in instances)} do{'es' * (len(instances) == 1)} not compile"


def _why(instance: Instance, arch: str) -> str:
    try:
        compile.cubin(instance, arch)
    except compile.CompileError as error:
        lines = str(error).strip().splitlines()
        return next((line.strip() for line in lines if "error:" in line), lines[0])
    return "it compiles alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--moe",
        action="store_true",
        help="instead say which classes of cukern.fused_moe make a layer together, with which quantization",
    )
    parser.add_argument(
        "--kernels", action="store_true", help="also list by family which kernels are compiled, for which architecture"
    )
    parser.add_argument(
        "--vllm",
        metavar="MODEL",
        help="instead say what cukern takes of a model in vLLM: a directory with a config.json, or a name of "
        "`cukern compile --for`",
    )
    parser.epilog = "Exit status: 0 when cukern can be used here, if only without a GPU; 1 when something is broken."


def _show_combinations() -> None:
    from rich import box
    from rich.table import Table

    from cukern.fused_moe.combinations import EXPERTS, PREPARE_FINALIZE, combinations

    screen = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="layers", title_justify="left", title_style="bold")
    for heading in ("experts", "prepare and finalize"):
        table.add_column(heading, no_wrap=True)
    table.add_column("quantization", overflow="fold")
    every = list(combinations())
    reasons: dict[str, None] = {}
    for experts in EXPERTS:
        for pf in PREPARE_FINALIZE:
            own = [c for c in every if (c.prepare_finalize, c.experts) == (pf, experts)]
            able = [c.quantization or "16 bits" for c in own if c.refusal is None]
            if able:
                table.add_row(experts, pf, ", ".join(able))
            else:
                reasons[str(own[0].refusal)] = None
    screen.print(table)
    screen.print("TwoLevelPrepareAndFinalize, for several hosts, goes with what PushPrepareAndFinalize goes with.")
    screen.print("All others are refused at construction:")
    for reason in reasons:
        screen.print(_hanging("- ", reason, screen.width))


def _hanging(begin: str, text: str, width: int) -> str:
    """Return `begin` followed by the wrapped text. The text's later lines are indented to the end of `begin`.

    A word too long for the indented lines, such as a path, gets a line that starts at `_SUBJECT`.
    """
    lines, indent = [begin], " " * len(begin)
    for word in text.split(" "):
        last = lines[-1]
        if len(last) + len(word) + 1 <= width or not last.strip():
            lines[-1] += word if last in (begin, indent) else f" {word}"
        elif len(indent) + len(word) <= width:
            lines.append(indent + word)
        else:
            lines += [" " * _SUBJECT + word, indent]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    screen = console()
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings:
        word = finding.kind.upper() if finding.kind == "problem" else finding.kind
        begin = f"{word:<{_SUBJECT}}{finding.subject:<{_STATE - _SUBJECT}}"
        text = Text(_hanging(begin, finding.state, screen.width))
        text.stylize(styles[finding.kind], 0, len(word))
        screen.print(text, soft_wrap=True)
        if finding.fix:
            screen.print(Text(_hanging(" " * _STATE + "-> ", finding.fix, screen.width), "bold"), soft_wrap=True)


def run(args: argparse.Namespace) -> int:
    if args.moe:
        _show_combinations()
        return 0
    if args.vllm:
        from cukern.commands.doctor_vllm import look_at_vllm

        capabilities = [gpu.compute_capability for gpu in driver().gpus]
        _print(
            [
                Finding(*line[:2], "ok" if line.is_ok else "note", line.fix)
                for line in look_at_vllm(args.vllm, capabilities)
            ]
        )
        return 0
    from rich import box
    from rich.table import Table

    found = driver()
    packages = cupy_packages()
    failure: Exception | None = None
    try:
        import cupy  # noqa: F401
    except Exception as error:
        failure = error
    findings = [*look_at_software(), *look_at_driver(found), *look_at_cupy(found, packages, failure)]
    if not failure:
        findings += look_at_nvrtc(found)
    findings += look_at_torch(found, torch_build())
    can_compile = not compile.available()
    if can_compile:
        findings += look_at_templates(found)
    findings += look_at_cache()

    rows: list[Row] = []
    if can_compile:
        rows, missing = look_at_kernels(found)
        findings += [_sum_of(rows, arch) for arch in dict.fromkeys(row.arch for row in rows)] + missing
        arch = next(iter(_archs_of(found)), _TRIED)
        advice = f"python -m cukern compile --for MODEL --arch {arch}"
        findings.append(Finding("first use", "other kernels are compiled at their first use", "note", advice))

    screen = console()
    _print(findings)
    if rows and args.kernels:
        table = Table(
            box=box.SIMPLE_HEAD, title="compiled kernels", title_justify="left", title_style="bold", pad_edge=False
        )
        table.add_column("op")
        table.add_column("arch")
        for heading in ("of the import", "of first use", "of other versions"):
            table.add_column(heading, justify="right")
        for row in rows:
            counts = f"{row.present} of {row.total}", str(row.first_use), str(row.others)
            table.add_row(row.stem, f"sm_{row.arch}", *counts)
        screen.print()
        screen.print(table)
    problems = sum(finding.kind == "problem" for finding in findings)
    if problems:
        screen.print(f"\n{problems} problem{'s' if problems > 1 else ''}: the commands above (->) fix them.")
    return 1 if problems else 0
