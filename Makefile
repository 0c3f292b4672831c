# Chores, the same here and in CI. `make` lists them.
PYTHON ?= python3
BIN := .venv/bin
PACKAGE := setup.cfg constraints.txt pyproject.toml
ARGS ?=
WORKERS ?= logical

.DEFAULT_GOAL := help
.PHONY: help venv proto demo-model serve test test-all test-cluster test-clients test-oldest manifests soak chaos check format bench bench-gpu test-gpu wheel test-wheel image test-image wheels sbom audit clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: .venv/installed ## create .venv with the pinned dependencies; again only when they change

.venv/installed: $(PACKAGE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: $(PYTHON) is missing or older than 3.11; name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev,demo,onnx,otel,router]'
	@touch $@

proto: venv ## generate the stubs in tgis/pb from proto/generation.proto
	$(BIN)/python proto/generate.py

demo-model: venv ## fetch and convert the demo model, once
	@$(BIN)/python -m demo smollm2

serve: venv ## serve the demo model on ports 8033 and 3000; MODEL=directory serves another, ARGS adds options
	@model="$(MODEL)"; \
	[ -n "$$model" ] || { model=$$($(BIN)/python -m demo smollm2) && name="--served-model-name smollm2"; } || exit 1; \
	exec $(BIN)/tgis serve "$$model" $$name $(ARGS)

test: venv ## run the tests, except the slow ones, on every core, and print their CPU seconds; ARGS goes to pytest
	@$(BIN)/python tests/support/cpu_seconds.py $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 \
	--dist loadfile --no-loadscope-reorder -m 'not slow and not gpu' $(ARGS)

test-all: test ## run every test that this machine can run, the slow ones one after the other
	$(BIN)/python -m pytest -m 'slow or gpu' $(ARGS)

test-cluster: venv ## run a model on two nodes and break them, in network namespaces where the system allows any; ARGS goes to pytest
	@$(BIN)/python -m demo glassllm > /dev/null
	@if unshare --map-root-user --net ip link add node0 type veth peer name node1 2>/dev/null; then \
		CLUSTER_TESTS=namespaces unshare --map-root-user --net $(BIN)/python -m pytest tests/cluster $(ARGS); else \
		echo "no network namespaces here: the nodes are on two loopback addresses, and no link is cut"; \
		CLUSTER_TESTS=loopback $(BIN)/python -m pytest tests/cluster $(ARGS); fi

test-clients: venv .cache/clients/installed ## run clients of the HTTP APIs in their own environment (needs npm), and five minutes of schemathesis; ARGS goes to pytest
	$(BIN)/python -m pytest tests/clients $(ARGS)

.cache/clients/installed: $(addprefix tests/clients/,requirements.txt package.json)
	$(PYTHON) -m venv .cache/clients
	.cache/clients/bin/python -m pip install --disable-pip-version-check --requirement $<
	cp tests/clients/package.json .cache/clients
	cd .cache/clients && npm install --silent --no-package-lock --no-audit --no-fund --ignore-scripts
	@touch $@

# What depends most on the versions of other packages.
OLDEST := tests/test_rooms.py tests/test_server.py tests/test_tracing.py tests/cli tests/api tests/frontend \
	tests/end_to_end/test_golden.py tests/engines/onnx tests/structured_output tests/prompts

test-oldest: .cache/oldest/installed ## run the tests that matter there with the oldest dependencies of setup.cfg; ARGS goes to pytest
	GRPC_VERBOSITY=NONE .cache/oldest/bin/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile \
	-m 'not slow and not gpu' $(OLDEST) $(ARGS)

.cache/oldest/installed: setup.cfg
	$(PYTHON) -m venv --clear .cache/oldest
	sed -n -e '/smg-grpc-proto/d' -e 's/^ *\([A-Za-z0-9_-]*\) >=\([^,; ]*\)[^;]*/\1==\2/p' setup.cfg > .cache/oldest/bounds.txt
	.cache/oldest/bin/python -m pip install --disable-pip-version-check --requirement .cache/oldest/bounds.txt \
	--editable '.[dev,demo,onnx,otel]'
	@touch $@

manifests: venv .cache/manifests/installed ## check deployment/ with kubectl, promtool, a Prometheus and more; nothing of it needs a cluster
	$(BIN)/python deployment/checks/run.py

.cache/manifests/installed: $(addprefix deployment/checks/,fetch.sh requirements.txt package.json)
	deployment/checks/fetch.sh $(BIN)/python .cache/manifests
	@touch $@

