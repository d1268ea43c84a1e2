// What changed, as the server sends it. Views read these signals; a revision tells that something has to be asked again.
import { batch, effect, signal } from "../core/html.js";
import { drawTogether } from "./draw_together.js";
import { loadRuns, overlaidRuns, patchRun, tick } from "./runs.js";
import { source } from "./source.js";

export const connection = signal(source.isSnapshot ? "file" : "connecting");
export const ledgerRevision = signal(0);
export const ledgerNow = signal({}); // by run: counts and version
export const machineNow = signal({}); // by run: the last state of its machine
export const metricRows = signal([]); // rows that came since the page was opened: {run, row}
export const generation = signal(0); // grows when everything has to be fetched again

const MOST_ROWS = 20000;

function listen(stream) {
  const on = (name, handle) => stream.addEventListener(name, (event) => {
    if (event.lastEventId) lastTick = event.lastEventId;
    const body = JSON.parse(event.data);
    batch(() => handle(body));
  });
  stream.onopen = () => { connection.value = "open"; };
  stream.onerror = () => { connection.value = stream.readyState === EventSource.CLOSED ? "closed" : "lost"; };
  on("reset", (body) => { lastTick = body.tick ?? lastTick; generation.value += 1; loadRuns(); });
  on("run", (body) => drawTogether(() => patchRun(body)));
  on("runs", () => loadRuns());
  on("machine", ({ run, now }) => drawTogether(() => { machineNow.value = { ...machineNow.value, [run]: now }; }));
  on("metrics", ({ run, rows }) => drawTogether(() => {
    metricRows.value = [...metricRows.value, ...rows.map((row) => ({ run, row }))].slice(-MOST_ROWS);
  }));
  // At once: views ask for what they show of the ledger, and the answers are drawn with the rest.
  on("ledger", ({ run, counts, version }) => {
    ledgerNow.value = { ...ledgerNow.value, [run]: { counts, version } };
    ledgerRevision.value += 1;
  });
}

let lastTick = null;
let stream = null;
let watched = "";

// A page that nobody sees asks for nothing; when it is seen again the server tells what it missed.
const isSeen = signal(!document.hidden);

export function followRuns() {
  if (source.isSnapshot) return;
  document.addEventListener("visibilitychange", () => { isSeen.value = !document.hidden; });
  effect(() => {
    const wanted = isSeen.value ? overlaidRuns.value : [];
    if (!tick.value || wanted.join() === watched) return;
    watched = wanted.join();
    stream?.close();
    stream = null;
    if (!wanted.length) return;
    stream = source.events(wanted, lastTick ?? tick.value);
    listen(stream);
  });
}
