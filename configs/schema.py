"""Every knob of a run, with its default, unit and rule. Nothing else in the project holds a default.

`configs.load.load_config` reads a YAML file and dotted overrides into `Config`; parts receive their section, never the whole.
`configs.keys` prints the keys for people: the docstring of each is its meaning. A key holds one thing; related ones form a section.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from configs.recipes import RECIPES, filled, own_aggregation
from configs.rules import check_engine_keys, check_engine_name, check_names, refuse_unused

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Seconds = Positive
Text = Annotated[str, Field(min_length=1)]

MAX_NAME_BYTES = 200
"""The longest name of a run: file systems take 255, and a run that is moved aside gets a date behind it."""
SHARE_BESIDE_A_RANK = 0.4
SHARE_ALONE = 0.9
CPU_KV_CACHE_GB = 0.25
HARBOR_OWNED = frozenset(
    {"task", "trial_name", "trials_dir", "agent", "environment", "install_only", "source_trial", "user_agent"}
)
"""Names of Harbor's trial configuration that a run sets, or that would take the score away."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, numbers are finite, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class CheckpointsConfig(Section):
    every: Count = 20
    """Steps between two checkpoints. 0: one at the end of the run only."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints stay on disk. The best one stays too."""


def _check_run_name(name: str) -> str:
    if (
        not name.isprintable()
        or "/" in name
        or name[:1] in ".-"
        or name != name.strip()
        or len(name.encode()) > MAX_NAME_BYTES
    ):
        raise ValueError(
            f"must be the name of a folder in run.dir, of at most {MAX_NAME_BYTES} bytes, without slashes, and without a dot, a "
            f"dash or a space before it"
        )
    return name


class RunConfig(Section):
    name: Annotated[Text, AfterValidator(_check_run_name)] = "demo"
    """Results go to `<dir>/<name>`; an earlier run of that name is moved aside, never overwritten. A folder that is no run is
    refused, and so is the name of a run that lives."""
    dir: Text = "runs"
    """Folder of all runs."""
    steps: PositiveInt = 60
    """Optimizer steps, one full batch each. With `learner.stage: sft` `sft.epochs` or `sft.steps` say how many."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of everything that draws: the order of tasks, sampling, weights that are made here."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    trackers: list[Literal["tensorboard", "wandb", "mlflow", "swanlab"]] = ["tensorboard"]
    """Destinations of figures, beside metrics.jsonl. All but tensorboard must be installed first."""
    trusted_network: bool = False
    """Nobody else is on the network between the run's machines: what crosses it is signed, and not encrypted. The
    learner's ranks on other nodes need it. Nothing crosses a network without `buffer.node` and RAY_ADDRESS."""
    debug: bool = False
    """The learner's rank and the agent loops run in the run's own process, on its event loop, and what they, scorers, tools and
    environments raise stops in Python's debugger, as `breakpoint()` does anywhere. `understudy run --debug` sets it."""
    reward_optimum: float | None = None
    """The best mean score that the task allows; drawn in the reward curve and reported in the summary."""


class ModelConfig(Section):
    path: Text = "tiny"
    """A Hugging Face folder; or a model of the Hugging Face hub by name (Qwen/Qwen3-0.6B), which is downloaded once, to the hub's
    cache (HF_HOME, HF_HUB_OFFLINE and HF_TOKEN are the hub's own); or `tiny`: a small Qwen3 made on this machine, with random
    weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the engine's weights and of the learner's forward and backward passes. Where it is not set, it is bfloat16
    on a CPU for models of whose layers vLLM has kernels in half precision only there (gated delta nets, latent attention)."""
    trust_remote_code: bool = False
    """Run the code that a model's folder brings along (`auto_map` in its config.json), on both sides. A model that needs it is
    refused otherwise. Such code has all rights of yours: read it first."""


class ValidationConfig(Section):
    tasks: str = ""
    """Parquet file of validation tasks, which are never trained on. They are played at step 0, every `every` steps and at the end.
    Empty: no validation."""
    every: PositiveInt = 20
    """Steps between two validations."""
    samples: PositiveInt = 1
    """Episodes of each validation task. 1: greedy. More: at the rollout's temperature, and the best of them is reported too
    (pass@k)."""


class JudgeConfig(Section):
    mode: Literal["absolute", "ranking"] = "absolute"
    """absolute: each answer gets a number. ranking: the answers of a group are shown together, in two orders, and their places are
    their scores, 0 to 1."""
    rubric: str = ""
    """File with what the judge is asked: {task}, and {answer} or (ranking) {answers}, stand for what it judges, and it has to end
    with a line of JSON. Empty: the one that is shipped, env_adapters/scoring/judge_absolute.txt or judge_ranking.txt."""
    truth: str = ""
    """A scorer that knows better, with which the judge is compared (`judge/agreement_truth`); with ranking it scores validation
    tasks. Empty: none."""
    max_tokens: PositiveInt = 512
    """Most tokens of what the judge says."""
    timeout_s: Seconds = 60.0
    """Longest time for an answer of the judge. After it the episodes that it was asked about fail, and are retried."""


class DataConfig(Section):
    tasks: str | dict[str, Positive] = ""
    """Parquet file of tasks (columns as in verl: prompt, data_source, reward_model, extra_info, agent_name); or a data set, of the
    Hugging Face hub (hf://openai/gsm8k/main/train: owner, name, config, split) or a split that `datasets` saved to this disk; or
    several, as {file: weight}: each is shuffled and repeated on its own, and gives its share of the tasks. With `env.harbor.agent`
    folders of Harbor tasks instead."""
    columns: dict[Literal["task_id", "prompt", "ground_truth", "data_source", "agent_name", "extra_info"], str] = Field(
        default_factory=dict
    )
    """The columns of data sets: {prompt: question, ground_truth: answer}. One that is not named has our name, or is left out. A
    data set is written once as a task file, in `<run.dir>/.tasks`. No effect on parquet files, which have our names."""
    validation: ValidationConfig = ValidationConfig()
    sampler: Literal["uniform", "thompson", "pass_rate"] = "uniform"
    """uniform: each row of a file once an epoch, in an order of its own. thompson, pass_rate: by what a task's own groups scored (0
    to 1, the share that passed), those near 1/2 first: see buffers/tasks/curriculum.py. With `reward_manager: dapo` a group whose
    scores are equal nevertheless is replaced."""
    make: list[str] = Field(default_factory=list)
    """Command that writes the task files, validation tasks and `sft.demonstrations` when one of them is missing.
    `{python}` is this interpreter."""
    scorer: str | dict[str, str] = ""
    """The scorer of plain prompts (rows with `agent_name: single_turn_agent`, or with none where no agent is set), and programs
    (`agents.processes: 0`) that ended without a score: a name in env_adapters/scoring/scorers.py, `module.function`, a URL,
    `model:FOLDER` (a reward model), or `judge`: a language model, which is the role `judge` of `roles`; or one of these for each
    data_source, `default` for the others."""
    judge: JudgeConfig = JudgeConfig()
    reward_manager: Literal["naive", "batch", "dapo"] = "naive"
    """naive: a scorer judges one answer. batch: `module.function` takes lists of tasks and answers. dapo: as naive; groups with
    equal scores are dropped, and generations in the last fifth of `rollout.max_tokens` are penalised."""

    @property
    def scorers(self) -> tuple[str, ...]:
        """All that are named, the default first."""
        if isinstance(self.scorer, str):
            return (self.scorer,)
        return (self.scorer.get("default", ""), *self.scorer.values())

    @property
    def task_files(self) -> dict[str, float]:
        """File -> weight; none when tasks are only added while the run lives."""
        if isinstance(self.tasks, str):
            return {self.tasks: 1.0} if self.tasks else {}
        return dict(self.tasks)


