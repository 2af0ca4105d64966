"""Quantization below its public functions: what alike calls repeat, what each call checks, and what is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import cukern
from cukern.ops.quantization import choose, eight_bits, four_bits
from cukern.ops.quantization.launch import launch_groups, launch_tensor
from cukern.runtime import arrays, gpu
from cukern.runtime.decisions import Decisions
from cukern.runtime.op import Op
from cukern.runtime.plan import Trace, empty
from cukern.runtime.view import view_of
from tests.buffers import OnlyDLPack
from tests.pretended import Launch, PretendedGPU, pretended  # noqa: F401
from tests.test_quantization import WAYS

H200 = gpu.of_arch("90a")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CALLS = {name: (*WAYS[name], 768) for name in WAYS} | {
    "padded": ("scaled_fp8_quant", (None, 5, None, True), {}, 768),
    "activated": ("silu_and_mul_quant", (), {}, 768),
    "activated by tokens": ("silu_and_mul_quant", (), {"group_size": None}, 768),
    "activated with a scale": ("silu_and_mul_quant", (), {"scale": 0.5}, 768),
    "mxfp4": ("quantize_mxfp4", (), {}, 768),
    "nvfp4": ("scaled_fp4_quant", (3.0,), {}, 768),
    "from mxfp4": ("dequantize_mxfp4", (), {}, 32),
    "from nvfp4": ("dequantize_nvfp4", (2.0,), {}, 32),
}
#: The fields that hold addresses.
ADDRESSES = {"in.x", "in.counts", "q", "scales.to", "scale_out", "azp", "azp_out", "partial", "packed", "scales", "out"}
ADDRESSES |= {"scale.array", "upper.array", "global.array"}


@pytest.fixture
def decided(pretended: PretendedGPU, monkeypatch: pytest.MonkeyPatch) -> list[str]:  # noqa: F811
    """The names of the functions that check and choose, as a list that grows."""
    found: list[str] = []
    monkeypatch.setattr(gpu, "of_device", lambda device: H200)
    for module, name in ((eight_bits, "_decide"), (four_bits, "_decide"), (four_bits, "_decide_to_read")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, own=own, name=name: [found.append(name), own(*args)][1])
    forget(monkeypatch)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((eight_bits, "DECISIONS"), (four_bits, "QUANTIZED"), (four_bits, "READ")):
        monkeypatch.setattr(module, name, Decisions())


def run(way: str, shape: tuple[int, ...], padding: int = 0) -> Any:
    """A call of a way on an array of `shape`, whose rows are `padding` elements apart."""
    name, args, options, k = CALLS[way]
    args = tuple(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in args)
    if name.startswith("dequantize"):
        group = 32 if name.endswith("mxfp4") else 16
        scale = torch.zeros(*shape, 2 * k // group, dtype=torch.uint8)
        return getattr(cukern, name)(torch.zeros(*shape, k, dtype=torch.uint8), scale, *args)
    return getattr(cukern, name)(torch.zeros(*shape, k + padding, dtype=BF16)[..., :k], *args, **options)


def said(launches: list[Launch]) -> list[Any]:
    """What launches say, but for addresses."""
    return [(*x[:4], {name: y for name, y in flat(x.fields).items() if name not in ADDRESSES}) for x in launches]


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields by name; one of a struct within is such as "in.rows"."""
    found = {}
    for name, x in fields.items():
        found |= flat(x, f"{prefix}{name}.") if isinstance(x, dict) else {prefix + name: x}
    return found


