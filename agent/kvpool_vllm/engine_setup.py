"""Putting an engine process's side together from vLLM's configuration; what an inert worker still has to answer.

Invariant: a worker reports every job it was ever given exactly once, inert or not: a request waits for that report.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import get_sliding_window_size_in_chunks
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
    resolve_none_hash_seed,
)
from vllm.v1.kv_cache_interface import iter_layer_specs

from kvpool_core import wire
from kvpool_vllm import adapter_loads, fingerprint
from kvpool_vllm.copiers import make_copier
from kvpool_vllm.copy_plan import GroupPlan, build_group_plans
from kvpool_vllm.endpoint_rank import rank_at_endpoint
from kvpool_vllm.gpu_blocks import GpuBlocks
from kvpool_vllm.group_keying import GroupKeying, registered_window_blocks, with_leads
from kvpool_vllm.identification import Identification
from kvpool_vllm.load_report import LoadReport
from kvpool_vllm.scheduler_link import SchedulerLink
from kvpool_vllm.scheduler_side import KvpoolManager
from kvpool_vllm.settings import Settings, read_settings
from kvpool_vllm.worker import KvpoolWorker
from kvpool_vllm.worker_link import WorkerLink

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        GroupOffloadConfig,
        SchedulerOffloadConfig,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvpool")


class Greeting:
    """What both kinds of processes say of their engine."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, settings: Settings) -> None:
        self._config = config
        self._settings = settings
        _, self.tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache, config)
        self.seed = resolve_none_hash_seed(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))

    def hello(self, role: str) -> wire.Hello:
        """A Hello with the token as it is now."""
        config, parallel = self._config, self._config.parallel_config
        names = config.model_config.served_model_name
        return wire.Hello(
            0,
            wire.PROTOCOL_OLDEST,
            wire.PROTOCOL_VERSION,
            str(config.kv_transfer_config.engine_id),
            role,
            parallel.rank if role == "worker" else 0,
            parallel.world_size,
            rank_at_endpoint(parallel),
            self._settings.endpoint,
            [names] if isinstance(names, str) else list(names or [config.model_config.model]),
            self.tokens_per_hash,
            self.seed,
            self._settings.read_token(),
        )


def _settings(config: VllmConfig) -> Settings:
    fingerprint.reject_unsupported(config)
    return read_settings(os.environ, config.kv_transfer_config.kv_connector_extra_config)


def _watch_adapters(config: VllmConfig) -> None:
    if config.lora_config is not None:
        from vllm.v1.engine.core import EngineCore  # loaded in the scheduler's process, and in no worker's

        adapter_loads.watch(EngineCore)


class SchedulerSetup:
    """The scheduler process's side."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        self._settings = _settings(config)
        _watch_adapters(config)
        self._greeting = Greeting(config, kv_cache, self._settings)
        self.gpu_blocks = GpuBlocks()
        self._identification = Identification(config, kv_cache, seed=self._greeting.seed)
        self._manager = KvpoolManager(self._settings, self._identification, self.gpu_blocks)
        self._link: SchedulerLink | None = None
        self._load = LoadReport()
        self._is_stepping = False

    def make_manager(self) -> KvpoolManager:
        """For the spec."""
        return self._manager

    def connect(self, config: SchedulerOffloadConfig) -> None:
        """vLLM's own scheduler side exists: take its groups over, connect and identify in the background."""
        groups = with_leads([_keying(group) for group in config.kv_group_configs])
        link = SchedulerLink(
            self._settings.socket_path,
            lambda: self._greeting.hello("scheduler"),
            on_verdict=self._manager.on_verdict,
            held=self._manager.held,
            on_greeted=self._on_greeted,
            on_idle=self._report_while_idle,
        )
        self._manager.use(link, groups)
        self._link = link
        link.client.start()
        self._identification.start(link.publish, ask=link.ask_digests, teach=link.teach_digests)

    def _on_greeted(self) -> None:
        self.gpu_blocks.ask_for_snapshot()
        self._load.forget()

    def step_began(self) -> None:
        """The engine is about to change its cache."""
        self._is_stepping = True

    def step_ends(self) -> None:
        """On the engine's thread, just before vLLM drains its events."""
        self._report(is_quiet=lambda: True)
        self._is_stepping = False

    def _report_while_idle(self) -> None:
        self._report(is_quiet=lambda: not self._is_stepping and not self._manager.has_requests)

    def _report(self, *, is_quiet: Callable[[], bool]) -> None:
        link = self._link
        if link is not None and link.client.connected:
            self.gpu_blocks.report(link.client.send, is_quiet=is_quiet)
            self._report_load()

    def request_began(self, request: Request) -> None:
        """A request entered the engine."""
        self._load.began(request)
        self._report_load()

    def request_ended(self, request: Request) -> None:
        """A request left it."""
        self._load.ended(request)
        self._report_load()

    def _report_load(self) -> None:
        link = self._link
        if link is not None and link.client.connected and link.protocol >= wire.PROTOCOL_LOAD:
            self._load.report(link.client.send, now=time.monotonic())

    def close(self) -> None:
        """End the connection, and keep nothing of the requests."""
        if self._link is not None:
            self._link.client.close()
        self._manager.clear()
        self._load.clear()


