"""An agent: AutoGen's assistant with two tools, asked twice in one conversation."""

import asyncio
import json
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


async def main() -> None:
    able = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(
        model=os.environ["MODEL"],
        model_info=able,
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = AssistantAgent(
        "helper", client, tools=[add, weather], system_message="You are helpful.", max_tool_iterations=5,
        model_client_stream=bool(os.environ.get("STREAM")),
    )  # fmt: skip
    await agent.run(task=json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"])
    print((await agent.run(task="Once more?")).messages[-1].content)


asyncio.run(main())
