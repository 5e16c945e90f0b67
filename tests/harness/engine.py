"""A real vLLM engine on one core, with or without the connector, as a program of this machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.harness import web
from tests.harness.engine_client import BLOCK_SIZE, EngineClient
from tests.harness.engine_forks import EngineForks
from tests.harness.processes import Program
from tests.harness.provision import Paths

START_SECONDS = 400.0
NICENESS = 10
"""As an agent's CPU request does in a pod: two ranks that spin on two cores kept it waiting for seconds."""
KV_CACHE_BYTES = 128 << 20
"""65,000 tokens of tiny-llama. It is touched whole at start: with 1 GiB each, the tests' engines fill 24 GiB of memory, and a
machine that reclaims the pages of libraries stands still for seconds."""
ROOT = Path(__file__).resolve().parents[2]

TRANSFER_CONFIG = {
    "kv_connector": "KvpoolConnector",
    "kv_connector_module_path": "kvpool_vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
EXTRA_CONFIG = {"canonical_layout": True, "offload_prompt_only": False}
API_SERVER = "from vllm.entrypoints.launchers.api_server.entry import main; main()"
"""What `vllm serve` runs; this wheel's `vllm` command does not start, and its older module path is deprecated."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "agent"),
    "TORCHDYNAMO_DISABLE": "1",  # one function of the sampler would be compiled, with a C++ compiler
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""What all engines have."""
EVENTS_CONFIG = {"enable_kv_cache_events": True, "publisher": "null"}


class Engine(EngineClient):
    """One API server with its engine core and workers.

    worker_in_core: one rank whose worker lives in the core's process, as on a GPU; else each worker has its own.
    forks: what starts it, in place of a new process.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        paths: Paths,
        folder: Path,
        port: int,
        cores: str,
        socket: Path | None,
        tensor_parallel: int = 1,
        served_name: str = "model",
        arguments: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        extra_config: dict[str, object] | None = None,
        reserved_cores: int = 1,
        kv_cache_bytes: int = KV_CACHE_BYTES,
        worker_in_core: bool = False,
        forks: EngineForks | None = None,
    ) -> None:
        super().__init__(name, f"127.0.0.1:{port}", served_name=served_name, transport=web)
        command = [
            "--model", str(model), "--served-model-name", served_name, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-model-len", "4096",
            "--gpu-memory-utilization", "0.3", "--max-num-seqs", "8", "--seed", "0",
            "--prefix-caching-hash-algo", "sha256_cbor", "--tensor-parallel-size", str(tensor_parallel),
            "--kv-cache-memory-bytes", str(kv_cache_bytes), "--no-enable-log-requests", *arguments,
        ]  # fmt: skip
        environment = {
            **ENVIRONMENT,
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved_cores),
            **(_worker_in_core(cores) if worker_in_core else {}),
            **(env or {}),
        }
        if socket is not None:
            transfer = {**TRANSFER_CONFIG, "kv_connector_extra_config": {**EXTRA_CONFIG, **(extra_config or {})}}
            command += ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(EVENTS_CONFIG)]
            environment |= {"KVPOOL_SOCKET": str(socket), "KVPOOL_ENDPOINT": self.endpoint}
        whole = command if forks else [str(paths.engine_python), "-c", API_SERVER, *command]
        self.arguments = [argument for argument in whole if argument != str(port)]
        starter = forks.fork if forks else None
        self.program = Program(name, whole, folder=folder, env=environment, niceness=NICENESS, starter=starter)

    def start(self) -> Engine:
        """Start without waiting."""
        self.program.start()
        return self

    def wait_ready(self) -> Engine:
        """Wait until it serves."""
        self.wait_until(self.is_healthy, seconds=START_SECONDS, what="health")
        return self

    def wait_until(self, ready: Callable[[], bool], *, seconds: float, what: str) -> None:
        """The same; ProgramError when the program ends first."""
        self.program.wait_until(ready, seconds=seconds, what=what)


def _worker_in_core(cores: str) -> dict[str, str]:
    """vLLM binds no threads here, so it is told as it tells its workers: the core's process reads this when it begins."""
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": cores}
