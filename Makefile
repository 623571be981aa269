# Two commands do all set-up on a fresh Debian: `make up` runs a real training job, `make test` runs every test.
#
#   TORCH        what pip installs as torch            (make up TORCH=torch==2.12.0)
#   TORCH_INDEX  the package index to take it from      (make up TORCH_INDEX=https://download.pytorch.org/whl/cpu)
#   HEAVY        where `make heavy` keeps the environments of other frameworks
#   PYTHON       the interpreter that makes .venv       (make up PYTHON=python3.12)
#   JOBS         how many files of tests run at once    (make test JOBS=1)
#   CONTROL_ROUNDS  how often `make controls` plays all of them
#   KILLER_WORLDS  where `make killer` plays, with `;` between the names (make killer KILLER_WORLDS='plain; network home')
#   WAYS         over which ways to the nodes `make transports` plays its suites
#   KILLER_START   how it starts its ranks              (make killer KILLER_START=fork)
#   FUZZ_INPUTS  how many inputs `make fuzz` makes up in all
#   RELEASE_ARGS  what `make release` gets              (make release RELEASE_ARGS=--tag)
#   MUTANTS      how many `make mutants` draws, by MUTANTS_SEED

SHELL := /bin/bash
.DELETE_ON_ERROR:
# Where nothing keeps the bytecode, each program that a test starts compiles all of its modules anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
JOBS ?= 5
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
CONTROL_ROUNDS ?= 20
MUTANTS ?= 200
FUZZ_INPUTS ?= 200000
MUTANTS_SEED ?= 1
HEAVY ?= $(CURDIR)/.venv-heavy
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SYSTEM_TESTS := openssh-server openssh-client iproute2 nftables libfaketime tcsh fish zsh tmux fuse3 gcc libc6-dev \
                locales systemd libpam-oath oathtool slurm-wlm munge krb5-kdc krb5-admin-server krb5-user
WAYS ?= builtin openssh command srun
WAY_SUITES := $(addprefix tests/lab/test_,faults.py adoption.py up.py remaining.py srun.py)
SYSTEM_BENCH := pdsh clustershell
SITE_PACKAGES := zensical==0.0.73,pyyaml
SYSTEM_RECIPES := openmpi-bin g++
SYSTEM_CONTAINERS := podman runc busybox-static

.PHONY: help up test check lock unit agent lab-tests e2e lab browser containers bench format release site clean killer controls heavy recipes health-repeat docs mutants worlds fuzz soak why transports screens deep

help:  ## Show what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(VENV)/.train  ## Set up, then train a real model on two local nodes with two workers each
	$(BIN)/clusterctl up cluster.example.yaml

test: $(VENV)/.dev $(VENV)/.system check  ## Install what the tests need, then run everything
	@# Each of those processes collects all tests. In a fresh clone it would first compile their assertions: do that once.
	@[ -d tests/unit/__pycache__ ] || { collect="$(BIN)/python -m pytest -p no:cacheprovider --collect-only -qq"; \
	  $$collect tests/unit >/dev/null & $$collect --ignore tests/unit >/dev/null; wait; }
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: $(VENV)/.dev  ## Format, lint, types, imports, locks
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lock.py --check

lock: $(VENV)/bin/python  ## Write the locks of what is installed, with hashes (requirements/)
	$(PIP) uv
	$(BIN)/python .ci/lock.py

controls: $(VENV)/.dev $(VENV)/.system  ## Healthy runs that look stalled from outside, again and again
	CONTROL_ROUNDS=$(CONTROL_ROUNDS) $(BIN)/python -m pytest tests/lab/test_stall_controls.py $(PYTEST_ARGS)

format: $(VENV)/.dev  ## Put the code into its form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fuzz: $(VENV)/.dev  ## Whatever may arrive, for every reader of it, FUZZ_INPUTS times in all
	FUZZ_INPUTS=$(FUZZ_INPUTS) $(BIN)/python -m pytest tests/unit/test_fuzz.py --timeout 1800 $(PYTEST_ARGS)

unit: $(VENV)/.dev  ## Only the pure tests
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

agent: $(VENV)/.dev  ## Only the tests with processes, without ssh
	$(BIN)/python -m pytest tests/agent $(PYTEST_ARGS)

