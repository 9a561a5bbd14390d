# `make demo` and `make test` are all a newcomer needs; both make the virtual environment first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
BUILD  := build
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt

.PHONY: demo test soak docs format clean

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/ccfa sweep finetune podnet --data glyphs --seeds 0 --at-once 2 --out runs/demo

test: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --dist worksteal

# Faults at every place, minutes of fuzzing, and random kills of every method. Not part of `test`.
soak: $(VENV)/installed-dev
	$(BIN)/pytest -n auto -m soak

# The documentation site, with its notebooks executed, in build/docs. A warning is an error. A test runs this, too.
docs: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -W --keep-going -q -d $(BUILD)/doctrees docs $(BUILD)/docs
	@echo "Open $(BUILD)/docs/index.html"

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "ccfa needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing ccfa and PyTorch into $(VENV) (once; a minute or more)"
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev,docs]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build
