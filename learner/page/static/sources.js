// Where the page's data comes from: the server, or what an exported file embeds.

// A window of tokens as the server packs it: "USPT", the length of a JSON header, the header, then arrays of four bytes a value.
const TYPES = { i32: Int32Array, f32: Float32Array, u8: Uint8Array };

export function decodeTokens(buffer) {
  const view = new DataView(buffer);
  const magic = String.fromCharCode(...new Uint8Array(buffer, 0, 4));
  if (magic !== "USPT") throw new Error(`a window of tokens begins with USPT, not with ${magic}`);
  const headerLength = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headerLength)));
  const arrays = {};
  for (const { name, type, offset } of header.arrays) {
    arrays[name] = new TYPES[type](buffer, 8 + headerLength + offset, header.count);
  }
  return { branch: header.branch, start: header.start, count: header.count, total: header.num_tokens, pieces: header.pieces, figures: header.figures, arrays };
}

// A part of a window: the same as if it alone had been asked for.
export function cutWindow(window, start, count) {
  const from = start - window.start;
  const to = Math.min(window.count, from + count);
  const arrays = Object.fromEntries(Object.entries(window.arrays).map(([name, values]) => [name, values.subarray(from, to)]));
  return { ...window, start, count: to - from, pieces: window.pieces.slice(from, to), arrays };
}

// The figures of the token at `index` of a window; null where it has none.
export function tokenAt(window, index) {
  const known = (name) => {
    const value = window.arrays[name]?.[index];
    return value === undefined || Number.isNaN(value) ? null : value;
  };
  const atLeastZero = (name) => (known(name) >= 0 ? known(name) : null);
  const logprob = known("logprob");
  const learner = known("learner");
  return {
    position: window.start + index,
    id: known("ids"),
    piece: window.pieces[index],
    sampled: known("sampled") === 1,
    mask: known("mask") === 1,
    trained: known("trained") === 1,
    version: atLeastZero("version"),
    round: atLeastZero("round"),
    logprob,
    learner,
    startLogprob: known("start_logprob"),
    difference: logprob === null || learner === null ? null : learner - logprob,
    advantage: known("advantage"),
  };
}

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
    && (!wanted.q || `${one.task_id ?? ""} ${one.session?.name ?? ""} ${one.session?.client ?? ""} ${one.episode_id}`.includes(wanted.q))
    && (!wanted.user || one.session?.user === wanted.user)
    && anyOf(wanted.session_state, one.session?.state)
    && (!wanted.feedback || (one.session?.feedback > 0) === (wanted.feedback === "1"))
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

const SORT_KEYS = { newest: (one) => -one.seq, oldest: (one) => one.seq, score: (one) => one.score, tokens: (one) => one.tokens, rounds: (one) => one.rounds, heard: (one) => -(one.session?.heard_at ?? 0) };

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
    user: tally(kept, (one) => one.session?.user),
    session_state: tally(kept, (one) => one.session?.state),
  };
  return { episodes: wanted.limit ? kept.slice(0, wanted.limit) : kept, next: null, total: kept.length, indexed: 1, facets };
}

// The page's data from an exported file: the same calls as of the server, answered from what the file embeds.

class NotInFile extends Error {
  constructor(what) {
    super(`${what} is not in this exported file; the page of the run itself has it.`);
    this.status = 404;
  }
}

function found(value, what) {
  if (value === undefined || value === null) throw new NotInFile(what);
  return value;
}

function fromBase64(text) {
  const binary = atob(text);
  const out = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) out[i] = binary.charCodeAt(i);
  return out.buffer;
}

function stepRange(metrics, from, to) {
  if (from === undefined && to === undefined) return metrics;
  const keep = metrics.step.map((step, i) => [step, i]).filter(([step]) => step >= (from ?? -Infinity) && step <= (to ?? Infinity)).map(([, i]) => i);
  const columns = Object.fromEntries(Object.entries(metrics.columns).map(([name, values]) => [name, keep.map((i) => values[i])]));
  return { ...metrics, step: keep.map((i) => metrics.step[i]), columns };
}

