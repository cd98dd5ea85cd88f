# Needs make and Python 3.10 or newer with venv and pip; everything else is installed into $(VENV).
#
#   make demo    install, then show what two workers do for one prompt
#   make test    install with the test tools, then run the tests; llama.cpp's own RPC is built once
#                for those of them that need it, where there is a C++ compiler

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := README.md LICENSE $(shell find src -name '*.py' -o -path '*/serve/page/*')

.PHONY: demo test interop lint types bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/caravan demo

test: interop
	$(BIN)/python -m pytest $(PYTEST_ARGS)

interop: $(VENV)/.installed-test
	$(BIN)/python tests/interop/build.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/mypy --strict
	$(BIN)/mypy --strict examples

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/speed.py

# A new environment only for new dependencies; an edited source file is a quick reinstall.
$(VENV)/.made: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.made $(SOURCES)
	$(PIP) install --quiet .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.made $(SOURCES)
	$(PIP) install --quiet '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
