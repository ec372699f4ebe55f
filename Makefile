# `make demo` and `make test` need Python 3.11, make and git; they set up .venv by themselves.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test check format clean
.DEFAULT_GOAL := test

.venv/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint requirements.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/basisprune demo

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs
