"""Programs forked for the engine tests look like started ones, and end with their tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.engine_forks import EngineForks
from tests.harness.processes import Program, ProgramError
from tests.unit.agent_peer import wait_for

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import json, os, signal, socket, sys
from tests.harness.engine_fork_server import become, serve

with socket.socket(fileno=int(sys.argv[1])) as connection:
    request = serve(connection)
if request is not None:
    become(request)
    seen = {"argv": sys.argv, "environment": dict(os.environ), "nice": os.nice(0), "group": os.getpgid(0), "pid": os.getpid()}
    print(json.dumps(seen), flush=True)
    signal.pause()
"""

TESTS = """
import json, os, signal, sys
from pathlib import Path
from tests.harness.engine_forks import EngineForks

folder = Path(sys.argv[1])
environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
forks = EngineForks(Path(sys.executable), folder=folder, environment=environment, server=folder / "server.py")
forked = forks.fork([], os.environ, folder / "forked.log", 0)
print(json.dumps([forks.program.pid, forked.pid]), flush=True)
signal.pause()
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[EngineForks]:
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    forks = EngineForks(Path(sys.executable), folder=tmp_path, environment={"PYTHONPATH": str(ROOT)}, server=server)
    yield forks
    forks.stop()


def start(forks: EngineForks, folder: Path, name: str = "forked") -> Program:
    program = Program(name, ["--port", "1"], folder=folder, env={"ONLY": name}, niceness=3, starter=forks.fork)
    program.start()
    wait_for(lambda: program.log_text().endswith("}\n"), "what the program sees")
    return program


def test_forked_program_sees_what_a_started_one_would(forks: EngineForks, tmp_path: Path) -> None:
    program = start(forks, tmp_path)
    seen = json.loads(program.log_text())
    assert seen["argv"][1:] == ["--port", "1"]
    assert seen["environment"]["ONLY"] == "forked"
    assert "OMP_NUM_THREADS" not in seen["environment"]
    assert seen["nice"] == os.nice(0) + 3
    assert seen["group"] == seen["pid"] == program.pid
    assert os.getsid(program.pid) == os.getsid(0)


def test_killed_program_is_gone_and_another_one_starts(forks: EngineForks, tmp_path: Path) -> None:
    program, other = start(forks, tmp_path), start(forks, tmp_path, "other")
    program.kill()
    assert not program.is_running()
    wait_for(lambda: not Path(f"/proc/{program.pid}").exists(), "no zombie")
    assert other.is_running()
    start(forks, tmp_path, "third")


def test_all_ends_with_the_server(forks: EngineForks, tmp_path: Path) -> None:
    program = start(forks, tmp_path)
    forks.stop()
    wait_for(lambda: not program.is_running(), "the end of what was forked")
    with pytest.raises(ProgramError):
        program.start()


def test_all_ends_when_the_tests_are_killed(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    command = [sys.executable, "-c", TESTS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as tests:
        assert tests.stdout is not None
        pids = json.loads(tests.stdout.readline())
        assert not any(map(has_ended, pids))
        tests.kill()
    for pid in pids:
        wait_for(lambda pid=pid: has_ended(pid), "the end of the server and of what it forked")  # type: ignore[misc]


def has_ended(pid: int) -> bool:
    """Gone, or a zombie whose new parent has not asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
