"""The launches of a layer on one GPU, in their order: what `AutoExperts` does, below the checks of its parts.

They are chosen for a number of tokens, from the layouts of the arrays alone. A call adds the addresses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cukern.formats.fused_moe import GROUP, SCALES, FusedMoEQuantConfig
from cukern.formats.quantized import SMALLEST, SMALLEST_FP8
from cukern.formats.weights import rows_of_weights
from cukern.fused_moe.buffers import aligned
from cukern.fused_moe.experts import AutoExperts, expected_rows_of, inter_of
from cukern.fused_moe.modular_kernel import CHUNK_SIZE
from cukern.ops.moe_gemm import kernels, routed
from cukern.ops.moe_gemm.choose import choose
from cukern.ops.moe_gemm.kernels import Product
from cukern.ops.moe_gemm.launch import check_call, product_of
from cukern.ops.moe_permute import choose as permute
from cukern.ops.moe_permute import rows as permutation
from cukern.ops.moe_permute import sorting
from cukern.ops.quantization import choose as quantization
from cukern.ops.quantization import launch as quantizing
from cukern.runtime import activation as activations
from cukern.runtime import check
from cukern.runtime import launch as runtime
from cukern.runtime.arrays import ITEM_SIZE, Library, View, strides_of

FP8 = "float8_e4m3fn"
EPS = 1e-10  # of per_token_group_quant_fp8 by default
#: The arrays of a call. The parts of the workspace, the addresses within both, and a null pointer follow them.
NAMES = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "expert_map", *SCALES, "out")


class Slot(NamedTuple):
    """An address: an array of NAMES or a part of the workspace, and the bytes from its start."""

    place: int
    offset: int = 0


NULL = Slot(-1)


class Rows(NamedTuple):
    """Rows of activations and their scales, where they are and how they lie."""

    slot: Slot
    view: View
    scale: Slot = NULL
    scale_view: View | None = None

    def of(self, start: int, count: int) -> Rows:
        """`count` of the rows, from `start` on."""
        slot, view, scale, scale_view = self
        size = view.shape[1] * view.item_size
        if scale_view is not None and len(scale_view.shape) == 2:  # else there is one scale
            columns = scale_view.shape[1]
            scale = Slot(scale.place, scale.offset + start * columns * ITEM_SIZE["float32"])
            scale_view = scale_view._replace(shape=(count, columns))
        slot, view = Slot(slot.place, slot.offset + start * size), view._replace(shape=(count, view.shape[1]))
        return Rows(slot, view, scale, scale_view)


class Launches(NamedTuple):
    """The launches of a layer for a number of tokens.

    A launch is a function with its decision, what picks its addresses, and its numbers.
    """

    steps: tuple[tuple[Callable[..., None], Any, Callable[[Sequence[int]], tuple[int, ...]], tuple[int, ...]], ...]
    workspace: tuple[int, ...]  # bytes of each part
    inner: tuple[Slot, ...]  # addresses within arrays and parts
    flops: int

    def run(self, library: Library, device: int, addresses: Sequence[int]) -> None:
        """Launch with the addresses of the arrays of NAMES."""
        if library.recorder is not None:
            runtime.note(library, flops=self.flops)
        held, parts = library.workspace(self.workspace, device)
        at = [*addresses, *parts]
        at += [*(at[place] + offset for place, offset in self.inner), 0]
        for launch, decision, pick, numbers in self.steps:
            launch(decision, library, device, *pick(at), *numbers)
        del held  # after the last launch


class Layer:
    """What alike calls of a layer have in common. `views` are of the arrays of NAMES, which have been checked.

    Raises ValueError for sizes that its parts do not take.
    """

    def __init__(self, views: Sequence[Any], activation: str, config: FusedMoEQuantConfig, weighs_input: bool) -> None:
        self.views: dict[str, Any] = dict(zip(NAMES, views, strict=True))
        self.x, self.w1, self.w2, _, self.ids, expert_map, *_ = views
        self.activation, self.config, self.weighs_input = activation, config, weighs_input
        self.experts: Any = AutoExperts(config).chosen
        self.dtype, self.hidden, self.topk = self.x.dtype, self.x.shape[1], self.ids.shape[1]
        self.count = self.w1.shape[0]
        self.all_experts = self.count if expert_map is None else expert_map.shape[0]
        check.integer("num_experts", self.all_experts, 1, sorting.MAX_EXPERTS)
        if not 0 < self.topk <= permute.MAX_PAIRS // CHUNK_SIZE:
            check.fail("topk_ids", f"of 1 to {permute.MAX_PAIRS // CHUNK_SIZE} experts for each token", self.topk)
        permutation.check_hidden("hidden_states", self.hidden)
        self.inter, self.columns = inter_of(self.w1, activation), rows_of_weights(self.w1)
        self.gpu = runtime.gpu_of(self.x)
        #: By what decides them but the number of rows.
        self.products: dict[Any, Product] = {}

    def made(self, dtype: str, *shape: int) -> View:
        """The view of a contiguous array in the workspace."""
        return self.x._replace(address=0, dtype=dtype, shape=shape, strides=strides_of(shape))


def choose_layer(layer: Layer, tokens: int) -> Launches:
    """The launches of a layer for a number of tokens, which is not 0."""
    chooser = _Chooser(layer)
    chooser.choose(tokens)
    inner = [*dict.fromkeys(slot for _, _, slots, _ in chooser.steps for slot in slots if slot.offset)]
    begin = len(NAMES) + len(chooser.workspace)
    places = {slot: begin + i for i, slot in enumerate(inner)}
    steps = [
        (launch, decision, operator.itemgetter(*[places.get(slot, slot.place) for slot in slots]), numbers)
        for launch, decision, slots, numbers in chooser.steps
    ]
    return Launches(tuple(steps), tuple(chooser.workspace), tuple(inner), chooser.flops)


class _Chooser:
    """The launches of a layer while they are chosen."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.config, self.experts = layer, layer.config, layer.experts
        self.steps: list[Any] = []
        self.workspace: list[int] = []
        self.flops = 0

    def make(self, size: int) -> Slot:
        """A part of the workspace, of `size` bytes."""
        self.workspace.append(size)
        return Slot(len(NAMES) + len(self.workspace) - 1)

    def array(self, name: str, offset: int = 0) -> Slot:
        """An array of NAMES; NULL where it is not given."""
        return NULL if self.layer.views[name] is None else Slot(NAMES.index(name), offset)

    def add(self, launch: Callable[..., None], decision: Any, slots: tuple[Slot, ...], *numbers: int) -> None:
        self.steps.append((launch, decision, slots, numbers))

    def choose(self, tokens: int) -> None:
        layer = self.layer
        a = Rows(self.array("hidden_states"), layer.x._replace(shape=(tokens, layer.hidden)))
        is_left = self.experts.takes_unquantized(a.view)
        if layer.weighs_input:
            made = self.make(tokens * layer.hidden * layer.x.item_size)
            self.unpermute(made, a.slot, self.array("topk_weights"), NULL, tokens, tokens, 1, a.view.address)
            a = Rows(made, layer.made(layer.dtype, tokens, layer.hidden))
        if self._is_fp8 and not is_left:
            a = self.quantize_input(a, tokens)
        chunk = min(tokens, CHUNK_SIZE)
        sizes = layer.hidden, layer.topk, layer.all_experts, layer.count, layer.dtype
        shapes = self.experts.workspace_shapes(chunk, 2 * layer.inter, *sizes)
        item_size = ITEM_SIZE[shapes.dtype]
        first, second = (self.make(math.prod(x) * item_size) for x in (shapes.workspace13, shapes.workspace2))
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            self.choose_experts(a.of(start, count), start, count, first, second)

    def unpermute(
        self, out: Slot, rows: Slot, weights: Slot, inverse: Slot, tokens: int, count: int, topk: int, address: int
    ) -> None:
        layer = self.layer
        width = permute.width_of("permuted_hidden_states", layer.dtype, layer.hidden, layer.hidden, address)
        config = permute.choose_unpermute(layer.dtype, layer.hidden, topk, width)
        slots = out, rows, weights, inverse, NULL
        self.add(permutation.launch_unpermute, config, slots, tokens, count, layer.hidden)

    def quantize_input(self, a: Rows, tokens: int) -> Rows:
        """The input as the first product takes it."""
        layer, columns = self.layer, self.experts._scales(self.layer.hidden)
        q, scale = self.make(tokens * layer.hidden), self.make((tokens * columns or 1) * ITEM_SIZE["float32"])
        self.quantize(a, q, scale, NULL, tokens, layer.hidden, self.array("a1_scale"))
        scale_view = layer.made("float32", tokens, columns) if columns else layer.made("float32", 1)
        return Rows(q, layer.made(FP8, tokens, layer.hidden), scale, scale_view)

    def quantize(
        self,
        a: Rows,
        q: Slot,
        scale: Slot,
        counts: Slot,
        rows: int,
        k: int,
        static: Slot,
        activation: str | None = None,
    ) -> None:
        """Quantize `rows` rows of `k` numbers; `counts` is where the number of rows in use is.

        `static` is where a scale of all is that is given; `activation`: the rows are gates and ups.
        """
        dtype, in_groups = a.view.dtype, self.config.is_in_groups
        stride = k * (2 if activation else 1) * a.view.item_size
        own: dict[str, Any] = {
            "activation": activations.number(activation, optional=True),
            "name": "x" if in_groups or activation else "input",
        }
        is_aligned, max_tokens = a.view.address % 16 == 0 == stride % 16, 1 if counts is NULL else rows
        if in_groups or (self.config.per_act_token_quant and static is NULL):
            smallest = float(SMALLEST_FP8) if not in_groups else float(SMALLEST) if activation else EPS
            group = GROUP if in_groups else 0
            chosen: Any = quantization.choose_groups(dtype, k, group, is_aligned, smallest=smallest, **own)
            self.add(_quantize_groups, chosen, (a.slot, q, scale, counts), rows, stride, max_tokens)
            return
        chosen = quantization.choose_tensor(dtype, k, static is NULL, is_aligned, self.layer.gpu, **own)
        partial = self.make(chosen.workspace[0]) if chosen.workspace else NULL
        slots = a.slot, q, scale, counts, static, partial
        self.add(_quantize_tensor, chosen, slots, rows, stride, max_tokens)

    # --- the experts of some tokens -----------------------------------------------------------------------

    def choose_experts(self, a: Rows, start: int, tokens: int, first: Slot, second: Slot) -> None:
        """The experts of `tokens` tokens from `start` on; `first` and `second` are the workspaces."""
        layer, views, topk = self.layer, self.layer.views, self.layer.topk
        ids = self.array("topk_ids", start * topk * layer.ids.item_size)
        out = self.array("out", start * layer.hidden * layer.x.item_size)
        weights = NULL if layer.weighs_input else self.array("topk_weights", start * topk * ITEM_SIZE["float32"])
        out_view = views["out"]._replace(shape=(tokens, layer.hidden))
        ids_view = layer.ids._replace(shape=(tokens, topk))
        if self.experts._is_routed(out_view, a.view, layer.w1, layer.w2, ids_view, layer.all_experts):
            self.choose_routed(out, a.slot, weights, ids, second, tokens)
            return
        rows, size = tokens * topk, ITEM_SIZE["int32"]
        offsets, row_token, inverse = (
            self.make((layer.count + 1) * size),
            self.make(rows * size),
            self.make(rows * size),
        )
        sizes = layer.all_experts, layer.count, views["expert_map"] is not None
        config = permute.choose_sort(layer.ids.dtype, topk, *sizes, layer.gpu, permute.pairs_class(rows))
        parts = [self.make(size) for size in permute.sort_workspace(config, rows)]
        slots = ids, self.array("expert_map"), offsets, row_token, inverse, *(parts or [NULL])
        self.add(_sort, config, slots, rows)
        expected = expected_rows_of(tokens, topk, layer.all_experts)
        if not self.experts._gathers(expected, layer.gpu.arch, layer.columns):
            row_token = NULL
        choose_products = self.choose_fp8 if self._is_fp8 else self.choose_products
        choose_products(a, rows, (offsets, row_token, inverse), first, second, expected)
        self.unpermute(out, first, weights, inverse, tokens, rows, topk, views["out"].address)

    @property
    def _is_fp8(self) -> bool:
        """Whether activations are of 8 bits."""
        return self.config.is_in_groups or self.config.name == "fp8"

    def choose_routed(self, out: Slot, x: Slot, weights: Slot, ids: Slot, activated: Slot, tokens: int) -> None:
        layer, views = self.layer, self.layer.views
        dtypes = [None if views[name] is None else views[name].dtype for name in ("w1_bias", "w2_bias")]
        alpha, limit, interleaved = self.config.form.values()
        configs = routed.choose_routed(
            layer.dtype, layer.ids.dtype, layer.topk, layer.count, layer.all_experts, layer.hidden, layer.inter,
            layer.activation, activations.check_bounds(alpha, limit), bool(interleaved), tuple(dtypes), layer.gpu,
        )  # fmt: skip
        given = map(self.array, ("expert_map", "w1_bias", "w2_bias"))
        slots = out, x, self.array("w1"), self.array("w2"), weights, ids, activated, *given
        self.flops += 2 * tokens * layer.topk * (layer.columns + layer.inter) * layer.hidden
        self.add(_routed, configs, slots, tokens, layer.topk)

    def multiply(
        self, which: str, a: Rows, out: Rows, offsets: Slot, row_token: Slot, expected: int,
        activation: str | None = None, quantizes: bool = False,
    ) -> None:  # fmt: skip
        """The product of `a` and the weights `which`; `out` has scales where it is quantized."""
        layer, views, rows = self.layer, self.layer.views, out.view.shape[0]
        tokens, gathers = a.view.shape[0], row_token is not NULL
        names = which, f"{which}_scale", f"{which}_global_scale", f"{which}_bias"
        weights, b_scale, global_scale, bias = (views[name] for name in names)
        # A scale of one row is one of each row and of all.
        key = which, gathers, quantizes, activation, a.view.address % 16, out.view.address % 16, tokens == 1, rows == 1
        product = layer.products.get(key)
        if product is None:
            own = (layer.made("int32", layer.count + 1), a.scale_view, b_scale, global_scale)
            given = layer.made("int32", rows) if gathers else None
            form = tuple(self.config.form.values()) if activation else NOT_ACTIVATED
            out_dtype = layer.dtype if self._is_fp8 else None
            facts = activation, *form, out_dtype, "auto", quantizes
            checked = check_call((a.view, weights, *own, given, bias, out.view, out.scale_view), facts)
            product = layer.products[key] = product_of(checked, out.view)
        self.flops += 2 * rows * product.n * product.k // (2 if self._is_fp8 else 1)
        slots = (
            a.slot, self.array(which), offsets, a.scale, *map(self.array, names[1:3]), row_token,
            self.array(names[3]), out.slot, out.scale,
        )  # fmt: skip
        self.add(_multiply, choose(product.of(rows, tokens, expected)), slots)

    def choose_products(
        self, a: Rows, rows: int, where: tuple[Slot, Slot, Slot], first: Slot, second: Slot, expected: int
    ) -> None:
        """Both products of activations of 16 or 32 bits: from `a` to `second`, and from there to `first`."""
        layer, (offsets, row_token, inverse) = self.layer, where
        if row_token is NULL:
            a = self.permute(a, inverse, first, rows)
        inner = Rows(second, layer.made(layer.dtype, rows, layer.inter))
        self.multiply("w1", a, inner, offsets, row_token, expected, layer.activation)
        by_row = Rows(first, layer.made(layer.dtype, rows, layer.hidden))
        self.multiply("w2", inner, by_row, offsets, NULL, expected)

    def permute(self, a: Rows, inverse: Slot, to: Slot, rows: int) -> Rows:
        """The rows of `a` in the order of the experts."""
        layer, (slot, view, *_) = self.layer, a
        tokens, columns = view.shape
        width = permute.width_of("hidden_states", view.dtype, columns, columns, view.address)
        copied = permute.copied_class(tokens * columns * view.item_size)
        config = permute.choose_permute(view.dtype, columns, layer.topk, width, 0, copied)
        self.add(permutation.launch_permute, config, (slot, inverse, to), tokens, rows, columns)
        return Rows(to, layer.made(view.dtype, rows, columns))

    def choose_fp8(
        self, a: Rows, rows: int, where: tuple[Slot, Slot, Slot], first: Slot, second: Slot, expected: int
    ) -> None:
        """Both products of activations of 8 bits, which are quantized again between them."""
        layer, config, (offsets, row_token, inverse) = self.layer, self.config, where
        inter, activation, tokens = layer.inter, layer.activation, a.view.shape[0]
        is_unquantized = config.is_in_groups and a.scale_view is None
        by_row = Rows(first, layer.made(layer.dtype, rows, layer.hidden))
        fuses = row_token is NULL and self.experts._fuses(activation, layer.w1, expected, by_row.view)
        if row_token is NULL:
            # Where the first product quantizes, it reads the first workspace and writes the second.
            to = self.quantized(first if fuses else second, rows, layer.hidden)
            if is_unquantized:
                chosen = permute.choose_permute_quantized(a.view.dtype, layer.hidden, layer.topk)
                slots = a.slot, inverse, to.slot, to.scale
                self.add(permutation.launch_permute_quantized, chosen, slots, tokens, rows, layer.hidden)
                a = to
            else:
                q = self.permute(a, inverse, to.slot, rows)
                if to.scale_view is not None:
                    assert a.scale_view is not None
                    self.permute(Rows(a.scale, a.scale_view), inverse, to.scale, rows)
                    a = to
                else:
                    a = Rows(q.slot, q.view, a.scale, a.scale_view)
        elif is_unquantized:
            a = self.quantize_input(a, tokens)
        # All experts count as one group: rows past the last expert's are not written.
        counts = Slot(offsets.place, layer.count * ITEM_SIZE["int32"])
        if fuses:
            inner = self.quantized(second, rows, inter)
            self.multiply("w1", a, inner, offsets, row_token, expected, activation, quantizes=True)
        else:
            activates = config.quantizes_activated(activation)
            columns = inter if activates else layer.columns
            gate_up = Rows(first, layer.made(layer.dtype, rows, columns))
            self.multiply("w1", a, gate_up, offsets, row_token, expected, activation if activates else None)
            inner = self.quantized(second, rows, inter)
            static = self.array("a2_scale")
            scale, scale_view = inner.scale, inner.scale_view
            if scale_view is None:
                scale, scale_view = self.make(ITEM_SIZE["float32"]), layer.made("float32", 1)
            self.quantize(gate_up, inner.slot, scale, counts, rows, inter, static, None if activates else activation)
            inner = Rows(inner.slot, inner.view, scale, scale_view)
        self.multiply("w2", inner, by_row, offsets, NULL, expected)

    def quantized(self, workspace: Slot, rows: int, columns: int) -> Rows:
        """The place for quantized rows and their scales in a workspace."""
        layer, scales = self.layer, self.experts._scales(columns)
        view = layer.made(FP8, rows, columns)
        if not scales:
            return Rows(workspace, view)
        scale = Slot(workspace.place, workspace.offset + aligned(rows * columns))
        return Rows(workspace, view, scale, layer.made("float32", rows, scales))