class AgentsConfig(Section):
    command: list[str] = Field(default_factory=list)
    """The agent: any program. `{python}` is this interpreter, `{understudy}` the folder that our packages lie in. Empty: agents are
    started by the user."""
    loops: str = ""
    """YAML list of agent loops (verl's `agent_loop_config_path`): rows whose `agent_name` is one of them are played by it, rows
    without a name by the first one, if there is no `command`. See agents/workers/config.py."""
    environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = Field(default_factory=list)
    """Variables of your environment, by name, that the command gets. Without being named it gets only those that programs need to
    run (`PASSED_ON` in configs/child_processes.py): no keys or tokens."""
    processes: Count = 1
    """Long-lived programs to run, which ask `TASKS_URL` for their next tasks; 0: a fresh process for every episode. Agent loops
    run in as many workers, at least one."""
    preload: list[Text] = Field(default_factory=list)
    """Modules that Python imports once, with `processes: 0` and a command of an interpreter and a file: the process of an episode
    is a fork of one that has them ([openai]: 0.6 s of a core less for each). They must bear that: no threads, no connections."""
    concurrency: PositiveInt | Literal["auto"] = 64
    """Episodes that may run at once, over all agents; up to 256 of them generate in one engine step. auto: as many as the engines'
    caches hold. It begins with what they hold of the longest episodes, grows by a quarter with each turnover while every engine
    uses less than 0.6 of its cache, and is lowered at 0.8, when an engine preempts, and when prompts wait for long. It ends where
    `buffer.max_policy_lag` lets no more start, and with `processes: 0` at 8 programs for each processor."""
    deadline_s: Seconds = 120.0
    """Longest time of an episode. A longer one counts as failed and is retried."""
    silence_s: Seconds | None = None
    """An episode whose agent sends no request with its key for so long, while none is being answered, counts as failed and is
    retried (`GET /v1/models` is enough to show that the agent lives). None: silence is not limited."""
    max_attempts: PositiveInt = 3
    """Attempts at one member of a group before the member is given up, and the group with it (see `fewest_members`)."""
    fewest_members: PositiveInt | None = None
    """A group is trained without the members that were given up, if at least so many have a score. None: it needs all."""

    @model_validator(mode="after")
    def _preloads_for_episodes(self) -> AgentsConfig:
        if self.preload and self.processes:
            raise ValueError(f"preload needs processes=0, got processes={self.processes}; leave preload out")
        return self


class HarborConfig(Section):
    agent: Annotated[str, Field(pattern=r"^([a-z][a-z0-9-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")] = ""
    """The agent of Harbor's that plays (claude-code, codex, opencode, mini-swe-agent, terminus-2, ...), or yours as `module:Class`.
    `data.tasks` are folders of Harbor tasks then, or harbor://NAME@VERSION of its registry. Empty: nothing is played by Harbor.
    `env: harbor` is terminus-2."""
    agent_options: dict[str, Any] = Field(default_factory=dict)
    """Harbor's arguments of that agent: {max_turns: 8}."""
    environment: Annotated[str, Field(pattern=r"^([a-z][a-z0-9-]*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "docker"
    """Harbor's provider of environments (docker, daytona, modal, ...), or yours as `module:Class`; or `child`: a fenced child
    process on this machine, for machines without docker, and no sandbox against attackers."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Harbor's arguments of that provider: {auto_mounting: true}."""
    command: Annotated[list[str], Field(min_length=1)] = ["harbor"]
    """How the `harbor` program is started. It needs Python 3.12 or newer, in an environment of its own."""
    server_url: Annotated[str, Field(pattern=r"^(https?://[^/\s]+)?$")] = ""
    """Root of the server as agents in their environments reach it: http://host.docker.internal:8000, or https:// of a proxy. Empty:
    http://`server.host`:`server.port`."""
    reward: Text = "reward"
    """The score, of the rewards that a verifier writes: the name in its reward.json; reward.txt has `reward` alone."""
    graded_errors: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]] = Field(default_factory=list)
    """Errors of Harbor's after which the verifier's score counts all the same: [AgentTimeoutError]. After any other one the episode
    failed, with that error as its reason."""
    trial: dict[str, Any] = Field(default_factory=dict)
    """More of Harbor's trial configuration, by its names: {agent_timeout_multiplier: 2.0}."""


class EnvConfig(Section):
    harbor: HarborConfig = HarborConfig()
    command: list[str] = Field(default_factory=list)
    """A long-lived environment process that reports scores. It gets `SERVER_URL` and `SCORER_KEY`,
    prints `ready HOST:PORT` when it listens, and agents find that address in `ENV_ADDRESS` and in their lease."""


class ServerConfig(Section):
    host: Text = "127.0.0.1"
    """Address on which agents reach the server."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0: any free port."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that serve agents: an event loop carries a few hundred model calls a second. Each owns the episodes that it leases,
    which a lease says in `base_url`; the first is the run's own, the others have the ports after `port`. One that dies is started
    again."""
    tool_parser: Literal["auto"] | str | None = "auto"
    """A tool parser of vLLM by name (hermes, llama3_json, ...); auto: the one that reads a call as the model's chat template writes
    it. None, or where auto finds none: tools are refused."""
    reasoning_parser: str | None = None
    """A reasoning parser of vLLM by name (qwen3, deepseek_r1, ...). None: no reasoning content."""
    replay_match: Literal["tolerant", "strict"] = "tolerant"
    """The rule by which a request continues an earlier round. tolerant: its history says the same (arguments spelled in another
    way, reasoning left out); the prompt keeps what was sampled. strict: the chat template writes the history as the exact
    tokens sampled."""


class EngineRange(Section):
    fewest: PositiveInt = 1
    """Engines that the run needs at its start."""
    most: PositiveInt
    """Engines that it has when there is room: more are added as nodes join the cluster."""

    @model_validator(mode="after")
    def _ordered(self) -> EngineRange:
        if self.fewest > self.most:
            raise ValueError(f"fewest must be at most most={self.most}, got {self.fewest}; set fewest={self.most}")
        return self


