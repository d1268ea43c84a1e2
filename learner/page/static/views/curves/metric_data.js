// The columns of the metrics that are shown, with the rows that arrived since they were asked for.
import { useMemo } from "../../core/html.js";
import { metricRows } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";

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
