"""The documented rights of an external Valkey's user, on real servers: they suffice, and one that is missing is named.

Invariant: the rights come from the documentation's own line; nothing here repeats them.
"""

# valkey-py is typed in parts only:
# mypy: allow-untyped-calls
from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvpool_agent.valkey_rights import NEEDED_RIGHTS
from kvpool_agent.valkey_tier import FetchOutcome
from kvpool_operator.valkey.acl import EXTERNAL_RIGHTS
from kvpool_operator.valkey.erase import Erased, erase
from kvpool_operator.valkey.wire import Access, ValkeyForbiddenError
from tests.harness.running_tier import PREFIX, RunningTier, eventually, new_key, reader
from tests.harness.valkey_cluster import ValkeyServers

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).resolve().parents[2]
PASSWORD = "secret"
ON_TO = "ACL SETUSER kvpool on >PASSWORD "
SIZE = 64 * 1024


def documented(section: str) -> list[list[str]]:
    """What the operations page says to give: the line of categories, then the commands by name."""
    text = (REPOSITORY / "docs/operations.md").read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    (line,) = re.findall(rf"^{re.escape(ON_TO)}(.*)$", text, re.MULTILINE)
    (by_name,) = re.findall(r"^`(\+get [^`]*)`", text, re.MULTILINE)
    _keys, *categories = line.split()
    return [[f"~{PREFIX}*", *categories], [f"~{PREFIX}*", *by_name.split()]]


CATEGORIES, BY_NAME = documented("External Valkey")


@pytest.fixture(scope="module", params=["standalone", "cluster"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServers]:
    is_cluster = request.param == "cluster"
    folder = tmp_path_factory.mktemp("valkey") / request.param
    with ValkeyServers(folder=folder, shards=2 if is_cluster else 1, cluster=is_cluster) as running:
        yield running


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    return path


def give(servers: ValkeyServers, rights: list[str]) -> None:
    """Make the user anew, on every node."""
    for shard in range(len(servers.ports)):
        with closing(servers.client(shard)) as client:
            client.execute_command("ACL", "SETUSER", "kvpool", "reset", "on", f">{PASSWORD}", *rights)


def tier_of(servers: ValkeyServers, password_file: Path) -> RunningTier:
    return RunningTier(servers.endpoints[:1], username="kvpool", password_file=str(password_file))


def purge(servers: ValkeyServers, *, seconds: float = 10.0) -> Erased:
    endpoints = [("127.0.0.1", port) for port in servers.ports[:1]]
    return erase(endpoints, PREFIX, Access("kvpool", PASSWORD), deadline=time.monotonic() + seconds)


def detail_of(tier: RunningTier) -> str:
    return str(tier.tier.stats()["detail"])


@pytest.mark.parametrize("rights", [CATEGORIES, BY_NAME], ids=["by category", "by name"])
def test_documented_rights_suffice_for_agent_and_purge(
    servers: ValkeyServers, password_file: Path, rights: list[str]
) -> None:
    give(servers, rights)
    with tier_of(servers, password_file) as tier:
        tier.until("connected")
        keys = [new_key() for _ in range(8)]
        payloads = [tier.store(key, SIZE) for key in keys]
        assert all(tier.exists(*keys))
        assert [got.payload for got in tier.fetch_all([(key, SIZE) for key in keys])] == payloads
        assert tier.fetch(new_key(), SIZE).outcome is FetchOutcome.MISS
        assert (tier.state(), tier.tier.stats()["bad_values"]) == ("connected", {})
    erased = purge(servers)
    assert (erased.deleted, erased.problem) == (2 * len(keys), "")


def test_documented_rights_are_those_of_the_remedy_and_of_every_other_page() -> None:
    assert " ".join(CATEGORIES[1:]) == NEEDED_RIGHTS == EXTERNAL_RIGHTS
    pages = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "examples").glob("*.yaml")]
    said = [found for page in pages for found in re.findall(r"\+@read[^`\n]*?\+info|\+@read[^`\n]*", page.read_text())]
    assert len(said) >= 3
    assert set(said) == {NEEDED_RIGHTS}


def after_use(tier: RunningTier) -> tuple[object, str]:
    """State and detail after a block was asked for and one was stored, or not."""
    key = new_key()
    tier.exists(key)
    tier.write(key, b"x" * 100)
    return tier.state(), detail_of(tier)


@pytest.mark.parametrize(
    ("taken", "named"),
    [
        ("+@read", "lacks +exists"),
        ("+@write", "lacks +set"),
        ("+@connection", "lacks +ping"),
        ("+info", "lacks +info"),
        (f"~{PREFIX}*", "access a key"),
    ],
)
def test_right_that_is_missing_is_named_with_the_remedy_and_given_later_it_is_used(
    servers: ValkeyServers, password_file: Path, taken: str, named: str
) -> None:
    give(servers, [right for right in CATEGORIES if right != taken])
    with tier_of(servers, password_file) as tier:
        eventually(lambda: named in after_use(tier)[1])
        assert detail_of(tier).count(f"give it {NEEDED_RIGHTS} on keys that begin with the pool's key prefix") == 1
        assert "forbidden" in detail_of(tier)
        assert tier.state() in ("unreachable", "degraded")
        assert tier.metric("kvpool_valkey_failures_total", reason="forbidden") >= 1
        give(servers, CATEGORIES)
        eventually(lambda: after_use(tier)[0] == "connected")


def test_right_to_the_clusters_map_is_missed_where_there_is_a_cluster(
    servers: ValkeyServers, password_file: Path
) -> None:
    give(servers, [right for right in CATEGORIES if right != "+cluster"])
    with tier_of(servers, password_file) as tier:
        if servers.cluster:
            eventually(lambda: "lacks +cluster|slots: give it" in detail_of(tier))
        else:
            tier.until("connected")


@pytest.mark.parametrize(("taken", "named"), [("+@read", "scan"), ("+@write", "unlink"), ("+info", "info")])
def test_purge_says_what_it_may_not_do(servers: ValkeyServers, password_file: Path, taken: str, named: str) -> None:
    give(servers, CATEGORIES)
    with tier_of(servers, password_file) as tier:
        tier.until("connected")
        key = new_key()
        tier.store(key, SIZE)
    give(servers, [right for right in CATEGORIES if right != taken])
    try:
        problem = purge(servers, seconds=1.0).problem  # no time to try again
    except ValkeyForbiddenError as error:
        problem = str(error)
    assert re.search(rf"'({named}|dbsize)' command", problem), problem
    give(servers, CATEGORIES)
    purge(servers)
    assert reader(servers).dbsize() == 0
