# make demo | make test | make test-all | make fuzz | make lint | make check-plans | make update-plans: each installs what it needs into .venv first, and again only when the requirements change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
TYPING := $(VENV)/typing/dyngran
FLOORS := compiler runtime passes kernels

# The repository's root must not be importable: it would make `kernels` a top-level module (docs/decisions.md).
export PYTHONSAFEPATH := 1

.PHONY: install vision demo test test-all fuzz zoo lint check-plans update-plans typing clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements-dev.txt $(wildcard passes/native/*.cpp passes/native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c requirements-dev.txt setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -c requirements-dev.txt --no-build-isolation -e '.[dev]'
	touch $@

# timm and torchvision for the zoo, in a folder of their own: where torch is a CPU build, transformers must not find torchvision.
vision: $(VENV)/vision/installed

$(VENV)/vision/installed: $(STAMP) tests/zoo/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/vision -r tests/zoo/requirements.txt
	touch $@

demo: install
	$(BIN)/python bench/demo.py

test: install vision
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow"

test-all: install vision
	$(BIN)/python -m pytest -n 2 --dist loadgroup

# Random programs against eager mode; stopped, it goes on where it was. FUZZ_STATE is a file, SHARD is "1/2" for the first of two halves.
FUZZ_STATE ?= fuzz.jsonl
SHARD ?= 1/1
fuzz: install
	$(BIN)/python tests/fuzz/run.py --level joint --programs 20000 --shard $(SHARD) --state $(FUZZ_STATE)
	$(BIN)/python tests/fuzz/run.py --level compile --programs 1000 --shard $(SHARD) --state $(FUZZ_STATE)

# One training step of every model of the zoo; stopped, it goes on where it was. ZOO is what to say beside, as "--codegen inductor --device cuda".
ZOO ?=
zoo: vision
	PYTHONPATH=$(VENV)/vision $(BIN)/python tests/zoo/run.py $(ZOO)
	$(BIN)/python tests/zoo/table.py -o docs/zoo.md

lint: install typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p dyngran

# The committed plans of the demo's models: traced again, and compared. update-plans makes them anew.
check-plans: install
	$(BIN)/dyngran-plan check bench/plans/gpt.json bench/targets.py:gpt
	$(BIN)/dyngran-plan check bench/plans/resnet.json bench/targets.py:resnet

update-plans: install
	$(BIN)/dyngran-plan build bench/targets.py:gpt --device h100 --budget 115MiB -o bench/plans/gpt.json
	$(BIN)/dyngran-plan build bench/targets.py:resnet --device cpu --codegen eager --budget 21MiB -o bench/plans/resnet.json

# mypy does not follow setuptools' editable finder, so it gets the packages as the tree that they are imported as.
typing:
	rm -rf $(TYPING)
	mkdir -p $(TYPING)
	ln -s $(CURDIR)/dyngran/* $(FLOORS:%=$(CURDIR)/%) $(TYPING)/

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
