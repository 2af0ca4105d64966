"""`cukern demo`: route tokens, show the load of the experts, and encode texts without padding."""

from __future__ import annotations

import argparse
import errno
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cukern
from cukern.commands import INSTALL, UserError, console, demo_encoder
from cukern.commands.serving import launched
from cukern.explain import Launch
from cukern.ops.moe_gate import choose as gate_kernels
from cukern.runtime import arrays, compile, gpu, kernel
from cukern.runtime.progress import progress

Array = NDArray[Any]


class Model(NamedTuple):
    name: str
    experts: int
    groups: int
    topk_group: int
    topk: int
    scoring: str
    biased: bool

    def __str__(self) -> str:
        groups = f" in {self.groups} groups, {self.topk_group} of them kept" if self.groups > 1 else ""
        bias = " + correction bias" if self.biased else ""
        return f"{self.experts} experts{groups}, top {self.topk}, {self.scoring}{bias}"


MODELS = {
    "deepseek-v3": Model("DeepSeek-V3", 256, 8, 4, 8, "sigmoid", True),
    "kimi-k2": Model("Kimi-K2", 384, 1, 1, 8, "sigmoid", True),
    "qwen3-moe": Model("Qwen3-MoE", 128, 1, 1, 8, "softmax", False),
    "mixtral": Model("Mixtral", 8, 1, 1, 2, "softmax", False),
}
_DTYPES = f"{', '.join(gate_kernels.DTYPES)} or float64"
_TOKENS = 8192
_MOST_TOKENS = 1 << 20  # float32 logits of 256 experts then take 1 GiB
_HIDDEN = 512
_TOPICS = 16
_BALANCED_ON = 4096
_SHOWN = 5
# Random logits and the NumPy reference take this many tokens at a time, to limit memory. The kernel's results are
# compared for the first chunk only.
_CHUNK = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--logits",
        type=Path,
        metavar="FILE",
        help="your router's logits [tokens, experts]: .npy, or .npz or .safetensors with 'logits' and, if there is "
        "one, 'bias' [experts]; float32, float16 or bfloat16 (default: logits that the demo makes up)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help=f"how many tokens to route (default: {_TOKENS}, or all of FILE)"
    )
    parser.add_argument(
        "--model",
        choices=MODELS,
        help="whose router to use (default: the one with as many experts as FILE, else deepseek-v3)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the made-up logits (default: 0)")
    parser.epilog = "models:\n" + "\n".join(f"  {key:<12} {model}" for key, model in MODELS.items())


# --- logits -------------------------------------------------------------------------------------------


def _made_up(model: Model, rng: np.random.Generator) -> Callable[[int], Array]:
    """Return a function that makes random logits [n, experts] with an uneven load, as from a real router.

    A hidden state is a topic vector plus noise; logits are the hidden state times a router weight. Some topics are
    frequent, and topic vectors share a component, so some experts get more tokens.
    """
    common = rng.standard_normal(_HIDDEN, np.float32)
    topics = 0.8 * rng.standard_normal((_TOPICS, _HIDDEN), np.float32) + 0.6 * common
    frequency = 1 / np.arange(1, _TOPICS + 1)
    weight = rng.standard_normal((_HIDDEN, model.experts), np.float32) / np.float32(_HIDDEN**0.5)

    def logits(n: int) -> Array:
        parts = []
        for start in range(0, n, _CHUNK):
            size = min(_CHUNK, n - start)
            topic = rng.choice(_TOPICS, size, p=frequency / frequency.sum())
            states = 0.5 * topics[topic] + 0.87 * rng.standard_normal((size, _HIDDEN), np.float32)
            parts.append(states @ weight)
        return np.concatenate(parts)

    return logits


def balancing_bias(model: Model, logits: Array, steps: int = 30) -> Array:
    """Return a correction bias [experts] that balances the experts' loads for `logits`.

    As in DeepSeek-V3 (arXiv:2408.15664), raise the bias of experts with a load below the mean, and lower the others.
    The paper's increment is fixed; here it shrinks over the `steps` iterations.
    """
    bias = np.zeros(model.experts, np.float32)
    here = _place(logits)
    for step in np.geomspace(0.05, 0.001, steps, dtype=np.float32):
        _, ids = route(model, here, _place(bias))
        load = _load(ids, model.experts)
        bias += step * np.sign(load.mean() - load).astype(np.float32)
    return bias


