// Overview: sums over the run, curves of the program, the meshes, the newest events.

import { html } from "./markup.js";
import { Curves } from "./curves.js";
import { Meshes } from "./meshes.js";
import { clock, count, many, rounded, size } from "./format.js";
import { selectByName } from "./detail.js";
import { update } from "./store.js";

const EVENTS = 7;
const POINTS = 60;

const known = (value, text) => (value === null ? "–" : text(value));

// Each tile: its words, its value, and the sum whose past is drawn.
const TILES = [
  { title: "processes", value: (board) => count(total(board)), note: ({ sums }) => (sums.failed ? `${count(sums.failed)} not running` : sums.deaths ? many(sums.deaths, "death") : "all run"), key: "failed" },
  { title: "calls/s", value: ({ sums }) => known(sums.ended, count), note: ({ sums }) => `${count(sums.calls)} under way`, key: "ended" },
  { title: "errors", value: ({ sums }) => known(sums.errors, count), note: () => "calls that raised", key: "errors" },
  { title: "bytes/s", value: ({ sums }) => known(sums.nbytes, size), note: ({ sums }) => `${known(sums.messages, count)} messages/s`, key: "nbytes" },
  { title: "CPU", value: ({ sums }) => known(sums.cpu, rounded), note: (board) => `cores, on ${many(board.host_count, "host")}`, key: "cpu" },
  { title: "memory", value: ({ sums }) => size(sums.memory), note: (board) => `in ${many(total(board), "process")}`, key: "memory" },
  { title: "GPU", value: ({ sums }) => `${sums.gpu} %`, note: ({ sums }) => `${size(sums.gpu_memory)} used`, key: "gpu" },
];

const total = (board) => Object.values(board.procs).reduce((sum, number) => sum + number, 0);

export function Overview({ store }) {
  const { board, history } = store;
  return html`<div class="tiles">
      ${TILES.filter((tile) => tile.key !== "gpu" || board.sums.gpu_memory).map(
        (tile) => html`<div class="tile" key=${tile.title}>
          <span class="dim">${tile.title}</span>
          <b>${tile.value(board)}</b>
          <span class="dim">${tile.note(board)}</span>
          <${Past} values=${history.slice(-POINTS).map((sums) => sums[tile.key])} />
        </div>`,
      )}
    </div>
    ${board.curves > 0 && html`<${Curves} store=${store} most=${4} />`}
    <${Meshes} store=${store} extra=${html`<${LastEvents} board=${board} />`} />`;
}

/** A line through values, without axes. */
function Past({ values }) {
  const known = values.filter((value) => value !== null);
  const most = Math.max(1e-9, ...known);
  const points = values.map((value, at) => (value === null ? "" : `${(72 * at) / Math.max(1, values.length - 1)},${17 - (16 * value) / most}`));
  return html`<svg class="past" width="72" height="18" aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}

/** Return events with those that differ only in their member as one: what has happened to a mesh is one line. */
export function grouped(events) {
  const groups = [];
  for (const event of events) {
    const key = `${event.kind} ${event.text}`;
    const last = groups[groups.length - 1];
    if (last && last.key === key && last.event.at - event.at < 1) last.count += 1;
    else groups.push({ key, event, count: 1 });
  }
  return groups;
}

function LastEvents({ board }) {
  const shown = grouped(board.events).slice(0, EVENTS);
  return html`<section class="card last" aria-label="last events">
    <header>
      <h2>last events</h2>
      <button type="button" class="link" onClick=${() => update({ tab: "events" })}>all ${count(board.events.length)}</button>
    </header>
    ${!shown.length && html`<p class="dim">no member has started, died or stalled since the run was opened</p>`}
    <ul class="plain">
      ${shown.map(
        ({ event, count: members }) => html`<li key=${event.number}>
          <time>${clock(event.at)}</time>
          <span class=${event.is_failure ? "wrong" : ""}>${event.kind}</span>
          <button type="button" class="link" title=${event.text} onClick=${() => selectByName(event.name)}>${event.name}</button>
          ${members > 1 && html`<span class="dim">and ${members - 1} more</span>`}
        </li>`,
      )}
    </ul>
  </section>`;
}