soak: venv ## test a server for fifteen minutes under everything that clients do; ARGS goes to benchmarks.soak
	$(BIN)/python -m benchmarks.soak $(ARGS)

chaos: venv ## attack a server and check its promises to honest clients; ARGS goes to benchmarks.chaos
	GRPC_VERBOSITY=NONE $(BIN)/python -m benchmarks.chaos $(ARGS)

check: venv ## lint, formatting, types, stubs
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check

format: venv ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: venv ## measure this machine; ARGS goes to benchmarks.suite
	$(BIN)/python -m benchmarks.suite $(ARGS)

wheel: venv ## build the source distribution and the wheel in dist/
	rm -rf build/lib build/bdist.* dist/tgis-*
	$(BIN)/python -m build

test-wheel: wheel ## install the wheel into an empty environment without a compiler, and serve a model with it
	INSTALL_TESTS=wheel $(BIN)/python -m pytest -o faulthandler_timeout=7200 tests/test_installed.py $(ARGS)

# BUILDER may also be docker, or podman with options; ARGS goes to its build.
BUILDER ?= podman
BASE ?=
VARIANT ?= cuda
IMAGE ?= tgis:$(VARIANT)

image: ## build the image; BASE, VARIANT, IMAGE (its name), BUILDER
	$(BUILDER) build --file Containerfile --tag $(IMAGE) $(if $(BASE),--build-arg BASE=$(BASE)) \
	--build-arg VARIANT=$(VARIANT) --build-arg GIT_COMMIT_HASH="$$(git rev-parse HEAD)" $(ARGS) .

test-image: venv ## build the image for CPUs on a Debian made by debootstrap, and serve a model with it, as root
	INSTALL_TESTS=image BUILDER="$(BUILDER)" $(BIN)/python -m pytest -o faulthandler_timeout=7200 tests/test_installed.py $(ARGS)

# With WHEELS=directory a machine without a network uses its own Python: its torch, and what `make wheels` fetched.
WHEELS ?=
OFFLINE = $(PYTHON) -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target .cache/wheels \
	$(WHEELS)/*.whl && \
	PYTHONPATH=$(CURDIR)/.cache/wheels:$(CURDIR) $(PYTHON)

bench-gpu: $(if $(WHEELS),,venv) ## measure tgis_native on this machine's GPU; ARGS goes to benchmarks.gpu
	$(if $(WHEELS),$(OFFLINE),$(BIN)/python) -m benchmarks.gpu $(ARGS)

test-gpu: $(if $(WHEELS),,venv) ## run the tests that need a GPU; ARGS goes to pytest
	$(if $(WHEELS),$(OFFLINE),$(BIN)/python) -m pytest -p no:benchmark tests/engines/*/test_*_gpu.py tests/engines/kernels/test_triton_kernels.py $(ARGS)

wheels: ## fetch into WHEELS what Python 3.12 on a GPU machine may lack beside torch and transformers
	$(PYTHON) -m pip download --disable-pip-version-check --no-deps --only-binary :all: --constraint constraints.txt \
	--python-version 3.12 --implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
	--platform manylinux_2_31_x86_64 --platform manylinux_2_34_x86_64 --dest \
	$(or $(WHEELS),$(error name a directory: make wheels WHEELS=directory)) cffi cryptography googleapis-common-protos grpcio \
	grpcio-health-checking grpcio-reflection grpcio-status llguidance msgspec protobuf pycparser uvloop

sbom: venv .cache/audit/installed ## write the packages of .venv and their licenses to dist/sbom.json (CycloneDX); its tool needs the network once
	@mkdir -p dist
	.cache/audit/bin/cyclonedx-py environment --gather-license-texts --output-reproducible \
	--output-file dist/sbom.json $(BIN)/python

audit: .cache/audit/installed ## look for known vulnerabilities in constraints.txt; asks the package index, so it needs the network
	.cache/audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off $(ARGS)

.cache/audit/installed: Makefile
	$(PYTHON) -m venv --clear .cache/audit
	.cache/audit/bin/python -m pip install --disable-pip-version-check cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@

clean: ## remove everything that make created, except the demo models in .cache
	rm -rf .venv .cache/clients .cache/oldest .cache/audit .cache/manifests build dist *.egg-info client/build client/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tgis demo benchmarks tests proto deployment -name __pycache__ -type d -prune -exec rm -rf {} +
