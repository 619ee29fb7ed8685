# make setup: .venv with pinned packages. make demo: a training run with a fault that is found. make test: all checks.
# Arguments of the demo: make demo ARGS="--no-fault --data PATH"
# make figures: docs/results.md from the figures in benchmarks/results.
.PHONY: setup demo figures test

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.setup-done

# Every pip call has the constraints: an open torch requirement would take a CUDA build of several GB.
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

setup: $(STAMP)

# The stamp is written last, so a set-up that was stopped half-way is done again.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m examples.demo $(ARGS)

figures: setup
	$(BIN)/python -m pip install --quiet -e '.[figures]'
	$(BIN)/python -m benchmarks.figures

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
