// The fields that filter the list. Each is in the address, so that a link shows the same list.
import { html, useEffect, useRef, useState } from "../../core/html.js";
import { count } from "../../core/format.js";
import { route, setParams } from "../../core/route.js";
import { CLEARED, FILTERS, GROUP_STATES, SORTS, STATES } from "./filters.js";

const TYPING_MS = 150;

function Field({ name, label, type = "text", wide }) {
  const value = route.value.params[name] ?? "";
  const [typed, setTyped] = useState(value);
  const timer = useRef(null);
  useEffect(() => setTyped(value), [value]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const change = (event) => {
    const next = event.target.value;
    setTyped(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setParams({ [name]: next.trim() }), TYPING_MS);
  };
  return html`<label class=${`field ${wide ? "wide" : ""}`}><span>${label}</span><input type=${type} name=${name} value=${typed} step=${type === "number" ? "any" : undefined} onInput=${change} autocomplete="off" /></label>`;
}

function Choice({ name, label, options, counts }) {
  const value = route.value.params[name] ?? "";
  const all = value && !options.includes(value) ? [value, ...options] : options;
  return html`<label class="field"><span>${label}</span><select name=${name} value=${value} onChange=${(event) => setParams({ [name]: event.target.value })}>
    <option value="" selected=${value === ""}>any</option>
    ${all.map((one) => html`<option key=${one} value=${one} selected=${one === value}>${one}${counts?.[one] !== undefined ? ` (${count(counts[one])})` : ""}</option>`)}
  </select></label>`;
}

const keys = (counts) => Object.keys(counts ?? {}).sort((a, b) => counts[b] - counts[a]);

function Between({ label, low, high }) {
  return html`<span class="between" role="group" aria-label=${label}><${Field} name=${low} label=${`${label} from`} type="number" /><${Field} name=${high} label="to" type="number" /></span>`;
}

export function FilterBar({ facets }) {
  const { params } = route.value;
  const any = FILTERS.some((name) => params[name]);
  const [open, setOpen] = useState(["agent", "min_tokens", "max_tokens", "min_rounds", "max_rounds", "task"].some((name) => params[name]));
  return html`<form class="filters" role="search" aria-label="filter the episodes" onSubmit=${(event) => event.preventDefault()}>
    <${Field} name="q" label="Task or episode" type="search" wide />
    <${Field} name="step" label="Step" /><${Field} name="group" label="Group" />
    <${Choice} name="state" label="State" options=${STATES} counts=${facets?.state} />
    <${Choice} name="group_state" label="Group is" options=${GROUP_STATES} counts=${facets?.group_state} />
    <${Choice} name="reason" label="Reason" options=${keys(facets?.reason)} counts=${facets?.reason} />
    <${Choice} name="cause" label="Break" options=${["any", ...keys(facets?.cause)]} counts=${facets?.cause} />
    <${Between} label="Score" low="min_score" high="max_score" />
    ${open && html`<${Field} name="task" label="Task (exact)" /><${Choice} name="agent" label="Agent" options=${keys(facets?.agent)} counts=${facets?.agent} />
      <${Between} label="Tokens" low="min_tokens" high="max_tokens" /><${Between} label="Rounds" low="min_rounds" high="max_rounds" />`}
    <label class="check"><input type="checkbox" name="untrained" checked=${params.untrained === "1"} onChange=${(event) => setParams({ untrained: event.target.checked ? "1" : undefined })} />not trained</label>
    <label class="field"><span>Sort</span><select name="sort" value=${params.sort ?? "newest"} onChange=${(event) => setParams({ sort: event.target.value === "newest" ? undefined : event.target.value })}>
      ${SORTS.map(([value, label]) => html`<option key=${value} value=${value} selected=${value === (params.sort ?? "newest")}>${label}</option>`)}</select></label>
    <span class="filter-actions"><button type="button" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "Fewer" : "More"}</button>
    <button type="button" disabled=${!any} onClick=${() => setParams(CLEARED)}>Clear</button></span>
  </form>`;
}