def _named(names: Sequence[str], get: Callable[[str], Any]) -> tuple[Any, Any]:
    if "logits" not in names:
        found = ", ".join(names) or "nothing"
        raise ValueError(f"holds no array named 'logits' (it holds {found})")
    return get("logits"), get("bias") if "bias" in names else None


def _read(path: Path) -> tuple[Any, Any]:
    suffix = path.suffix.lower()
    if suffix in (".npy", ".npz"):
        # Map the file into memory, so that `--tokens` reads only the first rows.
        try:
            loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            # NumPy takes a file in any other format for pickled objects. Its message suggests loading them, so hide it.
            if "pickle" in str(error):
                raise ValueError("not a file of NumPy, or one of Python objects, which are not loaded") from None
            raise
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return loaded, None
        with loaded:
            return _named(loaded.files, loaded.__getitem__)
    if suffix == ".safetensors":
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise UserError(f"{path}: reading it needs a package: pip install safetensors") from None
        try:
            with safe_open(path, "numpy") as tensors:

                def get(name: str) -> Any:
                    kind = tensors.get_slice(name).get_dtype()
                    if kind not in ("F32", "F16", "BF16", "F64"):
                        raise ValueError(f"{name} must be {_DTYPES}, got {kind}")
                    return tensors.get_tensor(name)

                return _named(list(tensors.keys()), get)
        except SafetensorError as error:
            raise ValueError(f"not a safetensors file ({error})") from None
    raise ValueError("must end in .npy, .npz or .safetensors")


def _regular(name: str, array: Any, notes: list[str]) -> Array:
    """Convert an array for the gate: contiguous, native byte order, a supported dtype."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.fields is None:
        # A .npy file stores bfloat16 as raw 2-byte values without a dtype name.
        array = array.view(arrays.numpy_dtype("bfloat16"))
    if array.dtype.name == "float64":
        notes.append(f"{name} converted from float64 to float32")
        return np.ascontiguousarray(array, np.float32)
    if array.dtype.name not in gate_kernels.DTYPES:
        raise ValueError(f"{name} must be {_DTYPES}, got {array.dtype}")
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _load_file(path: Path, tokens: int | None) -> tuple[Array, Array | None, str]:
    """Return logits [tokens, experts], the bias or None, and a description."""
    notes: list[str] = []
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        logits, bias = _read(path)
        if logits.ndim != 2 or 0 in logits.shape:
            raise ValueError(f"logits must be of shape [tokens, experts], got {list(logits.shape)}")
        total, experts = logits.shape
        logits = _regular("logits", logits[:tokens], notes)
        if bias is not None:
            if bias.shape != (experts,):
                raise ValueError(f"bias must be of shape [experts] = [{experts}], got {list(bias.shape)}")
            bias = _regular("bias", bias, notes)
            if bias.dtype != np.float32 and bias.dtype != logits.dtype:
                notes.append(f"bias converted from {bias.dtype} to float32")
                bias = bias.astype(np.float32)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: {error}") from None
    count = f"{len(logits)} of {total}" if len(logits) < total else f"{total}"
    words = f"{count} tokens of {path.name}, {logits.dtype}, {'with a' if bias is not None else 'no'} bias"
    return logits, bias, "; ".join([words, *notes])


def _model_for(experts: int, biased: bool) -> Model:
    for model in MODELS.values():
        if model.experts == experts and (model.biased or not biased):
            return model
    return Model("Router", experts, 1, 1, min(8, experts), "sigmoid" if biased else "softmax", biased)


# --- routing ------------------------------------------------------------------------------------------


def _place(array: Array) -> Any:
    """Copy the array to the GPU if there is one."""
    if not kernel.device_count():
        return array
    import cupy

    return cupy.asarray(array)


def _outputs(model: Model, logits: Any) -> tuple[Any, Any]:
    library, shape = arrays.library_of(logits), (len(logits), model.topk)
    assert library is not None
    return library.empty(shape, "float32", logits), library.empty(shape, "int32", logits)


def route(model: Model, logits: Any, bias: Any, out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    out = out or _outputs(model, logits)
    if model.scoring == "softmax":
        return cukern.topk_softmax(*out, logits, renormalize=True)
    return cukern.moe_fused_gate(logits, bias, model.groups, model.topk_group, model.topk, out=out)


def _route_on_host(model: Model, logits: Array, bias: Array | None) -> tuple[Array, Array]:
    chunks = [route(model, logits[start : start + _CHUNK], bias) for start in range(0, len(logits), _CHUNK)]
    weights, ids = zip(*chunks, strict=True)
    return np.concatenate(weights), np.concatenate(ids)


def _load(ids: Any, experts: int) -> Array:
    library = arrays.library_of(ids)
    assert library is not None
    return np.bincount(library.to_numpy(ids).ravel(), minlength=experts)


# --- output -------------------------------------------------------------------------------------------


def _first_tokens(model: Model, weights: Array, ids: Array) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    title = "first tokens: expert and weight" + (" (the bias ranks, but does not weigh)" if model.biased else "")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("rank", justify="right")
    shown = min(_SHOWN, len(ids))
    for token in range(shown):
        table.add_column(f"token {token}", justify="right")
    for rank in range(ids.shape[1]):
        table.add_row(str(rank + 1), *(f"{ids[t, rank]} {weights[t, rank]:.4f}" for t in range(shown)))
    return Group(Text(title, "bold"), table)


def _bar(share: float, glyphs: str) -> Any:
    """Return a colored character for an expert's load. `share` is load / mean load."""
    from rich.text import Text

    level = 0 if share == 0 else min(max(round(share / 2 * (len(glyphs) - 1)), 1), len(glyphs) - 1)
    return Text(glyphs[level], "red" if share > 1.5 else "blue" if share < 0.5 else "green")


