"""Drop-in replacements for modules of other libraries, with the same functions and arguments.

`cukern.compat.vllm` replaces `vllm._custom_ops`, `.sglang` replaces `sgl_kernel`, `.flash_mla` replaces `flash_mla`,
`.flashinfer` replaces `flashinfer`, and `.flash_attn` replaces `flash_attn`. The modules `flash_attn_3` and
`vllm_flash_attn` of `.flash_attn` replace `flash_attn_interface` and `vllm.vllm_flash_attn`. The docstring of each
module names the release and the differences. Unsupported arguments and functions raise NotImplementedError.

`enable` installs the modules under the libraries' names, so that the program's imports need not change:

    import cukern.compat

    cukern.compat.enable("flash_mla", "flashinfer")  # before the program imports them
    ...
    cukern.compat.disable()
"""

from cukern.compat._switch import PEERS, disable, enable, enabled

__all__ = ["PEERS", "disable", "enable", "enabled"]
