# The whole set-up is `make run` or `make test` on a machine with python3 (3.11 or newer, with venv), make, gcc
# and g++. `make help` tells the rest.

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
PROMPT ?= Name three colours and say in one sentence what each of them is good for.

BIN := $(VENV)/bin
# One stamp for each set of extras: nothing is installed, and no network is used, while it is newer than
# pyproject.toml.
DEMO := $(VENV)/.installed-demo
SERVE := $(VENV)/.installed-serve
DEV := $(VENV)/.installed-dev
FUZZ := $(VENV)/.installed-fuzz
BENCHES := $(VENV)/.installed-bench

# The shell must see the prompt and the model as they were typed, a $ or a quote in them included.
override export PROMPT := $(value PROMPT)
override export MODEL := $(value MODEL)
export WHEEL CONSTRAINTS PIP_OPTIONS

.PHONY: help run serve test check lint docs bench soak fuzz clean
.DEFAULT_GOAL := help

help:
	@echo 'make run     stream an answer from the small model that comes with the demo extra'
	@echo '             PROMPT="…" another prompt, MODEL=path.gguf another model'
	@echo 'make serve   serve that model to clients of the OpenAI API, with a console in the browser'
	@echo '             SERVE_OPTIONS="--port 9000" more options, MODEL=path.gguf another model'
	@echo 'make test    run all tests'
	@echo 'make check   run all that continuous integration runs: tests, format, lint, types, layers, documents'
	@echo 'make docs    build the documents and the API reference as a site in build/site'
	@echo 'make bench   run the benchmarks: a table, and benchmarks/results.json. Takes 75 minutes, and wants a machine'
	@echo '             with nothing else to do. BENCH="cancel --quick" runs one of them, shortly'
	@echo 'make soak    let everything go wrong at random under 10,000 requests, and check each answer. Takes a quarter of an'
	@echo '             hour; SOAK="--quick --seed 1 --backend trio" is less, and as before'
	@echo 'make fuzz    look for bytes of a worker that break the parent; SECONDS=60 is for how long'
	@echo 'make clean   remove the environment and everything that was built'
	@echo
	@echo 'PYTHON=python3.12 another interpreter; VENV=path another place for the environment;'
	@echo 'WHEEL=path.whl a built llama-cpp-python, which saves compiling it'

# By standard input, so that no prompt can be taken for an option or a file.
run: $(DEMO)
	@printf '%s' "$$PROMPT" | $(BIN)/supervise run --temperature 0 --max-tokens 200 $${MODEL:+--model "$$MODEL"}

serve: $(SERVE)
	@exec $(BIN)/supervise serve $(SERVE_OPTIONS) $${MODEL:+"$$MODEL"}

# What fails among others, on cores that three test processes share, is tried once more alone: its failure is shown
# either way, and only one that stays is an error.
test: $(DEV)
	$(BIN)/python -m pytest -n 3 --dist loadgroup || \
		$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

check: test lint docs

lint: $(DEV)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/python -m pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(DEV)
	@$(BIN)/python docs/build_site.py

bench: $(BENCHES)
	@$(BIN)/python -m benchmarks $(BENCH)

soak: $(DEV)
	@$(BIN)/python -m tests.chaos.soak $(SOAK)

SECONDS ?= 60

# What breaks something is in build/fuzz/crash-…; python -m tests.fuzz.show FILE shortens it and shows its steps.
fuzz: $(FUZZ)
	$(BIN)/python -m tests.fuzz.coverage_guided $(SECONDS) build/fuzz

$(DEMO): pyproject.toml
	@.ci/install "$(PYTHON)" "$(VENV)" demo
	@touch $@

$(SERVE): pyproject.toml
	@.ci/install "$(PYTHON)" "$(VENV)" demo,serve
	@touch $(DEMO) $@

$(DEV): pyproject.toml
	@.ci/install "$(PYTHON)" "$(VENV)" demo,serve,dev,docs
	@touch $(DEMO) $(SERVE) $@

$(FUZZ): pyproject.toml
	@.ci/install "$(PYTHON)" "$(VENV)" demo,serve,dev,docs,fuzz
	@touch $(DEMO) $(SERVE) $(DEV) $@

$(BENCHES): pyproject.toml
	@.ci/install "$(PYTHON)" "$(VENV)" demo,serve,dev,docs,bench
	@touch $(DEMO) $(SERVE) $(DEV) $@

clean:
	@# Only what looks like a virtual environment is removed, so that a mistyped VENV= costs nothing.
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist src/infervisor.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache .coverage htmlcov
	find . -name .git -prune -o -name __pycache__ -type d -exec rm -rf {} +
