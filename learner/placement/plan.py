"""Which rank and which engine go on which card, what they take there, and whether that can be.

Called by `learner.run` for `--dry-run`, and by the pipeline, which starts ranks and engines where this says. Rules: ranks are on
as few nodes as can be, the run's own first, one a card from card 0 up; an engine's cards are neighbours on one node; engines take
cards without a rank first, on the run's node before others, and share those of ranks when there are no more. Where no node has a
GPU, ranks are on the run's own and engines are spread over all. Refused is what cannot be for certain: estimates alone refuse
nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from buffers.errors import UnderstudyError
from configs.schema import Config
from learner.placement.memory import (
    ASLEEP_BYTES,
    BYTES,
    Item,
    ModelShape,
    adapter_weights,
    of_engine,
    of_rank,
    on_host,
    total,
    trained_weights,
)

# The nodes and their GPUs that a run may use: those of this machine, or those that `--gpus` describes. Neither torch nor CUDA
# is loaded: NVIDIA's own `nvidia-smi` knows the cards. A card's number here is its place among those that CUDA_VISIBLE_DEVICES
# leaves.

ADDRESS = "RAY_ADDRESS"
GIB = 2**30
ASK_S = 20.0
"""`nvidia-smi` takes seconds where the driver is not kept loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of a run; the first of several is the run's own."""

    cards: tuple[int, ...] = ()
    """Bytes of memory of each of its GPUs; empty: it has none."""
    devices: tuple[str, ...] = ()
    """What CUDA calls each of them, for CUDA_VISIBLE_DEVICES; empty: they are described, or counted by Ray, only."""
    id: str = ""
    """Ray's name of it; empty: it is in no cluster."""
    address: str = "127.0.0.1"
    """The address at which the other nodes reach it."""
    is_alive: bool = True


def in_cluster(ledger_node: str) -> bool:
    """Whether a run joins a Ray cluster: RAY_ADDRESS names one, or the ledger is on a node of one (`buffer.node`)."""
    return bool(ledger_node or os.environ.get(ADDRESS))


def described(text: str) -> list[Node]:
    """`80`: one card of 80 GiB; `8x80`: a node with 8 such; `2x8x80`: 2 such nodes. Raises UnderstudyError for anything else."""
    found = re.fullmatch(r"(?:(?:(\d+)x)?(\d+)x)?(\d+(?:\.\d+)?)", text)
    nodes, cards, gib = (int(found[1] or 1), int(found[2] or 1), float(found[3])) if found else (0, 0, 0.0)
    if not (nodes and cards and gib):
        raise UnderstudyError(
            f"--gpus must be [NODES x] [CARDS x] GIB, got {text!r}; for example 8x80: 8 cards of 80 GiB, 2x8x80: two such nodes"
        )
    return [Node(cards=(int(gib * GIB),) * cards)] * nodes


def own_node(*, has_gpu: bool) -> Node:
    """This machine with its cards; none where torch sees no GPU. Raises UnderstudyError where only torch sees them."""
    node = of_this_machine() if has_gpu else Node()
    if has_gpu and not node.cards:
        raise UnderstudyError(
            "a run on GPUs needs nvidia-smi to list them, got no card from it though torch sees one; install the tools of NVIDIA's "
            "driver, or hide the cards: CUDA_VISIBLE_DEVICES="
        )
    return node


def of_this_machine(*, environment: Mapping[str, str] = os.environ) -> Node:
    """Its NVIDIA GPUs, but for those that CUDA_VISIBLE_DEVICES hides; without `nvidia-smi` there are none."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return Node()
    return visible(asked.stdout, environment.get("CUDA_VISIBLE_DEVICES"))


def visible(listed: str, names: str | None) -> Node:
    """`listed`: a line for each card, `0, GPU-1b2c, 81559` (MiB); `names`: CUDA_VISIBLE_DEVICES, None: all are."""
    lines = [[word.strip() for word in line.split(",")] for line in listed.splitlines() if line.count(",") == 2]
    sizes = {index: int(mib) * 2**20 for index, _, mib in lines if mib.isdigit()}
    by_uuid = {uuid: index for index, uuid, _ in lines}
    devices: list[str] = []
    for name in [*sizes] if names is None else names.split(","):
        index = next((index for uuid, index in by_uuid.items() if name and uuid.startswith(name)), name.strip())
        if index not in sizes:  # CUDA sees none behind one that is not there
            break
        devices.append(index)
    return Node(cards=tuple(sizes[index] for index in devices), devices=tuple(devices))


class DoesNotFit(UnderstudyError):
    """The run cannot be placed on these cards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """The cards of one engine."""

    node: int
    cards: tuple[int, ...]
    """On that node; none on a CPU."""
    beside_rank: bool
    """A rank is on one of these cards."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank."""

    node: int
    card: int | None
    """None: it is on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The places of all ranks and engines."""

    ranks: tuple[RankPlace, ...]
    engines: tuple[EnginePlace, ...]

    @property
    def shares(self) -> bool:
        """An engine and a rank are on one card, or on one CPU."""
        return any(engine.beside_rank for engine in self.engines)


