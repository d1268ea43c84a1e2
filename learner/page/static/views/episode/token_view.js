// The tokens of a branch in windows, never the whole.
import { html, useEffect, useMemo, useRef, useState } from "../../core/html.js";
import { useKeys } from "../../core/keys.js";
import { route, setParams } from "../../core/route.js";
import { source } from "../../data/source.js";
import { tokenAt } from "../../data/token_window.js";
import { useRequest } from "../../data/use_request.js";
import { Awaiting, Notice } from "../../parts/notice.js";
import { SCALES, contextOf } from "./scales.js";
import { SIZES, TokenBar } from "./token_bar.js";
import { TokenFlow } from "./token_flow.js";
import { TokenInspector } from "./token_inspector.js";
import { TokenOverview } from "./token_overview.js";

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
