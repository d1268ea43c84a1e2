"""Which session of its client does a request belong to, and is it the session's main line or a side call? Read from what the client
sends of itself.

Called for each request under a key that many sessions share. A pure function of path, headers and body: what is malformed says
nothing, and nothing raises. `tests/mocked_server/session_marks.json` has what each client was seen to send.

A client that says nothing gets an empty name: which earlier round its requests continue tells where they belong, which is not done
here. Neither is `previous_response_id`: it names a round, and each request another one. `user`, `safety_identifier` and a plain
`metadata.user_id` name a person, who has many sessions. No client says when a session ends.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NAME = 200
"""Characters of a name; a longer one, or one that is not printable, is replaced by its SHA-256."""
_MAX_READ = 8192
"""Characters of a header or field that are read; a longer one says nothing."""
_BEGINNING = 200
"""Characters of a prompt that are compared with `PROMPTS`."""
_MOST_BLOCKS = 64
_NO_NAMES = frozenset({"", "null", "none", "undefined", "default", "unknown"})
_ALL = r"(?s)(.+)"
_ID = r"(?s)(.*(?:[0-9a-f]{8}-[0-9a-f]{4}-|(?<![A-Za-z0-9])[A-Za-z]*\d[A-Za-z0-9]{15}).*)"
"""A text with something random in it. `prompt_cache_key` may be an application's own word, the same for all its sessions."""

HEADERS = tuple(
    re.compile(pattern)
    for pattern in (
        rb"x-parent-session-id",  # a sub-agent of opencode, whose own is in x-session-id
        rb"(?:x-claude-code-|x-)?session[-_]id",  # Claude Code, opencode, Codex, pi
        rb"(?:[a-z0-9]+[-_])*session(?:[-_]?id|[-_]affinity)?",
        rb"(?:[a-z0-9]+[-_])*(?:conversation|chat|thread)[-_]?id",
    )
)
"""Names of headers that name a session, the first that is there before the others."""
_NOUNS = re.compile(rb"session|conversation|chat|thread")
"""Few headers have one of these words: the others are not compared with `HEADERS`."""

FIELDS = tuple(
    (path, re.compile(pattern))
    for path, pattern in (
        ("client_metadata.session_id", _ALL),  # Codex
        ("conversation", _ALL),  # of the Responses API, as a text or an object
        ("conversation.id", _ALL),
        ("session_id", _ALL),
        ("litellm_session_id", _ALL),
        ("metadata.session_id", _ALL),
        ("metadata.conversation_id", _ALL),
        ("metadata.thread_id", _ALL),
        ("metadata.user_id", r'(?s).*"session_id"\s*:\s*"([^"]+)"'),  # Claude Code
        ("metadata.user_id", r"(?s).*_session_([0-9a-f-]{36})$"),  # Claude Code, until 2025
        ("prompt_cache_key", _ID),
    )
)
"""Fields of a body that name a session, read where no header does."""

AGENTS = (b"x-claude-code-agent-id", b"x-session-id", b"thread-id")
"""Headers whose value tells a sub-agent, where it is not the session's own name."""

PATHS = (("/count_tokens", "token count"), (":countTokens", "token count"), ("/responses/compact", "compaction"))
"""(end of a path, what is asked there)."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "generationConfig.maxOutputTokens")
"""One token is no answer: Claude Code asks for it to see its quota, and whether a model is there."""
TURN = "x-codex-turn-metadata"
KINDS = re.compile(r'(?s).*"request_kind"\s*:\s*"(?!turn")(\w+)')
"""Codex's word for the kind of a request, in a header and in `client_metadata`: a turn, or something else."""
PROMPTS = (
    ("compaction prompt", "user", "You are performing a CONTEXT CHECKPOINT COMPACTION"),  # Codex
    ("compaction prompt", "user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools"),  # Claude Code
    ("compaction prompt", "user", "Your task is to create a detailed summary of "),
    ("compaction prompt", "system", "You are a helpful AI assistant tasked with summarizing conversations"),
    ("compaction prompt", "system", "You are a context summarization a"),  # opencode, pi
    (
        "compaction prompt",
        "system",
        "You are a specialized system component responsible for distilling chat ",
    ),  # Gemini
    ("compaction prompt", "system", "You are the component that summarizes "),  # Qwen Code
    ("title prompt", "system", "Generate a concise, sentence-case title "),  # Claude Code, Qwen Code
    ("title prompt", "system", "Generate a short kebab-case name "),
    ("title prompt", "system", "You are coming up with a succinct title "),
    ("title prompt", "system", "You are a title generator"),  # opencode
    ("topic prompt", "system", "Analyze if this message indicates a new conversation topic"),  # Claude Code, 2025
    ("routing prompt", "system", "You are a specialized Task Routing AI"),  # Gemini CLI
    ("next-speaker prompt", "user", "Analyze *only* the content and structure of your immediately preceding response"),
    ("next-prompt suggestion", "user", "[SUGGESTION MODE: "),  # Claude Code
    ("side question", "user", "<system-reminder>This is a side question "),
    ("recap prompt", "user", "The user stepped away and is coming back"),
    ("label prompt", "user", "Describe your most recent action in "),
    ("label prompt", "system", "Write a short summary label "),
    ("page summary", "user", "Web page content:"),
    ("memory prompt", "user", "You are now acting as the memory extraction "),
    ("memory prompt", "user", "Managed memory has TWO directories"),  # Qwen Code
)
"""(what it is, whose text, how that begins) of requests beside the main line."""


