// Feedback on an answer, or on a whole session: what was said of it, the last of each source; and what one says here.
import { html, plural, score, useState, when } from "../core.js";
import { currentEntry, serves } from "../data.js";
import { source } from "../sources.js";

// Who says a score or words; what nobody's name is on comes from the environment, or from a user who gave no source.
export const sayer = (one) => one.judge || (one.is_settled ? "mean of its rounds" : serves.value ? "no source named" : "environment");

const LATE = ["closed", "conflict"];

function lastOfEach(scores) {
  const last = new Map();
  for (const one of scores) last.set(`${one.judge} ${one.verdict === "words"} ${LATE.includes(one.verdict)}`, one);
  return [...last.values()];
}

function Said({ one }) {
  return html`<li class="said"><strong class="figure">${one.verdict === "words" ? "" : score(one.value)}</strong> <span class="soft">${sayer(one)}, ${when(one.told_at)}${LATE.includes(one.verdict) ? ", too late to train" : ""}</span>
    ${one.hint && html`<span class="agent-text">${one.hint}</span>`}</li>`;
}

// Drawn, as not every machine has letters for it.
const Thumb = ({ isDown }) => html`<svg class=${isDown ? "down" : ""} viewBox="0 0 16 16" width="15" height="15" aria-hidden="true"><path d="M1 7.5h2.6v6.5H1z M5 13.4V7.4L7.9 1.6c1.4 0 1.9 1 1.7 2.1L9.2 6.2h4.1c1 0 1.6.8 1.3 1.8l-1.4 4.7c-.2.8-.8 1.3-1.6 1.3H6.6z" /></svg>`;

// Why feedback cannot be given here; null: it can.
function whyNot(detail) {
  const { session } = detail.episode;
  if (source.isSnapshot) return "This is an exported file: it takes no feedback.";
  if (currentEntry.value?.state !== "live") return "The run does not live, so it takes no feedback.";
  if (session.is_side) return "This is a side call, of which nothing is learned.";
  return session.state === "forgotten" ? "This session was forgotten." : null;
}

export function Feedback({ detail, run, round, label, onSaid }) {
  const [note, setNote] = useState("");
  const [isOpen, setIsOpen] = useState(false);
  const [answer, setAnswer] = useState(null);
  const said = lastOfEach(detail.scores.filter((one) => one.round === round && (one.part === "round" || one.part === "whole")));
  const own = said.findLast((one) => one.judge === "page" && one.verdict !== "words");
  const tell = async (what) => {
    setAnswer({ text: "…" });
    try {
      const taken = await source.feedback(run, { session: detail.episode.episode_id, round_index: round, ...what });
      setAnswer({ text: taken.trains ? "Stored." : "Stored; it trains nothing any more.", trains: taken.trains });
      setNote("");
      setIsOpen(false);
      onSaid();
    } catch (problem) {
      setAnswer({ text: problem.message, isBad: true });
    }
  };
  const send = (event) => {
    event.preventDefault();
    if (note.trim()) tell({ text: note.trim() });
  };
  const thumb = (value, name) => html`<button type="button" class="thumb" aria-pressed=${own?.value === value} aria-label=${`${name}: ${label}`} title=${`${name} (score ${value})`} onClick=${() => tell({ score: value, text: note.trim() || undefined })}><${Thumb} isDown=${value === 0} /></button>`;
  return html`<div class="feedback" role="group" aria-label=${`feedback on ${label}`}>
    ${said.length > 0 && html`<ul>${said.map((one, index) => html`<${Said} key=${index} one=${one} />`)}</ul>`}
    ${whyNot(detail) === null && html`<div class="feedback-give">${thumb(1, "good")}${thumb(0, "bad")}
      <button type="button" aria-expanded=${isOpen} onClick=${() => setIsOpen(!isOpen)}>Note</button>
      ${answer && html`<span class=${answer.isBad ? "finish-bad" : "soft"} role="status">${answer.text}</span>`}</div>
      ${isOpen && html`<form class="feedback-note" onSubmit=${send}><textarea rows="2" maxlength="4000" aria-label=${`note on ${label}`} placeholder="What should have been otherwise? A thumb sends it too." value=${note} onInput=${(event) => setNote(event.target.value)}></textarea>
        <button type="submit" disabled=${!note.trim()}>Send</button></form>`}`}
  </div>`;
}

export function SessionFeedback({ detail, run, onSaid }) {
  const { state, is_watched: isWatched } = detail.episode.session;
  const why = whyNot(detail) ?? (state === "open" && !isWatched ? null : state === "waiting" ? "It waits to be learned from: what is said now still counts, until it is in a batch."
    : isWatched ? "Another model answers it: what is said of it weighs what is learned from it by SFT." : "It was learned from: what is said now is stored, and trains nothing any more.");
  return html`<section class="card"><div class="card-head"><h2>Feedback on the session</h2><span class="soft">${plural(detail.episode.session.feedback, "piece")} in all</span></div>
    <div class="card-body">${why && html`<p class="soft">${why}</p>`}<${Feedback} detail=${detail} run=${run} round=${null} label="the whole session" onSaid=${onSaid} /></div></section>`;
}
