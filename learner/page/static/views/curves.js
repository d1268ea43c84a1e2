// The curves' view: figures by step, several runs side by side.
import uPlot from "../vendor/uplot.js";
import { Chart } from "../charts.js";
import { html, setParams, useMemo, useState, figure, go, link, memo, useEffect, route } from "../core.js";
import { currentRun, overlaidRuns, runs, metricRows, useRequest, ledgerNow, serves } from "../data.js";
import { Awaiting, Notice } from "../parts.js";
import { source } from "../sources.js";

// An exponential average over the points that there are, corrected for its start; 0 leaves the line as it is.
export function smooth(values, weight) {
  if (!weight) return values;
  let average = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = average * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return average / mass;
  });
}

// What a logarithmic axis can show.
export function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}

// How curves are drawn, kept in the address: which metrics, which runs lie over one another, smoothing and axes.

export const USUAL = ["reward/mean", "reward/std", "sft/loss", "sft/val_loss", "policy/entropy", "policy/approx_kl", "policy/clipfrac", "policy/max_logprob_diff", "staleness/mean", "batch/equal_groups", "throughput/tokens_per_s", "time/step_s", "time/wait_s", "critic/explained_variance", "live/sessions", "live/users", "live/judge_judged", "live/judge_failed", "judge/seconds", "upstream/share", "upstream/requests"];
export const SPREAD = "reward/spread";

export function readOptions(params) {
  return { show: params.show === undefined ? null : params.show.split(",").filter(Boolean), find: params.find ?? "", smooth: Number(params.smooth ?? 0), logY: params.logy === "1", logX: params.logx === "1" };
}

function Toggle({ on, name, children }) {
  return html`<button type="button" aria-pressed=${on} onClick=${() => setParams({ [name]: on ? undefined : "1" })}>${children}</button>`;
}

function Overlay() {
  const others = runs.value.filter((one) => one.id !== currentRun.value);
  if (!others.length) return null;
  const chosen = overlaidRuns.value;
  const flip = (id) => setParams({ with: (chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]).filter((one) => one !== currentRun.value).join(",") });
  return html`<fieldset class="overlay"><legend>Runs</legend>
    <span class="key tone-1">${currentRun.value}</span>
    ${others.map((one) => html`<label key=${one.id} class=${chosen.includes(one.id) ? `key tone-${(chosen.indexOf(one.id) % 6) + 1}` : "key off"}>
      <input type="checkbox" checked=${chosen.includes(one.id)} onChange=${() => flip(one.id)} />${one.id}</label>`)}
  </fieldset>`;
}

export function CurveOptions({ options }) {
  return html`<div class="curve-options">
    <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${options.smooth} aria-valuetext=${options.smooth.toFixed(2)}
      onInput=${(event) => setParams({ smooth: Number(event.target.value) || undefined })} /><span class="soft smooth-value">${options.smooth.toFixed(2)}</span></label>
    <${Toggle} on=${options.logY} name="logy">log y<//><${Toggle} on=${options.logX} name="logx">log x<//>
    <${Overlay} />
  </div>`;
}

// The columns of the metrics that are shown, with the rows that arrived since they were asked for.

const MOST_POINTS = 1000;

// Rows of steps that the columns do not have yet; a step that a resumed run made again replaces the one that was there.
function extend(table, rows) {
  if (!rows.length) return table;
  const kept = table.step.filter((step) => step < rows[0].step).length;
  const columns = {};
  const names = new Set([...Object.keys(table.columns), ...rows.flatMap((row) => Object.keys(row))]);
  names.delete("step");
  for (const name of names) {
    const old = (table.columns[name] ?? table.step.map(() => null)).slice(0, kept);
    columns[name] = [...old, ...rows.map((row) => row[name] ?? null)];
  }
  return { ...table, step: [...table.step.slice(0, kept), ...rows.map((row) => row.step)], columns };
}

function latestRows(run, after) {
  const bySteps = new Map();
  for (const { run: of, row } of after) if (of === run && row.step !== undefined) bySteps.set(row.step, row);
  return [...bySteps.values()].sort((a, b) => a.step - b.step);
}

// `drawn`: the columns that are wanted; the names of all others come with them.
export function useMetrics(runs, drawn) {
  const key = JSON.stringify([runs, drawn]);
  const request = useRequest(key, (signal) => source.metrics({ runs: runs.join(","), names: drawn.join(","), points: MOST_POINTS }, signal));
  const arrived = metricRows.value;
  const tables = useMemo(() => {
    if (!request.data) return null;
    return Object.fromEntries(Object.entries(request.data.runs).map(([run, table]) => [run, extend(table, latestRows(run, arrived))]));
  }, [request.data, arrived]);
  return { request, tables, names: request.data?.names ?? [], about: request.data?.about ?? {} };
}