@pytest.mark.parametrize("way", CALLS)
def test_a_decision_serves_every_number_of_rows(
    way: str,
    decided: list[str],
    pretended: PretendedGPU,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shape, padding in (((), 0), ((2,), 0), ((4,), 8)):
        if padding and way.startswith("from"):
            continue
        rows = (3, 0, 1, 2, 77, 600)
        for count in rows[:3]:  # of each class
            run(way, (count, *shape), padding)
        decided.clear()
        pretended.launches.clear()
        results = [run(way, (count, *shape), padding) for count in rows]
        assert not decided
        again = said(pretended.launches)
        forget(monkeypatch)
        pretended.launches.clear()
        for count, found in zip(rows, results, strict=True):
            one, other = (
                [y if y is None else (y.shape, y.stride(), y.dtype) for y in (x if isinstance(x, tuple) else (x,))]
                for x in (found, run(way, (count, *shape), padding))
            )
            assert one == other
            forget(monkeypatch)
        assert len(decided) == len(rows) and again == said(pretended.launches) != []


@pytest.mark.parametrize("way", [way for way in CALLS if "column" not in str(CALLS[way]) and way != "padded"])
def test_an_array_of_one_row(way: str, decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    found = [run(way, ()) for _ in range(2)]
    assert len(decided) == 1
    first, second = (
        pretended.launches[: len(pretended.launches) // 2],
        pretended.launches[len(pretended.launches) // 2 :],
    )
    assert said(first) == said(second) != []
    own = [[y.shape for y in (x if isinstance(x, tuple) else (x,)) if y is not None] for x in found]
    assert own[0] == own[1] and own[0][0][0] in (768, 384, 64)
    name, args, options, k = CALLS[way]
    if name.startswith("per_token"):
        with pytest.raises(ValueError, match="whole groups"):
            getattr(cukern, name)(torch.zeros(k + 1, dtype=BF16), *args, **options)


def test_what_is_given_is_written(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    counts, scale = torch.zeros(2, dtype=torch.int32), torch.ones(1)
    for tokens in (4, 4, 6):
        x = torch.zeros(2, tokens, 256)
        q, s = torch.zeros(2, tokens, 256, dtype=E4M3), torch.zeros(2, tokens, 2)
        found = cukern.per_token_group_quant_fp8(x, 128, expert_num_tokens=counts, out_q=q, out_s=s)
        assert found[0] is q and found[1] is s
        fields = flat(pretended.launches[-1].fields)
        names = "in.x", "in.counts", "q", "scales.to"
        assert [fields[name] for name in names] == [y.data_ptr() for y in (x, counts, q, s)]
        assert fields["in.max_tokens"] == tokens and fields["scales.expert_stride"] == 2 * tokens
        output = torch.zeros(2, tokens, 256, dtype=torch.uint8)
        assert cukern.scaled_fp8_quant(x, None, None, scale, False, output, expert_num_tokens=counts)[0] is output
        first, second = pretended.launches[-2:]
        assert first.fields["partial"] == second.fields["partial"] and second.fields["partials"] == first.grid[0]
        assert (second.fields["q"], second.fields["upper"]["array"]) == (output.data_ptr(), scale.data_ptr())
    assert len(decided) == 4  # of another max_tokens too: the first size alone is free
    one = torch.zeros(1)
    assert cukern.silu_and_mul_quant(x, scale=scale, out_s=one)[1] is one
    assert pretended.launches[-1].fields["scale"]["array"] == scale.data_ptr()
    zero = torch.zeros(1, dtype=torch.int32)
    _, scales, zeros = cukern.scaled_int8_quant(x, scale, zero, False)
    assert zeros is not None
    fields = pretended.launches[-1].fields
    assert (fields["azp"], fields["azp_out"], fields["scale_out"]) == (
        zero.data_ptr(),
        zeros.data_ptr(),
        scales.data_ptr(),
    )


def test_column_major_scales_of_any_number_of_rows(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    def call(rows: int, s: torch.Tensor) -> Any:
        return cukern.per_token_group_quant_fp8(torch.zeros(rows, 256), 64, column_major_scales=True, out_s=s)

    for rows in (3, 5, 700):
        s = torch.zeros(4, rows).t()
        assert call(rows, s)[1] is s
        fields = flat(pretended.launches[-1].fields)
        strides = [fields[f"scales.{name}_stride"] for name in ("expert", "row", "group")]
        assert (strides, fields["scales.to"]) == ([4 * rows, 1, rows], s.data_ptr())
    assert len(decided) == 1
    for s in (torch.zeros(3, 4), torch.zeros(4, 4).t(), torch.zeros(4, 6).t()[:3]):
        with pytest.raises(ValueError, match=r"^out_s must be (of shape|contiguous)"):
            call(3, s)
    made = cukern.per_token_group_quant_fp8(torch.zeros(3, 256), 64, column_major_scales=True)[1]
    assert made.shape == (3, 4) and made.stride() == (1, 3)


def test_what_a_decision_does_not_hold_is_checked_at_every_call(
    decided: list[str],
    pretended: PretendedGPU,  # noqa: F811
) -> None:
    x, q, s = torch.zeros(3, 256), torch.zeros(3, 256, dtype=E4M3), torch.zeros(3, 2)
    counts = torch.zeros(3, dtype=torch.int32)
    cukern.per_token_group_quant_fp8(x, 128, out_q=q, out_s=s)
    cukern.silu_and_mul_quant(x[:, None], expert_num_tokens=counts)
    for padding, scale, bound in ((None, 0.5, None), (4, None, 2.0)):
        cukern.scaled_fp8_quant(x, scale, padding, bound, padding is not None)
    launches = len(pretended.launches)
    for name, call in (
        ("out_q", lambda: cukern.per_token_group_quant_fp8(x[:2], 128, out_q=q, out_s=s[:2])),
        ("out_s", lambda: cukern.per_token_group_quant_fp8(x[:2], 128, out_q=q[:2], out_s=s)),
        ("expert_num_tokens", lambda: cukern.silu_and_mul_quant(x[:2, None], expert_num_tokens=counts)),
        ("scale", lambda: cukern.scaled_fp8_quant(x, float("nan"))),
        ("scale", lambda: cukern.scaled_fp8_quant(x, True)),
        ("scale", lambda: cukern.scaled_fp8_quant(x, np.float32("inf"))),  # type: ignore[arg-type]
        ("scale_ub", lambda: cukern.scaled_fp8_quant(x, None, 4, float("inf"), True)),
        ("scale_ub", lambda: cukern.scaled_fp8_quant(x, None, 4, torch.zeros(2), True)),
        ("num_token_padding", lambda: cukern.scaled_fp8_quant(x, None, -1, 2.0, True)),
        ("num_token_padding", lambda: cukern.scaled_fp8_quant(x, None, True, 2.0, True)),
        ("group_size", lambda: cukern.per_token_group_quant_fp8(x, 128.0, out_q=q, out_s=s)),  # type: ignore[arg-type]
        ("x", lambda: cukern.per_token_group_quant_fp8(x[:, ::2], 128)),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
            call()
    assert len(pretended.launches) == launches
    # Numbers of each call are no part of a decision.
    decided.clear()
    for scale in (0.25, 3, np.float32(0.125)):
        cukern.scaled_fp8_quant(x, scale)  # type: ignore[arg-type]
        assert pretended.launches[-1].fields["scale"]["number"] == scale
    for padding in (2, 9):
        assert cukern.scaled_fp8_quant(x, None, padding, 0.5, True)[1].shape == (max(padding, 3), 1)
    assert not decided


def test_rows_of_other_strides_are_checked_again(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    # The stride of one row means nothing, and that of several is refused.
    wide = torch.zeros(3, 2, 300)[:, :, :256]
    for first in (1, 1):
        cukern.per_token_group_quant_fp8(wide.transpose(0, 1)[:first], 128)
        assert pretended.launches[-1].fields["in"]["stride"] == 4 * 600
    assert len(decided) == 1
    odd = torch.zeros(2 * 700)[:1024].as_strided((2, 2, 256), (601, 300, 1))
    cukern.per_token_group_quant_fp8(odd[:1], 128)
    with pytest.raises(
        ValueError, match=r"^x must be contiguous along its last dimension, with all rows at one distance"
    ):
        cukern.per_token_group_quant_fp8(odd, 128)
    for start, function in ((0, "quantize_groups"), (1, "quantize_rows"), (0, "quantize_groups")):
        x = torch.zeros(3 * 256 + 1)[start : 3 * 256 + start].reshape(3, 256)
        cukern.per_token_group_quant_fp8(x, 128)
        assert pretended.launches[-1].variant.instance.function == function
    for start, function in ((0, "quantize_groups"), (4, "quantize_rows"), (8, "quantize_groups")):
        q = torch.zeros(3 * 256 + 8, dtype=torch.uint8)[start:][: 3 * 256].reshape(3, 256)
        cukern.per_token_group_quant_fp8(torch.zeros(3, 256), 128, out_q=q)
        assert pretended.launches[-1].variant.instance.function == function


def test_rows_past_the_grid_are_refused_at_every_call(
    decided: list[str],
    pretended: PretendedGPU,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eight_bits, "MAX_ROWS", 1000)
    for rows in (500, 2):
        cukern.per_token_group_quant_fp8(torch.zeros(rows, 96), 48)
    with pytest.raises(ValueError, match=r"^x must be of at most 1000 groups of such a size, got 1002"):
        cukern.per_token_group_quant_fp8(torch.zeros(501, 96), 48)
    assert len(pretended.launches) == 2


def test_packed_numbers_are_checked_at_every_call(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    scale, room = torch.zeros(3, 2, dtype=torch.uint8), torch.zeros(3 * 32 + 4, dtype=torch.uint8)
    for start, aligned in ((0, "true"), (1, "false"), (4, "true")):
        cukern.dequantize_mxfp4(room[start:][: 3 * 32].reshape(3, 32), scale)
        assert pretended.launches[-1].variant.instance.arguments[2] == aligned
    assert len(decided) == 2
    packed = room[: 2 * 32].reshape(2, 32)
    with pytest.raises(ValueError, match=r"^scale must be of shape \[..., k / 32\] = \[2, 2\], got \[3, 2\]"):
        cukern.dequantize_mxfp4(packed, scale)
    for number in (2.0, 3):
        cukern.dequantize_nvfp4(packed, torch.zeros(2, 4, dtype=torch.uint8), number)
        assert pretended.launches[-1].fields["global"]["number"] == number
    with pytest.raises(ValueError, match=r"^global_scale must be a finite number, got inf"):
        cukern.dequantize_nvfp4(packed, torch.zeros(2, 4, dtype=torch.uint8), float("inf"))


def test_gradients_are_refused_at_every_call(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    x, scale = torch.zeros(3, 256), torch.ones(1)
    cukern.scaled_fp8_quant(x, scale)
    cukern.scaled_fp4_quant(x, scale)
    for name, call in (
        ("input", lambda: cukern.scaled_fp8_quant(x.clone().requires_grad_(), scale)),
        ("scale", lambda: cukern.scaled_fp8_quant(x, scale.clone().requires_grad_())),
        ("input_global_scale", lambda: cukern.scaled_fp4_quant(x, scale.clone().requires_grad_())),
    ):
        with torch.no_grad():
            call()
        with pytest.raises(RuntimeError, match=f"^{name} must be a tensor that does not require grad"):
            call()


def test_the_device_of_the_arrays(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    for device in (1, 0, 1):
        pretended.device = device
        cukern.scaled_fp8_quant(torch.zeros(3, 256))
        cukern.quantize_mxfp4(torch.zeros(3, 256))
    assert [x.device for x in pretended.launches] == [1] * 3 + [0] * 3 + [1] * 3 and pretended.current == 0


def test_a_foreign_array_gets_results_of_its_own_kind() -> None:
    x = np.zeros((3, 64), np.float32)
    for found in (
        cukern.per_token_group_quant_fp8(OnlyDLPack(x), 32, column_major_scales=True),
        cukern.scaled_int8_quant(OnlyDLPack(x), None, None, False),
        (cukern.dequantize_mxfp4(OnlyDLPack(np.zeros((3, 32), np.uint8)), OnlyDLPack(np.zeros((3, 2), np.uint8))),),
    ):
        assert all(isinstance(y, np.ndarray) for y in found)
    scales = torch.zeros(2, 3).t()
    found = cukern.per_token_group_quant_fp8(torch.zeros(3, 64), 32, column_major_scales=True, out_s=scales)
    assert found[1] is scales and scales.all()
    made = cukern.per_token_group_quant_fp8(torch.zeros(3, 64), 32, column_major_scales=True)[1]
    assert made.stride() == (1, 3) and torch.equal(made, scales)


# --- below the public checks ------------------------------------------------------------------------------


def test_the_parts_launch_what_the_functions_launch(decided: list[str], pretended: PretendedGPU) -> None:  # noqa: F811
    library = arrays.library_of(torch.empty(0))
    assert library is not None
    x, counts = torch.zeros(2, 5, 512, dtype=BF16), torch.zeros(2, dtype=torch.int32)
    q, s, one = torch.zeros(2, 5, 512, dtype=E4M3), torch.zeros(2, 5, 4), torch.ones(1)
    half, half_s = q[..., :256].contiguous(), s[..., :2].contiguous()

    def addresses(*tensors: torch.Tensor) -> list[int]:
        return [y.data_ptr() for y in tensors]

    cukern.per_token_group_quant_fp8(x, 128, expert_num_tokens=counts, out_q=q, out_s=s)
    config = choose.choose_groups("bfloat16", 512, 128, True, name="x")
    assert config.workspace == ()
    launch_groups(config, library, 0, *addresses(x, q, s), 10, 1024, counts.data_ptr(), 5)
    cukern.silu_and_mul_quant(x, "gelu", group_size=None, expert_num_tokens=counts, out_q=half)
    config = choose.choose_groups("bfloat16", 256, 0, True, activation=2)
    launch_groups(config, library, 0, *addresses(x, half, half_s), 10, 1024, counts.data_ptr(), 5)
    cukern.silu_and_mul_quant(x, scale=one, out_q=half, out_s=one)
    config = choose.choose_tensor("bfloat16", 256, False, True, H200, activation=1)
    assert config.workspace == ()
    launch_tensor(config, library, 0, *addresses(x, half, one), 10, 1024, scale=one.data_ptr())
    for mine, own in zip(pretended.launches[::2], pretended.launches[1::2], strict=True):
        assert said([mine]) == said([own]) and mine.fields["q"] == own.fields["q"]
    assert pretended.launches[2].fields["smallest"] == 1 / 512
    pretended.launches.clear()
    cukern.scaled_fp8_quant(x, None, None, 2.0, output=q)
    found = choose.choose_tensor("bfloat16", 512, True, True, H200, name="input")
    assert found.workspace == (2 * H200.multiprocessors * 4,)
    space = torch.zeros(found.workspace[0], dtype=torch.uint8)
    launch_tensor(found, library, 0, *addresses(x, q, one), 10, 1024, addresses(space), bound=2.0)
    assert said(pretended.launches[:2]) == said(pretended.launches[2:])
    assert [x.fields["partial"] for x in pretended.launches[2:]] == addresses(space) * 2


def trace_of(layer: Any, *values: Any) -> Trace:
    op = Op(layer, None, {}, ())
    return op.say(op.form(len(values), ()), values, H200)[0]


@pytest.mark.parametrize("tokens", [1, 2, 500, 65536])
@pytest.mark.parametrize("group_size", [128, None])
def test_rows_in_the_plan_of_another_op(group_size: int | None, tokens: int) -> None:
    def layer(x: Any, offsets: Any) -> Any:
        rows = x.shape[0] * 6
        gate_up, q = empty((rows, 1024), "bfloat16"), empty((1, rows, 512), "float8_e4m3fn")
        s = empty((1, rows, 4 if group_size else 1), "float32")
        given = {"group_size": group_size, "expert_num_tokens": offsets[8:], "out_q": q, "out_s": s}
        return cukern.silu_and_mul_quant(gate_up.reshape(1, rows, 1024), **given)[0]

    trace = trace_of(layer, np.zeros((tokens, 64), np.float16), np.zeros(9, np.int32))
    (step,) = trace.steps
    rows = step.fields["in"]
    assert (rows["rows"], rows["max_tokens"], rows["stride"]) == (6 * tokens, 6 * tokens, 2048)
    assert (rows["counts"].source, rows["counts"].offset) == (1, 32)
    made = [trace.first_made + i for i in range(3)]
    assert [rows["x"].source, step.fields["q"].source, step.fields["scales"]["to"].source] == made
    assert step.variant.instance.function == ("quantize_groups" if group_size else "quantize_rows")


def test_parts_of_an_array_in_the_plan_of_another_op() -> None:
    room = np.zeros(4 * 6 + 8, np.float32)
    for skipped, alignments in ((0, [16, 8, 16]), (2, [8, 16, 8]), (3, [4, 4, 4])):
        views: list[Any] = []

        def layer(x: Any, views: list[Any] = views) -> None:
            for part in (x, x[1:], x[2:]):  # rows of 24 bytes
                views.append(view_of("part", part))
                cukern.scaled_fp8_quant(part, 1.0)

        start = -room.ctypes.data // 4 % 4 + skipped
        trace = trace_of(layer, room[start : start + 4 * 6].reshape(4, 6))
        assert [view.alignment for view in views] == alignments
        assert [view.address - views[0].address for view in views] == [0, 24, 48]
        assert [(view.shape, view.strides) for view in views] == [((4 - i, 6), (6, 1)) for i in range(3)]
        at = [step.fields["in"]["x"] for step in trace.steps]
        assert [(x.source, x.offset) for x in at] == [(0, 0), (0, 24), (0, 48)]
