// A row of the list. One that has not arrived yet keeps its place.
import { html, memo } from "../../core/html.js";
import { figure, score, short } from "../../core/format.js";
import { link } from "../../core/route.js";
import { State } from "../../parts/state_mark.js";

export const HEADER = html`<div class="erow ehead">
  <span role="columnheader">Episode</span><span role="columnheader">Task</span><span role="columnheader">State</span><span role="columnheader" class="number">Score</span><span role="columnheader">Its group</span>
  <span role="columnheader" class="number">Step</span><span role="columnheader" class="number">Rounds</span><span role="columnheader" class="number">Tokens</span><span role="columnheader" class="number">Version</span><span role="columnheader">Remarks</span></div>`;

function remarks(one) {
  const reason = one.reason ?? one.group_reason;
  return [reason, one.cut ? "cut at max_tokens" : null, ...(one.breaks ?? []), one.greedy ? "greedy" : null, one.attempt > 0 ? `attempt ${one.attempt + 1}` : null].filter(Boolean).join(" · ");
}

export const EpisodeRow = memo(({ episode: one, run, filters }) => {
  if (!one) return html`<div class="erow absent"><span role="gridcell">…</span></div>`;
  const told = remarks(one);
  return html`<div class="erow">
    <span role="gridcell" class="e-id"><a tabindex="-1" href=${link("episode", { id: one.episode_id, params: { run, ...filters } })}>${one.episode_id}</a></span>
    <span role="gridcell" class="e-task clip" title=${one.agent ? `${one.task_id} (${one.agent})` : one.task_id}>${one.task_id ?? "–"}</span>
    <span role="gridcell" class="e-state"><${State} state=${one.state} /></span>
    <span role="gridcell" class="e-score number">${score(one.score)}</span>
    <span role="gridcell" class="e-group soft">${one.group_state}</span>
    <span role="gridcell" class="e-step number">${figure(one.step)}</span>
    <span role="gridcell" class="e-rounds number">${figure(one.rounds)}</span>
    <span role="gridcell" class="e-tokens number">${short(one.tokens)}</span>
    <span role="gridcell" class="e-version number">${figure(one.version)}</span>
    <span role="gridcell" class="e-remarks clip soft" title=${told}>${told}</span>
  </div>`;
});