class RolloutConfig(Section):
    engine: Annotated[str, AfterValidator(check_engine_name)] = "vllm"
    """What samples: `vllm` or `sglang`, which the run starts, or http://HOST:PORT, a vLLM or SGLang server that runs already. Such
    a server must give token ids with log-probabilities, and for training take new weights; see docs/engines.md."""
    temperature: Positive = 1.0
    """Sampling temperature of every training episode, whatever the agent asks for."""
    max_tokens: PositiveInt = 512
    """Most tokens of one generation; an agent may ask for fewer."""
    max_model_len: PositiveInt = 2048
    """Longest prompt + generation, in tokens."""
    engines: PositiveInt | EngineRange = 1
    """Engines, each in a process of its own, on this machine and on the other nodes of the cluster that RAY_ADDRESS names.
    Episodes are spread over them; when one dies, another one continues what it was sampling, and it is started again, on another
    node if its own is gone. `{fewest: 2, most: 6}`: as many as there is room for; more join as nodes do."""
    threads: PositiveInt | None = None
    """Threads of an engine on a CPU. None: what OMP_NUM_THREADS says, else 1; for a pretrained model with
    `buffer.max_policy_lag=0`, where the learner waits for the engines, all cores."""
    engine_timeout_s: Seconds = 120.0
    """An engine that gives no sign of life for so long while requests wait is killed and restarted: its process may live and be
    deaf. One that is busy with a long step answers between two of them. Loading weights may take ten times as long."""
    sleep: bool = False
    """Free the engine's memory while the learner updates, for both on one card: vLLM's sleep mode on a GPU, KV cache and weights
    on a CPU, by itself for a pretrained model. Only with `buffer.max_policy_lag=0`, where nothing is generated meanwhile."""
    kv_cache_gb: Positive | None = None
    """KV-cache memory of the engine, on each of its cards, in GiB. None: 0.25 on CPU, and for a pretrained model what
    `agents.concurrency` conversations of `max_model_len` tokens take, up to a twentieth of the memory; on a GPU what
    `gpu_memory_utilization` leaves beside the weights."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one engine, over which each layer's weights are divided (tensor parallelism). On a CPU 1."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of a card's memory that an engine takes, its weights and its KV cache in all. None: 0.4 if any engine shares a card
    with a rank of the learner, else 0.9. No effect on a CPU."""
    engine_args: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")], Any] = Field(default_factory=dict)
    """More arguments of vLLM's engine, by vLLM's names: `{max_num_batched_tokens: 8192, quantization: fp8}`. vLLM's own parser
    judges them. Refused are those that the run sets itself (configs/rules.py)."""

    @property
    def engine_range(self) -> tuple[int, int]:
        """(fewest, most) of `engines`."""
        engines = self.engines
        return (engines, engines) if isinstance(engines, int) else (engines.fewest, engines.most)

    def share_of_card(self, *, beside_rank: bool) -> float:
        """`gpu_memory_utilization`, or its default; `beside_rank`: an engine is on a card that a rank is on too."""
        own = SHARE_BESIDE_A_RANK if beside_rank else SHARE_ALONE
        return own if self.gpu_memory_utilization is None else self.gpu_memory_utilization


class ReplayConfig(Section):
    """Stored groups, with what they were sampled by, beside fresh ones."""

    share: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of each batch, in whole groups, that are stored groups: they were trained before. Where there are too few, fresh groups
    take their places, and `replay/short` counts them. 0: each group is trained once."""
    oldest: PositiveInt = 8
    """Versions by which a stored group's tokens may be older than the policy that trains them; an older token is not trained."""
    only: Literal["all", "mixed", "solved"] = "mixed"
    """Which groups may be trained again. mixed: those whose scores differ, which hold a comparison (the partially correct ones of
    ExGRPO, arXiv:2510.02245, and what DAPO's dynamic sampling keeps); solved: those with a score above 0 (the verified successes of
    RLEP, arXiv:2507.07451); all: any. Of these come first those that were trained least often, then the newest."""
    times: Annotated[int, Field(ge=2)] = 2
    """How often a group is trained in all, at most, its first time among them; the ledger's tables hold to it."""


class BufferConfig(Section):
    groups_per_step: PositiveInt = 8
    """Groups (tasks) in one batch."""
    group_size: PositiveInt = 8
    """Episodes of one task."""
    max_policy_lag: Count = 1
    """Largest difference between the policy that trains a token and the one that sampled it, in steps; of stored groups `replay`
    says it. 0 is the synchronous flow: no task starts before the new weights are in place."""
    replay: ReplayConfig = ReplayConfig()
    node: Annotated[str, Field(pattern=r"^[\w.:-]*$")] = ""
    """The address or the id of the Ray node whose disk has the ledger, in the cluster that the run then joins (`ray start`). Empty:
    the ledger is in the run's own process, which needs no cluster."""

    @property
    def num_replayed(self) -> int:
        """Stored groups of a batch, at most; 0: there is no replay."""
        return int(self.replay.share * self.groups_per_step + 1e-9)


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=0, le=512)] = 0
    """Rank of the low-rank matrices that are trained beside the frozen weights, a separate critic's too. 0: no LoRA, all weights
    are trained. The engine gets the matrices alone, each version as one more of vLLM's adapters."""
    alpha: Positive = 16.0
    """Their product is scaled by alpha / rank."""
    per_role: bool = False
    """Each role of `roles` that is trained is a policy of its own, an adapter on the base that all share, with a batch, an
    optimizer and versions of its own. A role is updated in each step in which rows of `buffer.groups_per_step` groups wait for it;
    one that says too little keeps its version, and the others go on. False: one policy plays them all."""


class ClipConfig(Section):
    low: Positive | None = None
    """Ratios stay above 1 - low (gmpo: above exp(-low); dppo_tv: a probability falls by at most low; dppo_kl: at most this KL).
    None: the loss's own: 0.2 for ppo, 0.2 for clip_cov, 3e-4 for gspo, 1.0 for cispo, 0.4 for gmpo, 0.15 for dppo_tv, 0.05 for
    dppo_kl. The other losses clip nothing."""
    high: Positive | None = None
    """Ratios stay below 1 + high (gmpo: below exp(high); dppo_tv: a probability rises by at most high; dppo_kl: at most this KL).
    None: the loss's own: 0.28 for ppo, 0.2 for clip_cov, 4e-4 for gspo, 4.0 for cispo, 0.4 for gmpo, 0.15 for dppo_tv, 0.05 for
    dppo_kl."""
    ratio_max: Annotated[float, Field(gt=1.0)] | None = None
    """The ratio beyond which a token weighs no more: for ppo where its advantage is negative (dual clip), for dppo_tv and dppo_kl
    everywhere. None: the loss's own: 3 for ppo, 20 for dppo_tv and dppo_kl."""


class SapoConfig(Section):
    tau_pos: Positive = 1.0
    """Steepness of the soft gate where the advantage is positive, with `loss: sapo`."""
    tau_neg: Positive = 1.05
    """The same where it is not; above `tau_pos`, so that tokens that are made less likely are held back sooner."""


class CovConfig(Section):
    share: Annotated[float, Field(gt=0.0, le=1.0)] = 2e-4
    """Share of the trained tokens that `loss: clip_cov` or `kl_cov` picks by the covariance of log-probability and advantage; at
    least one."""
    low: float = 1.0
    """clip_cov picks among tokens whose covariance is above this."""
    high: Positive = 5.0
    """clip_cov picks among tokens whose covariance is below this."""
    kl_coef: NotNegative = 1.0
    """Weight of the KL penalty on the tokens that kl_cov picks."""


class CorrectionBoundsConfig(Section):
    low: NotNegative | None = None
    """Smallest importance ratio that icepop, mis and seq_mis keep. None: the correction's own: 0.5 for icepop, 0 for mis, 0 for
    seq_mis."""
    high: Positive | None = None
    """Largest importance ratio: what is above is cut to it (tis, seq_tis) or dropped (icepop, mis, seq_mis). None: the correction's
    own: 5 for icepop, 2 for the others."""


