"""The page of the environment variables.

Their names and texts are declared here, because the code has no place for the texts. A test searches the
code for the names.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.reference import markdown
from tests.support.reference.markdown import code, prose

OPENING = """After reading this page you know which environment variables Penstock reads, and which it sets
for the processes it starts. Libraries such as vLLM, torch and gRPC read further ones."""


@dataclass(frozen=True)
class Variables:
    """Variables with one purpose, as a section of the page."""

    heading: str
    text: str
    rows: tuple[tuple[str, str, str], ...]
    """(name, which processes, meaning)."""


CLIENTS = "`rollout`, `eval`, `weights`, `health`"
ENGINE = "`serve`, with its own engine"
CPU_ENGINE = "`serve`, with its own engine on a CPU"
RANKS = "`train` on several ranks"
SECTIONS = (
    Variables(
        "Settings",
        "Set these to configure Penstock. An option on the command line takes precedence.",
        (
            (
                "PENSTOCK_TOKEN",
                f"{CLIENTS}, `train`",
                "Access token to present, unless a token file is named.",
            ),
            ("PENSTOCK_TOKEN_FILE", CLIENTS, "As `--token-file`."),
            ("PENSTOCK_TLS", CLIENTS, "As `--tls`, if it is 1 or true."),
            ("PENSTOCK_CA", CLIENTS, "As `--ca`."),
            ("PENSTOCK_CERT", CLIENTS, "As `--cert`."),
            ("PENSTOCK_KEY", CLIENTS, "As `--key`."),
            (
                "PENSTOCK_LOG",
                "`serve`",
                "Level of the log: DEBUG, INFO, WARNING or ERROR. The default is INFO.",
            ),
            (
                "OTEL_EXPORTER_OTLP_ENDPOINT",
                "`serve`, `train`, `rollout`",
                "OTLP endpoint that traces and metrics are sent to. Without it, none are sent.",
            ),
            (
                "OTEL_SERVICE_NAME",
                "`serve`, `train`, `rollout`",
                "Name of the service in traces and metrics. The default is penstock-server, "
                "penstock-trainer or penstock-rollout, and penstock-engine for vLLM's own process.",
            ),
            (
                "VLLM_CPU_KVCACHE_SPACE",
                CPU_ENGINE,
                "vLLM's GiB for the key-value cache. Without it, Penstock chooses an eighth of the "
                "machine's memory, from 1 to 4 GiB.",
            ),
            (
                "PYTHONHASHSEED",
                "`train`, `eval`",
                "Needed by the data sets of reasoning-gym whose problems depend on the order of hashes.",
            ),
            (
                "CUDA_VISIBLE_DEVICES",
                "`up`, `serve`, `doctor`",
                "The GPUs to use. `up` divides them among its processes and sets it for each.",
            ),
            (
                "HF_HUB_CACHE",
                "`serve`, `train`, `doctor`",
                "Folder of the Hugging Face hub's models. The default is `hub` in HF_HOME.",
            ),
            (
                "HF_HOME",
                "`serve`, `train`, `doctor`",
                "Folder of the Hugging Face hub's client. The default is `huggingface` in XDG_CACHE_HOME.",
            ),
            (
                "VLLM_USE_MODELSCOPE",
                "`serve`, `train`",
                "vLLM loads models from ModelScope. Penstock then does not look a name up on the hub.",
            ),
            (
                "XDG_CACHE_HOME",
                "`demo`, `eval --model`, `serve`, `train`, `doctor`",
                "Parent of the folder for converted models, outside of a virtual environment, and of the "
                "hub's. The default is ~/.cache.",
            ),
            (
                "PENSTOCK_FAILPOINTS",
                "all",
                "For tests: places at which the process fails, such as `journal.before_fsync=kill@3`.",
            ),
        ),
    ),
    Variables(
        "Place of a rank",
        "torchrun and `penstock up` set these for each rank of a trainer. `penstock train --ranks` sets "
        "them for the ranks it starts.",
        (
            ("RANK", RANKS, "Number of this process, from zero."),
            ("WORLD_SIZE", RANKS, "Number of processes."),
            ("LOCAL_RANK", RANKS, "Number of this process on its host, and of its device."),
            ("MASTER_ADDR", RANKS, "Address of rank 0's host."),
            ("MASTER_PORT", RANKS, "Port at which the ranks meet."),
            (
                "PENSTOCK_LOCAL_RANKS",
                RANKS,
                "Internal: process id of rank 0, if it started the others.",
            ),
        ),
    ),
    Variables(
        "An agent's process",
        "`penstock rollout --command` sets these for each process it starts. "
        "[Programs](../guides/programs.md) explains them.",
        (
            ("PENSTOCK_TRAJECTORY_ID", "each process", "Id of the attempt's trajectory."),
            ("PENSTOCK_GROUP_ID", "each process", "Id of the group."),
            (
                "PENSTOCK_SAMPLE_INDEX",
                "each process",
                "Position of the attempt in the group, from zero.",
            ),
            ("PENSTOCK_TASK_FILE", "each process", "Path of the task, as JSON."),
            ("PENSTOCK_RESULT_FILE", "each process", "Path to write the result to."),
            ("PENSTOCK_MODEL", "each process", "Name of the served model."),
            ("PENSTOCK_WORKER_FOLDER", "each process", "Folder in which the worker was started."),
            ("OPENAI_BASE_URL", "with `--api http` or `both`", "Address of the OpenAI endpoint."),
            (
                "OPENAI_API_KEY",
                "with `--api http` or `both`",
                "Key that is valid for this attempt only.",
            ),
            (
                "ANTHROPIC_BASE_URL",
                "with `--api http` or `both`",
                "Address of the Anthropic endpoint.",
            ),
            (
                "ANTHROPIC_API_KEY",
                "with `--api http` or `both`",
                "Key that is valid for this attempt only.",
            ),
            ("PENSTOCK_ADDRESS", "with `--api grpc` or `both`", "Address of the gRPC services."),
            (
                "PENSTOCK_TOKEN",
                "with `--command-token-file`",
                "The token in that file, for the gRPC services.",
            ),
            ("HOME", "each process", "The attempt's folder."),
            ("PWD", "each process", "The attempt's folder."),
            ("PATH", "each process", "The worker's."),
            ("LANG", "each process", "The worker's."),
            ("LANGUAGE", "each process", "The worker's."),
            ("LC_ALL", "each process", "The worker's."),
            ("LC_CTYPE", "each process", "The worker's."),
            ("TZ", "each process", "The worker's."),
        ),
    ),
    Variables(
        "Defaults for libraries",
        "Penstock sets these for the libraries it uses. Apart from those of `up` and `demo`, a value that "
        "is already set is kept.",
        (
            (
                "VLLM_WORKER_MULTIPROC_METHOD",
                ENGINE,
                "spawn. A fork would copy locks that are held.",
            ),
            ("VLLM_LOGGING_LEVEL", ENGINE, "ERROR"),
            ("TORCH_CPP_LOG_LEVEL", ENGINE, "ERROR"),
            ("VLLM_NO_USAGE_STATS", ENGINE, "1"),
            ("DO_NOT_TRACK", ENGINE, "1"),
            ("PYTHONWARNINGS", ENGINE, "ignore::FutureWarning"),
            ("TOKENIZERS_PARALLELISM", f"{ENGINE}; `up`, `demo`", "false"),
            ("VLLM_ENABLE_V1_MULTIPROCESSING", CPU_ENGINE, "0, which saves a process."),
            ("VLLM_CPU_OMP_THREADS_BIND", CPU_ENGINE, "nobind"),
            (
                "GLIBC_TUNABLES",
                CPU_ENGINE,
                "glibc.malloc.hugetlb=1, which makes weight updates faster.",
            ),
            (
                "GOMP_SPINCOUNT",
                CPU_ENGINE,
                "1000, unless OMP_WAIT_POLICY is set: how long a thread spins before it sleeps.",
            ),
            (
                "OMP_NUM_THREADS",
                f"{CPU_ENGINE}; {RANKS}; `demo`",
                "This process's share of the CPU cores.",
            ),
            (
                "OMP_WAIT_POLICY",
                "`train`, `up`, `demo`",
                "PASSIVE. Threads that spin while they wait take cores from other processes.",
            ),
            ("GLOO_SOCKET_IFNAME", f"{RANKS} of one host", "lo"),
            ("PYTHONUNBUFFERED", "`up`, `demo`", "1, so that logs are complete."),
            ("RAY_USAGE_STATS_ENABLED", "`up` on a Ray cluster", "0"),
            ("HF_HUB_OFFLINE", "`demo`", "1, once the model is here."),
            ("TQDM_DISABLE", "`demo`", "1"),
            ("TRANSFORMERS_VERBOSITY", "`demo`", "error, while it converts a model."),
        ),
    ),
)


def page() -> str:
    blocks: list[str] = []
    for section in SECTIONS:
        blocks += [f"## {section.heading}", markdown.wrapped(section.text)]
        rows = [(code(name), prose(who), prose(text)) for name, who, text in section.rows]
        blocks.append(markdown.table(("variable", "processes", "meaning"), rows))
    return markdown.page("Environment variables", OPENING, *blocks)
