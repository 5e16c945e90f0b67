"""Adapters are identified by the files that the engine has loaded, not by what lies there at the first request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_core import wire
from kvpool_vllm import adapter_loads
from kvpool_vllm.identification import Identification
from tests.unit.agent_peer import wait_for

DOMAIN = b"d" * 16


class EngineCore:
    """As vLLM's, which hands the request to its workers."""

    def __init__(self, *, is_loadable: bool = True) -> None:
        self.is_loadable = is_loadable
        self.loaded: list[str] = []

    def add_lora(self, lora_request: Any) -> bool:
        """Load it."""
        if not self.is_loadable:
            raise ValueError("no such rank")
        self.loaded.append(lora_request.lora_path)
        return True


def ask(files: Sequence[wire.FileKey]) -> list[bytes]:
    return [b""] * len(files)


def identification() -> Identification:
    config: Any = SimpleNamespace(lora_config=None)
    kv_cache: Any = None
    found = Identification(config, kv_cache, seed="0")
    found.start(lambda _part: None, ask=ask, teach=lambda _files, _digests: None)
    return found


def request(folder: Path) -> Any:
    return SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(folder)))


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def core() -> type[EngineCore]:
    """A class of its own for each test, watched."""

    class Core(EngineCore):
        pass

    adapter_loads.watch(Core)
    return Core


def load(core: EngineCore, folder: Path) -> None:
    assert core.add_lora(SimpleNamespace(lora_path=str(folder)))
    assert core.loaded[-1] == str(folder)


def is_identified(found: Identification, folder: Path) -> bool:
    return found.domain_of(DOMAIN, request(folder)) is not None


def test_adapter_as_it_was_loaded_has_a_domain_of_its_content(core: type[EngineCore], tmp_path: Path) -> None:
    found, folder, twin = identification(), write(tmp_path / "a", b"w"), write(tmp_path / "b", b"w")
    load(core(), folder)
    assert not is_identified(found, folder)
    wait_for(lambda: is_identified(found, folder), "the adapter's digest")
    found.domain_of(DOMAIN, request(twin))
    wait_for(lambda: is_identified(found, twin), "the digest of one that was not loaded before")
    assert found.domain_of(DOMAIN, request(folder)) == found.domain_of(DOMAIN, request(twin)) != (DOMAIN, False)


def test_adapter_that_was_replaced_between_its_load_and_its_first_request_has_none(
    core: type[EngineCore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, folder = identification(), write(tmp_path / "a", b"old")
    load(core(), folder)
    write(folder, b"newer")
    load(core(), folder)  # in place: vLLM may have kept the former
    assert not is_identified(found, folder)
    wait_for(lambda: "have changed since the engine loaded it" in caplog.text, "a log line")
    assert not is_identified(found, folder)
    assert caplog.text.count("not offloaded") == 1


def test_load_that_failed_says_nothing_of_the_next(core: type[EngineCore], tmp_path: Path) -> None:
    found, folder = identification(), write(tmp_path / "a", b"old")
    with pytest.raises(ValueError, match="no such rank"):
        load(core(is_loadable=False), folder)
    write(folder, b"newer")
    load(core(), folder)
    found.domain_of(DOMAIN, request(folder))
    wait_for(lambda: is_identified(found, folder), "the adapter's digest")


def test_adapter_that_changes_after_it_was_identified_is_left_alone(core: type[EngineCore], tmp_path: Path) -> None:
    found, folder = identification(), write(tmp_path / "a", b"old")
    load(core(), folder)
    found.domain_of(DOMAIN, request(folder))
    wait_for(lambda: is_identified(found, folder), "the adapter's digest")
    write(folder, b"newer")
    assert not is_identified(found, folder)
    write(folder, b"old")
    assert not is_identified(found, folder)
