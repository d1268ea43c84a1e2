// The spread of the reward, not only its mean: where the middle half and the middle four fifths of a step's episodes lie.
import { html, useMemo } from "../../core/html.js";
import { ledgerNow } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { ChartCard } from "./chart_card.js";
import { joinRuns } from "./metric_chart.js";
import { positive, smooth } from "./smoothing.js";

function linesOf(scores, { run, tone, options, alone }) {
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
    const parts = known.map(({ scores, run, tone }) => ({ step: scores.step, lines: linesOf(scores, { run, tone, options, alone: runs.length === 1 }) }));
    return joinRuns(parts.length ? parts : [{ step: [], lines: [] }], options.logX);
  }, [request.data, options.smooth, options.logY, options.logX]);
  return html`<${ChartCard} title="reward/spread" about="The scores of the episodes that a step trained: the mean, the median, the middle half, and from 10 % to 90 %." series=${series} data=${data} logY=${options.logY} logX=${options.logX} run=${runs[0]} />`;
}
