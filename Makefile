# Two commands are all a user needs: `make demo` and `make test`. Each makes its own .venv from nothing.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CSRC   := $(shell find aio_csrc -name '*.cpp' -o -name '*.h')
PYLIB  := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')

export HF_HUB_OFFLINE = 1

# Files in their order: that of xdist begins with those of many tests, and ends in one long file of few.
PYTEST := $(BIN)/python -m pytest -m "not soak" -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SEEDS ?= $(shell seq 0 19)

.PHONY: demo demo-1b test lint format soak simulated bench clean

demo: $(STAMP)  ## fine-tune a small model whose state is three times the memory it may use
	$(BIN)/offload finetune swap_configs/demo.json --model preset:demo --data $(PYLIB) --steps 60 --seq 128 --save-every 0

demo-1b: $(STAMP)  ## 1.1 billion parameters, everything on NVMe, in 2.5 GiB of memory
	$(BIN)/offload finetune swap_configs/nvme_all.json --model preset:1b --data $(PYLIB) --steps 5 --seq 256 --save-every 0

test: $(STAMP)
	$(PYTEST)

soak: $(STAMP) simulated
	$(BIN)/python -m pytest -m soak

simulated: $(STAMP)  ## the suites of step and cases on the simulated accelerator, once for each of SEEDS
	for seed in $(SEEDS); do OFFLOAD_ACCELERATOR=simulated:$$seed $(PYTEST) tests/step tests/cases || exit 1; done

bench: $(STAMP)
	$(BIN)/python -m benchmarks

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

clean:
	rm -rf $(VENV) build runs *.egg-info offload/*.so

# One environment for everything. It is rebuilt when a dependency or a C++ source changes.
$(STAMP): pyproject.toml setup.py constraints.txt $(CSRC)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
