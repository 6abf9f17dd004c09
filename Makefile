# `make demo` and `make test` run the set-up themselves; everything goes into .venv of this checkout.

PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
BEGUN := $(shell date +%s)
PROTOS := $(wildcard proto/penstock/v1/*.proto)
STUBS := clients/python

# Modules of another environment must not shadow those of .venv, which Python compiles when first imported:
# without the compiled files, every start of vLLM takes ten seconds longer.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast backends faults fuzz soak lint types images lock site gen gen-into reference clients \
	gen-clients gen-clients-into format cluster-test bench bench-codec bench-serving bench-update bench-staleness bench-weights bench-adapters \
	bench-delta bench-buffer bench-journal bench-journal-stores bench-overlap bench-corrections bench-parity \
	bench-attempts bench-stalls bench-pool bench-prefix simulate

help: ## list the targets
	@echo "make TARGET [ARGS=\"...\"] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## set up .venv, with ENGINE=cpu or cuda; takes a fraction of a second if it is up to date
	@$(PYTHON) .ci/setup.py $(ENGINE)

demo: setup ## train a real model over the wire; takes ARGS="--steps 10 --task chain_sum"
	@$(BIN)/penstock demo --setup-seconds $$(($$(date +%s) - $(BEGUN))) $(ARGS)

# Each test file stays in one process, so that its shared fixtures start once. Three processes, one more than
# there are cores, because many tests wait.
test: setup ## run all tests; takes ARGS="-k codec"
	-@$(BIN)/python .ci/clients.py
	-@$(BIN)/python .ci/programs.py
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# No process but pytest's own, no model and no vLLM: tests/support/slow.py has what is left out.
test-fast: setup ## the unit tests, in about a minute on two cores; ARGS="-k codec" are passed on
	@$(BIN)/python -m pytest -q -n 3 --dist loadfile -m "not slow and not long" $(ARGS)

backends: setup ## test each training backend on up to four ranks: same numbers as one process, and the tiny demo learns
	@$(BIN)/python -m pytest -q -rP -m "long or not long" tests/trainer/policy/test_megatron_policy.py tests/trainer/policy/test_megatron_end_to_end.py tests/system/test_demo_backends.py $(ARGS)

# Set-up does not install Ray; without it, its tests are skipped with a reason.
cluster-test: setup ## test `penstock up` on a local Ray cluster and kill each actor; installs Ray
	@$(BIN)/python .ci/add_extra.py ray
	@$(BIN)/python -m pytest tests/up/test_cluster.py tests/up/test_keeper.py tests/up/test_ray_placement.py $(ARGS)
	@$(BIN)/python -m pytest -q tests/faults/test_f23_cluster.py --fault-count $(or $(FAULTS),1)

FAULTS :=
EXAMPLES := 10000
MACHINES := 2000
FUZZ_SECONDS := 3600
GROUPS := 1000000
UPDATES := 200
SEED :=
RESULTS := tests/faults/results.json
# These runs are long on purpose: no stack dump of a slow test.
UNHURRIED := -o faulthandler_timeout=0
FAULTY = $(BIN)/python -m pytest -q $(UNHURRIED) --machine-examples $(MACHINES) \
	--fuzz-seconds $(FUZZ_SECONDS) --fault-results=$(RESULTS) \
	$(if $(SEED),--fault-seed $(SEED))

# The report is written even if a fault test fails.
faults: setup ## run each fault test as often as its table says, or FAULTS=3 times; SEED=7; writes docs/internals/reliability.md
	-@$(BIN)/python .ci/add_extra.py ray
	-@$(BIN)/python .ci/programs.py
	@$(FAULTY) tests/faults tests/system/test_end_to_end.py -k "not soak" $(if $(FAULTS),--fault-count $(FAULTS),--fault-table) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

fuzz: setup ## fuzz every RPC: EXAMPLES=10000 from each descriptor, FUZZ_SECONDS=3600 of raw bytes, MACHINES=2000 model runs
	@$(FAULTY) tests/faults/test_f12_*.py --fault-count $(EXAMPLES) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

soak: setup ## run GROUPS=1000000 groups with kills of the server; UPDATES=200 weight updates under load, with faults; SEED=7
	@$(BIN)/python -m pytest tests/faults -q $(UNHURRIED) -m "long or not long" -k soak --soak-groups $(GROUPS) --updates $(UPDATES) \
		--fault-results=$(RESULTS) $(if $(SEED),--fault-seed $(SEED)) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

lint: setup ## check code with ruff, buf lint and buf format, and that uv.lock is up to date
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/uv lock --check --quiet
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

types: setup ## check types with pyright, in strict mode for this project's code
	@$(BIN)/pyright

format: setup ## fix lint findings with ruff and buf
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/buf format --write

lock: setup ## update uv.lock after a change of pyproject.toml; ARGS="--upgrade" for newer versions
	@$(BIN)/uv lock $(ARGS)

images: setup ## build the images of docker/ with docker or podman, and run them; takes ARGS="-k client"
	@$(BIN)/python -m pytest -q -rP -m long tests/project/test_images.py $(ARGS)

site: setup ## build the documentation site into build/site
	@$(BIN)/python .ci/site.py
	@$(BIN)/zensical build --strict

gen: setup gen-into ## generate the Python stubs from proto/

# Without set-up, so that its test can use another folder: make gen-into STUBS=/tmp/stubs
gen-into:
	@PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
		--python_out=$(STUBS) --grpc_python_out=$(STUBS) \
		--mypy_out=quiet:$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(PROTOS)

reference: setup ## write the generated pages of docs/reference/
	@$(BIN)/python -m tests.support.reference

clients: setup ## set up, build and test the TypeScript and Go clients, if their tools are available
	@$(BIN)/python .ci/clients.py
	@$(BIN)/python -m pytest tests/system/test_languages.py tests/system/test_client_packages.py $(ARGS)

CLIENT_STUBS := .
GOOGLE_PROTOS = $(dir $(shell $(BIN)/python -c "import google.rpc; print(list(google.rpc.__path__)[0])"))..
TS_OPTIONS := env=node,esModuleInterop=true,importSuffix=.js,forceLong=bigint,oneof=unions-value,outputJsonMethods=false,exportCommonSymbols=false,annotateFilesWithVersion=false

gen-clients: setup ## generate the stubs of clients/typescript and clients/go
	@$(BIN)/python .ci/clients.py
	@$(MAKE) --no-print-directory gen-clients-into

# Without set-up, like gen-into: make gen-clients-into CLIENT_STUBS=/tmp/stubs. The messages for error details
# are not in proto/: googleapis-common-protos defines them.
gen-clients-into:
	@PATH="$(BIN):$(CURDIR)/.venv/share/clients/bin:$$PATH"; set -e; \
		mkdir -p $(CLIENT_STUBS)/clients/typescript/src/gen; \
		$(BIN)/python -m grpc_tools.protoc -I $(GOOGLE_PROTOS) --ts_proto_opt=$(TS_OPTIONS) \
			--ts_proto_out=$(CLIENT_STUBS)/clients/typescript/src/gen google/rpc/status.proto google/rpc/error_details.proto; \
		$(BIN)/buf generate --template clients/buf.gen.yaml -o $(CLIENT_STUBS)

bench: bench-codec bench-staleness bench-attempts bench-stalls bench-pool bench-prefix bench-parity bench-delta bench-buffer bench-update bench-weights bench-adapters bench-journal bench-journal-stores bench-overlap bench-corrections bench-serving ## run all benchmarks, one after another

bench-codec: setup ## measure encoding and decoding of trajectories
	@$(BIN)/python -m benchmarks.codec.trajectories $(ARGS)

bench-serving: setup ## measure tokens per second, compared with the raw engine and its HTTP server
	@$(BIN)/python -m benchmarks.serving.throughput $(ARGS)

bench-update: setup ## measure how long a weight update pauses generation
	@$(BIN)/python -m benchmarks.weights.update $(ARGS)

bench-staleness: setup ## test the staleness gate and its controller with heavy-tailed lengths
	@$(BIN)/python -m benchmarks.staleness.gate $(ARGS)

bench-weights: setup ## measure weight uploads by transport, compared with memcpy, TCP and vLLM's own methods
	@$(BIN)/python -m benchmarks.weights.transports $(ARGS)

bench-adapters: setup ## measure how long turns in flight wait for an adapter switch, compared with a full version
	@$(BIN)/python -m benchmarks.weights.adapters $(ARGS)

bench-delta: setup ## measure size and speed of weight differences, including those of a real run
	@$(BIN)/python -m benchmarks.codec.weight_deltas $(ARGS)

bench-buffer: setup ## measure the durable buffer of finished groups, compared with a Ray actor queue
	-@$(BIN)/python .ci/add_extra.py bench
	@$(BIN)/python -m benchmarks.buffer.delivery $(ARGS)

bench-attempts: setup ## run thousands of attempts that wait for tools in one worker; measure memory, and p99 of Continue
	@$(BIN)/python -m benchmarks.serving.attempts $(ARGS)

bench-stalls: setup ## measure how long the server's event loop stands still with 100,000 tasks and 8,192 conversations
	@$(BIN)/python -m benchmarks.serving.stalls $(ARGS)

bench-pool: setup ## measure a hub's overhead over direct calls, and 1,024 engines with 10,000 agents
	@$(BIN)/python -m benchmarks.pool.hub $(ARGS)

bench-prefix: setup ## measure vLLM's prefix-cache hits behind a hub, by routing policy
	@$(BIN)/python -m benchmarks.pool.prefix_cache $(ARGS)

VERL := .venv/share/verl

bench-journal: setup ## measure how much the journal slows down the demo
	@$(BIN)/python -m benchmarks.journal.demo $(ARGS)

bench-journal-stores: setup ## measure the journal's appends per second in a folder and in a NATS stream
	-@$(BIN)/python .ci/programs.py nats-server
	@$(BIN)/python -m benchmarks.journal.stores $(ARGS)

bench-overlap: setup ## measure steps per hour and idle time by max_lag, compared with the theoretical best
	@$(BIN)/python -m benchmarks.training.overlap $(ARGS)

bench-corrections: setup ## compare final rewards of off-policy corrections on stale data
	@$(BIN)/python -m benchmarks.training.corrections $(ARGS)

# No part of `bench`: it makes its tables on a virtual clock, and its real runs are long.
simulate: setup ## simulate the throughput of 1 to 1,024 engines; ARGS="--validate" first compares the simulator with real runs
	@$(BIN)/python -m benchmarks.simulation.tables $(ARGS)

bench-parity: setup ## compare advantages and losses with another library's
	-@$(BIN)/python .ci/add_extra.py bench
	@test -d $(VERL) || $(BIN)/python -m pip install -q --no-deps --target $(VERL) verl==0.9.1 tensordict \
		omegaconf hydra-core antlr4-python3-runtime==4.9.3 codetiming cloudpickle pyvers orjson
	@PYTHONPATH=$(VERL) $(BIN)/python -m benchmarks.training.parity $(ARGS)
