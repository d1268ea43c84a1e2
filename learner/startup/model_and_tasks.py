"""What a run needs before anything starts: its model and its task files. Called by `learner.pipeline`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path

from buffers.did_you_mean import one_of
from buffers.errors import TaskError
from buffers.tasks.parquet import unread_columns
from configs.model_folder import has_chat_template
from configs.schema import Config
from configs.tiny_model import make_tiny_model
from learner.model.weight_files import WeightFiles
from learner.players import Players
from learner.startup.input_check import TEMPLATE_REMEDY, check_demonstrations, check_model, check_tasks
from learner.startup.plain_folder import plain_folder
from learner.startup.template_check import check_template


async def prepare_files(
    config: Config,
    *,
    folder: Path,
    make: Callable[[Sequence[str], str, Path], Awaitable[None]],
    players: Players,
    warms_up: bool,
    warn: Callable[[str], None],
) -> Path:
    """The model's folder; makes the tiny model, and has the files made that are missing.

    `make` runs `data.make`, as this file is missing, with a log file. `warms_up`: the demonstrations are read. A row's
    `agent_name` must be one of `players`. `warn` gets a line for what has no effect. Raises TaskError for a file that cannot be
    used: that is known before the engine starts.
    """
    files = config.data.task_files
    demonstrations = config.warm_start.demonstrations if warms_up else ""
    named = [*files, config.data.validation.tasks, demonstrations]
    if config.data.make and (missing := [path for path in named if path and not Path(path).is_file()]):
        await make(config.data.make, missing[0], folder / "data.log")
    keys = {path: "data.tasks" for path in files} | {config.data.validation.tasks: "data.validation.tasks"}
    agents: set[str | None] = set()
    for path, key in keys.items():
        if path:
            if unread := await asyncio.to_thread(unread_columns, Path(path)):
                warn(
                    f"{key}={path}: nothing is read of the columns {', '.join(unread)}; docs/agents.md#tasks names those that are"
                )
            names = await asyncio.to_thread(partial(check_tasks, key, path, check=players.check))
            agents |= names.keys()
            if players.names is not None:
                _check_agent_names(Path(path), names, players.names)
    if None in agents and players.default is not None and players.loops is None:
        warn(
            "no agent is configured: the run itself answers each prompt once, and data.scorer scores that; to have them played by "
            "agents that you start, leave data.scorer out, or give the rows an agent_name"
        )
    if agents and config.data.scorer and {name or players.default for name in agents} <= players.scored_by_environment:
        warn(
            "data.scorer is never asked: environments score all rows of the task files; leave it out, or name a player in "
            "agent_name that has none"
        )
    if demonstrations:
        await asyncio.to_thread(check_demonstrations, demonstrations)
    if config.model.path == "tiny":
        return await asyncio.to_thread(make_tiny_model, folder / "model", seed=config.run.seed)
    source, own = check_model(config.model.path), folder / "model"
    model = await asyncio.to_thread(plain_folder, source, to=own, dtype=config.model.dtype, say=warn)
    try:
        await asyncio.to_thread(WeightFiles, model)
        await asyncio.to_thread(check_template, model)
    except ValueError as error:
        raise TaskError(str(error)) from None
    if not has_chat_template(model):
        warn(f"{source} has no chat template: requests with messages are refused; {TEMPLATE_REMEDY}")
    return model


def _check_agent_names(path: Path, names: Mapping[str | None, int], known: Set[str]) -> None:
    for name, row in names.items():
        if name is not None and name not in known:
            raise TaskError(f"{path}, row {row}: agent_name must be {one_of(name, known)}; or name it in agents.loops")
