"""A real vLLM engine on one core, with or without the connector, and what it answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import web
from tests.harness.processes import Program
from tests.harness.provision import Paths

BLOCK_SIZE = 32
START_SECONDS = 400.0
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
EVENTS_CONFIG = {"enable_kv_cache_events": True, "publisher": "null"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine generated. Bit for bit comparable: token texts and their log probabilities as floats."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    @staticmethod
    def of(choice: dict[str, Any]) -> Answer:
        """From a completion's choice (or the pieces of a stream put together)."""
        logprobs = choice["logprobs"]
        return Answer(tuple(logprobs["tokens"]), tuple(logprobs["token_logprobs"]))


@dataclass(frozen=True, slots=True)
class Timed:
    """A streamed completion: answer, seconds to the first token, prompt tokens, and the router's header if there was one."""

    answer: Answer
    ttft_seconds: float
    prompt_tokens: int
    route: str


class Engine:
    """One API server with its engine core and workers."""

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
    ) -> None:
        self.name = name
        self.port = port
        self.endpoint = f"127.0.0.1:{port}"
        self.url = f"http://{self.endpoint}"
        self.served_name = served_name
        command = [
            str(paths.engine_python), "-c", API_SERVER,
            "--model", str(model), "--served-model-name", served_name, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), "--max-model-len", "4096",
            "--gpu-memory-utilization", "0.3", "--max-num-seqs", "8", "--seed", "0",
            "--prefix-caching-hash-algo", "sha256_cbor", "--tensor-parallel-size", str(tensor_parallel),
            "--no-enable-log-requests", *arguments,
        ]  # fmt: skip
        environment = {
            "PYTHONPATH": str(ROOT / "agent"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved_cores),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_COLOR": "0",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            **(env or {}),
        }
        if socket is not None:
            transfer = {**TRANSFER_CONFIG, "kv_connector_extra_config": {**EXTRA_CONFIG, **(extra_config or {})}}
            command += ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", json.dumps(EVENTS_CONFIG)]
            environment |= {"KVPOOL_SOCKET": str(socket), "KVPOOL_ENDPOINT": self.endpoint}
        self.arguments = [argument for argument in command if argument != str(port)]
        self.program = Program(name, command, folder=folder, env=environment)

    def start(self) -> Engine:
        """Start without waiting."""
        self.program.start()
        return self

    def wait_ready(self) -> Engine:
        """Wait until it serves."""
        self.program.wait_until(lambda: web.is_ok(f"{self.url}/health"), seconds=START_SECONDS, what="health")
        return self

    def wait_identified(self, seconds: float = 60.0) -> Engine:
        """Wait until its domain is known; asks for a token now and then, since an idle engine reports nothing."""
        self.program.wait_until(self._is_identified, seconds=seconds, what="known domain")
        return self

    def _is_identified(self) -> bool:
        self.complete("warm", max_tokens=1)
        return self.metric("kvpool_connector_domain_known") == 1.0

    def body(self, prompt: str | list[int], *, max_tokens: int, **more: object) -> dict[str, object]:
        """A greedy completion with log probabilities."""
        return {
            "model": self.served_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
            **more,
        }

    def complete(self, prompt: str | list[int], *, max_tokens: int = 64, url: str = "", **more: object) -> Answer:
        """The answer of this engine, or through the router at `url`."""
        reply = web.request(
            "POST", f"{url or self.url}/v1/completions", self.body(prompt, max_tokens=max_tokens, **more)
        )
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.body[:500]!r}"
        return Answer.of(reply.json()["choices"][0])

    def complete_timed(self, prompt: str | list[int], *, max_tokens: int = 64, url: str = "", **more: object) -> Timed:
        """The same, streamed and timed."""
        body = self.body(prompt, max_tokens=max_tokens, stream=True, stream_options={"include_usage": True}, **more)
        reply = web.stream(f"{url or self.url}/v1/completions", body)
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.events}"
        pieces = [event["choices"][0]["logprobs"] for event in reply.events if event.get("choices")]
        answer = Answer(
            tuple(token for piece in pieces if piece for token in piece["tokens"]),
            tuple(value for piece in pieces if piece for value in piece["token_logprobs"]),
        )
        usage = next(event["usage"] for event in reversed(reply.events) if event.get("usage"))
        return Timed(answer, reply.first_event_seconds, usage["prompt_tokens"], reply.headers.get("x-kvpool-route", ""))

    def tokenize(self, prompt: str) -> list[int]:
        """Token ids of a prompt, the engine's own."""
        reply = web.request("POST", f"{self.url}/tokenize", {"model": self.served_name, "prompt": prompt})
        assert reply.status == 200, f"{self.name} answered {reply.status}: {reply.body[:300]!r}"
        return [int(token) for token in reply.json()["tokens"]]

    def reset_own_cache(self) -> None:
        """Forget the engine's own prefix cache; the tiers keep theirs."""
        self.program.wait_until(self._try_reset, seconds=30.0, what="reset of the prefix cache")

    def _try_reset(self) -> bool:
        reply = web.request("POST", f"{self.url}/reset_prefix_cache")
        return reply.status == 200 and b"false" not in reply.body.lower()

    def metrics(self) -> str:
        """The engine's /metrics."""
        return web.request("GET", f"{self.url}/metrics").body.decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` whose labels include `labels`; 0 when there are none."""
        return metric_sum(self.metrics(), name, **labels)


def metric_sum(text: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples in Prometheus text format."""
    total = 0.0
    for line in text.splitlines():
        found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
        if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
            total += float(found[2])
    return total
