"""Run models of transformers on cukern's kernels.

    import cukern.integrations.transformers as ck

    model = AutoModelForCausalLM.from_pretrained(..., dtype="bfloat16", device_map="cuda")
    print(ck.enable(model))          # what was replaced, and what was not and why
    ck.generate(model, prompts, max_new_tokens=100)
    ck.disable(model)                # as it was
    model = ck.load("gpt-oss-20b")   # a checkpoint with FP8 or MXFP4 weights, which stay packed

Experts and attention are registered through interfaces of transformers. `enable` replaces the `forward` of each router,
norm and rotary embedding that computes the formula of a kernel. It compares module and kernel on random inputs, so it
needs no list of models.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from cukern.runtime.packages import missing

try:
    import torch
    from transformers import PreTrainedModel
except ModuleNotFoundError as error:
    raise missing(error, __name__, "transformers") from None

import cukern.torch_ops  # noqa: F401  (torch.compile keeps the calls in its graphs)
from cukern.integrations.transformers import _attention, _experts, _norms, _products, _rotary, _routers, _versions
from cukern.integrations.transformers._generate import Generated, generate
from cukern.integrations.transformers._load import load
from cukern.integrations.transformers._sampling import Sampler
from cukern.integrations.transformers._state import ATTRIBUTE, Line, Notes, Report, State
from cukern.runtime import check

__all__ = ["PARTS", "Generated", "Line", "Report", "Sampler", "disable", "enable", "generate", "load"]

_ENABLE = {
    "experts": _experts.enable,
    "routers": _routers.enable,
    "norms": _norms.enable,
    "sums": _norms.enable_sums,
    "rotary": _rotary.enable,
    "attention": _attention.enable,
    "products": _products.enable,
}
PARTS = tuple(_ENABLE)


def _check_model(model: Any) -> torch.device:
    if not isinstance(model, PreTrainedModel):
        check.fail("model", "a PreTrainedModel of transformers", type(model).__name__, TypeError)
    if model.training:
        wanted = "in evaluation mode (model.eval()), since the kernels have no gradients"
        check.fail("model", wanted, "one in training mode")
    devices = {x.device for x in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        check.fail("model", "on one device", f"one on {', '.join(sorted(map(str, devices)))}")
    device = devices.pop() if devices else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        check.fail("model", "on the CPU or on a CUDA device", f"one on {device}")
    return device


def enable(model: Any, *, parts: Sequence[str] = PARTS) -> Report:
    """Make a model of transformers run on cukern's kernels, in place.

    Args:
        model: a `PreTrainedModel` in evaluation mode, on one device. On the CPU the slow NumPy references run, with a
            warning.
        parts: the kinds of modules to replace: "experts", "routers", "norms", "sums" (a residual sum and the norm after
            it), "rotary", "attention" and "products" (the matrix multiplications of linear layers).

    Returns:
        A report of the replaced modules, and of the reasons why the others were kept. If the model is already enabled,
        the earlier report.

    Raises:
        TypeError: not a model of transformers.
        ValueError: a model in training mode or on several devices, or an unknown part.

    The model's own code runs if a gradient may be needed, that is, outside of `torch.no_grad()` and `generate`. Do not
    pickle an enabled model. `save_pretrained` writes the same files as for a model that is not enabled.

    `enable` may miss modules in an untested version of transformers. It then warns, once per model class.
    """
    device = _check_model(model)
    for part in parts:
        check.one_of("parts", part, PARTS)
    if (known := model.__dict__.get(ATTRIBUTE)) is not None:
        warnings.warn("the model is enabled already: it stays as it is", stacklevel=2)
        return known.report  # type: ignore[no-any-return]
    if device.type == "cpu":
        warnings.warn("the model is on the CPU, where the NumPy references do the work: it will be slow", stacklevel=2)
    report, notes = Report(type(model).__name__), Notes()
    state = State(report)
    try:
        for part in PARTS:
            if part in parts:
                _ENABLE[part](model, state, notes)
            else:
                notes.kept.add(part, model, "not asked for")
    except BaseException:
        state.restore()
        raise
    report.replaced, report.kept = notes.replaced.lines(), notes.kept.lines()
    for part in sorted({*parts} - report.parts() - {x.part for x in report.kept}, key=PARTS.index):
        report.kept.append(Line(part, type(model).__name__, 1, "there are none that are known here"))
    model.__dict__[ATTRIBUTE] = state
    _versions.warn(model, report, parts)
    return report


def disable(model: Any) -> None:
    """Undo `enable`, if the model is enabled. Raises TypeError if `model` is not a model of transformers."""
    if not isinstance(model, PreTrainedModel):
        check.fail("model", "a PreTrainedModel of transformers", type(model).__name__, TypeError)
    state = model.__dict__.pop(ATTRIBUTE, None)
    if state is not None:
        state.restore()
