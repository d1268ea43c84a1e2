"""An agent: the OpenAI Agents SDK with a tool and a second agent as a tool; then the same conversation again, streamed."""

import asyncio
import json
import os

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api(os.environ.get("API", "responses"))


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


helper = Agent(name="helper", instructions="You help.", model=os.environ["MODEL"])
agent = Agent(
    name="adder",
    instructions="You add numbers.",
    model=os.environ["MODEL"],
    tools=[add, helper.as_tool("ask_helper", "Ask a helper.")],
)


async def main() -> None:
    question = json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]
    first = await Runner.run(agent, question)
    print(first.final_output)
    again = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "Again?"}])
    async for _ in again.stream_events():
        pass
    print(again.final_output)


asyncio.run(main())
