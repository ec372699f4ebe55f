# `make demo` and `make test` need make, git and any Python from 3.11 on; they set up .venv by themselves.
# The first Python that runs, is new enough and can make environments is taken; PYTHON=... names another.
PYTHONS := python3.11 python3.12 python3.13 python3.14 python3 python
CAN_RUN := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for each in $(PYTHONS); do $$each -c '$(CAN_RUN)' >/dev/null 2>&1 && { echo $$each; break; }; done)
BIN := .venv/bin

.PHONY: demo test quick check format clean docs dist audit renew
.DEFAULT_GOAL := test

.venv/installed: pyproject.toml requirements.txt
	@test -n "$(PYTHON)" || { \
	  echo "No Python 3.11 or newer with the module venv was found (tried: $(PYTHONS))."; \
	  echo "Install one and run make again: 'apt-get install python3 python3-venv' on Debian and Ubuntu,"; \
	  echo "'dnf install python3' on Fedora, 'brew install python' on a Mac, or from https://www.python.org/downloads."; \
	  echo "If you have one elsewhere, name it: make PYTHON=/path/to/python"; \
	  exit 1; } >&2
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --constraint requirements.txt --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/basisprune demo

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --durations=25

# All but what trains networks, starts processes or writes the files of other runtimes.
quick: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/count.py
	$(MAKE) docs
	$(MAKE) test

# The docs as a site in build/site; a warning is an error.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# A wheel and an sdist in dist/, each installed in an empty environment to see that it names its version.
dist: .venv/installed
	rm -rf dist build/try
	$(BIN)/python -m hatchling build -d dist
	set -e; for each in dist/*.whl dist/*.tar.gz; do \
	  $(BIN)/python -m venv --clear build/try; \
	  build/try/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "$$each"; \
	  build/try/bin/python -c "from importlib.metadata import version; print('$$each', version('basisprune'))"; \
	done; rm -rf build/try

# The demo's numbers, pictures and sample report, from a run in runs/demo.
renew: .venv/installed
	$(BIN)/python tools/renew_demo.py

# Known vulnerabilities of what requirements.txt pins; needs the network.
audit: .venv/installed
	$(BIN)/uv tool run pip-audit --requirement requirements.txt --no-deps --disable-pip

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs build dist
