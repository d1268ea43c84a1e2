// A list of any length whose rows have one height: only those in sight are in the document. Scrolling asks for the rows that
// it shows (`onRange`); a row that has not arrived yet is drawn as an empty one by its renderer.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../core/html.js";

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
