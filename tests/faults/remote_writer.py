"""As `ledger_program`, on a ledger in a Ray actor: it is the actor that is killed, and this process goes on.

python tests/faults/remote_writer.py CLUSTER NODE LEDGER SEED
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import ray

from buffers.remote.ledger_actor import find_actor
from buffers.remote.remote_ledger import RemoteLedger
from tests.faults.ledger_program import produce, tell, train
from tests.support.processes.child_process import end_with_thread
from tests.support.remote.remote_parts import SECRET


def main() -> None:
    threading.excepthook = end_with_thread
    cluster, node_id, path, seed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    ray.init(address=cluster, log_to_driver=False, configure_logging=False)
    ledger = RemoteLedger(find_actor(path, node_id=node_id), path=path, secret=SECRET)
    tell(open=ray.get_runtime_context().get_node_id())
    for lane in range(3):
        threading.Thread(target=produce, args=(ledger,), kwargs={"lane": lane, "seed": seed}, daemon=True).start()
    train(ledger, seed=seed)


if __name__ == "__main__":
    main()
