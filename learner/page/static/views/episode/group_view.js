// A group: its task, and its episodes side by side.
import { html } from "../../core/html.js";
import { duration, figure, plural, score } from "../../core/format.js";
import { link } from "../../core/route.js";
import { ledgerRevision } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { useThrottled } from "../../data/use_throttled.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { State } from "../../parts/state_mark.js";

function Row({ one, run }) {
  return html`<tr><td><a href=${link("episode", { id: one.episode_id, params: { run } })}>${one.episode_id}</a></td><td><${State} state=${one.state} /></td><td class="number"><strong>${score(one.score)}</strong></td>
    <td class="number">${figure(one.rounds)}</td><td class="number">${figure(one.tokens)}</td><td class="number">${figure(one.version)}</td>
    <td class="soft">${[one.reason, one.cut ? "cut at max_tokens" : null, ...one.breaks, one.greedy ? "greedy" : null].filter(Boolean).join(" · ")}</td></tr>`;
}

const text = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));

function Task({ task }) {
  if (!task) return html`<${Notice}>This group was opened by a request: it has no task.<//>`;
  return html`<section class="card"><div class="card-head"><h2>Task</h2><span class="soft mono">${task.task_id}</span></div>
    <ol class="turns">${(task.prompt ?? []).map((one, index) => html`<li class=${`turn role-${one.role}`} key=${index}><div class="turn-head"><strong>${one.role}</strong></div><div class="turn-body"><div class="agent-text">${text(one.content)}</div></div></li>`)}</ol>
    ${task.ground_truth !== null && task.ground_truth !== undefined && html`<dl class="card-body facts"><dt>ground truth</dt><dd class="agent-line">${text(task.ground_truth)}</dd></dl>`}</section>`;
}

export function GroupView({ run, id }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(`${run} ${id}`, (signal) => source.group(run, id, signal), revision);
  if (!request.data) return html`<${Awaiting} request=${request} what=${`group ${id}`} />`;
  const { group, task, episodes } = request.data;
  return html`<div class="view-head"><h1>Group ${group.group_id}</h1><${State} state=${group.state} title=${group.reason ?? ""} />
      ${group.mean !== null && html`<span class="figure">mean <strong>${score(group.mean)}</strong><span class="soft"> ± ${score(group.std)}</span></span>`}
      ${group.step !== null && html`<a href=${link("step", { id: String(group.step), params: { run } })}>step ${figure(group.step)}</a>`}
      <span class="soft">${plural(group.num_scored, "scored", "scored")} of ${group.size}, open since ${duration(group.age_s)}${group.reason ? `, ${group.reason}` : ""}</span></div>
    <div class="stack"><section class="card"><div class="table-box" tabindex="0" role="region" aria-label="episodes of the group"><table><thead><tr><th scope="col">Episode</th><th scope="col">State</th><th scope="col" class="number">Score</th><th scope="col" class="number">Rounds</th><th scope="col" class="number">Tokens</th><th scope="col" class="number">Version</th><th scope="col">Remarks</th></tr></thead>
      <tbody>${episodes.map((one) => html`<${Row} key=${one.episode_id} one=${one} run=${run} />`)}</tbody></table></div></section><${Task} task=${task} /></div>`;
}
