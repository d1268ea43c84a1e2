// One turn of a conversation. What an agent wrote goes in as text; thoughts and the results of tools can be folded away.
import { html, useState } from "../../core/html.js";
import { count, plural } from "../../core/format.js";
import { setParams } from "../../core/route.js";

const AT_FIRST = 6000;
const KINDS = { thought: "thought", tool_call: "tool call", tool_result: "tool result" };

function LongText({ text }) {
  const [all, setAll] = useState(false);
  if (text.length <= AT_FIRST || all) return html`<div class="agent-text">${text}</div>`;
  return html`<div class="agent-text">${text.slice(0, AT_FIRST)}</div><button type="button" onClick=${() => setAll(true)}>Show ${count(text.length - AT_FIRST)} more characters</button>`;
}

function Part({ part }) {
  if (part.kind === "text") return html`<${LongText} text=${part.text} />`;
  return html`<details class=${`part ${part.kind}`} open=${part.kind !== "thought" && part.text.length < 1500}><summary>${KINDS[part.kind] ?? part.kind}<span class="soft"> ${plural(part.text.length, "character")}</span></summary><${LongText} text=${part.text} /></details>`;
}

export function Turn({ turn }) {
  const seeTokens = (event) => {
    event.preventDefault();
    setParams({ part: "tokens", at: turn.token_start });
  };
  return html`<li class=${`turn role-${turn.sampled ? "assistant" : turn.role}`}>
    <div class="turn-head"><strong>${turn.role}</strong>
      ${turn.sampled && html`<span class="soft">round ${turn.round}</span>`}
      ${turn.sampled && html`<span class=${turn.trained ? "trained-mark" : "soft"}>${turn.trained ? "trained" : "not trained"}</span>`}
      ${turn.token_end > turn.token_start && html`<a class="turn-tokens soft" href="#tokens" onClick=${seeTokens}>${plural(turn.token_end - turn.token_start, "token")}</a>`}</div>
    <div class="turn-body">${turn.parts.map((part, index) => html`<${Part} key=${index} part=${part} />`)}
      ${turn.parts.length === 0 && html`<span class="soft">empty</span>`}
      ${turn.cut > 0 && html`<p class="soft">${count(turn.cut)} more characters are left out here; the tokens have them.</p>`}</div>
  </li>`;
}
