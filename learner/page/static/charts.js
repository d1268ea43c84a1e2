// Charts: drawn when they are in sight, with the options of all of them.
import uPlot from "./vendor/uplot.js";
import { colour, figure, html, useEffect, useLayoutEffect, useRef, theme } from "./core.js";

// Whether an element is in sight, or soon will be: one observer for all that ask.
const told = new WeakMap();
const observer = new IntersectionObserver((entries) => entries.forEach((one) => told.get(one.target)?.(one.isIntersecting)), { rootMargin: "60px" });

// `tell(isSeen)`: at first, and whenever it changes; the answer ends it.
export function watchSight(element, tell) {
  told.set(element, tell);
  observer.observe(element);
  return () => observer.unobserve(element);
}

// How a chart looks, as uPlot wants it told: its lines, bands, axes and cursor, in the colours of the page.

const LINE_COLOURS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

function axis(extra) {
  return {
    stroke: () => colour("--ink-soft"),
    grid: { stroke: () => colour("--grid"), width: 1 },
    ticks: { stroke: () => colour("--grid"), width: 1, size: 4 },
    font: "11px system-ui, sans-serif",
    ...extra,
  };
}

function line({ label, tone, dashed, faint }) {
  return {
    label,
    alpha: faint ? 0.25 : 1,
    stroke: () => colour(LINE_COLOURS[tone % LINE_COLOURS.length]),
    width: dashed ? 1 : 1.75,
    dash: dashed ? [4, 4] : undefined,
    spanGaps: true,
    points: { show: (plot, index) => plot.data[index].length <= 40, size: 4 },
    value: (_, value) => figure(value),
  };
}

// An edge of a band has no line of its own.
function edge({ label, tone }) {
  return { label, stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, tone };
}

export function chartOptions({ series, xLabel, logY, logX, height, width, onPick, xTime }) {
  return {
    width,
    height,
    series: [{ label: xLabel }, ...series.map((one) => (one.edge ? edge(one) : line(one)))],
    bands: series.flatMap((one, index) =>
      one.edge === "high"
        ? [{ series: [index + 1, index + 2], fill: () => colour(`${LINE_COLOURS[one.tone % LINE_COLOURS.length]}-band`) }]
        : []),
    scales: {
      x: { time: Boolean(xTime), distr: logX ? 3 : 1 },
      y: { distr: logY ? 3 : 1 },
    },
    axes: [
      axis({ size: xTime ? 40 : 28, space: 60, values: xTime ? undefined : (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }),
      axis({ size: 52, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }),
    ],
    legend: { show: false },
    cursor: { drag: { x: true, y: false, dist: 6 }, points: { size: 7 }, sync: { key: "page" } },
    hooks: { ready: [(plot) => onPick && pickOnClick(plot, onPick)] },
  };
}

// A click, not the end of a drag that zooms.
function pickOnClick(plot, onPick) {
  let downAt = 0;
  plot.over.addEventListener("mousedown", (event) => {
    downAt = event.clientX;
  });
  plot.over.addEventListener("click", (event) => {
    const index = plot.cursor.idx;
    if (Math.abs(event.clientX - downAt) < 4 && index !== null && index !== undefined) onPick(plot.data[0][index]);
  });
}

// One chart of several lines, each perhaps with a band around it; a click on it tells the nearest x (`onPick`).
// It is made once and given new data as they come, so that a live run does not flicker; out of sight it draws nothing, and is
// brought up to date when it is scrolled into sight.

// Arrow keys move the cursor from point to point, Enter opens the one that it is at.
function moveByKey(event, plot, onPick) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const last = plot.data[0].length - 1;
  const at = plot.cursor.idx ?? last;
  if (by) {
    const index = Math.max(0, Math.min(last, at + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.bbox.height / devicePixelRatio / 2 });
  } else if (event.key === "Enter") onPick(plot.data[0][at]);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

export function Chart({ title, data, series, xLabel = "step", logY, logX, xTime, height = 190, onPick, onHover }) {
  const box = useRef(null);
  const plot = useRef(null);
  const hover = useRef(onHover);
  const pick = useRef(onPick);
  const latest = useRef(null);
  const isSeen = useRef(true);
  const drawnShape = useRef(null);
  hover.current = onHover;
  pick.current = onPick;
  const shape = JSON.stringify([series, logY, logX, xLabel, height]);
  latest.current = { data, shape };
  // A chart of another shape is made anew, with its data: until then the old one, which may come into sight, is left as it is.
  const draw = () => {
    const fits = plot.current && drawnShape.current === latest.current.shape;
    if (fits && isSeen.current && plot.current.data !== latest.current.data) plot.current.setData(latest.current.data);
  };

  useEffect(() => {
    if (!box.current) return undefined; // it was taken away before the frame
    const width = Math.max(120, box.current.clientWidth);
    const wanted = chartOptions({ series, xLabel, logY, logX, xTime, height, width, onPick: onPick && ((x) => pick.current(x)) });
    wanted.hooks.setCursor = [(one) => hover.current?.(one.cursor.idx ?? null)];
    plot.current = new uPlot(wanted, data, box.current);
    drawnShape.current = shape;
    const unwatch = watchSight(box.current, (seen) => {
      isSeen.current = seen;
      draw();
    });
    const observer = new ResizeObserver(() => {
      const now = box.current?.clientWidth;
      if (now && now !== plot.current.width) plot.current.setSize({ width: now, height });
    });
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      unwatch();
      plot.current.destroy();
      plot.current = null;
      isSeen.current = true;
    };
  }, [shape]);
  // In the frame of the figures around it: one frame is cheaper than two.
  useLayoutEffect(draw, [data]);
  useEffect(() => plot.current?.redraw(false, true), [theme.value]);

  return html`<div class="chart" role="img" aria-label=${title} ref=${box} tabindex=${onPick ? 0 : undefined}
    onKeyDown=${onPick && ((event) => moveByKey(event, plot.current, (x) => pick.current(x)))}></div>`;
}