class WorkerSetup:
    """A worker process's side."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._settings = _settings(config)
        self._greeting = Greeting(config, kv_cache, self._settings)
        self._worker: KvpoolWorker | None = None
        self._refused = OffloadingWorkerMetadata()
        self._refused_loads: set[str] = set()

    def make_worker(self, caches: CanonicalKVCaches) -> KvpoolWorker:
        """For the spec: check the layout, plan the copies, connect."""
        group_ids = get_offloading_group_ids(self._kv_cache)
        groups = [self._kv_cache.kv_cache_groups[group_id] for group_id in group_ids]
        names = [list(group.layer_names) for group in groups]
        shared, own = fingerprint.worker_parts(self._config, caches, names)
        plans = build_group_plans(caches)
        context_parallel = self._config.parallel_config.decode_context_parallel_size
        layouts = [
            _layout(group_id, group, plan, resolve_dcp_kv_block_size(group.kv_cache_spec, context_parallel))
            for group_id, group, plan in zip(group_ids, groups, plans, strict=True)
        ]
        copier = make_copier(caches.tensors[0].tensor.device)
        registration = wire.RegisterWorker(0, shared, own, layouts)
        rank = self._config.parallel_config.rank
        link = WorkerLink(
            self._settings.socket_path, lambda: self._greeting.hello("worker"), registration, copier, rank=rank
        )
        self._worker = KvpoolWorker(plans, link, copier, self._settings)
        link.client.start()
        return self._worker

    def close(self) -> None:
        """Stop copying and end the connection."""
        if self._worker is not None:
            self._worker.end_all()
            self._worker.shutdown()

    # --- an inert worker's answers --------------------------------------------------------------------------------

    def refuse(self, metadata: object) -> None:
        """Jobs given to an inert worker end at once, loads as failed."""
        if not isinstance(metadata, OffloadingConnectorMetadata):
            return
        for job_id, job in metadata.load_jobs.items():
            self._refused.mark_completed(job_id)
            self._refused_loads.add(job.req_id)
        for job_id in metadata.store_jobs:
            self._refused.mark_completed(job_id)

    def take_refused_loads(self, worker: OffloadingConnectorWorker | None) -> set[str]:
        """Requests whose loads an inert worker owes a report for; includes those begun before it became inert."""
        refused, self._refused_loads = self._refused_loads, set()
        if worker is not None:
            for job_id, request_id in worker._load_jobs.items():
                self._refused.mark_completed(job_id)
                refused.add(request_id)
            for job_id, _source, _target in worker._unsubmitted_store_jobs:
                self._refused.mark_completed(job_id)
            worker._load_jobs.clear()
            worker._unsubmitted_store_jobs.clear()
            if self._worker is not None:
                for result in self._worker.get_finished():
                    self._refused.mark_completed(result.job_id)
        return refused

    def take_refused_jobs(self) -> OffloadingWorkerMetadata | None:
        """Ended jobs of an inert worker since the last call."""
        if not self._refused.completed_jobs:
            return None
        refused, self._refused = self._refused, OffloadingWorkerMetadata()
        return refused


def _keying(config: GroupOffloadConfig) -> GroupKeying:
    window = registered_window_blocks(config.sliding_window_size_in_chunks or 0, is_draft=config.is_eagle_group)
    return GroupKeying(
        config.group_idx, config.tokens_per_chunk, config.hashes_per_chunk, window, is_draft=config.is_eagle_group
    )


def _layout(group_id: int, group: KVCacheGroupSpec, plan: GroupPlan, tokens_per_block: int) -> wire.GroupLayout:
    """A group as a worker registers it; the layers of one group have windows of one size."""
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    window = get_sliding_window_size_in_chunks(spec, tokens_per_block) or 0
    window = registered_window_blocks(window, is_draft=group.is_eagle_group)
    return wire.GroupLayout(group_id, plan.payload_bytes, tokens_per_block, window)
