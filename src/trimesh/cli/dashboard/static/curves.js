// Curves of the program's metrics: the mean over ranks, in a band from the least to the greatest.

import { html, useEffect, useRef, useState } from "./markup.js";
import { palette } from "./cells.js";
import { ask } from "./run.js";

const kept = { curves: [], leftOut: 0, asking: false };

/** Show the curves; `plot` is the drawing library, null until it is there. */
export function Curves({ store, plot }) {
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
  if (!shown.length && !error) return null;
  return html`${error && store.board.state === "live" && html`<p class="cut">${error}</p>`}
    <div class="charts curves">
      ${shown.map(
        (curve) => html`<figure key=${`${curve.metric} ${curve.mesh} ${curve.unit}`}>
          <figcaption>${curve.metric} <span class="dim">${curve.mesh}${curve.ranks > 1 ? `, mean and spread of ${curve.ranks}` : ""}, by ${curve.unit}${BY_KIND[curve.kind] || ""}</span> <b>${number(curve.mean[curve.mean.length - 1])}</b></figcaption>
          ${plot && html`<${Band} plot=${plot} curve=${curve} scheme=${store.scheme} />`}
        </figure>`,
      )}
    </div>
    ${kept.leftOut > 0 && html`<p class="cut">${kept.leftOut} more curves are not shown</p>`}`;
}

const BY_KIND = { counter: ", a second", histogram: ", mean of new values" };

function number(value) {
  return value === undefined || value === null ? "–" : Number(value.toPrecision(4)).toString();
}

function Band({ plot, curve, scheme }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const data = [curve.x, curve.high, curve.low, curve.mean];
  useEffect(() => {
    const c = palette();
    const axis = { stroke: c.dim, grid: { stroke: c.line, width: 1 }, ticks: { stroke: c.line, width: 1 }, font: "11px system-ui" };
    const edge = { stroke: c.series[0], width: 0.5, points: { show: false } };
    drawn.current = new plot(
      {
        width: box.current.clientWidth,
        height: 150,
        legend: { show: false },
        cursor: { show: false },
        scales: { x: { time: curve.unit === "time" } },
        axes: [axis, { ...axis, size: 84, values: (_, splits) => splits.map(number) }],
        series: [{}, edge, edge, { stroke: c.series[0], width: 2, points: { show: (chart) => chart.data[0].length < 2 } }],
        bands: [{ series: [1, 2], fill: `${c.series[0]}33` }],
      },
      data,
      box.current,
    );
    return () => drawn.current.destroy();
  }, [scheme]);
  useEffect(() => drawn.current.setData(data), [curve]);
  return html`<div class="chart" ref=${box}></div>`;
}
