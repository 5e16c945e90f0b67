"""`kvpool-purge`: erase a deleted pool's keys from its external Valkey; the operator runs it as a Job in the pool's namespace.

Owns the command line, the exit codes and the one line of JSON that tells the result, on standard output and as the
container's termination message. Invariant: it ends, whatever Valkey does, soon after its deadline.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvpool_core.errors import ConfigError, KVPoolError
from kvpool_operator.valkey.erase import Address, Erased, erase, explain
from kvpool_operator.valkey.wire import Access

COMPLETE, UNREACHABLE, BAD_ARGUMENTS, INCOMPLETE = 0, 1, 2, 3
"""Exit codes."""
TERMINATION_LOG = Path("/dev/termination-log")
REPLY_SECONDS = 5.0
"""For connecting and for each exchange: an UNLINK of thousands of keys waits for the server's only thread."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code. arguments: the command line's when None."""
    options = _parser().parse_args(arguments)
    started = time.monotonic()
    try:
        if options.deadline_seconds <= 0:
            raise ConfigError(f"--deadline-seconds is {options.deadline_seconds:g}; give more than 0")
        erased = erase(
            parse_endpoints(options.endpoints),
            options.prefix,
            Access(_read(options.username_file, optional=True), _read(options.password_file), REPLY_SECONDS),
            deadline=started + options.deadline_seconds,
        )
    except ConfigError as error:
        _tell(None, str(error))
        return BAD_ARGUMENTS
    except KVPoolError as error:
        _tell(None, explain(error))
        return UNREACHABLE
    _tell(erased, erased.problem)
    return INCOMPLETE if erased.problem else COMPLETE


def parse_endpoints(text: str) -> list[Address]:
    """(host, port) of each "host:port" or "[ipv6]:port" between commas; ConfigError names the wrong one."""
    return [_parse_endpoint(part.strip()) for part in text.split(",")]


def _parse_endpoint(text: str) -> Address:
    host, _, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= 65535
    if not host or not is_port or (":" in host and not is_bracketed):
        raise ConfigError(f'--endpoints: {text!r} is not an endpoint; write "host:port" or "[ipv6 address]:port"')
    return host.strip("[]"), int(port)


def _read(path: str | None, *, optional: bool = False) -> str | None:
    """A credential; a Secret of type basic-auth may come without a user name."""
    if path is None or (optional and not Path(path).exists()):
        return None
    try:
        return Path(path).read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}); mount the Secret with that key") from error


def _tell(erased: Erased | None, message: str) -> None:
    """erased None: nothing was begun, and how much there is is not known."""
    result: dict[str, object] = {
        "deleted": erased.deleted if erased else 0,
        "remaining_estimate": erased.remaining if erased else None,
        "complete": erased is not None and not message,
    }
    line = json.dumps(result | ({"message": message} if message else {}))
    sys.stdout.write(line + "\n")
    if TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):  # what was done stands, whether or not it can be told here
            TERMINATION_LOG.write_text(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpool-purge", description="Erase one pool's keys from a Valkey.")
    parser.add_argument("--endpoints", required=True, help="host:port[,host:port...]; of a cluster any of its nodes")
    parser.add_argument("--prefix", required=True, help="the pool's key prefix, such as kvpool:<namespace>/<name>:")
    parser.add_argument("--username-file", help="file with the user name; absent = the default user")
    parser.add_argument("--password-file", help="file with the password")
    parser.add_argument("--deadline-seconds", type=float, default=50.0, help="when to end at the latest (default 50)")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
