"""Finding out, in the background, what the engine serves: weights' digests, then the scheduler's part of the domain.

Invariant: until the domain is known there are no hits and no stores; what cannot be identified never gets one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool_core import identity, wire
from kvpool_core.errors import KVPoolError, UnsupportedModelError
from kvpool_vllm import adapter_loads, fingerprint, weights

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvpool")

# Load formats that read the values of the files in the model's folder (vLLM 0.32 `LoadFormat`).
FILE_FORMATS = {
    "auto",
    "hf",
    "safetensors",
    "pt",
    "bitsandbytes",
    "gguf",
    "mistral",
    "fastsafetensors",
    "instanttensor",
}


class Identification:
    """Digests of weights and adapters; `ask` and `teach` reach the agent's memory of file digests."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, seed: str) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._seed = seed
        self._ask: weights.Remembered | None = None
        self._teach: weights.Teach | None = None
        self._adapters: dict[str, bytes | None] = {}
        self._adapter_states: dict[str, tuple[int, ...]] = {}
        self._adapter_settings = fingerprint.adapter_settings(config)
        self._private = b""

    def start(
        self,
        publish: Callable[[wire.RegisterScheduler], None],
        *,
        ask: Callable[[Sequence[wire.FileKey]], list[bytes]],
        teach: Callable[[Sequence[wire.FileKey], Sequence[bytes]], None],
    ) -> None:
        """Identify the weights on a thread of its own, then publish the scheduler's part, or the problem."""
        self._ask, self._teach = ask, teach
        threading.Thread(target=self._identify, args=(publish,), name="kvpool-identify", daemon=True).start()

    def make_private(self) -> None:
        """From now on blocks belong to this process alone: its weights may have been changed in place."""
        self._private = fingerprint.private_nonce()

    @property
    def is_private(self) -> bool:
        """Whether blocks belong to this process alone."""
        return bool(self._private)

    def domain_of(self, domain: bytes, request: Request) -> tuple[bytes, bool] | None:
        """(domain, private) of a request's blocks, None while its adapter is not identified (then: no hits, no stores)."""
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request.lora_path)
            if adapter is None:
                return None
            domain = identity.derive(domain, kind="lora", content=adapter + self._adapter_settings)
        if self._private:
            return identity.derive(domain, kind="private", content=self._private), True
        return domain, False

    def _identify(self, publish: Callable[[wire.RegisterScheduler], None]) -> None:
        try:
            part, problem = self._scheduler_part(), ""
        except KVPoolError as error:
            part, problem = b"", str(error)
        except Exception as error:
            logger.debug("kvpool: identification failed", exc_info=True)
            part, problem = b"", f"the engine cannot be identified: {error!r}"
        if problem:
            logger.warning("kvpool: no blocks are loaded or stored: %s", problem)
        publish(wire.RegisterScheduler(0, part, problem))

    def _scheduler_part(self) -> bytes:
        speculative = self._config.speculative_config
        draft = speculative.draft_model_config if speculative is not None else None
        return fingerprint.scheduler_part(
            self._config,
            self._kv_cache,
            weights=self._digest(self._config.model_config.model),
            draft=self._digest(draft.model) if draft is not None else b"",
            seed=self._seed,
        )

    def _digest(self, model: str) -> bytes:
        load_format = str(getattr(self._config.load_config.load_format, "value", self._config.load_config.load_format))
        if load_format not in FILE_FORMATS:
            raise KVPoolError(
                f"load format {load_format!r} does not read the values from files: weights cannot be identified"
            )
        return self._digest_files(weights.find_weight_files(model))

    def _digest_files(self, files: Sequence[Path]) -> bytes:
        assert self._ask is not None
        assert self._teach is not None
        return weights.digest_files(files, remembered=self._ask, teach=self._teach)

    def _adapter(self, path: str) -> bytes | None:
        if path not in self._adapters:
            self._adapter_states[path] = adapter_loads.state_at_load(path)
            self._adapters[path] = None
            threading.Thread(target=self._identify_adapter, args=(path,), name="kvpool-adapter", daemon=True).start()
        elif self._adapters[path] is not None and adapter_loads.state_of(path) != self._adapter_states[path]:
            self._adapters[path] = None  # for good: which of its contents the engine has loaded cannot be told
            logger.warning("kvpool: the adapter at %s has changed; its requests are not offloaded any more", path)
        return self._adapters[path]

    def _identify_adapter(self, path: str) -> None:
        try:
            if adapter_loads.state_of(path) != self._adapter_states[path]:
                raise UnsupportedModelError("its files have changed since the engine loaded it")
            files = [*weights.find_weight_files(path), *Path(path).glob("adapter_config.json")]
            self._adapters[path] = self._digest_files(files)
        except (KVPoolError, OSError) as error:
            logger.warning("kvpool: requests with the adapter at %s are not offloaded: %s", path, error)
