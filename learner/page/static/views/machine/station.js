// One part of the machine: its figures; its border says that it waits, or that others wait for it, which the list of waits explains.
import { html } from "../../core/html.js";
import { engineFacts } from "./stations.js";
import { Meter } from "./meter.js";

function Engine({ engine }) {
  const { version, load, kv } = engineFacts(engine);
  return html`<li class=${engine.is_up ? "engine" : "engine down"}>
    <span class="engine-name">${engine.name}</span>
    ${engine.is_up ? html`<span class="soft">${version}</span><span class="engine-load">${load}</span>
      <${Meter} value=${engine.kv_share} label=${`KV cache of ${engine.name}`} /><span class="soft engine-kv">KV ${kv}</span>`
      : html`<span class="engine-load">down</span>`}
  </li>`;
}

export function Station({ station, state, waits }) {
  const { figure, of, unit, lines, fill, engines, word } = station.show(state);
  const isOne = (side) => waits.some((one) => one[side] === station.name);
  const tone = isOne("for") ? "is-waited-for" : isOne("who") ? "is-waiting" : "";
  return html`<li class=${`station station-${station.name} ${tone}`}>
    <div class="station-head"><h3>${station.label}</h3>${word && html`<span class="soft">${word}</span>`}</div>
    <p class="station-figure">${figure}${of && html`<span class="of"> / ${of}</span>`}</p>
    <p class="station-unit">${unit}</p>
    ${fill !== undefined && html`<${Meter} value=${fill} label=${unit} />`}
    ${engines && html`<ul class="engines">${engines.slice(0, 8).map((one) => html`<${Engine} key=${one.name} engine=${one} />`)}</ul>`}
    ${lines.filter(Boolean).map((line) => html`<p class="station-line" key=${line}>${line}</p>`)}
  </li>`;
}
