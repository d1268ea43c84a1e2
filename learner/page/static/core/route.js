// The view as a URL: `#/episode/12-0-0?run=demo&colour=version`. Whoever has the link sees the same view.
import { signal } from "./html.js";

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { view: view || "machine", id: rest.join("/"), params: Object.fromEntries(new URLSearchParams(query)) };
}

export const route = signal(parse(location.hash));

addEventListener("hashchange", () => {
  route.value = parse(location.hash);
});

// The address of a view; parameters that are empty are left out.
export function link(view, { id = "", params = {} } = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${query ? `?${query}` : ""}`;
}

export function go(hash) {
  location.hash = hash;
}

// Changes parameters of the present view without a new entry in the history: a filter that is typed, a slider that moves.
export function setParams(changes) {
  const { view, id, params } = route.value;
  history.replaceState(null, "", link(view, { id, params: { ...params, ...changes } }));
  route.value = parse(location.hash);
}
