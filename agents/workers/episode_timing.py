"""Figures of agent loops: where the time of episodes went, and the anatomy of the slowest one (verl's `agent_loop/*`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from agents.workers.worker import LoopResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one episode. Times in seconds, lengths in tokens."""

    generate_sequences: float
    tool_calls: float
    compute_score: float
    num_preempted: float
    num_turns: float
    prompt_length: float
    response_length: float
    total: float
    """Time from its start to its score."""

    @classmethod
    def of(cls, result: LoopResult, *, score_s: float) -> Figures:
        """Sums over the trajectories of an episode; lengths and turns are those of the longest."""
        longest = max(result.outputs, key=lambda output: len(output.response_ids))
        metrics = [output.metrics for output in result.outputs]
        return cls(
            generate_sequences=sum(each.generate_sequences for each in metrics),
            tool_calls=sum(each.tool_calls for each in metrics),
            compute_score=score_s + sum(each.compute_score for each in metrics),
            num_preempted=sum(each.num_preempted for each in metrics),
            num_turns=longest.num_turns,
            prompt_length=len(longest.prompt_ids),
            response_length=len(longest.response_ids),
            total=result.seconds + score_s,
        )


class LoopFigures:
    """Collects episodes until their figures are taken."""

    def __init__(self) -> None:
        self._episodes: list[Figures] = []

    def add(self, figures: Figures) -> None:
        """One more episode has ended."""
        self._episodes.append(figures)

    def take(self) -> dict[str, float]:
        """`agent_loop/<what>/<min|max|mean>` and `agent_loop/slowest/<what>` of the episodes since the last call; none
        if there were none."""
        episodes, self._episodes = self._episodes, []
        if not episodes:
            return {}
        figures = {"agent_loop/episodes": float(len(episodes))}
        for name in asdict(episodes[0]):
            values = [float(getattr(episode, name)) for episode in episodes]
            figures[f"agent_loop/{name}/min"] = min(values)
            figures[f"agent_loop/{name}/max"] = max(values)
            figures[f"agent_loop/{name}/mean"] = sum(values) / len(values)
        slowest = max(episodes, key=lambda episode: episode.total)
        return figures | {f"agent_loop/slowest/{name}": float(value) for name, value in asdict(slowest).items()}
