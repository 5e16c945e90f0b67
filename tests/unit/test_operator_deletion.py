"""What is said of keys that are left."""

from __future__ import annotations

import shlex

import pytest

from kvpool_operator import deletion


@pytest.mark.parametrize(
    ("prefix", "pattern"),
    [
        ("kvpool:inference/chat:", "kvpool:inference/chat:*"),
        ("';reboot;'", "';reboot;'*"),
        ("$(reboot)`x`", "$(reboot)`x`*"),
        ("a*[b]?", r"a\*\[b\]\?*"),
    ],
)
def test_command_to_remove_keys_takes_these_keys_and_runs_nothing_else(prefix: str, pattern: str) -> None:
    scene = deletion.Scene(
        age_seconds=deletion.GIVE_UP_SECONDS + 1,
        is_namespace_terminating=False,
        has_finalizer=True,
        must_purge=True,
        has_daemon_set=False,
        agents=(),
        job=None,
        is_job_ours=False,
        job_message="",
        key_prefix=prefix,
    )

    message = deletion.next_step(scene).message

    command = message[message.index("valkey-cli") : message.index(" and UNLINK")]
    assert shlex.split(command) == ["valkey-cli", "--scan", "--pattern", pattern]
