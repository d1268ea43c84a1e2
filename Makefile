# Everything runs in .venv, made on first use. Python 3.11 or newer with pip, and make, are all that must be there.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
export OMP_NUM_THREADS ?= 1
# Images of Python like to set it. Without bytecode each process compiles vLLM and transformers anew: an import takes 13 s instead of 8.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-long matrix mutants agents faults seams check check-one lint fast ci setup format docs site clean

demo: $(READY)  ## run the main job: the demo model learns, in a few minutes, without a GPU
	$(PY) -m learner.run

WORKERS ?= 4
# Each worker boots an engine of its own; the tests of a file stay together, and share it. A run waits for much: four workers
# keep two cores busy.
PYTEST_ARGS ?=
PYTEST = $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

test: $(READY)  ## the tests, with the real engine
	$(PYTEST) tests

agents: $(READY)  ## agents and environments of others, with the real engine; needs node and 2 GB
	$(PY) -m pytest -q tests -m outside

test-long: $(READY)  ## what takes long: runs that are killed again and again, thousands of hostile requests, small benchmarks
	$(PYTEST) -m "long and not outside" tests

matrix: $(READY)  ## every value, key, column and metric in real runs, each with its effect: about a quarter of an hour
	$(PY) -m tests.matrix

KILLS ?= 1000
CASES ?= 5000
faults: $(READY)  ## thousands of kills and hostile requests; hours. Fewer: make faults KILLS=10 CASES=500
	$(PY) -m tests.faults --ledger $(KILLS) --server $$(($(KILLS) * 9 / 10)) --run $$(($(KILLS) / 10)) \
		--fleet $$(($(KILLS) / 2)) --nodes $$(($(KILLS) / 50))
	$(PY) -m tests.fuzz $(CASES)
	$(PY) -m tests.fuzz --engine real $(CASES)

SEED ?= 0
SAMPLE ?= 100
mutants: $(READY)  ## small changes of the code, which the tests have to notice; half an hour. Fewer: make mutants SAMPLE=10 SEED=1
	$(PY) -m tests.mutants --seed $(SEED) --sample $(SAMPLE)

seams: $(READY)  ## what is relied on inside vLLM, on the CUDA wheel of each version that is allowed: 1.6 GB, no GPU needed
	$(PY) scripts/vllm_seams.py --folder $(VENV)/seams

check: $(READY)  ## format, lint, types and fast tests, side by side: a minute
	$(MAKE) --no-print-directory -j 2 lint fast

DIR ?= tests
check-one: $(READY)  ## the same of one folder or file of tests: make check-one DIR=tests/learner/training
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest -q -n 0 -x $(PYTEST_ARGS) -m "not engine and not slow and not long and not outside" $(DIR)

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

fast: WORKERS = 2
fast: $(READY)
	$(PYTEST) tests -m "not engine and not seconds and not slow and not long and not outside"

ci: $(READY)  ## as continuous integration: check, test and test-long, and what fails once more, alone
	$(PY) -m tests.ci

setup: $(READY)  ## only prepare .venv

$(READY): constraints.txt pyproject.toml scripts/setup.sh scripts/dependencies.py
	@PYTHON=$(PYTHON) bash scripts/setup.sh $(VENV)
	@touch $(READY)

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

docs: $(READY)  ## write the pages that are made from code and from the benchmarks' reports
	$(PY) -m configs.keys --markdown > docs/configuration.md
	$(PY) scripts/code_map.py > docs/code-map.md
	$(PY) scripts/made_pages.py --write

SITE := mkdocs-material==9.8.2 mkdocs-same-dir==0.1.5
site: $(READY)  ## the documents as a site, in build/site
	$(PY) -m venv $(VENV)/site
	$(VENV)/site/bin/python -m pip install --quiet --disable-pip-version-check $(SITE)
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV)/site/bin/mkdocs build --strict
	cp LICENSE build/site/

clean:
	rm -rf $(VENV) runs data .pytest_cache .mypy_cache .ruff_cache
