"""The managed Valkey's files, and the purge command's arguments."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvpool_core.errors import ConfigError
from kvpool_operator import names
from kvpool_operator.plan.valkey import build_stateful_set
from kvpool_operator.purge import BAD_ARGUMENTS, UNREACHABLE, main, parse_endpoints
from kvpool_operator.valkey.acl import acl_rules, replication_conf, users_acl
from kvpool_operator.valkey.config import io_threads, maxmemory_bytes, valkey_conf
from kvpool_operator.valkey.erase import key_pattern
from tests.unit.operator_pools import MANAGED, SETTINGS, make_pool

MIB = 1024**2
PASSWORDS = {role: f"{role}-secret-0123456789" for role in ("operator", "agent", "replication")}


def acl(**changes: str) -> str:
    names = {f"{role}_password": password for role, password in PASSWORDS.items()}
    return users_acl(**(names | {"key_prefix": "kvpool:ns/pool:"} | changes))


def test_nobody_may_do_anything_without_a_password() -> None:
    lines = acl().splitlines()
    assert lines[0] == "user default off"
    assert [line.split()[1] for line in lines] == ["default", "operator", "agent", "replication"]


def test_what_users_may_do_is_part_of_what_shards_are_replaced_for() -> None:
    """A shard reads its users when it starts, and never again."""
    for line in acl().splitlines()[1:]:
        assert " ".join(word for word in line.split() if word.startswith(("+", "-"))) in acl_rules()
    stateful_set = build_stateful_set(make_pool(valkey=MANAGED), SETTINGS, replicas=3)
    assert stateful_set is not None
    pod = stateful_set["spec"]["template"]
    config = valkey_conf(limit_bytes=1024 * MIB) + acl_rules()
    assert pod["metadata"]["annotations"][names.CONFIG_HASH] == names.digest({"spec": pod["spec"], "config": config})


def test_users_file_holds_no_password_and_only_the_agents_keys_are_the_agents() -> None:
    text = acl(key_prefix="a*[b]:")
    assert not any(password in text for password in PASSWORDS.values())
    assert "#" + hashlib.sha256(PASSWORDS["agent"].encode()).hexdigest() in text
    agent = text.splitlines()[2]
    assert r" ~a\*\[b\]:* " in agent
    assert "@" not in agent.split("~")[1]


def test_password_that_would_need_quoting_is_refused() -> None:
    for wrong in ("short", "with a space and more", 'quote"quote"quote"', ""):
        with pytest.raises(ConfigError, match="master Secret"):
            acl(agent_password=wrong)
        with pytest.raises(ConfigError, match="master Secret"):
            replication_conf(wrong)


def test_valkey_gets_the_limit_less_headroom() -> None:
    assert maxmemory_bytes(64 * MIB) == 32 * MIB
    assert maxmemory_bytes(1000 * MIB) == 800 * MIB
    with pytest.raises(ConfigError, match="memoryPerShard"):
        maxmemory_bytes(63 * MIB)


def test_one_cpu_is_left_to_the_kernel() -> None:
    assert [io_threads(cpus) for cpus in (None, 0.5, 1, 2, 4, 64)] == [1, 1, 1, 1, 3, 8]


def test_configuration_is_that_of_a_cache_which_survives_losing_its_majority() -> None:
    lines = valkey_conf(limit_bytes=1000 * MIB, cpus=4).splitlines()
    for line in (
        "maxmemory 838860800",
        "maxmemory-policy allkeys-lru",
        "io-threads 3",
        'save ""',
        "cluster-require-full-coverage no",
        "cluster-allow-reads-when-down yes",
        "cluster-allow-replica-migration no",
        "dir /data",
        "aclfile /etc/kvpool-valkey-secret/users.acl",
    ):
        assert line in lines
    assert len({line.split()[0] for line in lines}) == len(lines)


# ----------------------------------------------------------------------------------------------------------- purge


@pytest.mark.parametrize("prefix", ["", "a b:", "a{b}:", "tab\t:", "x" * 65, "kvpool:UPPER/" + "x" * 60])
def test_prefix_that_is_none_of_a_pools_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--prefix"):
        key_pattern(prefix)
    assert main(["--endpoints", "127.0.0.1:1", "--prefix", prefix]) == BAD_ARGUMENTS
    result = json.loads(capsys.readouterr().out)
    assert (result["complete"], result["deleted"], result["remaining_estimate"]) == (False, 0, None)


def test_only_the_prefix_of_one_pool_alone_takes_whatever_is_below_it() -> None:
    block = b"0" * 32 + b":12:{" + b"f" * 64 + b"}"
    own, chosen = key_pattern("kvpool:ns/pool:"), key_pattern("te.m:")
    assert own.fullmatch(b"kvpool:ns/pool:any\nthing")
    assert not own.fullmatch(b"kvpool:ns/pool2:" + block)
    assert chosen.fullmatch(b"te.m:" + block)
    assert chosen.fullmatch(b"te.m:" + block + b":1")
    for other in (b"team:" + block, b"te.m:" + block + b":2", b"te.m:session", b"te.m:x" + block):
        assert not chosen.fullmatch(other)


def test_endpoints_are_read_and_wrong_ones_named() -> None:
    assert parse_endpoints("a:1, [fd00::1]:6379,b.c:65535") == [("a", 1), ("fd00::1", 6379), ("b.c", 65535)]
    for wrong in ("", "a", "a:", ":1", "a:0", "a:65536", "fd00::1:6379", "a:1,", "a:x"):
        with pytest.raises(ConfigError, match="--endpoints"):
            parse_endpoints(wrong)


def test_valkey_that_is_not_there_and_a_secret_without_password_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--endpoints", "127.0.0.1:1", "--prefix", "kvpool:a/b:"]
    assert main(arguments) == UNREACHABLE
    assert "127.0.0.1:1 does not answer" in json.loads(capsys.readouterr().out)["message"]
    assert main([*arguments, "--password-file", str(tmp_path / "password")]) == BAD_ARGUMENTS
    assert "mount the Secret" in json.loads(capsys.readouterr().out)["message"]
    assert main([*arguments, "--deadline-seconds", "0"]) == BAD_ARGUMENTS
    assert "--deadline-seconds" in json.loads(capsys.readouterr().out)["message"]
