// What holds learning back, worst first: a sentence, the figure that it rests on, and the remedy.
import { html } from "../core.js";
import { ledgerNow, useRequest } from "../data.js";
import { Awaiting, Notice } from "../parts.js";
import { source } from "../sources.js";

const WORDS = { stops: "stops learning", harms: "harms", slows: "costs time or data", note: "note" };
const MARKS = { stops: "bad", harms: "warn" };

function Finding({ one }) {
  return html`<li class=${`finding ${MARKS[one.severity] ?? "idle"}`}>
    <span class=${`state ${MARKS[one.severity] ?? "idle"}`}>${WORDS[one.severity] ?? one.severity}</span>
    <div><p class="finding-sentence">${one.sentence}</p>
      ${one.figure !== null && one.figure !== "" && html`<p><span class="soft">Figure </span><span class="mono">${String(one.figure)}</span></p>`}
      ${one.remedy && html`<p><span class="soft">Remedy </span>${one.remedy}</p>`}</div>
    <span class="mono soft finding-rule">${one.rule}</span></li>`;
}

export function WhyView({ run }) {
  const version = ledgerNow.value[run]?.version ?? 0;
  const request = useRequest(run, (signal) => source.findings(run, signal), version);
  const { findings = [], available } = request.data ?? {};
  return html`<div class="view-head"><h1>What holds learning back</h1><span class="soft">worst first; the same as <code>understudy why</code></span></div>
    ${!request.data ? html`<${Awaiting} request=${request} what="findings" />`
    : !available ? html`<${Notice} tone="warn">This version of the page cannot look for causes.<//>`
    : findings.length === 0 ? html`<${Notice}>No rule found anything that holds this run back.<//>`
    : html`<ol class="card findings">${findings.map((one) => html`<${Finding} key=${`${one.rule} ${one.sentence}`} one=${one} />`)}</ol>`}`;
}
