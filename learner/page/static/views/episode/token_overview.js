// A strip over all tokens of a branch that shows where to look; a click goes there. The window in view is framed.
import { html, useEffect, useRef } from "../../core/html.js";
import { colour, theme } from "../../core/theme.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";

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
