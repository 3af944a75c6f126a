# The first `make run` or `make test` creates .venv and installs everything into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread a process: the tests run in several processes already.
TEST_WORKERS ?= 2
PYTEST_ARGS ?=
RUN_ARGS ?=
TRAIN_ARGS ?= --preset tiny
BENCH_ARGS ?=
OLDEST_TRANSFORMERS := 5.17.0

.PHONY: help run train test test-oldest kernels lint format bench clean

help:
	@echo "make run          a real model, dense and sparse, side by side (RUN_ARGS=... for options)"
	@echo "make train        train a tiny model under a budget, on a CPU (TRAIN_ARGS=... for options)"
	@echo "make test         all tests (PYTEST_ARGS=... for pytest's options)"
	@echo "make test-oldest  the core tests under the oldest supported transformers"
	@echo "make kernels      compile every kernel for three GPUs, without one, and write docs/kernels.md"
	@echo "make lint         formatting, lint and types;  make format  fixes the first two"
	@echo "make bench        the benchmarks of benchmarks/"

# Stamps of their own, so that `make run` and `make train` do not wait for the test tools.
$(VENV)/.run: pyproject.toml setup.py constraints.txt
	@echo ">> Installing sparse-budget-cache and what it needs into $(VENV) (first use only, a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e ".[run]"
	@touch $@

$(VENV)/.recipe: $(VENV)/.run
	@echo ">> Installing what training needs into $(VENV) (first use only)"
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e ".[recipe]"
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo ">> Installing the test tools into $(VENV) (first use only)"
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e ".[dev]"
	@touch $@

run: $(VENV)/.run
	$(BIN)/python -m sparse_cache run $(RUN_ARGS)

train: $(VENV)/.recipe
	$(BIN)/accelerate launch -m sparse_cache.recipe.train $(TRAIN_ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) $(PYTEST_ARGS)

# A second transformers, with what it needs in turn (torch is not among it), in a folder of its own
# ahead of the one in the virtual environment.
$(VENV)/oldest/.stamp: $(VENV)/.dev
	$(BIN)/python -m pip install --progress-bar on --upgrade --target $(VENV)/oldest \
		transformers==$(OLDEST_TRANSFORMERS)
	@touch $@

# Everything that needs transformers, but not the real model, another transformers, or long.
test-oldest: $(VENV)/oldest/.stamp
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/oldest \
		SPARSE_CACHE_EXPECTED_TRANSFORMERS=$(OLDEST_TRANSFORMERS) \
		$(BIN)/python -m pytest -n $(TEST_WORKERS) -m "not real_model and not slow" \
		--ignore=tests/architectures --ignore=tests/benchmarks --ignore=tests/kernels \
		--ignore=tests/cache/test_backends.py --ignore=tests/cache/test_quantization.py \
		--ignore=tests/allocators/test_allocators.py --ignore=tests/allocators/test_replay.py \
		--ignore=tests/packaging/test_names.py --ignore=tests/recipe/verifiers \
		--ignore=tests/recipe/objectives $(PYTEST_ARGS)

kernels: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m sparse_cache.kernels.ahead_of_time \
		--out docs/kernels.md --json docs/kernels.json

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
