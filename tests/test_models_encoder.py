"""The encoder's hidden states against those of transformers, and what has no influence on them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402  (imports torch)
    BertForMaskedLM,
    DistilBertForSequenceClassification,
    RobertaForMaskedLM,
    XLMRobertaForTokenClassification,
)

from cukern.models import Encoder, EncoderConfig  # noqa: E402
from cukern.models._layers import ACTIVATIONS, Words, layers_of  # noqa: E402
from cukern.testing import assert_matches  # noqa: E402
from tests import encoders  # noqa: E402
from tests.encoders import ARCHITECTURES, CASES, batch, numpy_of, one_thread, put, state_of, wanted  # noqa: E402, F401

LENGTHS = [20, 1, 7, 13, 19]
HOST = ("torch", "numpy")
LIBRARIES = [*HOST, pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cupy", marks=pytest.mark.gpu)]


def _encoder(name: str, library: str = "torch", **options: Any) -> Encoder:
    source = encoders.model(name)
    return Encoder.from_state_dict(state_of(source, library), source.config, **options)


# --- the same as transformers -------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_transformers(name: str, library: str) -> None:
    ids, mask = batch(LENGTHS, 20)
    got = _encoder(name, library)(put(ids, library), put(mask, library))
    assert_matches("models.hidden_states", got, wanted(encoders.model(name), ids, mask))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sixteen_bits(name: str, library: str, dtype: str) -> None:
    ids, mask = batch(LENGTHS, 20)
    encoder = _encoder(name, library, dtype=dtype)
    assert encoder.dtype == dtype and dtype in repr(encoder)
    got = encoder(put(ids, library), put(mask, library))
    assert_matches("models.hidden_states", got, wanted(encoders.model(name), ids, mask).to(getattr(torch, dtype)))


@pytest.mark.parametrize("library", HOST)
@pytest.mark.parametrize("name", ["bert", "bert-odd", "roberta-odd"])
def test_token_types(name: str, library: str, rng: np.random.Generator) -> None:
    source = encoders.model(name)
    ids, mask = batch(LENGTHS, 20)
    types = torch.from_numpy(rng.integers(0, source.config.type_vocab_size, ids.shape))
    got = _encoder(name, library)(put(ids, library), put(mask, library), put(types, library))
    assert_matches("models.hidden_states", got, wanted(source, ids, mask, token_type_ids=types))
    without = _encoder(name, library)(put(ids, library), put(mask, library))
    assert np.abs(numpy_of(got) - numpy_of(without)).max() > 0.01


@pytest.mark.parametrize("library", HOST)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_on_any_side(name: str, library: str) -> None:
    ids, _ = batch([12] * 3, 12)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[1, 2:4] = mask[1, 9] = 0
    ids = ids.masked_fill(mask == 0, 1)
    got = _encoder(name, library)(put(ids, library), put(mask, library))
    assert_matches("models.hidden_states", got, wanted(encoders.model(name), ids, mask))


@pytest.mark.parametrize("name", ["roberta", "xlm-roberta"])
def test_a_word_that_is_the_id_of_padding(name: str) -> None:
    # It is at the position of padding, and those after it do not count it.
    ids, mask = batch([12, 9], 12)
    ids[0, 4] = ids[1, 0] = 1
    got = _encoder(name)(ids, mask)
    assert_matches("models.hidden_states", got, wanted(encoders.model(name), ids, mask))
    assert_matches("models.hidden_states", _encoder(name)(ids[:1]), wanted(encoders.model(name), ids[:1], mask[:1]))


@pytest.mark.parametrize("activation", [x for x in ACTIVATIONS if x != "gelu"])
@pytest.mark.parametrize("library", HOST)
def test_activations(library: str, activation: str) -> None:
    source = encoders.model("bert", hidden_act=activation)
    ids, mask = batch([9, 4], 9)
    encoder = Encoder.from_state_dict(state_of(source, library), source.config)
    assert_matches("models.hidden_states", encoder(put(ids, library), put(mask, library)), wanted(source, ids, mask))


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (BertForMaskedLM, "bert"),
        (RobertaForMaskedLM, "roberta"),
        (XLMRobertaForTokenClassification, "xlm-roberta"),
        (DistilBertForSequenceClassification, "distilbert"),
    ],
)
def test_the_encoder_of_a_model_with_a_head(head: Callable[[Any], Any], name: str) -> None:
    source = encoders.randomized(head(encoders.model(name).config))
    state = state_of(source, "torch")
    assert not any(key.startswith("embeddings.") for key in state)
    ids, mask = batch(LENGTHS, 20)
    got = Encoder.from_state_dict(state, source.config)(ids, mask)
    assert_matches("models.hidden_states", got, wanted(source.base_model, ids, mask))


def test_the_names_of_old_checkpoints() -> None:
    source = encoders.model("bert")
    ids, mask = batch(LENGTHS, 20)
    state = {
        "bert." + re.sub(r"(LayerNorm)\.weight$", r"\1.gamma", re.sub(r"(LayerNorm)\.bias$", r"\1.beta", name)): weight
        for name, weight in state_of(source, "torch").items()
    }
    state |= {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.predictions.bias": torch.zeros(9)}
    assert any(name.endswith("gamma") for name in state)
    got = Encoder.from_state_dict(state, source.config)(ids, mask)
    assert_matches("models.hidden_states", got, wanted(source, ids, mask))


# --- what has no influence ----------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_padded_has_no_influence(name: str, library: str) -> None:
    source = encoders.model(name)
    ids, mask = batch(LENGTHS, 20)
    want = _encoder(name, library)(put(ids, library), put(mask, library))

    # Ids and types that no table has, and NaN for those that the words do not use.
    state = state_of(source, "torch")
    unused = [i for i in range(encoders.VOCAB) if i not in ids[mask == 1]]
    state["embeddings.word_embeddings.weight"][unused] = torch.nan
    encoder = Encoder.from_state_dict({key: put(x, library) for key, x in state.items()}, source.config)
    garbage = torch.where(mask == 1, ids, torch.tensor([-5, 10**6]).repeat(5, 10))
    others = {}
    if encoder.config.type_vocab_size:
        others["token_type_ids"] = put(torch.where(mask == 1, 0, 77), library)
    got = encoder(put(garbage, library), put(mask, library), **others)
    np.testing.assert_array_equal(numpy_of(got), numpy_of(want))
    assert not numpy_of(got)[mask.numpy() == 0].any()

    # Padding before the words, which positions must not count.
    want = encoder(put(ids.flip(1), library), put(mask.flip(1), library))
    np.testing.assert_array_equal(
        numpy_of(encoder(put(garbage.flip(1), library), put(mask.flip(1), library))), numpy_of(want)
    )


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_types_of_ids_and_masks(library: str) -> None:
    ids, mask = batch(LENGTHS, 20)
    encoder = _encoder("roberta", library)
    want = numpy_of(encoder(put(ids, library), put(mask, library)))
    for kind in (torch.bool, torch.uint8, torch.int32):
        got = encoder(put(ids.int(), library), put(mask.to(kind), library), put(torch.zeros_like(ids).int(), library))
        np.testing.assert_array_equal(numpy_of(got), want)
    # Any number but 0 marks a word.
    np.testing.assert_array_equal(numpy_of(encoder(put(ids, library), put(mask * -3, library))), want)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_batches_without_a_mask_and_with_a_known_number_of_words(name: str, library: str) -> None:
    encoder = _encoder(name, library)
    ids, mask = batch([11] * 3, 11)
    full = numpy_of(encoder(put(ids, library)))
    np.testing.assert_array_equal(numpy_of(encoder(put(ids, library), put(mask, library))), full)
    np.testing.assert_array_equal(numpy_of(encoder(put(ids, library), valid_word_num=33)), full)
    ids, mask = batch(LENGTHS, 20)
    want = numpy_of(encoder(put(ids, library), put(mask, library)))
    got = encoder(put(ids, library), put(mask, library), valid_word_num=sum(LENGTHS))
    np.testing.assert_array_equal(numpy_of(got), want)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_empty_batches_and_sequences(name: str, library: str) -> None:
    encoder = _encoder(name, library)
    for shape in ((0, 7), (3, 0), (0, 0)):
        empty = put(torch.zeros(shape, dtype=torch.int64), library)
        for mask in (None, empty):
            got = encoder(empty, mask)
            assert tuple(got.shape) == (*shape, 64)
    ids, mask = batch([5, 0, 3], 6)
    got = numpy_of(encoder(put(ids, library), put(mask, library)))
    assert_matches("models.hidden_states", got[[0, 2]], wanted(encoders.model(name), ids, mask)[[0, 2]].numpy())
    assert not got[1].any()
    for words in (None, 0):
        assert not numpy_of(encoder(put(ids, library), put(mask * 0, library), valid_word_num=words)).any()


# --- the same bits in any batch -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_and_pooling_give_the_same_bits_in_any_batch(
    library: str, dtype: str, rng: np.random.Generator
) -> None:
    words = rng.standard_normal((60, 192)).astype(np.float32)

    def of(array: np.ndarray[Any, Any]) -> Any:
        made = put(torch.from_numpy(array), library)
        return layers_of("made", made).cast(made, dtype)

    layers = layers_of("words", of(words))
    bounds = [0, 9, 9, 10, 41, 60]
    rows = of(words)
    whole_words = Words(put(torch.tensor(bounds, dtype=torch.int32), library), bounds)
    whole: dict[str, Any] = {
        "attention": layers.attention(rows, 4, whole_words),
        **{mode: layers.pool(rows, whole_words, mode) for mode in ("cls", "mean", "max")},
    }
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        own = rows[first:last]
        alone = Words(put(torch.tensor([0, last - first], dtype=torch.int32), library), [0, last - first])
        attended = numpy_of(layers.attention(own, 4, alone))
        np.testing.assert_array_equal(attended, numpy_of(whole["attention"])[first:last])
        for mode in ("cls", "mean", "max"):
            vector = numpy_of(layers.pool(own, alone, mode))[0]
            np.testing.assert_array_equal(vector, numpy_of(whole[mode])[number], err_msg=mode)
            assert vector.any() == (first < last)


# NumPy's product gives a row other bits at another place, unless it is alone.
@pytest.mark.parametrize(
    ("library", "rows"),
    [
        ("numpy", 1),
        *(("torch", rows) for rows in (1, 16, 24)),
        *(pytest.param(x, 64, marks=pytest.mark.gpu) for x in ("cuda", "cupy")),
    ],
)
def test_products_of_equally_many_rows_give_the_same_bits_in_any_batch(library: str, rows: int) -> None:
    encoder = _encoder("bert", library, product_rows=rows)
    ids, mask = batch(LENGTHS, 20)
    together = encoder(put(ids, library), put(mask, library))
    assert_matches("models.hidden_states", together, wanted(encoders.model("bert"), ids, mask))
    for row, length in enumerate(LENGTHS):
        alone = encoder(put(ids[row : row + 1, :length].clone(), library))
        np.testing.assert_array_equal(numpy_of(alone)[0], numpy_of(together)[row, :length])


# --- the weights decide where it runs -------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_ids_and_masks_of_any_library(name: str, library: str) -> None:
    encoder, (ids, mask) = _encoder(name, library), batch(LENGTHS, 20)
    want = numpy_of(encoder(put(ids, library), put(mask, library)))
    read_only = ids.numpy().copy()
    read_only.flags.writeable = False
    types = np.zeros(ids.shape, np.int32) if encoder.config.type_vocab_size else None
    for given in (
        (ids, mask.bool()),
        (read_only, mask.numpy() != 0, types),
        (ids.tolist(), mask.tolist()),
        (ids, mask.numpy()),
    ):
        got = encoder(*given)
        assert type(got) is type(encoder.weights.word) and got.device == encoder.weights.word.device
        np.testing.assert_array_equal(numpy_of(got), want)


@pytest.mark.gpu
@pytest.mark.parametrize(("library", "of"), [("cuda", "cupy"), ("cupy", "cuda"), ("torch", "cuda"), ("numpy", "cupy")])
def test_ids_on_a_gpu_of_another_library(library: str, of: str) -> None:
    encoder, (ids, mask) = _encoder("bert", library), batch(LENGTHS, 20)
    got = encoder(put(ids, of), put(mask, of))
    assert type(got) is type(encoder.weights.word)
    np.testing.assert_array_equal(numpy_of(got), numpy_of(encoder(put(ids, library), put(mask, library))))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cuda", "cupy"])
def test_an_id_in_host_memory_is_checked_where_the_weights_are_on_a_gpu(library: str) -> None:
    with pytest.raises(ValueError, match=r"input_ids\[0, 1\] must be in \[0, 44\), got 44"):
        _encoder("bert", library)(np.array([[1, 44]]))


# --- refusals -----------------------------------------------------------------------------------------


def _ids(*shape: int) -> Any:
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([None], "input_ids must be an array (NumPy, CuPy, torch, or any with __dlpack__), got NoneType"),
        ([[[1, 2], [3]]], "input_ids must be lists of one length, padded, got lists of several lengths"),
        ([[[1.0, 2.0]]], "input_ids must be int32 or int64, got float64"),
        ([np.ones((2, 3), np.int64) * 44], "input_ids[0, 0] must be in [0, 44), got 44"),
        ([_ids(2, 3).float()], "input_ids must be int32 or int64, got float32"),
        ([_ids(3)], "input_ids must be of shape [batch, seq], got [3]"),
        ([_ids(2, 41)], "input_ids must be of at most 40 columns, the positions of the model, got 41"),
        ([_ids(2, 3) * 44], "input_ids[0, 0] must be in [0, 44), got 44"),
        ([_ids(2, 3) - 2], "input_ids[0, 0] must be in [0, 44), got -1"),
        ([_ids(2, 3), _ids(2, 4)], "attention_mask must be of shape [batch, seq] = [2, 3], got [2, 4]"),
        ([_ids(2, 3), _ids(2, 3).float()], "attention_mask must be bool or uint8 or int8 or int32 or int64, got float"),
        ([_ids(2, 3), None, _ids(2, 3) * 2], "token_type_ids[0, 0] must be in [0, 2), got 2"),
        ([_ids(2, 3), None, _ids(2)], "token_type_ids must be of shape [batch, seq] = [2, 3], got [2]"),
    ],
)
def test_bad_inputs(arguments: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        _encoder("bert")(*arguments)


def test_the_first_bad_id_of_a_word_is_named() -> None:
    ids, mask = _ids(2, 3), _ids(2, 3)
    ids[0, 2], mask[0, 2], ids[1, 1] = 99, 0, 77
    with pytest.raises(ValueError, match=r"input_ids\[1, 1\] must be in \[0, 44\), got 77"):
        _encoder("bert")(ids, mask)


def test_positions_after_padding_are_fewer() -> None:
    assert _encoder("roberta").config.max_seq_len == 40
    assert _encoder("roberta")(_ids(1, 40)).shape == (1, 40, 64)
    with pytest.raises(ValueError, match="input_ids must be of at most 40 columns, the positions of the model, got 41"):
        _encoder("roberta")(_ids(1, 41))


def test_a_number_of_words_that_is_not_theirs() -> None:
    encoder = _encoder("bert")
    ids, mask = batch([3, 2], 4)
    with pytest.raises(ValueError, match="valid_word_num must be 5, the sum of sequence_length, got 6"):
        encoder(ids, mask, valid_word_num=6)
    with pytest.raises(ValueError, match="valid_word_num must be 8 without an attention_mask, got 5"):
        encoder(ids, valid_word_num=5)
    with pytest.raises(ValueError, match="attention_mask must be 0 from the end of each sequence on, with valid_word_"):
        encoder(ids, mask.flip(1), valid_word_num=5)


def test_distilbert_has_no_token_types() -> None:
    with pytest.raises(ValueError, match="token_type_ids must be None for distilbert, got Tensor"):
        _encoder("distilbert")(_ids(1, 2), None, _ids(1, 2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mpnet"}, "config.model_type must be one of 'bert', 'roberta', 'xlm-roberta', 'distilbert', "),
        ({"model_type": None}, "config.model_type must be one of 'bert', "),
        ({"position_embedding_type": "relative_key"}, "config.position_embedding_type must be 'absolute' (relative "),
        ({"add_cross_attention": True}, "config.add_cross_attention must be False (cross attention is not supported)"),
        ({"is_decoder": True}, "config.is_decoder must be False (a causal mask is not supported), got True"),
        ({"is_encoder_decoder": True}, "config.is_encoder_decoder must be False (a decoder is not supported)"),
        ({"quantization_config": {"bits": 4}}, "config.quantization_config must be absent (it is not supported)"),
        ({"hidden_act": "mish"}, "config.hidden_act must be one of 'gelu', 'gelu_python', 'gelu_new', "),
        ({"num_attention_heads": 5}, "config.hidden_size must be a multiple of num_attention_heads 5, got 64"),
        ({"hidden_size": 1032}, "config.hidden_size must be at most 256 for each of the 4 heads, got 1032"),
        ({"hidden_size": None}, "config.hidden_size must be given, got nothing"),
        ({"hidden_size": 64.0}, "config.hidden_size must be an integer of at least 1, got 64.0 (float)"),
        ({"layer_norm_eps": "small"}, "config.layer_norm_eps must be a number, got 'small' (str)"),
    ],
)
def test_configurations_that_are_not_taken(changed: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        EncoderConfig.from_dict({**encoders.model("bert").config.to_dict(), **changed})


def test_what_a_configuration_may_leave_out() -> None:
    sizes = {name: x for name, x in encoders._sizes(64, 4, 3, 128, 40).items() if name != "pad_token_id"}
    assert EncoderConfig.from_dict({**sizes, "model_type": "bert"}).pad_token_id == 0
    config = EncoderConfig.from_dict({**sizes, "model_type": "roberta", "architectures": ["RobertaModel"]})
    assert (config.pad_token_id, config.layer_norm_eps, config.max_seq_len) == (1, 1e-12, 38)
    with pytest.raises(ValueError, match=r"config.dim must be given, got nothing"):
        EncoderConfig.from_dict({**sizes, "model_type": "distilbert"})


def _without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {name: x for name, x in state.items() if name not in names}


_KEY, _OUT = "encoder.layer.1.attention.self.key", "encoder.layer.0.output.dense.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(f"{_KEY}.weight"), f"state has no {_KEY}.weight"),
        (_without(f"{_KEY}.weight", f"{_KEY}.bias", _OUT, "embeddings.LayerNorm.bias"), "and 1 more"),
        (
            _without("embeddings.word_embeddings.weight"),
            "state must be the weights of one bert, got no embeddings.word_embeddings.weight",
        ),
        (
            lambda state: state | {"a.embeddings.word_embeddings.weight": torch.ones(1)},
            "state must be the weights of one bert, got several of a.embeddings.word_embeddings.weight, embeddings.",
        ),
        (
            lambda state: state | {"encoder.layer.3.output.dense.bias": torch.ones(64)},
            "state has encoder.layer.3.output.dense.bias, which no encoder has",
        ),
        (
            lambda state: state | {_OUT: torch.ones(63)},
            f"{_OUT} must be of shape as config says = [64], got [63]",
        ),
        (lambda state: state | {_OUT: torch.ones(64, dtype=torch.int8)}, f"{_OUT} must be float32 or float16 or bfl"),
        (lambda state: state | {_OUT: np.ones(64)}, f"{_OUT} must be a torch array like the others, got NumPy"),
        (lambda state: state | {_OUT: [1.0]}, f"{_OUT} must be an array of NumPy, CuPy or torch, got list"),
        (lambda state: {key: x.double() for key, x in state.items()}, "must be float32 or float16 or bfloat16, got fl"),
    ],
)
def test_states_that_are_not_taken(change: Callable[[Any], dict[str, Any]], message: str) -> None:
    source = encoders.model("bert")
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Encoder.from_state_dict(change(state_of(source, "torch")), source.config)


def test_options_that_are_not_taken() -> None:
    source = encoders.model("bert")
    state = state_of(source, "torch")
    with pytest.raises(TypeError, match="dtype must be float32 or float16 or bfloat16, got int8"):
        Encoder.from_state_dict(state, source.config, dtype="int8")
    with pytest.raises(TypeError, match="config must be a dictionary, or a configuration of transformers, got str"):
        Encoder.from_state_dict(state, "bert")
    with pytest.raises(ValueError, match="product_rows must be an integer of at least 1, got 0"):
        Encoder.from_state_dict(state, source.config, product_rows=0)


def test_weights_of_64_bits_are_converted_and_others_are_shared() -> None:
    source = encoders.model("bert")
    state = state_of(source, "torch")
    shared = Encoder.from_state_dict(state, source.config)
    assert shared.weights.word.data_ptr() == state["embeddings.word_embeddings.weight"].data_ptr()
    wide = Encoder.from_state_dict({name: x.double() for name, x in state.items()}, source.config, dtype="float32")
    ids, mask = batch([3, 2], 4)
    assert torch.equal(wide(ids, mask), shared(ids, mask))


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_captured_graph(name: str, padded: bool, dtype: str) -> None:
    encoder = _encoder(name, "cuda", dtype=dtype)
    ids, mask = (x.cuda() for x in batch(LENGTHS if padded else [20] * 5, 20))
    options = {"attention_mask": mask, "valid_word_num": sum(LENGTHS)} if padded else {}
    want = encoder(ids, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = encoder(ids, **options)
    got.fill_(torch.nan)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cuda", "cupy"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("words", [0, 57, 63])
def test_a_number_of_words_on_a_gpu_that_is_not_theirs(library: str, dtype: str, words: int) -> None:
    # It cannot be checked there: the first words are right but for attention to those that are missing.
    encoder = _encoder("bert", library, dtype=dtype)
    ids, mask = (put(x, library) for x in batch(LENGTHS, 20))
    want = numpy_of(encoder(ids, mask))
    got = numpy_of(encoder(ids, mask, valid_word_num=words))
    whole = [row for row in range(5) if sum(LENGTHS[: row + 1]) <= words]
    np.testing.assert_array_equal(np.isfinite(got).all(), True)
    np.testing.assert_allclose(got[whole].astype(np.float32), want[whole].astype(np.float32), atol=2e-2)