class RejectionConfig(Section):
    kind: Literal["none", "geo_mean", "k3_mean", "stale_negatives"] = "none"
    """Rows to leave out of the loss, beside the correction's weights. geo_mean: the geometric mean of the row's importance ratios
    is outside of low..high; k3_mean: the mean k3 estimate of its KL to the policy that sampled is above high; stale_negatives: its
    advantage is negative and the mean log ratio of the policy that sampled to the present one is above high (DeepSeek-V3.2)."""
    low: Positive | None = None
    """Smallest geometric mean that is kept. None: 0.999."""
    high: Positive | None = None
    """Largest value that is kept. None: 1.001 for geo_mean, 0.01 for k3_mean, 0.5 for stale_negatives."""


class KLConfig(Section):
    coef: NotNegative = 0.0
    """Weight of KL(policy || frozen reference). 0: there is no KL term, and no reference model is kept: turned
    on at a resume, its reference is the policy that is resumed."""
    target: Positive | None = None
    """Adaptive KL: the weight begins at `coef` and is steered to a KL of so many nats per token. None: the weight is fixed."""
    horizon: Positive = 500.0
    """Episodes in which the adaptive weight changes by at most a fifth of itself: at 64 episodes a step it doubles in 28 steps."""
    kind: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Estimator of the KL, see learner/algorithms/kl.py."""
    in_reward: bool = False
    """False: the KL is a term of the loss. True: it is taken off the rewards, token by token."""


class AdaptiveEntropyConfig(Section):
    target: Positive | None = None
    """The bonus is in force while the mean entropy is at or below this, in nats per token; its weight begins at `entropy_coef`,
    rises there and falls elsewhere (Skywork-OR1). None: the weight is fixed."""
    step: Positive = 0.005
    """Change of the weight in a step."""
    most: Positive = 1.0
    """Largest weight."""


class TeacherConfig(Section):
    path: str = ""
    """Folder of a frozen model with the policy's tokenizer; the policy learns to be like it on what the policy itself samples.
    Empty: there is no teacher."""
    coef: Positive = 1.0
    """Weight of log pi_teacher - log pi in the advantage of each token: the reverse KL, beside the reward, or alone with
    `learner.advantage: none`."""


class EchoConfig(Section):
    tool: NotNegative = 0.0
    """Weight of a cross-entropy on the results of tools: the policy learns to foresee them (ECHO; prime-rl has 0.1). 0: none."""
    user: NotNegative = 0.0
    """The same on what an environment, or a user, said after the policy's first answer."""

    @property
    def roles(self) -> tuple[str, ...]:
        """Those that have a weight."""
        return tuple(role for role, weight in self.model_dump().items() if weight)


class HintsConfig(Section):
    coef: NotNegative = 0.0
    """Weight of the distillation from the reference that has read a row's hint to the policy, which has not. 0: none."""
    sources: Annotated[list[Literal["hint", "said", "sibling"]], Field(min_length=1)] = ["hint"]
    """The origins of hints. hint: a judge's, or the task's `extra_info.hint`; said: what tools and the environment said after the
    episode's first answer; sibling: the answers of the group's best episode, for those that scored less."""


