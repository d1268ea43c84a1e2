// One chart of several lines, each perhaps with a band around it; a click on it tells the nearest x (`onPick`).
// It is made once and given new data as they come, so that a live run does not flicker; out of sight it draws nothing, and is
// brought up to date when it is scrolled into sight.
import { html, useEffect, useLayoutEffect, useRef } from "../core/html.js";
import { theme } from "../core/theme.js";
import uPlot from "../vendor/uplot.js";
import { chartOptions } from "./chart_options.js";
import { watchSight } from "./in_sight.js";

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
