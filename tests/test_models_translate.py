"""The command `cukern translate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from cukern.__main__ import main
from cukern.models.tokenizer import read_translator

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"word{i}" for i in range(60))]
TEXTS = ["word3 word4 word5", "", "word9", "word1 word2 nothing word7 word8", "   ", "word30 word31"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a BART built at random, and a tokenizer of whole words that adds the end."""
    directory = tmp_path_factory.mktemp("bart")
    torch.manual_seed(5)
    config = transformers.BartConfig(
        vocab_size=len(WORDS), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=12, init_std=0.5,
    )  # fmt: skip
    made = transformers.BartForConditionalGeneration(config)
    made.generation_config.max_length = 9
    made.save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>"])
    tokenizer.enable_padding(length=11)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), "utf-8")
    return path


def expected(directory: Path, text: str, **settings: Any) -> str:
    """transformers' translation of a text."""
    if not text.strip():
        return ""
    ids = [*[WORDS.index(word) if word in WORDS else 3 for word in text.split()][:11], 2]
    loaded = transformers.BartForConditionalGeneration.from_pretrained(directory).eval()
    with torch.no_grad():
        found = loaded.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), **settings)
    return " ".join(WORDS[i] for i in found[0].tolist() if i > 2)


def _translate(*arguments: Any) -> int:
    return main(["translate", *map(str, arguments)])


def _refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """The one line by which the command refuses its input."""
    assert _translate(*arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err.strip()


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_each_line_is_translated(
    model: Path, texts: Path, beams: int, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--beams", beams, "--batch-size", 3, "--library", library, "--device", "cpu"
    assert _translate("--model", model, "--input", texts, *arguments) == 0
    said = capsys.readouterr()
    wanted = [expected(model, text, num_beams=beams) for text in TEXTS]
    assert said.out.splitlines() == wanted
    assert len({*wanted}) > 3
    assert said.err.splitlines()[-1].startswith("4 texts, ")


def test_the_output_is_a_file(model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.txt"
    arguments = "--model", model, "--input", texts, "--output", output, "--device", "cpu", "--max-new-tokens", 4
    assert _translate(*arguments) == 0
    assert capsys.readouterr().out == ""
    assert output.read_text("utf-8").splitlines() == [expected(model, text, max_new_tokens=4) for text in TEXTS]


def test_draws_are_by_line_and_seed(model: Path, texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for batch_size, seed in ((2, 1), (6, 1), (6, 9)):
        drawn = "--sample", "--temperature", 5, "--top-k", 0, "--top-p", 0.99, "--seed", seed
        arguments = "--batch-size", batch_size, "--device", "cpu"
        assert _translate("--model", model, "--input", texts, *drawn, *arguments) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_long_text_is_cut_off_and_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = " ".join(WORDS[4:30])
    path = tmp_path / "long.txt"
    path.write_text(f"word3\n{long}\n")
    assert _translate("--model", model, "--input", path, "--device", "cpu") == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[0] == "cukern translate: line 2 has 27 tokens: cut off at 12"
    assert said.out.splitlines() == [expected(model, "word3"), expected(model, long)]


def test_as_a_user_types_it(model: Path, texts: Path, tmp_path: Path) -> None:
    settings = {"CUDA_VISIBLE_DEVICES": "", "CUKERN_COMPILE": "lazy", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "cukern", "translate", "--model", str(model), "--input", str(texts), "--beams", "2"],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, encoding="utf-8",
    )  # fmt: skip
    assert (done.returncode, len(done.stdout.splitlines())) == (0, len(TEXTS)), done.stderr
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert _translate("--model", model, "--input", empty, "--device", "cpu") == 0


def test_bad_arguments(model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = "--model", model, "--input", texts, "--device", "cpu"
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"a\xff\n")
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("--model", model, "--input", tmp_path / "no.txt"), f"{tmp_path / 'no.txt'}: No such file or directory"),
        (("--model", model, "--input", binary), f"{binary}: not UTF-8 (invalid start byte at byte 1)"),
        (("--model", tmp_path / "no", "--input", texts), f"--model: {tmp_path / 'no'} is no directory"),
        ((*both, "--beams", 0), "num_beams must be an integer of at least 1"),
        ((*both, "--batch-size", 0), "--batch-size must be at least 1, got 0"),
        ((*both, "--seed", -1), "--seed must be at least 0, got -1"),
        ((*both, "--top-k", 3), "--top-k needs --sample"),
        ((*both, "--sample", "--beams", 2), "do_sample must be False with num_beams above 1"),
        ((*both, "--max-new-tokens", 50), "max_length must be at most 13, for the model has 12 positions"),
        ((*both, "--output", tmp_path / "no" / "out.txt"), f"--output: the folder {tmp_path / 'no'} does not exist"),
    ]
    for arguments, message in cases:
        assert _refused(capsys, *arguments).startswith(f"cukern translate: {message}")


def _copy(model: Path, tmp_path: Path, *names: str) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in names:
        (directory / name).write_bytes((model / name).read_bytes())
    return directory


def test_what_is_missing_is_named(
    model: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _copy(model, tmp_path, "config.json")
    arguments = "--model", directory, "--input", texts, "--device", "cpu"
    assert "neither model.safetensors nor model.safetensors.index.json" in _refused(capsys, *arguments)
    (directory / "model.safetensors").write_bytes(b"not this")
    assert "model.safetensors is not a safetensors file" in _refused(capsys, *arguments)
    (directory / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert "no tokenizer.json, and not all of source.spm, target.spm, vocab.json" in _refused(capsys, *arguments)
    (directory / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a tokenizer" in _refused(capsys, *arguments)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "tokenizers", None)
        assert "needs the package tokenizers: pip install" in _refused(capsys, *arguments)
        patched.setitem(sys.modules, "safetensors", None)
        assert "needs the package safetensors: pip install" in _refused(capsys, *arguments)
    (directory / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    said = _refused(capsys, *arguments)
    assert "config must be of an encoder-decoder of model_type marian, bart, mbart, got model_type 'bert'" in said
    (directory / "config.json").unlink()
    assert "has no config.json" in _refused(capsys, *arguments)


class _Pieces:
    """A stand-in for SentencePiece: a piece a word, with its mark in front."""

    def __init__(self, model_file: str) -> None:
        self.name = Path(model_file).name

    def encode(self, text: str, out_type: type) -> list[str]:
        assert out_type is str
        assert self.name == "source.spm"
        return [f"▁{word}" for word in text.split()]

    def decode_pieces(self, pieces: list[str]) -> str:
        assert self.name == "target.spm"
        return "".join(pieces).replace("▁", " ")


def test_marian_has_two_models_over_a_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(b"")
    pieces = ["</s>", "<unk>", ">>fra<<", "▁a", "▁b", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ImportError, match=r"source\.spm: reading it needs a package: pip install sentencepiece"):
        read_translator(tmp_path)
    fake: Any = types.ModuleType("sentencepiece")
    fake.SentencePieceProcessor = _Pieces
    monkeypatch.setitem(sys.modules, "sentencepiece", fake)
    tokenizer = read_translator(tmp_path)
    assert tokenizer.encode(">>fra<< b a c") == [2, 4, 3, 1, 0]
    assert tokenizer.encode("") == [0]
    assert tokenizer.decode([5, 4, 3, 0, 5]) == "b a"
    (tmp_path / "target_vocab.json").write_text(json.dumps({"</s>": 0, "▁z": 4, "<unk>": 1}))
    assert read_translator(tmp_path).decode([4, 4, 0]) == "z z"
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(ValueError, match=r"vocab\.json: it has no <unk>"):
        read_translator(tmp_path)
