"""The domain: equal engines get one, different ones never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvpool_core import identity

PART = st.binary(min_size=16, max_size=16)


def test_portable_pages_give_one_domain_at_any_tensor_parallel_size() -> None:
    domains = {
        identity.combine(scheduler_part=b"s" * 16, shared_part=b"w" * 16, rank_parts=[b""] * size) for size in (1, 2, 8)
    }
    assert len(domains) == 1


def test_pages_bound_to_a_layout_give_each_layout_its_domain() -> None:
    one = identity.combine(scheduler_part=b"s" * 16, shared_part=b"w" * 16, rank_parts=[b"r" * 16])
    two = identity.combine(scheduler_part=b"s" * 16, shared_part=b"w" * 16, rank_parts=[b"r" * 16, b"q" * 16])
    swapped = identity.combine(scheduler_part=b"s" * 16, shared_part=b"w" * 16, rank_parts=[b"q" * 16, b"r" * 16])
    assert len({one, two, swapped}) == 3


@given(PART, PART, st.lists(PART, min_size=1, max_size=4), PART)
def test_any_changed_part_is_another_domain(scheduler: bytes, shared: bytes, ranks: list[bytes], other: bytes) -> None:
    domain = identity.combine(scheduler_part=scheduler, shared_part=shared, rank_parts=ranks)
    assert len(domain) == identity.DOMAIN_BYTES
    if other not in (scheduler, shared, ranks[0]):
        assert domain != identity.combine(scheduler_part=other, shared_part=shared, rank_parts=ranks)
        assert domain != identity.combine(scheduler_part=scheduler, shared_part=other, rank_parts=ranks)
        assert domain != identity.combine(scheduler_part=scheduler, shared_part=shared, rank_parts=[other, *ranks[1:]])


@given(PART, PART)
def test_adapters_and_private_processes_have_domains_of_their_own(domain: bytes, content: bytes) -> None:
    lora = identity.derive(domain, kind="lora", content=content)
    private = identity.derive(domain, kind="private", content=content)
    assert len({domain, lora, private}) == 3


def test_order_of_keys_does_not_matter_but_values_and_types_do() -> None:
    assert identity.digest({"a": 1, "b": 2}) == identity.digest({"b": 2, "a": 1})
    assert len({identity.digest(value) for value in ({"a": 1}, {"a": 1.5}, {"a": "1"}, {"a": b"1"}, {"a": None})}) == 5
