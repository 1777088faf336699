// What is wrong, what needs a look first; each with what is behind it.

import { html } from "./markup.js";
import { Sample } from "./meshes.js";
import { LETTERS_OF } from "./cells.js";
import { clock, count } from "./format.js";
import { update } from "./store.js";
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
  mended: "✓",
};

export const idOf = (problem) => `${problem.kind} ${problem.names.join(" ")} ${problem.at}`;

/** Open what is behind a problem, and its member beside it. */
export function open(problem) {
  update({ opened: idOf(problem) });
  if (problem.names.length) selectByName(problem.names[0]);
}

export function Problems({ board, opened, scheme }) {
  const { problems } = board;
  if (!problems.length) {
    const many = Object.values(board.procs).reduce((sum, number) => sum + number, 0);
    return html`<section class="problems fine" aria-label="what is wrong">
      <p>✓ Nothing that is known to be wrong: ${count(many)} processes run.</p>
    </section>`;
  }
  const sure = problems.filter((one) => one.is_sure).length;
  return html`<section class=${`problems ${sure ? "bad" : "odd"}`} aria-label="what is wrong">
    <ol>
      ${problems.map((one, at) => html`<${Problem} key=${idOf(one)} one=${one} isOpen=${opened ? opened === idOf(one) : at === 0} scheme=${scheme} />`)}
    </ol>
  </section>`;
}

function Problem({ one, isOpen, scheme }) {
  const letter = LETTERS_OF[one.kind];
  const isLong = one.chain.length > 0;
  return html`<li class=${one.kind === "mended" ? "mended" : one.is_sure ? "sure" : "unsure"}>
    <button type="button" class="problem" aria-expanded=${isLong ? String(isOpen) : undefined} onClick=${() => open(one)}>
      <span class="sign" aria-hidden="true">${letter ? html`<${Sample} letter=${letter} scheme=${scheme} />` : SIGNS[one.kind]}</span>
      <span class="kind">${one.kind}</span>
      <span class="title">${one.title}</span>
      ${one.when > 0 && html`<time>${clock(one.when)}</time>`}
      ${one.text && html`<span class="text">${one.text}</span>`}
      ${one.at && html`<code class="at">${one.at}</code>`}
    </button>
    ${isOpen && isLong && html`<ol class="chain">${one.chain.map((line, at) => html`<li key=${at}><code>${line}</code></li>`)}</ol>`}
  </li>`;
}
