"""The injector's copy, and an engine whose vLLM is another one: it starts, without the cache, and says why."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool_operator.webhook import contract
from kvpool_vllm.inject import inject, main
from kvpool_vllm.startup import injected_arguments
from kvpool_vllm.support import find_problem

INJECTED = [
    contract.TRANSFER_FLAG,
    contract.TRANSFER_CONFIG,
    contract.EVENTS_FLAG,
    contract.EVENTS_CONFIG,
    contract.HASH_FLAG,
    contract.HASH_ALGORITHM,
]


@pytest.fixture
def connector(tmp_path: Path) -> Path:
    """The folder as the init container leaves it."""
    inject(tmp_path / "connector")
    return tmp_path / "connector"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its place."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- the copy ---------------------------------------------------------------------------------------------------------


def test_all_modules_are_copied_and_nothing_else(connector: Path) -> None:
    files = contents(connector)
    assert {
        "kvpool_core/wire.py",
        "kvpool_vllm/entry.py",
        "kvpool_vllm/connector.py",
        "sitecustomize.py",
    } <= files.keys()
    metadata = {"kvpool_connector-0.dist-info/METADATA", "kvpool_connector-0.dist-info/entry_points.txt"}
    assert metadata <= files.keys()
    assert all(name.endswith(".py") for name in files.keys() - metadata)
    assert {name.partition("/")[0] for name in files.keys() - metadata} == {
        "kvpool_core",
        "kvpool_vllm",
        "sitecustomize.py",
    }
    assert sum(map(len, files.values())) < 1 << 20, "the folder's size is limited"


def test_any_user_can_read_the_copy(tmp_path: Path) -> None:
    former = os.umask(0o077)
    try:
        inject(tmp_path / "connector")
    finally:
        os.umask(former)
    for path in (tmp_path / "connector").rglob("*"):
        wanted = 0o755 if path.is_dir() else 0o644
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_repeated_copy_replaces_what_another_release_left(connector: Path) -> None:
    before = contents(connector)
    (connector / "kvpool_vllm" / "stale.py").write_text("raise RuntimeError\n")
    (connector / "kvpool_vllm" / "entry.py").write_text("broken")
    inject(connector)
    assert contents(connector) == before
    assert sorted(path.name for path in connector.iterdir()) == [
        "kvpool_connector-0.dist-info",
        "kvpool_core",
        "kvpool_vllm",
        "sitecustomize.py",
    ]


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--to", str(tmp_path / "file" / "x")]) == 1
    assert f"{tmp_path}/file/x" in capsys.readouterr().err


def test_the_command_copies(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_vllm.inject", "--to", str(tmp_path / "c")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "the connector lies in" in done.stdout


# --- which version ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.post1", "0.32.0rc1", "0.32.1.dev3+gabc"])
def test_every_patch_of_the_supported_version_is_supported(version: str) -> None:
    assert find_problem(version, (3, 11)) == ""
    assert "Python 3.10" in find_problem(version, (3, 10))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.3.2", "1.32.0", "", "dev"])
def test_another_version_is_named_with_the_supported_one(version: str) -> None:
    problem = find_problem(version, (3, 12))
    assert (version or "unknown") in problem
    assert "0.32" in problem


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([*INJECTED], []),
        (["serve", "m", *INJECTED], ["serve", "m"]),
        (["--seed", "0", *INJECTED, "--more"], ["--seed", "0", "--more"]),
        ([*INJECTED[4:], *INJECTED[:4]], INJECTED[4:]),
        ([*INJECTED[:2], "--x"], ["--x"]),
        (["--kv-transfer-config", "{}"], ["--kv-transfer-config", "{}"]),
        (["--kv-transfer-config"], ["--kv-transfer-config"]),
        ([], []),
    ],
)
def test_only_what_the_webhook_appended_is_found(arguments: list[str], left: list[str]) -> None:
    place = injected_arguments(arguments)
    assert arguments[: place.start] + arguments[place.stop :] == left


# --- a stub of vLLM in the place of the engine's ----------------------------------------------------------------------

STUB_SERVER = """
import argparse, importlib, json, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--model")
if KNOWS_FLAGS:
    parser.add_argument("--kv-transfer-config", type=json.loads)
    parser.add_argument("--kv-events-config", type=json.loads)
    parser.add_argument("--prefix-caching-hash-algo", choices=["sha256", "sha256_cbor"])
