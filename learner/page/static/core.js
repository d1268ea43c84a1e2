// What every part of the page stands on: markup and signals, numbers as text, the theme, the address, keys.
import htm from "./vendor/htm.js";
import { Component, createElement, Fragment, render } from "./vendor/preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "./vendor/signals.js";

// The markup of every component: htm bound to Preact, and the hooks and signals that components use.
// Text goes in as children or attributes only; nothing in this page sets innerHTML.
export const html = htm.bind(createElement);

const isSame = (a, b) => Object.keys(a).length === Object.keys(b).length && Object.keys(a).every((name) => a[name] === b[name]);

// A component that is drawn again only when one of its properties is another: rows of a list, of which few change at a time. It
// keeps no state and reads no signal.
export function memo(draw) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return !isSame(next, this.props);
    }

    render(props) {
      return draw(props);
    }
  };
}

export { Component, Fragment, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect };

// Numbers, durations and sizes as a reader wants them. Figures that are absent are shown as a dash.
const DASH = "–";
const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? DASH : whole.format(value);
}

// 1,234 as 1.2k where room is scarce.
export function short(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${(value / 1e9).toFixed(1)}G`;
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return figure(value);
}

// Four significant digits; small and large ones with an exponent.
export function figure(value) {
  if (value === null || value === undefined) return DASH;
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2);
  if (Number.isInteger(value)) return whole.format(value);
  return size >= 1000 ? whole.format(value) : Number(value.toPrecision(4)).toString();
}

export function score(value) {
  if (value === null || value === undefined) return DASH;
  return Number.isInteger(value) ? String(value) : value.toFixed(3);
}

export function share(value) {
  if (value === null || value === undefined) return DASH;
  const percent = value * 100;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function clock(epochSeconds) {
  if (epochSeconds === null || epochSeconds === undefined) return DASH;
  return new Date(epochSeconds * 1000).toLocaleTimeString("en-GB");
}

// When something was, as a reader of a run of weeks wants it.
export function when(epochSeconds) {
  if (epochSeconds === null || epochSeconds === undefined) return DASH;
  const at = new Date(epochSeconds * 1000);
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday ? clock(epochSeconds) : at.toLocaleString("en-GB", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit" });
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

// Light or dark: the system's choice until the reader chooses. Charts draw on a canvas and watch `theme` to draw again.

const KEY = "understudy-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch (refused) {
    return null; // a page opened from a file may have no storage
  }
}

const chosen = signal(stored());
const systemIsDark = signal(system.matches);
system.addEventListener("change", (event) => {
  systemIsDark.value = event.matches;
});

export const theme = computed(() => chosen.value ?? (systemIsDark.value ? "dark" : "light"));

export function applyTheme() {
  document.documentElement.dataset.theme = theme.value;
}

export function toggleTheme() {
  chosen.value = theme.value === "dark" ? "light" : "dark";
  applyTheme();
  try {
    localStorage.setItem(KEY, chosen.value);
  } catch (refused) {
    // kept for this visit only
  }
}

const colours = new Map(); // by theme and name: asking for a computed style makes the browser work out all that is pending

// The value of a CSS variable under the present theme, for what is drawn on a canvas.
export function colour(name) {
  const key = `${document.documentElement.dataset.theme} ${name}`;
  if (!colours.has(key)) colours.set(key, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(key);
}

// The view as a URL: `#/episode/12-0-0?run=demo&colour=version`. Whoever has the link sees the same view.

function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...rest] = path.split("/").map(decodeURIComponent);
  return { view: view || "machine", id: rest.join("/"), params: Object.fromEntries(new URLSearchParams(query)) };
}

export const route = signal(parse(location.hash));

addEventListener("hashchange", () => {
  route.value = parse(location.hash);
});

// The address of a view; parameters that are empty are left out.
export function link(view, { id = "", params = {} } = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept.map(([key, value]) => [key, String(value)])).toString();
  return `#/${view}${id ? `/${encodeURIComponent(id)}` : ""}${query ? `?${query}` : ""}`;
}

export function go(hash) {
  location.hash = hash;
}

// Changes parameters of the present view without a new entry in the history: a filter that is typed, a slider that moves.
export function setParams(changes) {
  const { view, id, params } = route.value;
  history.replaceState(null, "", link(view, { id, params: { ...params, ...changes } }));
  route.value = parse(location.hash);
}

// Keys of the present view: j and k walk a list, Escape goes back. Keys that are typed into a field are the field's.

function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

// The handlers of the last drawing count, at once: a quick reader's next key is not for the one before.
export function useKeys(handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  useEffect(() => {
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      const handler = latest.current[event.key];
      if (!handler) return;
      event.preventDefault();
      handler(event);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}
