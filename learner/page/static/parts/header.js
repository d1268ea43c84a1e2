// The head of the page: which run, in which state, and the views.
import { html } from "../core/html.js";
import { figure } from "../core/format.js";
import { go, link, route } from "../core/route.js";
import { theme, toggleTheme } from "../core/theme.js";
import { connection } from "../data/live.js";
import { currentEntry, currentRun, runs } from "../data/runs.js";
import { source } from "../data/source.js";
import { State } from "./state_mark.js";

const TABS = [
  ["machine", "Machine", []],
  ["curves", "Curves", ["step"]],
  ["episodes", "Episodes", ["episode", "group"]],
  ["untrained", "Not trained", []],
  ["why", "Why", []],
];

function RunChoice() {
  const entries = runs.value;
  const choose = (event) => go(link(route.value.view === "episode" ? "episodes" : route.value.view, { params: { run: event.target.value } }));
  if (entries.length < 2) return html`<span class="run-name">${currentRun.value}</span>`;
  return html`<select class="run-name" aria-label="run" value=${currentRun.value} onChange=${choose}>
    ${entries.map((one) => html`<option key=${one.id} value=${one.id} selected=${one.id === currentRun.value}>${one.id}</option>`)}
  </select>`;
}

function RunState() {
  const entry = currentEntry.value;
  if (!entry) return null;
  return html`<span class="run-state" aria-live="polite">
    <${State} state=${entry.state} title=${entry.error ?? ""} />
    <span class="figure">step ${figure(entry.step)}${entry.steps_planned ? html`<span class="soft"> / ${figure(entry.steps_planned)}</span>` : ""}</span>
    ${entry.reward_last !== null && entry.reward_last !== undefined && html`<span class="figure reward-now">reward ${figure(entry.reward_last)}</span>`}
    ${connection.value === "lost" && html`<${State} state="waiting" title="The page's server does not answer; trying again." /> <span class="soft">no answer</span>`}
    ${connection.value === "closed" && html`<span class="state bad" title="Reload the page">connection closed</span>`}
    ${source.isSnapshot && html`<span class="soft">exported file</span>`}
  </span>`;
}

export function Header() {
  const { view, params } = route.value;
  const kept = { run: params.run };
  return html`<header class="head">
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to content</a>
    <div class="head-run"><span class="brand">understudy</span><${RunChoice} /><${RunState} /></div>
    <nav class="tabs" aria-label="views">
      ${TABS.map(([name, label, also]) => html`<a key=${name} href=${link(name, { params: kept })}
        aria-current=${name === view || also.includes(view) ? "page" : undefined}>${label}</a>`)}
    </nav>
    <button class="theme" type="button" onClick=${toggleTheme} aria-label=${`switch to ${theme.value === "dark" ? "light" : "dark"} colours`}>
      ${theme.value === "dark" ? "Light" : "Dark"}</button>
  </header>`;
}
