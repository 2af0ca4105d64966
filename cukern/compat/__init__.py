"""Drop-in replacements for modules of other libraries: the same functions and arguments, implemented by cukern.

`cukern.compat.vllm` replaces `vllm._custom_ops`, `.sglang` replaces `sgl_kernel`, and `.flash_mla` replaces
`flash_mla`. `.flashinfer` replaces `flashinfer`; its modules `sampling`, `norm`, `activation` and `page` replace the
modules of these names in `flashinfer`. To switch, a program changes its import. The docstring of each module names the
release that its signatures match, the functions that it does not cover, and the differences. Unsupported arguments
raise NotImplementedError. An unsupported name raises AttributeError, or ImportError in an import statement.

`enable` installs the modules under the libraries' names, so that the program's imports need not change:

    import cukern.compat

    cukern.compat.enable("flash_mla", "flashinfer")  # before the program imports them
    ...
    cukern.compat.disable()
"""

from cukern.compat._switch import PEERS, disable, enable, enabled

__all__ = ["PEERS", "disable", "enable", "enabled"]
