"""`python -m learner.run`: the command line. Parses arguments, checks the configuration and what it names, hands over to the
pipeline.

Heavy imports come last: `--help` answers at once, and a missing file is reported in about a second, with nothing written.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from buffers.terminal import guard_output
from configs.child_processes import leave, own_temporary_folder
from learner.recovery.at_once import signals_end_at_once

if TYPE_CHECKING:
    from configs.schema import Config, ModelConfig
    from learner.placement.memory import ModelShape

PROGRAM = "python -m learner.run"
EPILOG = """\
examples:
  python -m learner.run                                       the demo: learns in about three minutes on two CPU cores
  python -m learner.run learner.lr=1e-4 run.name=slow         any key of the configuration, as section.key=value
  python -m learner.run --config my.yaml                      another file; keys: configs/schema.py
  python -m learner.run --resume auto                         resumes after Ctrl-C, a crash or kill -9
results: runs/<run.name>/ holds summary.json, reward.png, metrics.jsonl, tensorboard/, ledger.sqlite, checkpoints/, and
last/ and best/ (weights as Hugging Face folders)
"""


def main(argv: list[str] | None = None, *, program: str = PROGRAM) -> int:
    """Run once. Exit codes: 0 done, 1 the run failed, 2 unusable configuration, 130 stopped by Ctrl-C. `program`: what the user
    calls it by."""
    guard_output()
    faulthandler.register(
        signal.SIGUSR1, file=2
    )  # each thread's stack, into the run's log; so do all processes of ours
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
        help="resume run.name from its newest checkpoint (auto; a new run if there is none) or from that one",
    )  # fmt: skip
    parser.add_argument(
        "--keep-running", action="store_true",
        help="when the run's own process dies (kill -9, out of memory): start it again from its newest checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="start nothing: print where ranks and engines go and what memory they take; needs no weights, only config.json",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", default="", metavar="[NODES x]CARDSxGIB",
        help="with --dry-run: as if these were there, such as 8x80 or 2x8x80 (default: the cards of this machine)",
    )  # fmt: skip
    parser.add_argument(
        "--debug", action="store_true",
        help="stop in Python's debugger where code of yours fails, or at its breakpoint(); sets run.debug",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    arguments.overrides += ["run.debug=true"] if arguments.debug else []
    if arguments.gpus and not arguments.dry_run:
        parser.error(f"--gpus describes cards for --dry-run, got --gpus {arguments.gpus} without it; add --dry-run")
    if arguments.keep_running and sys.platform != "linux":
        parser.error(
            f"--keep-running needs Linux, got {sys.platform}; leave it out, and use --resume auto after a crash"
        )

    with own_temporary_folder(), signals_end_at_once(lambda: "stopped; run the same command again"):
        return refused_in_words(lambda: _run(arguments, program=program))


def refused_in_words(work: Callable[[], int]) -> int:
    """The exit code of `work`; 2, with a line, where it refuses what it was given."""
    from buffers.errors import UnderstudyError
    from configs.load import ConfigError

    try:
        return work()
    except ConfigError as error:
        print(error, file=sys.stderr)
    except UnderstudyError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def _run(arguments: argparse.Namespace, *, program: str) -> int:
    from configs.load import DEFAULT, load_config

    config = load_config(arguments.config or DEFAULT, arguments.overrides)
    if arguments.dry_run:
        dry_run(config, gpus=arguments.gpus)
        return 0
    config = checked_config(config, resume=arguments.resume)

    from configs.fork_server import imports_kept

    # With --keep-running vLLM is imported before the run is forked: one that is started again has its imports already. The fork
    # server (`prepare_engine`) is the run's own, and starts before that has threads: a fork would lose them.
    with imports_kept():
        from learner.session import run_session

    begin = partial(run_session, config, prepare=partial(prepare_engine, config), program=program)
    if not arguments.keep_running:
        return begin(resume=arguments.resume)

    from learner.recovery.supervisor import keep_running
    from mocked_server.vllm.engine import import_engine

    import_engine()
    lines = Path(config.run.dir) / config.run.name / "metrics.jsonl"
    return keep_running(lambda resume: begin(resume=resume), resume=arguments.resume, lines=lines)


def checked_config(config: Config, *, resume: str, learns: bool = True) -> Config:
    """`local_config`, of a configuration that can be used. `learns` false: an evaluation. Raises UnderstudyError."""
    from learner.startup.input_check import in_fork

    # Read when torch is imported. A thread that waits for others spins for some 20 us, as long as most gaps between products are,
    # and then sleeps. By default it spins for milliseconds, and takes its core from those that it waits for.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    in_fork(lambda: check_inputs(config, resume=resume, learns=learns))
    print("understudy: reading the model, loading torch and vLLM, which takes 5 to 30 s ...", flush=True)
    local = local_config(config)
    in_fork(lambda: check_models(local, resume=resume))
    return local


def dry_run(config: Config, *, gpus: str) -> None:
    """Print where everything goes and what memory it takes. Raises UnderstudyError where it does not fit."""
    from learner.placement.plan import described, make_plan, of_this_machine, report

    nodes = described(gpus) if gpus else [of_this_machine()]
    shape = shape_of(config.model)
    print(report(make_plan(config, shape=shape, nodes=nodes), config=config, shape=shape))


def shape_of(model: ModelConfig) -> ModelShape:
    """The sizes of the model at `model.path`; `tiny` is made for it, and removed; of a model of the hub, config.json is enough.
    Raises UnderstudyError."""
    from tempfile import TemporaryDirectory

    from learner.placement.memory import read_shape
    from learner.startup.hub import CODE, SHAPE_FILES, is_hub_model, model_folder

    path, trust = model.path, model.trust_remote_code
    if is_hub_model(path):
        return read_shape(
            model_folder(path, only=(*SHAPE_FILES, CODE) if trust else SHAPE_FILES), trust_remote_code=trust
        )

    if path != "tiny":
        return read_shape(Path(path), trust_remote_code=trust)
    from configs.tiny_model import make_tiny_model

    with TemporaryDirectory(prefix="understudy-shape-") as folder:
        return read_shape(make_tiny_model(Path(folder) / "tiny"))


def local_config(config: Config) -> Config:
    """The configuration with models and tasks as files of this machine; what is missing is downloaded or made. With what the
    model needs on this machine, and the defaults that follow from it, which lines tell. Raises UnderstudyError."""
    import psutil

    from agents.harbor.tasks import with_task_files
    from learner.placement.memory import ModelShape
    from learner.startup.hub import with_local_files
    from learner.startup.input_check import check_model, in_fork
    from learner.startup.model_defaults import with_model_defaults

    config = with_model_needs(with_local_files(with_task_files(config)))
    if config.model.path == "tiny":
        return config
    from mocked_server.vllm.engine_arguments import has_gpu

    check_model(config.model.path)
    return with_model_defaults(
        config,
        shape=ModelShape(**in_fork(lambda: asdict(shape_of(config.model)))),
        has_gpu=has_gpu(),
        memory_bytes=psutil.virtual_memory().total,
        cores=len(os.sched_getaffinity(0)),
        say=lambda line: print(f"understudy: {line}", flush=True),
    )


def with_model_needs(config: Config) -> Config:
    """The configuration with what vLLM needs for this model on this machine, where the user has not set it. Raises UnderstudyError
    for what it has no kernels for: a number format, adapters beside experts."""
    from buffers.errors import UnderstudyError
    from configs.model_folder import LATENT, half_precision_kind, has_experts, has_mamba2

    folder, model, learner = Path(config.model.path), config.model, config.learner
    kind, mixes = half_precision_kind(folder), has_experts(folder)
    if not (kind or mixes or has_mamba2(folder)) or config.rollout.engine != "vllm":
        return config
    from mocked_server.vllm.engine_arguments import has_gpu, loses_prefix_cache

    if learner.lora.rank > 0 and mixes and not has_gpu():
        raise UnderstudyError(
            f"learner.lora.rank must be 0 for {folder} without a GPU, where vLLM has no kernels for adapters in a mixture of "
            f"experts, got {learner.lora.rank}; leave it out, or train on a GPU"
        )
    if loses_prefix_cache(folder, config.rollout.engine_args):
        print("understudy: enable_prefix_caching=false, as vLLM's kernels of Mamba-2 fail with it on a CPU")
    given = {name.replace("-", "_"): value for name, value in config.rollout.engine_args.items()}
    has_kernels = (has_gpu() and kind != LATENT) or given.get("model_impl") == "transformers"
    if kind and model.dtype == "float32" and not has_kernels:
        where = "a GPU" if has_gpu() else "a CPU"
        if "dtype" in model.model_fields_set:
            raise UnderstudyError(
                f"model.dtype must be bfloat16 for {folder} on {where}, where vLLM has kernels for {kind} in half "
                f"precision only, got float32; leave it out, or set model.dtype=bfloat16"
            )
        print(f"understudy: model.dtype=bfloat16, as vLLM has kernels for {kind} in half precision only on {where}")
        model = model.model_copy(update={"dtype": "bfloat16"})
    if mixes and model.dtype == "bfloat16" and not has_gpu() and "router_replay" not in learner.model_fields_set:
        told = "as in bfloat16 routers near a tie choose other experts; with it enable_prefix_caching=false"
        print(f"understudy: learner.router_replay=true, {told}")
        learner = learner.model_copy(update={"router_replay": True})
    return config.model_copy(update={"model": model, "learner": learner})


def check_inputs(config: Config, *, resume: str, learns: bool = True) -> None:
    """Raises UnderstudyError for what the configuration names and is not there, or cannot be used. Meant for `in_fork`: it imports
    the module of a scorer. `learns` false: an evaluation, which has no learner."""
    from agents.external import check_named
    from agents.harbor.start_check import check_harbor
    from agents.workers.config import read_loops
    from buffers.errors import UnderstudyError
    from buffers.private_text import read_patterns
    from configs.model_folder import sees
    from env_adapters.child_process import resolve_command
    from learner.placement.plan import in_cluster, make_plan, of_this_machine, own_node
    from learner.reporting.tracker import check_trackers
    from learner.startup.input_check import check_files, check_script
    from learner.startup.run_folder import check_place, find_resume
    from mocked_server.http.request_fields import TABLES, check_parser
    from mocked_server.http.uvicorn_server import bind
    from mocked_server.keys import SECRET_FILE, check_host
    from mocked_server.next_turn import read_prompt

    folder = Path(config.run.dir) / config.run.name
    again, checkpoint = find_resume(folder, resume=resume, has_ledger=config.has_ledger)
    check_place(folder, resumes=again)
    check_trackers(config.run.trackers)
    for key, name in zip(TABLES, (config.server.tool_parser, config.server.reasoning_parser), strict=True):
        check_parser(key, name)
    check_host(config.server.host, secret=folder.parent / SECRET_FILE)
    bind(config.server.host, config.server.port).close()
    check_harbor(config)
    check_files(config, resumes=checkpoint is not None)
    commands = {
        "agents.command": config.agents.command,
        "env.command": config.env.command,
        "data.make": config.data.make,
    }
    for key, command in commands.items():
        if command:
            try:
                resolve_command(command)
            except FileNotFoundError as error:
                raise UnderstudyError(f"{key} cannot be started: {error}") from None
            check_script(key, command)
    if config.agents.command:
        check_named(config.agents.environment)
    if config.agents.loops:
        read_loops(Path(config.agents.loops))
    if not in_cluster(config.buffer.node) and (config.rollout.tensor_parallel > 1 or of_this_machine().cards):
        from mocked_server.vllm.engine_arguments import has_gpu

        node = own_node(has_gpu=has_gpu())
        make_plan(config, shape=shape_of(config.model), nodes=[node], learns=learns)
    if config.rollout.engine_args or (sees(Path(config.model.path)) and find_spec("torchvision") is None):
        from learner.pipeline import engine_settings
        from mocked_server.vllm.engine_arguments import check_engine_args

        check_engine_args(engine_settings(config, model=Path(config.model.path), beside_rank=True))
    if config.rollout.engine != "vllm":
        from mocked_server.servers.choose import check_engine

        check_engine(config, vocabulary=shape_of(config.model).vocabulary, learns=learns)
    check_other_models(config)
    check_scorers(config)
    check_variables(config)
    if config.serve.judge.model:
        read_prompt(config.serve.judge.prompt)
    if config.serve.private_patterns:
        read_patterns(config.serve.private_patterns)


def check_models(config: Config, *, resume: str) -> None:
    """Raises UnderstudyError for a policy's model, now a local one, that cannot be used, or is not that of what is resumed."""
    from learner.startup.input_check import check_policy
    from learner.startup.run_folder import check_resumed, find_resume

    check_policy(config)
    folder = Path(config.run.dir) / config.run.name
    _, checkpoint = find_resume(folder, resume=resume, has_ledger=config.has_ledger)
    if checkpoint is not None:
        check_resumed(config, checkpoint)


