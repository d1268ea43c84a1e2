// Small parts of every view: a boundary for errors, notices, state marks, long lists, the head.
import { Component, html, useEffect, useLayoutEffect, useRef, useState, figure, go, link, route, theme, toggleTheme } from "./core.js";
import { connection, currentEntry, currentRun, runs, serves } from "./data.js";
import { source } from "./sources.js";

// A view that cannot be drawn says so in its place; the head and the other views stay.
export class Boundary extends Component {
  componentDidCatch(problem) {
    console.error(problem);
    this.setState({ problem });
  }

  render({ children }, { problem }) {
    if (!problem) return children;
    return html`<${Notice} tone="bad">This view cannot be drawn: ${problem.message}. Another view, or the page again, may help.<//>`;
  }
}

// A sentence in the place of something that is not there.

export function Notice({ tone = "idle", children }) {
  return html`<p class=${`notice ${tone}`} role=${tone === "bad" ? "alert" : "status"}>${children}</p>`;
}

// What a view shows while its first answer is under way, or in place of one that failed.
export function Awaiting({ request, what }) {
  if (request.error) return html`<${Notice} tone="bad">${request.error.message}<//>`;
  if (!request.data) return html`<p class="boot">Loading ${what} …</p>`;
  return null;
}

// A state as a word with a mark, never by colour alone.

const TONES = {
  trained: "good", scored: "good", validated: "good", ready: "good", live: "good", working: "good",
  served: "good", promoted: "good", refused: "bad", "given up": "idle", forgotten: "idle",
  running: "busy", leased: "busy", open: "busy", validating: "busy",
  pending: "idle", ended: "idle", closed: "idle", waiting: "idle", idle: "idle", stopped: "idle",
  failed: "bad", evicted: "bad", killed: "bad", dead: "bad", down: "bad", blocked: "warn", warning: "warn",
};

export function State({ state, title }) {
  return html`<span class="state ${TONES[state] ?? "idle"}" title=${title}>${state ?? "–"}</span>`;
}

// A list of any length whose rows have one height: only those in sight are in the document. Scrolling asks for the rows that
// it shows (`onRange`); a row that has not arrived yet is drawn as an empty one by its renderer.

const OVERSCAN = 8;

export function VirtualList({ label, count, rowHeight, row, onRange, selected, header }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });

  const measure = () => {
    const { scrollTop, clientHeight } = box.current;
    setView((now) => (now.top === scrollTop && now.height === clientHeight ? now : { top: scrollTop, height: clientHeight }));
  };
  useLayoutEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (selected === undefined || selected < 0) return;
    const { scrollTop, clientHeight } = box.current;
    const top = selected * rowHeight;
    const head = box.current.firstElementChild.offsetHeight; // it covers the first rows in sight
    if (top < scrollTop) box.current.scrollTop = top;
    else if (top + rowHeight + head > scrollTop + clientHeight) box.current.scrollTop = top + rowHeight + head - clientHeight;
  }, [selected]);

  const first = Math.max(0, Math.floor(view.top / rowHeight) - OVERSCAN);
  const last = Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + OVERSCAN);
  useEffect(() => onRange?.(first, last), [first, last, count, onRange]);

  const rows = [];
  for (let index = first; index < last; index += 1) {
    rows.push(html`<div class="vrow" key=${index} style=${{ top: `${index * rowHeight}px`, height: `${rowHeight}px` }}
      role="row" aria-rowindex=${index + 2} aria-selected=${index === selected}>${row(index)}</div>`);
  }
  return html`<div class="vlist" role="grid" aria-label=${label} aria-rowcount=${count + 1} tabindex="0" ref=${box} onScroll=${measure}>
    <div class="vhead" role="row" aria-rowindex="1">${header}</div>
    <div class="vbody" role="rowgroup" style=${{ height: `${count * rowHeight}px` }}>${rows}</div>
  </div>`;
}

// The head of the page: which run, in which state, and the views.

const tabs = () => [
  ["machine", "Machine", []],
  ["curves", "Curves", ["step"]],
  ["episodes", serves.value ? "Sessions" : "Episodes", ["episode", "group"]],
  ...(serves.value ? [["versions", "Versions", []]] : []),
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
    <span class="figure">step ${figure(entry.step)}${entry.steps_planned && !entry.serves ? html`<span class="soft"> / ${figure(entry.steps_planned)}</span>` : ""}</span>
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
      ${tabs().map(([name, label, also]) => html`<a key=${name} href=${link(name, { params: kept })}
        aria-current=${name === view || also.includes(view) ? "page" : undefined}>${label}</a>`)}
    </nav>
    <button class="theme" type="button" onClick=${toggleTheme} aria-label=${`switch to ${theme.value === "dark" ? "light" : "dark"} colours`}>
      ${theme.value === "dark" ? "Light" : "Dark"}</button>
  </header>`;
}
