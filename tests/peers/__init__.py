"""Adapters under which the peers' own test files run on cukern; nothing of theirs is here.

    make peer-tests FOLDER=...                       all test files that an adapter knows
    make peer-tests FOLDER=... ARGS="-k rms_norm"    more arguments for pytest
    make peer-tests FOLDER=... ARGS=--every=40       of FlashMLA's programs every 40th case, of more than 4000

FOLDER is an unpacked sdist of vLLM (`pip download --no-deps --no-binary :all: vllm==0.10.2`), a checkout of FlashInfer,
SGLang or FlashMLA, or any folder of test files. See `tests.peers.__main__` for the files, `tests.peers.modules` for the
modules that stand for the peers, and `tests.peers.plugin` for what is counted as refused.
"""
