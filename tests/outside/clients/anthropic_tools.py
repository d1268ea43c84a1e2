"""An agent: the Anthropic client, streamed messages, a loop over tool use."""

import json
import os

import anthropic

TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]
MAX_TURNS = 8

with anthropic.Anthropic() as client:
    messages = list(json.loads(os.environ["TASK_JSON"])["prompt"])
    for _ in range(MAX_TURNS):
        options = {"model": os.environ["MODEL"], "max_tokens": 1024, "messages": messages, "tools": TOOLS}
        with client.messages.stream(system="You add numbers.", **options) as events:
            reply = events.get_final_message()
        messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
        results = [
            {"type": "tool_result", "tool_use_id": b.id, "content": str(b.input["a"] + b.input["b"])}
            for b in reply.content
            if b.type == "tool_use"
        ]
        if not results:
            break
        messages.append({"role": "user", "content": results})
print(reply.content[-1].text)
