# Every target sets itself up: on a fresh clone `make demo` or `make test` is the only command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RECEIVER := .venv-receiver
RECEIVER_READY := $(RECEIVER)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test check lint types bench soak clean

setup: $(READY)

# One stamp: a second `make test` installs nothing. pip comes first (dependency groups
# need 25.1), then torch, pinned: an open range would resolve to gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	$(PIP) --editable '.[all]' --group dev
	touch $@

# A real OTLP receiver for the tests, in an environment of its own.
$(RECEIVER_READY): constraints-receiver.txt
	test -x $(RECEIVER)/bin/python || $(PYTHON) -m venv $(RECEIVER)
	$(RECEIVER)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints-receiver.txt ddapm-test-agent
	touch $@

demo: $(READY)
	$(BIN)/lens demo

test: $(READY) $(RECEIVER_READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/python -m tests.architecture.public_types

check: lint types test

bench: $(READY)
	$(BIN)/python -m benchmarks

soak: $(READY)
	$(BIN)/python -m benchmarks soak

clean:
	rm -rf $(VENV) $(RECEIVER) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
