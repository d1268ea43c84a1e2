// The loops as they are now: from tasks to the learner, whose weights go back to the engines.
import { html } from "../../core/html.js";
import { figure } from "../../core/format.js";
import { STATIONS } from "./stations.js";
import { Station } from "./station.js";

export function Flow({ state }) {
  const behind = state.engines.filter((one) => one.is_up && one.version !== null && one.version < state.version).length;
  return html`<section class="flow" aria-label="the machine now">
    <ol class="stations">${STATIONS.map((one) => html`<${Station} key=${one.name} station=${one} state=${state} waits=${state.waits} />`)}</ol>
    <p class="weights"><span>weights of version ${figure(state.version)}</span>
      <span class="soft">${behind ? `${behind} of ${state.engines.length} engines have an older one` : "in every engine"}</span></p>
  </section>`;
}

export function Waits({ waits }) {
  return html`<section class="card"><div class="card-head"><h2>Who waits for whom</h2></div>
    <div class="card-body">${waits.length === 0 ? html`<p class="soft">Nothing waits: every part has work.</p>`
    : html`<ul class="waits">${waits.map((one) => html`<li key=${`${one.who} ${one.for}`}>
        <span class="wait-pair"><strong>${one.who}</strong><span class="arrow" aria-label="waits for">→</span><strong>${one.for}</strong></span>
        <span class="soft">${one.why}</span></li>`)}</ul>`}</div></section>`;
}