arguments = parser.parse_args()
result = {"model": arguments.model, "argv": sys.argv[1:], "plugins": os.environ.get("VLLM_PLUGINS")}
config = getattr(arguments, "kv_transfer_config", None)
if config:
    module = importlib.import_module(config["kv_connector_module_path"])
    connector = getattr(module, config["kv_connector"])(object(), None, None)
    result |= {
        "connector": type(connector).__name__,
        "matched": connector.get_num_new_matched_tokens(None, 0),
        "finished": connector.request_finished(None, []),
        "hook": connector.a_hook_of_tomorrow() if hasattr(connector, "a_hook_of_tomorrow") else None,
        "metadata": type(connector.build_connector_meta(None)).__name__,
    }
print(json.dumps(result))
"""
STUB_BASE = """
from abc import ABC, abstractmethod
class KVConnectorMetadata(ABC): pass
class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...
class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role): pass
    @abstractmethod
    def get_num_new_matched_tokens(self, request, computed): ...
    @abstractmethod
    def request_finished(self, request, block_ids): ...
    @abstractmethod
    def build_connector_meta(self, output): ...
    @abstractmethod
    def a_hook_of_tomorrow(self): ...
"""
SERVER_MODULE = "vllm.entrypoints.openai.api_server"


def make_stub(folder: Path, version: str, *, knows_flags: bool) -> Path:
    """A package `vllm` that starts as the server does, as far as the connector is concerned."""
    base = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
    files = {
        "vllm/_version.py": f"__version__ = version = '{version}'\n",
        "vllm/version.py": "from ._version import __version__\n",
        "vllm/entrypoints/openai/api_server.py": STUB_SERVER.replace("KNOWS_FLAGS", str(knows_flags)),
        base: STUB_BASE,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()
    return folder


def start(connector: Path, stub: Path, *arguments: str, **environment: str) -> tuple[dict[str, object], str]:
    """What the stub saw, and its log; it must start."""
    done = subprocess.run(
        [sys.executable, "-m", SERVER_MODULE, "--model", "m", *arguments],
        env={**os.environ, **environment, "PYTHONPATH": f"{connector}:{stub}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    return result, done.stderr


@pytest.mark.parametrize("knows_flags", [True, False])
@pytest.mark.parametrize("version", ["0.11.2", "0.31.0", "0.40.0"])
def test_another_vllm_starts_without_our_flags_and_says_why(
    connector: Path, tmp_path: Path, version: str, knows_flags: bool
) -> None:
    result, log = start(connector, make_stub(tmp_path / "stub", version, knows_flags=knows_flags), *INJECTED)
    assert result["argv"] == ["--model", "m"]
    assert f"kvpool: vLLM {version} is not supported" in log
    assert "starting without the cache" in log


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_that_the_webhook_could_not_see_take_our_flags_away(
    connector: Path, tmp_path: Path, name: str
) -> None:
    """vLLM refuses to start with a connector and these."""
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=True)
    result, log = start(connector, stub, *INJECTED, **{name: "expandable_segments:True"})
    assert result["argv"] == ["--model", "m"]
    assert f"kvpool: {name} has expandable_segments" in log


@pytest.mark.parametrize(
    ("named", "seen"), [(None, None), ("", ",kvpool"), ("mine", "mine,kvpool"), ("kvpool,mine", "kvpool,mine")]
)
def test_our_plugin_is_among_those_that_the_user_names(
    connector: Path, tmp_path: Path, named: str | None, seen: str | None
) -> None:
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=True)
    environment = {} if named is None else {"VLLM_PLUGINS": named}
    assert start(connector, stub, *INJECTED, **environment)[0]["plugins"] == seen
    assert start(connector, stub, **environment)[0]["plugins"] == named


def test_a_vllm_without_a_version_starts_too(connector: Path, tmp_path: Path) -> None:
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=False)
    (stub / "vllm" / "_version.py").unlink()
    (stub / "vllm" / "version.py").unlink()
    result, log = start(connector, stub, *INJECTED)
    assert result["argv"] == ["--model", "m"]
    assert "unknown version" in log


SHOW_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"


def run_with_flags(connector: Path, folder: Path, *interpreter: str) -> tuple[list[str], str]:
    """Arguments of a program that is given ours, run in a folder by an interpreter without vLLM, and its log."""
    done = subprocess.run(
        [sys.executable, *interpreter, "serve", *INJECTED],
        env={**os.environ, "PYTHONPATH": str(connector)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    seen: list[str] = json.loads(done.stdout)
    return seen, done.stderr


@pytest.mark.parametrize("interpreter", [("-u", "launcher.py"), ("-m", "launcher"), ("-c", SHOW_ARGUMENTS)])
def test_a_launcher_without_vllm_hands_our_flags_on(
    connector: Path, tmp_path: Path, interpreter: tuple[str, ...]
) -> None:
    """It starts vLLM from another venv, whose interpreter finds out for itself."""
    (tmp_path / "launcher.py").write_text(SHOW_ARGUMENTS)
    assert run_with_flags(connector, tmp_path, *interpreter) == (["serve", *INJECTED], "")


def test_a_vllm_of_the_working_folder_which_is_not_found_yet_starts_without_our_flags(
    connector: Path, tmp_path: Path
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "server.py").write_text(SHOW_ARGUMENTS)
    seen, log = run_with_flags(connector, tmp_path, "-um", "vllm.server")
    assert seen == ["serve"]
    assert "unknown version" in log


@pytest.mark.parametrize("interface", ["as it is", "of tomorrow", "none"])
def test_a_supported_version_that_is_not_as_expected_gets_an_inert_connector(
    connector: Path, tmp_path: Path, interface: str
) -> None:
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=True)
    base = stub / "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
    if interface == "none":
        base.unlink()
    elif interface == "of tomorrow":
        base.write_text(STUB_BASE.replace("vllm_config, role", "vllm_config, role, kv_cache_config"))
    result, log = start(connector, stub, *INJECTED)
    assert result["connector"] == "InertConnector"
    assert result["matched"] == [0, False]
    assert result["finished"] == [False, None]
    assert result["hook"] is None
    assert result["metadata"] == "InertMetadata"
    assert "kvpool: inert, serving without the cache" in log
    assert "Error: " in log


ARG_UTILS = """
from types import SimpleNamespace
class EngineArgs:
    def __init__(self, module):
        self.kv_transfer_config = SimpleNamespace(kv_connector_module_path=module) if module else None
    def create_model_config(self):
        return SimpleNamespace(is_encoder_decoder=IS_ENCODER_DECODER)
