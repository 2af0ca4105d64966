"""`cukern doctor --vllm MODEL`: what cukern would take of a model in vLLM, by the model's configuration.

vLLM need not be installed. The engine decides again, by its own settings, and logs what it takes.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cukern.commands import UserError
from cukern.commands.models_of import Model, models_of
from cukern.integrations.vllm import TESTED, VARIABLE, chosen_seams
from cukern.integrations.vllm._limits import CAPABILITY, why_not_head, why_not_sizes

_EXPERTS = {None: "16-bit", "fp8_block": "FP8 block", "mxfp4": "MXFP4"}
INSTALL = 'pip install "cukern[vllm]"'


class Line(NamedTuple):
    """A line of the report. `fix` is a command; "" for none."""

    subject: str
    state: str
    is_ok: bool = True
    fix: str = ""


def _version() -> Line:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return Line("vLLM", "not installed", False, INSTALL)
    if ".".join(version.split(".")[:2]) not in TESTED:
        return Line("vLLM", f"{version}: runs without cukern, which is tested with {', '.join(TESTED)}", False, INSTALL)
    return Line("vLLM", version)


def _experts(model: Model) -> Line | None:
    if not model.experts:
        return None
    what = _EXPERTS.get(model.quantization)
    sizes = f"{model.experts} of {model.hidden} x {model.expert_inter}"
    if what is None:
        return Line("experts", f"leaves {model.quantization} experts, {sizes}, to vLLM: their quantization", False)
    why = why_not_sizes(what, model.hidden, model.expert_inter)
    if model.dtype not in (("bfloat16",) if what == "MXFP4" else ("bfloat16", "float16")):
        why = f"the dtype is {model.dtype}"
    tail = "" if why is None else f", to vLLM: {why}"
    return Line("experts", f"{'takes' if why is None else 'leaves'} {what} experts, {sizes}{tail}", why is None)


def _attention(model: Model) -> Line:
    if model.kind.is_latent:
        return Line("attention", "leaves MLA to vLLM", False)
    has = [f"a window of {model.window}"] * (model.window is not None) + ["sinks"] * model.kind.has_sinks
    what = f"attention, heads of {model.head_dim} in {model.dtype}{', with ' * bool(has)}{' and '.join(has)}"
    why = why_not_head(model.head_dim)
    if model.dtype not in ("bfloat16", "float16"):
        why = f"the dtype is {model.dtype}"
    if why is None:
        return Line("attention", f"takes {what}")
    return Line("attention", f"leaves {what}, to vLLM: {why}", False)


def look_at_vllm(wanted: str, capabilities: Sequence[tuple[int, int]]) -> Iterator[Line]:
    """Yield the lines of the report.

    Args:
        wanted: a model's directory with a config.json, or a name of `cukern compile --for`.
        capabilities: the compute capabilities of the machine's GPUs.

    Raises:
        UserError: an unknown model, or a configuration without a needed size.
    """
    try:
        models = models_of(wanted)
        seams = chosen_seams(os.environ.get(VARIABLE))
    except UserError as error:
        raise UserError(str(error).replace("--for", "--vllm")) from None
    except ValueError as error:
        raise UserError(str(error)) from None
    yield _version()
    if CAPABILITY not in capabilities:
        yield Line("GPU", "none of compute capability 9.0: without one, everything stays on vLLM's kernels", False)
    for model in models:
        if len(models) > 1:
            yield Line("model", f"{model.experts or 'no'} experts, hidden size {model.hidden}")
        for line in (_experts(model), _attention(model)):
            if line is not None and line.subject not in seams:
                yield Line(line.subject, f"off ({VARIABLE}={os.environ.get(VARIABLE)})", False)
            elif line is not None:
                yield line
