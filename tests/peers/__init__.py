"""Adapters under which the peers' own test files run on cukern; nothing of theirs is here.

    make peer-tests FOLDER=...                       all test files that an adapter knows
    make peer-tests FOLDER=... ARGS="-k rms_norm"    more arguments for pytest
    make peer-tests FOLDER="a b" ARGS="--jobs 16"    several folders, by 16 processes on one GPU

    ... ARGS="--jobs 16 --until 300 --resume D"      for 300 seconds; the same again goes on with what is left
    ... ARGS="--resume D --until 0"                  the table of what D has

At the end there is a table: by file, how many cases passed, failed, differ on purpose, are refused, are skipped and are
left, and their seconds. With --report FILE it is written while the cases run.

FOLDER is an unpacked sdist of vLLM (`pip download --no-deps --no-binary :all: vllm==0.10.2`), a checkout of FlashInfer,
SGLang or FlashMLA, or any folder of test files. See `tests.peers.files` for the files, `tests.peers.modules` for the
modules that stand for the peers, and `tests.peers.plugin` for what is counted as refused.
"""
