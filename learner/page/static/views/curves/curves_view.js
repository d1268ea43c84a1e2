// The curves: every metric of the run, several runs over one another.
import { html, useEffect, useMemo, useState } from "../../core/html.js";
import { route } from "../../core/route.js";
import { overlaidRuns } from "../../data/runs.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { CurveOptions, SPREAD, USUAL, readOptions } from "./curve_options.js";
import { MetricChart } from "./metric_chart.js";
import { useMetrics } from "./metric_data.js";
import { MetricList } from "./metric_list.js";
import { SpreadChart } from "./spread_chart.js";

const MOST_DRAWN = 40;

const matching = (names, find) => [...names, SPREAD].sort().filter((name) => name.toLowerCase().includes(find.toLowerCase()));

// What is drawn, of the names that are known so far.
function useDrawn(options, names) {
  return useMemo(() => {
    const shown = options.show ?? [SPREAD, ...USUAL.filter((name) => !names.length || names.includes(name))];
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
