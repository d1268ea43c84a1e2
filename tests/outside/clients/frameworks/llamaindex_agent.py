"""An agent: LlamaIndex's function agent with two tools, which streams, asked twice in one conversation."""

import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


async def main() -> None:
    model = OpenAILike(
        model=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True, is_function_calling_model=True, context_window=100_000,
    )  # fmt: skip
    agent = FunctionAgent(tools=[add, weather], llm=model, system_prompt="You are helpful.")
    memory = ChatMemoryBuffer.from_defaults(token_limit=90_000, tokenizer_fn=str.split)
    await agent.run(json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"], memory=memory)
    print(await agent.run("Once more?", memory=memory))


asyncio.run(main())
