// How a chart looks, as uPlot wants it told: its lines, bands, axes and cursor, in the colours of the page.
import { colour } from "../core/theme.js";
import { figure } from "../core/format.js";

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
      axis({ size: 28, space: 60, values: xTime ? undefined : (_, ticks) => ticks.map((tick) => (tick === null ? "" : figure(tick))) }),
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
