// Every metric of the runs, by group, with a search; what is ticked is drawn.
import { html, memo, useMemo } from "../../core/html.js";
import { setParams } from "../../core/route.js";
import { SPREAD } from "./curve_options.js";

function byGroup(names) {
  const groups = new Map();
  for (const name of names) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return [...groups];
}

export const MetricList = memo(({ names, about, shown, find }) => {
  const matching = useMemo(() => [...names, SPREAD].sort().filter((name) => name.toLowerCase().includes(find.toLowerCase())), [names, find]);
  const flip = (name) => setParams({ show: (shown.includes(name) ? shown.filter((one) => one !== name) : [...shown, name]).join(",") });
  return html`<aside class="card metric-list" aria-label="metrics">
    <input type="search" class="find" placeholder="Search metrics" aria-label="search metrics" value=${find} onInput=${(event) => setParams({ find: event.target.value })} />
    <p class="soft find-count">${find ? `${matching.length} match and are drawn` : `${names.length} metrics, ${shown.length} drawn`}</p>
    <div class="metric-scroll" tabindex="0" role="region" aria-label="list of metrics">
      ${byGroup(matching).map(([group, members]) => html`<fieldset key=${group}><legend>${group}</legend>
        ${members.map((name) => html`<label key=${name} title=${about[name] ?? ""}>
          <input type="checkbox" checked=${shown.includes(name)} onChange=${() => flip(name)} /><span>${name.includes("/") ? name.slice(group.length + 1) : name}</span></label>`)}
      </fieldset>`)}
    </div>
  </aside>`;
});
