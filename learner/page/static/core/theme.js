// Light or dark: the system's choice until the reader chooses. Charts draw on a canvas and watch `theme` to draw again.
import { computed, signal } from "./html.js";

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
