"""A judge behind OpenAI's chat API, as a program of its own: `python -m tests.support.scripted_judge HOW`. It prints its address.

An answer with an m is worth 10, another one 0. HOW: how it says so, in turn: right, nonsense, slow (never: it waits until who asked
hangs up, and whoever asks later than the first such waits for that too) or broken (status 500), with commas between.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

HOW = itertools.cycle(sys.argv[1].split(",") if len(sys.argv) > 1 else ["right"])


class Judge(BaseHTTPRequestHandler):
    is_slow: ClassVar[bool] = False
    given_up: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = next(HOW)
        if how == "slow":
            Judge.is_slow = True
            with suppress(OSError):
                self.rfile.read(1)
            self.given_up.set()
            return
        if self.is_slow:
            self.given_up.wait()
        answers = re.findall(r"<(answer\w*)>\n(.*?)\n</\1>", body["messages"][0]["content"], re.S)
        numbers = {"score" if label == "answer" else label: 10 * ("m" in answer) for label, answer in answers}
        said = "They are all wonderful, 11 of 10!" if how == "nonsense" else f"So:\n{json.dumps(numbers)}"
        reply = {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": {"total_tokens": 7}}
        with suppress(OSError):  # nobody waits any more
            self.send_response(500 if how == "broken" else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())


if __name__ == "__main__":
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    listener.daemon_threads = True
    print(f"http://127.0.0.1:{listener.server_address[1]}/v1", flush=True)
    listener.serve_forever()
