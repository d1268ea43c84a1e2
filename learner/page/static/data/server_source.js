// The page's data from its server: each call one GET request, answered from a read-only connection.
import { decodeTokens } from "./token_window.js";

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

async function ask(path, params, signal) {
  let answer;
  try {
    answer = await fetch(`api/${path}${query(params)}`, { signal, credentials: "same-origin" });
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
  findings: (run, signal) => json(of(run, "/findings"), {}, signal),
  episode: (run, id, signal) => json(episodeOf(run, id), {}, signal),
  conversation: (run, id, params, signal) => json(episodeOf(run, id, "/conversation"), params, signal),
  overview: (run, id, params, signal) => json(episodeOf(run, id, "/overview"), params, signal),
  tokens: async (run, id, params, signal) => decodeTokens(await bytes(episodeOf(run, id, "/tokens"), params, signal)),
  events: (runs, since) => new EventSource(`api/events${query({ runs: runs.join(","), since })}`),
};