def _load_chart(model: Model, loads: dict[str, Array], utf8: bool) -> Any:
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    glyphs = "·▁▂▃▄▅▆▇█" if utf8 else " .:-=+*#@"
    few = model.experts <= 16
    size = model.experts // model.groups
    per_row = 1 if few else size if 8 <= size <= 32 else 32
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("expert" if few else "experts", justify="right")
    for name in loads:
        table.add_column(name)
    shares = [load / load.mean() for load in loads.values()]
    widest = max(share.max() for share in shares)
    for start in range(0, model.experts, per_row):
        cells = []
        for load, share in zip(loads.values(), shares, strict=True):
            if few:
                bar = glyphs[-1] * round(30 * share[start] / widest)
                cells.append(Text(bar, _bar(share[start], glyphs).style) + Text(f" {load[start]}"))
            else:
                cells.append(Text().join(_bar(s, glyphs) for s in share[start : start + per_row]))
        last = min(start + per_row, model.experts) - 1
        table.add_row(str(start) if few else f"{start}-{last}", *cells)
    table.add_section()
    table.add_row("busiest", *(f"{share.max():.2f} x the mean" for share in shares))
    table.add_row("idle", *(f"{int((load == 0).sum())} of {model.experts}" for load in loads.values()))
    mean = next(iter(loads.values())).mean()
    legend = f"mean {mean:.0f} tokens"
    if not few:
        legend += f": {glyphs[4]} is the mean, {glyphs[-1]} twice the mean or more"
    return Group(Text("tokens per expert", "bold"), table, Text(legend, "dim"))


# --- the kernel ---------------------------------------------------------------------------------------


#: Compile target on a machine without a GPU.
_ARCH = "90a"


def _call(model: Model, logits: Any, bias: Any) -> tuple[str, dict[str, Any]]:
    if model.scoring == "softmax":
        weights, ids = _outputs(model, logits)
        return "topk_softmax", {
            "topk_weights": weights, "topk_ids": ids, "gating_output": logits, "renormalize": True,
        }  # fmt: skip
    sizes = {"num_expert_group": model.groups, "topk_group": model.topk_group, "topk": model.topk}
    return "moe_fused_gate", {"input": logits, "bias": bias, **sizes}


