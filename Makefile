# `make demo` and `make test` do all set-up themselves; everything goes into .venv of this checkout.

PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
PROTOS := $(wildcard proto/penstock/v1/*.proto)
STUBS := clients/python

# Another environment's modules must not come before this one's.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast backends faults fuzz soak lint types gen gen-into clients gen-clients gen-clients-into \
	format cluster-test bench bench-codec bench-serving bench-update bench-staleness bench-weights bench-adapters \
	bench-delta bench-buffer bench-journal bench-journal-stores bench-overlap bench-corrections bench-parity \
	bench-attempts bench-pool bench-prefix simulate

help: ## what there is
	@echo "make TARGET [ARGS=\"...\"] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv ready; seconds when it already is
	@$(PYTHON) .ci/setup.py

demo: setup ## a real model learns over the wire; ARGS="--steps 10 --task chain_sum" are passed on
	@$(BIN)/penstock demo $(ARGS)

# Each file as a whole: what a file starts once is started once. Three at a time, which is one more than there are
# cores, because many of them wait.
test: setup ## all tests; ARGS="-k codec" are passed on
	-@$(BIN)/python .ci/clients.py
	-@$(BIN)/python .ci/programs.py
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

# No process but pytest's own, no model and no vLLM: tests/support/slow.py has what is left out.
test-fast: setup ## the unit tests, in about a minute on two cores; ARGS="-k codec" are passed on
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not long" $(ARGS)

backends: setup ## each backend, on layouts of up to four ranks: the numbers of one process; the tiny demo's reward climbs
	@$(BIN)/python -m pytest -q -rP -m "long or not long" tests/trainer/policy/test_megatron_policy.py tests/trainer/policy/test_megatron_end_to_end.py tests/system/test_demo_backends.py $(ARGS)

# Ray is no part of set-up: without it the tests of it are skipped, and say so.
cluster-test: setup ## `penstock up` on a Ray cluster of this machine, each actor killed; installs Ray
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
# These take as long as they take: nobody asks what they are doing.
UNHURRIED := -o faulthandler_timeout=0
FAULTY = $(BIN)/python -m pytest -q $(UNHURRIED) --machine-examples $(MACHINES) \
	--fuzz-seconds $(FUZZ_SECONDS) --fault-results=$(RESULTS) \
	$(if $(SEED),--fault-seed $(SEED))

# The verdicts are put on the page whatever they are.
faults: setup ## each fault as often as its table says, FAULTS=3: three times; SEED=7; writes docs/reliability.md
	-@$(BIN)/python .ci/add_extra.py ray
	-@$(BIN)/python .ci/programs.py
	@$(FAULTY) tests/faults tests/system/test_end_to_end.py -k "not soak" $(if $(FAULTS),--fault-count $(FAULTS),--fault-table) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

fuzz: setup ## every rpc from its descriptor, EXAMPLES=10000 each, FUZZ_SECONDS=3600 of bytes, and MACHINES=2000 runs of the model
	@$(FAULTY) tests/faults/test_f12_*.py --fault-count $(EXAMPLES) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

soak: setup ## GROUPS=1000000 with kills of the server; UPDATES=200 weight updates under load, with faults; SEED=7
	@$(BIN)/python -m pytest tests/faults -q $(UNHURRIED) -m "long or not long" -k soak --soak-groups $(GROUPS) --updates $(UPDATES) \
		--fault-results=$(RESULTS) $(if $(SEED),--fault-seed $(SEED)) $(ARGS); \
		status=$$?; $(BIN)/python -m tests.faults.write_report; exit $$status

lint: setup ## ruff, buf lint, buf format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/buf lint
	@$(BIN)/buf format --diff --exit-code

types: setup ## pyright, strict on own code
	@$(BIN)/pyright

format: setup ## let ruff and buf rewrite what lint complains about
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format
	@$(BIN)/buf format --write

gen: setup gen-into ## generate the Python stubs from proto/ anew

# Without set-up, so that the test of it can name another folder: make gen-into STUBS=/tmp/stubs
gen-into:
	@PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
		--python_out=$(STUBS) --grpc_python_out=$(STUBS) \
		--mypy_out=quiet:$(STUBS) --mypy_grpc_out=quiet:$(STUBS) $(PROTOS)

clients: setup ## set up, build and test the clients in TypeScript and Go, each where its tools can be had
	@$(BIN)/python .ci/clients.py
	@$(BIN)/python -m pytest tests/system/test_languages.py tests/system/test_client_packages.py $(ARGS)

CLIENT_STUBS := .
GOOGLE_PROTOS = $(dir $(shell $(BIN)/python -c "import google.rpc; print(list(google.rpc.__path__)[0])"))..
TS_OPTIONS := env=node,esModuleInterop=true,importSuffix=.js,forceLong=bigint,oneof=unions-value,outputJsonMethods=false,exportCommonSymbols=false,annotateFilesWithVersion=false

gen-clients: setup ## generate the stubs of clients/typescript and clients/go anew
	@$(BIN)/python .ci/clients.py
	@$(MAKE) --no-print-directory gen-clients-into

# Without set-up, as gen-into: make gen-clients-into CLIENT_STUBS=/tmp/stubs. What travels as the details of
# an error is no part of proto/: its definition comes with googleapis-common-protos.
gen-clients-into:
	@PATH="$(BIN):$(CURDIR)/.venv/share/clients/bin:$$PATH"; set -e; \
		mkdir -p $(CLIENT_STUBS)/clients/typescript/src/gen; \
		$(BIN)/python -m grpc_tools.protoc -I $(GOOGLE_PROTOS) --ts_proto_opt=$(TS_OPTIONS) \
			--ts_proto_out=$(CLIENT_STUBS)/clients/typescript/src/gen google/rpc/status.proto google/rpc/error_details.proto; \
		$(BIN)/buf generate --template clients/buf.gen.yaml -o $(CLIENT_STUBS)

bench: bench-codec bench-staleness bench-attempts bench-pool bench-prefix bench-parity bench-delta bench-buffer bench-update bench-weights bench-adapters bench-journal bench-journal-stores bench-overlap bench-corrections bench-serving ## all benchmarks, one after another

bench-codec: setup ## trajectories to and from bytes
	@$(BIN)/python -m benchmarks.codec.trajectories $(ARGS)

bench-serving: setup ## tokens per second next to the raw engine and its HTTP server
	@$(BIN)/python -m benchmarks.serving.throughput $(ARGS)

bench-update: setup ## how long a weight update pauses generation
	@$(BIN)/python -m benchmarks.weights.update $(ARGS)

bench-staleness: setup ## the gate and its controller under heavy-tailed lengths
	@$(BIN)/python -m benchmarks.staleness.gate $(ARGS)

bench-weights: setup ## how fast weights travel by each transport, next to memcpy, TCP and vLLM's own ways
	@$(BIN)/python -m benchmarks.weights.transports $(ARGS)

bench-adapters: setup ## what a turn in flight waits for when an adapter is switched to, beside a full version
	@$(BIN)/python -m benchmarks.weights.adapters $(ARGS)

bench-delta: setup ## how small and how fast differences are, also between the versions of a real run
	@$(BIN)/python -m benchmarks.codec.weight_deltas $(ARGS)

bench-buffer: setup ## finished groups through the durable buffer, next to a Ray actor queue
	-@$(BIN)/python .ci/add_extra.py bench
	@$(BIN)/python -m benchmarks.buffer.delivery $(ARGS)

bench-attempts: setup ## thousands of attempts that wait for their tools in one worker: memory, and p99 of Continue
	@$(BIN)/python -m benchmarks.serving.attempts $(ARGS)

bench-pool: setup ## a hub next to direct calls, what it costs, and 1,024 engines with 10,000 agents
	@$(BIN)/python -m benchmarks.pool.hub $(ARGS)

bench-prefix: setup ## prefix-cache hits of real vLLM behind a hub, by routing policy
	@$(BIN)/python -m benchmarks.pool.prefix_cache $(ARGS)

VERL := .venv/share/verl

bench-journal: setup ## what the journal costs the demo
	@$(BIN)/python -m benchmarks.journal.demo $(ARGS)

bench-journal-stores: setup ## appends per second of the journal in a folder, and in a stream of NATS
	-@$(BIN)/python .ci/programs.py nats-server
	@$(BIN)/python -m benchmarks.journal.stores $(ARGS)

bench-overlap: setup ## steps per hour and idle time by max_lag, beside the best there can be
	@$(BIN)/python -m benchmarks.training.overlap $(ARGS)

bench-corrections: setup ## final reward by off-policy correction, on stale data
	@$(BIN)/python -m benchmarks.training.corrections $(ARGS)

# No part of `bench`: it makes its tables on a virtual clock, and its real runs are long.
simulate: setup ## what 1 to 1,024 engines bring, simulated; ARGS="--validate" holds the simulator against real runs first
	@$(BIN)/python -m benchmarks.simulation.tables $(ARGS)

bench-parity: setup ## advantages and losses against another library's
	-@$(BIN)/python .ci/add_extra.py bench
	@test -d $(VERL) || $(BIN)/python -m pip install -q --no-deps --target $(VERL) verl==0.9.1 tensordict \
		omegaconf hydra-core antlr4-python3-runtime==4.9.3 codetiming cloudpickle pyvers orjson
	@PYTHONPATH=$(VERL) $(BIN)/python -m benchmarks.training.parity $(ARGS)
