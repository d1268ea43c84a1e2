"""An agent: DSPy's ReAct with two tools. It writes its calls as text of its own and makes a new prompt for each step."""

import json
import os

import dspy


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


dspy.configure(lm=dspy.LM(f"openai/{os.environ['MODEL']}", api_base=os.environ["OPENAI_BASE_URL"], cache=False))
agent = dspy.ReAct("question -> answer", tools=[add, weather], max_iters=3)
print(agent(question=json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]).answer)
