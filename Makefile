# Everything runs in .venv. `make setup` builds it; the other targets bring it up to date first.

.DEFAULT_GOAL := help
.PHONY: help setup compare page benchmark test test-thorough triton mutants wild wild-mutants wrong diagnose-report ledger lint format clean

# What an earlier `make setup PYTHON=... CONSTRAINTS=... TORCH=...` chose stays chosen.
-include .venv/choices.mk
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
TORCH ?=
ARGS ?=
RESULTS ?= cpu

BIN := .venv/bin
STAMP := .venv/up-to-date
choices := $(PYTHON), constraints "$(CONSTRAINTS)", torch "$(TORCH)", in $(CURDIR)

# torch stays as it is: timm wants torchvision, which left alone brings the newest torch with it.
define wild_libraries
$(BIN)/python -c 'import diffusers, timm, transformers' 2> /dev/null || \
  $(BIN)/python -m pip install --disable-pip-version-check -c .venv/constraints.txt \
  "$$($(BIN)/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))')" -e '.[wild]'
endef

# Another choice than last time, or a folder that moved: the environment is built anew.
ifneq ($(choices),$(installed))
.PHONY: $(STAMP)
start_afresh := $(if $(installed),--clear)
endif

help:
	@echo "Two Transformers with one API, by hand and on torch.nn, and a checker for attention of your own."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "ARGS passes arguments on:        make compare ARGS='--quick --json report.json'"
	@echo "Another Python (3.11 or newer):  make setup PYTHON=python3.12"
	@echo "Another torch, or any versions:  make setup TORCH=2.11.0, or make setup CONSTRAINTS="

setup: $(STAMP) ## Build .venv with the tested versions, unless it is up to date
	@$(BIN)/python -c 'import sys, importlib.metadata as m; \
	  print(".venv is ready: Python", sys.version.split()[0] + ", torch", m.version("torch"))'

compare: $(STAMP) ## Show on this machine that scratch and builtin give the same numbers, and time them
	@echo "Comparing takes a few minutes (with ARGS=--quick less than one), and timing the parts another one."
	$(BIN)/sidebyside compare $(ARGS)
	$(BIN)/sidebyside-bench --quick

page: $(STAMP) ## Write attention.html, a page to learn from: by hand and built in, side by side, with live numbers
	$(BIN)/sidebyside page attention.html $(ARGS)

benchmark: $(STAMP) ## Measure this machine, and update benchmarks/results and README's figures
	$(BIN)/sidebyside-bench --standard --resume --output build/benchmark-$(RESULTS) $(ARGS)
	rm -rf benchmarks/results/$(RESULTS)
	mv build/benchmark-$(RESULTS) benchmarks/results/$(RESULTS)
	$(BIN)/sidebyside-bench readme

# One thread a worker: the tests are many and small.
test: $(STAMP) ## Run the tests and the examples in the docstrings
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -n auto --maxprocesses 8 $(ARGS)

test-thorough: $(STAMP) ## Run the random sweeps and the tests of many processes too, and draw ten times as many examples
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-thorough} \
	  $(BIN)/pytest -n auto --maxprocesses 8 -m '' $(ARGS)

triton: $(STAMP) ## Run the tests of the CUDA kernel in Triton's interpreter, on the CPU
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(BIN)/python -m pip install -e '.[triton]'
	TRITON_INTERPRET=1 $(BIN)/pytest -n 2 scratch/triton_attention.py equivalence_tests/twins/test_triton_attention.py $(ARGS)

diagnose-report: $(STAMP) ## Verify every class of the zoo, right or broken, and print what was found and named
	$(BIN)/python -m equivalence_tests.checker.zoo.confusion

ledger: $(STAMP) ## Run the checker over all that its tests show it, say which verdicts changed, and write them down
	OMP_NUM_THREADS=1 $(BIN)/python -m equivalence_tests.ledger $(ARGS)

mutants: $(STAMP) ## Break scratch in every small way and see that a test fails; takes hours
	OMP_NUM_THREADS=1 $(BIN)/python -m equivalence_tests.mutation $(ARGS)

wild: $(STAMP) ## Check every attention of transformers, timm and diffusers, and update the results; takes hours
	@$(wild_libraries)
	$(BIN)/python -m equivalence_tests.wild check --part all --output equivalence_tests/wild/results/checked.json $(ARGS)

wild-mutants: $(STAMP) ## Break those attentions, one change at a time, and count what is found and named; takes hours
	@$(wild_libraries)
	$(BIN)/python -m equivalence_tests.wild mutants --part all --output equivalence_tests/wild/results/mutants.json $(ARGS)

wrong: $(STAMP) ## Edit right attentions, layers and models at random and see that no wrong version is called equal; takes hours
	OMP_NUM_THREADS=1 $(BIN)/python -m equivalence_tests.wrong --output equivalence_tests/wrong/results/found.json $(ARGS)

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## Fix what ruff can fix
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean: ## Remove caches and build output; .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is: $$("$(PYTHON)" --version 2>&1)" >&2; \
	  echo "Name one that is: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up .venv: $$("$(PYTHON)" --version)," \
	  "$(if $(TORCH),torch $(TORCH) and )versions $(if $(CONSTRAINTS),of $(CONSTRAINTS),as pip chooses). torch is large: the first time takes minutes."
	@[ "$$($(BIN)/python --version 2>&1)" = "$$("$(PYTHON)" --version)" ] || set -- --clear; \
	  "$(PYTHON)" -m venv $(start_afresh) "$$@" .venv || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu it is a package of its own: python3-venv." >&2; exit 1; }
	@sed '$(if $(TORCH),/^torch==/d)' /dev/null $(CONSTRAINTS) > .venv/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check \
	  -c .venv/constraints.txt $(if $(TORCH),'torch==$(TORCH)') -e '.[dev]'
	@printf '%s\n' 'PYTHON ?= $(PYTHON)' 'CONSTRAINTS ?= $(CONSTRAINTS)' 'TORCH ?= $(TORCH)' \
	  'installed := $(choices)' > .venv/choices.mk
	@touch $(STAMP)
