// Data that lives: the runs, what changes of them, requests that follow, and when to draw.
import { batch, useEffect, useRef, useState, computed, signal, route, effect, useLayoutEffect } from "./core.js";
import { source } from "./sources.js";

// What comes by itself is drawn together: the state that an event tells, and the answers of the requests that follow from it. A
// frame costs a browser more than what changes in it, and a look of the server so becomes one frame.
const WAIT_MS = 150; // an answer takes less, as a rule; a reader sees no difference
let changes = [];

export function drawTogether(change) {
  changes.push(change);
  if (changes.length > 1) return;
  setTimeout(() => {
    const due = changes;
    changes = [];
    batch(() => due.forEach((one) => one()));
  }, WAIT_MS);
}

// A signal that changes often, read at most once in a while: the last value always arrives.

// The server tells what is new every second, or less often: what is so old is asked for again with what it tells, and drawn with
// it, and not a moment later by a clock of its own.
const OLD_MS = 1500;
export const REFRESH_MS = 2000;

export function useThrottled(source) {
  const [value, setValue] = useState(source.peek());
  const timer = useRef(null);
  const last = useRef(0);
  useEffect(() => {
    const take = () => {
      clearTimeout(timer.current);
      timer.current = null;
      last.current = Date.now();
      setValue(source.peek());
    };
    const stop = source.subscribe(() => {
      const age = Date.now() - last.current;
      if (age >= OLD_MS) take();
      else timer.current ??= setTimeout(take, REFRESH_MS - age);
    });
    return () => {
      stop();
      clearTimeout(timer.current);
      timer.current = null;
    };
  }, [source]);
  return value;
}

// The runs that the page knows and which one is looked at; the address names it, else the server's first choice.

export const runs = signal([]);
export const tick = signal(null);
export const loadProblem = signal(null);
const first = signal(null);

export const currentRun = computed(() => route.value.params.run ?? first.value);
export const currentEntry = computed(() => runs.value.find((one) => one.id === currentRun.value) ?? null);

// Whether the present run serves users (`understudy serve`): its episodes are their sessions.
export const serves = computed(() => Boolean(currentEntry.value?.serves));

export async function loadRuns() {
  try {
    const answer = await source.runs();
    batch(() => {
      runs.value = answer.runs;
      first.value = answer.default;
      tick.value ??= answer.tick;
      loadProblem.value = null;
    });
  } catch (problem) {
    loadProblem.value = problem.message;
  }
}

export function patchRun(changes) {
  runs.value = runs.value.map((one) => (one.id === changes.run ? { ...one, ...changes } : one));
}

// The runs whose curves are drawn: the present one, and those that were laid over it.
export const overlaidRuns = computed(() => {
  const more = (route.value.params.with ?? "").split(",").filter(Boolean);
  return [...new Set([currentRun.value, ...more])].filter(Boolean);
});

// What changed, as the server sends it. Views read these signals; a revision tells that something has to be asked again.

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

// A request as a component sees it: the last answer stays while the next one is under way, so that nothing flickers; one that
// is no longer wanted is cancelled. `revision`: the same is asked for again because the run went on.

export function useRequest(what, request, revision = "") {
  const key = what === null ? null : `${what} ${revision}`;
  const [state, setState] = useState({ data: null, error: null, key: null });
  const wanted = useRef(request);
  const answered = useRef(null);
  wanted.current = request;
  // Not an effect after the frame: waiting for one makes the browser draw one.
  useLayoutEffect(() => {
    if (key === null) return undefined;
    const cancel = new AbortController();
    const again = answered.current === what;
    const take = (change) => {
      const apply = () => {
        if (cancel.signal.aborted) return;
        answered.current = what;
        setState(change);
      };
      if (again) drawTogether(apply);
      else apply();
    };
    wanted.current(cancel.signal).then(
      (data) => take({ data, error: null, key }),
      (problem) => take((last) => ({ data: last.data, error: problem, key })),
    );
    return () => cancel.abort();
  }, [key]);
  return { data: state.data, error: state.error, answered: state.key, loading: state.key !== key };
}
