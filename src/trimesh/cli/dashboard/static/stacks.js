// Where calls run, and main threads whose loop does not turn; equal stacks once, the rarest first.

import { html, useEffect, useState } from "./markup.js";
import { ask } from "./run.js";
import { selectByName } from "./detail.js";

const NAMES = 6;

export function Stacks({ store }) {
  const [stacks, setStacks] = useState(null);
  useEffect(() => {
    let isOver = false;
    ask("stacks").then((found) => isOver || setStacks(found), () => {});
    return () => {
      isOver = true;
    };
  }, [store.board.number]);
  if (stacks === null) return html`<p class="dim">asking ...</p>`;
  const { filter } = store;
  const shown = stacks.filter((one) => !filter || [one.what, ...one.lines, ...one.members].some((text) => text.includes(filter)));
  if (!shown.length) return html`<p class="dim">no stack is known: no call runs, and all loops turn</p>`;
  return shown.map(
    (one, at) => html`<section key=${at} class="shared">
      <h2>${one.what} <span class="dim">×${one.members.length}</span></h2>
      <p>
        ${one.members.slice(0, NAMES).map((name) => html`<button key=${name} type="button" class="link" onClick=${() => selectByName(name)}>${name}</button> `)}
        ${one.members.length > NAMES && html`<span class="dim">and ${one.members.length - NAMES} more</span>`}
      </p>
      <pre class="stack">${one.lines.join("\n")}</pre>
    </section>`,
  );
}
