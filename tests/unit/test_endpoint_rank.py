"""The rank that an engine reports is one that its API server accepts."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvpool_vllm.endpoint_rank import rank_at_endpoint


@dataclass
class Parallel:
    """What is read of vLLM's configuration, as an engine's process has it."""

    data_parallel_index: int = 0
    data_parallel_rank_local: int | None = None
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False


@pytest.mark.parametrize(
    ("parallel", "rank"),
    [
        (Parallel(), 0),
        (Parallel(3, 3), 3),
        (Parallel(3, 1), 3),
        (Parallel(1, 0, data_parallel_external_lb=True), 0),
        (Parallel(3, 1, data_parallel_hybrid_lb=True), 1),
        (Parallel(2, 0, data_parallel_hybrid_lb=True), 0),
    ],
    ids=["alone", "internal", "internal, on a second node", "external", "hybrid", "hybrid, first of a second node"],
)
def test_rank_is_counted_as_the_api_server_counts(parallel: Parallel, rank: int) -> None:
    assert rank_at_endpoint(parallel) == rank
