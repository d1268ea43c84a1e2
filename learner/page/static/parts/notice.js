// A sentence in the place of something that is not there.
import { html } from "../core/html.js";

export function Notice({ tone = "idle", children }) {
  return html`<p class=${`notice ${tone}`} role=${tone === "bad" ? "alert" : "status"}>${children}</p>`;
}

// What a view shows while its first answer is under way, or in place of one that failed.
export function Awaiting({ request, what }) {
  if (request.error) return html`<${Notice} tone="bad">${request.error.message}<//>`;
  if (!request.data) return html`<p class="boot">Loading ${what} …</p>`;
  return null;
}