"""
USE_PLUGINS = """
import importlib.metadata, json, sys
[plugin] = importlib.metadata.entry_points(group="vllm.general_plugins")
for _ in range(2):
    plugin.load()()
from vllm.engine.arg_utils import EngineArgs
kept = []
for module in ("kvpool_vllm.entry", "mine", ""):
    arguments = EngineArgs(module)
    arguments.create_model_config()
    kept.append(getattr(arguments.kv_transfer_config, "kv_connector_module_path", None))
print(json.dumps([plugin.name, kept]))
"""


@pytest.mark.parametrize(("is_encoder_decoder", "kept"), [(True, None), (False, "kvpool_vllm.entry")])
def test_an_encoder_decoder_model_starts_without_our_connector(
    connector: Path, tmp_path: Path, is_encoder_decoder: bool, kept: str | None
) -> None:
    """vLLM's scheduler refuses such a model with any connector, before it makes one."""
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=True)
    (stub / "vllm/engine").mkdir()
    (stub / "vllm/engine/__init__.py").touch()
    (stub / "vllm/engine/arg_utils.py").write_text(ARG_UTILS.replace("IS_ENCODER_DECODER", str(is_encoder_decoder)))
    done = run_program(USE_PLUGINS, f"{connector}:{stub}")
    assert json.loads(done.stdout) == ["kvpool", [kept, "mine", None]]
    assert ("encoder-decoder models are not supported" in done.stderr) is is_encoder_decoder


def test_a_vllm_that_is_not_as_expected_only_says_so(connector: Path, tmp_path: Path) -> None:
    stub = make_stub(tmp_path / "stub", "0.32.0", knows_flags=True)
    done = run_program(USE_PLUGINS.partition("from vllm")[0], f"{connector}:{stub}")
    assert "kvpool: ModuleNotFoundError" in done.stderr


def run_program(program: str, path: str) -> subprocess.CompletedProcess[str]:
    """A Python program that must end well."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )


def test_programs_without_our_flags_are_left_alone(connector: Path, tmp_path: Path) -> None:
    stub = make_stub(tmp_path / "stub", "0.11.2", knows_flags=True)
    result, log = start(connector, stub, "--prefix-caching-hash-algo", "sha256_cbor")
    assert result["argv"] == ["--model", "m", "--prefix-caching-hash-algo", "sha256_cbor"]
    assert "kvpool" not in log


def test_a_sitecustomize_of_the_image_runs_all_the_same(connector: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import sys; sys.own = __file__\n")
    program = "import sys, sitecustomize; print(sys.own); print(sitecustomize.__file__)"
    done = run_program(program, f"{connector}:{tmp_path / 'own'}")
    assert done.stdout.split() == [str(tmp_path / "own" / "sitecustomize.py")] * 2
    assert done.stderr == ""
