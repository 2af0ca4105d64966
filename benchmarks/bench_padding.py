"""Time removing and restoring padding, beside PyTorch's indexing with all indices precomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

import cukern
from benchmarks.harness import Baseline, Case
from cukern.runtime.arrays import ITEM_SIZE

Inputs = Callable[[torch.Generator], tuple[Any, ...]]


class Sizes(NamedTuple):
    batch: int
    length: int  # rows per sequence of the padded batch
    hidden: int
    head_dim: int
    dtype: str = "float16"

    @property
    def rows(self) -> int:
        return self.batch * self.length

    @property
    def words(self) -> int:
        """Half of the rows. `random_batch` draws lengths with this sum."""
        return self.rows // 2

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    @property
    def word_bytes(self) -> int:
        return self.hidden * ITEM_SIZE[self.dtype]


HEADLINE = Sizes(64, 512, 1024, 64)
LARGE = (Sizes(128, 512, 1024, 64), Sizes(64, 1024, 4096, 128))
SMALL = Sizes(8, 128, 768, 64)


class Batch(NamedTuple):
    """The positions of the words, in every form that the op or a baseline takes."""

    lengths: torch.Tensor  # int32 [batch]
    padding_offset: torch.Tensor  # int32 [words]
    index: torch.Tensor  # int64 [words], the padded rows
    sequence: torch.Tensor  # int64 [words]
    position: torch.Tensor  # int64 [words], in the sequence
    mask: torch.Tensor  # bool [batch, length]


def random_batch(sizes: Sizes, generator: torch.Generator) -> Batch:
    """Return uniform lengths in pairs that add up to `length`, so that exactly half of the rows hold words."""
    device = generator.device
    half = torch.randint(0, sizes.length + 1, (sizes.batch // 2,), generator=generator, device=device)
    order = torch.randperm(sizes.batch, generator=generator, device=device)
    lengths = torch.cat([half, sizes.length - half])[order]
    mask = torch.arange(sizes.length, device=device) < lengths[:, None]
    index = mask.flatten().nonzero().flatten()
    padding_offset = (index - torch.arange(sizes.words, device=device)).int()
    sequence, position = index // sizes.length, index % sizes.length
    return Batch(lengths.int(), padding_offset, index, sequence, position, mask)


def _random(generator: torch.Generator, sizes: Sizes, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(getattr(torch, sizes.dtype))


def _on(src: torch.Tensor, variant: str) -> str:
    """Return the variant to pass: "auto" on the CPU, where the tests run, because it has no variants."""
    return variant if src.is_cuda else "auto"


def _baseline(function: Callable[..., Any]) -> Baseline:
    return Baseline(lambda: function)


def _compiled(function: Callable[..., Any]) -> Baseline:
    def load() -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(function, dynamic=False)

    return Baseline(load, slow=True)


def agree(ours: Any, theirs: Any) -> bool:
    """Return whether results are equal: both round each element once."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _case(
    op: str,
    sizes: Sizes,
    variant: str,
    inputs: Inputs,
    call: Callable[..., Any],
    size: int,
    baselines: Mapping[str, Baseline],
    heads: bool = False,
) -> Case:
    case: dict[str, int | str] = {"batch": sizes.batch, "length": sizes.length, "hidden": sizes.hidden}
    if heads:
        case["heads"] = sizes.heads
    case |= {"words": sizes.words, "dtype": sizes.dtype}
    host = sizes == HEADLINE and variant == "specialized"
    return Case(op, case, variant, inputs, call, size, baselines=baselines, agree=agree, host=host)


# --- one function after the other ---------------------------------------------------------------------


