"""Who may import whom, and which files own which heavy package. The architecture test holds the code to it, and
docs/architecture.md shows it (`scripts/made_pages.py`)."""

from __future__ import annotations

MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "buffers": set(),
    "env_adapters": {"buffers"},
    "agents": {"buffers", "env_adapters", "configs"},
    "mocked_server": {"buffers", "configs"},
    "learner": {"buffers", "configs"},
}
"""Folder -> the other folders of ours that it may import."""
PARTS_MEET = {
    "learner/run.py",
    "learner/cli.py",
    "learner/pipeline.py",
    "learner/players.py",
    "learner/engines.py",
    "learner/page/serve.py",
}
"""May import every folder of MAY_IMPORT."""
STANDS_ALONE = "agents/examples/"
"""Programs as a user writes them: they import nothing of ours."""

OWNERS = {
    "vllm": {"mocked_server/vllm/*.py", "mocked_server/check/vllm_*.py", "agents/loops/vllm_*.py"},
    "fastapi": {"mocked_server/http/routes.py"},
    "prometheus_client": {"mocked_server/http/routes.py"},
    "uvicorn": {"mocked_server/http/uvicorn_server.py"},
    "pyarrow": {
        "buffers/row_files.py",
        "buffers/tasks/parquet.py",
        "buffers/tasks/datasets.py",
        "buffers/ledger/export.py",
    },
    "sqlite3": {"buffers/ledger/*.py", "buffers/tasks/logs.py"},
    "torch.distributed": {"learner/model/fsdp.py", "learner/checkpoints/training_state.py"},
    "ray": {
        "learner/placement/run_nodes.py",
        "learner/startup/ray_cluster.py",
        "buffers/remote/ray_actor.py",
        "buffers/remote/ledger_actor.py",
    },
    "zmq": {"buffers/wire/*.py"},
    "peft": {"learner/model/lora.py"},
    "matplotlib": {"learner/reporting/display.py"},
    "tensorboard": {"learner/reporting/tracker.py"},
    "wandb": {"learner/reporting/tracker.py"},
    "mlflow": {"learner/reporting/tracker.py"},
    "swanlab": {"learner/reporting/tracker.py"},
    "openai": {"agents/examples/*.py"},
    "mcp": {"agents/tools/mcp/*.py"},
    "textarena": {"buffers/tasks/textarena_games.py"},
    "gymnasium": {"env_adapters/gymnasium_env.py"},
    "verifiers": {"env_adapters/verifiers_*.py"},
    "websockets": {"env_adapters/openenv.py"},
    "harbor": {"agents/harbor/provider/*.py"},
    "inspect_ai": {"agents/examples/*.py"},
    "lm_eval": {"agents/examples/*.py"},
}
"""Heavy package -> the files that may import it, as patterns; everything else runs without it."""
