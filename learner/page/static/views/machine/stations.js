// What each part of the machine shows of a state: its main figure, what stands beside it, and lines below.
import { count, figure, share, short } from "../../core/format.js";

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
