// The episodes' view: a list to filter and sort, and what was not trained.
import {

// The filters of the list of episodes: their names in the address and in a request are the same.
  html, memo, figure, score, short, link, useCallback, useEffect, useMemo, useRef, useState, count, route, setParams,
  plural, share, useKeys, go, when,
} from "../core.js";
import { ledgerRevision, useRequest, REFRESH_MS, useThrottled, serves } from "../data.js";
import { State, Awaiting, Notice, VirtualList } from "../parts.js";
import { source } from "../sources.js";

export const FILTERS = ["q", "step", "group", "task", "state", "group_state", "reason", "agent", "min_score", "max_score", "min_tokens", "max_tokens", "min_rounds", "max_rounds", "cause", "untrained", "user", "session_state", "feedback", "sort"];

export function filtersOf(params) {
  return Object.fromEntries(FILTERS.filter((name) => params[name]).map((name) => [name, params[name]]));
}

// What the list shows of a run: of one that serves users their sessions, not what the gate plays.
export function listedOf(params) {
  const filters = filtersOf(params);
  return serves.value ? { sort: "heard", session_state: SESSION_STATES.join(","), ...filters } : filters;
}

export const CLEARED = Object.fromEntries(FILTERS.map((name) => [name, undefined]));

export const STATES = ["pending", "running", "scored", "failed"];
export const GROUP_STATES = ["open", "ready", "leased", "trained", "evicted", "validating", "validated"];
export const SORTS = [["newest", "newest first"], ["oldest", "oldest first"], ["-score", "highest score"], ["score", "lowest score"], ["-tokens", "most tokens"], ["tokens", "fewest tokens"], ["-rounds", "most rounds"], ["rounds", "fewest rounds"]];
export const SESSION_STATES = ["open", "waiting", "trained", "forgotten", "given up"];

// A row of the list. One that has not arrived yet keeps its place.

export const HEADER = html`<div class="erow ehead">
  <span role="columnheader">Episode</span><span role="columnheader">Task</span><span role="columnheader">State</span><span role="columnheader" class="number">Score</span><span role="columnheader">Its group</span>
  <span role="columnheader" class="number">Step</span><span role="columnheader" class="number">Rounds</span><span role="columnheader" class="number">Tokens</span><span role="columnheader" class="number">Version</span><span role="columnheader">Remarks</span></div>`;

function remarks(one) {
  const reason = one.reason ?? one.group_reason;
  return [reason, one.cut ? "cut at max_tokens" : null, ...(one.breaks ?? []), one.greedy ? "greedy" : null, one.attempt > 0 ? `attempt ${one.attempt + 1}` : null].filter(Boolean).join(" · ");
}

export const EpisodeRow = memo(({ episode: one, run, filters }) => {
  if (!one) return html`<div class="erow absent"><span role="gridcell">…</span></div>`;
  const told = remarks(one);
  return html`<div class="erow">
    <span role="gridcell" class="e-id"><a tabindex="-1" href=${link("episode", { id: one.episode_id, params: { run, ...filters } })}>${one.episode_id}</a></span>
    <span role="gridcell" class="e-task clip" title=${one.agent ? `${one.task_id} (${one.agent})` : one.task_id}>${one.task_id ?? "–"}</span>
    <span role="gridcell" class="e-state"><${State} state=${one.state} /></span>
    <span role="gridcell" class="e-score number">${score(one.score)}</span>
    <span role="gridcell" class="e-group soft">${one.group_state}</span>
    <span role="gridcell" class="e-step number">${figure(one.step)}</span>
    <span role="gridcell" class="e-rounds number">${figure(one.rounds)}</span>
    <span role="gridcell" class="e-tokens number">${short(one.tokens)}</span>
    <span role="gridcell" class="e-version number">${figure(one.version)}</span>
    <span role="gridcell" class="e-remarks clip soft" title=${told}>${told}</span>
  </div>`;
});

// A row of the list of a run that serves users.

const SESSION_HEADER = html`<div class="erow srow ehead">
  <span role="columnheader">User</span><span role="columnheader">Session</span><span role="columnheader">Client</span><span role="columnheader">State</span><span role="columnheader" class="number">Score</span>
  <span role="columnheader" class="number">Feedback</span><span role="columnheader" class="number">Rounds</span><span role="columnheader" class="number">Version</span><span role="columnheader">Heard</span></div>`;

// The version that answered last; of a session that goes on another may answer next.
const versionOf = (one) => one.max_version ?? one.version;

