"""A toolbox in an episode: whatever the model writes and a tool does, `call` gives an outcome; what was created is released."""

from __future__ import annotations

import asyncio
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agents.tools.base_tool import BaseTool
from agents.tools.function_tool import FunctionTool
from agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse, truncate
from agents.tools.toolbox import Toolbox, ToolFault
from buffers.errors import ToolError
from tests.support.patience import PATIENCE_S


def schema(name: str, **properties: Any) -> OpenAIFunctionToolSchema:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    )


class Vault(BaseTool):
    """Keeps a secret for each episode, and does what its argument says."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__(config or {}, schema("vault", do={"type": "string"}))
        self.open: dict[str, str] = {}
        self.released: list[str] = []
        self.log: list[tuple[str, object]] = []
        self.hung = asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        if kwargs.get("hang"):
            self.open[instance_id] = ""
            await asyncio.Event().wait()
        if kwargs.get("fail"):
            raise PermissionError("no vault left")
        self.open[instance_id] = kwargs.get("secret", "")
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        do = parameters["do"]
        self.log.append((do, kwargs))
        if do == "raise":
            raise LookupError("nothing there")
        if do == "exit":
            sys.exit(3)
        if do == "cancel":
            raise asyncio.CancelledError
        if do == "hang":
            self.hung.set()
            await asyncio.Event().wait()
        if do == "nonsense":
            return "just text"
        if do == "nan":
            return ToolResponse(text=""), float("nan"), {}
        if do == "image":
            return ToolResponse(image=[b"..."]), 0.0, {}
        if do == "much":
            return ToolResponse(text="a" * 50 + "b" * 50), 0.0, {}
        return ToolResponse(text=self.open[instance_id]), 0.25, {"opened": 1}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(kwargs.get("reward", 1.0))

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released.append(self.open.pop(instance_id))


@pytest.mark.parametrize(
    ("name", "arguments", "fault", "text"),
    [
        ("vualt", {}, ToolFault.UNKNOWN_TOOL, "Error: there is no tool 'vualt'; did you mean 'vault'?"),
        ("zzz", {}, ToolFault.UNKNOWN_TOOL, "Error: there is no tool 'zzz'; there are: vault"),
        ("vault", '{"do": ', ToolFault.BAD_JSON, "Error: vault: the arguments must be JSON: Expecting value"),
        ("vault", '{"do": NaN}', ToolFault.BAD_JSON, "NaN is no JSON number"),
        ("vault", "[" * 100_000, ToolFault.BAD_JSON, "nested too deeply"),
        ("vault", '["open"]', ToolFault.BAD_JSON, "must be a JSON object, got list"),
        ("vault", "", ToolFault.BAD_ARGUMENTS, "'do' is a required property (the tool takes: do)"),
        ("vault", '{"do": 3}', ToolFault.BAD_ARGUMENTS, "Error: vault: do: 3 is not of type 'string'"),
        ("vault", {"do": "raise"}, ToolFault.RAISED, "Error: vault failed: LookupError: nothing there"),
        ("vault", {"do": "exit"}, ToolFault.RAISED, "Error: vault failed: SystemExit: 3"),
        ("vault", {"do": "cancel"}, ToolFault.RAISED, "it cancelled its own call"),
        ("vault", {"do": "hang"}, ToolFault.DEADLINE, "Error: vault did not answer within 0.05 s"),
        ("vault", {"do": "nonsense"}, ToolFault.BAD_RESULT, "vault returned 'just text'"),
        ("vault", {"do": "nan"}, ToolFault.BAD_RESULT, "nan"),
        ("vault", {"do": "image"}, ToolFault.RAISED, "a tool response must be text, got an image or a video"),
    ],
)
async def test_a_bad_call_is_an_outcome_that_the_model_can_act_on(name, arguments, fault, text):
    async with Toolbox([Vault({"deadline_s": 0.05})]).open() as tools:
        outcome = await tools.call(name, arguments)
        assert (outcome.ok, outcome.error, outcome.reward) == (False, fault, 0.0)
        assert text in outcome.text
        assert (await tools.call("vault", {"do": "open"})).ok, "and the next call works"


async def test_a_good_call_gives_text_and_reward():
    async with Toolbox([Vault()]).open(tools_kwargs={"vault": {"create_kwargs": {"secret": "s"}}}) as tools:
        outcome = await tools.call("vault", '{"do": "open"}')
    assert (outcome.text, outcome.ok, outcome.error, outcome.reward) == ("s", True, None, 0.25)


async def test_no_secret_of_an_episode_reaches_another():
    vault, inside, everybody = Vault(), 0, asyncio.Event()
    toolbox = Toolbox([vault])

    async def episode(number: int) -> list[str]:
        nonlocal inside
        async with toolbox.open(tools_kwargs={"vault": {"create_kwargs": {"secret": f"secret {number}"}}}) as tools:
            inside += 1
            if inside == 300:
                everybody.set()
            await everybody.wait()  # all 300 are open at once
            return [(await tools.call("vault", {"do": "open"})).text for _ in range(3)]

    seen = await asyncio.gather(*map(episode, range(300)))
    assert seen == [[f"secret {number}"] * 3 for number in range(300)]
    assert vault.open == {} and sorted(vault.released) == sorted(f"secret {number}" for number in range(300))


async def test_an_instance_is_created_once_and_only_when_it_is_needed():
    vault = Vault()
    toolbox = Toolbox([vault])
    async with toolbox.open() as tools:
        assert vault.open == {} and await tools.rewards() == {}
        await asyncio.gather(*(tools.call("vault", {"do": "open"}) for _ in range(5)))
        assert len(vault.open) == 1
    async with toolbox.open(tools_kwargs={"vault": {}}) as tools:
        assert len(vault.open) == 1, "named by the task: created at once"
        assert await tools.rewards() == {"vault": 1.0}


async def test_kwargs_reach_the_stage_that_they_are_for():
    vault = Vault()
    kwargs = {"execute_kwargs": {"a": 1}, "calc_reward_kwargs": {"reward": 0.5}, "create_kwargs": None}
    async with Toolbox([vault]).open(tools_kwargs={"vault": kwargs}, agent_data="turn 1") as tools:
        await tools.call("vault", {"do": "open"})
        assert await tools.rewards() == {"vault": 0.5}
    assert vault.log == [("open", {"a": 1, "agent_data": "turn 1"})]


async def test_a_reward_that_is_no_number_fails_the_episode():
    kwargs = {"vault": {"calc_reward_kwargs": {"reward": "nan"}}}
    async with Toolbox([Vault()]).open(tools_kwargs=kwargs) as tools:
        with pytest.raises(ToolError, match="calc_reward of tool vault must give a finite number: vault returned nan"):
            await tools.rewards()


async def test_a_cancelled_episode_releases_its_instances():
    vault = Vault()

    async def episode() -> None:
        async with Toolbox([vault]).open(tools_kwargs={"vault": {"create_kwargs": {"secret": "s"}}}) as tools:
            await tools.call("vault", {"do": "hang"})

    task = asyncio.create_task(episode())
    await vault.hung.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert vault.open == {} and vault.released == ["s"]


async def test_a_task_whose_create_fails_or_hangs_gives_a_reason_and_leaves_nothing_open():
    vault = Vault({"deadline_s": 0.05})
    toolbox = Toolbox([vault])
    for kwargs, reason in [({"fail": True}, "PermissionError: no vault left"), ({"hang": True}, "within 0.05 s")]:
        with pytest.raises(ToolError, match=f"create of vault .*{reason}; check its create_kwargs"):
            async with toolbox.open(tools_kwargs={"vault": {"create_kwargs": kwargs}}):
                pass
    assert vault.open == {} and vault.released == [""]


async def test_names_that_are_not_there_are_refused_with_the_nearest():
    toolbox = Toolbox([Vault()])
    with pytest.raises(ToolError, match="got 'valt'; did you mean 'vault'"):
        async with toolbox.open(["valt"]):
            pass
    with pytest.raises(
        ToolError, match="tools_kwargs must name tools of the episode, got 'vaults'; did you mean 'vault'"
    ):
        async with toolbox.open(tools_kwargs={"vaults": {}}):
            pass
    with pytest.raises(ToolError, match=r"must be create_kwargs, .*, got 'create_args'; did you mean 'create_kwargs'"):
        async with toolbox.open(tools_kwargs={"vault": {"create_args": {}}, "gone": None}):
            pass
    with pytest.raises(ToolError, match="deadline_s of tool vault must be seconds above 0, got '5s'"):
        Toolbox([Vault({"deadline_s": "5s"})])
    with pytest.raises(ToolError, match="truncate_side must be one of left, middle, right, got 'centre'"):
        Toolbox([], truncate_side="centre")
    with pytest.raises(ToolError, match="different names, got 'vault' twice"):
        Toolbox([Vault(), Vault()])


async def test_an_episode_may_have_some_of_the_tools():
    def other() -> str:
        """Something else."""
        return "other"

    async with Toolbox([Vault(), FunctionTool(other)]).open(["other"]) as tools:
        assert [tool["function"]["name"] for tool in tools.schemas] == ["other"]
        assert (await tools.call("vault", {"do": "open"})).error is ToolFault.UNKNOWN_TOOL


async def test_calls_of_an_episode_run_at_the_same_time():
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def meet() -> str:
        """Waits for the other call."""
        both.wait()
        return "met"

    async with Toolbox([FunctionTool(meet)]).open() as tools:
        outcomes = await asyncio.gather(tools.call("meet", {}), tools.call("meet", "{}"))
    assert [outcome.text for outcome in outcomes] == ["met", "met"]


async def test_a_long_answer_is_truncated_and_an_error_keeps_its_beginning():
    toolbox = Toolbox([Vault()], max_response_chars=10, truncate_side="right")
    async with toolbox.open() as tools:
        assert (await tools.call("vault", {"do": "much"})).text == "(truncated)..." + "b" * 10
        assert (await tools.call("vault", {"do": "raise"})).text == "Error: vau...(truncated)"


def test_truncation_keeps_the_side_that_it_is_named_for():
    assert truncate("abcdef", limit=6, side="left") == "abcdef"
    assert truncate("abcdef", limit=2, side="left") == "ab...(truncated)"
    assert truncate("abcdef", limit=2, side="right") == "(truncated)...ef"
    assert truncate("abcdef", limit=3, side="middle") == "ab...(truncated)...f"
    assert truncate("abcdef", limit=0, side="right") == "(truncated)..."


def test_a_schema_that_is_none_is_refused():
    with pytest.raises(ToolError, match=r"parameters of tool odd must be a JSON Schema .* at \$.properties.a.type"):
        Toolbox([FakeSchema({}, schema("odd", a={"type": "str"}))])
    with pytest.raises(ToolError, match="tool FakeSchema must have a schema, got none"):
        FakeSchema({})


class FakeSchema(BaseTool):
    """Nothing but a schema."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any):
        return ToolResponse()


