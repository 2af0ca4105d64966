"""Part of `cukern demo`: run a tiny encoder with random weights, with and without padding."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cukern
from cukern.models import Encoder, EncoderConfig
from cukern.runtime import arrays, kernel
from cukern.runtime.cuda import cupy, runtime
from cukern.runtime.progress import progress

_HIDDEN, _LAYERS, _HEADS, _INTER = 128, 2, 2, 512
_MOST_WORDS = 128
#: The batch on a GPU has _COPIES copies of each text. With fewer copies, launching takes longer than the kernels. On
#: the CPU, the references run every third text once.
_COPIES = 32
_STEP_ON_HOST = 3
_REPEATS = 5
_SHOWN = 4


def descriptions() -> dict[str, str]:
    """Return the demo's texts: the docstrings of cukern's functions up to "Args:", by name."""
    functions = {name: getattr(cukern, name) for name in cukern.__all__}
    documented = {name: inspect.getdoc(x) for name, x in functions.items() if inspect.isfunction(x)}
    return {name: text.split("\n\nArgs:")[0] for name, text in documented.items() if text}


def tokenized(texts: list[str]) -> tuple[list[list[int]], int]:
    """Return the ids of the first `_MOST_WORDS` words of each text, and the vocabulary size. Id 0 is padding."""
    vocabulary: dict[str, int] = {}
    words = [re.findall(r"\w+|[^\w\s]", text.lower())[:_MOST_WORDS] for text in texts]
    return [[vocabulary.setdefault(word, len(vocabulary) + 1) for word in own] for own in words], len(vocabulary) + 1


def random_state(config: EncoderConfig, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return random weights, keyed by the names in a BERT's state dict."""
    hidden, inter = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }
    products = {f"attention.self.{name}": (hidden, hidden) for name in ("query", "key", "value")}
    products |= {"attention.output.dense": (hidden, hidden), "intermediate.dense": (inter, hidden)}
    products |= {"output.dense": (hidden, inter)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"encoder.layer.{layer}.{name}.weight": shape for name, shape in products.items()}
    state = {name: rng.standard_normal(shape, np.float32) / np.float32(hidden**0.5) for name, shape in shapes.items()}
    state |= {
        name.replace(".weight", ".bias"): np.zeros(x.shape[0], np.float32)
        for name, x in state.items()
        if name.startswith("encoder.")
    }
    norms = [
        f"encoder.layer.{i}.{name}" for i in range(config.num_hidden_layers) for name in ("attention.output", "output")
    ]
    for name in ("embeddings", *norms):
        state[f"{name}.LayerNorm.weight"] = np.ones(hidden, np.float32)
        state[f"{name}.LayerNorm.bias"] = np.zeros(hidden, np.float32)
    return state


class Batch(NamedTuple):
    """A padded batch of texts: the word ids, and which ids are words."""

    ids: NDArray[np.int32]  # [batch, seq]
    mask: NDArray[np.bool_]  # [batch, seq]

    def with_padding(self) -> Batch:
        """Return a batch [2 * batch, seq] that repeats each text with a mask that selects only its padding.

        With this batch, an encoder that removes padding does as much work as an encoder that keeps padding: padding
        takes part in every matrix multiplication, but words do not attend to it.
        """
        both = np.stack([self.mask, ~self.mask], 1)
        return Batch(np.repeat(self.ids, 2, 0), both.reshape(-1, self.mask.shape[1]))


def padded(tokens: list[list[int]]) -> Batch:
    lengths = np.array([len(own) for own in tokens])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate([np.array(own, np.int32) for own in tokens])
    return Batch(ids, mask)


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result, and the median time of further calls in milliseconds, including host time."""
    times = []
    for _ in range(1 + _REPEATS if kernel.device_count() else 1):
        start = time.perf_counter()
        result = call()
        if kernel.device_count():
            runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return result, float(np.median(times[1:] or times)) * 1000


def _on_host(array: Any) -> NDArray[Any]:
    library = arrays.library_of(array)
    assert library is not None
    return library.to_numpy(array)


def _neighbours(names: list[str], vectors: NDArray[Any]) -> str:
    """Describe the most similar pairs of texts. With random weights, similar texts share words."""
    # Subtract the mean, because the vectors' common part would hide their differences.
    own = vectors - vectors.mean(0)
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    cosines = np.triu(own @ own.T, 1)
    best = np.argsort(-cosines, axis=None)[:_SHOWN]
    pairs = [divmod(int(i), len(names)) for i in best]
    return ", ".join(f"{names[a]} and {names[b]} {cosines[a, b]:.2f}" for a, b in pairs)


def show(console: Any) -> None:
    from rich import box
    from rich.table import Table

    on_gpu = kernel.device_count() > 0
    found = descriptions()
    names = [*found][:: 1 if on_gpu else _STEP_ON_HOST]
    tokens, vocabulary = tokenized([found[name] for name in names])
    batch = padded(tokens * (_COPIES if on_gpu else 1))
    sizes = _HIDDEN, _LAYERS, _HEADS, _INTER, _MOST_WORDS
    # NumPy's error function is slow, so use GELU's tanh approximation.
    config = EncoderConfig("bert", vocabulary, *sizes, hidden_act="gelu_new")
    place = cupy.asarray if on_gpu else np.asarray
    state = {name: place(x) for name, x in random_state(config, np.random.default_rng(0)).items()}
    encoder = Encoder.from_state_dict(state, config)

    def encoded(given: Batch) -> tuple[NDArray[Any], float]:
        ids, mask = place(given.ids), place(given.mask)
        states, ms = _timed(lambda: encoder(ids, mask))
        return _on_host(states), ms

    with progress("encoding texts", 3) as advance:
        with_padding, slow = encoded(batch.with_padding())
        advance()
        without, fast = encoded(batch)
        advance()
        vectors = _on_host(encoder.embed_tokens(tokens, progress=False))
        advance()
    difference = np.abs(with_padding[::2] - without)[batch.mask].max()
    rows, words = batch.mask.size, int(batch.mask.sum())
    flops = 2 * _LAYERS * (4 * _HIDDEN**2 + 2 * _HIDDEN * _INTER)

    copies = f", {_COPIES} times" if on_gpu else ""
    console.print(f"[bold]A tiny encoder[/]: BERT's layers, {_LAYERS} of {_HIDDEN}, with random weights")
    console.print(
        f"{len(names)} texts{copies}: what functions of cukern say of themselves, {min(map(len, tokens))} to "
        f"{max(map(len, tokens))} words\n",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("padding", "rows", "of words", "products", "time"):
        table.add_column(name, justify="left" if name == "padding" else "right")
    for name, count, ms in (("kept", rows, slow), ("removed", words, fast)):
        table.add_row(name, str(count), f"{words / count:.0%}", f"{count * flops / 1e9:.2f} GFLOP", f"{ms:.1f} ms")
    console.print(table)
    same = f"the same within {difference:.0e}" if difference else "the same, bit for bit"
    console.print(f"The hidden states of the {words} words are {same}.")
    console.print(f"Nearest texts, by the cosine of their vectors less the mean: {_neighbours(names, vectors)}.")