def _kernels(model: Model, logits: Any, bias: Any, arch: str | None) -> Sequence[Launch]:
    name, arguments = _call(model, logits, bias)
    return cukern.explain(getattr(cukern, name), **arguments, arch=arch).launches


def _build(model: Model, logits: Array, bias: Array | None) -> str:
    if reason := compile.available():
        return f"Nor can a kernel be compiled here ({reason.splitlines()[0]}): {INSTALL}"
    instances = [*launched(*_call(model, logits, bias), gpu.BY_ARCH[_ARCH])]
    cached = not compile.missing(instances, _ARCH)
    start = time.perf_counter()
    for instance in instances:
        compile.cubin(instance, _ARCH)
    how = "from the cache" if cached else f"compiled in {time.perf_counter() - start:.2f} s"
    said = []
    for launch in _kernels(model, logits, bias, _ARCH):
        used = launch.resources
        assert used is not None
        spills = f"{used.spill_bytes} bytes spilled" if used.spill_bytes else "no spills"
        said.append(f"{launch.kernel}, {used.registers} registers, {spills}")
    return f"The kernel for sm_{_ARCH}, {how}: {'; '.join(said)}."


def _microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time per call: the median over replays of a CUDA graph of all calls."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    # Another stream made the arguments.
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        for call in calls:
            call()
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
        times = []
        for _ in range(23):
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop))
    # The first replays do not count: they upload the graph, and the clocks still rise.
    return float(np.median(times[3:])) / len(calls) * 1000