NOT_ACTIVATED = activations.ALPHA, activations.LIMIT, False


# --- the launches of parts, by addresses in the order of their slots ------------------------------------


def _sort(
    config: Any, library: Library, device: int, ids: int, expert_map: int, offsets: int, row_token: int, inverse: int,
    part: int, pairs: int,
) -> None:  # fmt: skip
    workspace = [part] if part else []
    sorting.launch_sort(config, library, device, ids, expert_map, offsets, row_token, inverse, pairs, workspace)


def _multiply(chosen: Any, library: Library, device: int, *addresses: int) -> None:
    kernels.launch(chosen, library, device, addresses)


def _routed(configs: Any, library: Library, device: int, *given: int) -> None:
    *addresses, tokens, topk = given
    routed.launch_routed(configs, library, device, tuple(addresses), tokens, topk)


def _quantize_groups(
    config: Any, library: Library, device: int, x: int, q: int, scale: int, counts: int, rows: int, stride: int,
    max_tokens: int,
) -> None:  # fmt: skip
    quantizing.launch_groups(config, library, device, x, q, scale, rows, stride, counts, max_tokens)


def _quantize_tensor(
    config: Any, library: Library, device: int, x: int, q: int, scale: int, counts: int, static: int, partial: int,
    rows: int, stride: int, max_tokens: int,
) -> None:  # fmt: skip
    parts = [partial] if partial else []
    quantizing.launch_tensor(config, library, device, x, q, scale, rows, stride, parts, counts, max_tokens, static)
