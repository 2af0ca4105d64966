"""The models on a GPU: layers as large as those of known models, and small ones for the sanitizer."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cukern.models import Decoding, Encoder, TextConfig, encoder_layer  # noqa: E402  (after torch is known to be there)
from cukern.models._layers import ArrayLayers  # noqa: E402
from cukern.ops.moe_gemm import moe_gemm  # noqa: E402
from tests import decoders, encoders  # noqa: E402
from tests.encoders import LARGER, numpy_of, put, state_of, wanted  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
#: A sequence of all lengths: none, one word, the most, and others.
LENGTHS = [512, 0, 1, 300, 17, 128, 511, 64, 33, 5, 90, 200]
SEQ = 512
#: Beside transformers in float32: the largest difference, or in bfloat16, whose values above 2 are 0.016 apart, that of
#: a word's vector by its length. transformers' own bfloat16 is 0.04 and 0.009 from its float32.
LARGEST, OF_LENGTH = {"float32": 2e-4, "float16": 2e-2}, {"float32": 2e-4, "float16": 5e-3, "bfloat16": 2e-2}
DTYPES = ["float32", "float16", "bfloat16"]


@functools.cache
def _source(name: str) -> Any:
    """transformers' model on the GPU, where its products are in float32, too."""
    assert not torch.backends.cuda.matmul.allow_tf32
    return copy.deepcopy(encoders.model(name)).to(DEVICE)


@functools.cache
def _state(name: str, library: str) -> dict[str, Any]:
    return state_of(encoders.model(name), library)


def _encoder(name: str, library: str = DEVICE, **options: Any) -> Encoder:
    return Encoder.from_state_dict(_state(name, library), encoders.model(name).config, **options)


def _assert_near(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any], dtype: str) -> None:
    """Vectors [n, hidden] of words, beside those of transformers in float32."""
    difference = got.astype(np.float32) - want
    if dtype in LARGEST:
        assert np.abs(difference).max() <= LARGEST[dtype]
    assert (np.linalg.norm(difference, axis=-1) / np.linalg.norm(want, axis=-1)).max() <= OF_LENGTH[dtype]


# --- encoders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "library"), [*((name, DEVICE) for name in LARGER), ("bert-base", "cupy")])
def test_hidden_states_of_layers_as_large_as_known_ones(name: str, library: str, dtype: str) -> None:
    ids, mask = encoders.batch(LENGTHS, SEQ)
    want = wanted(_source(name), ids.to(DEVICE), mask.to(DEVICE)).cpu().numpy()
    got = numpy_of(_encoder(name, library, dtype=dtype)(put(ids, library), put(mask, library)))
    is_word = mask.numpy() != 0
    assert not got[~is_word].any()
    assert np.abs(want[is_word]).max() > 2
    _assert_near(got[is_word], want[is_word], dtype)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("library", [DEVICE, "cupy"])
