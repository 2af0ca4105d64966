"""Encoders from directories, and the vectors of texts against transformers' hidden states pooled by formula."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cukern.models import Decoding, Encoder, TextConfig  # noqa: E402  (after torch is known to be there)
from cukern.models import checkpoint as checkpoints  # noqa: E402
from cukern.models.text import by_length  # noqa: E402
from cukern.testing import assert_matches  # noqa: E402
from tests import encoders  # noqa: E402
from tests.encoders import ARCHITECTURES, VOCAB, numpy_of, one_thread, save, state_of, texts, wanted  # noqa: E402, F401

HOST = ("torch", "numpy")
LIBRARIES = [*HOST, pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cupy", marks=pytest.mark.gpu)]
#: Texts of several lengths, an empty one among them, which has its special tokens.
LENGTHS = [3, 0, 9, 1, 4, 4, 12, 2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each architecture; not to be written."""
    root = tmp_path_factory.mktemp("models")
    return {name: save(encoders.model(name), root / name) for name in ARCHITECTURES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory to spoil."""
    return save(encoders.model("bert"), tmp_path / "model")


def _load(path: Path, library: str, **options: Any) -> Encoder:
    on = {"library": "torch", "device": library} if library == "cuda" else {"library": library}
    return Encoder.from_directory(path, **({"device": "cpu"} if library == "torch" else {}), **on, **options)


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


def _modules(folder: Path, *kinds: str, transformer: str = "", pooling: dict[str, Any] | None = None) -> None:
    """sentence-transformers' files beside a model."""
    paths = [transformer if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _write(folder / "modules.json", modules)
    if pooling is not None:
        _write(folder / paths[kinds.index("Pooling")] / "config.json", {"word_embedding_dimension": 64, **pooling})


def _tokens(lines: list[str], most: int = 40) -> list[list[int]]:
    ids = {word: i for i, word in enumerate([*encoders.SPECIAL, *encoders.WORDS])}
    return [[0, *[ids[word] for word in line.split()][: most - 2], 2] for line in lines]


def _vectors(name: str, tokens: list[list[int]], modes: tuple[str, ...], normalize: bool) -> np.ndarray[Any, Any]:
    """The vectors by transformers, one text after the other, and the formulas of the poolings."""
    vectors = []
    for ids in tokens:
        tensor = torch.tensor([ids])
        states = wanted(encoders.model(name), tensor, torch.ones_like(tensor))[0]
        of_mode = {"cls": states[0], "max": states.amax(0), "mean": states.mean(0)}
        vector = torch.cat([of_mode[mode] for mode in modes])
        vectors.append((vector / vector.norm() if normalize else vector).numpy())
    return np.stack(vectors)


# --- vectors of texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [
        ([], []),
        ([0], [[0]]),
        ([5, 20000, 7], [[1], [2, 0]]),  # a text with more has a batch of its own
        ([1, 16383, 2], [[1], [2, 0]]),
        ([2, 16382], [[1, 0]]),
        ([8192, 8191, 1, 0], [[0, 1, 2], [3]]),  # one without tokens counts as one
    ],
)
def test_batches_of_as_many_tokens_as_keep_a_gpu_busy(lengths: list[int], wanted: list[list[int]]) -> None:
    assert [batch.tolist() for batch in by_length([[7] * length for length in lengths], None)] == wanted


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_are_normalized_means_in_the_order_of_the_texts(
    name: str, library: str, folders: dict[str, Path]
) -> None:
    lines = texts(LENGTHS)
    encoder = _load(folders[name], library)
    assert encoder.tokenize(lines) == _tokens(lines)
    want = _vectors(name, _tokens(lines), ("mean",), True)
    for batch_size in (1, 3, 32):
        got = encoder.embed(lines, batch_size=batch_size)
        assert type(got) is type(encoder.weights.word)
        assert_matches("models.vectors", numpy_of(got), want)
    raw = encoder.embed(lines, normalize=False)
    assert_matches("models.vectors", numpy_of(raw), _vectors(name, _tokens(lines), ("mean",), False))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("modes", [("cls",), ("max",), ("mean",), ("cls", "mean"), ("cls", "max", "mean")])
