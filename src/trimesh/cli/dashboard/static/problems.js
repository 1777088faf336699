// The problem strip: one line for each problem, most urgent first. What is behind one opens beside the tab.

import { html } from "./markup.js";
import { Sample } from "./meshes.js";
import { LETTERS_OF } from "./cells.js";
import { age, clock, many } from "./format.js";
import { store, update } from "./store.js";
import { selectByName } from "./detail.js";

const SIGNS = {
  ended: "✝",
  failure: "✖",
  deadlock: "⟳",
  "waited for": "⏳",
  full: "▤",
  pinned: "◉",
  alone: "1",
  absent: "?",
  memory: "▲",
  unread: "∅",
  restarted: "✓",
};

export const idOf = (problem) => `${problem.kind} ${problem.names.join(" ")} ${problem.at}`;

const classOf = (problem) => (problem.kind === "restarted" ? "resolved" : problem.is_sure ? "sure" : "unsure");

/** Open what is behind a problem, and its member below it. */
export function open(problem) {
  update({ opened: idOf(problem), folded: false });
  if (problem.names.length) selectByName(problem.names[0]);
  else update({ selected: "", detail: null });
}

export function Problems({ board, opened, folded, scheme }) {
  const { problems } = board;
  if (!problems.length) {
    const processes = Object.values(board.procs).reduce((sum, number) => sum + number, 0);
    return html`<section class="problems none" aria-label="problems"><p>✓ no problem found in ${many(processes, "process")}</p></section>`;
  }
  const kinds = [...new Set(problems.map((one) => one.kind))].join(", ");
  return html`<section class="problems" aria-label="problems">
    ${folded
      ? html`<p class=${classOf(problems[0])}>${kinds}</p>`
      : html`<ol>
          ${problems.map((one) => html`<${Line} key=${idOf(one)} one=${one} now=${board.at} isOpen=${opened === idOf(one)} scheme=${scheme} />`)}
        </ol>`}
    <button type="button" class="fold" aria-expanded=${String(!folded)} onClick=${() => update({ folded: !folded })}>
      ${problems.length}<span class="word"> problem${problems.length > 1 ? "s" : ""}</span> <span aria-hidden="true">${folded ? "▾" : "▴"}</span>
    </button>
  </section>`;
}

function Sign({ kind, scheme }) {
  const letter = LETTERS_OF[kind];
  return html`<span class="sign" aria-hidden="true">${letter ? html`<${Sample} letter=${letter} scheme=${scheme} />` : SIGNS[kind]}</span>`;
}

function Line({ one, now, isOpen, scheme }) {
  return html`<li class=${classOf(one)}>
    <button type="button" class="problem" aria-pressed=${String(isOpen)} onClick=${() => (isOpen ? update({ opened: "" }) : open(one))}>
      <${Sign} kind=${one.kind} scheme=${scheme} />
      <span class="kind">${one.kind}</span>
      <span class="title">${one.title} <span class="text">${one.text}</span></span>
      ${one.when > 0 && html`<time>${clock(one.when)}, ${age(now - one.when)}</time>`}
    </button>
  </li>`;
}

/** What is behind a problem: its text, where it is, and the chain that leads there. */
export function ProblemDetail({ one, scheme }) {
  return html`<section class=${`behind ${classOf(one)}`} aria-label="problem">
    <h2><${Sign} kind=${one.kind} scheme=${scheme} /> ${one.title}</h2>
    ${one.text && html`<p>${one.text}</p>`}
    ${one.at && html`<p><code>${one.at}</code></p>`}
    ${one.chain.length > 0 && html`<ol class="chain">${one.chain.map((line, at) => html`<li key=${at}><code>${line}</code></li>`)}</ol>`}
    ${one.count > 1 && html`<p>${one.names.map((name) => html`<${Member} key=${name} name=${name} />`)}${one.count > one.names.length && html`<span class="dim">and ${one.count - one.names.length} more</span>`}</p>`}
    ${one.parts.length > 0 && html`<p>with it ${one.parts.map((name) => html`<${Member} key=${name} name=${name} />`)}</p>`}
  </section>`;
}

function Member({ name }) {
  return html`<button type="button" class="link" onClick=${() => selectByName(name)}>${name}</button> `;
}

/** Return the problem that is open, if it is still there. */
export function openedProblem() {
  return store.board.problems.find((one) => idOf(one) === store.opened);
}
