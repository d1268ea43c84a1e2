"""Refuses, before anything starts, what Harbor could not play: `check_harbor`. Called by `learner.run`.

Each refusal is one line with the key, the rule, the value and the remedy. It starts `harbor --version`, and `docker info` or a
room where these are needed; it downloads nothing and builds nothing.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from agents import fence
from agents.external import check_named
from agents.harbor.tasks import check_folders
from buffers.did_you_mean import one_of
from buffers.errors import AgentError, EnvError
from buffers.wire.address import is_loopback
from configs.schema import Config
from env_adapters.child_process import resolve_command

HERE = frozenset({"child", "singularity"})
"""Providers whose environments share this machine's network, loopback too."""
NEAR = frozenset({"apple-container", "docker", "kata", "podman", "sbx"})
"""Providers on this machine with a network of their own."""
ELSEWHERE = frozenset({
    "aca-sandbox", "ack", "beam", "blaxel", "boxd", "cua-cloud", "cwsandbox", "daytona", "e2b", "ec2", "gke", "hf-sandbox",
    "hyperbrowser", "islo", "kernel", "langsmith", "modal", "mosaic", "novita", "opensandbox", "openshift", "prime", "runloop",
    "runta", "sail", "skypilot", "smol", "snowflake", "superserve", "tensorlake", "use-computer", "vercel",
})  # fmt: skip
ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
PROGRAM_S = 120.0


def check_harbor(config: Config) -> None:
    """Raises UnderstudyError. Nothing to do without `env.harbor.agent`."""
    harbor = config.env.harbor
    if not harbor.agent:
        return
    check_named(config.agents.environment)
    check_agent(harbor.agent)
    kind = harbor.environment
    if ":" not in kind and kind not in HERE | NEAR | ELSEWHERE:
        raise EnvError(
            f"env.harbor.environment must be {one_of(kind, HERE | NEAR | ELSEWHERE)}; or yours, as module:Class"
        )
    check_address(config)
    check_folders(config)
    check_program(harbor.command)
    if kind == "docker":
        _check_docker()
    if kind == "child":
        _check_room()


def check_address(config: Config) -> None:
    """Raises EnvError when an agent could not reach the server from its environment."""
    harbor, host = config.env.harbor, config.server.host
    if harbor.agent in OUTSIDE or harbor.environment in HERE or ":" in harbor.environment:
        return
    where = f"env.harbor.agent={harbor.agent} runs in its environment"
    if harbor.environment in ELSEWHERE:
        if not harbor.server_url.startswith("https://"):
            raise EnvError(
                f"{where}, with env.harbor.environment={harbor.environment} on another machine: its key must travel encrypted, got "
                f"env.harbor.server_url={harbor.server_url!r}; set it to the https:// address of a proxy before the server"
            )
    elif not harbor.server_url and (is_loopback(host) or host in ANY_ADDRESS):
        raise EnvError(
            f"{where}, where server.host={host} is not this machine; set server.host to an address of this machine that "
            f"containers reach (docker's bridge, 172.17.0.1), or env.harbor.server_url=http://host.docker.internal:PORT"
        )


def check_program(command: list[str]) -> None:
    """Raises EnvError when `harbor` cannot be started."""
    remedy = (
        "it needs Python 3.12 or newer in an environment of its own: `uv tool install harbor`, or name the program in "
        "env.harbor.command"
    )
    try:
        words = resolve_command(command)
    except FileNotFoundError as error:
        raise EnvError(f"env.harbor.command must start harbor, got {command}: {error}; {remedy}") from None
    code, output = _run([*words, "--version"])
    if code != 0 or not any(part.isdigit() for part in output.replace(".", " ").split()):
        last = (output.strip().splitlines() or ["nothing"])[-1]
        raise EnvError(
            f"env.harbor.command must start harbor, but {' '.join(command)} --version ended with code {code} and said: "
            f"{last:.300}; {remedy}"
        )


def _check_docker() -> None:
    code, output = _run(["docker", "info"]) if shutil.which("docker") else (1, "there is no docker program")
    if code != 0:
        last = (output.strip().splitlines() or ["nothing"])[-1]
        raise EnvError(
            f"env.harbor.environment=docker needs docker, got: {last:.300}; start it, or set "
            f"env.harbor.environment=child or another provider"
        )


def _check_room() -> None:
    with tempfile.TemporaryDirectory(prefix="understudy-room-") as folder:
        spec = json.dumps({"network": True, "mounts": []})
        code, output = _run([sys.executable, "-I", "-S", fence.__file__, "hold", folder, spec])
    if code != 0:
        raise EnvError(
            f"env.harbor.environment=child needs Linux with user namespaces, got: {output.strip()[-300:]}; allow them "
            f"(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), or set another provider"
        )


def _run(words: list[str]) -> tuple[int, str]:
    """(exit code, what it printed)."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path.cwd(),
            text=True, errors="replace", timeout=PROGRAM_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"nothing in {PROGRAM_S:.0f} s"
    except OSError as error:
        return 1, str(error)
    return done.returncode, done.stdout


# Harbor's agents by name, as of 0.26: in which API each asks, and where it runs. They take address and key of the model from its
# process, by the names that providers' clients read; each hands them on inside its environment by the names that it reads there
# (docs/harbor.md has that table). The model's name in front of which stands an API's name (`anthropic/policy`) says which of them.

ANTHROPIC = frozenset({"claude-code"})
GEMINI = frozenset({"antigravity-cli", "antigravity-sdk", "gemini-cli"})
OPENAI = frozenset({
    "aider", "code-puppy", "codex", "computer-1", "copilot-cli", "deerflow", "dspy-rlm", "fx", "fx-dev", "goose", "grok-build",
    "hermes", "kimi-cli", "kimi-code", "langgraph", "mcode", "mimo", "mini-swe-agent", "muse-code", "nemo-agent", "openclaw",
    "opencode", "opencode-v2", "openhands", "openhands-sdk", "pi", "qwen-coder", "strands", "swe-agent", "terminus-2", "trae-agent",
    "vibe",
})  # fmt: skip
OUTSIDE = frozenset({"computer-1", "dspy-rlm", "terminus-2"})
"""Agents that run in Harbor's own process, beside the environment: they reach what this machine reaches."""
WITHOUT_MODEL = frozenset({"nop", "oracle"})
OWN_SERVICE = frozenset({
    "acp", "cline-cli", "cortex-code", "cursor-cli", "devin", "eve", "fabric", "junie", "rovodev-cli",
})  # fmt: skip
"""Agents whose model's address cannot be set."""


def check_agent(name: str) -> None:
    """Raises AgentError for a name that is none of Harbor's, or an agent that cannot be trained."""
    if ":" in name:
        return
    if name in WITHOUT_MODEL:
        raise AgentError(
            f"env.harbor.agent must ask a model, got {name}, which asks none: there is nothing to train; set "
            f"env.harbor.agent=terminus-2"
        )
    if name in OWN_SERVICE:
        raise AgentError(
            f"env.harbor.agent must let its model's address be set, got {name}, which asks its maker's service; set "
            f"env.harbor.agent=opencode, for example"
        )
    known = ANTHROPIC | GEMINI | OPENAI
    if name not in known:
        raise AgentError(f"env.harbor.agent must be {one_of(name, known)}; or yours, as module:Class")


def model_name(agent: str, model: str) -> str:
    """The model as Harbor names it: its API, then its name there."""
    api = "anthropic" if agent in ANTHROPIC else "gemini" if agent in GEMINI else "openai"
    return f"{api}/{model}"
