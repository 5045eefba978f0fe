# What CI runs, and what a developer runs, are these targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export TOKENIZERS_PARALLELISM = false
# Modules are compiled once, when they are first imported: pip compiles all of them, which takes a minute.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo results test check lint types fast slow all-tests nightly kill mutants docs install lock newest clean

# A stream on the embedded model and data: a little over two minutes on two cores.
DEMO_OUT ?= runs/demo
demo: $(BIN)/.installed
	@if [ -f $(DEMO_OUT)/report.md ] && [ -f $(DEMO_OUT)/.complete ]; then \
		$(BIN)/forgetfree report $(DEMO_OUT); \
	else \
		rm -rf $(DEMO_OUT) && \
		$(BIN)/forgetfree run --config benchmarks/demo/demo.toml --jobs auto --out $(DEMO_OUT) && touch $(DEMO_OUT)/.complete; \
	fi
	@echo "The report: $(DEMO_OUT)/report.html. A new run: make demo DEMO_OUT=runs/another"

# The tables and pictures of the result pages, from the committed CSV files: a test checks that nothing differs.
results: $(BIN)/.installed
	$(BIN)/python -m benchmarks.kept
	$(BIN)/python -m benchmarks.pages
	$(BIN)/python -m benchmarks.paper
	$(BIN)/python docs/figures/first_task.py
	$(BIN)/python docs/figures/score_by_bytes.py

# Everything that CI checks: fast and slow tests in one session, and beside them what one core can check.
test: $(BIN)/.installed
	$(MAKE) -j2 check all-tests VENV=$(VENV)

check: lint types

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.installed
	$(BIN)/mypy

# Side by side, one thread each (tests/conftest.py); a worker takes about 1.5 GB. Neighbours share what fixtures made.
PYTEST = $(BIN)/pytest -n logical --maxprocesses 4 --dist worksteal --durations 10

fast: $(BIN)/.installed
	$(PYTEST)

slow: $(BIN)/.installed
	$(PYTEST) -m "slow or long"

all-tests: $(BIN)/.installed
	$(PYTEST) -m ""

# Every case of every test, the kills and the mutants.
nightly: $(BIN)/.installed
	$(PYTEST) -m "" --every-case
	$(MAKE) kill mutants VENV=$(VENV)

# Commands that are killed at every rename and at 100 random moments, and repeated: half an hour.
MOMENTS ?= 100
kill: $(BIN)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/kill --moments $(MOMENTS)

# Small faults in the method's code, one at a time, and which of them the tests of core/ and ledger/ notice.
# Of one file: make mutants MUTANTS='forgetfree.core.regions*'.
MUTANTS ?= *
mutants: $(BIN)/.installed
	$(BIN)/mutmut run '$(MUTANTS)'
	$(BIN)/mutmut results

# The site, from docs/ and the code. Strict: a broken link or a page that the navigation lacks ends it.
docs: $(BIN)/.installed
	PYTHONPATH=. $(BIN)/python docs/pages.py
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site: build/site/index.html"

install: $(BIN)/.installed

# One resolver run picks torch and torchvision together.
$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip  # Python's own pip takes twice the processor time
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[minilm,texts,dev]'
	@touch $@

# The versions that are tested together, for Python 3.11 to 3.13 on every platform. What is there stays while it fits;
# make lock UPGRADE=--upgrade takes the newest.
lock: $(BIN)/.installed
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --fork-strategy fewest $(UPGRADE) \
		--no-header --no-annotate --quiet --output-file constraints.txt
	sed -i.before 's/ *;.*//' constraints.txt && rm constraints.txt.before

# The fast tests with the newest of everything that pyproject.toml admits, and what differs from constraints.txt.
NEWEST ?= .venv-newest
newest:
	rm -rf $(NEWEST)
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/pip install --quiet --upgrade pip
	$(NEWEST)/bin/pip install --quiet --no-compile --editable '.[minilm,texts,dev]'
	@touch $(NEWEST)/bin/.installed
	@echo "What differs from constraints.txt:"
	@$(NEWEST)/bin/uv pip freeze --quiet --exclude-editable --python $(NEWEST)/bin/python | grep -vxFf constraints.txt || echo nothing
	$(MAKE) fast VENV=$(NEWEST)

clean:
	rm -rf $(VENV) $(NEWEST) build dist mutants *.egg-info .mypy_cache .ruff_cache .pytest_cache
