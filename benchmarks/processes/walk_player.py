"""Plays the demo's game with a Hugging Face model in this process, many episodes at once, and gives training rows.

Called by `benchmarks.staleness`, which needs hundreds of batches and no engine. Invariants: a row holds the exact ids that
were sampled, token in and token out, with the log-probability under the whole distribution at temperature 1; equal weights,
tasks and random states give equal rows. It stands in for engine, server, agent and environment, and is none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from buffers.records import Row, Task
from env_adapters.walk.game import WalkGame

MAX_TOKENS = 4
"""Most tokens of one move, as in the demo."""


@dataclass(slots=True, kw_only=True)
class _Play:
    """One episode under way. `pending`: ids that the model has not seen yet."""

    game: WalkGame
    pending: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: dict[int, float] = field(default_factory=dict)
    """Place in `ids` -> log-probability, of sampled tokens."""
    rounds: dict[int, int] = field(default_factory=dict)
    num_moves: int = 0
    move: list[int] = field(default_factory=list)
    score: float | None = None


class Player:
    """A model folder's weights, or those that `load` put in their place."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        # eager: a masked row stays finite, and 0 times it is 0
        self._lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._lm.eval()
        self._tails: dict[str, list[int]] = {}

    def load(self, weights: Path) -> None:
        """Takes the weights that a learner published."""
        self._lm.load_state_dict(load_file(weights), strict=False)  # a tied output matrix is not in the file

    def play(
        self,
        tasks: Sequence[Task],
        *,
        group_size: int,
        version: int,
        random: torch.Generator,
        first_group: int = 0,
        greedy: bool = False,
    ) -> list[Row]:
        """`group_size` whole episodes of each task; one row each. `greedy`: at temperature 0."""
        games = [WalkGame(task) for task in tasks for _ in range(group_size)]
        plays = [_Play(game=game, pending=self._opening(game)) for game in games]
        cache, seen = DynamicCache(), torch.zeros(len(plays), 0, dtype=torch.long)
        while any(play.score is None for play in plays):
            logits, seen = self._feed(plays, cache=cache, seen=seen)
            logprobs = logits.log_softmax(-1)
            likeliest = logprobs.argmax(-1, keepdim=True)
            tokens = likeliest if greedy else torch.multinomial(logprobs.exp(), 1, generator=random)
            chosen = logprobs.gather(1, tokens)[:, 0].tolist()
            for play, token, logprob in zip(plays, tokens[:, 0].tolist(), chosen, strict=True):
                if play.score is None:
                    self._take(play, token=token, logprob=logprob)
        return [
            _row(play, group=first_group + number // group_size, member=number % group_size, version=version)
            for number, play in enumerate(plays)
        ]

    def _opening(self, game: WalkGame) -> list[int]:
        text = self._tokenizer.apply_chat_template(game.reset(), tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    @torch.no_grad()
    def _feed(self, plays: Sequence[_Play], *, cache: DynamicCache, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Gives each play's pending ids to the model, padded on the left. Returns the last logits [B, V] and what the cache
        holds [B, T], 0 where it holds padding."""
        width = max(len(play.pending) for play in plays)
        ids = torch.zeros(len(plays), width, dtype=torch.long)
        new = torch.zeros_like(ids)
        for line, play in enumerate(plays):
            if play.pending:
                ids[line, width - len(play.pending) :] = torch.tensor(play.pending)
                new[line, width - len(play.pending) :] = 1
                play.ids += play.pending
                play.pending = []
        now = torch.cat([seen, new], dim=1)
        positions = (now.cumsum(1) - 1).clamp(min=0)[:, seen.shape[1] :]
        outputs = self._lm(
            input_ids=ids,
            attention_mask=now,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return outputs.logits[:, -1].float(), now

    def _take(self, play: _Play, *, token: int, logprob: float) -> None:
        """A sampled token; at the end of a move the game answers."""
        place = len(play.ids)
        play.logprobs[place] = logprob
        play.rounds[place] = play.num_moves
        play.move.append(token)
        play.pending = [token]
        ended = token == self._tokenizer.eos_token_id
        if not ended and len(play.move) < MAX_TOKENS:
            return
        observation, done, score = play.game.step(self._tokenizer.decode(play.move, skip_special_tokens=True))
        play.move, play.num_moves = [], play.num_moves + 1
        if done:
            play.score = float(score or 0.0)
            play.ids += play.pending
            play.pending = []
        else:
            play.pending += ([] if ended else [self._tokenizer.eos_token_id]) + self._tail(observation)

    def _tail(self, observation: str) -> list[int]:
        """The template's ids from the end of an answer to the start of the next."""
        if observation not in self._tails:
            before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "@"}]
            after = [*before, {"role": "user", "content": observation}]
            text = self._tokenizer.apply_chat_template(after, tokenize=False, add_generation_prompt=True)
            answered = text.partition("@" + self._tokenizer.eos_token)[2]
            self._tails[observation] = list(self._tokenizer.encode(answered, add_special_tokens=False))
        return self._tails[observation]


def _row(play: _Play, *, group: int, member: int, version: int) -> Row:
    mask = np.zeros(len(play.ids), dtype=np.uint8)
    mask[list(play.logprobs)] = 1
    logprobs = np.zeros(len(play.ids), dtype=np.float32)
    logprobs[list(play.logprobs)] = list(play.logprobs.values())
    rounds = np.full(len(play.ids), -1, dtype=np.int32)
    rounds[list(play.rounds)] = list(play.rounds.values())
    return Row(
        episode_id=f"{group}-{member}-0",
        group_id=group,
        score=play.score or 0.0,
        ids=np.array(play.ids, dtype=np.int32),
        mask=mask,
        logprobs=logprobs,
        versions=np.where(mask, version, -1).astype(np.int32),
        rounds=rounds,
    )
