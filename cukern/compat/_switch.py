"""Install and remove the modules of `cukern.compat` under the names of other libraries."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from cukern.compat._limits import RAISES, not_covered, not_covered_message
from cukern.runtime import check


class Peer(NamedTuple):
    """A library that `cukern.compat` can replace.

    `release` is the version of the library whose signatures the replacements have. `modules` maps each module's name to
    its replacement in `cukern.compat`.
    """

    release: str
    modules: dict[str, str]


_SGL_KERNEL_MODULES = ("attention", "elementwise", "gemm", "moe", "sampling")
PEERS = {
    "vllm": Peer(
        "0.33.0",
        {
            "vllm._custom_ops": "vllm._custom_ops",
            "vllm.model_executor.layers.fused_moe.moe_permute_unpermute": "vllm.moe_permute_unpermute",
        },
    ),
    "sglang": Peer(
        "0.4.2.post2",
        {"sgl_kernel": "sglang", "sgl_kernel.flash_mla": "sglang.flash_mla"}
        | {f"sgl_kernel.{name}": "sglang" for name in _SGL_KERNEL_MODULES},
    ),
    "flashinfer": Peer(
        "0.7.2.post1",
        {"flashinfer": "flashinfer"}
        | {f"flashinfer.{name}": f"flashinfer.{name}" for name in ("sampling", "norm", "activation", "page")},
    ),
    "flash_mla": Peer("1.0.0", {"flash_mla": "flash_mla", "flash_mla.flash_mla_interface": "flash_mla"}),
    "flash_attn": Peer("2.8.3.post2", {"flash_attn": "flash_attn", "flash_attn.flash_attn_interface": "flash_attn"}),
    "flash_attn_3": Peer(
        "3.0.0", dict.fromkeys(("flash_attn_interface", "flash_attn_3.flash_attn_interface"), "flash_attn.flash_attn_3")
    ),
    # A peer of its own, because its function refuses the FP8 caches, and the `q_v` of MLA, that vLLM's function takes.
    "vllm_flash_attn": Peer(
        "0.26.0",
        dict.fromkeys(
            ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"), "flash_attn.vllm_flash_attn"
        ),
    ),
}


class _Change(NamedTuple):
    """A value that `enable` replaced in the attributes of a module or in `sys.modules`."""

    namespace: dict[str, Any]
    name: str
    before: Any  # _MISSING if the name did not exist
    after: Any


#: These functions share a plan object, whose class differs between the library and cukern. So replace all of them or
#: none.
_SHARE_PLAN = {"FlashMLASchedMeta", "flash_mla_with_kvcache", "get_flash_mla_metadata", "get_mla_metadata"}
_MISSING = object()
_LOCK = threading.RLock()
_changes: dict[str, list[_Change]] = {}


def _compat_module(name: str) -> ModuleType:
    return importlib.import_module(f"cukern.compat.{name}")


def _functions(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module of `cukern.compat`, except functions that only raise."""
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value) and not hasattr(value, RAISES):
            yield name, value


def _assign(changes: list[_Change], namespace: dict[str, Any], name: str, value: Any) -> None:
    changes.append(_Change(namespace, name, namespace.get(name, _MISSING), value))
    namespace[name] = value


# --- libraries that are not installed -----------------------------------------------------------------


class _Submodules(importlib.abc.MetaPathFinder):
    """Raises an error with an explanation for a submodule that `cukern.compat` does not have."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        # Frame 2, the caller of importlib's `_find_spec`, shows whether this is an import.
        is_import = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
        if is_import and path and _FAKE_PATH in path:
            message = not_covered_message(fullname, "cukern.compat", fullname.partition(".")[0])
            raise ModuleNotFoundError(message, name=fullname)


_SUBMODULES = _Submodules()
#: The `__path__` of a package that replaces a library. No such folder exists.
_FAKE_PATH = "<cukern.compat>"


def _make_replacement(name: str, source: str | None, release: str) -> ModuleType:
    """Make a module `name` with the contents of `cukern.compat.<source>`; None: an empty package."""
    module = ModuleType(name, f"{name}, as far as cukern has it (cukern.compat.enable).")
    vars(module)["__getattr__"] = not_covered("cukern.compat", name)
    if source is not None:
        compat = _compat_module(source)
        vars(module).update(
            {attribute: getattr(compat, attribute) for attribute in compat.__all__}, __all__=list(compat.__all__)
        )
        vars(module)["__getattr__"] = vars(compat)["__getattr__"]
    vars(module).update(__path__=[_FAKE_PATH], __version__=release, __spec__=ModuleSpec(name, None, is_package=True))
    return module


def _add_modules(peer: Peer, changes: list[_Change]) -> str:
    """Add replacements for the library's modules and their parent packages to `sys.modules`."""
    if _SUBMODULES not in sys.meta_path:
        sys.meta_path.append(_SUBMODULES)
    names = {name.rsplit(".", depth)[0] for name in peer.modules for depth in range(name.count(".") + 1)}
    for name in sorted(names - sys.modules.keys()):
        module = _make_replacement(name, peer.modules.get(name), peer.release)
        _assign(changes, sys.modules, name, module)  # type: ignore[arg-type]
        parent, _, child = name.rpartition(".")
        if parent:
            _assign(changes, vars(sys.modules[parent]), child, module)
    return f"is not installed: {', '.join(sorted(peer.modules))} are modules of cukern now"


# --- installed libraries ------------------------------------------------------------------------------