def place(nodes: Sequence[Node], *, ranks: int, engines: int | tuple[int, int], tensor_parallel: int) -> Placement:
    """`engines`: as many, or (fewest, most). Raises DoesNotFit where there are too few cards."""
    fewest, most = (engines, engines) if isinstance(engines, int) else engines
    width = max(len(node.cards) for node in nodes)
    if tensor_parallel > max(1, width):
        at_most = f"at most the {width} cards of one node" if width else "1 without a GPU"
        raise DoesNotFit(
            f"rollout.tensor_parallel must be {at_most}, got {tensor_parallel}; set rollout.tensor_parallel={max(1, width)}"
        )
    found = _place_ranks(nodes, ranks=ranks)
    places: list[EnginePlace] = []
    for number in range(most):
        place = next_engine(
            nodes, ranks=found, engines=places, tensor_parallel=tensor_parallel, one_per_cpu=fewest < most
        )
        if place is None:
            if number >= fewest:
                break
            raise DoesNotFit(
                f"rollout.engines * rollout.tensor_parallel must be at most the number of cards, got {fewest} * "
                f"{tensor_parallel} with cards for {number} engines; set rollout.engines={number}"
                if width
                else f"rollout.engines.fewest must be at most the {number} nodes of the cluster, got {fewest}; set "
                f"rollout.engines.fewest={number}, or start more nodes (ray start)"
            )
        places.append(place)
    return Placement(ranks=found, engines=tuple(places))


def _place_ranks(nodes: Sequence[Node], *, ranks: int) -> tuple[RankPlace, ...]:
    if not any(node.cards for node in nodes):
        return (RankPlace(0, None),) * ranks
    # One node that has room for all, else from the first on; `sorted` is stable: the run's own is the first of equals.
    packed = sorted(range(len(nodes)), key=lambda number: len(nodes[number].cards) < ranks)
    cards = [RankPlace(number, card) for number in packed for card in range(len(nodes[number].cards))]
    if ranks > len(cards):
        where = "of the run's node" if len(nodes) == 1 else f"of all {len(nodes)} nodes"
        raise DoesNotFit(
            f"learner.ranks must be at most the {len(cards)} cards {where}, got {ranks}; set learner.ranks={len(cards)}"
        )
    return tuple(cards[:ranks])


def next_engine(
    nodes: Sequence[Node],
    *,
    ranks: Sequence[RankPlace],
    engines: Sequence[EnginePlace],
    tensor_parallel: int,
    one_per_cpu: bool,
) -> EnginePlace | None:
    """The place of one more engine beside those that are there; None: there is no room. `one_per_cpu`: a node without GPUs has
    room for one."""
    if not any(node.cards for node in nodes):
        there = [sum(engine.node == number for engine in engines) for number in range(len(nodes))]
        free = [number for number, node in enumerate(nodes) if node.is_alive and not (one_per_cpu and there[number])]
        number = min(free, key=lambda number: there[number], default=None)
        return None if number is None else EnginePlace(node=number, cards=(), beside_rank=number == 0)
    taken = {(engine.node, card) for engine in engines for card in engine.cards}
    with_rank = {(rank.node, rank.card) for rank in ranks}
    windows = [
        (sum((node, card) in with_rank for card in cards), node, cards)
        for node, cards in _windows(nodes, width=tensor_parallel)
        if nodes[node].is_alive and not taken & {(node, card) for card in cards}
    ]
    shared, node, cards = min(windows, default=(0, 0, ()))
    return EnginePlace(node=node, cards=cards, beside_rank=shared > 0) if cards else None


def place_run(config: Config, *, nodes: Sequence[Node], learns: bool = True) -> Placement:
    """The placement of a run; `learns` false: an evaluation, which has no ranks. Raises as `place`."""
    return place(
        nodes,
        ranks=config.learner.ranks if learns else 0,
        engines=config.rollout.engine_range,
        tensor_parallel=config.rollout.tensor_parallel,
    )


