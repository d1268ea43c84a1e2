// What comes by itself is drawn together: the state that an event tells, and the answers of the requests that follow from it. A
// frame costs a browser more than what changes in it, and a look of the server so becomes one frame.
import { batch } from "../core/html.js";

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
