// The page: what is wrong first, then one tab, and beside it the member that was chosen.

import { html, render } from "./markup.js";
import { WORDS, forgetColours } from "./cells.js";
import { Sample } from "./meshes.js";
import { age, clock, count, day, many, shortened, size } from "./format.js";
import { Aside, look, selectByName } from "./detail.js";
import { Dialog } from "./act.js";
import { Problems, openedProblem } from "./problems.js";
import { begin, follow } from "./run.js";
import { Runs } from "./runs.js";
import { listen } from "./keys.js";
import { onChange, store, update } from "./store.js";
import { TABS } from "./tabs.js";

const root = document.querySelector("#page");
const dark = matchMedia("(prefers-color-scheme: dark)");

function Page({ store }) {
  const { board } = store;
  if (store.isList) return html`<${Runs} />`;
  if (!board) return html`<p class="starting">${store.connection === "lost" ? "the page's server does not answer ..." : "asking the run ..."}</p>`;
  const { shows: Tab } = TABS.find((tab) => tab.key === store.tab);
  const problem = openedProblem();
  return html`<header><${Head} store=${store} /></header>
    <${Problems} board=${board} opened=${store.opened} folded=${store.folded} scheme=${store.scheme} />
    <nav aria-label="tabs">
      ${TABS.map(
        (tab, at) => html`<button
          key=${tab.key}
          type="button"
          class="tab"
          aria-current=${tab.key === store.tab ? "page" : undefined}
          onClick=${() => update({ tab: tab.key })}
        ><kbd>${(at + 1) % 10}</kbd> ${tab.title}${tab.of ? html` <span class="dim">${count(tab.of(board))}</span>` : ""}</button>`,
      )}
      <input id="filter" type="search" placeholder="/ filter" aria-label="filter" value=${store.filter} onInput=${(event) => update({ filter: event.target.value })} />
      <button type="button" onClick=${() => update({ dialog: "keys" })}><kbd>?</kbd> keys</button>
    </nav>
    <div class=${`body ${store.detail || problem || store.call ? "split" : ""}`}>
      <main aria-label=${store.tab} tabindex="0"><${Tab} store=${store} /></main>
      ${(store.detail || problem || store.call) && html`<${Aside} problem=${problem} call=${store.call} detail=${store.detail} said=${store.said} scheme=${store.scheme} />`}
    </div>
    <${Dialog} dialog=${store.dialog} />`;
}

function Head({ store }) {
  const { board } = store;
  const { job } = board;
  const states = Object.entries(board.procs).map(([state, number]) => `${count(number)} ${state}`);
  const cut = Object.entries(board.left_out).map(([table, number]) => `${count(number)} ${table}`);
  const processes = Object.values(board.procs).reduce((sum, number) => sum + number, 0);
  const controller = board.meshes.find((grid) => grid.kind === "procs" && grid.name === "controller");
  return html`<a href="?runs" title="all runs of this user">runs</a>
    <h1>${job ? html`run ${job.pid} <span class="command" title=${job.command}>${shortened(job.command)}</span>` : "a run"}</h1>
    ${job && html`<span>${board.state === "ended" ? "ran" : job.state}${job.started_at ? ` for ${age(board.at - job.started_at)}` : ""}${job.stopping.length ? `: ${job.stopping.join(", ")}` : ""}</span>`}
    ${controller && html`<${Controller} grid=${controller} scheme=${store.scheme} />`}
    <span>${many(processes, "process")}: ${states.join(", ")}</span>
    ${cut.length > 0 && html`<span class="dim" title=${cut.join(", ")}>rows cut</span>`}
    <${Connection} store=${store} />`;
}

function Controller({ grid, scheme }) {
  const use = [`${(grid.cpu || [])[0] || 0} % CPU`, size(((grid.memory || [])[0] || 0) * 1024 * 1024)];
  return html`<button type="button" class="controller" onClick=${() => selectByName("controller")}>
    controller <${Sample} letter=${grid.letters[0] || "r"} scheme=${scheme} /> ${WORDS[grid.letters[0]]}, ${use.join(", ")}
  </button>`;
}

function Connection({ store }) {
  const { board, connection } = store;
  if (connection === "lost") return html`<p class="connection bad" role="alert">the page's server does not answer; last seen ${clock(board.at)}</p>`;
  if (board.state === "ended") return html`<p class="connection bad" role="alert">the run has ended; last seen ${day(board.at)}</p>`;
  if (board.state === "silent") return html`<p class="connection bad" role="alert">no answer: ${board.said}; last seen ${clock(board.at)}</p>`;
  if (board.by === "thread") return html`<p class="connection bad" role="alert">the Trio loop of the controller does not run; a thread answers for it</p>`;
  return html`<p class="connection"><span class="pulse" aria-hidden="true">●</span> live ${clock(board.at)}</p>`;
}

let seen = -1;

function paint() {
  const scheme = dark.matches ? "dark" : "light";
  if (scheme !== store.scheme) forgetColours();
  store.scheme = scheme;
  render(html`<${Page} store=${{ ...store }} />`, root);
  const { board } = store;
  if (!board || board.number === seen) return;
  seen = board.number;
  const wrong = board.problems.filter((one) => one.is_sure).length;
  document.title = `${wrong ? `(${wrong}) ` : ""}trimesh ${board.job ? board.job.pid : ""}`;
  if (store.detail && board.state === "live") look();
}

root.replaceChildren();
onChange(paint);
dark.addEventListener("change", paint);
listen();
paint();
begin().then(
  (isRun) => (isRun ? follow() : update({ isList: true })),
  () => update({ connection: "lost" }),
);
