"""Read the files of a checkpoint: headers first, then one tensor at a time. Only safetensors files are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from cukern.models.checkpoint import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
#: The largest header that safetensors accepts, in bytes.
_MAX_HEADER = 100_000_000


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    def fail(self, wanted: str, got: object) -> Any:
        raise ValueError(f"{self.name} in {self.file} must be {wanted}, got {got}")


def _files(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        others = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
        found = f", but {', '.join(others)}, which may hold code" if others else ""
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}{found}")
    content = read_json(folder / INDEX)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(x, str) for x in names.values()):
        raise ValueError(f"{folder / INDEX} must have an object 'weight_map' of file names")
    for name in sorted({*names.values()}):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} must name files of its own directory, got {name!r}")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}, which {INDEX} names")
    return [folder / name for name in sorted({*names.values()})]


def _header(file: Path) -> dict[str, Entry]:
    """Read the names, dtypes and shapes of a file's tensors. Raises ValueError if the file ends too early."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER):
            raise ValueError(f"{file} is truncated or no safetensors file: it ends before its header")
        try:
            content = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ValueError(f"{file} is no safetensors file: its header is not JSON") from None
    found = {}
    try:
        for name, of in content.items():
            if name == "__metadata__":
                continue
            (_, end), dtype = of["data_offsets"], of["dtype"]
            if dtype not in _DTYPES:
                raise ValueError(f"{name} in {file} must have a dtype among {', '.join(_DTYPES)}, got {dtype}")
            if 8 + length + end > size:
                end += 8 + length
                raise ValueError(f"{file} is truncated: {name} ends at byte {end}, and the file has {size} bytes")
            found[name] = Entry(name, file, _DTYPES[dtype], tuple(map(int, of["shape"])))
    except (AttributeError, KeyError, TypeError):
        raise ValueError(f"{file} is no safetensors file: its header does not describe tensors") from None
    return found


def read_entries(folder: Path) -> dict[str, Entry]:
    """Return the tensors of all files by name, from the files' headers.

    Raises FileNotFoundError for a missing file, and ValueError for a truncated or malformed file, or for a tensor in
    two files.
    """
    entries: dict[str, Entry] = {}
    for file in _files(folder):
        for name, entry in _header(file).items():
            if name in entries:
                raise ValueError(f"{file} holds {name}, which {entries[name].file} holds too")
            entries[name] = entry
    return entries


class Reader:
    """The open file of the latest tensor. Files are read in order, so each file is opened once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._file: Path | None = None
        self._open: Any = None

    def _read(self, entry: Entry, take: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        try:
            if self._file != entry.file:
                self.close()
                self._open = safe_open(entry.file, "pt", device=str(self.device)).__enter__()
                self._file = entry.file
            return take(self._open)
        except SafetensorError as error:
            raise ValueError(f"{entry.name} in {entry.file} cannot be read: {error}") from None

    def tensor(self, entry: Entry) -> torch.Tensor:
        """Read a tensor. On the CPU it shares memory with the file."""
        return self._read(entry, lambda file: file.get_tensor(entry.name))

    def part(self, entry: Entry, index: int) -> torch.Tensor:
        """Read one index of a tensor's first dimension."""
        return self._read(entry, lambda file: file.get_slice(entry.name)[index : index + 1])[0]

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._file = None
