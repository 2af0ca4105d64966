"""Token ids and masks as the models take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cukern.models._layers import library_of
from cukern.runtime import check

_IDS = ("int32", "int64")
_MASKS = ("bool", "uint8", "int8", "int32", "int64")


def check_batch(input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> tuple[int, int]:
    """The sizes batch and seq of token ids [batch, seq]; the mask and the types, or None, must fit them.

    Raises TypeError for what is no array and for a dtype, ValueError for a shape; the message names the argument.
    """
    check.dtype("input_ids", library_of("input_ids", input_ids).dtype(input_ids), _IDS)
    check.dimensions("input_ids", tuple(input_ids.shape), ("batch", "seq"))
    for name, array, dtypes in (("attention_mask", attention_mask, _MASKS), ("token_type_ids", token_type_ids, _IDS)):
        if array is not None:
            check.dtype(name, library_of(name, array).dtype(array), dtypes)
            check.shape(name, tuple(array.shape), tuple(input_ids.shape), "[batch, seq]")
    batch, seq = input_ids.shape
    return batch, seq


def check_ids(name: str, ids: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None, size: int) -> None:
    """Raises ValueError for the first id that is out of [0, size) where `counts`, if given, is not 0."""
    outside = (ids < 0) | (ids >= size)
    if counts is not None:
        outside &= counts != 0
    if outside.any():
        place = tuple(int(x) for x in np.argwhere(outside)[0])
        check.fail(f"{name}[{', '.join(map(str, place))}]", f"in [0, {size})", int(ids[place]))
