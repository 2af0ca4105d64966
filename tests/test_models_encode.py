"""The command `cukern encode`: what it prints and keeps, and how it refuses input."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from cukern.__main__ import main
from cukern.commands import encode
from cukern.commands import texts as shared
from cukern.models import Encoder
from tests import encoders
from tests.encoders import one_thread, save, texts  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(encoders.model("bert"), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")


def _write(path: Path, content: str) -> str:
    path.write_bytes(content.encode())
    return str(path)


def test_vectors_are_kept(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["ka lo mi", "", "nu", "ka lo nu nu nu"]
    given = _write(tmp_path / "texts.txt", "ka lo mi\r\n\nnu\nka lo nu nu nu")
    output = tmp_path / "vectors.npy"
    arguments = ["encode", "--model", str(folder), "--input", given, "--output", str(output), "--batch-size", "2"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "Encoder(bert, 3 layers of 64, 4 heads, float32, torch" in said.out
    shape = re.escape(f"float32 [4, 64], in {output}")
    assert re.search(rf"4 texts, 17 tokens, \d+\.\d\d s \(\d+ texts/s\): {shape}\n$", said.out)
    assert re.fullmatch(r"(cukern encode: \d+ of \d+, \d+ s: embedding texts\n)+", said.err)
    kept = np.load(output)
    assert kept.dtype == np.float32
    np.testing.assert_allclose(kept, Encoder.from_directory(folder, device="cpu").embed(lines).numpy(), atol=1e-5)


def test_the_nearest_texts_are_shown(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _write(tmp_path / "texts.txt", "ka lo mi\n\nnu re nu\nKA lo mi\n" + "\n".join(texts([9] * 4)) + "\n")
    assert main(["encode", "--model", str(folder), "--input", given, "--dtype", "float16"]) == 0
    output = capsys.readouterr().out
    assert "float16" in output and "float32 [8, 64]\n" in output
    rows = [line.split() for line in output.splitlines() if re.match(r" +\d ", line)]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    # Equal but for the case, which the tokenizer leaves out.
    assert rows[0] == ["1", "ka", "lo", "mi", "5", "KA", "lo", "mi", "1.0000"]
    assert rows[3] == ["4", "KA", "lo", "mi", "5", "ka", "lo", "mi", "1.0000"]
    assert rows[1][1:3] == ["(empty)", "2"]


def test_one_text_has_no_neighbour(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _write(tmp_path / "texts.txt", "ka\n")
    assert main(["encode", "--model", str(folder), "--input", given]) == 0
    assert re.search(r"\n +1 +ka +3 *\n", capsys.readouterr().out)


def test_texts_that_are_too_long_are_told(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _write(tmp_path / "texts.txt", "ka " * 50 + "\nlo\n")
    assert main(["encode", "--model", str(folder), "--input", given]) == 0
    said = capsys.readouterr()
    assert "1 of 2 texts are longer than 40 tokens: only the first 40 tokens count\n" in said.out
    assert "2 texts, 43 tokens" in said.out and said.err == "cukern encode: 2 of 2, 0 s: embedding texts\n"


def test_refusals(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _write(tmp_path / "texts.txt", "ka\n")
    (tmp_path / "latin1.txt").write_bytes("\xe9t\xe9".encode("latin1"))
    bare = save(encoders.model("bert"), tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    capsys.readouterr()  # transformers tells of its progress
    model = ["--model", str(folder)]
    for arguments, message in (
        ([*model], "the following arguments are required: --input"),
        ([*model, "--input", str(tmp_path / "none")], f"{tmp_path}/none: No such file or directory"),
        ([*model, "--input", str(tmp_path)], f"{tmp_path}: Is a directory"),
        ([*model, "--input", _write(tmp_path / "empty", "")], f"{tmp_path}/empty: there are no texts"),
        ([*model, "--input", str(tmp_path / "latin1.txt")], f"{tmp_path}/latin1.txt: not UTF-8 ("),
        ([*model, "--input", given, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ([*model, "--input", given, "--output", "x.txt"], "--output must end in .npy, got x.txt"),
        (
            [*model, "--input", given, "--output", str(tmp_path / "none/x.npy")],
            f"--output: the folder {tmp_path}/none does not exist",
        ),
        ([*model, "--input", given, "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (
            ["--model", str(tmp_path / "none"), "--input", given],
            f"--model: {tmp_path}/none is no directory",
        ),
        (["--model", str(tmp_path), "--input", given], f"{tmp_path} has no config.json, which says what model it is"),
        (["--model", str(bare), "--input", given], f"{bare} has no tokenizer.json, so texts cannot be read ("),
    ):
        assert main(["encode", *arguments]) == 2, arguments
        said = capsys.readouterr().err
        assert said.startswith(f"cukern encode: {message}"), said
        assert said.count("\n") == 1


def test_the_lines_of_a_file(tmp_path: Path) -> None:
    for content, lines in (
        ("a\nb", ["a", "b"]),
        ("a\r\n\r\n b \r\n", ["a", "", " b "]),
        ("\n", [""]),
        ("a\u2028b\x0cc\n", ["a\u2028b\x0cc"]),
    ):
        assert shared.read_lines(Path(_write(tmp_path / "texts.txt", content))) == lines


def test_the_nearest_of_texts_without_a_vector() -> None:
    vectors = np.array([[0, 0], [1, 0], [2, 0]], np.float32)
    assert encode._nearest(vectors, 3)[1:] == [(2, 1.0), (1, 1.0)]
    assert encode._nearest(vectors, 3)[0][1] == 0
