// The machine's view: stations with what flows between them, groups, and the last minutes.
import { Chart } from "../charts.js";
import { html, share, count, figure, short, memo, duration, score, link, useMemo, useRef, clock } from "../core.js";
import { ledgerRevision, useRequest, useThrottled, machineNow, currentEntry, serves } from "../data.js";
import { Awaiting, State, Notice } from "../parts.js";
import { source } from "../sources.js";
import { OnWhich, useVersions } from "./versions.js";

// A bar of a share, with its value in words for who cannot see it.
export function Meter({ value, label }) {
  const filled = Math.max(0, Math.min(1, value ?? 0));
  return html`<span class="meter" role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="1" aria-valuenow=${filled} aria-valuetext=${share(value)}>
    <span class="meter-fill" style=${{ width: `${filled * 100}%` }}></span></span>`;
}

// One part of the machine: its figures; its border says that it waits, or that others wait for it, which the list of waits explains.

function Engine({ engine }) {
  const { version, load, kv } = engineFacts(engine);
  return html`<li class=${engine.is_up ? "engine" : "engine down"}>
    <span class="engine-name">${engine.name}</span>
    ${engine.is_up ? html`<span class="soft">${version}</span><span class="engine-load">${load}</span>
      <${Meter} value=${engine.kv_share} label=${`KV cache of ${engine.name}`} /><span class="soft engine-kv">KV ${kv}</span>`
      : html`<span class="engine-load">down</span>`}
  </li>`;
}

export function Station({ station, state, waits }) {
  const { figure, of, unit, lines, fill, engines, word } = station.show(state);
  const isOne = (side) => waits.some((one) => one[side] === station.name);
  const tone = isOne("for") ? "is-waited-for" : isOne("who") ? "is-waiting" : "";
  return html`<li class=${`station station-${station.name} ${tone}`}>
    <div class="station-head"><h3>${station.label}</h3>${word && html`<span class="soft">${word}</span>`}</div>
    <p class="station-figure">${figure}${of && html`<span class="of"> / ${of}</span>`}</p>
    <p class="station-unit">${unit}</p>
    ${fill !== undefined && html`<${Meter} value=${fill} label=${unit} />`}
    ${engines && html`<ul class="engines">${engines.slice(0, 8).map((one) => html`<${Engine} key=${one.name} engine=${one} />`)}</ul>`}
    ${lines.filter(Boolean).map((line) => html`<p class="station-line" key=${line}>${line}</p>`)}
  </li>`;
}

// What each part of the machine shows of a state: its main figure, what stands beside it, and lines below.

function tasks({ tasks: it }) {
  const room = it.admissible_groups;
  return { figure: count(it.opened), unit: "groups opened", lines: [room === null || room === undefined ? null : room > 0 ? `room for ${count(room)} more` : "no room: the learner is behind"] };
}

function agents({ pool }) {
  return {
    figure: count(pool.running), of: pool.slots ? count(pool.slots) : null, unit: "episodes running", fill: pool.slots ? (pool.running ?? 0) / pool.slots : 0,
    lines: [`${count(pool.agents_waiting)} agents without a task`, `${count(pool.scored)} scored, ${count(pool.failed)} failed`],
  };
}

function prompts(state) {
  return { figure: count(state.prompts_waiting), unit: "prompts waiting", lines: [`${count(state.generating)} being answered`] };
}

function engines({ engines: all }) {
  const up = all.filter((one) => one.is_up);
  const rate = up.reduce((sum, one) => sum + (one.tokens_per_s ?? 0), 0);
  return { figure: all.length ? short(Math.round(rate)) : "–", unit: "tokens/s", of: null, lines: [`${up.length} of ${all.length} up`], engines: all };
}

function rounds(state) {
  return { figure: short(state.rounds), unit: "rounds stored", lines: [`${short(state.tokens)} tokens`] };
}

function groups({ groups: it }) {
  return { figure: count(it.ready), unit: "groups ready", lines: [`${count(it.open)} open`, `${count(it.evicted)} evicted`] };
}