class LearnerConfig(Section):
    stage: Literal["rl", "sft"] = "rl"
    """What a run ends with. sft: it learns `sft.demonstrations` and nothing else; without validation tasks it starts no engine.
    rl: it learns from scored episodes, after SFT where there are demonstrations."""
    recipe: (
        Literal[
            "ppo",
            "grpo",
            "dapo",
            "dr_grpo",
            "gspo",
            "cispo",
            "rloo",
            "reinforce++",
            "reinforce++_baseline",
            "remax",
            "dppo",
            "gmpo",
            "sapo",
            "gpg",
            "opo",
            "gdpo",
            "clip_cov",
            "kl_cov",
            "sdpo",
            "sdft",
        ]
        | None
    ) = None
    """An algorithm by name, see docs/algorithms.md: sets what its paper sets of the keys below. It takes the place of what a base
    file says of the algorithm; keys beside it, in the same file or on the command line, change it. None: the keys alone say."""
    ranks: PositiveInt = 1
    """FSDP2 ranks (gloo on CPU, NCCL on GPU), each in a process of its own."""
    advantage: Literal[
        "gae",
        "grpo",
        "dr_grpo",
        "rloo",
        "remax",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "opo",
        "gpg",
        "gdpo",
        "grpo_passk",
        "otb",
        "none",
    ] = "gae"
    """Estimator of advantages. gae needs a critic; reinforce_plus_plus compares the batch, none looks at no score (a teacher or
    hints say what is good), the others compare one group."""
    critic: Literal["shared", "separate", "none"] = "shared"
    """shared: a value head on the policy's last hidden state, which it does not train; separate: a second model with its own
    optimizer."""
    lora: LoraConfig = LoraConfig()
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward pass: memory for one layer's activations, about a third more time."""
    lr: NotNegative = 5e-4
    """Learning rate of the policy (AdamW). Where it is not set, a pretrained model (of 10 million weights and more) gets 1e-5 at
    135 million weights, less with the square root of its size (1e-6 at 7 billion), and ten times that with LoRA."""
    critic_lr: NotNegative = 5e-4
    """Learning rate of a separate critic; of a pretrained model ten times the policy's. Value heads learn at ten times the rate of
    what they sit on, and in proportion to the size of the scores."""
    lr_warmup_steps: Count = 3
    """Steps in which learning rates rise to their values, linearly."""
    grad_clip: Positive = 1.0
    """Largest norm of an update's gradient; a larger gradient is scaled down to it. For scores of size 1: it grows with the batch's
    largest score where advantages do, as those of dr_grpo, rloo, remax, opo, gpg and otb. A value head is clipped by itself."""
    minibatches: PositiveInt = 2
    """Optimizer updates per pass over a batch. Where it is not set, 1 for a pretrained model without a critic."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    token_budget: PositiveInt = 8192
    """Most tokens in one forward pass; rows are packed, without padding. Where it is not set, 1024 for a pretrained model on a
    CPU."""
    threads: PositiveInt | None = None
    """Threads of a rank on a CPU. None: 1, which is fastest for small models and leaves the other cores to engines and agents; for
    a pretrained model with `buffer.max_policy_lag=0`, where engines rest during an update, all cores."""
    prefix_tree: bool = True
    """Compute what rows share from their start on (a prompt, the rounds before a branch) once, where that saves a tenth or more.
    False: each row by itself, to compare; no number changes but by rounding."""
    gamma: Fraction = 1.0
    """Discount from one round to the next; the tokens of a round are not discounted."""
    lam: Fraction = 0.95
    """GAE's lambda, per token."""
    calibrate_values: bool = True
    """Fit the critic's values to the returns of the batch's other episodes before GAE. False: GAE as in the paper."""
    value_clip: Positive = 0.2
    """A value that has moved further than this in a step, in units of the batch's largest score, is not moved on. verl: 0.5."""
    min_deviation: NotNegative = 0.1
    """Least deviation that whitening divides by, in units of the batch's largest score: where all episodes score alike, what is
    left are the critic's errors. 0: none, as in the papers."""
    loss: Literal["ppo", "gspo", "cispo", "gpg", "gmpo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"] = "ppo"
    """The policy's loss, see docs/algorithms.md. ppo has dual clip and clip-higher; gspo and gmpo work on whole rows; cispo clips
    importance weights; sapo has a soft clip; dppo bounds the change of probabilities; gpg is the plain policy gradient."""
    loss_agg: (
        Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        | None
    ) = None
    """How the losses of tokens become one number. A sequence is one row: one branch of an episode. None: as the paper of the loss
    or the advantage has it: seq-mean-token-mean for gspo, gmpo and sapo, seq-mean-token-sum-norm for dr_grpo, token-mean for
    others."""
    loss_norm: PositiveInt = 512
    """Tokens by which seq-mean-token-sum-norm divides a row's sum: a constant, as large as the trained tokens of a row may
    become."""
    mask_truncated: bool = False
    """Leave answers that were cut at `rollout.max_tokens` out of the loss (DAPO's overlong filtering)."""
    clip: ClipConfig = ClipConfig()
    sapo: SapoConfig = SapoConfig()
    cov: CovConfig = CovConfig()
    correction: Literal["none", "tis", "seq_tis", "icepop", "mis", "seq_mis", "naive"] = "tis"
    """Importance weight for data of an older policy, see learner/algorithms/importance_weights.py. naive: PPO on the
    old ratio."""
    correction_bounds: CorrectionBoundsConfig = CorrectionBoundsConfig()
    rejection: RejectionConfig = RejectionConfig()
    kl: KLConfig = KLConfig()
    teacher: TeacherConfig = TeacherConfig()
    echo: EchoConfig = EchoConfig()
    hints: HintsConfig = HintsConfig()
    entropy_coef: NotNegative = 0.0
    """Weight of the entropy bonus in the loss."""
    adaptive_entropy: AdaptiveEntropyConfig = AdaptiveEntropyConfig()
    router_replay: bool = False
    """Engines record which experts each token used, and all passes of the policy use these, with weights of their own routers (R3,
    arXiv:2510.11370). Needs a mixture of experts, and vLLM's engines of this run. Without prefix caching on a CPU,
    where it is set by itself with bfloat16."""
    router_aux_coef: NotNegative = 0.0
    """Weight of the load-balancing loss of the routers (arXiv:2101.03961) in the loss. Needs a mixture of experts."""
    check_logprobs: Fraction | Literal[False] = 1.0
    """Share of the rows whose trained tokens are computed again under the older version that sampled them; the largest difference
    is reported. Tokens of the present version are compared in any case, at no cost; 0 (or false): none are, and no version is
    kept."""
    max_mean_logprob_diff: Positive | None = None
    """Mean difference, in nats, of the engines' log-probabilities and the learner's above which the run ends: of a probe before
    the first step and after the first that moves weights, and of each 256 tokens of batches. None: 3e-5 in float32 (0.01 on a GPU),
    0.15 in bfloat16. More is for engines that round more (quantized ones), which `learner.correction` makes up for."""
    keep_on: Literal["device", "host"] = "device"
    """Memory for older versions and the reference, which are kept in `model.dtype`: a rank's card, or the host's, from where they
    are copied for each pass that needs them."""
    offload: bool = False
    """Keep the optimizer's moments in the host's memory and copy each parameter's to the card for its update: 8 bytes a weight less
    on the card, 16 bytes a weight over the bus in each update."""

    @property
    def aggregation(self) -> str:
        """`loss_agg`, or the aggregation that belongs to loss and advantage."""
        return self.loss_agg or own_aggregation(advantage=self.advantage, loss=self.loss)

    @model_validator(mode="wrap")
    @classmethod
    def _with_recipe(cls, given: Any, complete: ModelWrapValidatorHandler[LearnerConfig]) -> LearnerConfig:
        """Fills what was not given with the recipe, and refuses what can have no effect beside the rest."""
        if not isinstance(given, dict):
            return complete(given)
        recipe = RECIPES.get(str(given.get("recipe")), {})
        plain = {
            key: value.model_dump(exclude_unset=True) if isinstance(value, Section) else value
            for key, value in given.items()
        }
        learner = complete(filled(plain, recipe=recipe) if recipe else given)
        refuse_unused(learner, recipe=recipe)
        return learner


RoleName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]


class RoleConfig(Section):
    frozen: Annotated[int, Field(le=0)] | Text | None = None
    """A model that plays and is never trained: a folder, or -10: the policy as it was 10 versions ago; 0: the policy as it is, not
    trained on what it says here. None: the policy, which is."""
    url: str = ""
    """Root of an OpenAI-compatible API that answers in its place (https://HOST/v1). What it says is recorded and never trained."""
    model: str = ""
    """The model's name there. Empty: the role's."""
    key_variable: Annotated[str, Field(pattern=r"^([A-Za-z_]\w*)?$")] = ""
    """Variable of your environment that holds the key for `url`; no agent gets it. Empty: it needs none."""

    @property
    def is_trained(self) -> bool:
        """The policy plays it, or with `learner.lora.per_role` one of its own."""
        return self.frozen is None and not self.url

    @model_validator(mode="after")
    def _one_model(self) -> RoleConfig:
        if self.frozen is not None and self.url:
            raise ValueError(f"frozen and url are two models, got {self.frozen} and {self.url}; leave one out")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url}")
        if not self.url and (self.model or self.key_variable):
            raise ValueError("model and key_variable are of a url, got none; set url, or leave them out")
        return self


class SftConfig(Section):
    demonstrations: str = ""
    """Parquet or JSONL file of conversations in OpenAI's form (`messages`, and where there are some `tools`, `score`, `weight`),
    which are learned first, by SFT; with `learner.stage: sft` nothing else is. Empty: no SFT."""
    validation: Annotated[float, Field(gt=0.0, lt=1.0)] | str = ""
    """Conversations that are held out: another such file, or a share of the demonstrations (0.05). Their loss is computed before
    the first update, every `data.validation.every` updates and at the end. Empty: none are."""
    epochs: PositiveInt = 3
    """Passes over the demonstrations."""
    steps: PositiveInt | None = None
    """Updates, in the place of `epochs`."""
    batch_size: PositiveInt = 32
    """Conversations in one update."""
    lr: Positive = 2e-3
    """Learning rate, after `learner.lr_warmup_steps`; 2e-5 for a pretrained model where it is not set, with LoRA 2e-4."""
    train_on: Literal["all", "last"] = "all"
    """The answers of a conversation that are learned: all that have no `weight` of 0, or the last of them."""
    min_score: float | None = None
    """Demonstrations with a lower `score`, or with none, are left out. None: all are learned."""
    patience: PositiveInt | None = None
    """Validations in a row without a lower loss after which SFT ends early, with the weights of the lowest. None: it does not."""

    @property
    def files(self) -> dict[str, str]:
        """Key -> file of conversations; none without demonstrations."""
        named = {"sft.demonstrations": self.demonstrations, "sft.validation": self.validation}
        return {key: path for key, path in named.items() if isinstance(path, str) and path and self.demonstrations}


