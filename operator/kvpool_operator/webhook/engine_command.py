"""Finds the vLLM server of a pod: its container, the flags it is started with, the port it serves on. Pure.

Invariant: what is returned as an engine takes flags appended to its `args`; what is not recognised is a Skip, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool_operator.webhook.contract import CONTAINER_ANNOTATION, DEFAULT_PORT, PORT_ANNOTATION, Manifest
from kvpool_operator.webhook.engine_flags import Flags
from kvpool_operator.webhook.environment import expand, is_resolved, known_values
from kvpool_operator.webhook.skip_reasons import (
    COMMAND_NOT_EXTENSIBLE,
    CONTAINER_NOT_FOUND,
    NO_ENGINE_FOUND,
    NOT_A_VLLM_SERVER,
    PORT_UNKNOWN,
    SEVERAL_ENGINES,
    SHELL_COMMAND,
    Skip,
)

SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "busybox"})
INITS = frozenset({"tini", "dumb-init"})
CHANGES_ENVIRONMENT = frozenset({"env", "sudo", "su", "runuser"})
"""Programs that may start others without the variables that they were given."""
SERVER_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.launchers.api_server.entry"})
CLI_MODULE = "vllm.entrypoints.cli.main"
SERVER_IMAGES = frozenset(
    {"vllm-openai", "vllm-openai-rocm", "vllm-openai-cpu", "vllm-cpu-release-repo", "vllm-release-repo"}
)
"""Last part of the names of images whose entry point is the server, so that args alone are its flags."""
HUGGINGFACE = "huggingfaceserver"

_SHELL_TEXT = re.compile(r"-[A-Za-z]*c[A-Za-z]*")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SERVER_CODE = re.compile(r"from vllm\.entrypoints\.[\w.]*api_server[\w.]* import main\s*[;\n]\s*main\(\)\s*")
_PLAIN_PYTHON_OPTION = re.compile(r"-[uBOqb]+")
_PYTHON_OPTION_WITH_VALUE = frozenset({"-X", "-W"})

_NOT_AN_ENGINE = Skip(NO_ENGINE_FOUND, "")


@dataclass(frozen=True, slots=True)
class Engine:
    """The container that serves, by its place in `spec.containers`."""

    index: int
    container: Manifest
    flags: Flags
    port: int


def find_engine(pod: Manifest) -> Engine | Skip:
    """The one vLLM server of a pod."""
    annotations = pod.get("metadata", {}).get("annotations") or {}
    named = annotations.get(CONTAINER_ANNOTATION, "")
    containers: list[Manifest] = pod.get("spec", {}).get("containers") or []
    found: list[tuple[int, Flags]] = []
    skips: list[Skip] = []
    for index, container in enumerate(containers):
        if named and container.get("name") != named:
            continue
        flags = engine_flags(container, is_named=bool(named))
        if isinstance(flags, Flags):
            found.append((index, flags))
        elif flags is not _NOT_AN_ENGINE:
            skips.append(flags)
    if len(found) != 1:
        return _why_not_one(containers, found, skips, named)
    index, flags = found[0]
    port = _port(containers[index], flags, annotations.get(PORT_ANNOTATION), is_named=bool(named))
    return port if isinstance(port, Skip) else Engine(index, containers[index], flags, port)


def _why_not_one(containers: list[Manifest], found: list[tuple[int, Flags]], skips: list[Skip], named: str) -> Skip:
    remedy = f"name the container that is the engine in annotation {CONTAINER_ANNOTATION}"
    if found:
        names = ", ".join(str(containers[index].get("name")) for index, _ in found)
        return Skip(
            SEVERAL_ENGINES, f"containers {names} are all vLLM servers, one engine a pod is supported: {remedy}"
        )
    if named and not any(container.get("name") == named for container in containers):
        return Skip(
            CONTAINER_NOT_FOUND, f"annotation {CONTAINER_ANNOTATION} names {named!r}, which is no container of the pod"
        )
    if skips:
        return skips[0]
    return Skip(NO_ENGINE_FOUND, f"no container is known to start a vLLM server: if one is, {remedy}")


def engine_flags(container: Manifest, *, is_named: bool) -> Flags | Skip:
    """Flags of a container that is a vLLM server. is_named: the user says that it is one."""
    name = str(container.get("name"))
    values = known_values(container)
    command = tuple(expand(token, values) for token in container.get("command") or [])
    arguments = tuple(expand(token, values) for token in container.get("args") or [])
    if not command:
        flags = _of_image(name, str(container.get("image", "")), arguments)
    else:
        flags = _of_command(name, _without_init((*command, *arguments)), is_named=is_named)
    if flags is _NOT_AN_ENGINE and is_named:
        flags = _trusted(name, (*command, *arguments))
    if isinstance(flags, Flags) and "--" in flags.tokens:
        return Skip(COMMAND_NOT_EXTENSIBLE, f"container {name} has `--` among its arguments: flags cannot be appended")
    return flags


def _trusted(name: str, tokens: Sequence[str]) -> Flags | Skip:
    """The user says that it is an engine; flags can be appended where it has any arguments, and keeps the environment."""
    if not tokens:
        return Skip(
            COMMAND_NOT_EXTENSIBLE,
            f"container {name} has neither command nor args: arguments would replace those of its image; write them into the pod",
        )
    if _program(tokens) in CHANGES_ENVIRONMENT or any("PYTHONPATH" in token for token in tokens):
        return Skip(
            COMMAND_NOT_EXTENSIBLE,
            f"container {name} starts its program with an environment of its own: set variables in the pod's env",
        )
    if _is_given_shell_text(tokens):
        return Skip(
            SHELL_COMMAND,
            f"container {name} starts its program by a shell's -c, which does not hand flags on that are appended: "
            "write the command as a list",
        )
    return Flags(tuple(tokens))


def _is_given_shell_text(tokens: Sequence[str]) -> bool:
    """Whether there is a shell with -c, also behind a program that starts it: appended arguments are the text's, and dropped."""
    shell = next((index for index, token in enumerate(tokens) if _program((token,)) in SHELLS), len(tokens))
    return any(_SHELL_TEXT.fullmatch(token) for token in tokens[shell + 1 :])


