// The list of episodes: filters in the address, rows in windows, j and k to walk, Enter to open.
import { html, useCallback, useEffect, useMemo, useState } from "../../core/html.js";
import { plural, share } from "../../core/format.js";
import { useKeys } from "../../core/keys.js";
import { go, link, route } from "../../core/route.js";
import { source } from "../../data/source.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { VirtualList } from "../../parts/virtual_list.js";
import { EpisodeRow, HEADER } from "./episode_row.js";
import { useEpisodeWindow } from "./episode_window.js";
import { FilterBar } from "./filter_bar.js";
import { filtersOf } from "./filters.js";

const narrow = matchMedia("(max-width: 820px)");

function useRowHeight() {
  const [height, setHeight] = useState(narrow.matches ? 52 : 32);
  useEffect(() => {
    const change = () => setHeight(narrow.matches ? 52 : 32);
    narrow.addEventListener("change", change);
    return () => narrow.removeEventListener("change", change);
  }, []);
  return height;
}

function Found({ list }) {
  const { total, indexed } = list.head.data ?? {};
  return html`<span class="soft" aria-live="polite" data-total=${total}>${total === undefined ? "…" : plural(total, source.isSnapshot ? "sampled episode" : "episode")}</span>
    ${indexed < 1 && html`<span class="soft">causes of breaks are known of ${share(indexed)} so far</span>`}
    ${list.isBehind && html`<button type="button" onClick=${list.refresh}>Show what is new</button>`}`;
}

export function EpisodesView({ run }) {
  const asked = JSON.stringify(filtersOf(route.value.params));
  const filters = useMemo(() => JSON.parse(asked), [asked]); // the same object, so that rows are the same
  const [at, setAt] = useState(-1);
  const [isDown, setIsDown] = useState(false);
  const list = useEpisodeWindow(run, filters, { hold: isDown || at > 0 });
  const rowHeight = useRowHeight();
  useEffect(() => setAt(-1), [asked]);
  const move = (by) => setAt((now) => Math.max(0, Math.min(list.count - 1, now + by)));
  const open = () => {
    const one = list.rows.get(list.seqs[at]);
    if (one) go(link("episode", { id: one.episode_id, params: { run, ...filters } }));
  };
  useKeys({ j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1), PageDown: () => move(20), PageUp: () => move(-20), Enter: (event) => (event.target.closest("a, button") ? event.target.click() : open()) });
  const onRange = useCallback((first, last) => {
    setIsDown(first > 0);
    list.show(first, last);
  }, [list.show]);
  return html`<div class="view-head"><h1>Episodes</h1><${Found} list=${list} /><span class="soft hint"><kbd>j</kbd> <kbd>k</kbd> walk, <kbd>Enter</kbd> opens</span></div>
    <${FilterBar} facets=${list.head.data?.facets} />
    ${list.head.error && html`<${Notice} tone="bad">${list.head.error.message}<//>`}
    ${!list.head.data ? html`<${Awaiting} request=${list.head} what="episodes" />` : html`<div class="card list-card">
      <${VirtualList} label="episodes" count=${list.count} rowHeight=${rowHeight} header=${HEADER} selected=${at} onRange=${onRange}
        row=${(index) => html`<${EpisodeRow} episode=${list.rows.get(list.seqs[index])} run=${run} filters=${filters} />`} />
      ${list.count === 0 && html`<p class="list-empty soft">No episode matches.</p>`}</div>`}`;
}
