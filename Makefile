# Every target sets itself up: on a fresh clone `make demo` or `make test` is the only command.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RECEIVER := .venv-receiver
RECEIVER_READY := $(RECEIVER)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test check lint types bench soak sanitize clean

setup: $(READY)

# One stamp: a second `make test` installs nothing. pip comes first (dependency groups
# need 25.1), then torch, pinned: an open range would resolve to gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt hatch_build.py src/lens_core/_native.c
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

# The compiled part in a copy with sanitizers, against its contract in Python on random input.
SANITIZED := build/sanitized
sanitize: $(READY)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED) && cp -r src/. tests $(SANITIZED)
	$(CC) -g -O1 -Wall -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC \
		-I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
		src/lens_core/_native.c -o $(SANITIZED)/lens_core/_native.abi3.so
	cd $(SANITIZED) && LENS_NATIVE=1 PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0 \
		LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		PYTHONPATH=. $(CURDIR)/$(BIN)/python -m tests.core.native_cases 100000 $$$$

clean:
	rm -rf $(VENV) $(RECEIVER) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
