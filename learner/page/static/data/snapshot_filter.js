// The filters of the list of episodes, over the few that an exported file holds.
const kindOf = (reason) => (reason ?? "").split(":")[0];
const anyOf = (wanted, value) => !wanted || wanted.split(",").includes(value);

function inSteps(wanted, step) {
  if (!wanted) return true;
  if (step === null) return false;
  const [from, to = from] = wanted.split("-").map(Number);
  return step >= from && step <= to;
}

function within(value, low, high) {
  if (low && !(value !== null && value >= Number(low))) return false;
  return !(high && !(value !== null && value <= Number(high)));
}

function matches(one, wanted) {
  return inSteps(wanted.step, one.step)
    && (!wanted.task || one.task_id === wanted.task)
    && (!wanted.q || `${one.task_id ?? ""} ${one.episode_id}`.includes(wanted.q))
    && (!wanted.group || String(one.group_id) === String(wanted.group))
    && anyOf(wanted.state, one.state)
    && anyOf(wanted.group_state, one.group_state)
    && (!wanted.reason || [one.reason, one.group_reason].map(kindOf).includes(wanted.reason))
    && (!wanted.agent || one.agent === wanted.agent)
    && within(one.score, wanted.min_score, wanted.max_score)
    && within(one.tokens, wanted.min_tokens, wanted.max_tokens)
    && within(one.rounds, wanted.min_rounds, wanted.max_rounds)
    && (!wanted.cause || (wanted.cause === "any" ? one.breaks.length > 0 : one.breaks.includes(wanted.cause)))
    && (!wanted.untrained || (one.state !== "running" && one.state !== "pending" && one.group_state !== "trained"));
}

const SORT_KEYS = { newest: (one) => -one.seq, oldest: (one) => one.seq, score: (one) => one.score, tokens: (one) => one.tokens, rounds: (one) => one.rounds };

function sorted(episodes, sort = "newest") {
  const key = SORT_KEYS[sort.replace("-", "")] ?? SORT_KEYS.newest;
  const sign = sort.startsWith("-") ? -1 : 1;
  return [...episodes].sort((a, b) => sign * ((key(a) ?? -Infinity) - (key(b) ?? -Infinity)) || b.seq - a.seq);
}

function tally(episodes, key) {
  const counts = {};
  for (const one of episodes) for (const value of [key(one)].flat()) if (value) counts[value] = (counts[value] ?? 0) + 1;
  return counts;
}

export function filterEpisodes(episodes, wanted) {
  if (wanted.seqs) {
    const seqs = new Set(wanted.seqs.split(",").map(Number));
    return { episodes: episodes.filter((one) => seqs.has(one.seq)), next: null };
  }
  const kept = sorted(episodes.filter((one) => matches(one, wanted)), wanted.sort);
  const facets = {
    state: tally(kept, (one) => one.state),
    group_state: tally(kept, (one) => one.group_state),
    reason: tally(kept, (one) => kindOf(one.reason ?? one.group_reason)),
    agent: tally(kept, (one) => one.agent),
    cause: tally(kept, (one) => one.breaks),
  };
  return { episodes: wanted.limit ? kept.slice(0, wanted.limit) : kept, next: null, total: kept.length, indexed: 1, facets };
}