export function snapshotSource(snapshot) {
  const of = (run) => found(snapshot.runs[run], `The run ${run}`);
  return {
    isSnapshot: true,
    madeAt: snapshot.made_at,
    runs: async () => ({ tick: "", default: snapshot.default, runs: Object.values(snapshot.runs).map((one) => one.run) }),
    run: async (run) => of(run).index,
    config: async (run) => of(run).config,
    metrics: async ({ runs, from, to }) => ({
      tick: "",
      runs: Object.fromEntries(runs.split(",").filter((id) => snapshot.runs[id]).map((id) => [id, stepRange(of(id).metrics, from, to)])),
      names: snapshot.names,
      about: snapshot.about,
    }),
    scores: async (run) => of(run).scores,
    machine: async (run) => of(run).machine,
    groups: async (run, { state }) => ({ groups: of(run).groups.filter((one) => !state || state.split(",").includes(one.state)), next: null }),
    group: async (run, id) => found(of(run).group_details[id], `Group ${id}`),
    episodes: async (run, params) => filterEpisodes(of(run).episodes, params),
    order: async (run, params) => {
      const { episodes } = filterEpisodes(of(run).episodes, { ...params, limit: undefined });
      return Int32Array.from(episodes, (one) => one.seq);
    },
    untrained: async (run) => of(run).untrained,
    findings: async (run) => of(run).findings,
    versions: async (run) => found(of(run).versions, "What versions were served"),
    episode: async (run, id) => found(of(run).details[id], `Episode ${id}`),
    conversation: async (run, id, { branch = 0, start = 0, count = 200 }) => {
      const whole = found(of(run).conversations[`${id}/${branch}`], `The conversation of episode ${id}, branch ${branch},`);
      return { ...whole, start, turns: whole.turns.slice(start, start + count) };
    },
    overview: async (run, id, { branch = 0 }) => found(of(run).overviews?.[`${id}/${branch}`], `The overview of episode ${id}`),
    tokens: async (run, id, { branch = 0, start = 0, count = 4096 }) => {
      const first = decodeTokens(fromBase64(found(of(run).tokens[`${id}/${branch}`], `The text in tokens of episode ${id}, branch ${branch},`)));
      if (start >= first.count && start > 0) throw new NotInFile(`What comes after the first ${first.count} tokens`);
      return cutWindow(first, start, count);
    },
    events: () => null,
  };
}

// The page's data from its server: each call one GET request, answered from a read-only connection; feedback is a POST.

export class RequestFailed extends Error {
  constructor(status, sentence) {
    super(sentence);
    this.status = status;
  }
}

function query(params) {
  const kept = Object.entries(params ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return kept.length ? `?${new URLSearchParams(kept.map(([key, value]) => [key, String(value)]))}` : "";
}

async function ask(path, params, signal, said) {
  let answer;
  const how = said && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(said) };
  try {
    answer = await fetch(`api/${path}${query(params)}`, { signal, credentials: "same-origin", ...how });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new RequestFailed(0, "The page's server does not answer; start it again with `understudy page`.");
  }
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new RequestFailed(answer.status, body.error ?? `The server answered ${answer.status}.`);
}

const json = async (path, params, signal) => (await ask(path, params, signal)).json();
const bytes = async (path, params, signal) => (await ask(path, params, signal)).arrayBuffer();
const of = (run, rest = "") => `runs/${encodeURIComponent(run)}${rest}`;
const episodeOf = (run, id, rest = "") => of(run, `/episodes/${encodeURIComponent(id)}${rest}`);

export const serverSource = {
  isSnapshot: false,
  runs: (signal) => json("runs", {}, signal),
  run: (run, signal) => json(of(run), {}, signal),
  config: (run, signal) => json(of(run, "/config"), {}, signal),
  metrics: (params, signal) => json("metrics", params, signal),
  scores: (run, params, signal) => json(of(run, "/scores"), params, signal),
  machine: (run, params, signal) => json(of(run, "/machine"), params, signal),
  groups: (run, params, signal) => json(of(run, "/groups"), params, signal),
  group: (run, id, signal) => json(of(run, `/groups/${id}`), {}, signal),
  episodes: (run, params, signal) => json(of(run, "/episodes"), params, signal),
  order: async (run, params, signal) => new Int32Array(await bytes(of(run, "/episodes/order"), params, signal)),
  untrained: (run, signal) => json(of(run, "/untrained"), {}, signal),
  versions: (run, signal) => json(of(run, "/versions"), {}, signal),
  feedback: async (run, said) => (await ask(of(run, "/feedback"), {}, undefined, said)).json(),
  findings: (run, signal) => json(of(run, "/findings"), {}, signal),
  episode: (run, id, signal) => json(episodeOf(run, id), {}, signal),
  conversation: (run, id, params, signal) => json(episodeOf(run, id, "/conversation"), params, signal),
  overview: (run, id, params, signal) => json(episodeOf(run, id, "/overview"), params, signal),
  tokens: async (run, id, params, signal) => decodeTokens(await bytes(episodeOf(run, id, "/tokens"), params, signal)),
  events: (runs, since) => new EventSource(`api/events${query({ runs: runs.join(","), since })}`),
};

// Where the page's data come from: an exported file embeds them, else the server has them.

const embedded = document.getElementById("snapshot");

export const source = embedded ? snapshotSource(JSON.parse(embedded.textContent)) : serverSource;