def test_poolings(modes: tuple[str, ...], library: str) -> None:
    source = encoders.model("bert")
    tokens = _tokens(texts(LENGTHS))
    for normalize in (False, True):
        text = TextConfig(pooling=modes, normalize=normalize)
        encoder = Encoder.from_state_dict(state_of(source, library), source.config, text=text)
        assert encoder.embedding_size == 64 * len(modes)
        got = encoder.embed_tokens(tokens, batch_size=3)
        assert_matches("models.vectors", numpy_of(got), _vectors("bert", tokens, modes, normalize))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mode", ["cls", "max", "mean"])
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_texts_without_tokens_have_vectors_of_zeros(name: str, mode: str, library: str) -> None:
    source = encoders.model(name)
    encoder = Encoder.from_state_dict(state_of(source, library), source.config, text=TextConfig(pooling=(mode,)))
    tokens = [[], [5, 6, 7], [], [8]]
    for batch_size in (1, 2, 4):
        got = numpy_of(encoder.embed_tokens(tokens, batch_size=batch_size))
        assert not got[[0, 2]].any()
        assert_matches("models.vectors", got[[1, 3]], _vectors(name, [tokens[1], tokens[3]], (mode,), True))
    assert numpy_of(encoder.embed_tokens([])).shape == (0, 64)
    assert not numpy_of(encoder.embed_tokens([[], []])).any()


@pytest.mark.parametrize("library", [pytest.param("torch", id="torch"), *LIBRARIES[2:]])
def test_a_vector_has_the_same_bits_alone_and_in_any_batch(library: str) -> None:
    source = encoders.model("roberta")
    encoder = Encoder.from_state_dict(state_of(source, library), source.config, product_rows=16)
    tokens = _tokens(texts([*LENGTHS, 30, 17]))
    want = [numpy_of(encoder.embed_tokens([ids]))[0] for ids in tokens]
    for batch_size in (2, 5, 32):
        np.testing.assert_array_equal(numpy_of(encoder.embed_tokens(tokens, batch_size=batch_size)), want)
    np.testing.assert_array_equal(numpy_of(encoder.embed_tokens(tokens[::-1])), want[::-1])


@pytest.mark.parametrize("library", HOST)
def test_many_texts(library: str, folders: dict[str, Path], rng: np.random.Generator) -> None:
    lines = texts([int(n) for n in rng.integers(0, 20, 2000)])
    lines[1000:] = lines[:1000]
    got = numpy_of(_load(folders["distilbert"], library).embed(lines, batch_size=256))
    assert got.shape == (2000, 64)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(got[1000:], got[:1000], atol=1e-5)
    some = [0, 1, 777, 1500]
    assert_matches(
        "models.vectors", got[some], _vectors("distilbert", _tokens([lines[i] for i in some]), ("mean",), True)
    )


def test_sixteen_bits_give_vectors_of_32(folders: dict[str, Path]) -> None:
    lines = texts(LENGTHS)
    want = _vectors("bert", _tokens(lines), ("mean",), True)
    for library in HOST:
        for dtype in ("float16", "bfloat16"):
            got = numpy_of(_load(folders["bert"], library, dtype=dtype).embed(lines))
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, atol=2e-2)


# --- reading texts ------------------------------------------------------------------------------------


def test_long_texts_are_cut_with_a_warning(folders: dict[str, Path]) -> None:
    encoder = _load(folders["bert"], "torch")
    lines = texts([50, 3, 38, 39])
    said = "2 of 4 texts are longer than 40 tokens: only the first 40 tokens count"
    with pytest.warns(UserWarning, match=said) as caught:
        got = encoder.embed(lines)
    assert caught[0].filename == __file__
    assert_matches("models.vectors", got.numpy(), _vectors("bert", _tokens(lines), ("mean",), True))
    with pytest.warns(UserWarning, match="3 of 4 texts are longer than 7 tokens") as caught:
        assert encoder.tokenize(lines, max_length=7) == _tokens(lines, 7)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.embed(lines[1:3])


