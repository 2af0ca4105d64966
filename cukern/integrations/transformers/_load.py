"""`load`: read a checkpoint with packed weights, one file at a time, and enable the model."""

from __future__ import annotations

import copy
import itertools
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from cukern.integrations.transformers import _formats
from cukern.integrations.transformers._checkpoint import Entry, Reader, read_entries
from cukern.integrations.transformers._packed import FP8, Mxfp4Experts, ScaledExperts, ScaledLinear
from cukern.models.checkpoint import expect_directory, listed, read_config
from cukern.runtime import check
from cukern.runtime.progress import progress as progress_bar

_SCALE = re.compile(r"(scale|scales|scale_inv)$")
_PACKED = FP8Linear, FP8Experts, ScaledLinear, ScaledExperts, Mxfp4Experts
_E8M0 = torch.float8_e8m0fnu
_SCALE_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.uint8, _E8M0
_NAN_E8M0 = 255
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass
class _Target:
    """Tensors of the checkpoint, and the model's tensors that are made of them."""

    name: str  # of the model's first tensor
    converter: WeightConverter | None
    sources: list[tuple[str, Entry]] = field(default_factory=list)  # with the converter's pattern

    def places(self) -> list[tuple[int, slice]] | None:
        """Return the expert and the rows of each source in merged weights, or None for another conversion."""
        kinds = [(type(x), getattr(x, "dim", None)) for x in self.converter.operations] if self.converter else []
        merges: list[Any] = [(MergeModulelist, 0), (Concatenate, 1)]
        if not kinds or kinds != merges[: len(kinds)]:
            return None
        assert self.converter is not None
        found, counts = [], dict.fromkeys(self.converter.source_patterns, 0)
        rows = {pattern: (entry.shape or (1,))[0] for pattern, entry in self.sources}
        starts = dict(zip(counts, itertools.accumulate(rows[x] for x in counts), strict=True))
        for pattern, _ in self.sources:
            end = starts[pattern]
            found.append((counts[pattern], slice(end - rows[pattern], end)))
            counts[pattern] += 1
        return found

    def convert(self, model: Any, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.converter is None:
            return {self.name: tensors[0]}
        # A copy, since the converter keeps the tensors that it collects.
        converter = copy.deepcopy(self.converter)
        for (pattern, entry), tensor in zip(self.sources, tensors, strict=True):
            # Kernels that merge tensors lack some dtypes of 8 bits, so merge their bytes.
            converter.add_tensor(self.name, entry.name, pattern, _bytes(_at_least_1d(tensor)))  # type: ignore[arg-type]
        dtype, made = tensors[0].dtype, converter.convert(self.name, model=model, config=model.config)
        return {name: _one(x).view(dtype) for name, x in made.items()}


def _one(x: Any) -> torch.Tensor:
    return x[0] if isinstance(x, list) else x  # type: ignore[no-any-return]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


def _at_least_1d(x: torch.Tensor) -> torch.Tensor:
    return x.view(1) if x.dim() == 0 else x


def _empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Make the model on the meta device, of the class that config.json names."""
    names = getattr(config, "architectures", None) or ()
    made = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        if isinstance(made, type) and issubclass(made, PreTrainedModel):
            return made._from_config(config, dtype=dtype).eval()
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


# --- what goes where ------------------------------------------------------------------------------------


def _with_all_dimensions(entry: Entry, converter: WeightConverter | None, expected: torch.Tensor) -> Entry:
    """Return an expert's scales with both dimensions. transformers before 5.23 saves them without sizes of 1."""
    columns, count = expected.shape[-1:].numel(), math.prod(entry.shape)
    if converter is None or not _SCALE.search(entry.name) or expected.dim() != 3 or len(entry.shape) > 1:
        return entry
    return entry if count % columns else entry._replace(shape=(count // columns, columns))


def _targets(model: Any, entries: dict[str, Entry], conversions: list[Any], expected: dict[str, Any]) -> list[_Target]:
    """Assign the checkpoint's tensors to the model's. Warn about tensors that the model does not have."""
    renamings = [x for x in conversions if isinstance(x, WeightRenaming)]
    converters = [x for x in conversions if isinstance(x, WeightConverter)]
    of_pattern = {pattern: x for x in converters for pattern in x.source_patterns}
    targets: dict[str, _Target] = {}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    unknown = []
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            if not any(re.search(x, name) for x in ignored):
                unknown.append(name)
            continue
        converter = of_pattern[pattern] if pattern is not None else None
        own = targets.setdefault(target, _Target(target, converter))
        own.sources.append((pattern or name, _with_all_dimensions(entries[name], converter, expected[target])))
    if unknown:
        warnings.warn(f"{type(model).__name__} has no place for {listed(unknown)} of the checkpoint", stacklevel=3)
    return list(targets.values())


def _check_parts(target: _Target, expected: torch.Tensor) -> None:
    """Check that each expert has each part of merged weights, and that parts of one kind have one shape."""
    by_pattern: dict[str, list[Entry]] = {x: [] for x in target.converter.source_patterns}  # type: ignore[union-attr]
    for pattern, entry in target.sources:
        by_pattern[pattern].append(entry)
    first = target.sources[0][1]
    for pattern, entries in by_pattern.items():
        if not entries:
            raise ValueError(f"{first.file.parent} has no {pattern} beside {first.name} in {first.file.name}")
        shapes = [x.shape for x in entries]
        usual = max(shapes, key=shapes.count)
        for entry in entries:
            if entry.shape != usual:
                entry.fail(f"of shape {list(usual)}, as the same tensors of other experts", list(entry.shape))
        if "*" not in pattern:
            continue
        numbers = {int(re.findall(r"\.(\d+)\.", x.name)[-1]): x for x in entries}
        for i in range(len(expected)):
            if i not in numbers:
                other = next(iter(numbers.values()))
                head, _, tail = other.name.rpartition(f".{next(iter(numbers))}.")
                raise ValueError(
                    f"{first.file.parent} has no {head}.{i}.{tail}, beside {other.name} in {other.file.name}"
                )


def _scales(model: Any, expected: dict[str, torch.Tensor]) -> set[str]:
    """Return the names of the scales of packed weights and of their inputs."""
    paths = {f"{path}." for path, module in model.named_modules() if isinstance(module, _PACKED)}
    return {name for name in expected if _SCALE.search(name) and name.rpartition(".")[0] + "." in paths}


def _check_dtype(entry: Entry, wanted: torch.dtype, is_scale: bool) -> None:
    said, got = (str(x).removeprefix("torch.") for x in (wanted, entry.dtype))
    is_float = entry.dtype.is_floating_point
    if is_scale:
        if entry.dtype not in ((torch.uint8, _E8M0) if wanted == torch.uint8 else _SCALE_DTYPES):
            entry.fail("a scale in float32, in 16 bits or in E8M0", got)
    elif (entry.dtype == FP8) != (wanted == FP8):
        entry.fail(f"{said}, as config.json says", got)
    elif is_float != wanted.is_floating_point or (not is_float and entry.dtype.itemsize != wanted.itemsize):
        entry.fail(said, got)


def _check_shapes(target: _Target, made: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    entry = target.sources[0][1]
    for name, x in made.items():
        wanted = tuple(expected[name].shape)
        if x.shape == wanted or x.numel() == 1 == expected[name].numel():
            continue
        if target.converter is None:
            entry.fail(f"of shape {list(wanted)}", list(entry.shape))
        entry.fail(f"of a shape that makes {name} {list(wanted)}", f"{list(entry.shape)}, which makes {list(x.shape)}")


def _check(
    model: Any, folder: Path, targets: list[_Target], expected: dict[str, torch.Tensor], scales: set[str]
) -> None:
    """Check the names, dtypes and shapes of all tensors, before any is read."""
    found: set[str] = set()
    for target in targets:
        entry = target.sources[0][1]
        for _, source in target.sources:
            _check_dtype(source, expected[target.name].dtype, target.name in scales)
        if target.converter is not None:
            _check_parts(target, expected[target.name])
        try:
            shapes = [torch.empty(x.shape, dtype=x.dtype, device="meta") for _, x in target.sources]
            made = target.convert(model, shapes)
        except (IndexError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{entry.name} in {entry.file} does not become {target.name}: {reason}") from None
        _check_shapes(target, made, expected)
        found.update(made)
    tied = model.all_tied_weights_keys
    others = {*tied} | {source for target, source in tied.items() if target in found}
    ignored = model._keys_to_ignore_on_load_missing or ()
    for name in expected:
        if name not in found and name not in others and not any(re.search(x, name) for x in ignored):
            files = sorted({x.file.name for target in targets for _, x in target.sources})
            raise ValueError(f"{folder} has no tensor {name} in {listed(files)}, and config.json asks for it")


# --- reading --------------------------------------------------------------------------------------------


def _check_numbers(entry: Entry, tensor: torch.Tensor) -> None:
    is_nan = tensor == _NAN_E8M0 if tensor.dtype == torch.uint8 else tensor.float().isnan()
    if bool(is_nan.any()):
        raise ValueError(f"{entry.name} in {entry.file} has a scale that is NaN")


def _placed(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor in the dtype of the model. None: a scale, which stays in float32 or in E8M0."""
    if dtype is not None:
        return x.to(dtype)
    x = x.view(_E8M0) if x.dtype == torch.uint8 else x
    return x if x.dtype == _E8M0 else x.float()


def _assign(model: Any, name: str, tensor: torch.Tensor) -> None:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if own in module._buffers:
        module._buffers[own] = tensor
    else:
        before = module._parameters[own]
        tensor = torch.nn.Parameter(tensor, requires_grad=before.requires_grad and tensor.is_floating_point())
        module._parameters[own] = tensor
    # `initialize_weights` skips tensors with this attribute.
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def _packed_experts(model: Any) -> dict[str, tuple[Mxfp4Experts, str]]:
    """Return the names of the checkpoint's blocks, with their module and projection."""
    return {
        f"{path}.{name}{_BLOCKS}": (module, name)
        for path, module in model.named_modules()
        if isinstance(module, Mxfp4Experts)
        for name in module.sizes
    }


def _dtypes(
    model: Any, expected: dict[str, torch.Tensor], scales: set[str], dtype: torch.dtype
) -> dict[str, torch.dtype | None]:
    """Return the dtype of each tensor of the model; None for scales. Some modules stay in float32."""
    plan = model._get_dtype_plan(dtype)
    pattern = build_glob_alternation(list(plan))[0] if plan else None
    found: dict[str, torch.dtype | None] = {}
    for name, x in expected.items():
        stays = pattern is not None and x.dtype == dtype and pattern.search(name)
        found[name] = None if name in scales else torch.float32 if stays else x.dtype
    return found


def _reading_order(targets: list[_Target]) -> Iterator[tuple[_Target, int]]:
    """Yield each tensor of the checkpoint, file by file, as a target and the index of a source."""
    places = [(target, i) for target in targets for i in range(len(target.sources))]
    files = sorted({target.sources[i][1].file for target, i in places})
    for file in files:
        yield from (place for place in places if place[0].sources[place[1]][1].file == file)


class _Read:
    """The sources of a target that have been read. Experts are copied into their merged weights at once."""

    def __init__(self, target: _Target, wanted: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.target, self.wanted, self.dtype = target, wanted, dtype
        self.places = target.places()
        self.merged: torch.Tensor | None = None
        self.tensors: dict[int, torch.Tensor] = {}
        self.count = 0

    def add(self, i: int, tensor: torch.Tensor) -> None:
        if self.dtype is None:
            entry = self.target.sources[i][1]
            _check_numbers(entry, tensor)
            tensor = tensor.reshape(entry.shape)
        self.count += 1
        if self.places is None:
            # The tensors of the CPU share memory with the file.
            self.tensors[i] = tensor.clone() if tensor.device.type == "cpu" else tensor
            return
        tensor = _at_least_1d(_placed(tensor, self.dtype))
        if self.merged is None:
            self.merged = torch.empty(self.wanted.shape, dtype=tensor.dtype, device=tensor.device)
        expert, rows = self.places[i]
        _bytes(self.merged)[expert, rows] = _bytes(tensor)

    @property
    def is_complete(self) -> bool:
        return self.count == len(self.target.sources)

    def results(self, model: Any) -> dict[str, torch.Tensor]:
        if self.merged is not None:
            return {self.target.name: self.merged}
        return self.target.convert(model, [self.tensors[i] for i in range(self.count)])


def _fill(
    model: Any, targets: list[_Target], expected: dict[str, torch.Tensor], dtypes: dict[str, torch.dtype | None],
    device: torch.device, shown: bool | None,
) -> None:  # fmt: skip
    reader, packed = Reader(device), _packed_experts(model)
    scales_of = {target.name: target for target in targets}
    pending: dict[str, _Read] = {}
    for module, _ in packed.values():
        module.allocate(device)
    try:
        with progress_bar("loading", sum(len(x.sources) for x in targets), shown) as advance:
            for target, i in _reading_order(targets):
                entry = target.sources[i][1]
                if target.name in packed:
                    module, name = packed[target.name]
                    scales = scales_of[target.name.removesuffix(_BLOCKS) + _SCALES].sources[0][1]
                    _fill_experts(reader, module, name, entry, scales)
                elif target.name.removesuffix(_SCALES) + _BLOCKS not in packed:
                    if target.name not in pending:
                        pending[target.name] = _Read(target, expected[target.name], dtypes[target.name])
                    pending[target.name].add(i, reader.tensor(entry))
                    if pending[target.name].is_complete:
                        for name, x in pending.pop(target.name).results(model).items():
                            _assign(model, name, _placed(x, dtypes[name]).reshape(expected[name].shape))
                advance(1, entry.file.name)
    finally:
        reader.close()


def _fill_experts(reader: Reader, module: Mxfp4Experts, name: str, blocks: Entry, scales: Entry) -> None:
    """Pack the weights of one projection, one expert at a time."""
    of_all = reader.tensor(scales).view(torch.uint8)
    _check_numbers(scales, of_all)
    for expert in range(len(of_all)):
        module.fill(name, expert, reader.part(blocks, expert), of_all[expert])


def _finish(model: Any, folder: Path, device: torch.device) -> None:
    """Compute what no checkpoint holds, such as the angles of rotary embeddings, and tie weights."""
    for name, x in [*model.named_non_persistent_buffers()]:
        path, _, own = name.rpartition(".")
        model.get_submodule(path)._buffers[own] = torch.empty_like(x, device=device)
    for x in model.parameters():
        x._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    missing = {name for name, x in model.named_parameters(remove_duplicate=False) if x.is_meta}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.is_meta:
            raise ValueError(f"{folder} has no tensor {name}, and {type(model).__name__} cannot compute it")
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def load(directory: Any, *, device: Any = None, dtype: Any = None, progress: bool | None = None) -> Any:
    """Load a model of transformers with its weights packed, and enable it.

    FP8 and MXFP4 weights are not dequantized. The files are read one after another, and the peak of memory is the size
    of the packed weights plus one file.

    Args:
        directory: a directory with config.json and either model.safetensors or model.safetensors.index.json and its
            files. Files of other kinds are never read.
        device: the device of the weights, the CPU or a CUDA device. None: the current CUDA device, or the CPU if there
            is none.
        dtype: torch.bfloat16 or torch.float16 (with 16-bit weights also torch.float32), the dtype of activations and
            of weights that are not packed. None: the dtype that config.json names.
        progress: whether to show a progress bar; None: only on a terminal.

    Returns:
        The model, in evaluation mode, as `enable` makes it. With packed weights no parameter requires a gradient. FP8
        weights (quant_method "fp8") are in `FP8Linear` and `FP8Experts` of transformers, and `disable` restores their
        `forward`. transformers has no modules for MXFP4 weights in this layout, and none without further packages for
        weights of compressed-tensors: these modules of cukern remain after `disable`. `save_pretrained` writes the
        format of the checkpoint.

    Raises:
        FileNotFoundError, NotADirectoryError: a missing directory or file.
        ValueError: a format that is not read (AWQ, GPTQ, W4A16, expert_dtype fp4, other block sizes), a missing tensor,
            a wrong shape or dtype, a truncated file, or a scale that is NaN. The message names the tensor and the file.

    Example:
        >>> import cukern as ck
        >>> model = ck.load("gpt-oss-20b")  # doctest: +SKIP
    """
    from cukern.integrations.transformers import enable

    folder = expect_directory(directory)
    read_config(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    quantization = _formats.quantization_of(config)
    _formats.check(folder, config, quantization)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if place.type not in ("cpu", "cuda"):
        check.fail("device", "the CPU or a CUDA device", place)
    if place.type == "cuda" and not torch.cuda.is_available():
        check.fail("device", "'cpu', for torch finds no GPU here", repr(device))
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    named = getattr(config, "dtype", None)
    chosen = dtype or (named if isinstance(named, torch.dtype) else torch.bfloat16)
    halves = (torch.bfloat16, torch.float16)
    if chosen not in (halves if quantization else (*halves, torch.float32)):
        check.fail("dtype" if dtype else f"dtype in {folder / 'config.json'}",
                   "torch.bfloat16 or torch.float16 with packed weights" if quantization else
                   "torch.bfloat16, torch.float16 or torch.float32", chosen)  # fmt: skip
    entries = read_entries(folder)
    model = _empty_model(config, chosen)
    conversions = _formats.replace_modules(model, quantization, entries, place)
    expected = model.state_dict()
    targets = _targets(model, entries, conversions, expected)
    scales = _scales(model, expected)
    _check(model, folder, targets, expected, scales)
    _fill(model, targets, expected, _dtypes(model, expected, scales, chosen), place, progress)
    model._weight_conversions = [x for x in conversions if x.was_used()]
    _finish(model, folder, place)
    if quantization:
        model.requires_grad_(False)
    enable(model)
    return model
