// The view of one episode or group: heading, branches, conversation, scores.
import {

// j and k in an episode: to the next and the one before in the list that the reader came from, whose filters are in the address.
  html, useMemo, count, useKeys, go, link, route, clock, score, useState, figure, plural, setParams, useEffect, useRef,
  duration, when,
} from "../core.js";
import { useRequest, ledgerRevision, useThrottled, serves } from "../data.js";
import { Awaiting, Notice, State } from "../parts.js";
import { source } from "../sources.js";
import { filtersOf, listedOf } from "./episodes.js";
import { Feedback, SessionFeedback, sayer } from "./feedback.js";
import { TokenView } from "./tokens.js";

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
  const listed = listedOf(filters);
  const key = JSON.stringify([run, listed]);
  const order = useRequest(kept.key === key && !kept.answer.includes(seq) ? `${key} ${seq}` : key, (signal) => orderOnce(key, { run, filters: listed, seq }, signal));
  const at = useMemo(() => order.data?.indexOf(seq) ?? -1, [order.data, seq]);
  const to = async (by) => {
    // A key may be quicker than the order.
    const answer = await orderOnce(key, { run, filters: listed, seq });
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

// Every score that was reported: by which judge, when, and what became of it.

const VERDICTS = { stored: "counts, unless revised", revised: "took the place of an earlier one", conflict: "refused: another value is stored", closed: "refused: the episode was closed", words: "words without a score", "no rounds": "refused: there is nothing to score" };

export function ScoreTable({ scores }) {
  return html`<section class="card"><div class="card-head"><h2>Scores</h2><span class="soft">${scores.length}</span></div>
    ${scores.length === 0 ? html`<p class="card-body soft">No judge has reported a score.</p>`
    : html`<div class="table-box" tabindex="0" role="region" aria-label="scores"><table><thead><tr><th scope="col" class="number">Value</th><th scope="col">Of</th><th scope="col">Judge</th><th scope="col">Verdict</th><th scope="col">At</th></tr></thead>
      <tbody>${scores.map((one, index) => html`<tr key=${index}><td class="number"><strong>${score(one.verdict === "words" ? null : one.value)}</strong></td><td>${one.part}${one.round !== null ? ` ${one.round}` : ""}</td><td class="agent-line">${sayer(one)}</td>
        <td title=${VERDICTS[one.verdict]}>${one.verdict}</td><td class="figure">${serves.value ? when(one.told_at) : clock(one.told_at)}</td></tr>
        ${one.hint && html`<tr key=${`hint ${index}`}><td></td><td colspan="4" class="soft agent-line">${serves.value ? "" : "hint: "}${one.hint}</td></tr>`}`)}</tbody></table></div>`}</section>`;
}

// The tree of an episode: its rounds in order, each in the lane of its branch, with the cause where a branch broke off.

const BRANCHES_AT_FIRST = 200;
const MOST_LANES = 8;

function Cause({ round }) {
  if (!round.cause) return null;
  return html`<p class="cause"><span class=${`state ${round.cause_expected ? "idle" : "warn"}`}>${round.cause}</span> <span class="soft">${round.cause_sentence}</span></p>`;
}

function Round({ round, branch, lane }) {
  const versions = round.versions.length > 1 ? `v${round.versions[0]}–${round.versions.at(-1)}` : round.versions.length ? `v${round.versions[0]}` : "";
  return html`<li class=${`round lane-${lane % 6} ${round.branch === branch ? "on" : ""}`}>
    <${Cause} round=${round} />
    <button type="button" class="round-button" aria-pressed=${round.branch === branch} onClick=${() => setParams({ branch: round.branch || undefined, at: undefined })} style=${{ marginLeft: `${Math.min(lane, MOST_LANES) * 14}px` }}>
      <span class="knot" aria-hidden="true"></span><strong>${round.round}</strong>${round.parent !== null && round.parent !== round.round - 1 && html`<span class="soft">after ${round.parent}</span>`}
      <span class=${round.finish === "stop" || round.finish === "tool_calls" ? "soft" : "finish-bad"}>${round.finish}</span>
      <span class="round-figures soft">${figure(round.tail)} + ${figure(round.sampled)} ${versions}${round.scores.length ? ` · ${score(round.scores.at(-1).value)}` : ""}</span></button></li>`;
}

export function BranchTree({ detail, branch }) {
  const [all, setAll] = useState(false);
  const { rounds, branches } = detail;
  const shown = all ? rounds : rounds.slice(0, BRANCHES_AT_FIRST);
  return html`<section class="card"><div class="card-head"><h2>Branches</h2><span class="soft">${plural(branches.length, "branch", "branches")}, ${plural(rounds.length, "round")}</span></div>
    ${branches.length > 1 && html`<div class="card-body branch-choice"><label class="soft">Shown <select value=${branch} onChange=${(event) => setParams({ branch: Number(event.target.value) || undefined, at: undefined })}>
      ${branches.map((one) => html`<option key=${one.branch} value=${one.branch} selected=${one.branch === branch}>branch ${one.branch}: ${figure(one.tokens)} tokens${one.aborted ? ", given up" : `, ${figure(one.trained_tokens)} to train`}</option>`)}</select></label></div>`}
    <ol class="rounds" aria-label="rounds: new prompt tokens + sampled tokens">${shown.map((one) => html`<${Round} key=${one.round} round=${one} branch=${branch} lane=${one.branch} />`)}</ol>
    ${shown.length < rounds.length && html`<div class="card-body"><button type="button" onClick=${() => setAll(true)}>Show all ${figure(rounds.length)} rounds</button></div>`}</section>`;
}

// One turn of a conversation. What an agent wrote goes in as text; thoughts and the results of tools can be folded away.

const AT_FIRST = 6000;
const KINDS = { thought: "thought", tool_call: "tool call", tool_result: "tool result" };

function LongText({ text }) {
  const [all, setAll] = useState(false);
  if (text.length <= AT_FIRST || all) return html`<div class="agent-text">${text}</div>`;
  return html`<div class="agent-text">${text.slice(0, AT_FIRST)}</div><button type="button" onClick=${() => setAll(true)}>Show ${count(text.length - AT_FIRST)} more characters</button>`;
}

function Part({ part }) {
  if (part.kind === "text") return html`<${LongText} text=${part.text} />`;
  return html`<details class=${`part ${part.kind}`} open=${part.kind !== "thought" && part.text.length < 1500}><summary>${KINDS[part.kind] ?? part.kind}<span class="soft"> ${plural(part.text.length, "character")}</span></summary><${LongText} text=${part.text} /></details>`;
}

export function Turn({ turn, detail, run, onSaid }) {
  const seeTokens = (event) => {
    event.preventDefault();
    setParams({ part: "tokens", at: turn.token_start });
  };
  return html`<li class=${`turn role-${turn.sampled ? "assistant" : turn.role}`}>
    <div class="turn-head"><strong>${turn.role}</strong>
      ${turn.sampled && html`<span class="soft">round ${turn.round}</span>`}
      ${turn.sampled && html`<span class=${turn.trained ? "trained-mark" : "soft"}>${turn.trained ? "trained" : "not trained"}</span>`}
      ${turn.token_end > turn.token_start && html`<a class="turn-tokens soft" href="#tokens" onClick=${seeTokens}>${plural(turn.token_end - turn.token_start, "token")}</a>`}</div>
    <div class="turn-body">${turn.parts.map((part, index) => html`<${Part} key=${index} part=${part} />`)}
      ${turn.parts.length === 0 && html`<span class="soft">empty</span>`}
      ${turn.cut > 0 && html`<p class="soft">${count(turn.cut)} more characters are left out here; the tokens have them.</p>`}
      ${turn.sampled && detail.episode.session && html`<${Feedback} detail=${detail} run=${run} round=${turn.round} label=${`round ${turn.round}`} onSaid=${onSaid} />`}</div>
  </li>`;
}

// The conversation of a branch, in windows of turns.

const WINDOW = 50;

export function Conversation({ run, id, branch, detail, onSaid }) {
  const [start, setStart] = useState(0);
  const [collapsed, setCollapsed] = useState(null);
  const box = useRef(null);
  useEffect(() => setStart(0), [id, branch]);
  const request = useRequest(`${run} ${id} ${branch} ${start}`, (signal) => source.conversation(run, id, { branch, start, count: WINDOW }, signal), detail.rounds.length);
  useEffect(() => {
    if (collapsed !== null) box.current?.querySelectorAll("details").forEach((one) => { one.open = !collapsed; });
  }, [collapsed]);
  if (!request.data) return html`<div class="card card-body"><${Awaiting} request=${request} what="the conversation" /></div>`;
  const { turns, num_turns: total } = request.data;
  const to = (next) => { setStart(next); box.current?.scrollIntoView({ block: "nearest" }); };
  return html`<section class="card" ref=${box}><div class="card-head"><h2>Conversation</h2><span class="soft">${total > WINDOW ? `turns ${count(request.data.start + 1)} to ${count(request.data.start + turns.length)} of ${count(total)}` : `${total} turns`}</span>
      <span class="push"><button type="button" onClick=${() => setCollapsed(!(collapsed ?? false))}>${collapsed ? "Unfold" : "Fold"} thoughts and tools</button></span></div>
    <ol class="turns">${turns.map((one) => html`<${Turn} key=${`${id} ${one.n}`} turn=${one} detail=${detail} run=${run} onSaid=${onSaid} />`)}</ol>
    ${total > WINDOW && html`<div class="card-body pager"><button type="button" disabled=${start === 0} onClick=${() => to(Math.max(0, start - WINDOW))}>Earlier turns</button>
      <button type="button" disabled=${start + WINDOW >= total} onClick=${() => to(start + WINDOW)}>Later turns</button></div>`}</section>`;
}

// The head of an episode: its state, the way to its neighbours, and why it was not trained.

function GroupWalk({ neighbours, episode, run, part }) {
  const params = { run, ...filtersOf(route.value.params), part };
  const to = (id) => id && go(link("episode", { id, params }));
  useKeys({ "[": () => to(neighbours.previous), "]": () => to(neighbours.next) });
  return html`<span class="walk" role="group" aria-label="in its group"><button type="button" disabled=${!neighbours.previous} onClick=${() => to(neighbours.previous)}>←<kbd>[</kbd><span class="unseen">previous in group</span></button>
    <button type="button" disabled=${!neighbours.next} onClick=${() => to(neighbours.next)}>→<kbd>]</kbd><span class="unseen">next in group</span></button>
    <a class="soft" href=${link("group", { id: String(episode.group_id), params: { run } })}>group ${episode.group_id} <span class="figure">(${plural(neighbours.group.length, "episode")})</span></a></span>`;
}

export function Heading({ detail, run, part }) {
  const { episode, neighbours } = detail;
  const { session } = episode;
  return html`<div class="view-head episode-head"><h1 class="mono">${session?.name || episode.episode_id}</h1>${session && html`<a href=${link("episodes", { params: { run, user: session.user } })}>${session.user}</a>`}<${State} state=${session?.state ?? episode.state} title=${episode.reason ?? ""} />
      <span class="figure">score <strong>${score(episode.score)}</strong></span>
      ${episode.step !== null && html`<a href=${link("step", { id: String(episode.step), params: { run } })}>step ${figure(episode.step)}</a>`}
      <span class="actions">${!session && html`<${GroupWalk} neighbours=${neighbours} episode=${episode} run=${run} part=${part} />`}<${ListWalk} run=${run} seq=${episode.seq} part=${part} /></span></div>
    ${detail.why_untrained && html`<${Notice} tone="warn"><strong>Not trained.</strong> ${detail.why_untrained}<//>`}`;
}

export function Facts({ detail }) {
  const { episode, task, advantages } = detail;
  const { session } = episode;
  const rows = [
    ...(session ? [["user", session.user], ["client", session.client], ["session", session.name], ["id", episode.episode_id], ["kind", session.is_side ? "side call" : session.is_watched ? "answered by another model" : null], ["heard last", session.heard_at && when(session.heard_at)]] : []),
    ["task", episode.task_id], ["agent", episode.agent], ["source", task?.data_source], ["group is", episode.group_state], ["reason", episode.reason ?? episode.group_reason],
    ["started", episode.started_at === null ? null : (session ? when : clock)(episode.started_at)], ["attempt", episode.attempt > 0 ? episode.attempt + 1 : null], ["rounds", figure(episode.rounds)], ["tokens that may be trained", figure(episode.tokens)],
    ["versions", episode.version === null ? null : episode.version === episode.max_version ? figure(episode.version) : `${figure(episode.version)} to ${figure(episode.max_version)}`],
    ["advantage", advantages && `${figure(advantages.mean)}${advantages.min === advantages.max ? "" : ` (${figure(advantages.min)} to ${figure(advantages.max)})`}`],
    ["ground truth", task?.ground_truth === null || task?.ground_truth === undefined ? null : typeof task.ground_truth === "string" ? task.ground_truth : JSON.stringify(task.ground_truth)],
  ];
  return html`<section class="card"><div class="card-head"><h2>Facts</h2></div><dl class="card-body facts">${rows.filter(([, value]) => value).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="agent-line">${value}</dd>`)}</dl></section>`;
}

// A group: its task, and its episodes side by side.

function Row({ one, run }) {
  return html`<tr><td><a href=${link("episode", { id: one.episode_id, params: { run } })}>${one.episode_id}</a></td><td><${State} state=${one.state} /></td><td class="number"><strong>${score(one.score)}</strong></td>
    <td class="number">${figure(one.rounds)}</td><td class="number">${figure(one.tokens)}</td><td class="number">${figure(one.version)}</td>
    <td class="soft">${[one.reason, one.cut ? "cut at max_tokens" : null, ...one.breaks, one.greedy ? "greedy" : null].filter(Boolean).join(" · ")}</td></tr>`;
}

const text = (content) => (typeof content === "string" ? content : JSON.stringify(content, null, 1));

function Task({ task }) {
  if (!task) return html`<${Notice}>This group was opened by a request: it has no task.<//>`;
  return html`<section class="card"><div class="card-head"><h2>Task</h2><span class="soft mono">${task.task_id}</span></div>
    <ol class="turns">${(task.prompt ?? []).map((one, index) => html`<li class=${`turn role-${one.role}`} key=${index}><div class="turn-head"><strong>${one.role}</strong></div><div class="turn-body"><div class="agent-text">${text(one.content)}</div></div></li>`)}</ol>
    ${task.ground_truth !== null && task.ground_truth !== undefined && html`<dl class="card-body facts"><dt>ground truth</dt><dd class="agent-line">${text(task.ground_truth)}</dd></dl>`}</section>`;
}

