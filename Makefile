# Everything runs in .venv, made here with nothing but Python >= 3.10, make and the package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CPU torch by default; with your own CUDA torch: make TORCH=own ... (installs into .venv that
# sees your site-packages, and no constraint replaces your torch).
ifeq ($(TORCH),own)
VENV_FLAGS := --system-site-packages
CONSTRAINT :=
else
VENV_FLAGS :=
CONSTRAINT := -c constraints.txt
endif
STAMP := $(VENV)/.installed
OUT ?= demo-out

.PHONY: demo docs test test-all lint types format install clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hooked_ssm/ops/selective_scan/kernel.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@echo "installing into $(VENV), some minutes ..."
	$(BIN)/pip install --quiet --disable-pip-version-check $(CONSTRAINT) -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/hooked-ssm demo --out $(OUT)

# The site, in site/: open site/index.html.
docs: $(STAMP)
	$(BIN)/python docs/make_hook_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# One process per core, one thread each: the tensors of tests are too small for more.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

test: lint types
	$(PYTEST)

test-all: lint types
	$(PYTEST) --slow

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site *.egg-info
