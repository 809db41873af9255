# What a person can do here. Every target sets up what it needs, once; `make` alone lists them.
#
#   PYTHON=python3.12            the Python to make the environment with (3.11 or later)
#   MODEL=./model.gguf           what `make serve` serves; the default model if empty
#   ARGS="--port 9000"           passed on to the command
#   TORCH_INDEX_URL=https://…    where to take torch from, for instance the index of PyTorch's CPU builds that its
#                                installation page names (a tenth of the size of the default build on Linux)
#
# Wheels that lie in wheels/ are preferred to downloads.

PYTHON ?= python3
MODEL ?=
ARGS ?=
MINUTES ?= 30
SEED ?= 1
TORCH_INDEX_URL ?=
IMAGE_PYTHON := 3.11

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/.*"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
WHEELS := $(if $(wildcard wheels/*.whl),--find-links wheels)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(WHEELS)
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: help serve test test-slow aot chaos figures soak lint format docs size bench wheels secrets clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

serve: $(VENV)/.serve ## serve the default model (or MODEL=…) at 127.0.0.1:8000
	$(BIN)/headrace serve $(MODEL) $(ARGS)

test: $(VENV)/.dev ## run the tests
	@$(BIN)/python -m shared.embedded_redis
	$(BIN)/headrace fetch
	$(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev ## run the tests that take long
	$(BIN)/headrace fetch
	$(BIN)/python -m pytest -q -m slow $(ARGS)

aot: $(VENV)/.dev ## compile the Triton kernels for every kind of GPU, without one (ARGS="--quick", ARGS=rms_norm)
	$(BIN)/python -m kernels.aot $(ARGS)

chaos: $(VENV)/.dev ## faults at random under load (MINUTES=30 SEED=1; a seed repeats its schedule)
	$(BIN)/headrace fetch
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) $(ARGS)

figures: $(VENV)/.dev ## measure the figures of the failure modes in docs/reliability.md, with the tests that show them
	$(BIN)/headrace fetch
	$(BIN)/python -m tests.chaos.figures $(ARGS)

soak: $(VENV)/.dev ## half an hour of mixed load (MINUTES=30), and what grows meanwhile
	MINUTES=$(MINUTES) $(BIN)/python -m tests.bench.soak

lint: $(VENV)/.dev ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev ## bring the code into its style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.dev ## make docs/settings.md and deploy/redis/users.acl from the code
	$(BIN)/python -m services.reference > docs/settings.md.new && mv docs/settings.md.new docs/settings.md
	$(BIN)/python -m shared.redis_acl > users.acl.new && mv users.acl.new deploy/redis/users.acl

size: ## count the product's lines of Python and C
	@for package in shared services kernels; do \
		find $$package -name '*.py' -o -name '*.c' -o -name '*.h' | xargs cat | wc -l | \
		xargs printf '%-10s %6d\n' $$package; done | awk '{ print; sum += $$2 } END { printf "%-10s %6d\n", "all", sum }'

bench: $(VENV)/.dev ## measure README's table of performance and write it (ARGS="--llama-same URL …", see --help)
	$(BIN)/headrace fetch
	$(BIN)/python -m tests.bench.performance --write $(ARGS)

wheels: $(VENV)/.made ## put a CPU build of torch into wheels/, for images
	$(BIN)/python -m pip download --quiet --no-deps --only-binary :all: --python-version $(IMAGE_PYTHON) \
		$(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) --dest wheels '$(TORCH)'
	@ls wheels/torch-*cpu*.whl >/dev/null 2>&1 || { rm -f wheels/torch-*.whl; \
		echo 'That was no CPU build: give TORCH_INDEX_URL (see the head of the Makefile).' >&2; exit 1; }

secrets: .env ## make the passwords for compose.yaml, once

.env:
	(umask 077 && deploy/redis/make-secrets > .env.new && mv .env.new .env)

clean: ## remove what was made here (not the state and models of `serve`)
	rm -rf $(VENV) build kernels/native/built *.egg-info .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'Python 3.11 or later is needed: make PYTHON=python3.11 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo 'Python cannot make environments here: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo 'Installing what is needed (once; torch is large)…'
	@$(if $(wildcard wheels/torch-*.whl),$(PIP_INSTALL) --no-index --no-deps '$(TORCH)' || true)
	@$(if $(TORCH_INDEX_URL),$(PIP_INSTALL) --index-url $(TORCH_INDEX_URL) '$(TORCH)')
	@touch $@

$(VENV)/.serve: pyproject.toml $(wildcard kernels/native/*.[ch]) $(VENV)/.torch
	$(PIP_INSTALL) -e '.[serve]'
	@$(BIN)/python -m kernels.native.build || true
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP_INSTALL) -e '.[dev]'
	@$(BIN)/python -m kernels.native.build || true
	@touch $@ $(VENV)/.serve
