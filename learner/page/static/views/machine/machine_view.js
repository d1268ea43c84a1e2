// The machine: its loops as they are now, what waits on what, the groups that wait to be trained, and all of it over time.
import { html, useMemo } from "../../core/html.js";
import { clock, figure } from "../../core/format.js";
import { machineNow } from "../../data/live.js";
import { currentEntry } from "../../data/runs.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { Flow, Waits } from "./flow.js";
import { GroupTable } from "./group_table.js";
import { History } from "./history.js";
import { completed } from "./stations.js";

const ENDS = { finished: "The run has ended.", stopped: "The run was stopped.", failed: "The run failed.", killed: "The run was killed.", unknown: "Whether the run lives is not known." };

function Ending({ entry, at }) {
  if (!entry || !ENDS[entry.state]) return null;
  const tone = entry.state === "failed" || entry.state === "killed" ? "bad" : "idle";
  return html`<${Notice} tone=${tone}>${ENDS[entry.state]}${entry.error && html` <span class="mono">${entry.error}</span>`}
    ${at && html` What is drawn is the machine as it was at ${clock(at)}.`}<//>`;
}

export function MachineView({ run }) {
  const request = useRequest(run, (signal) => source.machine(run, { points: 600 }, signal));
  const groups = useMemo(() => html`<${GroupTable} run=${run} />`, [run]); // it follows the ledger, not the machine
  const pending = Awaiting({ request, what: "the machine" });
  if (pending) return pending;
  const now = completed(machineNow.value[run] ?? request.data.now);
  return html`<div class="stack">
    <div class="view-head"><h1>Machine</h1>${now && html`<span class="soft">as of ${clock(now.at)}${now.phase ? `, ${now.phase}` : ""}, step ${figure(now.step)}</span>`}</div>
    <${Ending} entry=${currentEntry.value} at=${now?.at} />
    ${now ? html`<${Flow} state=${now} /><${Waits} waits=${now.waits} />` : html`<${Notice}>No state of this run's machine was recorded.<//>`}
    ${groups}
    <${History} history=${request.data.history} now=${now} />
  </div>`;
}
