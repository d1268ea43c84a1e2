// The head of an episode: its state, the way to its neighbours, and why it was not trained.
import { html } from "../../core/html.js";
import { clock, figure, plural, score } from "../../core/format.js";
import { useKeys } from "../../core/keys.js";
import { go, link, route } from "../../core/route.js";
import { Notice } from "../../parts/notice.js";
import { State } from "../../parts/state_mark.js";
import { filtersOf } from "../episodes/filters.js";
import { ListWalk } from "./list_walk.js";

function GroupWalk({ neighbours, episode, run, part }) {
  const params = { run, ...filtersOf(route.value.params), part };
  const to = (id) => id && go(link("episode", { id, params }));
  useKeys({ "[": () => to(neighbours.previous), "]": () => to(neighbours.next) });
  return html`<span class="walk" role="group" aria-label="in its group"><button type="button" disabled=${!neighbours.previous} onClick=${() => to(neighbours.previous)}>←<kbd>[</kbd><span class="unseen">previous in group</span></button>
    <button type="button" disabled=${!neighbours.next} onClick=${() => to(neighbours.next)}>→<kbd>]</kbd><span class="unseen">next in group</span></button>
    <a class="soft" href=${link("group", { id: String(episode.group_id), params: { run } })}>group ${episode.group_id} <span class="figure">(${plural(neighbours.group.length, "episode")})</span></a></span>`;
}

export function Heading({ detail, run, part }) {
  const { episode, neighbours } = detail;
  return html`<div class="view-head episode-head"><h1 class="mono">${episode.episode_id}</h1><${State} state=${episode.state} title=${episode.reason ?? ""} />
      <span class="figure">score <strong>${score(episode.score)}</strong></span>
      ${episode.step !== null && html`<a href=${link("step", { id: String(episode.step), params: { run } })}>step ${figure(episode.step)}</a>`}
      <span class="actions"><${GroupWalk} neighbours=${neighbours} episode=${episode} run=${run} part=${part} /><${ListWalk} run=${run} seq=${episode.seq} part=${part} /></span></div>
    ${detail.why_untrained && html`<${Notice} tone="warn"><strong>Not trained.</strong> ${detail.why_untrained}<//>`}`;
}

export function Facts({ detail }) {
  const { episode, task, advantages } = detail;
  const rows = [
    ["task", episode.task_id], ["agent", episode.agent], ["source", task?.data_source], ["group is", episode.group_state], ["reason", episode.reason ?? episode.group_reason],
    ["started", episode.started_at === null ? null : clock(episode.started_at)], ["attempt", episode.attempt > 0 ? episode.attempt + 1 : null], ["rounds", figure(episode.rounds)], ["tokens that may be trained", figure(episode.tokens)],
    ["versions", episode.version === null ? null : episode.version === episode.max_version ? figure(episode.version) : `${figure(episode.version)} to ${figure(episode.max_version)}`],
    ["advantage", advantages && `${figure(advantages.mean)}${advantages.min === advantages.max ? "" : ` (${figure(advantages.min)} to ${figure(advantages.max)})`}`],
    ["ground truth", task?.ground_truth === null || task?.ground_truth === undefined ? null : typeof task.ground_truth === "string" ? task.ground_truth : JSON.stringify(task.ground_truth)],
  ];
  return html`<section class="card"><div class="card-head"><h2>Facts</h2></div><dl class="card-body facts">${rows.filter(([, value]) => value).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="agent-line">${value}</dd>`)}</dl></section>`;
}
