// One episode: what was said first; beside it its tree, its scores and its facts; then its tokens.
import { html } from "../../core/html.js";
import { route, setParams } from "../../core/route.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { Awaiting } from "../../parts/notice.js";
import { BranchTree } from "./branch_tree.js";
import { Conversation } from "./conversation.js";
import { Facts, Heading } from "./heading.js";
import { ScoreTable } from "./score_table.js";
import { TokenView } from "./token_view.js";

function Parts({ part }) {
  const choose = (next) => setParams({ part: next === "conversation" ? undefined : next });
  return html`<div class="segmented part-choice" role="group" aria-label="show">${["conversation", "tokens"].map((one) => html`<button key=${one} type="button" aria-pressed=${one === part} onClick=${() => choose(one)}>${one}</button>`)}</div>`;
}

export function EpisodeView({ run, id }) {
  const { params } = route.value;
  const request = useRequest(`${run} ${id}`, (signal) => source.episode(run, id, signal));
  const detail = request.data;
  const part = params.part === "tokens" ? "tokens" : "conversation";
  if (!detail || request.error) return html`<${Awaiting} request=${request} what=${`episode ${id}`} />`;
  const branch = Number(params.branch ?? 0);
  const shown = detail.episode.episode_id;
  return html`<${Heading} detail=${detail} run=${run} part=${params.part} />
    <div class=${`episode-parts with-${part}`}>
      <div class="stack"><${Parts} part=${part} />
        ${part === "tokens" ? html`<${TokenView} run=${run} id=${shown} branch=${branch} advantages=${detail.advantages} />` : html`<${Conversation} run=${run} id=${shown} branch=${branch} />`}</div>
      <div class="stack side"><${BranchTree} detail=${detail} branch=${branch} /><${ScoreTable} scores=${detail.scores} /><${Facts} detail=${detail} /></div>
    </div>`;
}
