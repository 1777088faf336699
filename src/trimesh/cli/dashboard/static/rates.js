// Metrics of the program, then sums over the run, as charts; the second line of a chart is dashed.

import { html } from "./markup.js";
import { Chart } from "./plot.js";
import { Curves } from "./curves.js";
import { count, latency, rounded, size } from "./format.js";

const CHARTS = [
  { title: "calls/s", keys: ["ended"], unit: "count", text: count },
  { title: "messages/s", keys: ["messages"], unit: "count", text: count },
  { title: "bytes/s", keys: ["nbytes"], unit: "bytes", text: size },
  { title: "latency of calls: p50, p99", keys: ["p50", "p99"], unit: "seconds", text: latency },
  { title: "calls under way, queued", keys: ["calls", "queued"], unit: "count", text: count },
  { title: "CPU, in cores", keys: ["cpu"], unit: "number", text: rounded },
  { title: "memory", keys: ["memory"], unit: "bytes", text: size },
  { title: "GPU memory", keys: ["gpu_memory"], unit: "bytes", text: size },
  { title: "processes that do not run", keys: ["failed"], unit: "count", text: count },
];

export function Rates({ store }) {
  const { history } = store;
  const curves = html`<${Curves} store=${store} />`;
  if (history.length < 2) return html`${curves}<p class="dim">sums over the run are drawn from the second snapshot on</p>`;
  const last = history[history.length - 1];
  const at = history.map((sums) => sums.at);
  const shown = CHARTS.filter(({ keys: [key] }) => key !== "gpu_memory" || history.some((sums) => sums.gpu_memory));
  return html`${curves}<div class="charts">
    ${shown.map(
      (chart) => html`<figure key=${chart.title}>
        <figcaption><b>${chart.title}</b> <span class="now">${chart.keys.map((key) => (last[key] === null ? "–" : chart.text(last[key]))).join(", ")}</span></figcaption>
        <${Chart} data=${[at, ...chart.keys.map((key) => history.map((sums) => sums[key]))]} unit=${chart.unit} isTime=${true} fromZero=${true} scheme=${store.scheme} />
      </figure>`,
    )}
  </div>`;
}
