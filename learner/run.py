"""`python -m learner.run`: the command line. Parses arguments, loads the configuration, hands over to the pipeline.

Heavy imports come after argument parsing, so `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from configs.process_fork import leave

PROGRAM = "python -m learner.run"
EPILOG = """\
examples:
  python -m learner.run                                       the demo: learns in about three minutes on two CPU cores
  python -m learner.run learner.lr=1e-4 run.name=slow         any key of the configuration, as section.key=value
  python -m learner.run --config my.yaml                      another file; keys: configs/schema.py
  python -m learner.run --resume auto                         goes on after Ctrl-C, a crash or kill -9
results: runs/<run.name>/ holds summary.json, reward.png, metrics.jsonl, tensorboard/, ledger.sqlite, checkpoints/, and
checkpoint/ (the newest weights as a Hugging Face folder)
"""


def main(argv: list[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run once. Exit codes: 0 done, 1 the run failed, 2 unusable configuration, 130 stopped by Ctrl-C. `program`: what the user
    calls it by."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Train the model behind an agent: engine, server, agents and learner in one command.",
        epilog=EPILOG.replace(PROGRAM, program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, default=None, help="YAML file, or the name of a shipped one (default: demo)"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="configuration overrides")
    parser.add_argument(
        "--resume", default="", metavar="auto|FOLDER",
        help="go on with run.name from its newest checkpoint (auto; a new run if there is none) or from that one",
    )  # fmt: skip
    parser.add_argument(
        "--keep-running", action="store_true",
        help="when the run's own process dies (kill -9, out of memory): start it again from its newest checkpoint",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.keep_running and sys.platform != "linux":
        parser.error(
            f"--keep-running needs Linux, got {sys.platform}; leave it out, and use --resume auto after a crash"
        )

    from configs.load import DEFAULT, ConfigError, load_config, shipped

    try:
        config = load_config(shipped(arguments.config or DEFAULT), arguments.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2

    from learner.training import forked_ranks
    from mocked_server.vllm.engine import has_gpu

    # The order of the start, and why:
    # 1. Fork the ranks' warm process: it must not hold Ray, which reads a worker's environment while it is imported.
    # 2. Import Ray: its services decide then whether they listen on loopback only.
    # 3. With --keep-running import vLLM, then fork the run: a run that is started again has its imports already.
    # 4. Fork the engines' server (`prepare`), in the run's own process and before it has threads: a fork would lose them.
    if not has_gpu():
        forked_ranks.start()
    import_ray(local=not config.buffer.node)

    from learner.session import run_session
    from mocked_server.vllm.engine import import_engine, start_fork_server

    if not arguments.keep_running:
        return run_session(config, resume=arguments.resume, prepare=start_fork_server, program=program)

    from learner.recovery.supervisor import keep_running

    import_engine()
    lines = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    return keep_running(
        lambda resume: run_session(config, resume=resume, prepare=start_fork_server, program=program),
        resume=arguments.resume,
        lines=lines,
    )


def import_ray(*, local: bool) -> None:
    """Ray; of a `local` one, all that listens does so on loopback only. Ray decides that by this variable when it is imported, and
    does it by itself on Windows and macOS."""
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    set_here = local and name not in os.environ
    if set_here:
        os.environ[name] = "0"
    import learner.startup.ray_cluster  # noqa: F401

    if set_here:
        del os.environ[name]  # agents may have a Ray of their own


if __name__ == "__main__":
    leave(main())
