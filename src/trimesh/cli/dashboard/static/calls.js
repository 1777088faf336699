// Calls under way, oldest first; those that differ in their member only are one row.

import { html } from "./markup.js";
import { Deadline, selectByName } from "./detail.js";
import { count, duration } from "./format.js";
import { confirmed } from "./act.js";

export function Calls({ store }) {
  const { board, filter } = store;
  const shown = board.calls.filter(({ first }) => !filter || `${first.name}.${first.endpoint} ${first.state} ${first.caller} ${first.at}`.includes(filter));
  if (!shown.length) return html`<p class="dim">${filter ? `no call has ${filter} in its row` : "no call is under way"}</p>`;
  return html`<table class="wide">
    <thead>
      <tr><th>call</th><th class="number">members</th><th>state</th><th class="number">age</th><th>deadline</th><th>caller</th><th>waits for</th><th>at</th><td></td></tr>
    </thead>
    <tbody>
      ${shown.map(
        ({ first, count: members, left }) => html`<tr key=${first.id}>
          <td><button type="button" class="link" onClick=${() => selectByName(first.name)}>${first.name}.${first.endpoint}</button></td>
          <td class="number">${count(members)}</td>
          <td class=${`call-${first.state}`}>${first.state}</td>
          <td class="number">${duration(first.age)}</td>
          <td><${Deadline} left=${left} age=${first.age} /></td>
          <td>${first.caller}</td>
          <td>${first.waits.map((wait) => wait.text || wait.kind).join("; ")}</td>
          <td><code>${first.at}</code></td>
          <td>${members === 1 && html`<button type="button" onClick=${() => confirmed("cancel", first.id, `Cancel ${first.name}.${first.endpoint}?`, "Its caller gets a RemoteCancelled.")}>cancel</button>`}</td>
        </tr>`,
      )}
    </tbody>
  </table>
  ${store.said && html`<p role="status" class="answer">${store.said}</p>`}`;
}