function learner(state) {
  return {
    figure: figure(state.step), of: state.steps_planned ? figure(state.steps_planned) : null, unit: "steps", fill: state.steps_planned ? (state.step ?? 0) / state.steps_planned : 0,
    lines: [`policy version ${figure(state.version)}`, `${count(state.groups.trained)} groups trained`], word: state.learner,
  };
}

export const STATIONS = [
  { name: "tasks", label: "Tasks", show: tasks },
  { name: "agents", label: "Agents", show: agents },
  { name: "prompts", label: "Prompts", show: prompts },
  { name: "engines", label: "Engines", show: engines },
  { name: "rounds", label: "Rounds", show: rounds },
  { name: "groups", label: "Groups", show: groups },
  { name: "learner", label: "Learner", show: learner },
];

// A run that serves users starts no agents: it has those who ask, and what they say of the answers.

function users({ live }) {
  return { figure: count(live?.users), unit: "users since the start", lines: [] };
}

function sessions({ live, groups: it }) {
  return { figure: count(live?.sessions), unit: "sessions heard lately", lines: [`${count(it.open)} are open`, live?.forgotten ? `${count(live.forgotten)} forgotten` : null, live?.unrecorded ? `${count(live.unrecorded)} requests not recorded` : null] };
}

function waiting({ groups: it }) {
  return { figure: count(it.ready), unit: "sessions to learn", lines: [`${count(it.trained)} were learned`, `${count(it.evicted)} given up`] };
}

function liveLearner(state) {
  return { figure: figure(state.step), unit: "steps", lines: [`policy version ${figure(state.version)}`, `users are served ${figure(state.live?.served)}`], word: state.learner };
}

const LIVE_STATIONS = [
  { name: "users", label: "Users", show: users },
  { name: "sessions", label: "Sessions", show: sessions },
  ...STATIONS.slice(2, 5),
  { name: "feedback", label: "Feedback", show: waiting },
  { name: "learner", label: "Learner", show: liveLearner },
];

// A run that starts says its phase first and has no figures yet: they are shown as absent.
export function completed(state) {
  if (!state) return null;
  const { waits = [], engines = [], pool = {}, groups = {} } = state;
  const opened = Object.values(groups).reduce((sum, number) => sum + number, 0); // a group is in one state
  return { ...state, version: state.version ?? state.step, waits, engines, pool, groups, tasks: { ...state.tasks, opened: state.tasks?.opened ?? (state.groups && opened) } };
}

export function engineFacts(engine) {
  return {
    version: `v${figure(engine.version)}`,
    load: `${count(engine.running)}${engine.waiting ? ` + ${count(engine.waiting)} waiting` : " running"}`,
    kv: share(engine.kv_share),
  };
}

// The loops as they are now: from tasks to the learner, whose weights go back to the engines.

export function Flow({ state }) {
  const behind = state.engines.filter((one) => one.is_up && one.version !== null && one.version < state.version).length;
  return html`<section class="flow" aria-label="the machine now">
    <ol class="stations">${(serves.value ? LIVE_STATIONS : STATIONS).map((one) => html`<${Station} key=${one.name} station=${one} state=${state} waits=${state.waits} />`)}</ol>
    <p class="weights"><span>weights of version ${figure(state.version)}</span>
      <span class="soft">${behind ? `${behind} of ${state.engines.length} engines have an older one` : "in every engine"}</span></p>
  </section>`;
}

export function Waits({ waits }) {
  return html`<section class="card"><div class="card-head"><h2>Who waits for whom</h2></div>
    <div class="card-body">${waits.length === 0 ? html`<p class="soft">Nothing waits: every part has work.</p>`
    : html`<ul class="waits">${waits.map((one) => html`<li key=${`${one.who} ${one.for}`}>
        <span class="wait-pair"><strong>${one.who}</strong><span class="arrow" aria-label="waits for">→</span><strong>${one.for}</strong></span>
        <span class="soft">${one.why}</span></li>`)}</ul>`}</div></section>`;
}

