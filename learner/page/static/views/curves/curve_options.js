// How curves are drawn, kept in the address: which metrics, which runs lie over one another, smoothing and axes.
import { html } from "../../core/html.js";
import { setParams } from "../../core/route.js";
import { currentRun, overlaidRuns, runs } from "../../data/runs.js";

export const USUAL = ["reward/mean", "reward/std", "policy/entropy", "policy/approx_kl", "policy/clipfrac", "policy/max_logprob_diff", "staleness/mean", "batch/equal_groups", "throughput/tokens_per_s", "time/step_s", "time/wait_s", "critic/explained_variance"];
export const SPREAD = "reward/spread";

export function readOptions(params) {
  return { show: params.show === undefined ? null : params.show.split(",").filter(Boolean), find: params.find ?? "", smooth: Number(params.smooth ?? 0), logY: params.logy === "1", logX: params.logx === "1" };
}

function Toggle({ on, name, children }) {
  return html`<button type="button" aria-pressed=${on} onClick=${() => setParams({ [name]: on ? undefined : "1" })}>${children}</button>`;
}

function Overlay() {
  const others = runs.value.filter((one) => one.id !== currentRun.value);
  if (!others.length) return null;
  const chosen = overlaidRuns.value;
  const flip = (id) => setParams({ with: (chosen.includes(id) ? chosen.filter((one) => one !== id) : [...chosen, id]).filter((one) => one !== currentRun.value).join(",") });
  return html`<fieldset class="overlay"><legend>Runs</legend>
    <span class="key tone-1">${currentRun.value}</span>
    ${others.map((one) => html`<label key=${one.id} class=${chosen.includes(one.id) ? `key tone-${(chosen.indexOf(one.id) % 6) + 1}` : "key off"}>
      <input type="checkbox" checked=${chosen.includes(one.id)} onChange=${() => flip(one.id)} />${one.id}</label>`)}
  </fieldset>`;
}

export function CurveOptions({ options }) {
  return html`<div class="curve-options">
    <label>Smoothing <input type="range" min="0" max="0.98" step="0.02" value=${options.smooth} aria-valuetext=${options.smooth.toFixed(2)}
      onInput=${(event) => setParams({ smooth: Number(event.target.value) || undefined })} /><span class="soft smooth-value">${options.smooth.toFixed(2)}</span></label>
    <${Toggle} on=${options.logY} name="logy">log y<//><${Toggle} on=${options.logX} name="logx">log x<//>
    <${Overlay} />
  </div>`;
}
