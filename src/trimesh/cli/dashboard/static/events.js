// What has happened to members, newest first.

import { html } from "./markup.js";
import { clock } from "./format.js";
import { selectByName } from "./detail.js";

export function Events({ store }) {
  const { board, filter } = store;
  const shown = board.events.filter((event) => !filter || `${event.kind} ${event.name} ${event.text}`.includes(filter));
  if (!shown.length) return html`<p class="dim">nothing has happened${filter && ` that has ${filter} in it`}</p>`;
  return html`<table class="wide">
    <thead><tr><th>time</th><th>what</th><th>member</th><th>text</th></tr></thead>
    <tbody>
      ${shown.map(
        (event) => html`<tr key=${event.number} class=${event.is_failure ? "failure" : ""}>
          <td><time>${clock(event.at, true)}</time></td>
          <td class=${event.is_failure ? "wrong" : ""}>${event.is_failure ? "✖ " : ""}${event.kind}</td>
          <td><button type="button" class="link" onClick=${() => selectByName(event.name)}>${event.name}</button></td>
          <td>${event.text}${event.causes.map((cause, at) => html`<div key=${at} class="dim">← ${cause}</div>`)}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}
