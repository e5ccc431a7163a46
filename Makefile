# Everything works on a fresh machine with Python 3.10+ and make: the first target that needs it makes .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WAIT := @$(PYTHON) .ci/waiting.py
# (Bytecode of what is used is written when it is imported; of all that is installed it takes a minute.)
INSTALL := $(BIN)/pip install --disable-pip-version-check --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: none should compile our sources to bytecode again

.PHONY: demo test quick lint bench docs opinfo night coverage options clean help soak

help:            ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(WAIT) "creating .venv" $(PYTHON) -m venv .venv
	$(WAIT) "installing PyTorch" $(INSTALL) torch
	$(WAIT) "installing airgraph, its tests and examples" $(INSTALL) --editable '.[dev]'
	@touch $@

demo: $(STAMP)   ## one small model in three variants: prints the graphs, compares with eager, writes build/demo_report.html
	$(BIN)/airgraph demo

# The emulated npu changes a process for good, so tests/compat is a run of its own.
test: lint       ## all tests, after lint
	$(BIN)/python -m pytest -n 2 -m 'not night'
	$(BIN)/python -m pytest -n 2 -m 'not night' tests/compat

QUICK = $(addprefix tests/,ir plan passes engine/native/llvm engine/native/kernels/test_epilogues.py engine/test_in_place.py \
	engine/test_reference.py test_config.py test_families.py test_imports.py)
quick: $(STAMP)  ## the fast tests of graphs, passes, plans and engines, under a minute
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow' $(QUICK)

lint: $(STAMP)   ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/mypy --num-workers 2 || { [ $$? = 2 ] && $(BIN)/mypy; }  # workers have 3 s to start: too short on a busy machine

bench: $(STAMP)  ## speed, compile time and memory beside PyTorch, Inductor, ONNX Runtime and OpenVINO (an hour and a half)
	$(WAIT) "installing what the benchmarks need" $(INSTALL) --editable '.[bench]'
	$(BIN)/python benchmarks/cpu.py

opinfo: $(STAMP) ## PyTorch's own samples of every op, all types, compiled and on npu (about 40 minutes on two cores)
	$(BIN)/python tests/opinfo/opinfo.py
	$(BIN)/python tests/opinfo/opinfo.py --npu

soak: $(STAMP)   ## an hour of mixed calls: right results and flat memory
	$(BIN)/python tests/soak.py --seconds 3600

night: $(STAMP)  ## what is left out of `test`, random programs, arguments beside unreadable pages, mutants of exported models (several hours)
	AIRGRAPH_EXAMPLES=2000 $(BIN)/python -m pytest tests/test_property.py
	$(BIN)/python -m pytest -n 2 -m night
	$(BIN)/python -m pytest -n 2 -m night tests/compat
	$(BIN)/python tests/programs/run.py --generator networks --count 5000 --engine native
	$(BIN)/python tests/programs/run.py --generator networks --count 5000 --engine reference
	$(BIN)/python tests/programs/run.py --generator networks --count 5000 --engine replay
	$(BIN)/python tests/guard_pages.py
	$(BIN)/python tests/store/fuzz.py --count 10000

docs: $(STAMP)   ## the documentation as a site in build/site, offline; any warning is an error
	$(WAIT) "installing what the site needs" $(INSTALL) --editable '.[docs]'
	$(BIN)/python docs/site.py build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir build/site

coverage: $(STAMP)  ## docs/coverage.md, made from the registry
	$(BIN)/python -m airgraph.tools.coverage > docs/coverage.md

options: $(STAMP)  ## docs/options.md, made from the tables of options and environment variables
	$(BIN)/python -m airgraph.tools.options > docs/options.md

clean:           ## remove what make made
	rm -rf .venv build *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
