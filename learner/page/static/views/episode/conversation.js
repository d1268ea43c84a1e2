// The conversation of a branch, in windows of turns.
import { html, useEffect, useRef, useState } from "../../core/html.js";
import { count } from "../../core/format.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { Awaiting } from "../../parts/notice.js";
import { Turn } from "./turn.js";

const WINDOW = 50;

export function Conversation({ run, id, branch }) {
  const [start, setStart] = useState(0);
  const [collapsed, setCollapsed] = useState(null);
  const box = useRef(null);
  useEffect(() => setStart(0), [id, branch]);
  const request = useRequest(`${run} ${id} ${branch} ${start}`, (signal) => source.conversation(run, id, { branch, start, count: WINDOW }, signal));
  useEffect(() => {
    if (collapsed !== null) box.current?.querySelectorAll("details").forEach((one) => { one.open = !collapsed; });
  }, [collapsed]);
  if (!request.data) return html`<div class="card card-body"><${Awaiting} request=${request} what="the conversation" /></div>`;
  const { turns, num_turns: total } = request.data;
  const to = (next) => { setStart(next); box.current?.scrollIntoView({ block: "nearest" }); };
  return html`<section class="card" ref=${box}><div class="card-head"><h2>Conversation</h2><span class="soft">${total > WINDOW ? `turns ${count(request.data.start + 1)} to ${count(request.data.start + turns.length)} of ${count(total)}` : `${total} turns`}</span>
      <span class="push"><button type="button" onClick=${() => setCollapsed(!(collapsed ?? false))}>${collapsed ? "Unfold" : "Fold"} thoughts and tools</button></span></div>
    <ol class="turns">${turns.map((one) => html`<${Turn} key=${`${id} ${one.n}`} turn=${one} />`)}</ol>
    ${total > WINDOW && html`<div class="card-body pager"><button type="button" disabled=${start === 0} onClick=${() => to(Math.max(0, start - WINDOW))}>Earlier turns</button>
      <button type="button" disabled=${start + WINDOW >= total} onClick=${() => to(start + WINDOW)}>Later turns</button></div>`}</section>`;
}
