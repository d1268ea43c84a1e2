"""An agent of a user's own, as Harbor has them: a shell script inside the environment that asks the model once.

Imported by `harbor`, as `own_harbor_agent:Script`. It hands the model's address and key on as Harbor's installed agents do, and
needs bash alone.
"""

from __future__ import annotations

import os
import shlex
from typing import Any

from harbor.agents.base import BaseAgent

SCRIPT = r"""
address=${OPENAI_BASE_URL#http://}; host=${address%%/*}
body="{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"$ASKED\"}]}"
exec 3<>"/dev/tcp/${host%:*}/${host#*:}"
printf 'POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n' "$OPENAI_API_KEY" >&3
printf 'Content-Length: %d\r\n\r\n%s' "${#body}" "$body" >&3
sed -n 's/.*"content": "\([^"]*\)".*/\1/p' <&3 > /app/answer.txt
"""


class Script(BaseAgent):
    """Writes the model's answer to /app/answer.txt."""

    @staticmethod
    def name() -> str:
        return "script"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        variables = {name: os.environ[name] for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY", "MODEL")}
        variables["ASKED"] = instruction.strip()
        await environment.exec(f"bash -c {shlex.quote(SCRIPT)}", env=variables)
