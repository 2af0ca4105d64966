"""Modules with the names, arguments and results of other libraries' functions, implemented by cukern.

`cukern.compat.vllm` replaces `vllm._custom_ops`, `.sglang` replaces `sgl_kernel`, and `.flash_mla` replaces
`flash_mla`. `.flashinfer` and its `sampling`, `norm`, `activation` and `page` replace the modules of `flashinfer`. A
program switches by changing an import. The docstring of each module names the release that its signatures match, the
functions that the module lacks, and the differences. Unsupported arguments raise NotImplementedError. An unsupported
name raises AttributeError, or ImportError in an import statement.

`enable` installs the modules under the libraries' names, so that not even the import changes:

    import cukern.compat

    cukern.compat.enable("flash_mla", "flashinfer")  # before the program imports them
    ...
    cukern.compat.disable()
"""

from cukern.compat._switch import PEERS, disable, enable, enabled

__all__ = ["PEERS", "disable", "enable", "enabled"]