def _of_image(name: str, image: str, arguments: Sequence[str]) -> Flags | Skip:
    repository = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    if repository.startswith(HUGGINGFACE):
        return _huggingface(name)
    if repository not in SERVER_IMAGES:
        return _NOT_AN_ENGINE
    flags = _trusted(name, arguments)
    return flags if isinstance(flags, Skip) else Flags(flags.tokens, takes_model_first=True)


def _huggingface(name: str) -> Skip:
    return Skip(
        NOT_A_VLLM_SERVER,
        f"container {name} is KServe's huggingfaceserver, which chooses its engine itself and is no vLLM server: "
        "use the runtime kserve-vllmserver",
    )


def _without_init(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """Without an init process in front, which hands everything on."""
    if _program(tokens) not in INITS:
        return tokens
    rest = tokens[1:]
    while rest and rest[0].startswith("-"):
        is_last, rest = rest[0] == "--", rest[1:]
        if is_last:
            break
    return rest


def _program(tokens: Sequence[str]) -> str:
    return tokens[0].rpartition("/")[2] if tokens else ""


def _of_command(name: str, tokens: tuple[str, ...], *, is_named: bool) -> Flags | Skip:
    program = _program(tokens)
    if program in SHELLS:
        text = " ".join(tokens)
        if "vllm" not in text:
            return _NOT_AN_ENGINE
        return Skip(
            SHELL_COMMAND,
            f"container {name} starts vLLM through a shell, where flags cannot be appended safely: "
            'write the command as a list, ["vllm", "serve", ...]',
        )
    if program == "vllm":
        return _of_cli(tokens[1:])
    if _PYTHON.fullmatch(program):
        return _of_python(name, tokens[1:], is_named=is_named)
    return _NOT_AN_ENGINE


def _of_cli(tokens: tuple[str, ...]) -> Flags | Skip:
    return Flags(tokens[1:], takes_model_first=True) if tokens[:1] == ("serve",) else _NOT_AN_ENGINE


def _of_python(name: str, tokens: tuple[str, ...], *, is_named: bool) -> Flags | Skip:
    isolated = False
    while tokens and tokens[0].startswith("-") and tokens[0] not in ("-m", "-c"):
        if tokens[0] in _PYTHON_OPTION_WITH_VALUE:
            tokens = tokens[1:]
        elif not _PLAIN_PYTHON_OPTION.fullmatch(tokens[0]) and tokens[0][:2] not in _PYTHON_OPTION_WITH_VALUE:
            isolated = True
        tokens = tokens[1:]
    flags = _of_python_target(name, tokens)
    if isolated and (isinstance(flags, Flags) or (is_named and flags is _NOT_AN_ENGINE)):
        return Skip(
            COMMAND_NOT_EXTENSIBLE,
            f"container {name} gives Python options under which it may not read PYTHONPATH: remove them",
        )
    return flags


def _of_python_target(name: str, tokens: tuple[str, ...]) -> Flags | Skip:
    if len(tokens) >= 2 and tokens[0] == "-m":
        module, rest = tokens[1], tokens[2:]
        if module in SERVER_MODULES:
            return Flags(rest)
        if module.partition(".")[0] == HUGGINGFACE:
            return _huggingface(name)
        return _of_cli(rest) if module == CLI_MODULE else _NOT_AN_ENGINE
    if len(tokens) >= 2 and tokens[0] == "-c":
        return Flags(tokens[2:]) if _SERVER_CODE.fullmatch(tokens[1].strip()) else _NOT_AN_ENGINE
    return _of_cli(tokens[1:]) if _program(tokens) == "vllm" else _NOT_AN_ENGINE


def _port(container: Manifest, flags: Flags, annotation: str | None, *, is_named: bool) -> int | Skip:
    """The serving port: what the annotation says, else the flag, else the one declared port, else vLLM's default."""
    declared = [port.get("containerPort") for port in container.get("ports") or [] if port.get("containerPort")]
    text = annotation if annotation is not None else flags.value("--port")
    if text is None:
        text = str(declared[0] if is_named and len(declared) == 1 else DEFAULT_PORT)
    elif not is_resolved(text) and annotation is None and len(declared) == 1:
        text = str(declared[0])
    if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    return Skip(
        PORT_UNKNOWN,
        f"the port of container {container.get('name')} is {text!r}: write the number into annotation {PORT_ANNOTATION}",
    )