@pytest.mark.parametrize("length", [2, 41, 7.0])
def test_lengths_that_are_not_taken(length: Any, folders: dict[str, Path]) -> None:
    wanted = r"max_length must be an integer in \[3, 40\] \(2 special tokens and a word, up to what the model takes\)"
    with pytest.raises((TypeError, ValueError), match=wanted):
        _load(folders["bert"], "torch").embed(["a"], max_length=length)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 40),
        ({"tokenizer_config.json": {"model_max_length": 1e30}}, 40),
        ({"tokenizer_config.json": {"model_max_length": 12}}, 12),
        ({"sentence_bert_config.json": {"max_seq_length": 9, "do_lower_case": False}}, 9),
        ({"sentence_bert_config.json": {"max_seq_length": None}, "tokenizer_config.json": {}}, 40),
        ({"sentence_roberta_config.json": {"max_seq_length": 99}}, 40),
    ],
)
def test_the_most_tokens_of_a_text(files: dict[str, Any], most: int, folder: Path) -> None:
    _modules(folder, "Transformer")
    for name, content in files.items():
        _write(folder / name, content)
    tokenizer = Encoder.from_directory(folder, device="cpu").tokenizer
    assert tokenizer is not None and tokenizer.max_length == most


def test_the_side_that_is_cut(folder: Path) -> None:
    _write(folder / "tokenizer_config.json", {"truncation_side": "left"})
    encoder = Encoder.from_directory(folder, device="cpu")
    with pytest.warns(UserWarning, match="1 of 1 texts"):
        (ids,) = encoder.tokenize(["ka lo mi nu"], max_length=4)
    assert ids == _tokens(["mi nu"])[0]


