# make demo: the whole pipeline at a small size, into out/demo.   make quick: the tests of one minute.   make test: what CI runs.
# make nightly: the long campaigns (attacks, kills, installs, clusters, other runtimes).   make check: ruff, mypy, imports.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
export PYTHONDONTWRITEBYTECODE :=  # Python keeps what it compiled: the tests start hundreds of processes

.PHONY: demo test quick nightly check setup clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt pyproject.toml
	@echo "installing requirements.txt into $(VENV): needs about 7 GB of disk (most of it torch's CUDA libraries)"
	@mkdir -p $(VENV)
	@$(PYTHON) -c 'import shutil, sys; free = shutil.disk_usage("$(VENV)").free / 2**30; sys.exit(0 if free > 9 else f"error: {free:.1f} GB are free here; 9 GB are needed")'
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or later is needed; name one with: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

demo: setup
	@PATH="$(abspath $(VENV))/bin:$$PATH" bash recipes/demo/run.sh out/demo

test: setup
	$(RUN) -m pytest -n 2 -m "not nightly"

quick: setup
	$(RUN) -m pytest -n 2 -m "not slow and not nightly"

nightly: setup
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt -e '.[llm,operating,pool,ray,search,stages,tvm]'
	$(RUN) -m pytest -n 2 -m nightly

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m mypy hase tests
	PYTHONPATH=. $(VENV)/bin/lint-imports

clean:
	rm -rf out
