"""The runner of the peers' test files (tests/peers): what it makes of cases, and how processes share them."""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.peers import operators, tally
from tests.peers.board import Board
from tests.peers.files import FILES, OF_FOLDERS, Job, Load, files_of, jobs_of
from tests.peers.turns import Before, Part, SharedTurns, Turns

_ROOT = Path(__file__).resolve().parents[1]
_FILE = """
import os, time, pytest, torch

@pytest.fixture(scope="module")
def once():
    with open(os.environ["STARTS"], "a") as starts:
        starts.write("x")

@pytest.mark.parametrize("number", range(12))
def test_good(number, once):
    assert torch.get_default_dtype() == torch.float32

def test_bad():
    assert 1 == 2

def test_dies():
    os._exit(3)

def test_lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_hangs():
    time.sleep(1000)

def test_refused():
    raise NotImplementedError("x must be y with cukern")

def test_skipped():
    pytest.skip("why")
"""
_ROUNDED = """
import pytest, torch

class SiluAndMul:
    def forward_native(self, x):
        return x / 3

@pytest.mark.parametrize("given", [torch.ones(2).half() / 3, torch.ones(2) / 3, torch.ones(2) / 2])
def test_w8a8_block_fp8_fused_moe(given):
    found = SiluAndMul().forward_native(torch.ones(2).half())
    torch.testing.assert_close(given.double(), found.double(), rtol=0, atol=1e-6)
"""
_GPUS = """
import os, time

def test_gpu():
    with open(os.environ["STARTS"], "a") as starts:
        starts.write(os.environ["CUDA_VISIBLE_DEVICES"] + " ")
    time.sleep(2)
"""
_LATER = "import torch\n\ndef test_default():\n    torch.set_default_dtype(torch.float64)\n"


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.peers", str(folder), "-p", "no:cacheprovider", *options]
    environment = {"STARTS": str(folder / "starts"), "CUKERN_COMPILE": "lazy", "PYTHONPATH": str(_ROOT)}
    return subprocess.run(command, cwd=_ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def _counts(output: str, file: str) -> list[str]:
    return next(line.split()[1:7] for line in output.splitlines() if line.split()[:1] == [file])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "test_one.py").write_text(_FILE)
    (tmp_path / "peer" / "test_two.py").write_text(_LATER)
    (tmp_path / "peer" / "test_wrong.py").write_text("import nothing_of_this_name\n")
    return tmp_path / "peer"


@pytest.mark.rare
def test_processes_share_cases_and_lose_none(folder: Path, tmp_path: Path) -> None:
    """Processes that die, hang or lose the GPU fail in one case each; a second run does only what failed."""
    options = ["--jobs", "2", "--limit", "4", "--resume", str(tmp_path / "work"), "--report", str(tmp_path / "table")]
    first = _run(folder, *options)
    assert first.returncode == 1, first.stderr
    # passed, failed, differs, refused, skipped, left
    assert _counts(first.stdout, "peer/test_one.py") == ["12", "4", "0", "1", "1", "0"]
    assert _counts(first.stdout, "peer/test_two.py") == ["1", "0", "0", "0", "0", "0"]
    assert _counts(first.stdout, "peer/test_wrong.py") == ["0", "1", "0", "0", "0", "0"]
    for words in (
        "test_dies: the process ended with 3",
        "test_hangs: stopped after 4 s",
        "No module named 'nothing_of",
    ):
        assert words in first.stdout
    assert (tmp_path / "table").read_text() in first.stdout
    (folder / "test_one.py").write_text(_FILE.replace("1 == 2", "1 == 1").replace("os._exit(3)", "pass"))
    (folder / "starts").unlink()
    second = _run(folder, *options, "--only=-wrong")
    assert _counts(second.stdout, "peer/test_one.py") == ["14", "2", "0", "1", "1", "0"]
    assert not (folder / "starts").exists()  # no case that had passed has run again


@pytest.mark.rare
def test_time_that_ends_is_told(folder: Path, tmp_path: Path) -> None:
    result = _run(folder, "--jobs", "1", "--until", "0.1", "--only", "one,two")
    assert result.returncode == 1
    # All of a file whose cases are not known yet.
    assert _counts(result.stdout, "peer/test_one.py")[-1] != "0"


