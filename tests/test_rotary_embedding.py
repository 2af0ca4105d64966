"""Rotary position embedding: the twin against the formulas of transformers, the kernel against the twin."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as apply_glm
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as apply_gpt_oss
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_llama

import cukern
from cukern.ops import rotary_embedding as op
from cukern.reference import rotary_embedding as twin
from cukern.testing import assert_matches
from tests.buffers import Buffer, normal, to_numpy

Array = NDArray[Any]
HEADS = "rotary_embedding.heads"
LAYOUTS = tuple(op.LAYOUTS)


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


# --- the twin -------------------------------------------------------------------------------------------


def _angles(batch: int, tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of both halves, as the models make them."""
    generator = torch.Generator().manual_seed(7)
    angles = torch.rand(batch, tokens, dim // 2, generator=generator) * 6
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def _heads(batch: int, heads: int, tokens: int, dim: int) -> torch.Tensor:
    """Heads as a model has them: a view of the rows of a product."""
    generator = torch.Generator().manual_seed(heads)
    return torch.randn(batch, tokens, heads, dim, generator=generator).transpose(1, 2)


@pytest.mark.parametrize("batch_of_angles", [1, 3])
@pytest.mark.parametrize(
    ("layout", "theirs", "head_dim", "dim", "halved"),
    [
        ("half", apply_llama, 16, 16, False),
        ("half", apply_gpt_oss, 16, 16, True),
        ("interleaved", apply_glm, 24, 16, False),
        ("deinterleaved", apply_rotary_pos_emb_interleave, 16, 16, False),
    ],
)
def test_models_of_transformers(
    layout: str, theirs: Any, head_dim: int, dim: int, halved: bool, batch_of_angles: int
) -> None:
    query, key = _heads(3, 4, 5, head_dim), _heads(3, 2, 5, head_dim)
    cos, sin = _angles(batch_of_angles, 5, dim)
    if halved:
        cos, sin = cos[..., : dim // 2].contiguous(), sin[..., : dim // 2].contiguous()
    wanted = theirs(query, key, cos, sin)
    got = cukern.rotary_embedding(query, key, cos, sin, layout=layout, rotary_dim=dim)
    assert got[0] is query and got[1] is key
    for ours, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-6)


def test_which_half_of_the_angles_is_read() -> None:
    rng = np.random.default_rng(1)
    query, cos, sin = (normal(rng, shape, "float32") for shape in ((5, 3, 8), (5, 8), (5, 8)))
    for layout in LAYOUTS:
        same = []
        for columns in (slice(8), slice(4)):
            x = query.copy()
            cukern.rotary_embedding(
                x, x[:, :0], cos[:, columns].copy(), sin[:, columns].copy(), layout=layout, rotary_dim=8
            )
            same.append(x)
        assert np.array_equal(*same) == (layout == "interleaved")


def test_a_part_of_each_head() -> None:
    query, key = normal(np.random.default_rng(0), (5, 3, 24), "float32"), zeros(5, 1, 8)
    before = query.copy()
    cos, sin = (x[0].numpy() for x in _angles(1, 5, 8))
    cukern.rotary_embedding(query, key, cos, sin)
    np.testing.assert_array_equal(query[..., 8:], before[..., 8:])
    turned = (before[..., :4] + 1j * before[..., 4:8]) * (cos[:, None, :4] + 1j * sin[:, None, :4])
    np.testing.assert_allclose(query[..., :8], np.concatenate([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-6)


# --- bad arguments --------------------------------------------------------------------------------------


def _bad_calls() -> Iterator[Any]:
    f16 = np.float16
    for changes, error, message in (
        ({"query": [1]}, TypeError, "query must be an array (NumPy, CuPy, torch, or any with"),
        ({"query": zeros(5, 2, 16, dtype=int)}, TypeError, "query must be float32 or float16 or bfloat16, got"),
        ({"query": zeros(5, 16)}, ValueError, "query must be of shape [tokens, heads, head_dim] or [batch, heads, tok"),
        ({"query": zeros(5, 2, 32)[..., ::2]}, ValueError, "query must be contiguous along its last dimension"),
        ({"query": np.broadcast_to(zeros(16), (5, 2, 16))}, ValueError, "query must be of heads that do not overlap"),
        ({"query": zeros(5, 2, 6)}, ValueError, "query must be of a head_dim of at least 8 (rotary_dim), got 6"),
        ({"key": torch.zeros(5, 1, 16)}, TypeError, "key must be a NumPy array like query"),
        ({"key": zeros(5, 1, 16, dtype=f16)}, TypeError, "key must be float32, got float16"),
        ({"key": zeros(4, 1, 16)}, ValueError, "key must be like query but for heads and head_dim, [5, 2, 16]"),
        ({"cos": zeros(4, 8)}, ValueError, "cos must be of shape [tokens, rotary_dim] with those of query, [5], got"),
        ({"cos": zeros(5, 8, dtype=f16)}, TypeError, "cos must be float32, got float16"),
        ({"sin": zeros(5, 6)}, ValueError, "sin must be of 8 columns like cos, got 6"),
        ({"sin": zeros(5, 16)[:, ::2]}, ValueError, "sin must be contiguous along its last dimension"),
        ({"cos": zeros(5, 7), "sin": zeros(5, 7)}, ValueError, "cos must be of an even rotary_dim in [2, 512], got 7"),
        ({"rotary_dim": 12}, ValueError, "cos must be of 12 (rotary_dim) or 6 columns, got 8"),
        ({"rotary_dim": 1024}, ValueError, "rotary_dim must be an integer in [2, 512], got 1024"),
        ({"layout": "neox"}, ValueError, "layout must be one of 'half', 'interleaved', 'deinterleaved', got 'neox'"),
        ({"unsqueeze_dim": 2}, ValueError, "unsqueeze_dim must be an integer in [1, 1], got 2"),
        ({"variant": "wide"}, ValueError, "variant must be 'auto' for arrays in host memory"),
    ):
        yield pytest.param(changes, error, message, id=message[:50])


@pytest.mark.parametrize(("changes", "error", "message"), list(_bad_calls()))
def test_a_bad_argument_is_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"query": zeros(5, 2, 16), "key": zeros(5, 1, 16), "cos": zeros(5, 8), "sin": zeros(5, 8)}
    with pytest.raises(error, match=re.escape(message)):
        cukern.rotary_embedding(**good | changes)
    cukern.rotary_embedding(**good)


def test_no_tokens() -> None:
    for shape in ((0, 2, 8), (5, 0, 8)):
        query = zeros(*shape)
        assert cukern.rotary_embedding(query, zeros(shape[0], 1, 8), zeros(shape[0], 8), zeros(shape[0], 8))[0] is query


# --- the kernel against the twin ------------------------------------------------------------------------

#: The shape without heads, the heads of query and key, their head_dims, rotary_dim, and why the case is there.
SIZES = {
    "Qwen3, a step": ((1,), (32, 4), (128, 128), 128),
    "Qwen3, several sequences": ((2, 37), (32, 4), (128, 128), 128),
    "DeepSeek's rotated part": ((3, 5), (16, 1), (64, 64), 64),
    "a part of the head": ((2, 9), (5, 3), (128, 96), 32),
    "odd halves": ((7,), (3, 2), (18, 14), 14),
    "one pair": ((2, 3), (3, 1), (2, 2), 2),
    "the largest": ((3,), (2, 1), (512, 512), 512),
    "several blocks": ((3, 70), (8, 8), (64, 64), 64),
}


def run(
    query: Array, key: Array, cos: Array, sin: Array, *, transposed: bool = False, skip: int = 0, **options: Any
) -> tuple[Array, Array]:
    """The kernel's results on the GPU, written between words that must stay."""
    import cupy

    buffers = []
    for array in (query, key):
        shape = array.shape if not transposed else (array.shape[0], array.shape[2], array.shape[1], array.shape[3])
        buffer = Buffer(shape, array.dtype.name, skip)
        view = buffer.array.transpose(0, 2, 1, 3) if transposed else buffer.array
        view[...] = cupy.asarray(array)
        buffers.append((buffer, view))
    views = [view for _, view in buffers]
    got = cukern.rotary_embedding(*views, cupy.asarray(cos), cupy.asarray(sin), **options)
    assert got[0] is views[0] and got[1] is views[1]
    for buffer, _ in buffers:
        buffer.numpy()
    return to_numpy(views[0]), to_numpy(views[1])


def compare(
    outer: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], rotary_dim: int, dtype: str, angles: str,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    """Check every layout, of cos and sin with both halves and with one, of one batch and of each."""
    for layout, halves, shared in itertools.product(LAYOUTS, (1, 2), (False, True)):
        if shared and len(outer) == 1:
            continue
        shape = (1, outer[1]) if shared else outer
        cos, sin = (normal(rng, (*shape, rotary_dim * halves // 2), angles) for _ in range(2))
        query, key = (
            normal(rng, (*outer[:-1], n, outer[-1], dim) if len(outer) == 2 else (*outer, n, dim), dtype)
            for n, dim in zip(heads, dims, strict=True)
        )
        options: dict[str, Any] = {"layout": layout, "rotary_dim": rotary_dim}
        wanted = twin.rotary_embedding(query.copy(), key.copy(), cos, sin, **options)
        for variant, transposed, skip in itertools.product(("auto", "narrow"), (False, True), (0, 1)):
            if transposed and len(outer) == 1:
                continue
            got = run(query, key, cos, sin, transposed=transposed, skip=skip, variant=variant, **options)
            for ours, theirs in zip(got, wanted, strict=True):
                assert_matches(HEADS, ours, theirs)


#: The sizes that also run under the sanitizer, where initcheck takes seconds for each.
_SANITIZED = ("a part of the head", "odd halves", "several blocks")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "angles"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")],
)
@pytest.mark.parametrize(
    ("outer", "heads", "dims", "rotary_dim"),
    [pytest.param(*SIZES[x], id=x, marks=[pytest.mark.sanitize] * (x in _SANITIZED)) for x in SIZES],
)
def test_sizes(
    outer: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], rotary_dim: int, dtype: str, angles: str,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    compare(outer, heads, dims, rotary_dim, dtype, angles, rng)


@pytest.mark.gpu
@settings(max_examples=25)
@given(st.data())
def test_random_sizes(data: st.DataObject) -> None:
    rotary_dim = 2 * data.draw(st.integers(1, 130))
    dims = rotary_dim + data.draw(st.integers(0, 20)), rotary_dim + data.draw(st.integers(0, 20))
    outer = data.draw(st.sampled_from([(1,), (13,), (2, 5), (3, 1)]))
    heads = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    compare(outer, heads, dims, rotary_dim, data.draw(st.sampled_from(op.DTYPES)), "float32", rng)


@pytest.mark.gpu
def test_wide_is_refused_where_it_cannot_be() -> None:
    import cupy

    arrays = [cupy.zeros((5, 2, 18), np.float16), cupy.zeros((5, 1, 18), np.float16), *[cupy.zeros((5, 18), "e")] * 2]
    with pytest.raises(ValueError, match="'wide': halves, addresses or strides are no multiples of 16 bytes"):
        cukern.rotary_embedding(*arrays, variant="wide")


@pytest.mark.gpu
@pytest.mark.large(5)
def test_heads_more_than_2_31_elements_apart() -> None:
    """Tokens far apart in one array, whose bits are compared with those of tokens side by side."""
    # Not for the sanitizer, which would take minutes.
    far = torch.empty(2, 2**30 + 256, device="cuda", dtype=torch.bfloat16)[:, :256].view(2, 2, 128)
    near, angles = torch.randn(2, 2, 128, device="cuda").bfloat16(), torch.rand(2, 2, 128, device="cuda")
    far.copy_(near)
    for x in (far, near):
        cukern.rotary_embedding(x[:, :1], x[:, 1:], angles[0], angles[1])
    assert torch.equal(far, near)


# --- norms, rotation and cache --------------------------------------------------------------------------

FUSED = "fused_qk_norm_rope_and_cache"


def fused_case(
    dtype: torch.dtype, head_dim: int, rotary_dim: int, tokens: int = 5, heads: int = 6, kv_heads: int = 2
) -> dict[str, Any]:
    """Arguments by their names: queries, keys and values are parts of one product."""
    generator = torch.Generator().manual_seed(head_dim + rotary_dim + tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    product = normal(tokens, heads + 2 * kv_heads, head_dim)
    query, key, value = product.split([heads, kv_heads, kv_heads], dim=1)
    caches = [normal(3, 8, kv_heads, head_dim) for _ in range(2)]
    slots = torch.randperm(24, generator=generator)[:tokens]
    slots[tokens // 2] = -1 if tokens > 1 else slots[0]
    names = "query", "key", "value", "cos", "sin", "key_cache", "value_cache", "slot_mapping", "q_weight", "k_weight"
    arrays = query, key, value, normal(tokens, rotary_dim), normal(tokens, rotary_dim), *caches, slots
    return dict(zip(names, (*arrays, normal(head_dim), normal(head_dim)), strict=True))


def one_by_one(given: dict[str, Any], layout: str, offset: float, epsilon: float | None) -> list[torch.Tensor]:
    """The same by three functions, which have tests of their own."""
    own = {name: x.clone() for name, x in given.items()}
    if epsilon is not None:
        for name in ("query", "key"):
            own[name] = cukern.rms_norm(own[name], own[f"{name[0]}_weight"], epsilon, weight_offset=offset)
    cukern.rotary_embedding(own["query"], own["key"], own["cos"], own["sin"], layout=layout)
    caches = own["key_cache"], own["value_cache"]
    cukern.reshape_and_cache_flash(own["key"], own["value"], *caches, own["slot_mapping"], "auto", 1.0, 1.0)
    return [own["query"], *caches]


def fused(given: dict[str, Any], layout: str, offset: float, epsilon: float | None) -> list[torch.Tensor]:
    own = dict(given)
    if epsilon is None:
        own["q_weight"] = own["k_weight"] = None
    key = own["key"].clone()
    out = cukern.fused_qk_norm_rope_and_cache(**own, epsilon=epsilon, weight_offset=offset, layout=layout)
    assert out is own["query"] and torch.equal(own["key"], key)
    return [own["query"], own["key_cache"], own["value_cache"]]


CASES = [(128, 128), (128, 64), (64, 64), (80, 80), (96, 32), (16, 16), (192, 192), (256, 64), (512, 512)]


@pytest.mark.parametrize("layout", ["half", "interleaved", "deinterleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), CASES)
def test_fused_is_norm_rotation_and_cache(head_dim: int, rotary_dim: int, layout: str) -> None:
    given = fused_case(torch.bfloat16, head_dim, rotary_dim)
    for epsilon, offset in ((None, 0.0), (1e-6, 0.0), (1e-5, 1.0)):
        own = {name: x.clone() for name, x in given.items()}
        wanted = one_by_one(own, layout, offset, epsilon)
        for got, right in zip(fused(own, layout, offset, epsilon), wanted, strict=True):
            assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 24}, "query must be of a head_dim that is a multiple of 16, at most 512, got 24"),
        ({"rotary_dim": 8}, "rotary_dim must be a multiple of 16, at most the head_dim, 32, got 8"),
        ({"epsilon": None}, "q_weight must be None without epsilon, as there is no norm, got an array"),
        ({"epsilon": -1.0}, "epsilon must be a number of at least 0"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, "slot_mapping must be of shape"),
        ({"value_cache": torch.zeros(3, 8, 1, 32)}, "value_cache must be of shape"),
        ({"layout": "other"}, "layout must be one of"),
    ],
)
def test_fused_refuses(changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"epsilon": 1e-6, **changed}
    given = fused_case(torch.float32, options.pop("head_dim", 32), 16)
    if options.get("rotary_dim") == 8:
        given["cos"], given["sin"] = given["cos"][:, :8], given["sin"][:, :8]
    with pytest.raises(ValueError, match=re.escape(message)):
        cukern.fused_qk_norm_rope_and_cache(**given | options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", ["half", "interleaved", "deinterleaved"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), CASES)
def test_fused_on_a_gpu(head_dim: int, rotary_dim: int, layout: str, dtype: torch.dtype) -> None:
    for tokens, heads, kv_heads in ((1, 32, 4), (7, 5, 5), (300, 6, 2)):
        given = fused_case(dtype, head_dim, rotary_dim, min(tokens, 20), heads, kv_heads)
        if tokens > 20:
            rows = torch.arange(tokens) % 20
            for name in ("query", "key", "value", "cos", "sin"):
                given[name] = given[name][rows]
            given["slot_mapping"] = torch.full((tokens,), -1)
            given["slot_mapping"][:24] = torch.arange(24)
        for epsilon, offset, weight_dtype in ((None, 0.0, dtype), (1e-6, 0.0, dtype), (1e-5, 1.0, torch.float32)):
            own = {name: x.clone() for name, x in given.items()}
            for name in ("q_weight", "k_weight"):
                own[name] = own[name].to(weight_dtype)
            on_gpu = {name: x.cuda() for name, x in own.items()}
            wanted = fused(own, layout, offset, epsilon)
            for got, right in zip(fused(on_gpu, layout, offset, epsilon), wanted, strict=True):
                assert torch.equal(got.cpu(), right)


@pytest.mark.gpu
def test_fused_refuses_what_is_not_of_units() -> None:
    given = {name: x.cuda() for name, x in fused_case(torch.bfloat16, 32, 32).items()}
    given["cos"] = torch.empty(5 * 32 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 32)
    with pytest.raises(ValueError, match="cos must be at a multiple of 16 bytes"):
        cukern.fused_qk_norm_rope_and_cache(**given, epsilon=1e-6)
