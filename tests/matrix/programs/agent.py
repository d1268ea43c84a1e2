"""An agent that is started for one episode, or once for many: it does what its task's `extra_info.fate` says, and writes down what
it was given and answered, into the folder that MATRIX_NOTES names.

It prints `{"score": ...}` as its last line, or asks the environment at ENV_ADDRESS to judge, where there is one.
"""

import glob
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]


def request(url, key, body=None, headers=None):
    """(status, answer) of a request; JSON where the answer is."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **(headers or {})}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=600) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode()


class Episode:
    """One episode: its task, its key, and what happened."""

    def __init__(self, task, key, *, name, environment):
        self.task, self.key, self.name, self.environment = task, key, name, environment
        self.fate = task["extra_info"].get("fate", "")
        self.answers = []

    def chat(self, messages, **fields):
        """One model call."""
        body = {"model": os.environ["MODEL"], "messages": messages, "max_tokens": 8, **fields}
        status, answer = request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", self.key, body)
        self.answers.append([status, answer])
        return answer["choices"][0]["message"] if status == 200 else {"content": ""}

    def play(self):
        """All of it; the last answer's text."""
        messages = self.task["prompt"]
        if self.fate == "crash" and self.name.split("-")[1] == "1":
            self.wait_for_another()
            sys.exit(3)
        if self.fate in ("hang", "silent"):
            time.sleep(60)
        if self.fate == "long":
            return self.chat(messages, max_tokens=3990, min_tokens=3950)["content"]
        if self.fate == "tools":
            self.chat(messages, tools=TOOLS, tool_choice="auto")
        if self.fate == "forced":
            self.chat(messages, response_format={"type": "json_object"})
        if self.fate == "slow":  # never silent for long, and not done before others are found silent
            for _ in range(4):
                self.chat(messages)
                time.sleep(1.2)
        message = self.chat(messages)
        if self.fate == "two rounds":
            kept = {"role": "assistant", "content": message["content"] or ""}
            message = self.chat([*messages, kept, {"role": "user", "content": "More."}])
        return message["content"] or str(message.get("reasoning") or "")

    def wait_for_another(self):
        """Until another member of the group has its answer, and a moment in which it is scored; 20 s at most."""
        group = self.name.split("-")[0]
        for _ in range(100):
            time.sleep(0.2)
            for path in glob.glob(os.path.join(os.environ["MATRIX_NOTES"], f"{group}-*.done")):
                if not path.endswith(f"{self.name}.done"):
                    return time.sleep(1.0)

    def judge(self, text):
        """Have it judged, by the environment or by what is printed."""
        if self.environment:
            request(f"http://{self.environment}", self.key, text.encode(), {"X-Episode-Key": self.key})
        letters = [letter for letter in text.lower() if letter.isalpha()]
        print(text)
        print(json.dumps({"score": sum(letter < "n" for letter in letters) / max(len(letters), 1)}), flush=True)

    def note(self):
        """Write down what it was given."""
        known = {key: value for key, value in os.environ.items() if not key.startswith("LC_")}
        notes = {"task": self.task, "variables": known, "pid": os.getpid(), "answers": self.answers, "fate": self.fate}
        notes["preloaded"] = "colorsys" in sys.modules
        path = os.path.join(os.environ["MATRIX_NOTES"], f"{self.name}.json")
        with open(path, "w") as sink:
            json.dump(notes, sink)


def one(episode):
    """From the task to the score."""
    episode.note()
    try:
        episode.judge(episode.play())
    finally:
        episode.note()
    open(os.path.join(os.environ["MATRIX_NOTES"], f"{episode.name}.done"), "w").close()


def lease():
    """Play episodes until there are no more."""
    while True:
        status, leased = request(os.environ["TASKS_URL"] + "?wait=30", os.environ["OPENAI_API_KEY"])
        if status == 410:
            return
        if status == 200:
            own = Episode(
                leased["task"], leased["api_key"], name=leased["episode_id"], environment=leased["env_address"]
            )
            with suppress(OSError):  # the environment died, for example: the next episode
                one(own)


def main():
    """One episode, or many at a time."""
    if "EPISODE_ID" in os.environ:
        own = Episode(
            json.load(sys.stdin),
            os.environ["OPENAI_API_KEY"],
            name=os.environ["EPISODE_ID"],
            environment=os.environ.get("ENV_ADDRESS"),
        )
        return one(own)
    threads = [threading.Thread(target=lease) for _ in range(int(os.environ["CONCURRENCY"]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


main()