// A chart with its title, what it means, and the values under the cursor; a point opens its step.

const isThere = (value) => value !== null && value !== undefined;

// The last point at which a line has a value.
function lastKnown(data) {
  for (let at = data[0].length - 1; at > 0; at -= 1) if (data.slice(1).some((values) => isThere(values[at]))) return at;
  return 0;
}

function Values({ series, data, index }) {
  const at = index ?? lastKnown(data);
  const shown = series.map((one, place) => ({ ...one, value: data[place + 1][at] })).filter((one) => !one.edge && !one.faint);
  return html`<span class="legend"><span class="soft">step ${figure(data[0][at])}</span>
    ${shown.map((one) => html`<span class=${`key tone-${(one.tone % 6) + 1} ${one.dashed ? "dashed" : ""}`} key=${one.label}>${shown.length > 1 && html`<span class="key-name">${one.label}</span>`} <strong>${figure(one.value)}</strong></span>`)}</span>`;
}

export function ChartCard({ title, about, series, data, logY, logX, run }) {
  const [index, setIndex] = useState(null);
  const open = (step) => go(link("step", { id: String(Math.round(step)), params: { run } }));
  const empty = data[0].length === 0 || series.every((_, place) => !data[place + 1].some(isThere));
  return html`<figure class="card curve"><figcaption class="card-head"><h3 class="mono" title=${about}>${title}</h3>
      ${!empty && html`<${Values} series=${series} data=${data} index=${index} />`}</figcaption>
    ${empty ? html`<p class="soft curve-empty">No value${logY ? " above zero" : ""} yet.</p>`
    : html`<${Chart} title=${`${title} by step; arrow keys move, Enter opens the step`} data=${data} series=${series} logY=${logY} logX=${logX} onHover=${setIndex} onPick=${open} />`}
  </figure>`;
}

// One metric of one or several runs over their steps.

// For each run: its x, then the columns that are drawn, each with how it is drawn.
function linesOf(table, { name, run, tone, options }) {
  const raw = table.columns[name] ?? table.step.map(() => null);
  const clean = (values) => (options.logY ? positive(values) : values);
  const low = table.low?.[name];
  const high = table.high?.[name];
  const lines = [];
  if (low && high && !options.smooth && low.length === table.step.length) {
    lines.push([{ label: `${run} high`, tone, edge: "high" }, clean(high)], [{ label: `${run} low`, tone, edge: "low" }, clean(low)]);
  }
  if (options.smooth) lines.push([{ label: `${run} raw`, tone, faint: true }, clean(raw)]);
  lines.push([{ label: run, tone }, clean(smooth(raw, options.smooth))]);
  return lines;
}

export function joinRuns(parts, logX) {
  const series = parts.flatMap(({ lines }) => lines.map(([how]) => how));
  const tables = parts.map(({ step, lines }) => [logX ? step.map((one) => (one > 0 ? one : 0.5)) : step, ...lines.map(([, values]) => values)]);
  return { series, data: tables.length === 1 ? tables[0] : uPlot.join(tables) };
}

export function MetricChart({ name, about, tables, runs, options }) {
  const { series, data } = useMemo(() => {
    const parts = runs.filter((run) => tables[run]).map((run) => ({ step: tables[run].step, lines: linesOf(tables[run], { name, run, tone: runs.indexOf(run), options }) }));
    return joinRuns(parts.length ? parts : [{ step: [], lines: [] }], options.logX);
  }, [tables, name, runs.join(), options.smooth, options.logY, options.logX]);
  return html`<${ChartCard} title=${name} about=${about} series=${series} data=${data} logY=${options.logY} logX=${options.logX} run=${runs[0]} />`;
}

// The spread of the reward, not only its mean: where the middle half and the middle four fifths of a step's episodes lie.

function spreadLinesOf(scores, { run, tone, options, alone }) {
  const clean = (values) => (options.logY ? positive(values) : values);
  const lines = [[{ label: `${run} 90 %`, tone, edge: "high" }, clean(scores.p90)], [{ label: `${run} 10 %`, tone, edge: "low" }, clean(scores.p10)]];
  if (alone) {
    lines.push([{ label: "75 %", tone, edge: "high" }, clean(scores.p75)], [{ label: "25 %", tone, edge: "low" }, clean(scores.p25)]);
    lines.push([{ label: "median", tone, dashed: true }, clean(smooth(scores.p50, options.smooth))]);
  }
  lines.push([{ label: alone ? "mean" : run, tone }, clean(smooth(scores.mean, options.smooth))]);
  return lines;
}

