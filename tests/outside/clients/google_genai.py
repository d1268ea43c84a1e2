"""An agent: a program with Google's client, with two tools that the client calls by itself, asked twice in one conversation."""

import json
import os

from google import genai
from google.genai import types


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """Get the weather."""
    return f"sunny in {city}"


config = types.GenerateContentConfig(system_instruction="You are helpful.", tools=[add, weather])
client = genai.Client()
chat = client.chats.create(model=os.environ["MODEL"], config=config)
task = json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]
if os.environ.get("STREAM"):
    for question in (task, "Once more?"):
        answer = "".join(chunk.text or "" for chunk in chat.send_message_stream(question))
else:
    answer = [chat.send_message(question).text for question in (task, "Once more?")][-1]
print(answer)
