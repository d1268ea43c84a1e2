"""Whether two models have one vocabulary: a teacher, or a frozen model that plays a role, reads the policy's token ids.

Called by `learner.run` before anything starts (`check_folders`), and by each rank. Invariant: an id is the same text in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from buffers.errors import TaskError


def check_same_vocabulary(policy: Any, other: Any, *, key: str, folder: str) -> None:
    """Tokenizers of both. Raises TaskError naming the first token in which they differ."""
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    token = min((token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token)), key=_order(ours))
    raise TaskError(
        f"{key} must name a model with the policy's own tokenizer, got {folder} with {len(theirs):,} tokens for "
        f"{len(ours):,}: {token!r:.40} has the id {theirs.get(token)} there and {ours.get(token)} here; take a model of the same "
        f"family"
    )


def _order(ids: dict[str, int]) -> Any:
    return lambda token: (ids.get(token, len(ids)), token)


def check_folders(policy: Path, other: Path, *, key: str, trust_remote_code: bool = False) -> None:
    """The same for two folders. Raises TaskError, also for a folder without a tokenizer."""
    from transformers import AutoTokenizer

    found = []
    for folder in (policy, other):
        try:
            found.append(AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code))
        except (OSError, ValueError) as error:
            raise TaskError(f"{key} must name a model with a tokenizer, got {folder} ({str(error)[:200]})") from error
    check_same_vocabulary(*found, key=key, folder=str(other))
