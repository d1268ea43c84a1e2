"""A taskset as a user of `verifiers` writes it: one turn, a weighted reward and a metric on the reply."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for a in range(4):
            data = SumData(prompt=f"{a} + 3 =", system_prompt="Say a number.", answer=str(a + 3))
            yield SumTask(data, self.config.task)


__all__ = ["SumTaskset"]