export function SpreadChart({ runs, options }) {
  const versions = runs.map((run) => ledgerNow.value[run]?.version ?? 0).join();
  const request = useRequest(runs.join(), (signal) => Promise.all(runs.map((run) => source.scores(run, { points: 500 }, signal).catch((problem) => {
    if (problem.name === "AbortError") throw problem;
    return null; // a run without a ledger here has curves and no spread
  }))), versions);
  const { series, data } = useMemo(() => {
    const known = (request.data ?? []).map((scores, index) => ({ scores, run: runs[index], tone: index })).filter((one) => one.scores);
    const parts = known.map(({ scores, run, tone }) => ({ step: scores.step, lines: spreadLinesOf(scores, { run, tone, options, alone: runs.length === 1 }) }));
    return joinRuns(parts.length ? parts : [{ step: [], lines: [] }], options.logX);
  }, [request.data, options.smooth, options.logY, options.logX]);
  return html`<${ChartCard} title="reward/spread" about="The scores of the episodes that a step trained: the mean, the median, the middle half, and from 10 % to 90 %." series=${series} data=${data} logY=${options.logY} logX=${options.logX} run=${runs[0]} />`;
}

// Every metric of the runs, by group, with a search; what is ticked is drawn.

function byGroup(names) {
  const groups = new Map();
  for (const name of names) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return [...groups];
}

export const MetricList = memo(({ names, about, shown, find }) => {
  const matching = useMemo(() => [...names, SPREAD].sort().filter((name) => name.toLowerCase().includes(find.toLowerCase())), [names, find]);
  const flip = (name) => setParams({ show: (shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name]).join(",") });
  return html`<aside class="card metric-list" aria-label="metrics">
    <input type="search" class="find" placeholder="Search metrics" aria-label="search metrics" value=${find} onInput=${(event) => setParams({ find: event.target.value })} />
    <p class="soft find-count">${find ? `${matching.length} match and are drawn` : `${names.length} metrics, ${shown.length} drawn`}</p>
    <div class="metric-scroll" tabindex="0" role="region" aria-label="list of metrics">
      ${byGroup(matching).map(([group, members]) => html`<fieldset key=${group}><legend>${group}</legend>
        ${members.map((name) => html`<label key=${name} title=${about[name] ?? ""}>
          <input type="checkbox" checked=${shown.includes(name)} onChange=${() => flip(name)} /><span>${name.includes("/") ? name.slice(group.length + 1) : name}</span></label>`)}
      </fieldset>`)}
    </div>
  </aside>`;
});

// The curves: every metric of the run, several runs over one another.

const MOST_DRAWN = 40;

const matching = (names, find) => [...names, SPREAD].sort().filter((name) => name.toLowerCase().includes(find.toLowerCase()));

// What is drawn, of the names that are known so far.
function useDrawn(options, names) {
  return useMemo(() => {
    const shown = options.show ?? [SPREAD, ...USUAL.filter((name) => (!names.length || names.includes(name)) && !(serves.value && name === "batch/equal_groups"))];
    return { shown, wanted: options.find ? matching(names, options.find) : shown };
  }, [options.show?.join(), options.find, names]);
}

export function CurvesView() {
  const options = readOptions(route.value.params);
  const runs = overlaidRuns.value;
  const [known, setKnown] = useState([]);
  const { shown, wanted } = useDrawn(options, known);
  const drawn = wanted.slice(0, MOST_DRAWN);
  const columns = drawn.filter((name) => name !== SPREAD);
  const { request, tables, names, about } = useMetrics(runs, columns.length ? columns : USUAL.slice(0, 1));
  useEffect(() => {
    if (names.join() !== known.join()) setKnown(names);
  }, [names]);
  if (!tables || (names.length && !known.length)) return html`<${Awaiting} request=${{ ...request, data: null }} what="the curves" />`;
  return html`<div class="view-head"><h1>Curves</h1><${CurveOptions} options=${options} /></div>
    <div class="curves">
      <${MetricList} names=${names} about=${about} shown=${shown} find=${options.find} />
      <div class="curve-grid">
        ${drawn.map((name) => (name === SPREAD ? html`<${SpreadChart} key=${name} runs=${runs} options=${options} />`
          : html`<${MetricChart} key=${name} name=${name} about=${about[name]} tables=${tables} runs=${runs} options=${options} />`))}
        ${drawn.length === 0 && html`<${Notice}>${options.find ? "No metric has this in its name." : "Tick a metric to draw it."}<//>`}
        ${wanted.length > drawn.length && html`<${Notice}>${wanted.length - drawn.length} more match; search for less.<//>`}
      </div>
    </div>`;
}
