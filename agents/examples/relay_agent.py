"""An agent with two roles, each a conversation of its own with the model of that name. Copy it and change `play`.

It needs the `openai` package and its environment, and nothing of the trainer's:

    OPENAI_BASE_URL, OPENAI_API_KEY   the models, as for any OpenAI program
    TASKS_URL, CONCURRENCY            where to ask for tasks, how many to play at once

`relay_agent.py scout=policy runner=policy` asks other models than those named `scout` and `runner`.
"""

import asyncio
import json
import os
import sys
from typing import Any

import openai

MODELS = {"scout": "scout", "runner": "runner"} | dict(word.split("=", 1) for word in sys.argv[1:])


async def play(client: openai.AsyncOpenAI, env_address: str) -> None:
    """Play one episode: the environment says whose turn it is and what that role reads. It reports the scores."""
    host, port = env_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))

    async def exchange(message: dict[str, Any]) -> Any:
        writer.write(json.dumps(message).encode() + b"\n")
        line = await reader.readline()
        if not line:
            raise ConnectionError("the environment closed the connection")
        return json.loads(line)

    talks: dict[str, list[Any]] = {role: [] for role in MODELS}
    try:
        turn = await exchange({"episode_key": client.api_key})
        while not turn["done"]:
            talk = talks[turn["role"]]
            talk += turn["messages"]
            reply = await client.chat.completions.create(
                model=MODELS[turn["role"]], messages=talk, max_tokens=4, temperature=1.0
            )
            said = reply.choices[0].message.content or ""
            talk.append({"role": "assistant", "content": said})
            turn = await exchange({"said": said})
    finally:
        writer.close()


async def next_task(client: openai.AsyncOpenAI, tasks_url: str) -> Any:
    """Wait for a task; None when there are no more."""
    while True:
        try:
            text = await client.get(f"{tasks_url}?wait=30", cast_to=str)
        except openai.APIStatusError as error:
            if error.status_code == 410:
                return None
            raise
        if text:  # empty: nothing yet, ask again
            return json.loads(text)


async def work(client: openai.AsyncOpenAI, tasks_url: str) -> None:
    """Play one task after the other. A failed episode is logged; the next one starts."""
    while (lease := await next_task(client, tasks_url)) is not None:
        try:
            await play(client.with_options(api_key=lease["api_key"]), lease["env_address"])
        except (openai.OpenAIError, OSError, ValueError, KeyError) as error:
            print(f"episode {lease['episode_id']}: {type(error).__name__}: {error}", file=sys.stderr)


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        workers = int(os.environ.get("CONCURRENCY", "16"))
        await asyncio.gather(*[work(client, os.environ["TASKS_URL"]) for _ in range(workers)])


if __name__ == "__main__":
    asyncio.run(main())
