"""A patch, applied as RFC 6902 says, gives what it was made for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_operator.webhook.json_patch import json_patch
from tests.unit.webhook_pods import RECORDED_NAMES, apply_patch, outcome, recorded

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab/~-0", max_size=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/~0", max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(before=VALUES, after=VALUES)
def test_a_patch_makes_one_value_of_the_other(before: object, after: object) -> None:
    result = apply_patch(before, json_patch(before, after))
    assert result == after
    assert repr(result).replace(" ", "").count("True") == repr(after).replace(" ", "").count("True")


@given(value=VALUES)
def test_equal_values_need_no_patch(value: object) -> None:
    assert json_patch(value, value) == []


@pytest.mark.parametrize("name", RECORDED_NAMES)
def test_patches_of_recorded_pods_only_add_but_for_memory(name: str) -> None:
    before = recorded(name)
    patch = json_patch(before, outcome(before))
    assert apply_patch(before, patch) == outcome(before)
    others = [operation["path"] for operation in patch if operation["op"] != "add"]
    assert all(path.endswith("/memory") for path in others)
