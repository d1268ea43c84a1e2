"""An agent: LangGraph's agent with two tools, asked twice in one conversation."""

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


model = ChatOpenAI(model=os.environ["MODEL"], streaming=bool(os.environ.get("STREAM")))
graph = create_react_agent(model, [add, weather], prompt="You are helpful.")
state = graph.invoke({"messages": [("user", json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"])]})
state = graph.invoke({"messages": [*state["messages"], ("user", "Once more?")]})
print(state["messages"][-1].content)