const SessionRow = memo(({ episode: one, run, filters }) => {
  if (!one) return html`<div class="erow srow absent"><span role="gridcell">…</span></div>`;
  const { user, name, client, state, feedback, heard_at: heardAt, is_side: isSide, is_watched: isWatched } = one.session;
  const kind = isSide ? "side call" : isWatched ? "another model" : null;
  return html`<div class="erow srow">
    <span role="gridcell" class="s-user clip" title=${kind ?? ""}>${kind ? `${user} · ${kind}` : user}</span>
    <span role="gridcell" class="s-name clip" title=${`${name || "its client gave it no name"} (${one.episode_id})`}><a tabindex="-1" href=${link("episode", { id: one.episode_id, params: { run, ...filters } })}>${name || one.episode_id}</a></span>
    <span role="gridcell" class="s-client clip soft" title=${client}>${client || "–"}</span>
    <span role="gridcell" class="s-state"><${State} state=${state} title=${one.reason ?? ""} /></span>
    <span role="gridcell" class="s-score number">${score(one.score)}</span>
    <span role="gridcell" class="s-feedback number">${feedback || html`<span class="soft">0</span>`}</span>
    <span role="gridcell" class="s-rounds number">${figure(one.rounds)}</span>
    <span role="gridcell" class="s-version number">${figure(versionOf(one))}</span>
    <span role="gridcell" class="s-heard soft">${when(heardAt)}</span>
  </div>`;
});

// The episodes that match, in order: their numbers as one index, their rows in windows as they come into sight.

const FIRST = 100;
const MOST_AT_ONCE = 200;

// The first rows come with the counts. The index of all is asked for when the reader goes beyond them; rows there are asked for
// by their numbers.
function useIndex(run, filters, revision) {
  const asked = `${run} ${JSON.stringify(filters)}`;
  const [deep, setDeep] = useState(null);
  const head = useRequest(asked, (signal) => source.episodes(run, { ...filters, limit: FIRST }, signal), revision);
  const index = useRequest(deep === asked ? asked : null, (signal) => source.order(run, filters, signal), revision);
  const seqs = useMemo(() => {
    if (index.answered?.startsWith(`${asked} `)) return index.data ?? [];
    return head.data?.episodes.map((one) => one.seq) ?? [];
  }, [asked, index.data, head.data]);
  return { head, seqs, goDeep: () => setDeep(asked) };
}

// Rows by number, each with the answer of which it is; one of an earlier answer is shown until the new one is there. `revision`:
// that of the head, so that its rows are not asked for twice.
function useRows(run, head, revision) {
  const rows = useRef(new Map());
  const stamps = useRef(new Map());
  const [, drawAgain] = useState(0);
  const keep = (episodes) => episodes.forEach((one) => {
    rows.current.set(one.seq, one);
    stamps.current.set(one.seq, revision);
  });
  useMemo(() => head && keep(head.episodes), [head]);
  const fetchRows = useCallback(async (seqs) => {
    const missing = seqs.filter((seq) => stamps.current.get(seq) !== revision).slice(0, MOST_AT_ONCE);
    if (!missing.length) return;
    missing.forEach((seq) => stamps.current.set(seq, revision));
    const { episodes } = await source.episodes(run, { seqs: missing.join(",") });
    keep(episodes);
    drawAgain((n) => n + 1);
  }, [run, revision]);
  return { rows: rows.current, fetchRows };
}

export function useEpisodeWindow(run, filters, { hold }) {
  const revision = useThrottled(ledgerRevision);
  // While the reader is further down, rows that are new at the top would move what is read: they wait.
  const [released, setReleased] = useState(revision);
  const shown = useRef(revision);
  shown.current = hold ? Math.max(shown.current, released) : revision;
  const drawn = shown.current;
  const [again, setAgain] = useState(0);
  const { head, seqs, goDeep } = useIndex(run, filters, `${drawn} ${again}`);
  // Breaks are looked for in the background: a list by cause is asked for again until all are known.
  const grows = Boolean(filters.cause) && head.data?.indexed < 1;
  useEffect(() => {
    if (!grows) return undefined;
    const timer = setTimeout(() => setAgain(again + 1), REFRESH_MS);
    return () => clearTimeout(timer);
  }, [grows, again]);
  const { rows, fetchRows } = useRows(run, head.data, head.answered);
  const show = useCallback((first, last) => {
    if (last > FIRST) goDeep();
    fetchRows(Array.from(seqs.slice(first, last))).catch(() => null); // the request of the head tells what is wrong
  }, [seqs, fetchRows]);
  return { head, seqs, count: Math.max(head.data?.total ?? 0, seqs.length), rows, show, isBehind: drawn !== revision, refresh: () => setReleased(revision) };
}

// The fields that filter the list. Each is in the address, so that a link shows the same list.

const TYPING_MS = 150;