def check_scorers(config: Config) -> None:
    """Raises UnderstudyError for a scorer that is not there. It imports the scorer's module."""
    from env_adapters.scoring import judge, reward_model, rewards
    from learner.startup.input_check import check_model_folder
    from learner.startup.template_check import check_template

    for scorer in filter(None, [*config.data.scorers, config.data.judge.truth]):
        if scorer == judge.NAME:
            judge.read_rubric(config.data.judge.rubric, mode=config.data.judge.mode)
        elif scorer.startswith(reward_model.PREFIX):
            check_template(
                check_model_folder("data.scorer", scorer.removeprefix(reward_model.PREFIX)), key="data.scorer"
            )
        else:
            rewards.resolve(scorer, batch=False)


def check_variables(config: Config) -> None:
    """Raises UnderstudyError for a key that is to be in a variable which is not set."""
    from buffers.errors import UnderstudyError

    named = {f"roles.{name}": role.key_variable for name, role in config.roles.items()}
    named["serve.upstream"] = config.serve.upstream.key_variable
    named["serve.judge"] = config.serve.judge.key_variable if config.serve.judge.model else ""
    for section, variable in named.items():
        if variable and variable not in os.environ:
            raise UnderstudyError(
                f"{section}.key_variable must name a variable that is set, got {variable}; set it where you start the run"
            )


