"""The CRD is missing when the operator starts, or goes while it runs: it removes nothing, and goes on when the CRD is back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import kopf
import pytest

from kvpool_operator import handlers
from kvpool_operator.directory import Directory
from tests.unit.fake_api_server import FakeApiServer
from tests.unit.operator_pools import SETTINGS, manifest
from tests.unit.played_cluster import KEY, settled


def test_directory_is_known_and_empty_until_the_crd_is_back(api: FakeApiServer) -> None:
    api.refused_reads["KVCachePool"] = 404
    api.put(manifest())
    directory = Directory(api.kube(), SETTINGS)

    directory.refresh()
    assert directory.is_known.is_set()
    assert directory.find_pool(*KEY) is None
    api.refused_reads.clear()
    directory.refresh()

    assert directory.find_pool(*KEY) is not None


def test_nothing_is_removed_and_nothing_retried_while_the_crd_is_missing(api: FakeApiServer) -> None:
    operating = settled(api)
    before, writes = dict(api.objects), len(api.writes)
    api.refused_reads["KVCachePool"] = 404

    assert operating.reconcile(KEY) is None

    assert api.objects == before
    assert len(api.writes) == writes
    api.refused_reads.clear()
    operating.reconcile(KEY)
    assert {key for key in api.objects if key[0] != "Event"} == {key for key in before if key[0] != "Event"}


def test_watching_that_kopf_gave_up_is_begun_anew_until_the_operator_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    is_watching = threading.Event()

    async def give_up_once(*, registry: object, stop_flag: asyncio.Event, **_: Any) -> None:
        begun.append(registry)
        if len(begun) == 1:
            raise RuntimeError("404 page not found")
        is_watching.set()
        await stop_flag.wait()

    monkeypatch.setattr(kopf, "operator", give_up_once)
    stop = threading.Event()
    thread = threading.Thread(
        target=handlers.watch,
        args=(lambda _kind, _raw, _gone: None,),
        kwargs={"identity": "me", "namespaces": (), "stop": stop, "ready": threading.Event()},
    )
    thread.start()
    assert is_watching.wait(30)
    assert thread.is_alive()
    stop.set()
    thread.join(30)

    assert not thread.is_alive()
    assert begun == [begun[0]] * 2, "with the same handlers, each once"
