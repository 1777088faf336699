// The run: boards as they come, and answers to questions. All addresses are relative, so that a prefix is no matter.

import { store, update } from "./store.js";

const HISTORY_MAX = 1000;
const RUN = new URLSearchParams(location.search).get("run"); // null: the one that the command has named
let actToken = "";

/** Return the address of a question about the run that is shown. */
export function addressOf(path, values = {}) {
  const query = new URLSearchParams({ ...values, ...(RUN === null ? {} : { run: RUN }) }).toString();
  return `api/${path}${query && `?${query}`}`;
}

/** Return the answer to a question; throw an Error in words where there is none. */
export async function ask(path, values = {}) {
  return await read(await fetch(addressOf(path, values), { credentials: "same-origin" }));
}

/** Return whether there is a run to show; else the runs are listed. */
export async function begin() {
  const session = await ask("session");
  actToken = session.act;
  return RUN !== null || (session.has_first && !new URLSearchParams(location.search).has("runs"));
}

/** Have something done: "kill" a process, "cancel" a call. */
export async function act(what, target) {
  const answer = await fetch(addressOf(what), {
    method: "POST",
    credentials: "same-origin",
    headers: { "content-type": "application/json", "x-trimesh-token": actToken },
    body: JSON.stringify({ target }),
  });
  return await read(answer);
}

async function read(answer) {
  const text = await answer.text();
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error(text.trim() || `the page's server replied ${answer.status}`);
  }
  if (value && value.error) throw new Error(value.error);
  return value;
}

/** Follow the run; the browser connects again by itself. Each board is measured, from its coming to the drawn page. */
export function follow() {
  const source = new EventSource(addressOf("stream"));
  source.onopen = () => update({ connection: "open" });
  source.onerror = () => update({ connection: "lost" });
  source.addEventListener("history", (event) => {
    store.history = JSON.parse(event.data);
  });
  source.addEventListener("board", (event) => {
    const start = performance.now();
    const board = JSON.parse(event.data);
    if (board.state === "live") {
      const last = store.history[store.history.length - 1];
      if (!last || last.at < board.sums.at) store.history = [...store.history.slice(1 - HISTORY_MAX), board.sums];
    }
    const isFirst = store.board === null;
    update({ board, connection: "open" });
    performance.measure("trimesh:frame", { start, end: performance.now() });
    if (isFirst) requestAnimationFrame(() => setTimeout(() => performance.mark("trimesh:shown")));
    if (performance.getEntriesByName("trimesh:frame").length > HISTORY_MAX) performance.clearMeasures("trimesh:frame");
  });
}