def test_many_rows_are_multiplied_biased_and_activated_at_once(
    library: str, activation: str, dtype: str, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _encoder("bert-base", library, dtype=dtype)._stack[0]
    monkeypatch.setattr(layer, "activation", activation)
    x = torch.randn(300, 768, generator=torch.Generator().manual_seed(1))
    rows = layer.layers.cast(put(x, library), dtype)
    made = []
    monkeypatch.setattr(encoder_layer, "moe_gemm", lambda *a, **k: made.append(k) or moe_gemm(*a, **k))
    apart = numpy_of(layer._up(rows)).astype(np.float32)
    assert not made
    monkeypatch.setattr(encoder_layer, "_FUSED_MIN_ROWS", 300)
    at_once = numpy_of(layer._up(rows)).astype(np.float32)
    assert [k["activation"] for k in made] == [f"{activation}_no_mul"]
    np.testing.assert_allclose(at_once, apart, rtol=error, atol=error)
    assert np.abs(apart).max() > 0.5
    # A product whose rows are to have the same bits in any batch is always apart.
    assert _encoder("bert-base", library, dtype=dtype, product_rows=64)._stack[0]._all_rows is None
    assert _encoder("bert-base", library, dtype="float32")._stack[0]._all_rows is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", [DEVICE, "cupy"])
def test_nan_where_there_is_no_word_changes_no_bit(library: str, dtype: str) -> None:
    ids, mask = encoders.batch(LENGTHS, SEQ)
    want = numpy_of(_encoder("bert-base", library, dtype=dtype)(put(ids, library), put(mask, library)))
    state = state_of(encoders.model("bert-base"), "torch")
    # No word has this id, which the words of `batch` leave out.
    assert not (ids[mask == 1] == 0).any()
    state["embeddings.word_embeddings.weight"][0] = torch.nan
    poisoned = {name: put(x, library) for name, x in state.items()}
    encoder = Encoder.from_state_dict(poisoned, encoders.model("bert-base").config, dtype=dtype)
    for garbage in (0, 10**9, -7):
        got = encoder(put(ids.masked_fill(mask == 0, garbage), library), put(mask, library))
        np.testing.assert_array_equal(numpy_of(got), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_serves_every_batch_of_as_many_words(dtype: str) -> None:
    encoder = _encoder("bert-base", dtype=dtype)
    batches = [[x.to(DEVICE) for x in encoders.batch(lengths, SEQ)] for lengths in (LENGTHS, LENGTHS[::-1])]
    want = [encoder(*both, valid_word_num=sum(LENGTHS)).clone() for both in batches]
    ids, mask = (x.clone() for x in batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = encoder(ids, mask, valid_word_num=sum(LENGTHS))
    for both, expected in zip([*batches, batches[0]], [*want, want[0]], strict=True):
        ids.copy_(both[0])
        mask.copy_(both[1])
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)
    assert not torch.equal(want[0], want[1])


def test_a_first_call_without_a_mask_may_be_captured() -> None:
    # The kernels of this size are loaded by another encoder, whose positions are its own.
    ids = encoders.batch([SEQ, SEQ], SEQ)[0].to(DEVICE)
    want = _encoder("minilm-l6", dtype="float16")(ids).clone()
    encoder, graph = _encoder("minilm-l6", dtype="float16"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = encoder(ids)
    graph.replay()
    assert torch.equal(got, want)
    # What was made in the memory of the graph is not kept.
    del graph
    assert torch.equal(encoder(ids), want)
    assert torch.equal(encoder(ids), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", [DEVICE, "cupy"])
def test_a_vector_has_the_same_bits_alone_and_in_any_batch(library: str, dtype: str) -> None:
    encoder = _encoder("bert-base", library, dtype=dtype, product_rows=256, text=TextConfig(("cls", "max", "mean")))
    ids, _ = encoders.batch(LENGTHS, SEQ)
    tokens = [ids[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    alone = np.concatenate([numpy_of(encoder.embed_tokens([own])) for own in tokens])
    for batch_size in (2, 5, len(tokens)):
        np.testing.assert_array_equal(numpy_of(encoder.embed_tokens(tokens, batch_size=batch_size)), alone)
    np.testing.assert_array_equal(numpy_of(encoder.embed_tokens(tokens[::-1])), alone[::-1])


def test_arrays_of_another_place() -> None:
    ids, mask = encoders.batch([3, 2], 4)
    encoder = _encoder("minilm-l6")
    want = encoder(ids.to(DEVICE), mask.to(DEVICE))
    for given in ((ids, mask.to(DEVICE)), (ids.to(DEVICE), mask), (put(ids, "cupy"), mask.numpy())):
        found = encoder(*given)
        assert found.device == want.device
        torch.testing.assert_close(found, want, rtol=0, atol=0)
    state = {**_state("minilm-l6", DEVICE), "embeddings.LayerNorm.bias": torch.zeros(384)}
    with pytest.raises(ValueError, match=r"LayerNorm.bias must be on CUDA device 0 like the others, got the CPU"):
        Encoder.from_state_dict(state, encoders.model("minilm-l6").config)


def test_ten_thousand_texts(rng: np.random.Generator) -> None:
    encoder = _encoder("minilm-l6", dtype="float16")
    lengths = np.clip(rng.lognormal(3.3, 0.8, 10_000).astype(int), 0, SEQ)
    lengths[:3] = 0, 1, SEQ
    tokens = [rng.integers(4, encoders.VOCAB, length).tolist() for length in lengths]
    vectors = numpy_of(encoder.embed_tokens(tokens, batch_size=128))
    assert vectors.shape == (10_000, 384)
    assert not vectors[lengths == 0].any()
    np.testing.assert_allclose(np.linalg.norm(vectors[lengths > 0], axis=1), 1, atol=1e-4)
    for i in [1, 2, *rng.choice(np.flatnonzero(lengths), 20)]:
        own = torch.tensor([tokens[i]], device=DEVICE)
        mean = wanted(_source("minilm-l6"), own, torch.ones_like(own))[0].mean(0)
        assert float((mean / mean.norm()).cpu().numpy() @ vectors[i]) > 0.9999


# --- encoder-decoders -----------------------------------------------------------------------------------

MODELS = [("marian", "opus-mt"), ("bart", "bart-base"), ("mbart", "bart-base")]
SOURCES = (23, 40, 1, 12, 31, 7)


@functools.cache
def _generator(family: str, size: str) -> Any:
    return copy.deepcopy(decoders.model_of(family, 2, size)).to(DEVICE)


def _decoding(family: str, size: str, library: str = DEVICE, dtype: str | None = None) -> Decoding:
    return decoders.decoding_of(decoders.model_of(family, 2, size), library, dtype)


@pytest.mark.parametrize("library", [DEVICE, "cupy"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(("family", "size"), MODELS)
def test_the_tokens_of_layers_as_large_as_known_ones(family: str, size: str, beams: int, library: str) -> None:
    ids, mask = (x.to(DEVICE) for x in decoders.sources(lengths=SOURCES))
    settings = {"num_beams": beams, "max_length": 32}
    want = decoders.generated(_generator(family, size), ids, mask, **settings)
    decoding = _decoding(family, size, library)
    # As they are, captured, replayed.
    for _ in range(3 if library == DEVICE else 1):
        decoders.assert_same(decoding(ids, mask, **settings), want)


@pytest.mark.parametrize(("dtype", "margin"), [("float16", 0.1), ("bfloat16", 0.6)])
@pytest.mark.parametrize(("family", "size"), MODELS)
def test_in_16_bits_a_token_is_the_best_within_the_rounding(family: str, size: str, dtype: str, margin: float) -> None:
    model = _generator(family, size)
    ids, mask = (x.to(DEVICE) for x in decoders.sources(lengths=SOURCES))
    found = _decoding(family, size, DEVICE, dtype)(ids, mask, num_beams=1, max_length=24, bad_words_ids=[[89]])
    assert found.sequences.device == ids.device
    sequences, clean = found.sequences.long(), torch.where(mask == 1, ids, model.config.pad_token_id)
    with torch.no_grad():
        logits = model(input_ids=clean, attention_mask=mask, decoder_input_ids=sequences[:, :-1]).logits
    logits[:, :, 89] = -torch.inf
    chosen = logits.gather(-1, sequences[:, 1:, None])[..., 0]
    # The last token of all may be forced.
    counts = torch.arange(1, sequences.shape[1], device=DEVICE) < found.lengths[:, None].clamp(max=23)
    assert counts.sum() > 20
    assert (logits.max(-1).values - chosen)[counts].max() < margin


# --- for the sanitizer ----------------------------------------------------------------------------------

# CuPy arrays alone: what torch does besides would take the sanitizer minutes. No product of cuBLAS either: it stores by
# TMA, of which initcheck sees nothing, so that its results look as if nobody had written them.


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that are sums of CuPy's own kernels."""

    def linear(self: ArrayLayers, x: Any, weight: Any, bias: Any = None) -> Any:
        y = (self.float32(x)[:, None] * self.float32(weight)).sum(-1)
        return (y if bias is None else y + self.float32(bias)).astype(x.dtype)

    monkeypatch.setattr(ArrayLayers, "linear", linear)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("plain_products")
def test_a_small_encoder(dtype: str) -> None:
    source = encoders.model("roberta")
    ids, mask = encoders.batch([9, 0, 4, 1], 10)
    encoder = Encoder.from_state_dict(state_of(source, "cupy"), source.config, dtype=dtype)
    got = numpy_of(encoder(put(ids, "cupy"), put(mask, "cupy")))
    is_word = mask.numpy() != 0
    assert not got[~is_word].any()
    difference = (got.astype(np.float32) - wanted(source, ids, mask).numpy())[is_word]
    assert np.abs(difference).max() < (1e-4 if dtype == "float32" else 0.1)
    tokens = [[5, 6, 7], [], [8]]
    vectors = numpy_of(encoder.embed_tokens(tokens))
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0, 1], atol=1e-5)


@pytest.mark.sanitize
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.usefixtures("plain_products")
def test_a_small_decoding(beams: int) -> None:
    ids, mask = decoders.sources(lengths=(5, 0, 3))
    model, settings = decoders.model_of("bart"), {"max_length": 5, "num_beams": beams, "no_repeat_ngram_size": 2}
    host = decoders.decoding_of(model)(ids, mask, **settings)
    found = decoders.decoding_of(model, "cupy")(put(ids, "cupy"), put(mask, "cupy"), **settings)
    np.testing.assert_array_equal(numpy_of(found.sequences), numpy_of(host.sequences))
