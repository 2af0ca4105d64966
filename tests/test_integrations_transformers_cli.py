"""The command `cukern generate`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5Model,
)

import cukern.integrations.transformers as ck
from cukern.__main__ import main
from tests import checkpoints
from tests.test_integrations_transformers import small_model

DISTIL = DistilBertConfig(vocab_size=20, dim=8, hidden_dim=8, n_layers=1, n_heads=2)
T5 = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
WORDS = ["<unk>", *(f"w{i}" for i in range(95))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a tokenizer of whole words, as transformers writes them."""
    folder = tmp_path_factory.mktemp("llama")
    small_model().save_pretrained(folder)
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_prompts_are_continued(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--model", str(directory), "--prompt", "w5 w6 w7", "--prompt", "w9", "--device", "cpu"]
    assert main([*arguments, "--max-new-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    model = small_model()
    with pytest.warns(UserWarning, match="not enabled"):
        wanted = ck.generate(model, [[6, 7, 8], [10]], max_new_tokens=5, eos_token_id=None).tokens
    assert out.splitlines() == [" ".join(WORDS[i] for i in tokens) for tokens in wanted]
    assert "LlamaForCausalLM on cukern" in err and "the model is on the CPU" in err
    assert "2 x 5 tokens: " in err and "(no graph: the model is on the CPU)" in err
    assert main([*arguments, "--max-new-tokens", "5", "--stock"]) == 0
    stock, said = capsys.readouterr()
    assert stock == out and "LlamaForCausalLM as it is" in said


@pytest.mark.filterwarnings("ignore:the model is on the CPU")
def test_a_checkpoint_with_packed_weights(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = checkpoints.fp8(tmp_path / "checkpoint", "llama")
    folder = made.write()
    for file in directory.glob("*token*"):
        shutil.copy(file, folder)
    assert main(["generate", "--model", str(folder), "--prompt", "w5 w6 w7", "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    wanted = ck.generate(ck.load(folder), [[6, 7, 8]], max_new_tokens=64).tokens
    assert out.split() == [WORDS[i] for i in wanted[0] if i]
    assert "FP8Linear: quantized_matmul" in err and "enabled already" not in err
    made.quantization = {"quant_method": "awq", "bits": 4}
    made.write()
    assert main(["generate", "--model", str(folder), "--prompt", "w5", "--device", "cpu"]) == 2
    assert "names weights of AWQ with 4 bits" in capsys.readouterr().err


def test_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--config", "tiny", "--random-weights", "--batch-size", "2", "--max-new-tokens", "3"]
    assert main([*arguments, "--device", "cpu", "--prompt-tokens", "7"]) == 0
    rows = [[int(x) for x in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [len(row) for row in rows] == [3, 3] and all(0 <= x < 512 for row in rows for x in row)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --model DIR and --config NAME --random-weights is needed"),
        (["--config", "tiny"], "--config NAME and --random-weights go together"),
        (["--random-weights"], "--config NAME and --random-weights go together"),
        (["--model", "DIR"], "--prompt is needed with --model"),
        (["--model", "nowhere", "--prompt", "x"], "--model: nowhere is no directory"),
        (
            ["--config", "tiny", "--random-weights", "--prompt", "x"],
            "--prompt needs a tokenizer, which --random-weights",
        ),
        (["--config", "huge", "--random-weights"], "config must be one of qwen3-30b-a3b, "),
        (["--config", "tiny", "--random-weights", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--model", "DIR", "--prompt", ""], "--prompt '' has no tokens"),
        (
            ["--model", "DIR", "--prompt", "w1", "--temperature", "-1"],
            "--temperature must be a finite number of at least 0, got -1.0",
        ),
        (["--model", "DIR", "--prompt", "w1", "--max-new-tokens", "200"], "prompts must be of at most 128 tokens with"),
        (
            ["--model", "DIR", "--prompt", "w1", "--device", "abacus"],
            "--device must be cpu, cuda or cuda:N, got abacus",
        ),
    ],
)
def test_what_cannot_be_used(
    arguments: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(directory) if x == "DIR" else x for x in arguments]
    assert main(["generate", "--device", "cpu", *given]) == 2
    assert f"cukern generate: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("made", [DistilBertModel(DISTIL), T5Model(T5)], ids=["distilbert", "t5"])
def test_a_directory_without_a_decoder(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made.save_pretrained(tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x", "--device", "cpu"]) == 2
    said = f"--model: {tmp_path} has a model of type {made.config.model_type}, which is no decoder"
    assert capsys.readouterr().err.strip().endswith(said)


def test_an_encoder_with_a_head(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers gives an encoder of BERT's kind a head of a decoder."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    encoder = BertModel(BertConfig(vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    for x in encoder.parameters():
        x.data.normal_(0, 0.3)
    encoder.save_pretrained(tmp_path)
    assert main(["generate", "--model", str(tmp_path), "--prompt", "w1", "--device", "cpu"]) == 2
    assert "cukern generate: model must be a decoder, whose tokens see no later ones" in capsys.readouterr().err


def test_a_gpu_that_is_not_there(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["generate", "--model", str(directory), "--prompt", "w1", "--device", "cuda"]) == 2
    assert "cukern generate: --device cuda needs a GPU, and torch " in capsys.readouterr().err


def test_a_shape_is_that_of_its_configuration(directory: Path) -> None:
    from cukern.integrations.transformers._shapes import SHAPES, configuration, random_model

    for name in SHAPES:
        assert configuration(name).num_hidden_layers == SHAPES[name]["num_hidden_layers"]
    config = configuration(str(directory))
    model = random_model(config, dtype=torch.float32, device="cpu")
    assert model.model.rotary_emb.inv_freq[0] == 1.0
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