def _measure(model: Model, logits: Any, bias: Any) -> list[tuple[str, str]]:
    """Return texts about the kernel's time, and about the floor, the minimum possible time."""
    import cupy

    runtime = cupy.cuda.runtime
    device = logits.device.id
    l2 = runtime.deviceGetAttribute(runtime.cudaDevAttrL2CacheSize, device)
    free, _ = runtime.memGetInfo()

    # Together, the copies of the inputs are larger than the L2 cache, if memory allows.
    count = max(1, min(-(-2 * l2 // logits.nbytes), 1024, free // (4 * logits.nbytes)))
    shape = (len(logits), model.topk)
    sets = [(logits.copy(), (cupy.empty(shape, np.float32), cupy.empty(shape, np.int32))) for _ in range(count)]
    us = _microseconds([lambda x=x, out=out: route(model, x, bias, out) for x, out in sets] * max(1, 64 // count))

    size = min(1 << 30, free // 8)
    source, target = cupy.zeros(size, np.uint8), cupy.empty(size, np.uint8)
    # memcpy nodes of a CUDA graph are slower, so copy without one. The copy is so large that its launch time is
    # negligible.
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    times = []
    for _ in range(8):
        start.record()
        target.data.copy_from_device(source.data, size)
        stop.record()
        stop.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, stop))
    copy = float(np.median(times[3:])) * 1000
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    launch = _microseconds([lambda: empty((1,), (32,), ())] * 64)

    moved = logits.nbytes + 8 * len(logits) * model.topk
    bandwidth = 2 * size / copy  # per microsecond
    floor = max(moved / bandwidth, launch)
    words = f"{moved / 1e6:.2f} MB at the {bandwidth / 1e6:.2f} TB/s of a copy"
    if floor == launch:
        words = "that of an empty kernel"
    return [
        ("GPU", runtime.getDeviceProperties(device)["name"].decode()),
        ("time", f"{us:.2f} us per call, in a CUDA graph over {count} inputs ({count * logits.nbytes / 1e6:.0f} MB)"),
        ("floor", f"{floor:.2f} us: {words}, measured now"),
        ("share", f"{floor / us:.0%} of the floor"),
    ]


def _choice(model: Model, logits: Array, bias: Array | None) -> Array:
    """Return the values that rank the experts of each token."""
    x = logits.astype(np.float64)
    return x if bias is None else 1 / (1 + np.exp(-x)) + bias.astype(np.float64)


def agreement(
    model: Model, logits: Array, bias: Array | None, weights: Array, ids: Array, twin: tuple[Array, Array]
) -> str:
    twin_weights, twin_ids = twin
    equal = (ids == twin_ids).all(axis=1)
    difference = np.abs(weights - twin_weights)[equal].max(initial=0)
    words = f"ids equal in {equal.sum()} of {len(equal)} tokens, weights there within {difference:.1e}"
    if not equal.all():
        choice = _choice(model, logits, bias)[~equal]
        gap = np.take_along_axis(choice, ids[~equal], 1) - np.take_along_axis(choice, twin_ids[~equal], 1)
        words += f"; where ids differ, the choices are within {np.abs(gap).max():.1e}"
    return words


def _input(args: argparse.Namespace) -> tuple[Model, Array, Array | None, str]:
    if args.tokens is not None and args.tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {args.tokens}")
    if not args.logits and (args.tokens or 0) > _MOST_TOKENS:
        raise UserError(f"--tokens must be at most {_MOST_TOKENS} without --logits, got {args.tokens}")
    if args.seed < 0:
        raise UserError(f"--seed must be at least 0, got {args.seed}")
    if not args.logits:
        model = MODELS[args.model or "deepseek-v3"]
        tokens = args.tokens or _TOKENS
        make = _made_up(model, np.random.default_rng(args.seed))
        logits = make(tokens)
        words = f"{tokens} made-up tokens: hidden states of {_TOPICS} topics, times a router weight; float32"
        if not model.biased:
            return model, logits, None, words
        words += f"\nbias found on {_BALANCED_ON} others by DeepSeek's load balancing"
        return model, logits, balancing_bias(model, make(_BALANCED_ON)), words
    logits, bias, words = _load_file(args.logits, args.tokens)
    experts = logits.shape[1]
    model = MODELS[args.model] if args.model else _model_for(experts, bias is not None)
    if experts != model.experts:
        raise UserError(f"{args.logits}: {model.name} has {model.experts} experts, got {experts}")
    if bias is not None and not model.biased:
        raise UserError(f"{args.logits}: {model.name} takes no bias")
    if experts > gate_kernels.MAX_EXPERTS:
        raise UserError(f"{args.logits}: at most {gate_kernels.MAX_EXPERTS} experts, got {experts}")
    return model, logits, bias, words


def run(args: argparse.Namespace) -> int:
    screen = console()
    _show_routing(args, screen)
    if not args.logits:
        screen.print()
        demo_encoder.show(screen)
    return 0


def _show_routing(args: argparse.Namespace, screen: Any) -> None:
    from rich.markup import escape
    from rich.table import Table

    model, logits, bias, words = _input(args)
    zeros = np.zeros(model.experts, np.float32)
    used = zeros if model.biased and bias is None else bias
    placed, placed_bias = _place(logits), None if used is None else _place(used)
    on_gpu = kernel.device_count() > 0

    def routed(by: Array | None) -> tuple[Array, Array]:
        if not on_gpu:
            return _route_on_host(model, logits, by)
        weights, ids = route(model, placed, None if by is None else _place(by))
        return arrays.CUPY.to_numpy(weights), arrays.CUPY.to_numpy(ids)

    with progress("routing tokens", 1 + (bias is not None)) as advance:
        start = time.perf_counter()
        weights, ids = routed(used)
        seconds = time.perf_counter() - start
        advance()
        loads = {"load": _load(ids, model.experts)}
        if bias is not None:
            loads = {"without the bias": _load(routed(zeros)[1], model.experts), "with the bias": loads["load"]}
            advance()

    screen.print(f"[bold]{model.name}[/]: {escape(f'{model}')}\n{escape(words)}\n")
    screen.print(_first_tokens(model, weights, ids))
    screen.print(_load_chart(model, loads, screen.encoding.startswith("utf")))
    screen.print()
    if not on_gpu:
        screen.print(f"No GPU can be used here, so the NumPy reference routed the tokens, in {seconds:.2f} s.")
        screen.print(_build(model, logits, used), markup=False)
        return
    few = logits[:_CHUNK]
    twin = _route_on_host(model, few, used)
    words = agreement(model, few, used, weights[:_CHUNK], ids[:_CHUNK], twin)
    table = Table.grid(padding=(0, 2))
    names = ", ".join(launch.kernel for launch in _kernels(model, placed, placed_bias, None))
    for row in [("kernel", names), *_measure(model, placed, placed_bias), ("NumPy reference", words)]:
        table.add_row(*row)
    screen.print(table)