lab-tests: $(VENV)/.dev $(VENV)/.system  ## Only the tests on lab nodes
	$(BIN)/python -m pytest tests/lab tests/e2e $(PYTEST_ARGS)

lab: $(VENV)/.dev $(VENV)/.system  ## Start lab nodes for a person, until Ctrl-C
	$(BIN)/python -m tests.lab $(LAB_ARGS)

# Two processes: once a lab has started in a process, there is no way to a package index.
heavy: $(VENV)/.dev $(VENV)/.system  ## Only the tests with other frameworks (2 GB), and with each release of torch (6 GB at a time; TORCH_VERSIONS="2.8.0 2.14.1")
	CLUSTERCTL_HEAVY=$(HEAVY) $(BIN)/python -m pytest tests/heavy/test_frameworks.py $(PYTEST_ARGS)
	CLUSTERCTL_HEAVY=$(HEAVY) $(BIN)/python -m pytest tests/heavy/test_torch_versions.py -rP $(PYTEST_ARGS)

recipes: $(VENV)/.dev $(VENV)/.system  ## Each recipe among the templates on two lab nodes, with a rank killed once (1 GB of frameworks; PYTEST_ARGS='-k trl')
	@$(MAKE) --no-print-directory system PACKAGES="$(SYSTEM_RECIPES)"
	CLUSTERCTL_HEAVY=$(HEAVY) $(BIN)/python -m pytest tests/heavy/test_recipes.py $(PYTEST_ARGS)

health-repeat: $(VENV)/.dev $(VENV)/.system  ## Look at healthy lab nodes 50 times (HEALTH_ROUNDS), as root and as an ordinary user: no false alarm
	HEALTH_ROUNDS=$${HEALTH_ROUNDS:-50} $(BIN)/python -m pytest tests/lab/test_health.py -k healthy --timeout 1800 $(PYTEST_ARGS)

mutants: $(VENV)/.mutation $(VENV)/.system  ## Break the deciding modules 200 times, and see whether a test minds (MUTANTS, MUTANTS_SEED)
	$(BIN)/python -m tests.mutation --count $(MUTANTS) --seed $(MUTANTS_SEED) $(MUTANTS_ARGS)

killer: $(VENV)/.dev $(VENV)/.system  ## Kill a random process of a run at a random moment, 200 times (KILLER_RUNS, KILLER_SEED, KILLER_WORLDS, KILLER_START); cut a link for a minute
	CLUSTERCTL_LONG=1 $(BIN)/python -m pytest tests/lab/test_faults.py tests/lab/test_cast.py tests/lab/test_environments.py \
	  tests/e2e/test_notify.py tests/lab/test_containers.py tests/lab/test_line_of_users.py \
	  tests/unit/run/test_machine_ledger.py \
	  -k 'waits_for_its_turn or minute or head_is_killed or second_cast or dies_while or arrives_once or hundred_kills or tears_nothing or thousand_runs' $(PYTEST_ARGS)
	CLUSTERCTL_LONG=1 $(BIN)/python -m pytest tests/unit/health/deep/test_pairing.py $(PYTEST_ARGS)
	$(BIN)/python -m tests.lab.killer

deep: $(VENV)/.dev $(VENV)/.system  ## Deep checks of eight lab nodes, with one fault each and without (DEEP_ROUNDS), and kills (DEEP_KILLS)
	CLUSTERCTL_LONG=1 DEEP_ROUNDS=$${DEEP_ROUNDS:-10} $(BIN)/python -m pytest tests/lab/test_deep.py tests/e2e/test_deep.py --timeout 1800 $(PYTEST_ARGS)

why: $(VENV)/.dev $(VENV)/.system  ## Let runs go wrong in every way that we know, and see what `clusterctl why` says of each (WHY_ARGS)
	$(BIN)/python -m tests.lab.why $(WHY_ARGS)

soak: $(VENV)/.dev $(VENV)/.system  ## Weeks and 1,000 restarts in minutes: what a run takes of disk, memory, descriptors and processor (SOAK_ARGS)
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