@pytest.mark.rare
def test_a_sample_that_is_whole_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- counts of peer -->\n\n<!-- end of counts -->\n")
    options = ["--only=one", "-k", "test_good or test_refused", "--resume", str(tmp_path / "work")]
    assert _counts(_run(folder, *options, "--every", "5").stdout, "peer/test_one.py")[-3:] == ["1", "0", "0"]
    shown = _run(folder, *options, "--until", "0", "--page", str(page))
    assert _counts(shown.stdout, "peer/test_one.py") == ["3", "0", "0", "1", "0", "0"]
    assert "| `peer/test_one.py` | 3 | 0 | 0 | 1 | 0 | 0 | 13 | 5 |" in page.read_text()


@pytest.mark.rare
def test_processes_have_the_gpus_in_turns(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    (folder / "test_one.py").write_text(_GPUS)
    (folder / "test_two.py").write_text(_GPUS)
    assert _counts(_run(folder, "--jobs", "2", "--only=one,two").stdout, "peer/test_one.py")[0] == "1"
    assert sorted((folder / "starts").read_text().split()) == ["6", "7"]


def test_jobs_that_wait_have_a_gpu_first(tmp_path: Path) -> None:
    jobs = [Job(tmp_path, name, Load(50, waits=name == "b")) for name in "abc"]
    board = Board(jobs, multiprocessing.get_context("spawn"), math.inf)
    assert [board.join(number, waits=waits) for number, waits in enumerate((True, False, False, True))] == [1, 0, 2, 1]
    assert board.join(4, {tmp_path}) is None


def test_the_longest_cases_are_begun_first(tmp_path: Path) -> None:
    board = Board([Job(tmp_path, "f", Load(5, first="^b"))], multiprocessing.get_context("spawn"), math.inf)
    names = [f"{letter}[{number}]" for letter in "abc" for number in range(5)]
    order = SharedTurns(board, 0, Part(), tmp_path / "cases", Before()).chosen(names, names)
    assert {name[0] for name in order[:5]} == {"b"} and sorted(order) == names


@pytest.mark.rare
def test_arguments_of_pytest(folder: Path) -> None:
    result = _run(folder, "--jobs", "1", "--only=one", "-k", "test_good or test_bad")
    assert _counts(result.stdout, "peer/test_one.py") == ["12", "1", "0", "0", "0", "0"]
    result = _run(folder, "--jobs", "1", "--only=one", "--no-such-option")
    assert "pytest ended with 4" in result.stdout


def test_one_process(folder: Path) -> None:
    for name in ("test_dies", "test_hangs"):
        (folder / "test_one.py").write_text(
            (folder / "test_one.py").read_text().replace(f"def {name}", f"def not_{name}")
        )
    result = _run(folder, "--part", "0/2", "--only", "one")
    parts = [_counts(result.stdout, "test_one.py")]
    parts.append(_counts(_run(folder, "--part", "1/2", "--only", "one").stdout, "test_one.py"))
    assert [sum(map(int, column)) for column in zip(*parts, strict=True)] == [12, 2, 0, 1, 1, 0]
    assert (folder / "starts").read_text() == "xx"  # once in each run


def test_jobs_of_a_file_have_each_case_once(tmp_path: Path) -> None:
    name = "tests/utils/test_sampling.py"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).touch()
    jobs = jobs_of(tmp_path)
    assert [job.load for job in jobs] == sorted(FILES[name], key=lambda load: -load.seconds)
    cases = ("test_sampling_freq[0.0-1]", "test_sampling[1-111]", "test_top_p_sampling_freq[1]", "test_softmax[1]")
    for case in (*cases, "test_top_k_sampling_with_variable_k[1]", "test_top_k_top_p_joint_sampling_from_probs[1]"):
        assert sum(job.has(case) for job in jobs) == 1
    assert files_of(tmp_path, "norm") == [] and files_of(tmp_path, "-sampling") == []
    assert files_of(tmp_path, "page,sampling") == [name]


def _names(every: int, before: Before | None = None) -> list[str]:
    names = [f"test_many[{number}]" for number in range(40)] + ["test_one", "test_few[a]", "test_few[b]"]
    return Turns(Part(), None, every, before).chosen(names, names)


