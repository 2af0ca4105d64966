"""Read a model's directory in the format of transformers or sentence-transformers."""

from __future__ import annotations

import importlib
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cukern.runtime import check
from cukern.runtime.cuda import cupy, need_cupy

LIBRARIES = ("torch", "cupy", "numpy")
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_PICKLED = "pytorch_model.bin"
_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
#: NumPy's names of safetensors' dtypes. Tensors of the dtypes in `_BUFFERS` are not weights.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_BUFFERS = {"I64": "int64", "I32": "int32", "I16": "int16", "BOOL": "bool"}


def need(package: str, what: str, extra: str = "models") -> Any:
    """Import an optional package, or raise ImportError with the feature `what` and the pip command."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'{what} needs the package {package}: pip install "cukern[{extra}]"') from error


def expect_directory(path: str | Path) -> Path:
    """Return a model's directory, or raise FileNotFoundError or NotADirectoryError."""
    folder, wanted = Path(path), "path must be a model's directory"
    if folder.is_dir():
        return folder
    if folder.exists():
        raise NotADirectoryError(f"{wanted}, got {folder}, which is a file")
    advice = ""
    if _HUB_NAME.fullmatch(str(path)):
        command = f"hf download {path} --local-dir {folder.name}"
        advice = f"; if it is a model of the Hugging Face Hub, download it first: `{command}`"
    raise FileNotFoundError(f"{wanted}, got {path}, which does not exist{advice}")


def read_json(file: Path) -> Any:
    """Read a JSON file, or raise ValueError."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not a JSON file: {error}") from None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. Raises FileNotFoundError for a missing file, and ValueError if it holds no JSON object."""
    file = folder / _CONFIG
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no {_CONFIG}, which says what model it is")
    config = read_json(file)
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return config


def read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def content(name: str, config: Any) -> Mapping[str, Any]:
    """Return the argument `name`, a dictionary or a configuration of transformers, as a dictionary."""
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        check.fail(name, "a dictionary, or a configuration of transformers", type(config).__name__, TypeError)
    return found


def _weight_files(folder: Path, library: str) -> list[Path]:
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.is_file() and library == "torch" and (folder / _PICKLED).is_file():
        return [folder / _PICKLED]
    if not index.is_file():
        others = sorted(file.name for kind in ("*.bin", "*.pt", "*.h5") for file in folder.glob(kind))
        found = f" (it has {', '.join(others)}: transformers' save_pretrained writes safetensors)" if others else ""
        raise FileNotFoundError(f"{folder} has neither {_WEIGHTS} nor {_INDEX}{found}")
    content = read_json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{index} must have an object 'weight_map'")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{folder} has no {file.name}, which {_INDEX} names")
    return files


def choose_library(library: str | None) -> str:
    """Return `library` if it is given, else the first library that is available: torch, CuPy on a GPU, NumPy."""
    if library is not None:
        return check.one_of("library", library, LIBRARIES)
    return "torch" if importlib.util.find_spec("torch") else "cupy" if _gpu_for_cupy() else "numpy"


def _gpu_for_cupy() -> bool:
    from cukern.runtime import kernel

    return cupy is not None and kernel.device_count() > 0


def read_weights(folder: Path, library: str | None, device: Any) -> dict[str, Any]:
    """Return the weights by name, as arrays of `choose_library(library)`.

    `device` is a torch device, or a number for CuPy; None is the current GPU, or the CPU without a GPU. Raises
    FileNotFoundError for a missing file, ImportError if safetensors or the library is not installed, and ValueError for
    a malformed file and for a weight in two files.
    """
    library = choose_library(library)
    files = _weight_files(folder, library)
    place: Any = None
    if library == "torch":
        torch = need("torch", "library='torch'", "torch")
        place = str(torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device))
        if place.startswith("cuda") and not torch.cuda.is_available():
            check.fail("device", "'cpu', for torch finds no GPU here", repr(device))
    elif library == "numpy" and device not in (None, "cpu"):
        check.fail("device", "None or 'cpu' with library='numpy'", repr(device))
    elif library == "cupy":
        need_cupy("library='cupy'")
        if not _gpu_for_cupy():
            check.fail("library", "'torch' or 'numpy', for CuPy finds no GPU here", repr(library))
        place = None if device is None else check.integer("device", device, 0)
    if files[0].name == _PICKLED:
        return _read_pickle(files[0], place)
    safetensors = need("safetensors", "reading weights")
    weights: dict[str, Any] = {}
    for file in files:
        try:
            with safetensors.safe_open(file, "pt" if library == "torch" else "np", **_on(library, place)) as tensors:
                for name in tensors.keys():  # noqa: SIM118  (the file is not iterable)
                    if name in weights:
                        raise ValueError(f"{file} holds {name}, which another file holds too")
                    if (weight := _read(tensors, name)) is not None:
                        weights[name] = weight
        except safetensors.SafetensorError as error:
            raise ValueError(f"{file} is not a safetensors file: {error}") from None
    return _to_cupy(weights, place) if library == "cupy" else weights


def _on(library: str, place: Any) -> dict[str, Any]:
    return {"device": place} if library == "torch" else {}


def _read(tensors: Any, name: str) -> Any:
    """Return a tensor, or None for an integer tensor, which is a buffer."""
    kind = tensors.get_slice(name).get_dtype()
    return tensors.get_tensor(name) if _is_weight(name, _DTYPES.get(kind) or _BUFFERS.get(kind) or kind) else None


def _is_weight(name: str, dtype: str) -> bool:
    """Return whether a tensor is a weight and not an integer buffer. Raises TypeError for a quantized tensor."""
    if dtype not in (*_DTYPES.values(), *_BUFFERS.values()):
        check.fail(name, "float32, float16 or bfloat16 (quantized weights are not taken)", dtype, TypeError)
    return dtype in _DTYPES.values()


def _read_pickle(file: Path, place: Any) -> dict[str, Any]:
    """Read only tensors of a torch file, so that no code in it runs."""
    torch = need("torch", f"reading {file}", "torch")
    try:
        state = torch.load(file, map_location=place, weights_only=True)
    except (EOFError, RuntimeError, pickle.UnpicklingError):
        # Hide torch's message, which suggests an option that runs the code in the file.
        raise ValueError(f"{file} is not a state dict that can be read as tensors alone") from None
    if not isinstance(state, dict) or not all(isinstance(x, torch.Tensor) for x in state.values()):
        raise ValueError(f"{file} is not a state dict: it holds more than tensors by name")
    return {name: x for name, x in state.items() if _is_weight(name, str(x.dtype).removeprefix("torch."))}


def _to_cupy(weights: dict[str, np.ndarray[Any, Any]], device: int | None) -> dict[str, Any]:
    with cupy.cuda.Device(device):
        return {name: cupy.asarray(weight) for name, weight in weights.items()}


def listed(names: Iterable[str], limit: int = 3) -> str:
    """Join the first `limit` of the sorted names, and count the others."""
    found = sorted(names)
    others = f" and {len(found) - limit} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + others
