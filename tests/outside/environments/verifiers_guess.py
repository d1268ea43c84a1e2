"""An environment as a user of `verifiers` writes it: its own `run` plays several turns, `finalize` adds a reward."""

from itertools import count

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.stop
    async def four_turns(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 4


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in count():
            yield GuessTask(GuessData(number=number, name=f"guess {number}"), self.config.task)


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        word = "Guess."
        async with agents.player.interaction(task) as exchange:
            while not (segment := await exchange.turn(word)).terminated:
                if segment.last_reply == "crash":
                    raise LookupError("no such guess")
                guess = int(segment.last_reply)
                if guess == task.data.number:
                    exchange.trace.record_reward("found", 1.0)
                    break
                word = "Higher." if guess < task.data.number else "Lower."

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("turns", trace.num_turns, weight=-0.1)


__all__ = ["GuessEnv", "GuessTaskset"]
