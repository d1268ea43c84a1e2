// The versions that users of a live run are served: each with its gate, what it was trained on, and who is on it; and what was served when.
import { html, figure, link, plural, score, useState, when } from "../core.js";
import { currentEntry, ledgerNow, ledgerRevision, useRequest, useThrottled } from "../data.js";
import { Awaiting, Notice, State } from "../parts.js";
import { source } from "../sources.js";

const WHY = { first: "the first", gate: "it passed the gate", "by hand": "by hand" };

// Of a version that was served the history says more than its gate: it was taken back, where an older one followed it by hand.
export function stateOf(version, { served, history }) {
  if (version.version === served) return "served";
  const newestFirst = history.findIndex((one) => one.version === version.version);
  const after = history[newestFirst - 1];
  if (after && after.why === "by hand" && after.version < version.version) return "taken back";
  return newestFirst >= 0 && version.state === "candidate" ? "served before" : version.state;
}

function Gate({ version, margin }) {
  const { tasks, mean, parent_mean: before, least_difference: least, ...others } = version.gate;
  if (tasks === undefined) return html`<span class="soft">${version.score === null ? "no tasks were played" : `scores ${score(version.score)} at the gate's tasks`}</span>`;
  return html`<div>${mean !== undefined && html`<strong>${score(mean)}</strong> <span class="soft">to</span> ${score(before)}<br />`}
    ${least !== undefined && html`<span class="soft">difference above</span> <span class="figure">${score(least)}</span>${margin !== null && html`<span class="soft"> (needs ${score(-margin)})</span>`}<br />`}
    <span class="soft">${plural(tasks, "task")}${Object.entries(others).map(([name, value]) => `, ${name.replaceAll("_", " ")} ${figure(value)}`)}</span></div>`;
}

function TrainedOn({ version, run }) {
  const [isOpen, setIsOpen] = useState(false);
  if (!version.num_sessions) return html`<span class="soft">–</span>`;
  const more = version.num_sessions - version.sessions.length;
  return html`<div><button type="button" aria-expanded=${isOpen} onClick=${() => setIsOpen(!isOpen)}>${plural(version.num_sessions, "session")}</button>
    ${isOpen && html`<ul class="trained-on">${version.sessions.map((id) => html`<li key=${id}><a class="mono" href=${link("episode", { id, params: { run } })}>${id}</a></li>`)}${more > 0 && html`<li class="soft">and ${more} more</li>`}</ul>`}</div>`;
}

export function OnWhich({ data }) {
  const versions = [...new Set(data.sessions.map((one) => one.version))].sort((a, b) => b - a);
  return html`<section class="card"><div class="card-head"><h2>Who is on which</h2><span class="soft">open sessions, by the version that answered last</span></div>
    ${versions.length === 0 ? html`<p class="card-body soft">No session is open.</p>`
    : html`<div class="table-box scroll" tabindex="0" role="region" aria-label="who is on which version"><table><thead><tr><th scope="col">Version</th><th scope="col">Users</th><th scope="col">Heard last</th></tr></thead>
      <tbody>${versions.map((version) => {
        const on = data.sessions.filter((one) => one.version === version);
        return html`<tr key=${version}><td><strong>${figure(version)}</strong></td><td>${on.map((one) => html`<span class="on-it" key=${one.user}>${one.user} <span class="soft">${figure(one.number)}</span></span>`)}</td>
          <td class="figure soft">${when(Math.max(...on.map((one) => one.heard_at)))}</td></tr>`;
      })}</tbody></table></div>`}</section>`;
}

function Row({ version, data, run }) {
  const parent = data.versions.find((one) => one.version === version.parent);
  return html`<tr><td><strong>${figure(version.version)}</strong></td><td><${State} state=${stateOf(version, data)} /></td>
    <td data-label="compared to">${figure(version.parent)}</td><td data-label="gate"><${Gate} version=${version} margin=${data.margin} /></td>
    <td data-label="entropy"><span>${figure(version.entropy)}${parent?.entropy ? html` <span class="soft">(was ${figure(parent.entropy)})</span>` : ""}</span></td>
    <td data-label="trained on"><${TrainedOn} version=${version} run=${run} /></td><td class="figure" data-label="made">${when(version.made)}</td><td class="why-cell">${version.why}</td></tr>`;
}

function History({ history }) {
  return html`<section class="card"><div class="card-head"><h2>What was served when</h2></div>
    ${history.length === 0 ? html`<p class="card-body soft">No version was served yet.</p>`
    : html`<div class="table-box scroll" tabindex="0" role="region" aria-label="what was served when"><table><thead><tr><th scope="col">Since</th><th scope="col">Version</th><th scope="col">Why</th></tr></thead>
      <tbody>${history.map((one, index) => html`<tr key=${index}><td class="figure">${when(one.at)}</td><td>${figure(one.version)}</td><td>${WHY[one.why] ?? one.why}${one.why === "by hand" && history[index + 1]?.version > one.version ? html`: <strong>taken back</strong> from ${figure(history[index + 1].version)}` : ""}</td></tr>`)}</tbody></table></div>`}</section>`;
}

export function useVersions(run) {
  const revision = useThrottled(ledgerRevision);
  return useRequest(run, (signal) => source.versions(run, signal), `${ledgerNow.value[run]?.version ?? 0} ${revision}`);
}

export function VersionsView({ run }) {
  const request = useVersions(run);
  const pending = Awaiting({ request, what: "versions" });
  if (pending) return pending;
  const { data } = request;
  const { versions, served } = data;
  return html`<div class="view-head"><h1>Versions</h1><span class="soft">${served === null ? "no version is served yet" : html`version <strong>${figure(served)}</strong> ${currentEntry.value?.state === "live" ? "is" : "was"} served`}${data.has_tasks ? "" : "; there are no tasks for the gate (serve.gate.tasks): each candidate is served"}</span></div>
    ${versions.length === 0 ? html`<${Notice}>No version is kept. Without LoRA each update is served at once.<//>` : html`<div class="stack">
      <section class="card"><div class="table-box" tabindex="0" role="region" aria-label="versions that are kept"><table class="versions"><thead><tr><th scope="col">Version</th><th scope="col">State</th><th scope="col">Compared to</th><th scope="col">Gate: its mean to the served one's</th><th scope="col">Entropy</th><th scope="col">Trained on</th><th scope="col">Made</th><th scope="col">Why</th></tr></thead>
        <tbody>${versions.map((one) => html`<${Row} key=${one.version} version=${one} data=${data} run=${run} />`)}</tbody></table></div></section>
      <div class="two-cards"><${OnWhich} data=${data} /><${History} history=${data.history} /></div></div>`}`;
}