// The groups that are open or ready: how old each is, and how many updates it has until it is too old to be trained.

function Updates({ left }) {
  if (left === null) return html`<span class="soft">–</span>`;
  if (left === 0) return html`<span class="state bad">evicted at the next claim</span>`;
  return html`<span class=${left === 1 ? "state warn" : ""}>${count(left)}</span>`;
}

const Row = memo(({ group, run }) => {
  return html`<tr>
    <td><a href=${link("group", { id: String(group.group_id), params: { run } })}>${group.group_id}</a></td>
    <td class="clip">${group.task_id ?? "–"}</td>
    <td><${State} state=${group.state} /></td>
    <td class="number">${group.num_scored} / ${group.size}${group.num_lost ? html` <span class="soft">(${group.num_lost} lost)</span>` : ""}</td>
    <td class="number">${duration(group.age_s)}</td>
    <td class="number">${figure(group.max_version)}</td>
    <td class="number"><${Updates} left=${group.updates_until_stale} /></td>
    <td class="number">${score(group.mean)}${group.std !== null && html`<span class="soft"> ± ${score(group.std)}</span>`}</td>
  </tr>`;
});

export function GroupTable({ run }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(run, (signal) => source.groups(run, { state: "ready,open", limit: 100 }, signal), revision);
  const groups = request.data?.groups ?? [];
  return html`<section class="card"><div class="card-head"><h2>Groups that are open or ready</h2>
      <span class="soft">${groups.length}${request.data?.next ? "+" : ""}</span></div>
    ${!request.data ? html`<div class="card-body"><${Awaiting} request=${request} what="groups" /></div>`
    : groups.length === 0 ? html`<div class="card-body"><p class="soft">None.</p></div>`
    : html`<div class="table-box scroll" tabindex="0" role="region" aria-label="groups that are open or ready"><table>
      <thead><tr><th scope="col">Group</th><th scope="col">Task</th><th scope="col">State</th><th scope="col" class="number">Scored</th><th scope="col" class="number">Age</th>
        <th scope="col" class="number">Newest version</th><th scope="col" class="number">Updates until stale</th><th scope="col" class="number">Score</th></tr></thead>
      <tbody>${groups.map((one) => html`<${Row} key=${one.group_id} group=${one} run=${run} />`)}</tbody></table></div>`}
  </section>`;
}

// The machine over time: what waited and what worked, from the run's record and from what arrives while the page is open.

const PANELS = [
  { title: "Episodes", lines: [["episodes_running", "running"], ["slots", "slots", true], ["agents_waiting", "agents without a task"]] },
  { title: "Prompts and engines", lines: [["prompts_waiting", "prompts waiting"], ["engines_running", "generations running"], ["engines_waiting", "waiting for cache"]] },
  { title: "Groups", lines: [["groups_ready", "ready"], ["groups_open", "open"]] },
  { title: "Tokens per second", lines: [["tokens_per_s", "sampled"]] },
  { title: "KV cache of the most loaded engine", lines: [["kv_share", "share"]] },
  { title: "Learner: 0 waits, 1 updates, 2 starts", lines: [["learner", "learner"]] },
];

const LIVE_PANELS = [{ title: "Users and sessions", lines: [["sessions", "sessions heard lately"], ["users", "users"]] }, PANELS[1], { title: "Sessions to learn", lines: [["groups_ready", "ended with feedback"], ["groups_open", "open"]] }, ...PANELS.slice(3)];

const LEARNER = { waiting: 0, updating: 1 };
const sum = (engines, name) => engines.reduce((total, one) => total + (one[name] ?? 0), 0);

