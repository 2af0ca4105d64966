"""Write tests/vllm_signatures.json: what `cukern.integrations.vllm` uses of vLLM's sources, per release.

    python -m tests.vllm_signatures site-packages-of-0.26 site-packages-of-0.33

A tree holds the folder `vllm` and its dist-info, as an unpacked wheel does. The sources are only parsed, so vLLM's
packages are not needed.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
SOURCES = Path(__file__).parents[1] / "cukern" / "integrations" / "vllm"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
#: The names of each module. A name that the module imports from another one is recorded as "imported".
NAMES = {
    f"{_FUSED_MOE}.modular_kernel": ("FusedMoEActivationFormat", "FusedMoEExpertsModular"),
    f"{_FUSED_MOE}.activation": ("MoEActivation",),
    f"{_FUSED_MOE}.config": ("FusedMoEConfig", "FusedMoEParallelConfig", "FusedMoEQuantConfig"),
    f"{_FUSED_MOE}.topk_weight_and_reduce": ("TopKWeightAndReduceNoOP",),
    f"{_FUSED_MOE}.oracle.unquantized": ("UnquantizedMoeBackend", "select_unquantized_moe_backend"),
    f"{_FUSED_MOE}.oracle.fp8": ("Fp8MoeBackend", "backend_to_kernel_cls"),
    f"{_FUSED_MOE}.oracle.mxfp4": (
        "Mxfp4MoeBackend",
        "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format",
        "select_mxfp4_moe_backend",
    ),
    f"{_FUSED_MOE}.unquantized_fused_moe_method": ("select_unquantized_moe_backend",),
    f"{_QUANTIZATION}.mxfp4": ("convert_gpt_oss_weight_to_mxfp4_moe_kernel_format", "select_mxfp4_moe_backend"),
    f"{_QUANTIZATION}.utils.quant_utils": ("kFp8Dynamic128Sym", "kFp8Static128BlockSym", "kMxfp4Static"),
    "vllm.config": ("get_current_vllm_config",),
    "vllm.config.model": ("ModelConfig",),
    "vllm.config.parallel": ("ParallelConfig",),
    "vllm.envs": ("VLLM_BATCH_INVARIANT",),
    "vllm.platforms.interface": ("DeviceCapability", "Platform"),
    "vllm.platforms.cuda": ("CudaPlatformBase",),
    "vllm.utils.torch_utils": ("canonicalize_singleton_dim_strides",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionImpl",
        "AttentionMetadata",
        "AttentionMetadataBuilder",
        "AttentionType",
        "CommonAttentionMetadata",
    ),
    "vllm.v1.attention.backends.flash_attn": ("FlashAttentionBackend",),
    "vllm.v1.attention.selector": ("AttentionSelectorConfig",),
}


def _signature(node: ast.FunctionDef) -> str:
    """Return the parameters without annotations, as source text."""
    arguments = node.args
    for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if each is not None:
            each.annotation = None
    return f"({ast.unparse(arguments)})"


def _function(node: ast.FunctionDef) -> dict[str, Any]:
    marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    found: dict[str, Any] = {"signature": _signature(node)}
    for kind in ("staticmethod", "classmethod", "property", "cached_property"):
        if kind in marks:
            found["kind"] = kind.removeprefix("cached_")
    if "abstractmethod" in marks:
        found["abstract"] = True
    return found


def names_in_sources() -> set[str]:
    """Return the names of all methods, attributes and keywords in the sources of the integration."""
    found = set()
    for file in SOURCES.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)  # a name that `getattr` or `install` gets
    return found


def _value(node: ast.expr | None) -> Any:
    try:
        value = ast.literal_eval(node) if node else None
    except ValueError:
        return None
    return value if isinstance(value, (str, int, float, bool)) else None


class Tree:
    """The sources of a release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (dist,) = folder.glob("vllm-*.dist-info")
        self.release = dist.name.removeprefix("vllm-").removesuffix(".dist-info").split("+")[0]
        self.used = names_in_sources()

    def module(self, name: str) -> ast.Module | None:
        path = self.folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def _bases(self, node: ast.ClassDef, module: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.Module]]:
        """Yield a class's ancestors in vLLM, nearest first."""
        for base in node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found, where = self._definition(name, module)
            if isinstance(found, ast.ClassDef) and where is not None:
                yield found, where
                yield from self._bases(found, where)

    def _definition(self, name: str, module: ast.Module) -> tuple[ast.AST | None, ast.Module | None]:
        for node in module.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return node, module
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        other = self.module(node.module or "")
                        return self._definition(alias.name, other) if other else (None, None)
        return None, None

    def _class(self, node: ast.ClassDef, module: ast.Module) -> dict[str, Any]:
        """Return the methods and fields of a class and of its bases in vLLM: abstract ones, and ones that are used."""
        methods: dict[str, Any] = {}
        fields: dict[str, Any] = {}
        for each, _ in [(node, module), *self._bases(node, module)]:
            for part in each.body:
                if isinstance(part, ast.FunctionDef):
                    methods.setdefault(part.name, _function(part))
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    fields.setdefault(part.target.id, _value(part.value))
                elif isinstance(part, ast.Assign) and isinstance(part.targets[0], ast.Name):
                    fields.setdefault(part.targets[0].id, _value(part.value))
        methods = {k: v for k, v in methods.items() if v.get("abstract") or k in self.used}
        found = {"methods": methods, "fields": {k: v for k, v in fields.items() if k in self.used}}
        is_enum = any("Enum" in ast.unparse(base) for base in node.bases)
        return {**found, "enum": True} if is_enum else found

    def names(self, module_name: str, wanted: tuple[str, ...]) -> dict[str, Any]:
        module = self.module(module_name)
        found: dict[str, Any] = {}
        for node in module.body if module else ():
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                assert module
                found[node.name] = self._class(node, module)
            elif isinstance(node, ast.FunctionDef) and node.name in wanted:
                found[node.name] = _function(node)
            elif isinstance(node, ast.ImportFrom):
                found |= {x.name: "imported" for x in node.names if x.name in wanted and x.asname is None}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {x.id: "constant" for x in targets if isinstance(x, ast.Name) and x.id in wanted}
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                targets = [x.target for x in node.body if isinstance(x, ast.AnnAssign)]
                found |= {x.id: "constant" for x in targets if isinstance(x, ast.Name) and x.id in wanted}
        return dict(sorted(found.items()))


def main(folders: list[str]) -> None:
    trees = [Tree(Path(folder)) for folder in folders]
    table = {tree.release: {name: tree.names(name, wanted) for name, wanted in NAMES.items()} for tree in trees}
    FILE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
