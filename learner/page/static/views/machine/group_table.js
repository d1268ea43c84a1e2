// The groups that are open or ready: how old each is, and how many updates it has until it is too old to be trained.
import { html, memo } from "../../core/html.js";
import { count, duration, figure, score } from "../../core/format.js";
import { link } from "../../core/route.js";
import { ledgerRevision } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { useThrottled } from "../../data/use_throttled.js";
import { Awaiting } from "../../parts/notice.js";
import { State } from "../../parts/state_mark.js";

function Updates({ left }) {
  if (left === null) return html`<span class="soft">–</span>`;
  if (left === 0) return html`<span class="state bad">evicted at the next claim</span>`;
  return html`<span class=${left === 1 ? "state warn" : ""}>${count(left)}</span>`;
}

const Row = memo(({ group, run }) => {
  return html`<tr>
    <td><a href=${link("group", { id: String(group.group_id), params: { run } })}>${group.group_id}</a></td>
    <td class="clip">${group.task_id ?? "–"}</td>
    <td><${State} state=${group.state} /></td>
    <td class="number">${group.num_scored} / ${group.size}${group.num_lost ? html` <span class="soft">(${group.num_lost} lost)</span>` : ""}</td>
    <td class="number">${duration(group.age_s)}</td>
    <td class="number">${figure(group.max_version)}</td>
    <td class="number"><${Updates} left=${group.updates_until_stale} /></td>
    <td class="number">${score(group.mean)}${group.std !== null && html`<span class="soft"> ± ${score(group.std)}</span>`}</td>
  </tr>`;
});

export function GroupTable({ run }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(run, (signal) => source.groups(run, { state: "ready,open", limit: 100 }, signal), revision);
  const groups = request.data?.groups ?? [];
  return html`<section class="card"><div class="card-head"><h2>Groups that are open or ready</h2>
      <span class="soft">${groups.length}${request.data?.next ? "+" : ""}</span></div>
    ${!request.data ? html`<div class="card-body"><${Awaiting} request=${request} what="groups" /></div>`
    : groups.length === 0 ? html`<div class="card-body"><p class="soft">None.</p></div>`
    : html`<div class="table-box scroll" tabindex="0" role="region" aria-label="groups that are open or ready"><table>
      <thead><tr><th scope="col">Group</th><th scope="col">Task</th><th scope="col">State</th><th scope="col" class="number">Scored</th><th scope="col" class="number">Age</th>
        <th scope="col" class="number">Newest version</th><th scope="col" class="number">Updates until stale</th><th scope="col" class="number">Score</th></tr></thead>
      <tbody>${groups.map((one) => html`<${Row} key=${one.group_id} group=${one} run=${run} />`)}</tbody></table></div>`}
  </section>`;
}
