"""Why a round could not continue the round before it: the names, what each means, and what to change about it.

A break is never a loss: the round starts a new branch, which is a training row of its own. It costs: the shared history is
computed again, and the row trains fewer tokens.
"""

from __future__ import annotations

from enum import StrEnum


class BranchCause(StrEnum):
    """Recorded with each round that starts a branch; `REMEDY` has the advice."""

    NEW_CONVERSATION = "new_conversation"
    RESAMPLED = "resampled"
    FORKED = "forked"
    REPLY_DROPPED = "reply_dropped"
    CONTENT_EDITED = "content_edited"
    REASONING_EDITED = "reasoning_edited"
    TOOL_ARGS_REWRITTEN = "tool_args_rewritten"
    TOOL_CALLS_CHANGED = "tool_calls_changed"
    HISTORY_COMPACTED = "history_compacted"
    HISTORY_EDITED = "history_edited"
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_STRIPS_THINKING = "template_strips_thinking"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"
    RETOKENIZED = "retokenized"
    PROMPT_DIFFERS = "prompt_differs"


EXPECTED = frozenset({BranchCause.NEW_CONVERSATION, BranchCause.RESAMPLED, BranchCause.FORKED})
"""Branches that an agent means to have: sub-agents, parallel calls, several samples of one prompt."""

_EXACT_HISTORY = (
    "if server.replay_match is strict, set it to tolerant, which keeps what was sampled; if it is tolerant, the template does not "
    "show where an answer ends: use one that does, or train the branches as they are"
)
REMEDY: dict[BranchCause, str] = {
    BranchCause.NEW_CONVERSATION: "another conversation of the same episode (a sub-agent, a parallel call): nothing to change",
    BranchCause.RESAMPLED: "the same request again: nothing to change if the agent means to sample several answers",
    BranchCause.FORKED: "the agent went on in two ways from one answer: nothing to change if it explores on purpose",
    BranchCause.REPLY_DROPPED: (
        "the agent asked again without its last answer; keep the answer in the history to train both in one row"
    ),
    BranchCause.CONTENT_EDITED: "the agent changed the text of an answer before sending it back; send it back as it came",
    BranchCause.REASONING_EDITED: "the agent changed the reasoning of an answer; send it back as it came, or leave it out",
    BranchCause.TOOL_ARGS_REWRITTEN: "the arguments of a tool call came back with other values; send back the call as it came",
    BranchCause.TOOL_CALLS_CHANGED: "tool calls were dropped, added or renamed before they were sent back; send back all of them",
    BranchCause.HISTORY_COMPACTED: "the agent shortened its history; raise its context limit, or train the branches as they are",
    BranchCause.HISTORY_EDITED: "an earlier message changed between two requests; keep messages as they were first sent",
    BranchCause.SYSTEM_CHANGED: (
        "the system prompt changed between two requests (a clock, a counter?); keep it constant in an episode"
    ),
    BranchCause.TOOLS_CHANGED: "the tools or template arguments changed between two requests; offer the same ones in every request",
    BranchCause.TEMPLATE_STRIPS_THINKING: f"the chat template drops earlier reasoning; {_EXACT_HISTORY}",
    BranchCause.TEMPLATE_REWRITES_HISTORY: f"the chat template writes earlier turns in another way; {_EXACT_HISTORY}",
    BranchCause.RETOKENIZED: f"the history's text gives other tokens than were sampled; {_EXACT_HISTORY}",
    BranchCause.PROMPT_DIFFERS: (
        "the prompt does not begin with the tokens of an earlier one and its completion, as no text does: the end of the "
        "completion is not in it; ask for chat completions, or send all tokens as the prompt"
    ),
}
