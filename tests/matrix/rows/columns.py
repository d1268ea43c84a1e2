"""Rows of the columns of task files: who sees them, and what they change."""

from __future__ import annotations

import json
from typing import Any

from tests.matrix.effects import Effect, counted, expect
from tests.matrix.inventory import columns
from tests.matrix.records import Ended, Row
from tests.matrix.rows.agents import notes
from tests.matrix.scenarios.program_runs import SECRET


def rows() -> list[Row]:
    """One for each column, and for what agents see of it."""
    hidden = [name for name in columns() if name.removeprefix("extra_info.") in SECRET]
    own = [
        Row("column prompt", "", "prompts", _in_traces("Say ")),
        Row("column task_id", "", "prompts", counted("SELECT count(*) FROM task WHERE task_id NOT LIKE 'tasks-%'", 0)),
        Row("column data_source", "", "mix", _scored_by_source),
        Row("column agent_name", "", "loops", _played_by_name),
        Row("column reward_model.ground_truth", "hidden from agents", "program", _hidden("secret-0")),
        Row("column reward_model.ground_truth", "seen by scorers", "mix", _contains_the_truth),
        Row("column extra_info.start", "", "small-cache", _in_environment),
        Row("column extra_info.index", "", "program", _seen("index", 7)),
        Row("column extra_info.hint", "", "hints", _learned_from_the_hint),
        Row("column extra_info.hint", "hidden from agents", "program", _hidden("h-1")),
        Row("column extra_info.tools_kwargs", "", "loops", _scored_by_the_tool),
        Row("column extra_info.need_tools_kwargs", "", "tests/agents/loops/test_tool_agent.py::test_a_row_says_whether_its_tools_need_arguments"),
        Row("column extra_info.tool_selection", "", "loops", _only_that_tool),
        Row("column extra_info.interaction_kwargs", "", "loops", _loop_gets_it),
        Row("column extra_info.mine", "", "program", _seen("mine", "m-1")),
    ]  # fmt: skip
    shown = {row.what for row in own}
    own += [
        Row(f"column {name}", "", "program", _hidden(_secret(name))) for name in hidden if f"column {name}" not in shown
    ]
    return own


def _secret(name: str) -> str:
    text = json.dumps(SECRET[name.removeprefix("extra_info.")])
    return text[text.index("secret-") :][:8]


def _hidden(word: str) -> Effect:
    """In nothing that a program got: task, variables, answers. Scorers have it."""

    def effect(ended: Ended) -> str:
        given = json.dumps(notes(ended))
        stored = ended.sql(f"SELECT count(*) FROM task WHERE payload LIKE '%{word}%'")[0]
        return expect(
            word not in given and stored > 0,
            f"{word} is in {stored} stored tasks, {given.count(word)} times in what programs got",
        )

    return effect


def _seen(name: str, value: Any) -> Effect:
    def effect(ended: Ended) -> str:
        found = {one["task"]["extra_info"].get(name) for one in notes(ended)}
        return expect(found == {value}, f"programs found {name}={found}")

    return effect


def _in_traces(words: str) -> Effect:
    def effect(ended: Ended) -> str:
        turns = [row["turns"][0]["text"] for line in _traces(ended) for row in line["rows"]]
        return expect(turns and all(words in turn for turn in turns), f"{len(turns)} prompts, such as {turns[0]!r}")

    return effect


def _traces(ended: Ended) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ended.folder / "traces.jsonl").read_text().splitlines()]


def _scored_by_source(ended: Ended) -> str:
    def scores(name: str) -> set[float]:
        query = f"SELECT DISTINCT score FROM episode JOIN grp USING (group_id) WHERE score IS NOT NULL AND task_id LIKE '{name}::%'"
        return set(ended.sql(query))

    names = [line for line in ended.lines if "val/mean/letters" in line and "val/mean/truth" in line]
    return expect(names and scores("many") and scores("few"), f"val/mean of both sources in {len(names)} lines")


def _played_by_name(ended: Ended) -> str:
    noted = {one["row"]["agent_name"] for one in notes(ended)}
    tools = ended.sql(
        "SELECT DISTINCT score FROM episode JOIN grp USING (group_id) WHERE task_id LIKE 'tool_agent-%' AND score IS NOT NULL"
    )
    return expect(noted == {"noting"} and tools == [7.0], f"{noted} noted its rows, tool_agent scored {tools}")


def _scored_by_the_tool(ended: Ended) -> str:
    tools = ended.sql(
        "SELECT DISTINCT score FROM episode JOIN grp USING (group_id) WHERE task_id LIKE 'tool_agent-%' AND score IS NOT NULL"
    )
    return expect(
        tools == [7.0], f"tool_agent's episodes scored {tools}: the number in the secret that the row gave to the tool"
    )


def _only_that_tool(ended: Ended) -> str:
    texts = [row["turns"][0]["text"] for line in _traces(ended) for row in line["rows"]]
    offered = [text for text in texts if "Says its secret." in text]
    return expect(
        offered and not any("Add two numbers." in text for text in offered),
        f"{len(offered)} prompts offer the tool chosen only",
    )


def _loop_gets_it(ended: Ended) -> str:
    found = {json.dumps(one["row"]["extra_info"].get("interaction_kwargs")) for one in notes(ended)}
    return expect(found == {'{"name": "n-1"}'}, f"the loop got {found}")


def _contains_the_truth(ended: Ended) -> str:
    query = "SELECT DISTINCT score FROM episode JOIN grp USING (group_id) WHERE score IS NOT NULL AND (task_id LIKE 'few%' OR task_id LIKE 'w%')"
    scores = set(ended.sql(query))
    return expect(
        1.0 in scores <= {0.0, 1.0}, f"answers to tasks whose truth is `a` scored {sorted(scores)} by `contains`"
    )


def _in_environment(ended: Ended) -> str:
    starts = ended.sql("SELECT count(DISTINCT json_extract(payload, '$.extra_info.start')) FROM task")[0]
    return expect(starts > 1 and ended.metric("agent_loop/num_turns/mean"), f"{starts} different starts were played")


def _learned_from_the_hint(ended: Ended) -> str:
    from tests.matrix import replay

    hinted = [row.hint for batch in replay.batches(ended) for row in batch.rows]
    expect(any(hinted), f"{sum(map(bool, hinted))} of {len(hinted)} rows have the hint")
    norms = ended.metric("policy/grad_norm")
    return expect(max(norms) > 0, f"{sum(map(bool, hinted))} of {len(hinted)} rows have the hint; grad_norm {norms}")
