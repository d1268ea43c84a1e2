// The page's data from an exported file: the same calls as of the server, answered from what the file embeds.
import { cutWindow, decodeTokens } from "./token_window.js";
import { filterEpisodes } from "./snapshot_filter.js";

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
