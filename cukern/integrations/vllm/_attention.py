"""The seam "attention": the choice between vLLM's FlashAttention backend and cukern's.

The platform names the backend of a layer. `install_seam` wraps this method of the platform: where vLLM chooses
FlashAttention by itself, and cukern's backend supports the layer, the wrapper names cukern's backend. Both backends
have the same cache, so the layers of a model may have either of them.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

import cukern
from cukern.integrations.vllm import install, report, say

STOCK_BACKEND = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
OWN_BACKEND = "cukern.integrations.vllm._attention_backend.CukernAttentionBackend"


def _why_not(path: str, selected_backend: Any, config: Any, device_capability: Any) -> str | None:
    """Return why a layer keeps the backend `path`, which vLLM has chosen for it."""
    if selected_backend is not None:
        return f"the backend {selected_backend.name} is asked for by name"
    if path != STOCK_BACKEND:
        return f"its backend is {path.rpartition('.')[2]}"
    engine = get_current_vllm_config()
    if (ranks := engine.parallel_config.decode_context_parallel_size) > 1:
        return f"decode_context_parallel_size is {ranks}"
    model = engine.model_config
    for what, has in (("ALiBi", model.uses_alibi), ("R-SWA", model.rswa_window is not None)):
        if has:
            return f"the model has {what}"
    # Imported here, because vLLM's backend asks for the GPU's properties when it is imported.
    from cukern.integrations.vllm._attention_backend import CukernAttentionBackend

    reasons = CukernAttentionBackend.validate_configuration(device_capability=device_capability, **config._asdict())
    return ", ".join(reasons) or None


def _choose(stock: Any) -> Any:
    @classmethod  # type: ignore[misc]
    @functools.wraps(stock)
    def choose(cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        path = str(stock(selected_backend, attn_selector_config, num_heads))
        config = attn_selector_config
        why = _why_not(path, selected_backend, config, cls.get_device_capability())
        kind = "MLA" if config.use_mla else "attention with a window" if config.has_sliding_window else "attention"
        sinks = " and sinks" if config.has_sink else ""
        dtype = str(config.dtype).removeprefix("torch.")
        report("attention", f"{kind}{sinks}, heads of {config.head_size} in {dtype}", why)
        return OWN_BACKEND if why is None else path

    return choose


def install_seam() -> None:
    say(f"cukern {cukern.__version__} attention: offers a backend for each layer that FlashAttention would take")
    install(type(current_platform), "get_attn_backend_cls", _choose)