def _accepts_calls_of(ours: Any, theirs: Any) -> bool:
    """Return whether every valid call of `theirs` is a valid call of `ours`."""
    try:
        our_parameters, their_parameters = (
            list(inspect.signature(function).parameters.values()) for function in (ours, theirs)
        )
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in our_parameters):
        return True
    names = [parameter.name for parameter in their_parameters]
    additional = our_parameters[len(names) :]
    return [parameter.name for parameter in our_parameters[: len(names)]] == names and all(
        parameter.default is not parameter.empty for parameter in additional
    )


def _replace(name: str, source: str, changes: list[_Change]) -> tuple[list[str], list[str]]:
    real = vars(sys.modules[name])
    found = {
        name: value for name, value in _functions(_compat_module(source)) if name in real and real[name] is not value
    }
    skipped = {
        name for name, value in found.items() if inspect.isfunction(value) and not _accepts_calls_of(value, real[name])
    }
    if skipped & _SHARE_PLAN:
        skipped |= _SHARE_PLAN & {*found}
    replaced = [name for name in found if name not in skipped]
    for function in replaced:
        _assign(changes, real, function, found[function])
    return replaced, sorted(skipped)


def _modules_with_originals(changes: list[_Change]) -> list[str]:
    """Return the modules that imported the library's own functions by name before `enable`."""
    before = {id(change.before) for change in changes if callable(change.before)}
    namespaces = {id(change.namespace) for change in changes}
    found = set()
    for name, module in [*sys.modules.items()]:
        namespace = getattr(module, "__dict__", None)
        if namespace is None or id(namespace) in namespaces or name.partition(".")[0] == "cukern":
            continue
        if any(id(value) in before for value in [*namespace.values()]):
            found.add(name)
    return sorted(found)


def _replace_functions(peer: Peer, was_imported: bool, changes: list[_Change]) -> list[str]:
    lines = []
    for name, source in peer.modules.items():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # The installed release may lack the module `name` or its parents. Any other missing module is an error.
            if not error.name or not f"{name}.".startswith(f"{error.name}."):
                raise
            lines.append(f"{name} is not in this release")
            continue
        replaced, skipped = _replace(name, source, changes)
        lines.append(f"{name}: replaced {', '.join(replaced) or 'nothing'}")
        if skipped:
            lines.append(f"{name}: left as they were, for arguments are others: {', '.join(skipped)}")
    if was_imported:
        lines.insert(0, "was imported before")
        holders = _modules_with_originals(changes)
        if holders:
            lines.append(f"functions imported by name before are still its own in {', '.join(holders)}")
    return lines


def _is_installed(root: str) -> bool:
    if root in sys.modules:
        return _FAKE_PATH not in (getattr(sys.modules[root], "__path__", None) or ())
    return importlib.util.find_spec(root) is not None


def _enable(name: str) -> list[str]:
    peer, changes = PEERS[name], list[_Change]()
    root = next(iter(peer.modules)).partition(".")[0]
    was_imported = root in sys.modules
    try:
        if _is_installed(root):
            lines = _replace_functions(peer, was_imported, changes)
        else:
            lines = [_add_modules(peer, changes)]
    except BaseException:
        _undo(changes)
        raise
    _changes[name] = changes
    return [f"{root} {lines[0]}", *lines[1:]] if lines[0].startswith(("is ", "was ")) else lines


def _undo(changes: list[_Change]) -> list[str]:
    """Restore the values from before `enable`. Skip the names that other code has changed since, and return them."""
    kept = []
    for namespace, name, before, after in reversed(changes):
        if namespace.get(name, _MISSING) is not after:
            kept.append(name)
        elif before is _MISSING:
            del namespace[name]
        else:
            namespace[name] = before
    return kept


def _check(names: tuple[str, ...]) -> None:
    for name in names:
        check.one_of("name", name, PEERS)


def enable(*names: str) -> tuple[str, ...]:
    """Install cukern's functions under the names of other libraries.

    If a library is not installed, `enable` adds modules with its names to `sys.modules`. Otherwise `enable` imports it,
    and replaces the functions that cukern covers, except functions whose arguments differ in the installed release.
    Call `enable` before the program imports functions by name, because earlier imports keep the library's functions.
    Torch operators (`torch.ops._C`) are not changed.

    Args:
        names: one or more of "vllm", "sglang" (its `sgl_kernel`), "flashinfer", "flash_mla", "flash_attn",
            "flash_attn_3" (`flash_attn_interface`) and "vllm_flash_attn" (`vllm.vllm_flash_attn`).

    Returns:
        A description of the changes. If other modules keep functions of the library, there is also a UserWarning.

    Raises:
        ValueError: an unknown name; then nothing is changed.
        ImportError: an installed library cannot be imported; then nothing is changed in it.
    """
    _check(names)
    done: list[str] = []
    with _LOCK:
        for name in names:
            if name in _changes:
                done.append(f"{name} is enabled already")
                continue
            lines = _enable(name)
            if any("still its own" in line for line in lines):
                warnings.warn("; ".join(lines), UserWarning, stacklevel=2)
            done += lines
    return tuple(done)


def disable(*names: str) -> tuple[str, ...]:
    """Undo `enable` for these libraries; for all libraries if `names` is empty. Return a description of the changes.

    A name that other code has changed since `enable` is not restored. Raises ValueError for an unknown name.
    """
    _check(names)
    done = []
    with _LOCK:
        for name in names or tuple(_changes):
            changes = _changes.pop(name, None)
            if changes is None:
                done.append(f"{name} is not enabled")
                continue
            kept = _undo(changes)
            done.append(f"{name}: restored" + (f", but for {', '.join(kept)}, changed since" if kept else ""))
    return tuple(done)


def enabled() -> tuple[str, ...]:
    """Return the enabled libraries."""
    with _LOCK:
        return tuple(_changes)
