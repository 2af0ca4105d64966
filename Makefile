# Everything is installed into .venv on first use; nothing outside this folder is changed.
#
#   PYTHON=python3.12   the interpreter that .venv is made from. Given to a target of the second group, that
#                       interpreter runs it as it is: no .venv, nothing installed.
#   OPS="moe_gate ..."  limits the second group to these stems
#   WORKERS=14          the pytest processes of `make gpu`; by default 14, or all cores but two where there are fewer
#   SOURCES=1           `make notebooks` makes only the outputs that show sources, for which it needs no GPU
#   ARGS="..."          more arguments for the demo or for pytest
#   FOLDER="..."        where the peers' test files are, for `make peer-tests`: unpacked sdists, checkouts, any folders

# CuPy has one package per CUDA major version. Without a driver either compiles, so the newer one is taken.
CUDA_EXTRA ?= $(shell nvidia-smi 2>/dev/null | grep -Eq 'CUDA[A-Za-z ]* Version: *12\.' && echo cuda12 || echo cuda13)

PYTHON ?= python3
BIN := .venv/bin
PINS := constraints.txt constraints-$(CUDA_EXTRA).txt
# Python compiles what it imports; to compile all that is installed takes 40% of the installation.
PIP := $(BIN)/python -m pip install --no-compile $(PINS:%=--constraint %)
TORCH := $(shell grep '^torch==' constraints.txt)

# What an unpinned install takes, by uv, which unpacks several GB of CUDA libraries in a third of pip's time or less.
NEWEST := .venv-newest/bin/python
NEWEST_TESTS := tests/test_kernels.py tests/test_headers.py tests/test_cli*.py tests/test_compat*.py tests/test_integrations_*.py
EVERY_INSTANCE := tests/test_kernels.py::test_every_instance_compiles_and_the_specialized_do_not_spill

ifeq ($(origin PYTHON),command line)
PY := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(BIN)/python
READY := .venv/dev.stamp
endif

.PHONY: help demo test test-all test-newest newest lint docs pages gpu sanitize bench check notebooks peer-tests
.DEFAULT_GOAL := help

help:
	@echo 'make demo       install, then route tokens through a gate and encode texts without padding'
	@echo 'make test       install, then run the tests that need no GPU'
	@echo 'make test-all   the rare and long tests as well: every kernel for every architecture'
	@echo 'make test-newest'
	@echo '                the tests of what depends on other releases, with those of constraints-newest.txt'
	@echo 'make newest     write constraints-newest.txt: what an install takes today where nothing is pinned'
	@echo 'make lint       ruff, clang-format and mypy'
	@echo 'make docs       build the documentation into build/docs/html; any warning fails'
	@echo 'make pages      write the outputs of the examples in the README and docs, and the signatures and speeds of families'
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

# The second pytest compiles with the newest NVRTC. The third has the rare tests of `test-newest`, such as all model types.
test-all: .venv/dev.stamp .venv-newest/dev.stamp
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal -m "rare and not gpu" $(ARGS)
	$(NEWEST) -m pytest -n auto --maxprocesses 8 --dist worksteal -m rare -k '90a or 80' $(EVERY_INSTANCE) $(ARGS)
	$(NEWEST) -m pytest -n auto --maxprocesses 8 --dist worksteal -m "rare and not gpu" --deselect $(EVERY_INSTANCE) $(NEWEST_TESTS) $(ARGS)

test-newest: .venv-newest/dev.stamp
	$(NEWEST) -m pytest -n auto --maxprocesses 8 --dist worksteal -m "not gpu and not rare" $(NEWEST_TESTS) $(ARGS)

newest: .venv/dev.stamp
	$(BIN)/python -m tests.newest

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find cuda_src notebooks -name '*.cu' -o -name '*.cuh')
	$(BIN)/mypy

docs: .venv/dev.stamp
	$(BIN)/python -m docs

pages: .venv/dev.stamp
	$(BIN)/python -W ignore -m docs.examples

gpu: $(READY)
	$(PY) -m tests.gpu_record run --ops "$(OPS)" $(WORKERS:%=--workers %)

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
	$(PY) -m notebooks.refresh $$($(PY) -m notebooks.names $(OPS))
else
	$(PY) -c 'from nbclient.cli import main; main()' --inplace $(if $(OPS),$$($(PY) -m notebooks.names $(OPS)),notebooks/*.ipynb)
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

.venv-newest/dev.stamp: .venv/dev.stamp constraints-newest.txt
	$(PYTHON) -m venv --clear .venv-newest
	$(BIN)/uv pip install --quiet --python $(NEWEST) --constraint constraints-newest.txt --editable '.[cuda13,torch,dev]'
	@touch $@
