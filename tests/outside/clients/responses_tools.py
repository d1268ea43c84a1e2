"""An agent: the OpenAI client, the responses API with tools, streamed; it sends the whole conversation each time."""

import json
import os

import openai

TOOLS = [
    {
        "type": "function",
        "name": "add",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]
MAX_TURNS = 8

with openai.OpenAI() as client:
    items = list(json.loads(os.environ["TASK_JSON"])["prompt"])
    for _ in range(MAX_TURNS):
        options = {"model": os.environ["MODEL"], "input": items, "tools": TOOLS, "instructions": "You add numbers."}
        with client.responses.stream(**options) as events:
            reply = events.get_final_response()
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            numbers = json.loads(call.arguments)
            total = str(numbers["a"] + numbers["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": total})
print(reply.output_text)
