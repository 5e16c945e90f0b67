"""Prometheus metrics of the connector, exported by the engine's own /metrics through vLLM's offloading statistics."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

QUERIED_TOKENS = "kvpool_connector_queried_tokens"
LOADED_TOKENS = "kvpool_connector_loaded_tokens"
LOADS = "kvpool_connector_loads"
LOAD_FAILURES = "kvpool_connector_load_failures"
OFFERED_BLOCKS = "kvpool_connector_offered_blocks"
MISSED_VERDICTS = "kvpool_connector_missed_verdicts"
WORN_OUT_VERDICTS = "kvpool_connector_worn_out_verdicts"
PAUSES = "kvpool_connector_pauses"
HOOK_ERRORS = "kvpool_connector_hook_errors"
INERT = "kvpool_connector_inert"
CONNECTED = "kvpool_connector_agent_connected"
IDENTIFIED = "kvpool_connector_domain_known"
PRIVATE = "kvpool_connector_domain_private"
DOMAIN_OVERDUE = "kvpool_connector_domain_overdue"
PREFILL_RATE = "kvpool_connector_prefill_tokens_per_second"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    QUERIED_TOKENS: OffloadingCounterMetadata("Tokens in whole blocks that requests asked the agent for."),
    LOADED_TOKENS: OffloadingCounterMetadata(
        "Tokens loaded from the arena, by the tier where their block lay when the request arrived.", ("tier",)
    ),
    LOADS: OffloadingCounterMetadata("Loads from the arena that ended well."),
    LOAD_FAILURES: OffloadingCounterMetadata("Loads that failed and whose request was recomputed."),
    OFFERED_BLOCKS: OffloadingCounterMetadata("Blocks offered to the agent for storing."),
    MISSED_VERDICTS: OffloadingCounterMetadata("Lookups given up because the agent did not answer in time."),
    WORN_OUT_VERDICTS: OffloadingCounterMetadata(
        "Lookups given up because leases ended again before the engine used them: steps as long as a lease, or a long queue."
    ),
    PAUSES: OffloadingCounterMetadata("Times that the agent was left alone after several missed verdicts in a row."),
    HOOK_ERRORS: OffloadingCounterMetadata(
        "Errors inside a connector hook, which made the connector inert.", ("hook",)
    ),
    INERT: OffloadingGaugeMetadata("1 while the connector neither loads nor stores, by reason.", ("reason",)),
    CONNECTED: OffloadingGaugeMetadata("1 while the scheduler is connected to the node's agent."),
    IDENTIFIED: OffloadingGaugeMetadata("1 while the engine's domain is known, so that it can load and store."),
    PRIVATE: OffloadingGaugeMetadata(
        "1 since vLLM reset the external cache, as it does on sleep, pause and weight updates: blocks stay with this engine."
    ),
    DOMAIN_OVERDUE: OffloadingGaugeMetadata(
        "1 while the agent is there and the domain should be known by now: the engine's log says what is missing."
    ),
    PREFILL_RATE: OffloadingGaugeMetadata("Measured prefill rate of this engine, as used for load-or-recompute."),
}

Stats = OffloadingConnectorStats
