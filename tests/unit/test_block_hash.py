"""Block hashes equal vLLM's: golden vectors made by the real one (tests/engine/make_golden_hashes.py)."""

from __future__ import annotations

import json
from array import array
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_core.block_hash import DEFAULT_HASH_SEED, block_hashes, none_hash, short_hash

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "golden" / "block_hashes.json").read_text())


def _hashes(case: dict[str, Any], tokens: list[int]) -> list[str]:
    lora = tuple(case["lora"]) if case["lora"] else None
    found = block_hashes(
        tokens,
        block_size=case["block_size"],
        seed=DEFAULT_HASH_SEED if case["seed"] is None else case["seed"],
        cache_salt=case["cache_salt"],
        lora=lora,
    )
    return [block.hex() for block in found]


def test_every_golden_vector_is_met() -> None:
    assert len(GOLDEN["cases"]) > 100
    for case in GOLDEN["cases"]:
        assert _hashes(case, GOLDEN["tokens"][case["tokens"]]) == case["hashes"], case


def test_golden_vectors_tell_seeds_salts_and_adapters_apart() -> None:
    firsts = [case["hashes"][0] for case in GOLDEN["cases"] if case["tokens"] == "long"]
    assert len(set(firsts)) == len(firsts)


def test_parent_of_first_blocks_is_vllms_default() -> None:
    assert none_hash().hex() == "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0"


def test_token_containers_do_not_matter() -> None:
    tokens = GOLDEN["tokens"]["long"]
    assert list(block_hashes(array("I", tokens), block_size=16)) == list(block_hashes(tokens, block_size=16))


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        list(block_hashes([1, 2], block_size=0))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=70), st.integers(1, 17), st.integers(0, 70))
def test_hashes_of_a_prefix_are_a_prefix_of_the_hashes(tokens: list[int], block_size: int, cut: int) -> None:
    whole = list(block_hashes(tokens, block_size=block_size))
    part = list(block_hashes(tokens[:cut], block_size=block_size))
    assert len(whole) == len(tokens) // block_size
    assert part == list(islice(whole, len(part)))


def test_short_hash_is_the_low_eight_bytes() -> None:
    assert short_hash(bytes(24) + (2**64 - 2).to_bytes(8, "big")) == 2**64 - 2