def test_bad_texts(folders: dict[str, Path]) -> None:
    encoder = _load(folders["bert"], "torch")
    for given, message in (
        ("a text", "texts must be a list of texts, got str"),
        (b"bytes", "texts must be a list of texts, got bytes"),
        (None, "texts must be a list of texts, got NoneType"),
        (["a", 3], r"texts\[1\] must be a str, got int"),
    ):
        with pytest.raises(TypeError, match=message):
            encoder.embed(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, got 0"):
        encoder.embed(["a"], batch_size=0)
    assert numpy_of(encoder.embed([])).shape == (0, 64)
    assert numpy_of(encoder.embed(iter(["ka", "lo"]))).shape == (2, 64)  # type: ignore[arg-type]


def test_bad_tokens() -> None:
    source = encoders.model("bert")
    encoder = Encoder.from_state_dict(state_of(source, "torch"), source.config)
    with pytest.raises(ValueError, match=r"tokens\[1\] must be of at most 40 ids, got 41"):
        encoder.embed_tokens([[1], [1] * 41])
    with pytest.raises(ValueError, match=rf"tokens\[0\] must be ids in \[0, {VOCAB}\), got 3 to {VOCAB}"):
        encoder.embed_tokens([[3, VOCAB]])
    with pytest.raises(ValueError, match="the encoder has no tokenizer: give it one, or call embed_tokens with token"):
        encoder.embed(["a"])


def test_progress_is_shown_on_request(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    encoder = _load(folders["bert"], "torch")
    encoder.embed(texts(LENGTHS))
    assert capsys.readouterr().err == ""
    encoder.embed(texts(LENGTHS), progress=True, batch_size=2)
    said = capsys.readouterr()
    assert "cukern: embedding texts" in said.err and "8/8" in said.err and said.out == ""


# --- sentence-transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "modes"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_mean_tokens": True}, ("mean",)),
        ({"pooling_mode_max_tokens": True, "include_prompt": True}, ("max",)),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("max", "mean")),
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_pooling_of_sentence_transformers(
    pooling: dict[str, Any], modes: tuple[str, ...], normalize: bool, folder: Path
) -> None:
    _modules(folder, "Transformer", "Pooling", *(["Normalize"] if normalize else []), pooling=pooling)
    lines = texts(LENGTHS)
    encoder = Encoder.from_directory(folder, device="cpu")
    assert_matches("models.vectors", encoder.embed(lines).numpy(), _vectors("bert", _tokens(lines), modes, normalize))
    got = encoder.embed(lines, normalize=not normalize).numpy()
    assert_matches("models.vectors", got, _vectors("bert", _tokens(lines), modes, not normalize))


def test_the_model_in_a_folder_of_its_own(tmp_path: Path) -> None:
    save(encoders.model("roberta"), tmp_path / "0_Transformer")
    _modules(tmp_path, "Transformer", transformer="0_Transformer")
    lines = texts(LENGTHS)
    got = Encoder.from_directory(str(tmp_path), device="cpu").embed(lines)
    assert_matches("models.vectors", got.numpy(), _vectors("roberta", _tokens(lines), ("mean",), False))


def test_what_is_done_with_a_text_first(folder: Path) -> None:
    _modules(folder, "Transformer", "Pooling", pooling={"pooling_mode_mean_tokens": True})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": True})
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    _write(folder / "tokenizer.json", {**tokenizer, "normalizer": None})  # which changes capitals, too
    prompts = {"query": "ka lo ", "document": ""}
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    text = Encoder.from_directory(folder, device="cpu").text
    assert text == TextConfig(("mean",), False, 20, True, True, "ka lo ")
    encoder = Encoder.from_directory(folder, device="cpu")
    assert encoder.tokenize(["  MI nu\n"]) == _tokens(["ka lo mi nu"])
    assert encoder.tokenizer is not None and encoder.tokenizer._prepared("MI\n") == "ka lo mi"
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    assert Encoder.from_directory(folder, device="cpu").tokenize(["mi"]) == _tokens(["mi"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: _modules(path, "Transformer", "Pooling", "Dense"),
            "the type of a module of {}/modules.json must be one of 'Transformer', 'Pooling', 'Normalize', got 'Dense'",
        ),
        (
            lambda path: _modules(path, "Transformer", "Pooling", pooling={}),
            "/1_Pooling/config.json names no pooling",
        ),
        (lambda path: _modules(path, "Normalize"), "{}/modules.json has no module Transformer"),
        (
            lambda path: _modules(path, "Transformer", "Pooling"),
            "{}/1_Pooling/config.json, the configuration of the pooling, does not exist",
        ),
        (
            lambda path: _modules(path, "Transformer", "Pooling", pooling={"pooling_mode_lasttoken": True}),
            "the pooling in {}/1_Pooling/config.json must be one of 'cls', 'max', 'mean', got 'lasttoken'",
        ),
        (lambda path: _write(path / "modules.json", "[{"), "{}/modules.json is not a JSON file: Expecting"),
    ],
)
def test_modules_that_are_not_taken(spoil: Callable[[Path], None], message: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message.format(folder))):
        Encoder.from_directory(folder)


def test_a_prompt_that_is_not_pooled(folder: Path) -> None:
    _modules(folder, "Transformer", "Pooling", pooling={"pooling_mode": "mean", "include_prompt": False})
    Encoder.from_directory(folder, device="cpu")
    prompts = {"prompts": {"query": "ka "}, "default_prompt_name": "query"}
    _write(folder / "config_sentence_transformers.json", prompts)
    with pytest.raises(ValueError, match="include_prompt of the pooling must be true where the model has a default pr"):
        Encoder.from_directory(folder)