def test_a_sample_has_cases_of_each_test() -> None:
    sample = _names(10)
    assert sorted(name.partition("[")[0] for name in sample) == ["test_few", *["test_many"] * 4, "test_one"]
    assert sample == _names(10)
    assert len(_names(1)) == 43
    # What has been run counts for it, and what has failed is run again, first.
    before = Before(frozenset({"test_many[7]", "test_many[8]", "test_one"}), frozenset({"test_many[9]"}))
    again = _names(10, before)
    assert again[0] == "test_many[9]" and sorted(name[:8] for name in again) == ["test_few", "test_man", "test_man"]
    assert not before.done & set(again)
    more = Before(frozenset(f"test_many[{number}]" for number in range(20)), frozenset())
    assert sorted(name[:8] for name in _names(10, more)) == ["test_few", "test_one"]


def test_shares_of_files_that_take_long(tmp_path: Path) -> None:
    long, short = "tests/kernels/attention/test_merge_attn_states.py", "tests/kernels/moe/test_topk_softplus_sqrt.py"
    for name in (long, short):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    shares = {job.file: job.every for job in jobs_of(tmp_path, seconds=100)}
    assert shares[short] == 1 and FILES[long][0].seconds / shares[long] <= 100
    assert {job.every for job in jobs_of(tmp_path, every=3)} == {3}


def test_the_tables_of_a_page(tmp_path: Path) -> None:
    page, marks = tmp_path / "page.md", "a\n<!-- counts of one two -->\n{}\n<!-- end of counts -->\nb\n"
    page.write_text(marks.format("") + marks.format("old").replace("one two", "three"))
    cases = [tally.Case("one/f.py", "a", "passed"), tally.Case("one/f.py", "b", "refused", "why")]
    for _ in range(2):  # and again in the same place
        tally.fill(page, cases, {"one/f.py": tally.Whole(9, 1, 3), "two/g.py": tally.Whole()})
        names = "passed | failed | differs | refused | skipped | left | of | one in"
        head = f"\n| file | {names} |\n| ---" + " | --:" * 8 + " |\n"
        rows = "| `one/f.py` | 1 | 0 | 0 | 1 | 0 | 1 | 9 | 3 |\n| `two/g.py` |  |  |  |  |  |  |  |  |\n"
        assert page.read_text() == marks.format(head + rows) + marks.format(head).replace("one two", "three")


@pytest.mark.rare
def test_a_rounded_reference_is_tried_without_its_rounding(tmp_path: Path) -> None:
    """A case that then agrees differs on purpose; one that still does not has failed."""
    (tmp_path / "test_one.py").write_text(_ROUNDED)
    counts = _counts(_run(tmp_path).stdout, "test_one.py")
    assert counts == ["1", "1", "1", "0", "0", "0"]


def test_keys_of_a_cache_in_other_parts_keep_their_dimensions() -> None:
    keys = torch.randint(0, 64, (3, 2, 4, 5, 16), dtype=torch.uint8)  # [blocks, heads, dim / 16, block, 16]
    found = torch.empty(3, 2, 8, 5, 8, dtype=torch.bfloat16)
    operators.convert_fp8(found, keys, 0.5)
    by_tokens = [x.permute(0, 1, 3, 2, 4).reshape(3, 2, 5, 64) for x in (found, keys)]
    assert torch.equal(by_tokens[0].float(), by_tokens[1].view(torch.float8_e4m3fn).float() * 0.5)


def test_a_line_that_was_cut_off_is_no_case(tmp_path: Path) -> None:
    path = tmp_path / "cases"
    tally.append(path, tally.Case("f", "a", "passed"))
    tally.append(path, tally.Case("f", "b", tally.BEGUN))
    assert tally.unended(path) == tally.Case("f", "b", tally.BEGUN)
    with path.open("a") as lines:
        lines.write('["f", "c", "pas')
    assert [case.name for case in tally.read(path)] == ["a"]


def test_loads_are_of_some_seconds() -> None:
    for files in (FILES, *OF_FOLDERS.values()):
        assert all(isinstance(load, Load) and load.seconds > 0 for loads in files.values() for load in loads)
    assert all(set(files) <= set(FILES) for files in OF_FOLDERS.values())