class GateConfig(Section):
    tasks: str = ""
    """Parquet file of tasks that a new version plays, scored by `data.scorer`, before users are served it: what must not be lost
    while wishes are learned. Empty: every new version is served."""
    every: PositiveInt = 5
    """Updates between two candidates; those between are not served."""
    samples: PositiveInt = 1
    """Episodes of each task; a single one is greedy."""
    margin: NotNegative = 0.05
    """A candidate is refused unless its mean score is at most this below that of the best of the versions that led to it, with 95 %
    certainty over all candidates in a row (one-sided, over the differences of each task; in sessions over their scores)."""
    min_entropy: Fraction = 0.6
    """Share of the first candidate's entropy below which a candidate is refused."""
    max_drift: Positive = 2.0
    """Nats per token, in its answers to the gate's tasks, by which a candidate may be away from the model without its adapter. With
    `serve.upstream` it is not looked at: what is learned there is another model."""
    max_likeness: Fraction = 0.85
    """How alike a candidate's answers to different tasks may be, from 0 to 1 (ROUGE-L over pairs); half way from the first
    candidate's to 1, where that is more."""
    session_share: Fraction = 0.0
    """Share of the sessions that begin which a candidate answers that has passed the gate's tasks; it is promoted if people do not
    give them less than the served version's of that time. The learner waits for it. 0: none."""
    sessions: Annotated[int, Field(ge=2)] = 30
    """Sessions with feedback of each of the two after which they are compared; then after twice as many, and so on."""
    session_hours: Positive = 24.0
    """Longest time for that; a candidate of which nothing is certain by then is refused."""


class UpstreamConfig(Section):
    url: str = ""
    """Root of an OpenAI-compatible or Anthropic API (https://HOST/v1) that answers a share of the sessions in the policy's place.
    It is watched, and the policy learns from it by SFT. Empty: the policy answers all."""
    model: str = ""
    """The model's name there. Empty: as each request names it."""
    key_variable: Annotated[str, Field(pattern=r"^([A-Za-z_]\w*)?$")] = ""
    """Variable of your environment that holds the key for `url`; no user gets it, and no user's key goes there. Empty: it needs
    none."""
    dialect: Literal["openai", "anthropic"] | None = None
    """What it speaks: sessions of clients of the other dialect are the policy's. None: both, each request goes in its own."""
    terms_allow_learning: bool = False
    """You have seen that its terms allow you to train a model on what it says; nothing is passed on before you have set it."""
    share: Fraction = 1.0
    """Share of the sessions that begin which it answers; each stays with the model that began it."""
    step: Fraction = 0.0
    """Fall of `share` with each version that passes the gate; it rises again by a rollback."""
    floor: Fraction = 0.0
    """Below which `step` does not bring it."""
    lesson_sessions: PositiveInt = 32
    """Newly watched conversations after which all of them are learned, by the section `sft`."""
    min_score: float = 0.5
    """Watched sessions with feedback below this are not learned; those above weigh up to twice as much as those without any."""
    timeout_s: Positive = 300.0
    """Seconds without a byte of its answer after which a request fails."""

    @model_validator(mode="after")
    def _may_learn(self) -> UpstreamConfig:
        if not self.url:
            if given := list(self.model_dump(exclude_defaults=True)):
                raise ValueError(f"{given[0]} is of a url, got none; set url, or leave {given[0]} out")
        elif not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, got {self.url}")
        elif not self.terms_allow_learning:
            raise ValueError(
                f"terms_allow_learning must be true, got false: what {self.url} says is recorded to train a model on it, which the "
                f"terms of many services forbid; read its terms, then set serve.upstream.terms_allow_learning=true"
            )
        return self


class NextTurnConfig(Section):
    model: str = ""
    """The model that reads what was said after an answer, and gives the answer a score and a hint: `policy`, or the URL of an
    OpenAI-compatible API, with /v1. Empty: none does."""
    name: str = "default"
    """The model's name there."""
    key_variable: Annotated[str, Field(pattern=r"^([A-Za-z_]\w*)?$")] = ""
    """The environment variable that holds the key for that API. Empty: it needs none."""
    prompt: str = ""
    """File with what it is asked; {answer} and {next} stand for what it judges, and it has to end with a line of JSON. Empty: the
    shipped one, mocked_server/next_turn.txt."""
    max_tokens: PositiveInt = 256
    """Most tokens of what it says."""
    timeout_s: Seconds = 60.0
    """Longest time for a verdict; after it there is none."""


class ServeConfig(Section):
    enabled: bool = False
    """Users' keys (`understudy serve keys add NAME`) open the model API to agents that nobody starts; their sessions are recorded,
    and learned from as people say what they think of them. `understudy serve` sets it. There need be no tasks."""
    silence_s: Positive = 600.0
    """Seconds without a request after which a session with feedback ends, and may be trained; its next request begins another
    stretch. One without feedback stays open."""
    batch_age_s: Positive = 3600.0
    """Seconds after which a batch is trained that has fewer than `buffer.groups_per_step` sessions, and at least one."""
    retention_days: Positive | None = None
    """Days after which a session of which nothing was stored meanwhile is forgotten (`understudy ledger forget`), unless it waits
    to be trained. null: what is stored is kept."""
    private_patterns: str = ""
    """A file of regular expressions, one in a line: a request is answered and not stored if a text in it, or in its answer,
    matches one, or holds a key, token or password of a known form. Empty: everything is stored."""
    sessions_keep_version: bool = False
    """A session is answered by the version that answered it first, as long as that is among the last four that were served.
    False: by the one that is served."""
    gate: GateConfig = GateConfig()
    upstream: UpstreamConfig = UpstreamConfig()
    judge: NextTurnConfig = NextTurnConfig()


def _idle(name: str, section: Section, needs: str) -> Iterator[str]:
    """The refusal of the first key of a section that is set, though all of them need another one."""
    for key in section.model_dump(exclude_defaults=True):
        yield f"{name}.{key} has an effect with {needs}, or leave it out"


