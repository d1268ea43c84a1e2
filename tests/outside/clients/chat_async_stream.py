"""An agent: the asynchronous OpenAI client, streams, and two sub-agents that work at the same time."""

import asyncio
import json
import os

import openai


async def ask(client: openai.AsyncOpenAI, messages: list) -> str:
    text = ""
    stream = await client.chat.completions.create(model=os.environ["MODEL"], messages=messages, stream=True)
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text


async def work(client: openai.AsyncOpenAI, system: str, question: str) -> str:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for _ in range(2):
        messages.append({"role": "assistant", "content": await ask(client, messages)})
        messages.append({"role": "user", "content": "Are you sure?"})
    return messages[-2]["content"]


async def main() -> None:
    question = json.loads(os.environ["TASK_JSON"])["prompt"][0]["content"]
    async with openai.AsyncOpenAI() as client:
        found = await asyncio.gather(*[work(client, f"You are sub-agent {i}.", question) for i in range(2)])
        print(await work(client, "You decide.", f"{question} One says {found[0]!r}, one says {found[1]!r}."))


asyncio.run(main())
