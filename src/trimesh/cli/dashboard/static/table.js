// Tables: heads that begin with # are of numbers.

import { html } from "./markup.js";
import { selectByName } from "./detail.js";

/** The name of a member, which opens it. */
export function Name({ name }) {
  return html`<button type="button" class="link" onClick=${() => selectByName(name)}>${name}</button>`;
}

/**
 * A table.
 *
 * @param heads words above the columns
 * @param rows cells
 * @param sorts keys of columns that can be sorted by; `sort` is the present one
 */
export function Table({ heads, rows, sorts = [], sort, onSort }) {
  if (!rows.length) return html`<p class="dim">none</p>`;
  const kinds = heads.map((head) => (head.startsWith("#") ? "number" : ""));
  const text = (head, at) => (sorts[at] ? html`<button type="button" class="sort" onClick=${() => onSort(sorts[at])}>${head}${sorts[at] === sort ? " ▾" : ""}</button>` : head);
  return html`<div class="scrolled" tabindex="0"><table>
    <thead><tr>${heads.map((head, at) => html`<th key=${at} class=${kinds[at]} aria-sort=${sorts[at] && sorts[at] === sort ? "descending" : undefined}>${text(head.replace("#", ""), at)}</th>`)}</tr></thead>
    <tbody>${rows.map((row, number) => html`<tr key=${number}>${row.map((cell, at) => html`<td key=${at} class=${kinds[at]}>${cell}</td>`)}</tr>`)}</tbody>
  </table></div>`;
}
