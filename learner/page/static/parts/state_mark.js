// A state as a word with a mark, never by colour alone.
import { html } from "../core/html.js";

const TONES = {
  trained: "good", scored: "good", validated: "good", ready: "good", live: "good", working: "good",
  running: "busy", leased: "busy", open: "busy", validating: "busy",
  pending: "idle", ended: "idle", closed: "idle", waiting: "idle", idle: "idle", stopped: "idle",
  failed: "bad", evicted: "bad", killed: "bad", dead: "bad", down: "bad", blocked: "warn", warning: "warn",
};

export function State({ state, title }) {
  return html`<span class="state ${TONES[state] ?? "idle"}" title=${title}>${state ?? "–"}</span>`;
}
