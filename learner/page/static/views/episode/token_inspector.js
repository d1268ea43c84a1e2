// The exact figures of one token.
import { html } from "../../core/html.js";
import { count, figure } from "../../core/format.js";

const exact = (value) => (value === null ? "–" : Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-3 ? value.toExponential(4) : value.toFixed(6));

function trainedWord(token) {
  if (!token.sampled) return "no: it was given";
  if (!token.mask) return "no: masked in this branch";
  return token.trained ? "yes" : "no: without weight in the loss";
}

export function TokenInspector({ token }) {
  if (!token) return html`<aside class="inspector card" aria-label="the token's figures"><p class="soft">Point at a token, or press an arrow key.</p></aside>`;
  const rows = [
    ["position", count(token.position)], ["id", String(token.id)], ["round", figure(token.round)], ["version", token.version === null ? "–" : `v${token.version}`],
    ["log-probability", exact(token.logprob)], ["probability", token.logprob === null ? "–" : figure(Math.exp(token.logprob))], ["learner's", exact(token.learner)], ["learner – engine", exact(token.difference)],
    ["at the step's start", exact(token.startLogprob)], ["advantage", exact(token.advantage)], ["trained", trainedWord(token)],
  ];
  return html`<aside class="inspector card" aria-label="the token's figures"><p class="inspector-piece mono">${token.piece === "" ? "(part of a character)" : JSON.stringify(token.piece)}</p>
    <dl class="facts">${rows.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="mono">${value}</dd>`)}</dl></aside>`;
}