# --- directories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_shards(library: str, dtype: str, tmp_path: Path) -> None:
    source = encoders.model("bert")
    folder = save(source, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    encoder = _load(folder, library, dtype=dtype)
    assert encoder.dtype == dtype and "bert, 3 layers of 64, 4 heads" in repr(encoder)
    want = Encoder.from_state_dict(state_of(source, "torch"), source.config, dtype=dtype)
    got, layer = encoder.weights.layers[2], want.weights.layers[2]
    np.testing.assert_array_equal(numpy_of(got.qkv.weight), numpy_of(layer.qkv.weight))
    np.testing.assert_array_equal(numpy_of(encoder.weights.position), numpy_of(want.weights.position))


def test_weights_keep_the_dtype_of_the_file(tmp_path: Path) -> None:
    import copy

    for dtype in ("float16", "bfloat16"):
        folder = save(copy.deepcopy(encoders.model("distilbert")).to(getattr(torch, dtype)), tmp_path / dtype)
        for library in HOST:
            encoder = _load(folder, library)
            assert encoder.dtype == dtype
            assert encoder.embed(["ka lo"]).shape == (1, 64)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "{} has no config.json, which says what model it is"),
        (lambda path: _write(path / "config.json", "[]"), "{}/config.json must hold an object, got list"),
        (lambda path: _write(path / "config.json", "{"), "{}/config.json is not a JSON file: Expecting property name"),
        (
            lambda path: (path / "model.safetensors").unlink(),
            "{} has neither model.safetensors nor model.safetensors.index.json",
        ),
        (
            lambda path: (path / "model.safetensors").rename(path / "tf_model.h5"),
            "(it has tf_model.h5: transformers' save_pretrained writes safetensors)",
        ),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"not a file of weights"),
            "{}/model.safetensors is not a safetensors file: ",
        ),
        (
            lambda path: (
                (path / "model.safetensors").unlink(),
                _write(path / "model.safetensors.index.json", {"weight_map": {"a": "one.safetensors"}}),
            ),
            "{} has no one.safetensors, which model.safetensors.index.json names",
        ),
        (
            lambda path: (
                (path / "model.safetensors").unlink(),
                _write(path / "model.safetensors.index.json", ["a"]),
            ),
            "{}/model.safetensors.index.json must have an object 'weight_map'",
        ),
    ],
)
@pytest.mark.parametrize("library", HOST)
def test_directories_that_are_not_models(
    library: str, spoil: Callable[[Path], None], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message.format(folder))):
        _load(folder, library)


