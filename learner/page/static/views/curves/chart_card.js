// A chart with its title, what it means, and the values under the cursor; a point opens its step.
import { html, useState } from "../../core/html.js";
import { figure } from "../../core/format.js";
import { go, link } from "../../core/route.js";
import { Chart } from "../../parts/chart.js";

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
