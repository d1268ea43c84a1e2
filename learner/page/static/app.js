// The page: a head with the run and the views, and the view that the address names.
import { html, render, effect, route, applyTheme } from "./core.js";
import { currentRun, loadProblem, loadRuns, runs, followRuns, generation } from "./data.js";
import { Boundary, Header, Notice } from "./parts.js";
import { CurvesView } from "./views/curves.js";
import { GroupView, EpisodeView } from "./views/episode.js";
import { EpisodesView, UntrainedView } from "./views/episodes.js";
import { MachineView } from "./views/machine.js";
import { StepView } from "./views/step.js";
import { VersionsView } from "./views/versions.js";
import { WhyView } from "./views/why.js";

const VIEWS = {
  machine: MachineView, curves: CurvesView, step: StepView, episodes: EpisodesView,
  untrained: UntrainedView, group: GroupView, episode: EpisodeView, why: WhyView, versions: VersionsView,
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