export function GroupView({ run, id }) {
  const revision = useThrottled(ledgerRevision);
  const request = useRequest(`${run} ${id}`, (signal) => source.group(run, id, signal), revision);
  if (!request.data) return html`<${Awaiting} request=${request} what=${`group ${id}`} />`;
  const { group, task, episodes } = request.data;
  return html`<div class="view-head"><h1>Group ${group.group_id}</h1><${State} state=${group.state} title=${group.reason ?? ""} />
      ${group.mean !== null && html`<span class="figure">mean <strong>${score(group.mean)}</strong><span class="soft"> ± ${score(group.std)}</span></span>`}
      ${group.step !== null && html`<a href=${link("step", { id: String(group.step), params: { run } })}>step ${figure(group.step)}</a>`}
      <span class="soft">${plural(group.num_scored, "scored", "scored")} of ${group.size}, open since ${duration(group.age_s)}${group.reason ? `, ${group.reason}` : ""}</span></div>
    <div class="stack"><section class="card"><div class="table-box" tabindex="0" role="region" aria-label="episodes of the group"><table><thead><tr><th scope="col">Episode</th><th scope="col">State</th><th scope="col" class="number">Score</th><th scope="col" class="number">Rounds</th><th scope="col" class="number">Tokens</th><th scope="col" class="number">Version</th><th scope="col">Remarks</th></tr></thead>
      <tbody>${episodes.map((one) => html`<${Row} key=${one.episode_id} one=${one} run=${run} />`)}</tbody></table></div></section><${Task} task=${task} /></div>`;
}