class SchemaServer(BaseHTTPRequestHandler):
    """Serves a schema that everything fits."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        """Says nothing."""


@pytest.mark.seconds
async def test_a_schema_elsewhere_is_not_fetched():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SchemaServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tool = FakeSchema({}, schema("far", a={"$ref": f"http://127.0.0.1:{server.server_port}/schema.json"}))
    async with Toolbox([tool]).open() as tools:
        outcome = await tools.call("far", {"a": 1})
    server.shutdown()
    server.server_close()
    assert outcome.error is ToolFault.BAD_ARGUMENTS and "refers to what is not in it" in outcome.text


async def test_create_kwargs_arrive_as_either_of_verls_loops_gives_them():
    class Together(FakeSchema):
        async def create(self, instance_id: str | None = None, create_kwargs: Any = None):
            return f"together {create_kwargs}", ToolResponse()

    class OneByOne(FakeSchema):
        async def create(self, instance_id: str | None = None, a: int = 0):
            return f"one by one {a}"  # early tools of verl return no response

    class Both(FakeSchema):
        async def create(self, instance_id: str | None = None, **kwargs: Any):
            return f"both {kwargs}", ToolResponse()

    for kind, created in [
        (Together, "together {'a': 1}"),
        (OneByOne, "one by one 1"),
        (Both, "both {'a': 1, 'create_kwargs': {'a': 1}}"),
    ]:
        seen = []
        tool = kind({}, schema("tool"))
        tool.release = lambda instance_id, seen=seen: seen.append(instance_id)
        async with Toolbox([tool]).open(tools_kwargs={"tool": {"create_kwargs": {"a": 1}}}):
            pass
        assert seen == [created]


async def test_a_call_after_its_episode_opens_nothing():
    vault = Vault()
    async with Toolbox([vault]).open() as tools:
        pass
    outcome = await tools.call("vault", {"do": "open"})
    assert outcome.text == "Error: vault: the episode is over" and vault.open == {}