def _windows(nodes: Sequence[Node], *, width: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Neighbouring cards, side by side from a node's last card down: ranks are on its first ones."""
    for number, node in enumerate(nodes):
        for end in range(len(node.cards), width - 1, -width):
            yield number, tuple(range(end - width, end))


@dataclass(frozen=True, slots=True, kw_only=True)
class CardUse:
    """One card, or a CPU: who is on it, and what they take."""

    node: int
    card: int | None
    limit: int | None
    """Bytes of its memory; None: that of a CPU's machine, which is not judged."""
    sleeps: bool
    """The engine gives its memory back while the learner updates."""
    rank: int | None = None
    engine: int | None = None
    rank_items: Sequence[Item] = ()
    engine_items: Sequence[Item] = ()
    engine_share: int = 0
    """Bytes that the engine reserves, whatever it does with them."""
    cache_tokens: int | None = None
    """Tokens that the KV cache of the whole engine holds; see `EngineMemory`."""

    @property
    def phases(self) -> tuple[int, int, int]:
        """The most that is taken for certain, the most with estimates, and what the engine takes in an update."""
        awake = max(self.engine_share, total(self.engine_items, certain=True))
        if not (self.sleeps and self.rank is not None):
            return total(self.rank_items, certain=True) + awake, total(self.rank_items) + awake, awake
        resting = [item for item in self.rank_items if item.stays]
        asleep = min(ASLEEP_BYTES, awake)
        certain = max(total(self.rank_items, certain=True), total(resting, certain=True) + awake)
        return certain, max(total(self.rank_items) + asleep, total(resting) + awake), asleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run on these nodes."""

    nodes: list[Node]
    placement: Placement
    uses: list[CardUse]
    """Sorted by node and card; cards that nobody uses are left out."""


def make_plan(config: Config, *, shape: ModelShape, nodes: Sequence[Node], learns: bool = True) -> Plan:
    """Raises DoesNotFit for what cannot be placed, or has no room for certain; the message has a value of a key with which it
    has."""
    plan = _planned(config, shape=shape, nodes=nodes, learns=learns)
    for complaint in _complaints(plan, config=config, shape=shape):
        raise DoesNotFit(f"{complaint}; {_remedy(config, shape=shape, nodes=nodes, learns=learns)}")
    return plan


def _planned(config: Config, *, shape: ModelShape, nodes: Sequence[Node], learns: bool) -> Plan:
    rollout, roles = config.rollout, max(1, len(config.adapter_roles))
    placement = place_run(config, nodes=nodes, learns=learns)
    on_gpu = any(node.cards for node in nodes)
    share = rollout.share_of_card(beside_rank=placement.shares)
    uses: dict[tuple[int, int], CardUse] = {}

    def put(node: int, card: int | None, **more: Any) -> None:
        """A card has a rank, an engine or both; on a CPU each is by itself."""
        place = node, len(uses) if card is None else card
        limit = None if card is None else nodes[node].cards[card]
        known = uses.get(place) or CardUse(node=node, card=card, limit=limit, sleeps=rollout.sleep)
        uses[place] = replace(known, **more)

    of_learner = of_rank(
        shape, config.learner, dtype=config.model.dtype, buffer=config.buffer, longest_row=rollout.max_model_len,
        on_gpu=on_gpu, policies=roles,
    )  # fmt: skip
    for rank, place in enumerate(placement.ranks):
        put(place.node, place.card, rank=rank, rank_items=of_learner)
    for number, engine in enumerate(placement.engines):
        smallest = min(nodes[engine.node].cards[card] for card in engine.cards) if on_gpu else None
        memory = of_engine(
            shape, rollout, dtype=config.model.dtype, card=smallest, share=share,
            adapter=adapter_weights(shape, config.learner) if learns else 0,
            versions=roles * (config.buffer.max_policy_lag + 1) + 1,
        )  # fmt: skip
        reserved = 0 if smallest is None or rollout.kv_cache_gb is not None else int(share * smallest)
        for card in engine.cards or (None,):
            put(
                engine.node, card, engine=number, engine_items=memory.items, engine_share=reserved,
                cache_tokens=memory.cache_tokens,
            )  # fmt: skip
    return Plan(nodes=list(nodes), placement=placement, uses=[uses[place] for place in sorted(uses)])


def _complaints(plan: Plan, *, config: Config, shape: ModelShape) -> Iterator[str]:
    """What has no room for certain, one line each."""
    rollout = config.rollout
    if shape.heads % rollout.tensor_parallel:
        yield f"rollout.tensor_parallel must divide the model's {shape.heads} attention heads, got {rollout.tensor_parallel}"
    each = BYTES[config.model.dtype]
    longest = rollout.max_model_len * shape.cache_bytes(tensor_parallel=rollout.tensor_parallel, bytes_each=each)
    for use in plan.uses:
        where = f"card {use.card} of node {use.node}"
        if use.limit is None:
            continue
        if use.engine is not None:
            room = (use.engine_share or use.limit) - total(use.engine_items[:1])
            if room < longest:
                yield (
                    f"engine {use.engine} must have room for its weights ({_gib(total(use.engine_items[:1]))}) and one sequence of "
                    f"rollout.max_model_len={rollout.max_model_len} ({_gib(longest)}) in its share of {where}, got "
                    f"{_gib(use.engine_share or use.limit)} of {_gib(use.limit)}"
                )
        certain, _, engine = use.phases
        if use.rank is not None and certain > use.limit:
            own = total(use.rank_items, certain=True)
            beside = f", beside {_gib(engine)} of engine {use.engine}" if use.engine is not None else ""
            yield (
                f"learner rank {use.rank} must have room for its weights, gradients, optimizer and copies ({_gib(own)}{beside}) on "
                f"{where}, got {_gib(use.limit)}"
            )
        elif certain > use.limit:
            yield f"engine {use.engine} must have room on {where}, got {_gib(use.limit)} for {_gib(certain)}"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _remedy(config: Config, *, shape: ModelShape, nodes: Sequence[Node], learns: bool) -> str:
    """The first change of one or two keys with which it fits, by the estimates if one does."""
    certain = ""
    for text, changed in _changes(config, cards=max(len(node.cards) for node in nodes)):
        try:
            plan = _planned(changed, shape=shape, nodes=nodes, learns=learns)
        except DoesNotFit:
            continue
        if next(_complaints(plan, config=changed, shape=shape), None) is None:
            certain = certain or f"set {text}"
            if all(use.limit is None or use.phases[1] <= use.limit for use in plan.uses):
                return f"set {text}"
    return certain or "use more or larger cards, or a smaller model"


def _changes(config: Config, *, cards: int) -> Iterator[tuple[str, Config]]:
    learner, many = config.learner, config.rollout.tensor_parallel
    for share in (0.5, 0.3, 0.2):
        yield f"rollout.gpu_memory_utilization={share}", _with(config, "rollout", gpu_memory_utilization=share)
    for parallel in range(max(2, many + 1), cards + 1):
        yield f"rollout.tensor_parallel={parallel}", _with(config, "rollout", tensor_parallel=parallel)
    for ranks in range(learner.ranks + 1, cards + 1):
        yield f"learner.ranks={ranks}", _with(config, "learner", ranks=ranks)
    less = _with(config, "learner", gradient_checkpointing=True)
    for ranks in range(learner.ranks, cards + 1):
        yield f"learner.gradient_checkpointing=true and learner.ranks={ranks}", _with(less, "learner", ranks=ranks)
    if not learner.lora.rank:
        for ranks in range(learner.ranks, cards + 1):
            changed = _with(less, "learner", lora=learner.lora.model_copy(update={"rank": 32}), ranks=ranks)
            yield f"learner.lora.rank=32 (an adapter in place of all weights) and learner.ranks={ranks}", changed


def _with(config: Config, section: str, **values: object) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


# The plan of a run in words: what `python -m learner.run --dry-run` prints. Cards that hold the same are one block. Sizes are
# GiB of one card; `~` marks an estimate.

WIDTH = 58


def report(plan: Plan, *, config: Config, shape: ModelShape) -> str:
    """Several lines, without a newline at the end."""
    return "\n".join(_lines(plan, config=config, shape=shape))


def _lines(plan: Plan, *, config: Config, shape: ModelShape) -> Iterator[str]:
    learner = config.learner
    trained = trained_weights(shape, learner)
    kind = f"an adapter of rank {learner.lora.rank}" if adapter_weights(shape, learner) else "all weights"
    yield f"run '{config.run.name}': where everything goes, and what it takes there in GiB (~ is an estimate)"
    sizes = f"{_count(shape.parameters)} weights in {shape.layers} layers"
    yield f"model {config.model.path}: {sizes}; trained: {kind}, {_count(trained)}"
    for number, node in enumerate(plan.nodes):
        each = sorted({round(card / GIB, 1) for card in node.cards})
        gib = " or ".join(f"{size:g}" for size in each)
        cards = f"{len(node.cards)} card{'s' * (len(node.cards) > 1)} of {gib} GiB" if each else "no GPU"
        yield f"node {number}: {cards}{' (the run, its server and its files)' if number == 0 else ''}"
        uses = [use for use in plan.uses if use.node == number]
        for _, alike in groupby(uses, key=_kind):
            yield from _block(list(alike))
        used = {use.card for use in uses}
        if free := [card for card in range(len(node.cards)) if card not in used]:
            yield f"  {_numbers('card', free)}: nobody"
    rooms: dict[tuple[int, int], list[int]] = {}
    held = {
        use.engine: use.cache_tokens for use in plan.uses if use.engine is not None and use.cache_tokens is not None
    }
    for number, tokens in sorted(held.items()):
        rooms.setdefault((len(plan.placement.engines[number].cards), max(0, tokens)), []).append(number)
    longest = config.rollout.max_model_len
    for (cards_each, tokens), numbers in rooms.items():
        over = f", each over {cards_each} cards" if cards_each > 1 else ""
        yield (
            f"{_numbers('engine', numbers)}{over}: room for ~{tokens:,} tokens in a cache, ~{tokens // longest} sequences of "
            f"rollout.max_model_len={longest}"
        )
        if tokens < longest:
            yield (
                f"tight: {_numbers('engine', numbers)} may not hold one sequence by the estimates; raise "
                f"rollout.gpu_memory_utilization or rollout.tensor_parallel"
            )
    if not any(node.cards for node in plan.nodes):
        return
    published = BYTES[config.model.dtype] * (adapter_weights(shape, learner) or shape.parameters)
    yield f"beside its cards, node 0 needs ~{2 * published / GIB:.1f} GiB of memory while weights are published"
    for item in on_host(
        shape, learner, dtype=config.model.dtype, buffer=config.buffer, policies=max(1, len(config.adapter_roles))
    ):
        yield f"beside its card, each rank keeps in its node's memory: {item.name}, {item.size / GIB:.1f} GiB"
    for use in plan.uses:
        if use.limit is not None and use.phases[1] > use.limit:
            yield (
                f"tight: card {use.card} of node {use.node} may need {use.phases[1] / GIB:.1f} of {use.limit / GIB:.1f} by the "
                f"estimates; lower learner.token_budget, set learner.gradient_checkpointing=true or lower "
                f"rollout.gpu_memory_utilization if it runs out of memory"
            )
            return


def _kind(use: CardUse) -> tuple[object, ...]:
    return (
        use.rank is not None,
        use.engine is not None,
        use.limit,
        *((item.name, item.size) for item in use.engine_items),
    )


def _block(uses: Sequence[CardUse]) -> Iterator[str]:
    first = uses[0]
    ranks = [use.rank for use in uses if use.rank is not None]
    engines = sorted({use.engine for use in uses if use.engine is not None})
    who = [_numbers("rank", ranks)] if ranks else []
    who += [_numbers("engine", engines)] if engines else []
    cards = [use.card for use in uses if use.card is not None]
    yield f"  {_numbers('card', cards) if cards else 'CPU'}: {' and '.join(who)}"
    for item in first.rank_items:
        yield _line(item, owner="rank" if first.engine_items else "")
    for item in first.engine_items:
        yield _line(item, owner="engine" if first.rank_items else "")
    if first.limit is None:
        yield _row("in all", f"~{first.phases[1] / GIB:.2f}")
    else:
        asleep = (
            " while the engine sleeps or the learner waits"
            if first.sleeps and first.rank_items and first.engine_items
            else ""
        )
        yield _row(f"in all{asleep}", f"~{first.phases[1] / GIB:.1f} of {first.limit / GIB:.1f}")


def _line(item: Item, *, owner: str) -> str:
    size = item.size / GIB
    digits = f"{size:.1f}" if size >= 0.1 else f"{size:.3f}"
    return _row(f"{owner}: {item.name}" if owner else item.name, f"{'~' if item.is_estimate else ''}{digits}")


def _row(name: str, figure: str) -> str:
    return f"    {name:<{WIDTH}}{figure:>8}"


def _numbers(what: str, numbers: Sequence[int]) -> str:
    """`ranks 0-3`, `card 5`, `cards 1, 4`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    whole = list(range(numbers[0], numbers[-1] + 1)) == list(numbers)
    return f"{what}s {numbers[0]}-{numbers[-1]}" if whole else f"{what}s {', '.join(map(str, numbers))}"


def _count(number: int) -> str:
    for size, word in ((10**9, " billion"), (10**6, " million")):
        if number >= size:
            return f"{number / size:.2f}{word}"
    return f"{number:,}"
