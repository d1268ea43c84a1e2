// Why something was not trained: each reason with how often, what it means, and what to change.
import { html } from "../../core/html.js";
import { count } from "../../core/format.js";
import { link } from "../../core/route.js";
import { ledgerRevision } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { useThrottled } from "../../data/use_throttled.js";
import { Awaiting, Notice } from "../../parts/notice.js";

function Reason({ one, run, most }) {
  const filter = one.filter === null ? null : Object.fromEntries(new URLSearchParams(one.filter));
  return html`<li class="reason">
    <span class="reason-number">${count(one.number)}<span class="soft"> ${one.what}${one.number === 1 ? "" : "s"}</span></span>
    <span class="reason-bar" aria-hidden="true"><span style=${{ width: `${(100 * one.number) / most}%` }}></span></span>
    <div class="reason-text"><h2 class="mono">${one.reason}</h2><p>${one.sentence}</p>${one.remedy && html`<p class="soft">${one.remedy}</p>`}</div>
    <span class="reason-link">${filter && html`<a href=${link("episodes", { params: { run, ...filter } })}>Show them</a>`}</span>
  </li>`;
}

export function UntrainedView({ run }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(run, (signal) => source.untrained(run, signal), revision);
  const reasons = request.data?.reasons ?? [];
  // Bars compare what is counted in the same unit.
  const most = {};
  for (const one of reasons) most[one.what] = Math.max(most[one.what] ?? 1, one.number);
  return html`<div class="view-head"><h1>Not trained</h1><span class="soft">what was made and not learned from, and why</span></div>
    ${!request.data ? html`<${Awaiting} request=${request} what="reasons" />`
    : reasons.length === 0 ? html`<${Notice}>Everything that ended was trained, or waits for it.<//>`
    : html`<ol class="card reasons">${reasons.map((one) => html`<${Reason} key=${`${one.what} ${one.reason}`} one=${one} run=${run} most=${most[one.what]} />`)}</ol>`}`;
}
