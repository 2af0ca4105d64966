"""Adapters under which the peers' own test files run on cukern; nothing of theirs is here.

    make peer-tests FOLDER=...                       all test files that an adapter knows
    make peer-tests FOLDER=... ARGS="-k rms_norm"    more arguments for pytest
    make peer-tests FOLDER="a b" ARGS="--jobs 16"    several folders, by 16 processes on all GPUs there are

    ... ARGS="--jobs 16 --until 300 --resume D"      for 300 seconds; the same again goes on with what is left
    ... ARGS="--jobs 16 --most 100 --resume D"       of each file a sample of about 100 process-seconds
    ... ARGS="--resume D --until 0"                  the table of what D has
    ... ARGS="--resume D --until 0 --page docs/differences.md"    the same, and into the page's tables

At the end there is a table: by file, how many cases passed, failed, differ on purpose, are refused, are skipped and are
left, of how many, and their seconds. With --report FILE it is written while the cases run. A sample has cases of each
test, always the same; those that a folder to resume has count for it, and its failures are run first. A process has one
GPU (CUDA_VISIBLE_DEVICES); where there are several, jobs that wait for theirs again and again have the last one first.

FOLDER is an unpacked sdist of vLLM (`pip download --no-deps --no-binary :all: vllm==0.10.2`), a checkout of FlashInfer,
SGLang or FlashMLA, or any folder of test files. See `tests.peers.files` for the files, `tests.peers.modules` for the
modules that stand for the peers, and `tests.peers.plugin` for what is counted as refused.
"""