function Field({ name, label, type = "text", wide }) {
  const value = route.value.params[name] ?? "";
  const [typed, setTyped] = useState(value);
  const timer = useRef(null);
  useEffect(() => setTyped(value), [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const change = (event) => {
    const next = event.target.value;
    setTyped(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setParams({ [name]: next.trim() }), TYPING_MS);
  };
  return html`<label class=${`field ${wide ? "wide" : ""}`}><span>${label}</span><input type=${type} name=${name} value=${typed} step=${type === "number" ? "any" : undefined} onInput=${change} autocomplete="off" /></label>`;
}

function Choice({ name, label, options, counts, words = {}, none = "any" }) {
  const value = route.value.params[name] ?? "";
  const all = value && !options.includes(value) ? [value, ...options] : options;
  return html`<label class="field"><span>${label}</span><select name=${name} value=${value} onChange=${(event) => setParams({ [name]: event.target.value })}>
    <option value="" selected=${value === ""}>${none}</option>
    ${all.map((one) => html`<option key=${one} value=${one} selected=${one === value}>${words[one] ?? one}${counts?.[one] !== undefined ? ` (${count(counts[one])})` : ""}</option>`)}
  </select></label>`;
}

const keys = (counts) => Object.keys(counts ?? {}).sort((a, b) => counts[b] - counts[a]);

function Between({ label, low, high }) {
  return html`<span class="between" role="group" aria-label=${label}><${Field} name=${low} label=${`${label} from`} type="number" /><${Field} name=${high} label="to" type="number" /></span>`;
}

export function FilterBar({ facets }) {
  const { params } = route.value;
  const any = FILTERS.some((name) => params[name]);
  const [open, setOpen] = useState(["agent", "min_tokens", "max_tokens", "min_rounds", "max_rounds", "task"].some((name) => params[name]));
  return html`<form class="filters" role="search" aria-label="filter the episodes" onSubmit=${(event) => event.preventDefault()}>
    <${Field} name="q" label="Task or episode" type="search" wide />
    <${Field} name="step" label="Step" /><${Field} name="group" label="Group" />
    <${Choice} name="state" label="State" options=${STATES} counts=${facets?.state} />
    <${Choice} name="group_state" label="Group is" options=${GROUP_STATES} counts=${facets?.group_state} />
    <${Choice} name="reason" label="Reason" options=${keys(facets?.reason)} counts=${facets?.reason} />
    <${Choice} name="cause" label="Break" options=${["any", ...keys(facets?.cause)]} counts=${facets?.cause} />
    <${Between} label="Score" low="min_score" high="max_score" />
    ${open && html`<${Field} name="task" label="Task (exact)" /><${Choice} name="agent" label="Agent" options=${keys(facets?.agent)} counts=${facets?.agent} />
      <${Between} label="Tokens" low="min_tokens" high="max_tokens" /><${Between} label="Rounds" low="min_rounds" high="max_rounds" />`}
    <label class="check"><input type="checkbox" name="untrained" checked=${params.untrained === "1"} onChange=${(event) => setParams({ untrained: event.target.checked ? "1" : undefined })} />not trained</label>
    <label class="field"><span>Sort</span><select name="sort" value=${params.sort ?? "newest"} onChange=${(event) => setParams({ sort: event.target.value === "newest" ? undefined : event.target.value })}>
      ${SORTS.map(([value, label]) => html`<option key=${value} value=${value} selected=${value === (params.sort ?? "newest")}>${label}</option>`)}</select></label>
    <span class="filter-actions"><button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Fewer" : "More"}</button>
    <button type="button" disabled=${!any} onClick=${() => setParams(CLEARED)}>Clear</button></span>
  </form>`;
}

function SessionFilters({ facets }) {
  const { params } = route.value;
  return html`<form class="filters" role="search" aria-label="filter the sessions" onSubmit=${(event) => event.preventDefault()}>
    <${Field} name="q" label="Session or client" type="search" wide />
    <${Choice} name="user" label="User" options=${keys(facets?.user)} counts=${facets?.user} />
    <${Choice} name="session_state" label="State" options=${SESSION_STATES} counts=${facets?.session_state} />
    <${Choice} name="feedback" label="Feedback" options=${["1", "0"]} words=${{ 1: "some", 0: "none" }} />
    <${Between} label="Score" low="min_score" high="max_score" />
    <${Choice} name="sort" label="Sort" options=${["-score", "score", "-rounds", "newest", "oldest"]} words=${Object.fromEntries(SORTS)} none="heard last" />
    <span class="filter-actions"><button type="button" disabled=${!FILTERS.some((name) => params[name])} onClick=${() => setParams(CLEARED)}>Clear</button></span>
  </form>`;
}

// The list of episodes: filters in the address, rows in windows, j and k to walk, Enter to open.

const narrow = matchMedia("(max-width: 820px)");

function useRowHeight() {
  const [height, setHeight] = useState(narrow.matches ? 52 : 32);
  useEffect(() => {
    const change = () => setHeight(narrow.matches ? 52 : 32);
    narrow.addEventListener("change", change);
    return () => narrow.removeEventListener("change", change);
  }, []);
  return height;
}

function Found({ list }) {
  const { total, indexed } = list.head.data ?? {};
  return html`<span class="soft" aria-live="polite" data-total=${total}>${total === undefined ? "…" : plural(total, `${source.isSnapshot ? "sampled " : ""}${serves.value ? "session" : "episode"}`)}</span>
    ${indexed < 1 && !serves.value && html`<span class="soft">causes of breaks are known of ${share(indexed)} so far</span>`}
    ${list.isBehind && html`<button type="button" onClick=${list.refresh}>Show what is new</button>`}`;
}

export function EpisodesView({ run }) {
  const isLive = serves.value;
  const asked = JSON.stringify(filtersOf(route.value.params));
  const filters = useMemo(() => JSON.parse(asked), [asked]); // the same object, so that rows are the same
  const listed = useMemo(() => listedOf(filters), [filters, isLive]);
  const [at, setAt] = useState(-1);
  const [isDown, setIsDown] = useState(false);
  const list = useEpisodeWindow(run, listed, { hold: isDown || at > 0 });
  const rowHeight = useRowHeight();
  useEffect(() => setAt(-1), [asked]);
  const move = (by) => setAt((now) => Math.max(0, Math.min(list.count - 1, now + by)));
  const open = () => {
    const one = list.rows.get(list.seqs[at]);
    if (one) go(link("episode", { id: one.episode_id, params: { run, ...filters } }));
  };
  useKeys({ j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(20), PageUp: () => move(-20), Enter: (event) => (event.target.closest("a, button") ? event.target.click() : open()) });
  const onRange = useCallback((first, last) => {
    setIsDown(first > 0);
    list.show(first, last);
  }, [list.show]);
  return html`<div class="view-head"><h1>${isLive ? "Sessions" : "Episodes"}</h1><${Found} list=${list} /><span class="soft hint"><kbd>j</kbd> <kbd>k</kbd> walk, <kbd>Enter</kbd> opens</span></div>
    <${isLive ? SessionFilters : FilterBar} facets=${list.head.data?.facets} />
    ${list.head.error && html`<${Notice} tone="bad">${list.head.error.message}<//>`}
    ${!list.head.data ? html`<${Awaiting} request=${list.head} what="episodes" />` : html`<div class="card list-card">
      <${VirtualList} label=${isLive ? "sessions" : "episodes"} count=${list.count} rowHeight=${rowHeight} header=${isLive ? SESSION_HEADER : HEADER} selected=${at} onRange=${onRange}
        row=${(index) => html`<${isLive ? SessionRow : EpisodeRow} episode=${list.rows.get(list.seqs[index])} run=${run} filters=${filters} />`} />
      ${list.count === 0 && html`<p class="list-empty soft">No ${isLive ? "session" : "episode"} matches.</p>`}</div>`}`;
}

// Why something was not trained: each reason with how often, what it means, and what to change.

function Reason({ one, run, most }) {
  const filter = one.filter === null ? null : Object.fromEntries(new URLSearchParams(one.filter));
  return html`<li class="reason">
    <span class="reason-number">${count(one.number)}<span class="soft"> ${one.what}${one.number === 1 ? "" : "s"}</span></span>
    <span class="reason-bar" aria-hidden="true"><span style=${{ width: `${(100 * one.number) / most}%` }}></span></span>
    <div class="reason-text"><h2 class="mono">${one.reason}</h2><p>${one.sentence}</p>${one.remedy && html`<p class="soft">${one.remedy}</p>`}</div>
    <span class="reason-link">${filter && html`<a href=${link("episodes", { params: { run, ...filter } })}>Show them</a>`}</span>
  </li>`;
}

export function UntrainedView({ run }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(run, (signal) => source.untrained(run, signal), revision);
  const reasons = request.data?.reasons ?? [];
  // Bars compare what is counted in the same unit.
  const most = {};
  for (const one of reasons) most[one.what] = Math.max(most[one.what] ?? 1, one.number);
  return html`<div class="view-head"><h1>Not trained</h1><span class="soft">what was made and not learned from, and why</span></div>
    ${!request.data ? html`<${Awaiting} request=${request} what="reasons" />`
    : reasons.length === 0 ? html`<${Notice}>Everything that ended was trained, or waits for it.<//>`
    : html`<ol class="card reasons">${reasons.map((one) => html`<${Reason} key=${`${one.what} ${one.reason}`} one=${one} run=${run} most=${most[one.what]} />`)}</ol>`}`;
}
