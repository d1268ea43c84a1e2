// j and k in an episode: to the next and the one before in the list that the reader came from, whose filters are in the address.
import { html, useMemo } from "../../core/html.js";
import { count } from "../../core/format.js";
import { useKeys } from "../../core/keys.js";
import { go, link, route } from "../../core/route.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { filtersOf } from "../episodes/filters.js";

let kept = { key: null, answer: null };

// The order is the same for every episode of a walk; one that is newer than it asks again.
function orderOnce(key, { run, filters, seq }, signal) {
  if (kept.key === key && kept.answer.includes(seq)) return Promise.resolve(kept.answer);
  return source.order(run, filters, signal).then((answer) => {
    kept = { key, answer };
    return answer;
  });
}

export function ListWalk({ run, seq, part }) {
  const filters = filtersOf(route.value.params);
  const key = JSON.stringify([run, filters]);
  const order = useRequest(kept.key === key && !kept.answer.includes(seq) ? `${key} ${seq}` : key, (signal) => orderOnce(key, { run, filters, seq }, signal));
  const at = useMemo(() => order.data?.indexOf(seq) ?? -1, [order.data, seq]);
  const to = async (by) => {
    // A key may be quicker than the order.
    const answer = await orderOnce(key, { run, filters, seq });
    const place = answer.indexOf(seq);
    const next = place < 0 ? undefined : answer[place + by];
    if (next === undefined) return;
    const { episodes } = await source.episodes(run, { seqs: String(next) });
    if (episodes.length) go(link("episode", { id: episodes[0].episode_id, params: { run, ...filters, part } }));
  };
  useKeys({ j: () => to(1), k: () => to(-1) });
  const total = order.data?.length ?? 0;
  return html`<span class="walk" role="group" aria-label="in the list"><button type="button" disabled=${at <= 0} onClick=${() => to(-1)}>↑<kbd>k</kbd><span class="unseen">previous in the list</span></button>
    <button type="button" disabled=${at < 0 || at >= total - 1} onClick=${() => to(1)}>↓<kbd>j</kbd><span class="unseen">next in the list</span></button>
    <a class="soft" href=${link("episodes", { params: { run, ...filters } })}>${at >= 0 ? `${count(at + 1)} of ${count(total)}` : "to the list"}</a></span>`;
}