transports: $(VENV)/.dev $(VENV)/.system  ## The suites of faults, adoption, start, output and remains over each way to the nodes (WAYS)
	@failed=; for way in $(WAYS); do echo "over $$way:"; \
	  LAB_WAY=$$way $(BIN)/python -m pytest $(WAY_SUITES) $(PYTEST_ARGS) || failed="$$failed $$way"; done; \
	[ -z "$$failed" ] || { echo "failed over:$$failed"; exit 1; }

screens: $(VENV)/.dev $(VENV)/.system  ## Capture the screens that people see most (docs/screens); SCREENS_ARGS='--columns 60 --plain'
	$(BIN)/python -m tests.screens docs/screens $(SCREENS_ARGS)
	$(BIN)/python -m tests.moving_screen docs/screens/clusterctl.svg

browser: $(VENV)/.dev $(VENV)/.system  ## The live page in a real Chromium, which this installs
	@$(MAKE) --no-print-directory system PACKAGES=chromium
	$(PIP) playwright
	CLUSTERCTL_LONG=1 $(BIN)/python -m pytest tests/e2e/test_serve_browser.py $(PYTEST_ARGS)

containers: $(VENV)/.dev $(VENV)/.system  ## Runs in containers of a real podman, which this installs (`make test` skips them without podman)
	@$(MAKE) --no-print-directory system PACKAGES="$(SYSTEM_CONTAINERS)"
	$(BIN)/python -m pytest tests/lab/test_containers.py $(PYTEST_ARGS)

worlds: $(VENV)/.dev $(VENV)/.system  ## Play runs in every world that machines may live in, for longer than a false alarm takes
	CLUSTERCTL_LONG=1 $(BIN)/python -m pytest tests/lab/test_worlds.py $(PYTEST_ARGS)

bench: $(VENV)/.dev $(VENV)/.system  ## Measure against peers, side by side
	@command -v pdsh clush >/dev/null || $(MAKE) --no-print-directory system PACKAGES="$(SYSTEM_BENCH)"
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

docs: $(VENV)/.dev  ## Write the generated files again
	$(BIN)/python -m clusterctl.cli.command_reference docs/cli.md
	$(BIN)/clusterctl config --schema -o docs/cluster.schema.json
	$(BIN)/python -m clusterctl.config.schema docs/cluster-file.md
	$(BIN)/python -m clusterctl.health.reference_page > docs/health.md

release: $(VENV)/.dev  ## Build wheel, sdist, .pyz, SBOM and notes into dist/, install and run each; publishes nothing (RELEASE_ARGS=--tag)
	$(BIN)/python .ci/release.py $(RELEASE_ARGS)

site: $(VENV)/.dev  ## Build the documents as a static site (build/site), and check all its links
	$(BIN)/uv run --quiet --no-project --with $(SITE_PACKAGES) .ci/site.py

clean:  ## Remove what make made
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# --- set-up

$(VENV)/bin/python:
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory system PACKAGES=python3-venv
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: $(VENV)/bin/python pyproject.toml requirements/head.lock
	$(PIP) --require-hashes --requirement requirements/head.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.train: $(VENV)/.base
	@echo "installing $(TORCH), keras and scikit-learn (about 1 GB with the CPU build of torch, 6 GB with CUDA)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(PIP) --no-build-isolation --editable '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train requirements/dev.lock
	$(PIP) --require-hashes --requirement requirements/dev.lock
	@touch $@

$(VENV)/.mutation: $(VENV)/.dev
	$(PIP) --no-build-isolation --editable '.[train,dev,mutation]'
	@touch $@

$(VENV)/.system: $(VENV)/bin/python
	@$(MAKE) --no-print-directory system PACKAGES="$(SYSTEM_TESTS)"
	@touch $@

.PHONY: system
system:
	@missing=; for p in $(PACKAGES); do dpkg -s "$$p" >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	[ -z "$$missing" ] && exit 0; \
	as=; [ "$$(id -u)" = 0 ] || as="sudo -n"; \
	if $$as true 2>/dev/null && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; \
	  $$as apt-get update -qq && DEBIAN_FRONTEND=noninteractive $$as apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	else \
	  echo "error: these packages are missing:$$missing"; \
	  echo "hint: sudo apt-get install$$missing"; exit 1; \
	fi
