"""An agent: smolagents' agent with a tool."""

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIServerModel(
    model_id=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4)
print(agent.run(json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]))
