"""An agent: Agno's agent with two tools, asked twice in one conversation that it keeps itself."""

import json
import os

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAIChat


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


agent = Agent(
    model=OpenAIChat(id=os.environ["MODEL"]),
    tools=[add, weather],
    instructions="You are helpful.",
    db=InMemoryDb(),
    add_history_to_context=True,
    telemetry=False,
)
agent.run(json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"], session_id="one")
print(agent.run("Once more?", session_id="one").content)
