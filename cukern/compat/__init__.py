"""Modules with the names of other libraries' functions, their arguments and their results, over cukern's own.

`cukern.compat.vllm` stands for `vllm._custom_ops`, `.sglang` for `sgl_kernel`, `.flashinfer` and its `sampling`,
`norm`, `activation` and `page` for those of `flashinfer`, `.flash_mla` for `flash_mla`: moving over is an import. Each
says for which release its signatures hold, what it does not cover, and what differs; arguments that are not
covered raise NotImplementedError. A name that is not covered is an AttributeError, or in an import an ImportError,
that says so.

`enable` puts them where programs look the names up, so that not even the import changes:

    import cukern.compat

    cukern.compat.enable("flash_mla", "flashinfer")  # before the program imports them
    ...
    cukern.compat.disable()
"""

from cukern.compat._switch import PEERS, disable, enable, enabled

__all__ = ["PEERS", "disable", "enable", "enabled"]
