# Everything is installed into .venv on first use; nothing outside this folder is changed.
#
#   PYTHON=python3.12   the interpreter that .venv is made from. Given to a target of the second group, that
#                       interpreter runs it as it is: no .venv, nothing installed.
#   OPS="moe_gate ..."  limits the second group to these stems
#   SOURCES=1           `make notebooks` makes only the outputs that show sources, for which it needs no GPU
#   ARGS="..."          more arguments for the demo or for pytest
#   FOLDER="..."        where the peers' test files are, for `make peer-tests`: unpacked sdists, checkouts, any folders

# CuPy has one package per CUDA major version. Without a driver either compiles, so the newer one is taken.
CUDA_EXTRA ?= $(shell nvidia-smi 2>/dev/null | grep -Eq 'CUDA[A-Za-z ]* Version: *12\.' && echo cuda12 || echo cuda13)

PYTHON ?= python3
BIN := .venv/bin
PINS := constraints.txt constraints-$(CUDA_EXTRA).txt
PIP := $(BIN)/python -m pip install $(PINS:%=--constraint %)
TORCH := $(shell grep '^torch==' constraints.txt)

ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(BIN)/python
READY := .venv/dev.stamp
endif

.PHONY: help demo test lint docs gpu sanitize bench check notebooks peer-tests
.DEFAULT_GOAL := help

help:
	@echo 'make demo       install, then route tokens through a gate and encode texts without padding'
	@echo 'make test       install, then run the tests that need no GPU'
	@echo 'make lint       ruff, clang-format and mypy'
	@echo 'make docs       build the documentation into build/docs/html; any warning fails'
	@echo 'make notebooks SOURCES=1'
	@echo '                let the notebooks show the sources as they are; keeps all other outputs'
	@echo
	@echo 'With a GPU (OPS="moe_gate ..." limits them; PYTHON=python3 uses that interpreter and installs nothing):'
	@echo 'make gpu        GPU tests, sanitizer and benchmarks; writes the GPU record and the results'
	@echo 'make sanitize   the GPU tests under compute-sanitizer'
	@echo 'make bench      the benchmarks; writes benchmarks/results and benchmarks/RESULTS.md'
	@echo 'make check      say whether the GPU record is older than the sources'
	@echo 'make notebooks  run the notebooks and keep their outputs'
	@echo 'make peer-tests FOLDER=...'
	@echo '                run the test files of vLLM, SGLang, FlashInfer or FlashMLA in a folder on cukern'

demo: .venv/demo.stamp
	$(BIN)/python -m cukern demo $(ARGS)

test: .venv/dev.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find cuda_src notebooks -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

docs: .venv/dev.stamp
	$(BIN)/python -m docs

gpu: $(READY)
	$(PY) -m tests.gpu_record run --ops "$(OPS)"

sanitize: $(READY)
	$(PY) -m tests.gpu_record sanitize --ops "$(OPS)"

check: $(READY)
	$(PY) -m tests.gpu_record check

bench: $(READY)
	$(PY) -m cukern bench $(OPS) --results

peer-tests: $(READY)
	$(PY) -m tests.peers $(FOLDER) $(ARGS)

notebooks: $(READY)
ifdef SOURCES
	$(PY) -m notebooks.refresh $(OPS:%=notebooks/%.ipynb)
else
	$(PY) -c 'from nbclient.cli import main; main()' --inplace $(or $(OPS:%=notebooks/%.ipynb),notebooks/*.ipynb)
endif

.venv/demo.stamp: pyproject.toml $(PINS)
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(CUDA_EXTRA),demo]'
	@touch $@

# PyTorch goes first and by its pin, so that no range decides which of its builds is installed.
.venv/dev.stamp: .venv/demo.stamp
	$(PIP) '$(TORCH)'
	$(PIP) --editable '.[$(CUDA_EXTRA),dev]'
	@touch $@
