// Curves of the program's metrics: the mean over ranks, in a band from the least to the greatest.

import { html, useEffect, useState } from "./markup.js";
import { Chart } from "./plot.js";
import { ask } from "./run.js";

const kept = { curves: [], leftOut: 0, asking: false };

const FIRST = { value: 0, counter: 1, gauge: 2, histogram: 3 };
const NAMED = /loss|reward|return|accuracy/;

/** Show the curves, or so many of them: first those that were logged, and of them those that tell how a training goes. */
export function Curves({ store, most }) {
  const [, setCount] = useState(0);
  const [error, setError] = useState("");
  useEffect(() => {
    if (kept.asking) return;
    kept.asking = true;
    ask("curves")
      .then(
        (found) => {
          kept.curves = found.curves;
          kept.leftOut = found.left_out;
          setCount((count) => count + 1);
          setError("");
        },
        (problem) => setError(problem.message),
      )
      .finally(() => {
        kept.asking = false;
      });
  }, [store.board.number]);
  const { filter } = store;
  const shown = kept.curves.filter((curve) => !filter || curve.metric.includes(filter) || curve.mesh.includes(filter));
  if (most) shown.sort((a, b) => NAMED.test(b.metric) - NAMED.test(a.metric) || FIRST[a.kind] - FIRST[b.kind]).splice(most);
  const room = most ? Math.min(most, store.board.curves) : 0; // so that nothing below moves when they arrive
  return html`${error && store.board.state === "live" && html`<p class="cut">${error}</p>`}
    <div class=${most ? "charts curves few" : "charts curves"}>
      ${Array.from({ length: Math.max(0, kept.curves.length ? 0 : room) }, (_, at) => html`<figure key=${at}><figcaption> </figcaption><div class="chart"></div></figure>`)}
      ${shown.map(
        (curve) => html`<figure key=${`${curve.metric} ${curve.mesh} ${curve.unit}`}>
          <figcaption title=${curve.ranks > 1 ? "line: mean over the ranks; band: least to greatest" : ""}><b>${curve.metric}</b> <span class="dim">${curve.mesh}${curve.ranks > 1 ? `, ${curve.ranks} ranks` : ""}, by ${curve.unit}${BY_KIND[curve.kind] || ""}</span> <b class="now">${number(curve.mean[curve.mean.length - 1])}</b></figcaption>
          <${Chart} data=${[curve.x, curve.high, curve.low, curve.mean]} isTime=${curve.unit === "time"} isBand=${true} scheme=${store.scheme} />
        </figure>`,
      )}
    </div>
    ${!most && kept.leftOut > 0 && html`<p class="cut">${kept.leftOut} more curves are not shown</p>`}`;
}

const BY_KIND = { counter: ", a second", histogram: ", mean of new values" };

function number(value) {
  return value === undefined || value === null ? "–" : Number(value.toPrecision(4)).toString();
}
