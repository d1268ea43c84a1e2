"""What Python's fork server of the tests imports: the programs of an engine and of a server process, which are forked of it."""

from importlib import import_module

from configs.fork_server import imports_kept
from mocked_server.vllm.engine import import_engine

import_engine()
with imports_kept():
    import_module("mocked_server.processes.server_process")
    import_module("learner.training.trainer")