def _remove(sizes: Sizes, variant: str, compared: bool) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return _random(generator, sizes, sizes.batch, sizes.length, sizes.hidden), random_batch(sizes, generator)

    def call(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        return cukern.remove_sequence_length_padding(src, batch.padding_offset, variant=_on(src, variant))

    def select(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        return src.view(sizes.rows, sizes.hidden).index_select(0, batch.index)

    def from_mask(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        # Not src[mask], which waits for the GPU to count the words; a CUDA graph cannot capture that.
        index = torch.nonzero_static(batch.mask.view(-1), size=sizes.words)[:, 0]
        return src.view(sizes.rows, sizes.hidden).index_select(0, index)

    baselines = {"torch": _baseline(select)}
    if compared:
        baselines |= {"torch from a mask": _baseline(from_mask), "torch.compile": _compiled(select)}
    size = sizes.words * (2 * sizes.word_bytes + 4)
    return _case("remove_sequence_length_padding", sizes, variant, inputs, call, size, baselines)


def _transpose_remove(sizes: Sizes, variant: str, compared: bool) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        src = _random(generator, sizes, sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
        return src, random_batch(sizes, generator)

    def call(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        return cukern.transpose_remove_padding(src, batch.padding_offset, variant=_on(src, variant))

    def gather(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        return src[batch.sequence, :, batch.position].view(sizes.words, sizes.hidden)

    size = sizes.words * (2 * sizes.word_bytes + 4)
    baselines = {"torch": _baseline(gather)}
    return _case("transpose_remove_padding", sizes, variant, inputs, call, size, baselines, heads=True)


def _rebuild(sizes: Sizes, variant: str, compared: bool) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        return _random(generator, sizes, sizes.words, sizes.hidden), random_batch(sizes, generator)

    def call(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        return cukern.rebuild_sequence_length_padding(
            src, batch.padding_offset, sizes.batch, sizes.length, variant=_on(src, variant)
        )

    def copy_into_zeros(src: torch.Tensor, batch: Batch) -> torch.Tensor:
        zeros = src.new_zeros(sizes.rows, sizes.hidden)
        return zeros.index_copy_(0, batch.index, src).view(sizes.batch, sizes.length, sizes.hidden)

    size = (sizes.words + sizes.rows) * sizes.word_bytes + sizes.words * 4
    baselines = {"torch": _baseline(copy_into_zeros)}
    return _case("rebuild_sequence_length_padding", sizes, variant, inputs, call, size, baselines)


def _add_qkv(sizes: Sizes, variant: str, compared: bool) -> Case:
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)

    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        qkv = tuple(_random(generator, sizes, sizes.words, sizes.hidden) for _ in range(3))
        biases = tuple(_random(generator, sizes, sizes.hidden) for _ in range(3))
        return qkv, biases, random_batch(sizes, generator)

    def call(qkv: Any, biases: Any, batch: Batch) -> Any:
        return cukern.add_qkv_bias_rebuild_padding(
            *qkv, *biases, batch.padding_offset, sizes.batch, sizes.length, sizes.heads, variant=_on(qkv[0], variant)
        )

    def put(qkv: Any, biases: Any, batch: Batch) -> Any:
        results = []
        for x, bias in zip(qkv, biases, strict=True):
            zeros = x.new_zeros(shape)
            zeros[batch.sequence, :, batch.position] = (x + bias).view(sizes.words, sizes.heads, sizes.head_dim)
            results.append(zeros)
        return tuple(results)

    baselines = {"torch": _baseline(put)}
    if compared:
        baselines["torch.compile"] = _compiled(put)
    size = 3 * ((sizes.words + sizes.rows + 1) * sizes.word_bytes) + sizes.words * 4
    return _case("add_qkv_bias_rebuild_padding", sizes, variant, inputs, call, size, baselines, heads=True)


def _build(sizes: Sizes) -> Case:
    def inputs(generator: torch.Generator) -> tuple[Any, ...]:
        first = torch.arange(sizes.batch, device=generator.device) * sizes.length
        return random_batch(sizes, generator).lengths, first

    def call(lengths: torch.Tensor, first: torch.Tensor) -> Any:
        built = cukern.build_sequence_length_padding_offset(lengths, sizes.length, valid_word_num=sizes.words)
        return built[:2]

    def repeat(lengths: torch.Tensor, first: torch.Tensor) -> Any:
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        padding_offset = (first - cu_seqlens[:-1]).repeat_interleave(lengths, output_size=sizes.words)
        return padding_offset.int(), cu_seqlens.int()

    case: dict[str, int | str] = {"batch": sizes.batch, "length": sizes.length, "words": sizes.words, "dtype": "int32"}
    size = 4 * (sizes.batch + sizes.words + sizes.batch + 1)
    name = "build_sequence_length_padding_offset"
    return Case(
        name, case, "dynamic", inputs, call, size, baselines={"torch": _baseline(repeat)}, agree=agree, host=True
    )


def cases() -> list[Case]:
    """Return cases where half of the rows hold words: BERT-large's batch of 64 x 512, two larger and a small one."""

    def all_cases() -> Iterator[Case]:
        yield _build(HEADLINE)
        for function in (_remove, _rebuild, _transpose_remove, _add_qkv):
            yield function(HEADLINE, "specialized", True)
            yield function(HEADLINE, "dynamic", False)
            for sizes in (*LARGE, SMALL):
                yield function(sizes, "specialized", False)

    return list(all_cases())
