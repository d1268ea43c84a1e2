"""The agent loops that play a run's tasks and the scorers that judge them, as configured. Called by `learner.pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from agents.workers.config import SHIPPED, LoopSpec, read_loops
from agents.workers.manager import AgentLoopManager
from buffers.errors import EnvError, TaskError
from buffers.records import Task
from configs.schema import Config
from env_adapters.adapter import ADAPTERS, adapter_class
from env_adapters.scoring.judge import NAME as JUDGE
from env_adapters.scoring.judge import Judge, read_rubric
from env_adapters.scoring.rewards import Rewards
from learner.validation import PREFIX
from mocked_server.dispatch import PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Players:
    """Agent loops and scorers of a run."""

    rewards: Rewards | None
    """`data.scorer`."""
    loops: AgentLoopManager | None
    """`agents.loops`, before their workers are started."""
    names: Set[str] | None
    """The names that a row's `agent_name` may have; None: any, because agents of others may play."""
    default: str | None
    """The player of rows that name no agent; None: any agent that asks."""
    scored_by_environment: Set[str | None]
    """Players (None: agents) whose environments score: `data.scorer` never judges what they do."""
    environments: Mapping[str | None, Callable[[Task], None]] = field(default_factory=dict)
    """The check of the tasks that a loop plays in an environment, by its name."""

    def check(self, task: Task) -> None:
        """Raises TaskError for a row of a task file that its environment cannot play, or whose answers `data.scorer` cannot
        judge."""
        if (check := self.environments.get(task.agent_name or self.default)) is not None:
            check(task)
        if self.rewards is not None and (task.agent_name or self.default) not in self.scored_by_environment:
            self.rewards.check(task)

    judge: Judge | None
    """The language model of `data.scorer=judge`."""

    def figures(self) -> dict[str, float]:
        """Figures of agent loops and judge since the last call, for a step's line."""
        return (self.loops.figures.take() if self.loops else {}) | (self.judge.take() if self.judge else {})


def make_players(config: Config) -> Players:
    """Raises TaskError for a scorer or a loop that cannot be used."""
    scorer = config.data.scorer
    judge = _judge(config) if JUDGE in config.data.scorers else None
    rewards = Rewards(scorer, batch=config.data.reward_manager == "batch", judge=judge) if scorer else None
    loops, specs = None, read_loops(Path(config.agents.loops)) if config.agents.loops else []
    if specs:
        loops = AgentLoopManager(
            specs,
            num_workers=max(1, config.agents.processes),
            score_fn=rewards.score if rewards else None,
            temperature=config.rollout.temperature,
            here=config.run.debug,
        )
    plain = {PLAIN} if scorer else set()
    environments = [spec for spec in specs if spec.target == SHIPPED["env_agent"]]
    agents = {None} if config.agents.command and config.agents.processes else set()
    only_loops = loops is not None and not config.agents.command and not config.env.command
    return Players(
        rewards=rewards,
        judge=judge,
        loops=loops,
        names=loops.names | plain if loops is not None and only_loops else None,
        default=_default(config, loops),
        scored_by_environment={spec.name for spec in environments} | agents,
        environments={spec.name: _check_of(spec, config) for spec in environments},
    )


def _judge(config: Config) -> Judge:
    settings, role = config.data.judge, config.roles[JUDGE]
    return Judge(
        read_rubric(settings.rubric, mode=settings.mode),
        mode=settings.mode,
        group_size=config.members,
        max_tokens=settings.max_tokens,
        timeout_s=settings.timeout_s,
        is_ours=not role.url,
        truth=Rewards(settings.truth).score if settings.truth else None,
        unranked=PREFIX,
    )


def _check_of(spec: LoopSpec, config: Config) -> Callable[[Task], None]:
    """Refuses tasks that the environment of a loop cannot play, or for which it has too few roles. Raises TaskError for roles that
    cannot play."""
    env, roles = spec.arguments.get("env"), spec.arguments.get("roles") or ()
    for role in roles:
        if role not in config.roles or config.roles[role].url:
            served = ", ".join(name for name, each in config.roles.items() if not each.url) or "none"
            raise TaskError(
                f"agents.loops, {spec.name}: roles must be of the run's that it serves itself ({served}), got {role!r:.60}; add "
                f"it to roles, without a url"
            )

    def check(task: Task) -> None:
        try:
            players = adapter_class(env).check(task) if env in ADAPTERS else 1  # a user's is imported by workers alone
        except EnvError as error:
            raise TaskError(str(error)) from None
        if roles and players > len(roles):
            raise TaskError(
                f"agents.loops, {spec.name}: roles must name who plays each of the {players} players of {task.task_id!r:.60}, got "
                f"{', '.join(roles)}; add {players - len(roles)}"
            )

    return check


def _default(config: Config, loops: AgentLoopManager | None) -> str | None:
    """The agent's command; without one the first loop; as in verl, no agent at all where there is a scorer."""
    if config.agents.command:
        return None
    return loops.first if loops is not None else PLAIN if config.data.scorer else None
