// The runs of this user: those that live, and dead ones of which flight records are left, with what they died of.

import { html, useEffect, useState } from "./markup.js";
import { ask } from "./run.js";
import { day, shortened } from "./format.js";

export function Runs() {
  const [runs, setRuns] = useState(null);
  const [error, setError] = useState("");
  useEffect(() => {
    const look = () => ask("runs").then((found) => (setRuns(found), setError("")), (problem) => setError(problem.message));
    look();
    const timer = setInterval(look, 3000);
    return () => clearInterval(timer);
  }, []);
  const living = (runs || []).filter((one) => one.is_alive);
  const dead = (runs || []).filter((one) => !one.is_alive);
  return html`<header><h1>runs of this user</h1></header>
    <main class="runs" aria-label="runs">
      ${error && html`<p class="cut">${error}</p>`}
      ${runs === null && !error && html`<p class="dim">reading flight records ...</p>`}
      ${runs !== null && html`<h2>running</h2>`}
      ${runs !== null && (living.length ? html`<ul class="plain">${living.map((one) => html`<${Run} key=${one.key} one=${one} />`)}</ul>` : html`<p class="dim">none</p>`)}
      ${dead.length > 0 && html`<h2>ended, not well</h2><ul class="plain">${dead.map((one) => html`<${Run} key=${one.key} one=${one} />`)}</ul>`}
    </main>`;
}

function Run({ one }) {
  return html`<li>
    <a href=${`?run=${encodeURIComponent(one.key)}`}>run ${one.pid}</a>
    ${one.began_at > 0 && html`<time>${day(one.began_at)}</time>`}
    <span class="command">${shortened(one.command)}</span>
    ${one.host && html`<span class="dim">on ${one.host}</span>`}
    ${!one.is_alive && html`<p>${one.kind !== "none" && html`<b>${one.kind}</b>`} ${one.text}</p>`}
  </li>`;
}
