"""An agent: CrewAI's agent with two tools in a crew of one."""

import json
import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("weather")
def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


model = LLM(
    model=os.environ["MODEL"], provider="openai", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
    stream=bool(os.environ.get("STREAM")),
)  # fmt: skip
helper = Agent(role="helper", goal="help", backstory="You are helpful.", tools=[add, weather], llm=model, max_iter=5)
question = json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]
task = Task(description=question, expected_output="a number", agent=helper)
print(Crew(agents=[helper], tasks=[task]).kickoff())
