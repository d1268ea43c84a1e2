// Every score that was reported: by which judge, when, and what became of it.
import { html } from "../../core/html.js";
import { clock, score } from "../../core/format.js";

const VERDICTS = { stored: "counts, unless revised", revised: "took the place of an earlier one", conflict: "refused: another value is stored", closed: "refused: the episode was closed", "no rounds": "refused: there is nothing to score" };

export function ScoreTable({ scores }) {
  return html`<section class="card"><div class="card-head"><h2>Scores</h2><span class="soft">${scores.length}</span></div>
    ${scores.length === 0 ? html`<p class="card-body soft">No judge has reported a score.</p>`
    : html`<div class="table-box" tabindex="0" role="region" aria-label="scores"><table><thead><tr><th scope="col" class="number">Value</th><th scope="col">Of</th><th scope="col">Judge</th><th scope="col">Verdict</th><th scope="col">At</th></tr></thead>
      <tbody>${scores.map((one, index) => html`<tr key=${index}><td class="number"><strong>${score(one.value)}</strong></td><td>${one.part}${one.round !== null ? ` ${one.round}` : ""}</td><td class="agent-line">${one.judge || "environment"}</td>
        <td title=${VERDICTS[one.verdict]}>${one.verdict}</td><td class="figure">${clock(one.told_at)}</td></tr>
        ${one.hint && html`<tr key=${`hint ${index}`}><td></td><td colspan="4" class="soft agent-line">hint: ${one.hint}</td></tr>`}`)}</tbody></table></div>`}</section>`;
}
