// The page: a head with the run and the views, and the view that the address names.
import { html, render, effect } from "./core/html.js";
import { route } from "./core/route.js";
import { applyTheme } from "./core/theme.js";
import { currentRun, loadProblem, loadRuns, runs } from "./data/runs.js";
import { followRuns, generation } from "./data/live.js";
import { Boundary } from "./parts/boundary.js";
import { Header } from "./parts/header.js";
import { Notice } from "./parts/notice.js";
import { MachineView } from "./views/machine/machine_view.js";
import { CurvesView } from "./views/curves/curves_view.js";
import { StepView } from "./views/step/step_view.js";
import { EpisodesView } from "./views/episodes/episodes_view.js";
import { UntrainedView } from "./views/episodes/untrained_view.js";
import { GroupView } from "./views/episode/group_view.js";
import { EpisodeView } from "./views/episode/episode_view.js";
import { WhyView } from "./views/why/why_view.js";

const VIEWS = {
  machine: MachineView, curves: CurvesView, step: StepView, episodes: EpisodesView,
  untrained: UntrainedView, group: GroupView, episode: EpisodeView, why: WhyView,
};

function Page() {
  const { view, id } = route.value;
  if (loadProblem.value && !runs.value.length) return html`<${Notice} tone="bad">${loadProblem.value}<//>`;
  const run = currentRun.value;
  if (!run) return html`<p class="boot">Loading …</p>`;
  const View = VIEWS[view];
  return html`<${Header} />
    <main class=${`view view-${view}`} id="main" tabindex="-1">
      ${View ? html`<${Boundary} key=${`${view} ${run} ${generation.value}`}><${View} run=${run} id=${id} /><//>`
        : html`<${Notice} tone="warn">There is no view named ${view}. <a href="#/machine">The machine</a><//>`}
    </main>`;
}

effect(applyTheme);
effect(() => {
  const { view, id } = route.value;
  document.title = [id || view, currentRun.value, "understudy"].filter(Boolean).join(" · ");
});
const root = document.getElementById("app");
root.replaceChildren();
render(html`<${Page} />`, root);
followRuns();
loadRuns();
