"""A refused report names the server's own words, which is what the environment's log then shows."""

from __future__ import annotations

import httpx2
import pytest

from env_adapters.walk.server import ScoreClient


async def test_a_report_that_is_refused_says_why() -> None:
    client = ScoreClient("http://127.0.0.1:1", scorer_key="key")
    refused = httpx2.MockTransport(lambda _: httpx2.Response(422, text="role of a score must be one of this run's"))
    client._http = httpx2.AsyncClient(transport=refused, base_url="http://127.0.0.1:1")
    with pytest.raises(httpx2.HTTPStatusError, match=r"POST /scores was refused \(422\): role of a score must be one"):
        await client.report("1-0-0", score=1.0, role="nobody")
    await client.close()
