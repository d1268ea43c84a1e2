"""An agent: PydanticAI's agent with two tools, asked twice in one conversation. API=google: through Google's client."""

import json
import os

from pydantic_ai import Agent

if os.environ.get("API") == "google":
    from pydantic_ai.models.google import GoogleModel
    from pydantic_ai.providers.google import GoogleProvider

    provider = GoogleProvider(base_url=os.environ["GOOGLE_GEMINI_BASE_URL"], api_key=os.environ["GEMINI_API_KEY"])
    agent = Agent(GoogleModel(os.environ["MODEL"], provider=provider), system_prompt="You are helpful.")
else:
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel(os.environ["MODEL"]), system_prompt="You are helpful.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@agent.tool_plain
def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


first = agent.run_sync(json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"])
print(agent.run_sync("Once more?", message_history=first.all_messages()).output)