function row(state) {
  return {
    at: state.at, prompts_waiting: state.prompts_waiting, episodes_running: state.pool.running, slots: state.pool.slots, agents_waiting: state.pool.agents_waiting,
    groups_open: state.groups.open, groups_ready: state.groups.ready, engines_running: sum(state.engines, "running"), engines_waiting: sum(state.engines, "waiting"),
    tokens_per_s: sum(state.engines, "tokens_per_s"), kv_share: Math.max(0, ...state.engines.map((one) => one.kv_share ?? 0)), step: state.step, users: state.live?.users, sessions: state.live?.sessions, learner: LEARNER[state.learner] ?? 2,
  };
}

// The record with the states that came after it.
function useColumns(history, now) {
  const added = useRef([]);
  const lastAt = added.current.at(-1)?.at ?? history.at.at(-1) ?? 0;
  if (now && now.at > lastAt) added.current = [...added.current, row(now)].slice(-5000);
  const rows = added.current;
  return useMemo(() => {
    const from = history.at.at(-1) ?? 0;
    const later = rows.filter((one) => one.at > from);
    return (name) => [...(history[name] ?? history.at.map(() => null)), ...later.map((one) => one[name])];
  }, [history, rows]);
}

function Panel({ panel, column }) {
  const at = column("at");
  const data = useMemo(() => [at, ...panel.lines.map(([name]) => column(name))], [column]);
  const series = panel.lines.map(([, label, dashed], tone) => ({ label, tone, dashed: Boolean(dashed) }));
  return html`<figure class="card panel"><figcaption class="card-head"><h3>${panel.title}</h3>
      <span class="legend">${series.map((one) => html`<span class=${`key tone-${one.tone + 1} ${one.dashed ? "dashed" : ""}`} key=${one.label}>${one.label}</span>`)}</span></figcaption>
    <${Chart} title=${`${panel.title} over time`} data=${data} series=${series} xLabel="time" xTime height=${150} /></figure>`;
}

export function History({ history, now }) {
  const column = useColumns(history, now);
  if (column("at").length === 0) return null;
  return html`<section aria-label="the machine over time"><h2 class="section-title">Over time</h2>
    <div class="panels">${(serves.value ? LIVE_PANELS : PANELS).map((one) => html`<${Panel} key=${one.title} panel=${one} column=${column} />`)}</div></section>`;
}

// The machine: its loops as they are now, what waits on what, the groups that wait to be trained, and all of it over time.

const ENDS = { finished: "The run has ended.", stopped: "The run was stopped.", failed: "The run failed.", killed: "The run was killed.", unknown: "Whether the run lives is not known." };

function Ending({ entry, at }) {
  if (!entry || !ENDS[entry.state]) return null;
  const tone = entry.state === "failed" || entry.state === "killed" ? "bad" : "idle";
  return html`<${Notice} tone=${tone}>${ENDS[entry.state]}${entry.error && html` <span class="mono">${entry.error}</span>`}
    ${at && html` What is drawn is the machine as it was at ${clock(at)}.`}<//>`;
}

function Served({ run }) {
  const request = useVersions(run);
  return request.data ? html`<${OnWhich} data=${request.data} />` : null;
}

export function MachineView({ run }) {
  const request = useRequest(run, (signal) => source.machine(run, { points: 600 }, signal));
  const groups = useMemo(() => html`<${serves.value ? Served : GroupTable} run=${run} />`, [run, serves.value]); // it follows the ledger, not the machine
  const pending = Awaiting({ request, what: "the machine" });
  if (pending) return pending;
  const now = completed(machineNow.value[run] ?? request.data.now);
  return html`<div class="stack">
    <div class="view-head"><h1>Machine</h1>${now && html`<span class="soft">as of ${clock(now.at)}${now.phase ? `, ${now.phase}` : ""}, step ${figure(now.step)}</span>`}</div>
    <${Ending} entry=${currentEntry.value} at=${now?.at} />
    ${now ? html`<${Flow} state=${now} /><${Waits} waits=${now.waits} />` : html`<${Notice}>No state of this run's machine was recorded.<//>`}
    ${groups}
    <${History} history=${request.data.history} now=${now} />
  </div>`;
}
