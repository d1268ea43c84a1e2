"""A walk agent: an ordinary program that plays a game with a model behind the OpenAI API. Copy it and change `play`.

It needs the `openai` package and its environment, and nothing of the trainer's:

    OPENAI_BASE_URL, OPENAI_API_KEY, MODEL   the model, as for any OpenAI program
    TASKS_URL, CONCURRENCY                   a long-lived program: where to ask for tasks, how many to play at once
    TASK_JSON, ENV_ADDRESS                   a fresh program for one task: play it and exit (the key is the episode's)
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai

Play = Callable[[openai.AsyncOpenAI, str], Awaitable[None]]
Exchange = Callable[[dict[str, Any]], Awaitable[Any]]
"""A message to the environment -> what it says next."""


async def play(client: openai.AsyncOpenAI, env_address: str) -> None:
    """Play one episode: the environment talks, the model answers. The environment reports the score, not the agent."""
    model = os.environ["MODEL"]
    async with environment(env_address) as exchange:
        turn = await exchange({"episode_key": client.api_key})
        messages = turn["messages"]
        while not turn["done"]:
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=1.0)
            answer = reply.choices[0].message.content or ""
            turn = await exchange({"move": answer})
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn["observation"]}]


@asynccontextmanager
async def environment(address: str) -> AsyncIterator[Exchange]:
    """The environment of one episode: a JSON object per line, in turn."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))

    async def exchange(message: dict[str, Any]) -> Any:
        writer.write(json.dumps(message).encode() + b"\n")
        line = await reader.readline()
        if not line:
            raise ConnectionError("the environment closed the connection")
        return json.loads(line)

    try:
        yield exchange
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


async def work(client: openai.AsyncOpenAI, tasks_url: str, play: Play) -> None:
    """Play one task after the other. A failed episode is logged; the next one starts."""
    while (lease := await next_task(client, tasks_url)) is not None:
        try:
            # The episode's own key tells the server whose conversation this is; the connections are shared.
            await play(client.with_options(api_key=lease["api_key"]), lease["env_address"])
        except (openai.OpenAIError, OSError, ValueError, KeyError) as error:
            print(f"episode {lease['episode_id']}: {type(error).__name__}: {error}", file=sys.stderr)


async def main(play: Play) -> None:
    async with openai.AsyncOpenAI() as client:
        if "TASK_JSON" in os.environ:
            await play(client, os.environ["ENV_ADDRESS"])
        else:
            workers = int(os.environ.get("CONCURRENCY", "16"))
            await asyncio.gather(*[work(client, os.environ["TASKS_URL"], play) for _ in range(workers)])


if __name__ == "__main__":
    asyncio.run(main(play))
