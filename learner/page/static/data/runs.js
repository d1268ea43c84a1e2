// The runs that the page knows and which one is looked at; the address names it, else the server's first choice.
import { batch, computed, signal } from "../core/html.js";
import { route } from "../core/route.js";
import { source } from "./source.js";

export const runs = signal([]);
export const tick = signal(null);
export const loadProblem = signal(null);
const first = signal(null);

export const currentRun = computed(() => route.value.params.run ?? first.value);
export const currentEntry = computed(() => runs.value.find((one) => one.id === currentRun.value) ?? null);

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
