// All that is known of one member, beside the rest: what it does, where, since when, and what can be done to it.

import { html } from "./markup.js";
import { ask } from "./run.js";
import { confirmed } from "./act.js";
import { cellOf } from "./layout.js";
import { LETTERS_OF } from "./cells.js";
import { Sample } from "./meshes.js";
import { ProblemDetail } from "./problems.js";
import { clock, count, duration, latency, size } from "./format.js";
import { store, update } from "./store.js";

/** Show a member: "procs:MESH:CELL", or its name. */
export function select(selected) {
  update({ selected, said: "" });
  look();
}

/** Show a member by its name; it is marked in its mesh, too. */
export function selectByName(name) {
  for (const grid of store.board.meshes) {
    const cell = cellOf(grid, name);
    if (cell >= 0) return select(`${grid.kind}:${grid.name}:${cell}`);
  }
  return select(name);
}

/** Ask for what is selected, as it is now. */
export async function look() {
  const name = store.selected;
  if (!name) return;
  let detail = null;
  try {
    detail = await ask("detail", { name });
  } catch (error) {
    detail = { error: error.message };
  }
  if (store.selected === name) update({ detail });
}

/** What stands beside the tab: the problem that is open, the call that was clicked in the time line, then the member that is selected. */
export function Aside({ problem, call, detail, said, scheme }) {
  const close = () => update({ selected: "", detail: null, opened: "", call: null, said: "" });
  return html`<aside class="detail" aria-label="detail">
    <button type="button" class="close" onClick=${close} aria-label="close (Escape)">×</button>
    ${problem && html`<${ProblemDetail} one=${problem} scheme=${scheme} />`}
    ${call && html`<${PastCall} call=${call} />`}
    ${detail && html`<${Detail} detail=${detail} said=${said} scheme=${scheme} />`}
  </aside>`;
}

function Detail({ detail, said, scheme }) {
  if (detail.error) return html`<p>${detail.error}</p>`;
  const { activity } = detail;
  const { proc } = activity;
  const state = `${proc.state}${proc.stalled_seconds ? ` for ${duration(proc.stalled_seconds)}` : ""}`;
  return html`<section aria-label="member">
    <h2 class="member">${proc.name}</h2>
    <p class="state"><${Sample} letter=${LETTERS_OF[proc.state] || "r"} scheme=${scheme} /> ${state}</p>
    <dl>
      <dt>pid</dt>
      <dd>${proc.pid} on ${proc.host || "this host"}</dd>
      <dt>memory</dt>
      <dd>${size(proc.memory_bytes)}</dd>
      <dt>messages</dt>
      <dd>${count(activity.received)}/s in, ${count(activity.sent)}/s out, ${size(activity.nbytes)}/s</dd>
      ${proc.incarnation > 0 && html`<dt>incarnation</dt><dd>${proc.incarnation}</dd>`}
      ${proc.last_event && html`<dt>last</dt><dd>${proc.last_event}</dd>`}
      ${proc.record && html`<dt>record</dt><dd><code>${proc.record}</code></dd>`}
    </dl>
    ${detail.is_ours &&
    html`<p>
      <button type="button" class="danger" onClick=${() => confirmed("kill", proc.id, `Kill ${proc.name}?`, "Its mesh handles the death by its policy.")}>
        kill this process
      </button>
    </p>`}
    ${said && html`<p role="status" class="answer">${said}</p>`}
    ${proc.stack && html`<h3>stack of its main thread, innermost first</h3><${Lines} lines=${proc.stack.split("\n")} />`}
    <h3>${detail.calls.length ? `calls to it: ${detail.calls.length}` : "no call to it is under way"}</h3>
    ${detail.calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${detail.made.length > 0 && html`<h3>calls it waits for: ${detail.made.length}</h3>`}
    ${detail.made.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${detail.actors.length > 0 &&
    html`<h3>actors</h3>
      <table>
        <thead><tr><th>actor</th><th>state</th><th class="number">running</th><th class="number">queued</th></tr></thead>
        <tbody>
          ${detail.actors.map(
            (actor) => html`<tr key=${actor.name}>
              <td>${actor.name} <span class="dim">${actor.cls}</span></td>
              <td>${actor.state}</td>
              <td class="number">${actor.running}</td>
              <td class="number">${actor.queued}</td>
            </tr>`,
          )}
        </tbody>
      </table>`}
    ${detail.events.length > 0 &&
    html`<h3>events</h3>
      <ul class="plain">
        ${detail.events.map((event) => html`<li key=${event.number}><time>${clock(event.at)}</time> <b>${event.kind}</b> ${event.text}</li>`)}
      </ul>`}
  </section>`;
}

const OUTCOMES = ["runs", "returned", "raised", "cancelled"];

/** A call of the time line. */
function PastCall({ call }) {
  if (call.error && !call.name) return html`<p>${call.error}</p>`;
  return html`<section class="behind" aria-label="call">
    <h2>${call.name}</h2>
    <dl>
      <dt>outcome</dt>
      <dd class=${call.outcome === 2 ? "wrong" : ""}>${OUTCOMES[call.outcome]}</dd>
      <dt>arrived</dt>
      <dd>${clock(call.at, true)}${call.caller && `, from ${call.caller}`}</dd>
      <dt>waited</dt>
      <dd>${latency(call.waited)} in the mailbox</dd>
      ${call.outcome > 0 && html`<dt>took</dt><dd>${latency(call.lasted)} from its arrival</dd>`}
      ${call.error && html`<dt>error</dt><dd>${call.error}</dd>`}
      ${call.line && html`<dt>at</dt><dd><code>${call.line}</code></dd>`}
    </dl>
    ${call.of > 1 && html`<p class="dim">The first of ${count(call.of)} calls that are one bar: zoom in for the others.</p>`}
  </section>`;
}

function Call({ call }) {
  return html`<div class="call">
    <b>${call.name}.${call.endpoint}</b> ${call.state} for ${duration(call.age)}
    ${call.caller && html`<span class="dim"> from ${call.caller}</span>`}
    <${Deadline} left=${call.left} age=${call.age} />
    ${call.waits.map((wait, at) => html`<div key=${at} class="dim">waits for ${wait.text || wait.kind}</div>`)}
    ${call.stack.length > 0 ? html`<${Lines} lines=${call.stack} />` : call.at && html`<pre>${call.at}</pre>`}
    <button type="button" onClick=${() => confirmed("cancel", call.id, `Cancel ${call.name}.${call.endpoint}?`, "Its caller gets a RemoteCancelled.")}>cancel this call</button>
  </div>`;
}

/** What is left of a deadline, as a bar and in words. */
export function Deadline({ left, age }) {
  if (left === null || left === undefined) return html`<span class="dim">no deadline</span>`;
  const all = Math.max(left + age, 0.001);
  return html`<span class="deadline">
    <meter min="0" max=${all} low=${all / 4} value=${Math.max(0, left)}></meter> ${left > 0 ? `${duration(left)} left` : "over"}
  </span>`;
}

function Lines({ lines }) {
  return html`<pre class="stack">${lines.join("\n")}</pre>`;
}