// One episode: what was said first; beside it its tree, its scores and its facts; then its tokens.

function Parts({ part }) {
  const choose = (next) => setParams({ part: next === "conversation" ? undefined : next });
  return html`<div class="segmented part-choice" role="group" aria-label="show">${["conversation", "tokens"].map((one) => html`<button key=${one} type="button" aria-pressed=${one === part} onClick=${() => choose(one)}>${one}</button>`)}</div>`;
}

export function EpisodeView({ run, id }) {
  const { params } = route.value;
  const [said, setSaid] = useState(0);
  const revision = useThrottled(ledgerRevision);
  const onSaid = () => setSaid((number) => number + 1);
  const request = useRequest(`${run} ${id}`, (signal) => source.episode(run, id, signal), serves.value ? `${revision} ${said}` : "");
  const detail = request.data;
  const part = params.part === "tokens" ? "tokens" : "conversation";
  if (!detail || request.error) return html`<${Awaiting} request=${request} what=${`episode ${id}`} />`;
  const branch = Number(params.branch ?? 0);
  const shown = detail.episode.episode_id;
  return html`<${Heading} detail=${detail} run=${run} part=${params.part} />
    <div class=${`episode-parts with-${part}`}>
      <div class="stack"><${Parts} part=${part} />
        ${part === "tokens" ? html`<${TokenView} run=${run} id=${shown} branch=${branch} advantages=${detail.advantages} />` : html`<${Conversation} run=${run} id=${shown} branch=${branch} detail=${detail} onSaid=${onSaid} />`}</div>
      <div class="stack side">${detail.episode.session && html`<${SessionFeedback} detail=${detail} run=${run} onSaid=${onSaid} />`}<${BranchTree} detail=${detail} branch=${branch} /><${ScoreTable} scores=${detail.scores} /><${Facts} detail=${detail} /></div>
    </div>`;
}
