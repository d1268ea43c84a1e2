// The tokens of a branch: in text with a scale's colours, as an overview, and one by one.
import { html, count, setParams, figure, useEffect, useMemo, useRef, colour, theme, useState, useKeys, route } from "../core.js";
import { useRequest } from "../data.js";
import { Awaiting, Notice } from "../parts.js";
import { tokenAt, source } from "../sources.js";

// How a token is coloured: a scale turns its figures into one of a few steps, each a class of the style sheet that reads well in
// both themes and to the colour-blind. The exact figure stands beside the tokens.
const step = (value, bounds) => bounds.filter((bound) => value >= bound).length;
const UNLIKELY = [0.1, 0.5, 1, 2, 4, 7];
const APART = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1];

const sequential = (prefix, words) => words.map((word, index) => [`${prefix}-${index}`, word]);

export const SCALES = {
  logprob: {
    label: "log-probability",
    legend: () => sequential("lp", ["> 0.90", "> 0.61", "> 0.37", "> 0.14", "> 0.02", "> 0.001", "less likely"]),
    of: (token) => (token.logprob === null ? null : `lp-${step(-token.logprob, UNLIKELY)}`),
    notable: (token) => token.logprob !== null && -token.logprob >= 4,
  },
  difference: {
    label: "engine – learner",
    legend: () => sequential("df", ["< 1e-5", "1e-5", "1e-4", "0.001", "0.01", "0.1", "> 1 nat"]),
    of: (token) => (token.difference === null ? null : `df-${step(Math.abs(token.difference), APART)}`),
    notable: (token) => token.difference !== null && Math.abs(token.difference) >= 1e-3,
  },
  version: {
    label: "policy version",
    legend: ({ versions }) => versions.map((version) => [`vn-${version % 6}`, `v${version}`]),
    of: (token) => (token.version === null ? null : `vn-${token.version % 6}`),
    notable: (token, before) => token.version !== null && before !== null && before.version !== null && token.version !== before.version,
  },
  advantage: {
    label: "advantage",
    legend: ({ largest }) => [["ad-n3", `–${largest}`], ["ad-n2", ""], ["ad-n1", ""], ["ad-0", "0"], ["ad-p1", ""], ["ad-p2", ""], ["ad-p3", `+${largest}`]],
    of: (token, { largestValue }) => {
      if (token.advantage === null) return null;
      const size = step(Math.abs(token.advantage) / (largestValue || 1), [0.02, 0.34, 0.67]);
      return size === 0 ? "ad-0" : `ad-${token.advantage > 0 ? "p" : "n"}${size}`;
    },
    notable: (token, before) => token.advantage !== null && (before === null || token.advantage !== before.advantage),
  },
  mask: {
    label: "mask",
    legend: () => [["mk-on", "trained"], ["mk-weightless", "to be trained, had no weight"], ["mk-off", "sampled, not trained here"]],
    of: (token) => (!token.sampled ? null : token.mask ? (token.trained ? "mk-on" : "mk-weightless") : "mk-off"),
    notable: (token, before) => before !== null && token.mask !== before.mask,
  },
};

// What a scale needs to know of the window or of the whole episode.
export function contextOf(window, advantages) {
  const versions = [...new Set(window.arrays.version)].filter((version) => version >= 0).sort((a, b) => a - b);
  const largestValue = advantages ? Math.max(Math.abs(advantages.min), Math.abs(advantages.max)) : Math.max(0, ...Array.from(window.arrays.advantage, (value) => Math.abs(value) || 0));
  return { versions, largestValue, largest: Number(largestValue.toPrecision(2)) };
}

// What is shown of the tokens: the colour's meaning, the window, and its legend.

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

// The exact figures of one token.

const exact = (value) => (value === null ? "–" : Number.isInteger(value) ? String(value) : Math.abs(value) < 1e-3 ? value.toExponential(4) : value.toFixed(6));

function trainedWord(token) {
  if (!token.sampled) return "no: it was given";
  if (!token.mask) return "no: masked in this branch";
  return token.trained ? "yes" : "no: without weight in the loss";
}

