// Charts by uPlot, which is loaded when the first one is shown: times of 24 hours, ticks at round numbers of their unit,
// and no line through time in which nothing was sampled.

import { html, useEffect, useRef, useState } from "./markup.js";
import { palette } from "./cells.js";
import { clock, count, size } from "./format.js";

let library = null;
let coming = null;

/** Return the library, or null until it is there. */
function useLibrary() {
  const [, setIsThere] = useState(library !== null);
  useEffect(() => {
    if (library !== null) return;
    if (coming === null) {
      const sheet = document.createElement("link");
      sheet.rel = "stylesheet";
      sheet.href = "static/vendor/uplot.css";
      document.head.append(sheet);
      coming = import("./vendor/uplot.js").then((module) => {
        library = module.default;
      });
    }
    coming.then(() => setIsThere(true));
  }, []);
  return library;
}

const powers = (base, factors, from, to) => Array.from({ length: to - from }, (_, at) => factors.map((factor) => factor * base ** (from + at))).flat();
const trimmed = (value) => String(Number(value.toPrecision(4)));
const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

// Units of values: the distances that ticks may have, and how they are written.
const UNITS = {
  number: { text: trimmed },
  count: { incrs: powers(10, [1, 2, 5], 0, 15), text: count },
  bytes: { incrs: powers(1024, [1, 2, 5, 10, 20, 50, 100, 200, 500], 0, 5), text: (value) => size(value).replace(/\.0 /, " ") },
  seconds: { text: (value) => (value === 0 ? "0" : value < 1e-3 ? `${trimmed(value * 1e6)} µs` : value < 1 ? `${trimmed(value * 1e3)} ms` : `${trimmed(value)} s`) },
};

const SAMPLED = 10; // seconds between two samples of the history

/** Return columns with a gap wherever nothing was sampled: for longer than the history, or twice the usual time. */
export function withGaps([x, ...columns]) {
  const steps = x.slice(1).map((at, index) => at - x[index]);
  const usual = [...steps].sort((a, b) => a - b)[Math.floor(steps.length / 2)] || 1;
  const most = Math.max(SAMPLED * 1.5, usual * 2);
  const found = [[], ...columns.map(() => [])];
  x.forEach((at, index) => {
    if (index && at - x[index - 1] > most) {
      found[0].push(x[index - 1] + usual);
      columns.forEach((_, column) => found[column + 1].push(null));
    }
    found[0].push(at);
    columns.forEach((values, column) => found[column + 1].push(values[index]));
  });
  return found;
}

/**
 * Draw lines over time or steps.
 *
 * @param data places, then the values of each line
 * @param unit of the values: number, count, bytes, seconds
 * @param isTime whether places are Unix times
 * @param isBand whether the first two lines bound a band, and the third is its mean
 * @param fromZero whether the scale begins at 0
 */
export function Chart({ data, unit = "number", isTime, isBand = false, fromZero = false, scheme }) {
  const plot = useLibrary();
  const box = useRef(null);
  const drawn = useRef(null);
  const shown = isTime ? withGaps(data) : data;
  useEffect(() => {
    if (!plot) return undefined;
    const c = palette();
    const axis = { stroke: c.dim, grid: { stroke: c.line, width: 1 }, ticks: { stroke: c.line, width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const line = (at) => ({ stroke: c.series[at], width: 2, dash: at ? [6, 4] : [], spanGaps: false, points: { show: (chart) => chart.data[0].length < 2 } });
    const edge = { stroke: c.series[0], width: 0.5, spanGaps: false, points: { show: false } };
    const { incrs, text } = UNITS[unit];
    const times = (_, splits, at, space, step) => splits.map((split) => (step < 60 ? clock(split) : clock(split).slice(0, 5)));
    const range = (_, low, high) => {
      if (low === null) return [0, 1];
      const [from, to] = fromZero ? [Math.min(0, low), Math.max(high, 0)] : [low, high];
      const room = (to - from || Math.abs(to) || 1) * 0.06;
      return [from - (fromZero ? 0 : room), to + room];
    };
    drawn.current = new plot(
      {
        width: box.current.clientWidth,
        height: box.current.clientHeight,
        padding: [5, isTime ? 26 : 12, 0, 0],
        legend: { show: false },
        cursor: { show: false },
        scales: { x: { time: false }, y: { range } },
        axes: [
          { ...axis, size: 26, gap: 2, space: isTime ? 62 : 34, ...(isTime ? { incrs: SECONDS, values: times } : { incrs: UNITS.count.incrs, values: (_, splits) => splits.map(count) }) },
          { ...axis, size: (_, texts) => 12 + 6.5 * Math.max(1, ...(texts || []).map((one) => one.length)), gap: 3, space: 15, ...(incrs ? { incrs } : {}), values: (_, splits) => splits.map(text) },
        ],
        series: [{}, ...(isBand ? [edge, edge, line(0)] : data.slice(1).map((_, at) => line(at)))],
        bands: isBand ? [{ series: [1, 2], fill: `${c.series[0]}33` }] : [],
      },
      shown,
      box.current,
    );
    const observer = new ResizeObserver(() => {
      if (box.current && drawn.current) drawn.current.setSize({ width: box.current.clientWidth, height: box.current.clientHeight });
    });
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      drawn.current.destroy();
      drawn.current = null;
    };
  }, [plot, scheme]);
  useEffect(() => {
    if (drawn.current) drawn.current.setData(shown);
  }, [data[0].length, data[0][data[0].length - 1], plot]);
  return html`<div class="chart" ref=${box}></div>`;
}
