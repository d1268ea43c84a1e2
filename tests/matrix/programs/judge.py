"""An environment that scores the text that an agent sends: the share of its letters that come before n. A task's
`extra_info.judging` says how: `rounds` scores each model call, `branch` a branch, `judges` two judges."""

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = os.environ["SCORER_KEY"]


def call(route, body=None, headers=None):
    """What the run answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **(headers or {})}
    with urllib.request.urlopen(urllib.request.Request(os.environ["SERVER_URL"] + route, data, headers)) as reply:
        return json.loads(reply.read())


class Judge(BaseHTTPRequestHandler):
    """One request for each episode."""

    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        episode = call("/episode", headers={"X-Episode-Key": self.headers["X-Episode-Key"]})
        letters = [letter for letter in text.lower() if letter.isalpha()]
        score = sum(letter < "n" for letter in letters) / max(len(letters), 1)
        report = {"episode_id": episode["episode_id"], "score": score}
        judging = episode["task"].get("extra_info", {}).get("judging", "")
        if judging == "rounds":
            call("/scores", {**report, "round_index": 0, "score": 0.25})
        if judging == "branch":
            call("/scores", {**report, "branch": 0, "score": 0.75})
        if judging == "judges":
            call("/scores", {**report, "judge": "strict", "score": 0.0, "final": False})
        call("/scores", report)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


listener = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
host, port = listener.server_address
print(f"ready {host}:{port}", flush=True)
listener.serve_forever()
