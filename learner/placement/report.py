"""The plan of a run in words: what `python -m learner.run --dry-run` prints.

Called by `learner.run`. Cards that hold the same are one block. Sizes are GiB of one card; `~` marks an estimate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from configs.schema import Config
from learner.placement.cards import GIB
from learner.placement.memory import BYTES, Item, adapter_weights, on_host, trained_weights
from learner.placement.model_shape import ModelShape
from learner.placement.plan import CardUse, Plan

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
    for number, (place, memory) in enumerate(zip(plan.placement.engines, plan.engines)):
        if memory.cache_tokens is not None:
            rooms.setdefault((len(place.cards), max(0, memory.cache_tokens)), []).append(number)
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
