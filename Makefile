# make demo   set up, then generate with the embedded model, with and without its drafter
# make test   set up, then every check: linter, types, import contract, tests
# make soak   set up, then the tests that take minutes each
# make chaos  set up, then kill runs at random until they are done, and audit them (CHAOS_SEED, CHAOS_RUNS)
# make faults kill each part of the endpoint under load, overload it, and write the table
# make hostile  attack the endpoint with one key while another one is in use, and write the table
# make rehearsal  resolve the configuration of every model, drafter and GPU, without a GPU; write benchmarks/rehearsal.md
# make setup  only install the environment, in .venv
# make audit-deps  ask OSV which of the locked packages have known vulnerabilities (needs a network)
# make docs   build the site into build/site, and check its links
# make docs-reference  write the pages of docs/reference/ again, from the commands and their configuration
# make docs-bad-inputs  write docs/bad-inputs.md again, from the messages of commands with bad input
# make docs-requests  write the table of docs/requests.md again, from peagle/requests/fields.py
# make docs-images  take the pictures of the docs again, in headless Chromium
# make docs-recording  run the first command of the README and draw its output, docs/images/first-run.svg
# make docs-metrics  draw the dashboard's panels of docs/metrics.md again, from a real Prometheus (Debian's package prometheus)
# make lock   resolve requirements/*.txt again
#
# LOCK=cuda chooses the CUDA build of vLLM; PYTHON names the interpreter (CPython 3.11 or newer).

LOCK ?= cpu
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Used only when the configured package indexes do not have the CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test soak chaos faults hostile rehearsal setup check audit-deps docs docs-reference docs-bad-inputs docs-requests docs-images docs-recording docs-metrics lock clean
.DELETE_ON_ERROR:

demo: setup
	$(BIN)/peagle demo

# Unit tests run separately from integration tests: they raise signals, which killed a worker that was connected to Ray.
# tests/conftest.py assigns integration tests to workers.
test: setup check docs
	$(BIN)/python -m pytest tests/rehearsal tests/unit -n logical --maxprocesses 8 --dist loadfile
	$(BIN)/python -m pytest tests/integration tests/browser -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

soak: setup
	$(BIN)/python -m pytest -m soak

chaos: setup
	$(BIN)/python -m tests.chaos

faults: setup
	$(BIN)/python -m tests.faults

hostile: setup
	$(BIN)/python -m tests.hostile

rehearsal: setup
	$(BIN)/python -m tests.rehearsal

setup: $(VENV)/.installed-$(LOCK)

# An interrupted installation leaves `.installing` behind, and maybe half a package. In that case, start with a clean environment.
$(VENV)/.installed-$(LOCK): requirements/$(LOCK).txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"peagle needs CPython 3.11 to 3.13, and $(PYTHON) is {v[0]}.{v[1]}: make setup PYTHON=python3.11")'
	@if [ -e $(VENV)/.installing ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then $(PYTHON) -m venv --clear $(VENV); fi
	@rm -f $(VENV)/.installed-*; touch $(VENV)/.installing
	@echo "Installing requirements/$(LOCK).txt into $(VENV) (several minutes the first time) ..."
	@torch=$$(grep -o '^torch==[^ ;]*' requirements/$(LOCK).txt); \
	$(BIN)/python -m pip install -qq --no-deps "$$torch" 2>$(VENV)/.pip-log || { \
		echo "$$torch is not on the configured indexes; trying $(TORCH_CPU_INDEX)"; \
		$(BIN)/python -m pip install -qq --no-deps --extra-index-url $(TORCH_CPU_INDEX) "$$torch"; }
	@$(BIN)/python -m pip install -qq --no-deps -r requirements/$(LOCK).txt
	@$(BIN)/python -m pip install -qq --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q peagle pipelines jobs  # otherwise each process would compile, if Python cannot write bytecode
	@rm -f $(VENV)/.installing $(VENV)/.pip-log; touch $@

check:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# OSV does not know local versions such as 2.13.0+cpu and would report no vulnerabilities, so the public version is looked up.
# AUDIT selects another service: AUDIT='--vulnerability-service osv --osv-url https://...'.
AUDIT ?= --vulnerability-service osv
PIP_AUDIT := $(VENV)/audit/bin/pip-audit

audit-deps: $(PIP_AUDIT)
	@for lock in cpu cuda; do \
		sed -E 's/^([^ ;]+==[^ ;+]+)\+[a-z0-9.]+/\1/' requirements/$$lock.txt >$(VENV)/audit/$$lock.txt; \
		echo "requirements/$$lock.txt:"; \
		if ! $(PIP_AUDIT) $(AUDIT) --strict --no-deps --disable-pip --progress-spinner off -r $(VENV)/audit/$$lock.txt \
				2>$(VENV)/audit/$$lock.log; then \
			if grep -qE 'ConnectionError|ConnectTimeout|ReadTimeout' $(VENV)/audit/$$lock.log; then \
				echo "nothing was audited: the service cannot be reached ($(VENV)/audit/$$lock.log)" >&2; exit 2; \
			fi; \
			tail -n 20 $(VENV)/audit/$$lock.log >&2; exit 1; \
		fi; \
	done

$(PIP_AUDIT):
	@$(PYTHON) -m venv --clear $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install -qq pip-audit==2.10.1

# The pages keep their places in the repository, so that their links work in both.
SITE := build/site-source
ZENSICAL := $(VENV)/docs/bin/zensical

docs: $(ZENSICAL)
	@rm -rf $(SITE); mkdir -p $(SITE)
	@find *.md LICENSE docs examples deploy benchmarks peagle/catalog/heads -type f \
		! -name '*.pyc' ! -name '*.safetensors' -print0 | xargs -0 cp --parents -t $(SITE)
	@NO_COLOR=1 $(ZENSICAL) build --strict

$(ZENSICAL): requirements/docs.txt
	@$(PYTHON) -m venv --clear $(VENV)/docs
	@$(VENV)/docs/bin/python -m pip install -qq --no-deps -r requirements/docs.txt
	@touch $@

docs-reference: setup
	WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/unit/docs

docs-bad-inputs: setup
	WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/unit/bad_inputs

docs-requests: setup
	WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/unit/requests/test_fields.py

docs-images: setup
	WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/browser

docs-recording: setup
	cd examples && PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=.. python -m benchmarks.record ../docs/images/first-run.svg \
		'peagle generate --input capitals.csv --output /tmp/peagle-first-run --max-tokens 48' 'peagle show /tmp/peagle-first-run'
	@rm -rf /tmp/peagle-first-run

docs-metrics: setup
	WRITE_DOCS=1 $(BIN)/python -m pytest -q -m soak tests/integration/test_prometheus.py

UV_COMPILE = $(BIN)/uv pip compile pyproject.toml --extra train --extra embedded --extra dev \
	--override requirements/overrides.txt --universal --python-version 3.11 \
	--no-header --no-emit-find-links --no-emit-index-url --quiet --upgrade
# Where the resolver finds the CPU build of torch (uv does not read pip's configuration).
LOCK_TORCH ?= --extra-index-url $(TORCH_CPU_INDEX)

lock: setup
	$(BIN)/python -m pip install -qq uv
	$(UV_COMPILE) --extra cpu $(LOCK_TORCH) --override requirements/cpu-overrides.txt \
		--no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec --output-file requirements/cpu.txt
	$(UV_COMPILE) --extra cuda --output-file requirements/cuda.txt

clean:
	rm -rf $(VENV) runs
