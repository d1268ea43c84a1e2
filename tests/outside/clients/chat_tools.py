"""An agent: the OpenAI client, chat completions, a loop over tool calls. An ordinary program: it knows nothing of the trainer."""

import json
import os

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
MAX_TURNS = 8

with openai.OpenAI() as client:
    messages = [{"role": "system", "content": "You add numbers."}, *json.loads(os.environ["TASK_JSON"])["prompt"]]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model=os.environ["MODEL"], messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])})
print(messages[-1]["content"])