export function TokenInspector({ token }) {
  if (!token) return html`<aside class="inspector card" aria-label="the token's figures"><p class="soft">Point at a token, or press an arrow key.</p></aside>`;
  const rows = [
    ["position", count(token.position)], ["id", String(token.id)], ["round", figure(token.round)], ["version", token.version === null ? "–" : `v${token.version}`],
    ["log-probability", exact(token.logprob)], ["probability", token.logprob === null ? "–" : figure(Math.exp(token.logprob))], ["learner's", exact(token.learner)], ["learner – engine", exact(token.difference)],
    ["at the step's start", exact(token.startLogprob)], ["advantage", exact(token.advantage)], ["trained", trainedWord(token)],
  ];
  return html`<aside class="inspector card" aria-label="the token's figures"><p class="inspector-piece mono">${token.piece === "" ? "(part of a character)" : JSON.stringify(token.piece)}</p>
    <dl class="facts">${rows.map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="mono">${value}</dd>`)}</dl></aside>`;
}

// The tokens of one window, as text in which each is coloured; pointer and keys choose the one whose figures are shown.

// What is not seen otherwise gets a sign; a line break also breaks the line.
function shown(piece) {
  if (piece === "") return "·";
  return piece.replace(/\n/g, "↵\n").replace(/\t/g, "⇥").replace(/^ +$/, (blanks) => "␣".repeat(blanks.length));
}

function spans(window, scale, context) {
  const out = [];
  let version = -1;
  for (let index = 0; index < window.count; index += 1) {
    const token = tokenAt(window, index);
    const tone = scale.of(token, context);
    const turned = token.version !== null && version >= 0 && token.version !== version;
    if (token.version !== null) version = token.version;
    const name = `t ${token.sampled ? "" : "given"} ${tone ?? ""} ${turned ? "turned" : ""} ${token.piece === "" ? "piece-of" : ""}`;
    out.push(html`<span role="option" id=${`t${index}`} key=${index} data-i=${index} class=${name}>${shown(token.piece)}</span>`);
  }
  return out;
}

// The token above or below, by where it stands.
function inNextLine(box, index, by) {
  const here = box.children[index];
  if (!here) return index;
  let best = index;
  for (let at = index + by; at >= 0 && at < box.children.length; at += by) {
    const one = box.children[at];
    const lines = Math.round(((one.offsetTop - here.offsetTop) * by) / 4);
    if (lines <= 0) continue;
    if (best !== index && one.offsetTop !== box.children[best].offsetTop) break;
    if (best === index || Math.abs(one.offsetLeft - here.offsetLeft) < Math.abs(box.children[best].offsetLeft - here.offsetLeft)) best = at;
  }
  return best;
}

export function TokenFlow({ window, scale, context, cursor, onCursor, onHover, onLeave }) {
  const box = useRef(null);
  const body = useMemo(() => spans(window, scale, context), [window, scale]);
  useEffect(() => {
    const before = box.current.querySelector(".at");
    before?.classList.remove("at");
    before?.removeAttribute("aria-selected");
    const one = box.current.children[cursor];
    one?.classList.add("at");
    one?.setAttribute("aria-selected", "true");
    if (document.activeElement === box.current) one?.scrollIntoView({ block: "nearest" });
  }, [cursor, body]);
  const indexOf = (event) => event.target.dataset?.i;
  const onKey = (event) => {
    const next = {
      ArrowRight: () => cursor + 1, ArrowLeft: () => cursor - 1, ArrowDown: () => inNextLine(box.current, cursor, 1), ArrowUp: () => inNextLine(box.current, cursor, -1),
      Home: () => 0, End: () => window.count - 1, PageDown: () => window.count, PageUp: () => -1,
    }[event.key];
    if (!next || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    onCursor(next());
  };
  return html`<div class="tokens" role="listbox" aria-label="tokens; arrow keys move" tabindex="0" ref=${box} aria-activedescendant=${`t${cursor}`} onKeyDown=${onKey}
    onPointerOver=${(event) => indexOf(event) !== undefined && onHover(Number(indexOf(event)))} onPointerLeave=${onLeave}
    onClick=${(event) => indexOf(event) !== undefined && onCursor(Number(indexOf(event)))}>${body}</div>`;
}

// A strip over all tokens of a branch that shows where to look; a click goes there. The window in view is framed.

const SHORT = 200; // so few tokens are seen at once

// The height of a bucket's bar, between 0 and 1.
const HEIGHTS = {
  logprob: (value) => Math.min(1, -value / 10),
  difference: (value) => Math.max(0, Math.min(1, (Math.log10(Math.max(value, 1e-7)) + 7) / 7)),
  version: (value, { low, high }) => (high > low ? 0.15 + (0.85 * (value - low)) / (high - low) : 0.5),
  advantage: (value, { most }) => Math.abs(value) / (most || 1),
  mask: (value) => value,
};

function draw(canvas, values, scale) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const pen = canvas.getContext("2d");
  const known = values.filter((value) => value !== null);
  const range = { low: Math.min(...known), high: Math.max(...known), most: Math.max(...known.map(Math.abs)) };
  const each = canvas.width / values.length;
  values.forEach((value, index) => {
    if (value === null) return;
    pen.fillStyle = colour(scale === "advantage" && value < 0 ? "--line-2" : scale === "logprob" ? "--line-2" : scale === "difference" ? "--line-4" : "--line-1");
    const height = Math.max(1, HEIGHTS[scale](value, range) * canvas.height);
    pen.fillRect(index * each, canvas.height - height, Math.max(1, each - (each > 3 ? 1 : 0)), height);
  });
}

export function TokenOverview({ run, id, branch, scale, window, total, onJump }) {
  const canvas = useRef(null);
  const request = useRequest(`${run} ${id} ${branch}`, (signal) => source.overview(run, id, { branch, buckets: 400 }, signal));
  const values = request.data?.[scale];
  const isShown = Boolean(values) && total > SHORT;
  useEffect(() => {
    if (isShown) draw(canvas.current, values, scale);
  }, [isShown, values, scale, theme.value]);
  if (!isShown) return null;
  const jump = (event) => {
    const { left, width } = canvas.current.getBoundingClientRect();
    onJump(Math.floor(((event.clientX - left) / width) * total));
  };
  return html`<div class="overview" onClick=${jump} aria-hidden="true"><canvas ref=${canvas}></canvas>
    <span class="overview-window" style=${{ left: `${(100 * window.start) / total}%`, width: `${Math.max(0.4, (100 * window.count) / total)}%` }}></span></div>`;
}

// The tokens of a branch in windows, never the whole.

function readPlace(params) {
  const size = SIZES.includes(Number(params.size)) ? Number(params.size) : 1024;
  const at = Math.max(0, Number(params.at ?? 0) || 0);
  return { size, at, start: Math.floor(at / size) * size, colouring: SCALES[params.colour] ? params.colour : "logprob" };
}

function nextNotable(window, scale, from, by) {
  for (let index = from + by; index >= 0 && index < window.count; index += by) {
    if (scale.notable(tokenAt(window, index), index > 0 ? tokenAt(window, index - 1) : null)) return index;
  }
  return by > 0 ? window.count : -1;
}

export function TokenView({ run, id, branch, advantages }) {
  const { size, at, start, colouring } = readPlace(route.value.params);
  const scale = SCALES[colouring];
  const request = useRequest(`${run} ${id} ${branch} ${start} ${size}`, (signal) => source.tokens(run, id, { branch, start, count: size }, signal));
  const [cursor, setCursor] = useState(at - start);
  const [hovered, setHovered] = useState(null);
  const window = request.data;
  const place = useRef(null);
  place.current = window;
  useEffect(() => { setCursor(at - start); setHovered(null); }, [at, start]);
  const context = useMemo(() => window && contextOf(window, advantages), [window, advantages]);
  const jump = (position) => { setHovered(null); setParams({ at: position || undefined }); if (position - start < size && position >= start) setCursor(position - start); };
  // Beyond an edge of the window is the next window.
  const move = (index) => {
    setHovered(null);
    const { count, total } = place.current;
    if (index >= 0 && index < count) setCursor(index);
    else if (index < 0 && start > 0) jump(start - 1);
    else if (index >= count && start + count < total) jump(start + count);
  };
  useKeys({ n: () => move(nextNotable(place.current, scale, cursor, 1)), N: () => move(nextNotable(place.current, scale, cursor, -1)) });
  if (!window) return html`<div class="card card-body"><${Awaiting} request=${request} what="tokens" /></div>`;
  if (window.total === 0) return html`<${Notice}>This branch has no tokens.<//>`;
  const chosen = hovered ?? cursor;
  return html`<section class="card token-view"><div class="card-body"><${TokenBar} colouring=${colouring} size=${size} window=${window} context=${context} onJump=${jump} />
      <${TokenOverview} run=${run} id=${id} branch=${branch} scale=${colouring} window=${window} total=${window.total} onJump=${jump} />
      ${window.figures === "none" && (colouring === "difference" || colouring === "advantage") && html`<${Notice}>The learner's figures of these tokens were not kept.<//>`}
      ${request.error && html`<${Notice} tone="bad">${request.error.message}<//>`}</div>
    <div class="token-parts"><${TokenFlow} window=${window} scale=${scale} context=${context} cursor=${cursor} onCursor=${move} onHover=${setHovered} onLeave=${() => setHovered(null)} />
      <${TokenInspector} token=${chosen < window.count && chosen >= 0 ? tokenAt(window, chosen) : null} /></div></section>`;
}
