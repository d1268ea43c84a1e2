"""Harbor's agents by name, as of 0.26: in which API each asks, and where it runs. Facts that the door and the docs tell.

Harbor's agents take address and key of the model from its process, by the names that providers' clients read; each hands them
on inside its environment by the names that it reads there (docs/harbor.md has that table). The model's name in front of which
stands an API's name (`anthropic/policy`) says which of them.
"""

from __future__ import annotations

from buffers.did_you_mean import one_of
from buffers.errors import AgentError

ANTHROPIC = frozenset({"claude-code"})
GEMINI = frozenset({"antigravity-cli", "antigravity-sdk", "gemini-cli"})
OPENAI = frozenset({
    "aider", "code-puppy", "codex", "computer-1", "copilot-cli", "deerflow", "dspy-rlm", "fx", "fx-dev", "goose", "grok-build",
    "hermes", "kimi-cli", "kimi-code", "langgraph", "mcode", "mimo", "mini-swe-agent", "muse-code", "nemo-agent", "openclaw",
    "opencode", "opencode-v2", "openhands", "openhands-sdk", "pi", "qwen-coder", "strands", "swe-agent", "terminus-2", "trae-agent",
    "vibe",
})  # fmt: skip
OUTSIDE = frozenset({"computer-1", "dspy-rlm", "terminus-2"})
"""Those that run in Harbor's own process, beside the environment: they reach what this machine reaches."""
WITHOUT_MODEL = frozenset({"nop", "oracle"})
OWN_SERVICE = frozenset({
    "acp", "cline-cli", "cortex-code", "cursor-cli", "devin", "eve", "fabric", "junie", "rovodev-cli",
})  # fmt: skip
"""Those whose model's address cannot be set."""


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
