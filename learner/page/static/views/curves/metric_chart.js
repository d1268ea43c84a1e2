// One metric of one or several runs over their steps.
import { html, useMemo } from "../../core/html.js";
import uPlot from "../../vendor/uplot.js";
import { ChartCard } from "./chart_card.js";
import { positive, smooth } from "./smoothing.js";

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
