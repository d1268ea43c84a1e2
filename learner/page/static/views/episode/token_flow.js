// The tokens of one window, as text in which each is coloured; pointer and keys choose the one whose figures are shown.
import { html, useEffect, useMemo, useRef } from "../../core/html.js";
import { tokenAt } from "../../data/token_window.js";

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
