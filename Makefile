# A fresh machine needs python3 (3.11 or later) and make; everything else is installed into .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Where the environment forbids bytecode, each process would compile torch anew: two thirds of the time to import it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test release check package notebooks course docs site lint types install clean

help:           ## what this file can do
	@grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | awk -F':.*## ' '{printf "%-10s %s\n", $$1, $$2}'

demo: install   ## from nothing to a quantized engine and a report
	$(BIN)/python -m compress qat --recipe resnet50.yaml

# loadfile: a process runs a file whole, so that what its tests share is made once; the longest come first (conftest.py)
TESTS := -n 2 --dist loadfile --no-loadscope-reorder

test: install   ## the test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -m "not release" --durations 15

release: install  ## the tests of `make test`, and their further cases: networks, recipes and faults of the same kind
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) --durations 15

# Tests of the same name as a changed file, or of its room; SINCE names the branch to compare with.
SINCE ?= main
check: lint types  ## style, types, and the tests of what changed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $$($(BIN)/python tests/changed.py $(SINCE))

package: types  ## source distribution, the wheel made of it, and its types as a program that installs it sees them
	rm -rf build/package && mkdir -p build/package
	$(BIN)/python -c "from setuptools.build_meta import build_sdist; build_sdist('build/package')" > build/package/log
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/package build/package/*.tar.gz
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --target build/package/site build/package/*.whl
	cp -r .mypy_cache build/package/cache
	cp tests/typed_consumer.py build/package && cd build/package && PYTHONPATH=site $(abspath $(BIN)/mypy) \
		--config-file $(CURDIR)/pyproject.toml --cache-dir cache typed_consumer.py

notebooks: install  ## run the notebooks and write their outputs into them
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[notebooks]"
	OMP_NUM_THREADS=1 $(BIN)/jupyter execute --inplace examples/notebooks/*.ipynb

course: install  ## write the notebooks of the course and run every lesson
	$(BIN)/python docs/course/build.py
	COURSE=all OMP_NUM_THREADS=2 $(BIN)/python -m pytest -q tests/test_course.py --durations 12

docs: install   ## the documentation as a site, in build/site
	$(BIN)/mkdocs build --strict

site: install   ## the same on the branch gh-pages, beside the versions that are there; `git push origin gh-pages` publishes it
	$(BIN)/python -m pip install --quiet --constraint constraints.txt mike
	PATH="$(abspath $(BIN)):$$PATH" mike deploy --update-aliases $$($(BIN)/python -c "from compress.version import __version__ as v; print(v.rpartition('.')[0])") latest
	$(BIN)/mike set-default latest

lint: install   ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## static types
	$(BIN)/mypy

install: $(READY)  ## the environment, in .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# Without bytecode: Python compiles a module when it is first imported, and most modules of the packages never are.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable ".[dev]"
	# Type stubs of TensorRT alone: they ask for the 2 GB of its libraries, which no check needs.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-deps tensorrt-stubs
	touch $(READY)

clean:          ## remove the environment and caches; runs/ and results/ stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
