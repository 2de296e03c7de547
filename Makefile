# `make demo` and `make test` work on a fresh clone: they set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test processes side by side; each needs about 4 GB, the one with the servers 10.
TEST_WORKERS ?= 2
# Images often forbid bytecode; then every process that imports SGLang compiles 7,700 modules anew: 28 s of CPU time, not 10.
unexport PYTHONDONTWRITEBYTECODE
# Trust the machine's certificates, as pip does; uv brings its own list otherwise. pip is the slower second choice.
UV_ENV := UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu check lint types bench clean

help:
	@echo "make demo    set up, then serve the embedded models plain, sequential, parallel and with an EAGLE head, and compare"
	@echo "make test    set up, then run the tests (no GPU needed)"
	@echo "make check   ruff, mypy and the hook ledger"
	@echo "make bench   SGLang's bench_serving against each mode (BENCH_ARGS=...)"
	@echo "make setup   only set up $(VENV)"
	@echo "make test-gpu  the tests that need one or two GPUs"

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v < (3, 13) else f"sglang-psd needs Python 3.10, 3.11 or 3.12, {sys.executable} is {v[0]}.{v[1]}; run make PYTHON=/path/to/python3.12")'
	@echo "Setting up $(VENV): SGLang and its dependencies are about 8.5 GB ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(UV_ENV) $(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]' \
		|| $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

setup: $(READY)

demo: $(READY)
	$(BIN)/sglang-psd demo $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder $(TEST_ARGS)

test-gpu: $(READY)
	$(BIN)/python -m pytest tests/gpu $(TEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

check: lint types
	$(BIN)/sglang-psd check

bench: $(READY)
	$(BIN)/sglang-psd bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
