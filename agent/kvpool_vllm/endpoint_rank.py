"""An engine's data-parallel rank as the API server in front of it counts its engines.

Invariant: the rank may be sent to that API server as X-data-parallel-rank. vLLM checks it against the engines that the
server manages: all of them, or with external or hybrid load balancing only the local ones, counted from 0
(`num_ranks` in vllm/v1/engine/input_processor.py).
"""

from __future__ import annotations

from typing import Protocol


class DataParallel(Protocol):
    """What is read of vLLM's ParallelConfig."""

    data_parallel_index: int
    data_parallel_rank_local: int | None
    data_parallel_external_lb: bool
    data_parallel_hybrid_lb: bool


def rank_at_endpoint(parallel: DataParallel) -> int:
    """0 for the one engine of a server with external load balancing, the local rank with hybrid, else the global one."""
    if parallel.data_parallel_external_lb:
        return 0
    if parallel.data_parallel_hybrid_lb:
        return parallel.data_parallel_rank_local or 0
    return parallel.data_parallel_index
