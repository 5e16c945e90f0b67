"""`KvpoolConnector`: vLLM's OffloadingConnector, guarded, over the node's kvpool agent.

vLLM keeps the scheduling logic (hybrid models, sliding windows, preemption). Invariant: no hook raises and none
waits for the agent; after an error the connector is inert: requests are computed as if it were not there.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvpool_core.errors import KVPoolError
from kvpool_vllm import metrics
from kvpool_vllm.settings import SPEC_MODULE, SPEC_NAME
from kvpool_vllm.spec import Wiring

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpool_vllm.engine_setup import SchedulerSetup, WorkerSetup

logger = logging.getLogger("vllm.kvpool")

P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self", bound="KvpoolConnector")
Matched = tuple[int | None, bool]
Finished = tuple[bool, dict[str, Any] | None]


@dataclass
class KvpoolMetadata(OffloadingConnectorMetadata):
    """Step metadata of an inert scheduler side: the workers end every job that they still have.

    stranded: requests that wait for a load which no worker was ever told of; each worker reports it as failed.
    """

    stranded: set[str] = field(default_factory=set)


def guarded(
    neutral: Callable[[], R],
) -> Callable[[Callable[Concatenate[Self, P], R]], Callable[Concatenate[Self, P], R]]:
    """Make a hook answer `neutral()` while the connector is inert, and become inert instead of raising."""

    def decorate(hook: Callable[Concatenate[Self, P], R]) -> Callable[Concatenate[Self, P], R]:
        @functools.wraps(hook)
        def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if not self.inert_reason:
                try:
                    return hook(self, *args, **kwargs)
                except Exception as error:  # noqa: BLE001 a hook that raises kills the engine
                    self.become_inert(hook.__name__, error)
            return neutral()

        return call

    return decorate


def _nothing() -> Any:
    return None


def _no_match() -> Matched:
    return 0, False


def _free_at_once() -> Finished:
    return False, None


def _no_sources() -> dict[CacheHitSource, int]:
    return {}


def _reset() -> bool | None:
    return True


class KvpoolConnector(OffloadingConnector):
    """Loaded by `kv_connector_module_path: kvpool_vllm.connector`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self.inert_reason = ""
        self._error_hook = ""
        self._stranded: set[str] = set()
        self._scheduler_setup: SchedulerSetup | None = None
        self._worker_setup: WorkerSetup | None = None
        self.connector_scheduler: Any = None
        self.connector_worker: Any = None
        _name_spec(vllm_config)
        try:
            self._set_up(vllm_config, role, kv_cache_config)
        except Exception as error:  # noqa: BLE001 a constructor that raises keeps the engine from starting
            _construct_base(self, vllm_config, role, kv_cache_config)
            self.become_inert("", error)

    def _set_up(self, config: VllmConfig, role: KVConnectorRole, kv_cache: KVCacheConfig) -> None:
        from kvpool_vllm import engine_setup  # here, so that what cannot be imported makes the connector inert

        Wiring.manager = Wiring.worker = None
        if role.name == "SCHEDULER":
            self._scheduler_setup = engine_setup.SchedulerSetup(config, kv_cache)
            Wiring.manager = self._scheduler_setup.make_manager
        else:
            self._worker_setup = engine_setup.WorkerSetup(config, kv_cache)
            Wiring.worker = self._worker_setup.make_worker
        super().__init__(config, role, kv_cache)
        if self._scheduler_setup is not None:
            self._scheduler_setup.connect(self.scheduler.config)

    def become_inert(self, hook: str, error: BaseException) -> None:
        """Stop loading and storing for good, say so once, and end what is in flight."""
        self.inert_reason = str(error) if isinstance(error, KVPoolError) else f"{type(error).__name__}: {error}"
        self._error_hook = hook
        unexpected = None if isinstance(error, KVPoolError) else error
        where = f" after an error in {hook}" if hook else ""
        logger.error("kvpool: inert%s, serving without the cache: %s", where, self.inert_reason, exc_info=unexpected)
        if self.connector_scheduler is not None:
            jobs = self.connector_scheduler._current_batch_load_jobs.values()
            self._stranded.update(job.req_id for job in jobs)
            self.connector_scheduler = None  # with all that vLLM's side keeps of requests: no hook reaches it any more
        try:
            if self._scheduler_setup is not None:
                self._scheduler_setup.close()
            if self._worker_setup is not None:
                self._worker_setup.close()
        except Exception:
            logger.exception("kvpool: closing failed")

    # --- scheduler side -------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """The pool whose blocks are reported to the agent."""
        if self._scheduler_setup is not None:
            self._scheduler_setup.gpu_blocks.bind(gpu_block_pool)

    @guarded(_nothing)
    def on_new_request(self, request: Request) -> None:
        """Ask for the request's blocks as soon as it is known."""
        super().on_new_request(request)
        self._manager.track(request)
        if self._scheduler_setup is not None:
            self._scheduler_setup.request_began(request)

    @guarded(_no_match)
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Matched:
        """Tokens that can be loaded, None while the agent's answer is awaited."""
        self._manager.ensure_asked(request, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    @guarded(_no_sources)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """vLLM's accounting of hits by tier."""
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Blocks were allocated: the load becomes a job."""
        self._become_job(request, blocks, num_external_tokens)
        if self.inert_reason and num_external_tokens:
            self._stranded.add(request.request_id)  # vLLM lets it wait for a load all the same

    @guarded(_nothing)
    def _become_job(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The step's jobs. An inert scheduler side has none and tells the workers to end theirs."""
        meta = self._build_meta(scheduler_output)
        if meta is None:
            stranded, self._stranded = self._stranded, set()
            meta = KvpoolMetadata(load_jobs={}, store_jobs={}, jobs_to_flush=set(), stranded=stranded)
        return meta

    @guarded(_nothing)
    def _build_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        if self._scheduler_setup is not None:
            self._scheduler_setup.step_began()
        self._manager.rate.step_began(scheduler_output.total_num_scheduled_tokens, time.monotonic())
        self._manager.admit(
            scheduler_output.scheduled_cached_reqs.resumed_req_ids
        )  # preempted before; vLLM names only new ones
        return super().build_connector_meta(scheduler_output)

    @guarded(lambda: False)
    def has_pending_push_work(self) -> bool:
        """Whether jobs are in flight, so that an idle engine steps on until they are reported."""
        return super().has_pending_push_work()

    @guarded(_nothing)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Jobs ended; requests whose load failed are recomputed, and their blocks offered again."""
        failed = connector_output.failed_recving or set()
        self._manager.mark_failed(failed)
        for request_id in failed:
            status = self.scheduler._req_status.get(request_id)
            for group in status.group_states if status is not None else ():
                group.next_stored_chunk_idx = 0
        super().update_connector_output(connector_output)

    @guarded(_free_at_once)
    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        """vLLM may free the blocks at once: reuse is fenced."""
        self._say_ended(request)
        return super().request_finished(request, block_ids)

    @guarded(_free_at_once)
    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        """The same for engines with several KV-cache groups."""
        self._say_ended(request)
        return super().request_finished_all_groups(request, block_ids)

    def _say_ended(self, request: Request) -> None:
        if self._scheduler_setup is not None:
            self._scheduler_setup.request_ended(request)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Nothing: the agent publishes its tiers itself, subscribers would count twice."""
        return ()

    @guarded(_reset)
    def reset_cache(self) -> bool | None:
        """Called on weight updates too: nothing stored before may be loaded again.

        vLLM's own asserts that a former reset has reached the workers, which takes a step: what is still to be flushed is kept.
        """
        unflushed = set(self.scheduler._current_batch_jobs_to_flush)
        self.scheduler._current_batch_jobs_to_flush.clear()
        done = super().reset_cache()
        self.scheduler._current_batch_jobs_to_flush.update(unflushed)
        return done

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Metrics; also the moment to read the engine's cache events, just before vLLM drains them."""
        if self._scheduler_setup is None and self.connector_scheduler is None and self._worker_setup is not None:
            return None
        stats = self._step_stats() or metrics.Stats()
        if self.inert_reason:
            stats.set_gauge(metrics.INERT, 1, (self.inert_reason[:120],))
            if self._error_hook:
                stats.increase_counter(metrics.HOOK_ERRORS, 1, (self._error_hook,))
                self._error_hook = ""
        return stats

    @guarded(_nothing)
    def _step_stats(self) -> metrics.Stats | None:
        setup = self._scheduler_setup
        if setup is None:
            return None
        self._manager.rate.step_ended(time.monotonic())
        setup.step_ends()
        stats = super().get_kv_connector_stats() or metrics.Stats()
        assert isinstance(stats, metrics.Stats)
        report = self._manager.report()
        if report is not None:
            stats.aggregate(report)
        return stats

    @property
    def _manager(self) -> Any:
        return self.scheduler.manager

    # --- worker side ----------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache exists: derive the payloads and connect."""
        super().register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stores whose source blocks are wanted back are cancelled."""
        if isinstance(kv_connector_metadata, KvpoolMetadata):
            self._stranded |= kv_connector_metadata.stranded
            self._end_all_jobs()
        self._handle_preemptions(kv_connector_metadata)

    @guarded(_nothing)
    def _handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        super().handle_preemptions(metadata)

    def start_load_kv(self, forward_context: ForwardContext, **_kwargs: Any) -> None:
        """Submit the step's loads and the last step's stores; an inert worker fails them at once."""
        self._start_transfers(forward_context)
        if self.inert_reason and self._worker_setup is not None:
            self._worker_setup.refuse(self._connector_metadata)

    @guarded(_nothing)
    def _start_transfers(self, forward_context: ForwardContext) -> None:
        super().start_load_kv(forward_context)

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        """Queue the step's stores."""
        super().wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Ended loads, the failed ones named: vLLM recomputes those requests."""
        return self._transfer_results(finished_req_ids) or self._inert_results()

    @guarded(_nothing)
    def _transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults | None:
        worker = self.connector_worker
        assert worker is not None
        if worker.worker is None:
            return None
        requests_of_jobs = dict(worker._load_jobs)
        sending, receiving = super().get_finished(finished_req_ids)
        finished = requests_of_jobs.keys() - worker._load_jobs.keys()
        failed = {requests_of_jobs[job] for job in worker.worker.take_failed_loads(finished)} | self._take_stranded()
        return KVConnectorTransferResults(
            finished_sending=set(sending), finished_recving=set(receiving) | failed, failed_recving=failed
        )

    def _take_stranded(self) -> set[str]:
        stranded, self._stranded = self._stranded, set()
        return stranded

    def _inert_results(self) -> KVConnectorTransferResults:
        failed = self._take_stranded()
        if self._worker_setup is not None:
            failed |= self._worker_setup.take_refused_loads(self.connector_worker)
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=set(failed), failed_recving=set(failed)
        )

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Ids of ended jobs, for the scheduler side."""
        if self.inert_reason:
            return self._worker_setup.take_refused_jobs() if self._worker_setup is not None else None
        return super().build_connector_worker_meta()

    def _end_all_jobs(self) -> None:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if worker is not None:
            worker.end_all()

    # --- both -----------------------------------------------------------------------------------------------------

    @guarded(_nothing)
    def shutdown(self) -> None:
        """End threads and the connection."""
        super().shutdown()
        if self._scheduler_setup is not None:
            self._scheduler_setup.close()

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """In the API server's process: metrics are made from the spec."""
        _name_spec(vllm_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _name_spec(config: VllmConfig) -> None:
    """vLLM finds the spec by the extra config; a user need not name what follows from the connector."""
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra["spec_name"], extra["spec_module_path"] = SPEC_NAME, SPEC_MODULE


def _construct_base(
    connector: KvpoolConnector, config: VllmConfig, role: KVConnectorRole, kv_cache: KVCacheConfig
) -> None:
    """Only vLLM's own base class: what an inert connector needs to be held by the engine."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    KVConnectorBase_V1.__init__(connector, config, role, kv_cache)
    connector._canonical_layout = False
