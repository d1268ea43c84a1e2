// What is shown of the tokens: the colour's meaning, the window, and its legend.
import { html } from "../../core/html.js";
import { count } from "../../core/format.js";
import { setParams } from "../../core/route.js";
import { SCALES } from "./scales.js";

export const SIZES = [256, 1024, 4096];

export function TokenBar({ colouring, size, window, context, onJump }) {
  const { start, total } = window;
  return html`<div class="token-bar"><div class="segmented" role="group" aria-label="coloured by">${Object.entries(SCALES).map(([name, one]) => html`<button key=${name} type="button" aria-pressed=${name === colouring} onClick=${() => setParams({ colour: name })}>${one.label}</button>`)}</div>
      <span class="push pager"><button type="button" disabled=${start === 0} onClick=${() => onJump(Math.max(0, start - size))} aria-label="earlier tokens">←</button>
        <span class="figure window-place">${count(start)}–${count(start + window.count - 1)} <span class="soft">of ${count(total)}</span></span>
        <button type="button" disabled=${start + window.count >= total} onClick=${() => onJump(start + size)} aria-label="later tokens">→</button>
        <label class="soft">Go to <input class="go-to" type="number" min="0" max=${total - 1} onChange=${(event) => event.target.value !== "" && onJump(Math.max(0, Math.min(total - 1, Number(event.target.value))))} /></label>
        <label class="soft">Window <select value=${size} onChange=${(event) => setParams({ size: event.target.value === "1024" ? undefined : event.target.value })}>${SIZES.map((one) => html`<option key=${one} value=${one} selected=${one === size}>${count(one)}</option>`)}</select></label></span></div>
    <div class="scale" aria-label="legend">${SCALES[colouring].legend(context).map(([tone, word]) => html`<span key=${tone + word} class=${`t ${tone}`}>${word || " "}</span>`)}<span class="t given">given</span><span class="soft"><kbd>n</kbd> next that stands out</span></div>`;
}
