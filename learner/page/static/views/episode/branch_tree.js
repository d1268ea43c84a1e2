// The tree of an episode: its rounds in order, each in the lane of its branch, with the cause where a branch broke off.
import { html, useState } from "../../core/html.js";
import { figure, plural, score } from "../../core/format.js";
import { setParams } from "../../core/route.js";

const AT_FIRST = 200;
const MOST_LANES = 8;

function Cause({ round }) {
  if (!round.cause) return null;
  return html`<p class="cause"><span class=${`state ${round.cause_expected ? "idle" : "warn"}`}>${round.cause}</span> <span class="soft">${round.cause_sentence}</span></p>`;
}

function Round({ round, branch, lane }) {
  const versions = round.versions.length > 1 ? `v${round.versions[0]}–${round.versions.at(-1)}` : round.versions.length ? `v${round.versions[0]}` : "";
  return html`<li class=${`round lane-${lane % 6} ${round.branch === branch ? "on" : ""}`}>
    <${Cause} round=${round} />
    <button type="button" class="round-button" aria-pressed=${round.branch === branch} onClick=${() => setParams({ branch: round.branch || undefined, at: undefined })} style=${{ marginLeft: `${Math.min(lane, MOST_LANES) * 14}px` }}>
      <span class="knot" aria-hidden="true"></span><strong>${round.round}</strong>${round.parent !== null && round.parent !== round.round - 1 && html`<span class="soft">after ${round.parent}</span>`}
      <span class=${round.finish === "stop" || round.finish === "tool_calls" ? "soft" : "finish-bad"}>${round.finish}</span>
      <span class="round-figures soft">${figure(round.tail)} + ${figure(round.sampled)} ${versions}${round.scores.length ? ` · ${score(round.scores.at(-1).value)}` : ""}</span></button></li>`;
}

export function BranchTree({ detail, branch }) {
  const [all, setAll] = useState(false);
  const { rounds, branches } = detail;
  const shown = all ? rounds : rounds.slice(0, AT_FIRST);
  return html`<section class="card"><div class="card-head"><h2>Branches</h2><span class="soft">${plural(branches.length, "branch", "branches")}, ${plural(rounds.length, "round")}</span></div>
    ${branches.length > 1 && html`<div class="card-body branch-choice"><label class="soft">Shown <select value=${branch} onChange=${(event) => setParams({ branch: Number(event.target.value) || undefined, at: undefined })}>
      ${branches.map((one) => html`<option key=${one.branch} value=${one.branch} selected=${one.branch === branch}>branch ${one.branch}: ${figure(one.tokens)} tokens${one.aborted ? ", given up" : `, ${figure(one.trained_tokens)} to train`}</option>`)}</select></label></div>`}
    <ol class="rounds" aria-label="rounds: new prompt tokens + sampled tokens">${shown.map((one) => html`<${Round} key=${one.round} round=${one} branch=${branch} lane=${one.branch} />`)}</ol>
    ${shown.length < rounds.length && html`<div class="card-body"><button type="button" onClick=${() => setAll(true)}>Show all ${figure(rounds.length)} rounds</button></div>`}</section>`;
}
