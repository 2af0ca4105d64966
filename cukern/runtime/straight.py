"""Straight-line Python for the two steps of every call: reading its arguments, and running its plan.

The loops of `op` and `plan` are written out here, for one sequence of argument types or for one plan, as the text of a
function, which is compiled: it does the same in half the time. A plan gets its text after a few runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

_SIGNS = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.floordiv: "//",
    operator.truediv: "/",
    operator.mod: "%",
    operator.pow: "**",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.and_: "&",
    operator.or_: "|",
}


class Text:
    """The lines of a function, and the objects that they refer to by name."""

    def __init__(self, header: str) -> None:
        self.lines = [header]
        self.names: dict[str, Any] = {}

    def add(self, line: str) -> None:
        self.lines.append("    " + line)

    def name(self, value: Any) -> str:
        """An expression for an object that is the same in every call."""
        if type(value) is int or value is None:
            return repr(value)
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def computed(self, function: Callable[..., Any], numbers: Sequence[str]) -> str:
        """An expression for `function` of numbers, which are expressions too."""
        if function in _SIGNS and len(numbers) == 2:
            return f"({numbers[0]} {_SIGNS[function]} {numbers[1]})"
        return f"{self.name(function)}({', '.join(numbers)})"

    def compiled(self, file: str) -> Callable[..., Any]:
        function = self.lines[0].split("(")[0].removeprefix("def ")
        namespace = dict(self.names)
        exec(compile("\n".join(self.lines) + "\n", f"<{file}>", "exec"), namespace)
        return namespace[function]


def reader(
    name: str,
    of_types: Sequence[type],
    are_tensors: Sequence[bool],
    are_rows: Sequence[bool],
    are_late: Sequence[bool],
    late_mark: object,
) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], list[Any]] | None]:
    """A function of a call's values that gives the call's signature and the start of its environment.

    It serves values of these types, of which those of `are_tensors` are tensors and no other is an array. Where it
    returns None, the loop of `op` reads the call.
    """
    text = Text("def read(values):")
    key, addresses, lates = [], [], []
    text.add(", ".join(f"v{i}" for i in range(len(of_types))) + ", = values" if of_types else "pass")
    for i, (kind, is_tensor) in enumerate(zip(of_types, are_tensors, strict=True)):
        if is_tensor:
            text.add(f"s{i} = v{i}.shape")
            text.add(f"p{i} = v{i}.data_ptr()")
            addresses.append(f"p{i}")
            shape = f"s{i}"
            if are_rows[i]:
                text.add(f"if not s{i}: return None")
                lates.append(f"s{i}[0]")
                # As a plain tuple: torch.Size takes a third longer to be cut.
                shape = f"{text.name(tuple.__getitem__)}(s{i}, {text.name(slice(1, None))})"
            key.append(f"v{i}.dtype, v{i}.stride(), {shape}, v{i}.get_device()")
        elif are_late[i] and kind is not type(None):
            key.append(text.name(late_mark))
            lates.append(f"v{i}")
        elif kind is int or kind is str or kind is type(None):
            key.append(f"v{i}")
        else:
            key.append(f"{text.name(kind)}, v{i}")
    text.add(f"key = ({', '.join(key)}{',' if key else ''})")
    if addresses:
        text.add(f"if ({' | '.join(addresses)}) & 15: key += (({' & 15, '.join(addresses)} & 15,),)")
    text.add(f"return key, [{', '.join([*addresses, *lates])}]")
    return text.compiled(f"{name}: arguments")
