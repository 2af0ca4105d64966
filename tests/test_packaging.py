"""The wheel as a user gets it: built, installed into a clean environment, compiling outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: The stems whose kernels are a folder.
FOLDERS = sorted({path.parent.name for path in (ROOT / "cuda_src").glob("*/*.cu")})


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    ours = ("PYTHON", "CUKERN_", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment with the wheel in it.

    Its dependencies are links to the ones installed here, since a test may not download: links rather than a
    path file, because the CUDA packages are looked for in site-packages itself.
    """
    environment = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(_run(python, "-c", ask, cwd=environment).strip())
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            # This checkout's own installation, and path files that could lead back to it, stay out.
            if "cukern" not in entry.name and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    _run(python, "-m", "pip", "install", "--no-index", wheel, cwd=environment)
    return python


def _sources(folder: str) -> set[str]:
    files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(ROOT).as_posix() for path in files}


def test_the_wheel_holds_the_package_and_the_templates_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "cukern/py.typed" in names
    assert {f"cukern/cuda_src/{folder}" for folder in ("common", *FOLDERS)} <= {
        name.rpartition("/")[0] for name in names
    }
    assert names == _sources("cukern") | {f"cukern/{name}" for name in _sources("cuda_src")}


def test_the_wheel_asks_for_little(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(metadata).decode().splitlines()
    hard = [line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted({line.split(":")[1].strip().split(">")[0] for line in hard}) == ["ml-dtypes", "numpy", "rich"]
    extras = {line.split(":")[1].strip() for line in lines if line.startswith("Provides-Extra:")}
    assert {"cuda12", "cuda13", "torch", "notebooks", "dev"} <= extras
    urls = {line.split(":")[1].split(",")[0].strip() for line in lines if line.startswith("Project-URL:")}
    assert urls == {"Source", "Documentation", "Issues", "Changelog"}


def test_the_source_distribution_holds_the_tests(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "Makefile", "tests/test_packaging.py"} | _sources("cuda_src") <= names
    # Without its pins the Makefile installs nothing.
    assert {path.name for path in ROOT.glob("constraints*.txt")} == {n for n in names if n.startswith("constraints")}


def test_the_source_distribution_holds_what_its_makefile_needs(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"docs/index.md", "docs/conf.py", "docs/families/moe_gate.md", "docs/guides/torch.md"} <= names
    assert {"examples/expert_parallel.py", "benchmarks/results/h200.json", "tests/gpu_record.json"} <= names
    assert not [name for name in names if name.startswith(("build/", ".ci/"))]


#: Files of tests that pass wherever cukern is installed: they read no sources. The runtime, two ops, and graphs.
INSTALLED = ("test_norm.py", "test_moe_gate.py", "test_quantization.py", "test_op.py", "test_dynamic_batch.py")


@pytest.mark.rare
def test_the_installed_wheel_passes_tests_of_the_source_distribution(
    distributions: Path, clean_python: Path, tmp_path: Path
) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        kept = [x for x in archive.getmembers() if x.name.split("/")[1] in ("tests", "benchmarks", "pyproject.toml")]
        archive.extractall(tmp_path, members=kept, filter="data")
    (folder,) = (x for x in tmp_path.iterdir() if x.is_dir())
    assert not (folder / "cukern").exists()
    settings = {"CUKERN_CACHE_DIR": str(tmp_path / "cache"), "CUKERN_COMPILE": "lazy"}
    files = [f"tests/{name}" for name in INSTALLED]
    arguments = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files)
    said = _run(clean_python, "-m", "pytest", *arguments, cwd=folder, **settings)
    passed = int(said.strip().splitlines()[-1].split(" passed")[0].split()[-1])
    assert passed > 500 and " failed" not in said
    where = _run(clean_python, "-c", "import tests.spec, cukern; print(cukern.__file__)", cwd=folder, **settings)
    assert Path(where.strip()).is_relative_to(clean_python.parents[1])


def test_the_wheel_installs_the_command(clean_python: Path, tmp_path: Path) -> None:
    settings = {"CUKERN_CACHE_DIR": str(tmp_path / "cache"), "CUKERN_COMPILE": "lazy"}
    version = _run(clean_python, "-m", "cukern", "--version", cwd=tmp_path, **settings)
    assert version.startswith("cukern ")
    assert _run(clean_python.parent / "cukern", "--version", cwd=tmp_path, **settings) == version


def test_the_wheel_compiles_kernels_outside_the_checkout(clean_python: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    settings = {"CUKERN_CACHE_DIR": str(cache), "CUKERN_COMPILE": "lazy"}
    where = _run(clean_python, "-c", "import cukern; print(cukern.__file__)", cwd=tmp_path, **settings)
    assert Path(where.strip()).is_relative_to(clean_python.parents[1])

    arguments = ("compile", "--arch", "80", "--op", "embedding")
    _run(clean_python, "-m", "cukern", *arguments, cwd=tmp_path, **settings)
    cubins = list(cache.rglob("*.cubin"))
    assert cubins
    assert all(path.read_bytes().startswith(b"\x7fELF") for path in cubins)


def test_the_wheel_compiles_a_kernel_of_each_folder(clean_python: Path, tmp_path: Path) -> None:
    code = f"""
import os, cukern
from cukern.runtime import compile, sources
from cukern.runtime.kernel import KERNELS
for stem in {FOLDERS}:
    own = min((x for x in KERNELS[stem] if x.at_import and "/" in x.file), key=lambda x: x.compile_s)
    path, _ = compile.cubin(own.at_import[0], "80")
    print(stem, own.file, os.path.relpath(sources.CUDA_SRC, os.path.dirname(cukern.__file__)))
"""
    settings = {"CUKERN_CACHE_DIR": str(tmp_path / "cache"), "CUKERN_COMPILE": "lazy"}
    lines = [line.split() for line in _run(clean_python, "-c", code, cwd=tmp_path, **settings).splitlines()]
    assert FOLDERS and [stem for stem, _, _ in lines] == FOLDERS
    for stem, file, source in lines:
        assert file.startswith(f"{stem}/") and source == "cuda_src"
