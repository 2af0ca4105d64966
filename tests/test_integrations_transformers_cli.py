"""The command `cukern generate`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import cukern.integrations.transformers as ck
from cukern.__main__ import main
from tests.test_integrations_transformers import small_model

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
        (["--model", "nowhere", "--prompt", "x"], "--model: nowhere has no config.json"),
        (
            ["--config", "tiny", "--random-weights", "--prompt", "x"],
            "--prompt needs a tokenizer, which --random-weights",
        ),
        (["--config", "huge", "--random-weights"], "config must be one of qwen3-30b-a3b, "),
        (["--config", "tiny", "--random-weights", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--model", "DIR", "--prompt", ""], "--prompt '' has no tokens"),
        (["--model", "DIR", "--prompt", "w1", "--temperature", "-1"], "temperature must be"),
    ],
)
def test_what_cannot_be_used(
    arguments: list[str], message: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(directory) if x == "DIR" else x for x in arguments]
    assert main(["generate", "--device", "cpu", *given]) == 2
    assert f"cukern generate: {message}" in capsys.readouterr().err


def test_a_shape_is_that_of_its_configuration(directory: Path) -> None:
    from cukern.integrations.transformers._shapes import SHAPES, configuration, random_model

    for name in SHAPES:
        assert configuration(name).num_hidden_layers == SHAPES[name]["num_hidden_layers"]
    config = configuration(str(directory))
    model = random_model(config, dtype=torch.float32, device="cpu")
    assert model.model.rotary_emb.inv_freq[0] == 1.0
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
