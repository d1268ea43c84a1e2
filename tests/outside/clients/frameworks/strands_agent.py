"""An agent: Strands' agent with two tools, which streams, asked twice in one conversation."""

import json
import os

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


agent = Agent(model=OpenAIModel(model_id=os.environ["MODEL"]), tools=[add, weather], system_prompt="You are helpful.")
agent(json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"])
print(agent("Once more?"))
