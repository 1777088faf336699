// What processes have written, newest last; equal lines of several within a second are one.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./markup.js";
import { ask } from "./run.js";
import { clock } from "./format.js";
import { selectByName } from "./detail.js";

const LINES_MAX = 2000;
const kept = { lines: [], newest: 0, asking: false };

export function Logs({ store }) {
  const [, setNewest] = useState(0);
  const [error, setError] = useState("");
  const box = useRef(null);
  const follows = useRef(true);
  useEffect(() => {
    if (kept.asking) return;
    kept.asking = true;
    ask("logs", { after: kept.newest })
      .then(
        (found) => {
          kept.lines = [...kept.lines, ...found.lines].slice(-LINES_MAX);
          kept.newest = found.newest;
          setNewest(found.newest);
          setError("");
        },
        (problem) => setError(problem.message),
      )
      .finally(() => {
        kept.asking = false;
      });
  }, [store.board.number]);
  const { filter } = store;
  const shown = kept.lines.filter(({ row, names }) => !filter || row.text.includes(filter) || names.some((name) => name.includes(filter)));
  useLayoutEffect(() => {
    if (follows.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const onScroll = () => {
    if (!box.current) return; // the tab was left before the browser said that it had been scrolled
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.current = scrollTop + clientHeight > scrollHeight - 30;
  };
  return html`${error && store.board.state === "live" && html`<p class="cut">${error}</p>`}
    ${!shown.length && html`<p class="dim">${filter ? `no line has ${filter}` : "nothing was written; only processes whose output is \"forward\" are here"}</p>`}
    <div class="logs" ref=${box} onScroll=${onScroll} tabindex="0" aria-label="output of processes">
      ${shown.map(
        ({ row, names, count }) => html`<div key=${row.number} class=${row.stream === 2 ? "line error" : "line"}>
          <time>${clock(row.at, true)}</time>
          <button type="button" class="link who" title=${names.join(", ")} onClick=${() => selectByName(names[0])}>${names[0]}${count > 1 ? ` ×${count}` : ""}</button>
          <span class="stream-mark">${row.stream === 2 ? "!" : ""}</span>
          <span class="text">${row.dropped ? `(${row.dropped} lines lost: they came faster than they could be shown)` : row.text}</span>
        </div>`,
      )}
    </div>`;
}