class Config(Section):
    """A whole run. See configs/demo.yaml for a complete example."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    agents: AgentsConfig = AgentsConfig()
    env: EnvConfig = EnvConfig()
    server: ServerConfig = ServerConfig()
    rollout: RolloutConfig = RolloutConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig = SftConfig()
    serve: ServeConfig = ServeConfig()
    roles: dict[RoleName, RoleConfig] = Field(default_factory=dict)
    """The speakers of an episode: `{solver: {}, critic: {}, judge: {url: ...}}`. An agent asks one by the model's name, or by the
    path /e/KEY/ROLE/v1. The policy plays those without `frozen` and `url`; each is scored, compared and weighed by itself. Where no
    model is named (an agent loop without `roles`, plain prompts), the first of these is asked. Empty: there are no roles."""

    @property
    def has_ledger(self) -> bool:
        """The run has a ledger, on this machine."""
        return not self.buffer.node and self.learner.stage == "rl"

    @property
    def used_learner(self) -> LearnerConfig:
        """What has an effect: SFT alone has no critic, teacher or reference."""
        if self.learner.stage == "rl":
            return self.learner
        nothing = {
            "critic": "none",
            "advantage": "grpo",
            "teacher": TeacherConfig(),
            "kl": KLConfig(),
            "router_replay": False,
        }
        return self.learner.model_copy(update=nothing)

    @property
    def adapter_roles(self) -> tuple[str, ...]:
        """The roles that are adapters of their own; none without `learner.lora.per_role`."""
        trained = tuple(name for name, role in self.roles.items() if role.is_trained)
        return trained if self.learner.lora.per_role else ()

    @property
    def members(self) -> int:
        """Episodes of a group: `buffer.group_size`, and the greedy one of remax."""
        return self.buffer.group_size + (self.learner.advantage == "remax")

    @model_validator(mode="after")
    def _combinations(self) -> Config:
        for refusal in self._check():
            raise ValueError(refusal)
        return self

    def _check(self) -> Iterator[str]:
        """What keys of several sections refuse of one another."""
        learner = self.learner
        yield from self._check_roles()
        yield from self._check_judge()
        if learner.advantage == "gae" and learner.critic == "none":
            yield "learner.advantage=gae needs a critic, got learner.critic=none; set it to shared or separate"
        if learner.advantage == "none" and not (learner.teacher.path or learner.hints.coef):
            yield "learner.advantage=none needs a signal, got learner.teacher.path='' and learner.hints.coef=0; set one of them"
        needs_siblings = "sibling" in learner.hints.sources and not self.serve.enabled  # sessions have none
        compares = {
            "learner.hints.sources=sibling": learner.hints.coef and needs_siblings,
            f"learner.advantage={learner.advantage}": learner.advantage not in ("gae", "reinforce_plus_plus", "none"),
            "data.reward_manager=dapo": self.data.reward_manager == "dapo",
        }
        if self.buffer.group_size < 2 and (found := [key for key, is_so in compares.items() if is_so]):
            yield f"{found[0]} compares episodes of one task: buffer.group_size must be >= 2, got 1; set buffer.group_size=8"
        yield from self._check_data()
        fewest, least = self.agents.fewest_members, 1 if learner.advantage in ("gae", "none") else 2
        if fewest is not None and not least <= fewest <= self.buffer.group_size:
            yield (
                f"agents.fewest_members must be {least} to buffer.group_size={self.buffer.group_size} with "
                f"learner.advantage={learner.advantage}, got {fewest}; set agents.fewest_members={self.buffer.group_size}"
            )
        if self.run.debug and learner.ranks > 1:
            yield f"run.debug needs learner.ranks=1, as it runs in this process, got {learner.ranks}; set learner.ranks=1"
        if self.buffer.groups_per_step * self.buffer.group_size < learner.ranks:
            yield (
                f"each learner rank needs an episode: buffer.groups_per_step * buffer.group_size must be >= learner.ranks, "
                f"got {self.buffer.groups_per_step} * {self.buffer.group_size} < {learner.ranks}"
            )
        if self.rollout.sleep and self.buffer.max_policy_lag > 0:
            yield (
                f"rollout.sleep needs the synchronous flow, got buffer.max_policy_lag={self.buffer.max_policy_lag}, which "
                f"generates while the learner updates; set buffer.max_policy_lag=0"
            )
        yield from self._check_replay()
        yield from self._check_sft()
        yield from self._check_serve()
        yield from self._check_harbor()
        check_names(self.rollout.engine_args)
        check_engine_keys(
            self.rollout.engine,
            given=self.rollout.model_dump(exclude_defaults=True),
            sleeps=self.rollout.sleep,
            lora_rank=learner.lora.rank,
            replays=learner.router_replay,
        )
        if self.rollout.max_tokens >= self.rollout.max_model_len:
            yield (
                f"rollout.max_tokens must be < rollout.max_model_len, got {self.rollout.max_tokens} >= "
                f"{self.rollout.max_model_len}; lower rollout.max_tokens"
            )

    def _check_replay(self) -> Iterator[str]:
        replay, learner = self.buffer.replay, self.learner
        if not replay.share:
            yield from _idle("buffer.replay", replay, "buffer.replay.share only, got 0; set buffer.replay.share=0.5")
            return
        groups, members = self.buffer.groups_per_step, self.buffer.group_size
        part, old = (
            f"{1 / groups:g}" if groups > 1 else "0.5 beside buffer.groups_per_step=8",
            "trains what older policies sampled",
        )
        refusals = (
            (learner.stage == "sft", "is of RL, got learner.stage=sft", "leave it out"),
            (
                self.buffer.num_replayed == 0,
                f"is in whole groups, got {replay.share:g} of buffer.groups_per_step={groups}",
                f"set it to {part} or more",
            ),
            (
                replay.only == "mixed" and members < 2,
                f"with buffer.replay.only=mixed needs groups whose scores differ, got buffer.group_size={members}",
                "set buffer.replay.only=all",
            ),
            (learner.correction == "none", f"{old}, got learner.correction=none", "set learner.correction=tis"),
            (learner.advantage == "opo", f"{old}, got learner.advantage=opo, exact on its own samples only", "take another one"),
        )  # fmt: skip
        yield from (f"buffer.replay.share {rule}; {remedy}" for is_bad, rule, remedy in refusals if is_bad)

    def _check_serve(self) -> Iterator[str]:
        if not self.serve.enabled:
            yield from _idle("serve", self.serve, "serve.enabled only, got false; start it by `understudy serve`")
            return
        needed = {
            "server.processes": (self.server.processes, 1), "buffer.node": (self.buffer.node, ""),
            "buffer.group_size": (self.buffer.group_size, 1), "learner.stage": (self.learner.stage, "rl"),
            "data.reward_manager": (self.data.reward_manager, "naive"),
            "data.tasks": (self.data.tasks, ""),
        }  # fmt: skip
        for key, (value, only) in needed.items():
            if value != only:
                yield f"serve.enabled learns from users' sessions: {key} must be {only!r}, got {value!r}; set it so"
        days = self.serve.retention_days
        if days is not None and days * 86_400 <= self.serve.silence_s:
            yield (
                f"serve.retention_days must be longer than serve.silence_s={self.serve.silence_s:g}, after which a session "
                f"ends, got {days:g}; set serve.retention_days=30"
            )
        if self.serve.gate.tasks and not self.learner.lora.rank:
            yield (
                f"serve.gate compares adapters, which engines have beside one another: learner.lora.rank must be > 0 with "
                f"serve.gate.tasks={self.serve.gate.tasks}, got 0; set learner.lora.rank=16"
            )
        of_adapters = {
            "serve.gate.session_share": self.serve.gate.session_share,
            "serve.sessions_keep_version": self.serve.sessions_keep_version,
        }
        for key, value in of_adapters.items():
            if value and not self.learner.lora.rank:
                yield (
                    f"{key} needs adapters, which engines have beside one another, got {key}={value} with learner.lora.rank=0; set "
                    f"learner.lora.rank=16, or leave it out"
                )
            if value and self.roles:
                yield (
                    f"{key} is of versions of one policy, got {', '.join(self.roles)} with adapters of their own; leave roles or "
                    f"{key} out"
                )
        trial = self.serve.gate.model_dump(exclude_defaults=True)
        if not self.serve.gate.session_share and (
            given := [key for key in ("sessions", "session_hours") if key in trial]
        ):
            yield f"serve.gate.{given[0]} has an effect with serve.gate.session_share only, got 0; set that to 0.1"
        if self.roles and not self.learner.lora.per_role:
            yield (
                f"roles of a live run are its users, each with an adapter of its own, got {', '.join(self.roles)} with "
                f"learner.lora.per_role=false; set it to true, or leave roles out"
            )
        if self.roles and self.serve.gate.tasks:
            yield (
                f"serve.gate compares versions of one policy, got {', '.join(self.roles)} with adapters of their own; leave roles "
                f"or serve.gate.tasks out"
            )
        if not self.serve.judge.model:
            yield from _idle(
                "serve.judge", self.serve.judge, "serve.judge.model only, got none; set that to policy, or a URL"
            )
        if self.serve.judge.model not in ("", "policy") and not self.serve.judge.model.startswith(
            ("http://", "https://")
        ):
            yield (
                f"serve.judge.model must be policy, or the URL of an OpenAI-compatible API, got {self.serve.judge.model!r:.80}; "
                f"set it to one"
            )
        if self.serve.gate.tasks and not self.data.scorer:
            yield "serve.gate.tasks are scored by data.scorer, got ''; set data.scorer=exact_match, or another"

    def _check_sft(self) -> Iterator[str]:
        sft = self.sft
        if self.learner.stage == "sft" and not sft.demonstrations:
            yield "learner.stage=sft learns from demonstrations, got sft.demonstrations=''; set it to a parquet or JSONL file"
        if self.learner.stage == "sft" and self.learner.lora.per_role:
            yield "learner.stage=sft trains one policy, got learner.lora.per_role=true; leave it out"
        if sft.patience is not None and not sft.validation:
            yield (
                f"sft.patience={sft.patience} looks at the loss of held-out conversations, got sft.validation=''; set "
                f"sft.validation=0.05"
            )

    def _check_roles(self) -> Iterator[str]:
        if self.roles and not any(role.is_trained for role in self.roles.values()):
            yield (
                f"roles must name one that the policy plays, got {', '.join(self.roles)}; add one without frozen and url: "
                f"roles: {{solver: {{}}}}"
            )
        for key, given in (("roles", self.roles), ("env.harbor.server_url", self.env.harbor.server_url)):
            if given and self.server.processes > 1:
                yield f"{key} needs one process that serves, got server.processes={self.server.processes}; set server.processes=1"
        if self.learner.lora.per_role:
            yield from self._check_adapters()
        for name, role in self.roles.items():
            if role.key_variable and role.key_variable in self.agents.environment:
                yield (
                    f"roles.{name}.key_variable must stay from agents, got {role.key_variable}, which agents.environment names; "
                    f"take it out there"
                )
            if role.frozen is not None and self.rollout.engine != "vllm":
                yield (
                    f"roles.{name}.frozen needs an engine of the run's own, got rollout.engine={self.rollout.engine}; set "
                    f"rollout.engine=vllm, or roles.{name}.url"
                )

    def _check_adapters(self) -> Iterator[str]:
        """Refuses what cannot be beside `learner.lora.per_role`."""
        learner = self.learner
        if not any(role.is_trained for role in self.roles.values()):
            yield (
                "learner.lora.per_role gives each role an adapter, got no roles; set roles: {solver: {}, critic: {}}, or leave it "
                "out"
            )
        if learner.advantage == "gae":
            yield (
                "learner.lora.per_role has no critic for each role, got learner.advantage=gae; set learner.advantage=grpo and "
                "learner.critic=none"
            )
        if self.buffer.node:
            yield f"learner.lora.per_role needs all of the run on one machine, got buffer.node={self.buffer.node}; leave one out"
        for name, role in self.roles.items():
            if isinstance(role.frozen, int):
                yield (
                    f"roles.{name}.frozen={role.frozen} is an earlier version of the one policy, got learner.lora.per_role=true, "
                    f"with which each role is another; set it to a model's folder, or leave learner.lora.per_role out"
                )

    def _check_judge(self) -> Iterator[str]:
        data, judge, role = self.data, self.data.judge, self.roles.get("judge")
        if "judge" not in data.scorers:
            yield from _idle("data.judge", judge, f"data.scorer=judge only, got {data.scorer!r}; set data.scorer=judge")
            return
        if role is None or role.is_trained:
            yield (
                f"data.scorer=judge asks the role 'judge', which must be one that is not trained, got "
                f"{'no such role' if role is None else 'one that is'}; set roles={{player: {{}}, judge: {{frozen: 0}}}} for the "
                f"policy itself, or {{frozen: FOLDER}}, or {{url: https://HOST/v1, key_variable: VARIABLE}}"
            )
        if judge.mode == "ranking":
            yield from self._check_ranking()

    def _check_ranking(self) -> Iterator[str]:
        agents, members = self.agents, self.members
        if not isinstance(agents.concurrency, int) or agents.concurrency < members:
            yield (
                f"data.judge.mode=ranking has the {members} members of a group wait for one another: agents.concurrency must be a "
                f"number >= {members}, got {agents.concurrency}; set agents.concurrency={4 * members}"
            )
        for key, value in (("fewest_members", agents.fewest_members), ("silence_s", agents.silence_s)):
            if value is not None:
                yield (
                    f"data.judge.mode=ranking ranks whole groups, whose members wait for one another, got agents.{key}={value}; "
                    f"leave it out"
                )
        if self.data.validation.tasks and self.data.scorers[0] == "judge" and not self.data.judge.truth:
            yield (
                "data.judge.mode=ranking cannot score validation tasks, whose mean place is always 1/2, got data.judge.truth=''; "
                "set it to what scores them, or leave data.validation.tasks out"
            )

    def _check_harbor(self) -> Iterator[str]:
        harbor = self.env.harbor
        if not harbor.agent:
            yield from _idle("env.harbor", harbor, "env.harbor.agent only, got none; set env.harbor.agent=terminus-2")
            return
        others = {
            "agents.command": self.agents.command,
            "agents.loops": self.agents.loops,
            "env.command": self.env.command,
            "data.scorer": self.data.scorer,
        }
        if given := [key for key, value in others.items() if value]:
            yield (
                f"env.harbor.agent={harbor.agent} plays and scores by itself, got {given[0]}={others[given[0]]} beside it; leave "
                f"one of them out"
            )
        if owned := sorted(HARBOR_OWNED & harbor.trial.keys()):
            yield f"env.harbor.trial must not hold what a run sets itself, got {owned[0]}; use the other keys of env.harbor"

    def _check_data(self) -> Iterator[str]:
        data = self.data
        if data.reward_manager == "batch" and not data.scorer:
            yield "data.reward_manager=batch calls data.scorer, which must be set, got ''; set data.scorer=module.function"
        if data.sampler != "uniform" and not data.task_files:
            yield (
                f"data.sampler={data.sampler} draws from data.tasks, which must be set, got ''; set data.tasks=FILE, or leave "
                f"data.sampler out"
            )
        # a data set, which has no suffix, is known by its whole name
        names = [PurePath(path).stem if PurePath(path).suffix else path for path in data.task_files]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"data.tasks must name files with different names, got {twice[0]!r} twice; tasks are known by them: rename one"
        validation = data.validation.tasks
        if validation and PurePath(validation) in map(PurePath, data.task_files):
            yield (
                f"data.validation.tasks must name another file than data.tasks, got {validation} for both; validation tasks "
                f"are never trained on: split the file"
            )
