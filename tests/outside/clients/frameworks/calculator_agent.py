"""An agent: the OpenAI Agents SDK with a tool that multiplies; its last words are the answer."""

import asyncio
import json
import os

from agents.exceptions import MaxTurnsExceeded

from agents import Agent, ModelBehaviorError, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions")


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


async def main() -> None:
    instructions, question = (message["content"] for message in json.loads(os.environ["TASK_JSON"])["prompt"])
    agent = Agent(name="calculator", instructions=instructions, model=os.environ["MODEL"], tools=[multiply])
    try:
        print((await Runner.run(agent, question, max_turns=3)).final_output)
    except (ModelBehaviorError, MaxTurnsExceeded) as error:  # a tool that there is not, or no end
        print(type(error).__name__)


asyncio.run(main())