def test_weights_of_older_models(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    source = encoders.model("bert")
    torch.save({"embeddings.position_ids": torch.arange(40)[None], **source.state_dict()}, file)
    ids, mask = encoders.batch([5, 3], 6)
    got = Encoder.from_directory(folder, device="cpu")(ids, mask)
    assert torch.equal(got, Encoder.from_state_dict(state_of(source, "torch"), source.config)(ids, mask))
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .* \(it has pytorch_model\.bin"):
        Encoder.from_directory(folder, library="numpy")
    torch.save({name: x.to(torch.int8) for name, x in source.state_dict().items()}, file)
    with pytest.raises(TypeError, match=r"must be float32, float16 or bfloat16 \(quantized .*\), got int8"):
        Encoder.from_directory(folder, device="cpu")
    for content in ([torch.ones(2)], {"a": 3}, {"embeddings.word_embeddings.weight": torch.ones(2)}, print):
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"is not a state dict|state has no "):
            Encoder.from_directory(folder, device="cpu")


class Canary:
    """Makes a folder where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_no_code_of_a_file_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({**encoders.model("bert").state_dict(), "pooler": Canary(tmp_path / "made")}, file)
    with pytest.raises(ValueError, match="pytorch_model") as refused:
        Encoder.from_directory(folder, device="cpu")
    assert not (tmp_path / "made").exists()
    assert str(refused.value) == f"{file} is not a state dict that can be read as tensors alone"
    # The canary is alive.
    torch.load(file, weights_only=False)
    assert (tmp_path / "made").is_dir()


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"path must be a model's directory, got .*/none, which does not exist"):
        Encoder.from_directory(tmp_path / "none")
    _write(tmp_path / "file", "")
    with pytest.raises(NotADirectoryError, match=r"path must be a model's directory, got .*/file, which is a file"):
        Encoder.from_directory(tmp_path / "file")


@pytest.mark.parametrize("model", [Encoder, Decoding])
def test_the_name_of_a_model_of_the_hub(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "all-MiniLM-L6-v2"):
        with pytest.raises(FileNotFoundError) as refused:
            model.from_directory(name)
        assert str(refused.value) == (
            f"path must be a model's directory, got {name}, which does not exist; if it is a model of the Hugging Face "
            f"Hub, download it first: `hf download {name} --local-dir all-MiniLM-L6-v2`"
        )


def test_weights_that_are_quantized(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    save_file({**state, "embeddings.position_ids": torch.arange(40)[None]}, folder / "model.safetensors")
    Encoder.from_directory(folder, device="cpu")
    name = "encoder.layer.0.output.dense.weight"
    save_file({**state, name: state[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(TypeError, match=rf"{name} must be float32, float16 or bfloat16 \(quantized .*\), got I8"):
        Encoder.from_directory(folder)


def test_a_name_in_two_shards(folder: Path) -> None:
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink()
    for name in ("one", "two"):
        save_file({"a": torch.ones(1)}, folder / f"{name}.safetensors")
    shards = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    _write(folder / "model.safetensors.index.json", shards)
    with pytest.raises(ValueError, match=r"two\.safetensors holds a, which another file holds too"):
        Encoder.from_directory(folder)


def test_a_directory_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    encoder = Encoder.from_directory(folder, device="cpu")
    assert encoder.embed_tokens([[5, 6]]).shape == (1, 64)
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"{folder} has no tokenizer.json, so texts cannot be read (")
    ):
        encoder.embed(["ka"])
    _write(folder / "tokenizer.json", "{}")
    with pytest.raises(ValueError, match=re.escape(f"{folder}/tokenizer.json is not a tokenizer: ")):
        Encoder.from_directory(folder, device="cpu").embed(["ka"])


def test_packages_that_are_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder.from_directory(folder, device="cpu")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=re.escape('needs the package tokenizers: pip install "cukern[models]"')):
        encoder.embed(["ka"])
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape('needs the package safetensors: pip install "cukern[models]"')):
        Encoder.from_directory(folder, device="cpu")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=re.escape("library='torch' needs the package torch: pip install \"cukern[torch]\"")
    ):
        Encoder.from_directory(folder, library="torch")


def test_libraries_and_devices_that_are_not_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="library must be one of 'torch', 'cupy', 'numpy', got 'jax'"):
        Encoder.from_directory(folder, library="jax")
    with pytest.raises(ValueError, match="device must be None or 'cpu' with library='numpy', got 'cuda'"):
        Encoder.from_directory(folder, library="numpy", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device must be 'cpu', for torch finds no GPU here, got 'cuda:1'"):
        Encoder.from_directory(folder, device="cuda:1")
    monkeypatch.setattr(checkpoints, "_gpu_for_cupy", lambda: False)
    with pytest.raises(ValueError, match="library must be 'torch' or 'numpy', for CuPy finds no GPU here, got 'cupy'"):
        Encoder.from_directory(folder, library="cupy")
    monkeypatch.setattr("cukern.runtime.cuda.cupy", None)
    with pytest.raises(ImportError, match="library='cupy' needs the package cupy: pip install"):
        Encoder.from_directory(folder, library="cupy")
    monkeypatch.setattr(checkpoints.importlib.util, "find_spec", lambda name: None)
    assert checkpoints.choose_library(None) == "numpy"


def test_importing_the_models_is_quick() -> None:
    import os
    import subprocess

    code = "import sys, cukern.models; print([m for m in ('torch', 'tokenizers', 'safetensors') if m in sys.modules])"
    settings = os.environ | {"CUKERN_COMPILE": "lazy"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