def check_other_models(config: Config) -> None:
    """Raises UnderstudyError for a teacher or a model of a role that is not there, or does not have the policy's tokenizer."""
    from buffers.errors import UnderstudyError
    from learner.placement.plan import of_this_machine

    frozen = next((name for name, role in config.roles.items() if role.frozen not in (None, 0)), "")
    if frozen and of_this_machine().cards:
        raise UnderstudyError(
            f"roles.{frozen}.frozen has an engine on machines without a GPU only, got {len(of_this_machine().cards)} cards; serve "
            f"that model by a server of its own, and set roles.{frozen}.url"
        )
    named = {"learner.teacher.path": config.learner.teacher.path}
    named |= {
        f"roles.{name}.frozen": role.frozen for name, role in config.roles.items() if isinstance(role.frozen, str)
    }
    for key, path in named.items():
        if not path:
            continue
        from tempfile import TemporaryDirectory

        from configs.model_folder import quantization
        from configs.tiny_model import make_tiny_model
        from learner.model.weight_files import check_folders
        from learner.startup.input_check import check_model_folder
        from learner.startup.template_check import check_template

        folder = check_model_folder(key, path)
        if key.endswith(".frozen"):
            check_template(folder, key=key)
        if key == "learner.teacher.path" and quantization(folder):
            raise UnderstudyError(
                f"{key} must name a model of plain weights, got {folder} with quantized ones; use the model as it was before"
            )
        with TemporaryDirectory(prefix="understudy-tokenizer-") as scratch:
            policy = make_tiny_model(Path(scratch) / "tiny") if config.model.path == "tiny" else Path(config.model.path)
            check_folders(policy, folder, key=key, trust_remote_code=config.model.trust_remote_code)


def prepare_engine(config: Config) -> None:
    """Start the process that engines, ranks and workers are forked of; before this process has other threads."""
    if config.rollout.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.rollout.threads)
    from mocked_server.vllm.engine import start_fork_server

    start_fork_server()


if __name__ == "__main__":
    leave(main())