@dataclass(frozen=True, slots=True)
class SessionMark:
    """Session of a request, as its client names it."""

    name: str
    """Client's name of its session, also after a restart that continues it; empty where it says nothing."""
    is_side: bool
    """A title, a token count, a summary, a suggestion: no round of the main line or of a sub-agent."""
    why: str
    """Source of the mark, for people; empty where there is none."""
    agent: str = ""
    """Client's name of the sub-agent that asks; empty for the main line, or where it does not say."""
    client: str = ""
    """The program that asks, as it names itself: the first word of its `User-Agent`."""


def session_mark(path: str, headers: Sequence[tuple[bytes, bytes]], body: Mapping[str, Any]) -> SessionMark:
    """Read the session of a request to `path`. `headers`: their names in any case; `body`: its JSON, of any shape."""
    sent = {name.lower(): value.decode("latin-1").strip() for name, value in headers}
    name, told_by = _name(sent, body)
    agent = next((sent[header] for header in AGENTS if _is_name(sent.get(header)) and sent[header] != name), "")
    side = _side(path, sent, body)
    why = "; ".join(filter(None, (told_by, side)))
    client = next(iter(sent.get(b"user-agent", "")[:_MAX_READ].split()), "")
    return SessionMark(_bounded(name), bool(side), why, _bounded(agent) if name else "", _bounded(client))


def _name(sent: Mapping[bytes, str], body: Mapping[str, Any]) -> tuple[str, str]:
    """(the session's name, what told it), both empty where nothing does."""
    named = [header for header in sent if _NOUNS.search(header) and _is_name(sent[header])]
    for pattern in HEADERS:
        for header in filter(pattern.fullmatch, named):
            return sent[header], f"{header.decode('latin-1')} header"
    for path, rule in FIELDS:
        value = _at(body, path)
        if _is_name(value) and (match := rule.match(value)) and _is_name(match[1]):
            return match[1].strip(), path
    return "", ""


def _side(path: str, sent: Mapping[bytes, str], body: Mapping[str, Any]) -> str:
    """Kind of a side call; empty for a round of the session's main line or of a sub-agent."""
    if why := next((why for end, why in PATHS if path.endswith(end)), ""):
        return why
    if field := next((field for field in LIMITS if type(limit := _at(body, field)) is int and limit == 1), ""):
        return f"{field}=1"
    for turn in (sent.get(TURN.encode()), _at(body, f"client_metadata.{TURN}")):
        if isinstance(turn, str) and (kind := KINDS.match(turn[:_MAX_READ])):
            return f"request_kind={kind[1]}"
    texts = {"system": list(_system_texts(body)), "user": list(_user_texts(body))}
    return next((why for why, whose, begins in PROMPTS if any(text.startswith(begins) for text in texts[whose])), "")


def _system_texts(body: Mapping[str, Any]) -> Iterator[str]:
    for field in ("system", "instructions", "systemInstruction"):
        yield from _beginnings(_at(body, field))
    for message in _messages(body)[:1]:
        if _at(message, "role") in ("system", "developer"):
            yield from _beginnings(message)


def _user_texts(body: Mapping[str, Any]) -> Iterator[str]:
    """Texts of the last message of the user that has any; a tool's result may have none."""
    asked = (message for message in reversed(_messages(body)) if _at(message, "role") == "user")
    return iter(next(filter(None, (list(_beginnings(message)) for message in asked)), []))


def _messages(body: Mapping[str, Any]) -> list[Any]:
    return next(
        (value for field in ("messages", "input", "contents") if isinstance(value := _at(body, field), list)), []
    )


def _beginnings(message: Any) -> Iterator[str]:
    """Beginning of each text of a message, or of its content alone: one text, or a list of texts and of objects with one."""
    content = next(filter(None, (_at(message, "content"), _at(message, "parts"))), message)
    for block in content[:_MOST_BLOCKS] if isinstance(content, list) else [content]:
        text = block if isinstance(block, str) else _at(block, "text")
        if isinstance(text, str):
            yield text[:_BEGINNING].lstrip()


def _at(body: Any, path: str) -> Any:
    """Value in a body under a path with dots; None where there is none."""
    for key in path.split("."):
        body = body.get(key) if isinstance(body, Mapping) else None
    return body


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_READ and value.strip().lower() not in _NO_NAMES


def _bounded(name: str) -> str:
    if len(name) <= MAX_NAME and name.isprintable():
        return name
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
