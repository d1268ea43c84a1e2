// The machine over time: what waited and what worked, from the run's record and from what arrives while the page is open.
import { html, useMemo, useRef } from "../../core/html.js";
import { Chart } from "../../parts/chart.js";

const PANELS = [
  { title: "Episodes", lines: [["episodes_running", "running"], ["slots", "slots", true], ["agents_waiting", "agents without a task"]] },
  { title: "Prompts and engines", lines: [["prompts_waiting", "prompts waiting"], ["engines_running", "generations running"], ["engines_waiting", "waiting for cache"]] },
  { title: "Groups", lines: [["groups_ready", "ready"], ["groups_open", "open"]] },
  { title: "Tokens per second", lines: [["tokens_per_s", "sampled"]] },
  { title: "KV cache of the most loaded engine", lines: [["kv_share", "share"]] },
  { title: "Learner: 0 waits, 1 updates, 2 starts", lines: [["learner", "learner"]] },
];

const LEARNER = { waiting: 0, updating: 1 };
const sum = (engines, name) => engines.reduce((total, one) => total + (one[name] ?? 0), 0);

function row(state) {
  return {
    at: state.at, prompts_waiting: state.prompts_waiting, episodes_running: state.pool.running, slots: state.pool.slots, agents_waiting: state.pool.agents_waiting,
    groups_open: state.groups.open, groups_ready: state.groups.ready, engines_running: sum(state.engines, "running"), engines_waiting: sum(state.engines, "waiting"),
    tokens_per_s: sum(state.engines, "tokens_per_s"), kv_share: Math.max(0, ...state.engines.map((one) => one.kv_share ?? 0)), step: state.step, learner: LEARNER[state.learner] ?? 2,
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
    <div class="panels">${PANELS.map((one) => html`<${Panel} key=${one.title} panel=${one} column=${column} />`)}</div></section>`;
}
