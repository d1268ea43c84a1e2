"""An agent with two roles, each a conversation of its own with the model of that name. Copy it and change `play`.

It needs `walk_agent.py` beside it, which leases the tasks and talks to the environment, the `openai` package and its environment,
and nothing of the trainer's. `relay_agent.py scout=policy runner=policy` asks other models than those named `scout` and `runner`.
"""

import asyncio
import sys
from typing import Any

import openai
from walk_agent import environment, main  # type: ignore[import-not-found]

MODELS = {"scout": "scout", "runner": "runner"} | dict(word.split("=", 1) for word in sys.argv[1:])


async def play(client: openai.AsyncOpenAI, env_address: str) -> None:
    """Play one episode: the environment says whose turn it is and what that role reads. It reports the scores."""
    talks: dict[str, list[Any]] = {role: [] for role in MODELS}
    async with environment(env_address) as exchange:
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


if __name__ == "__main__":
    asyncio.run(main(play))
