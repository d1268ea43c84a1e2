// The curves: every metric of the run, several runs over one another.
import { html, useMemo } from "../../core/html.js";
import { route } from "../../core/route.js";
import { overlaidRuns } from "../../data/runs.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { CurveOptions, SPREAD, USUAL, readOptions } from "./curve_options.js";
import { MetricChart } from "./metric_chart.js";
import { useMetrics } from "./metric_data.js";
import { MetricList } from "./metric_list.js";
import { SpreadChart } from "./spread_chart.js";

const MOST_DRAWN = 40;

export function CurvesView() {
  const options = readOptions(route.value.params);
  const runs = overlaidRuns.value;
  const { request, tables, names, about } = useMetrics(runs, null);
  const shown = useMemo(() => options.show ?? [SPREAD, ...USUAL.filter((name) => names.includes(name))], [options.show?.join(), names]);
  const pending = Awaiting({ request, what: "the curves" });
  if (pending && !tables) return pending;
  const wanted = options.find ? [SPREAD, ...names].filter((name) => name.toLowerCase().includes(options.find.toLowerCase())) : shown;
  const drawn = wanted.slice(0, MOST_DRAWN);
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
