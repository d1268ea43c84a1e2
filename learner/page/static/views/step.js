// One step: its figures, and the groups that it trained, each with the scores of its episodes.
import { html, useMemo, figure, plural, score, useKeys, go, link } from "../core.js";
import { serves, useRequest } from "../data.js";
import { Awaiting, Notice } from "../parts.js";
import { source } from "../sources.js";

const MOST = 500;

const sessionOf = ({ session, episode_id: id }) => session && `${session.user}: ${session.name || id}`;

function groupsOf(episodes) {
  const groups = new Map();
  for (const one of episodes) groups.set(one.group_id, [...(groups.get(one.group_id) ?? []), one]);
  return [...groups].map(([id, members]) => ({ id, members: members.sort((a, b) => a.sample - b.sample), task: members[0].task_id ?? sessionOf(members[0]) }));
}

function GroupRow({ group, run }) {
  const scores = group.members.map((one) => one.score).filter((value) => value !== null);
  const mean = scores.reduce((sum, value) => sum + value, 0) / (scores.length || 1);
  return html`<tr><td><a href=${link("group", { id: String(group.id), params: { run } })}>${group.id}</a></td><td class="clip">${group.task ?? "–"}</td>
    <td class="number">${scores.length ? score(mean) : "–"}</td>
    <td><span class="scores">${group.members.map((one) => html`<a key=${one.episode_id} class="score" href=${link("episode", { id: one.episode_id, params: { run } })}>${score(one.score)}</a>`)}</span></td></tr>`;
}

function Figures({ table, names, about }) {
  const known = names.filter((name) => table.columns[name]?.[0] !== null && table.columns[name]?.[0] !== undefined);
  return html`<section class="card"><div class="card-head"><h2>Figures</h2><span class="soft">${known.length}</span></div>
    <div class="table-box tall" tabindex="0" role="region" aria-label="figures of the step"><table><tbody>${known.map((name) => html`<tr key=${name} title=${about[name] ?? ""}>
      <th scope="row" class="mono">${name}</th><td class="number">${figure(table.columns[name][0])}</td></tr>`)}</tbody></table></div></section>`;
}

export function StepView({ run, id }) {
  const step = Number(id);
  const metrics = useRequest(`${run} ${step}`, (signal) => source.metrics({ runs: run, from: step, to: step }, signal));
  const trained = useRequest(`${run} ${step}`, (signal) => source.episodes(run, { step: String(step), limit: MOST }, signal));
  const groups = useMemo(() => groupsOf(trained.data?.episodes ?? []), [trained.data]);
  const to = (other) => other >= 0 && go(link("step", { id: String(other), params: { run } }));
  useKeys({ j: () => to(step + 1), k: () => to(step - 1), ArrowRight: () => to(step + 1), ArrowLeft: () => to(step - 1) });
  const table = metrics.data?.runs[run];
  return html`<div class="view-head"><h1>Step ${figure(step)}</h1>
      <span class="soft">${trained.data && plural(trained.data.total ?? trained.data.episodes.length, "episode trained", "episodes trained")}</span>
      <span class="actions"><button type="button" disabled=${step <= 0} onClick=${() => to(step - 1)}>Previous <kbd>k</kbd></button><button type="button" onClick=${() => to(step + 1)}>Next <kbd>j</kbd></button>
      <a class="button" href=${link("episodes", { params: { run, step: id } })}>Its episodes</a></span></div>
    <div class="step-parts">
      <div>${trained.data && groups.length === 0 ? html`<${Notice}>No episode of this step is in the ledger.<//>` : !trained.data ? html`<${Awaiting} request=${trained} what="episodes" />` : html`<section class="card"><div class="card-head"><h2>${serves.value ? "Sessions" : "Groups"} that it trained</h2><span class="soft">${groups.length}</span></div>
        <div class="table-box"><table><thead><tr><th scope="col">Group</th><th scope="col">${serves.value ? "Session" : "Task"}</th><th scope="col" class="number">Mean</th><th scope="col">Scores</th></tr></thead>
        <tbody>${groups.map((one) => html`<${GroupRow} key=${one.id} group=${one} run=${run} />`)}</tbody></table></div></section>`}</div>
      <div>${table?.step.length ? html`<${Figures} table=${table} names=${metrics.data.names} about=${metrics.data.about} />` : metrics.data ? html`<${Notice}>This step has no figures.<//>` : html`<${Awaiting} request=${metrics} what="figures" />`}</div>
    </div>`;
}
