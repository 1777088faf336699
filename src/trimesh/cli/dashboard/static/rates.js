// Metrics of the program, then sums over the run, look by look, as charts; the second line of a chart is dashed.

import { html, useEffect, useRef, useState } from "./markup.js";
import { palette } from "./cells.js";
import { Curves } from "./curves.js";
import { count, latency, size } from "./format.js";

const CHARTS = [
  { title: "messages a second", keys: ["messages"], text: count },
  { title: "bytes a second", keys: ["nbytes"], text: (value) => `${size(value)}/s` },
  { title: "latency: half, 99 of 100", keys: ["half", "most"], text: latency },
  { title: "calls under way, queued", keys: ["calls", "queued"], text: count },
  { title: "memory", keys: ["memory"], text: size },
  { title: "processes that do not run", keys: ["failed"], text: count },
];

let plot = null; // the library, once it was asked for

export function Rates({ store }) {
  const [isThere, setIsThere] = useState(plot !== null);
  useEffect(() => {
    if (isThere) return;
    const sheet = document.createElement("link");
    sheet.rel = "stylesheet";
    sheet.href = "static/vendor/uplot.css";
    document.head.append(sheet);
    import("./vendor/uplot.js").then((module) => {
      plot = module.default;
      setIsThere(true);
    });
  }, []);
  const curves = html`<${Curves} store=${store} plot=${isThere ? plot : null} />`;
  if (store.history.length < 2) return html`${curves}<p class="dim">two looks at the run are needed</p>`;
  const last = store.history[store.history.length - 1];
  return html`${curves}<div class="charts">
    ${CHARTS.map(
      (chart) => html`<figure key=${chart.title}>
        <figcaption>${chart.title} <b>${chart.keys.map((key) => (last[key] === null ? "–" : chart.text(last[key]))).join(", ")}</b></figcaption>
        ${isThere && html`<${Chart} chart=${chart} history=${store.history} scheme=${store.scheme} />`}
      </figure>`,
    )}
  </div>`;
}

function Chart({ chart, history, scheme }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const data = [history.map((sums) => sums.at), ...chart.keys.map((key) => history.map((sums) => sums[key]))];
  useEffect(() => {
    const c = palette();
    const axis = { stroke: c.dim, grid: { stroke: c.line, width: 1 }, ticks: { stroke: c.line, width: 1 }, font: "11px system-ui" };
    drawn.current = new plot(
      {
        width: box.current.clientWidth,
        height: 150,
        legend: { show: false },
        cursor: { show: false },
        scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 0, 1e-6) * 1.05] } },
        axes: [axis, { ...axis, size: 84, values: (_, splits) => splits.map(chart.text) }],
        series: [{}, ...chart.keys.map((key, at) => ({ stroke: c.series[at], width: 2, dash: at ? [6, 4] : [], spanGaps: true, points: { show: false } }))],
      },
      data,
      box.current,
    );
    return () => drawn.current.destroy();
  }, [scheme]);
  useEffect(() => drawn.current.setData(data), [history]);
  return html`<div class="chart" ref=${box}></div>`;
}
