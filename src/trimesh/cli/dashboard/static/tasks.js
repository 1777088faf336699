// When calls ran: a row a process, a bar a call. Endpoints differ in colour and in pattern, outcomes in what is on top.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./markup.js";
import { palette } from "./cells.js";
import { ask } from "./run.js";
import { count, latency } from "./format.js";
import { selectByName } from "./detail.js";

const NAMES = 190;
const SLOT = 15;
const SECONDS = [2, 5, 10, 30, 60];
const OUTCOMES = ["runs", "returned", "raised", "cancelled"];
const PAGE = 32;

export function Tasks({ store }) {
  const meshes = store.board.meshes.filter((grid) => grid.kind === "procs" && grid.name !== "controller");
  const [mesh, setMesh] = useState("");
  const [seconds, setSeconds] = useState(10);
  const [first, setFirst] = useState(0);
  const [held, setHeld] = useState(false);
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const asking = useRef(false);
  useEffect(() => {
    if (asking.current || (held && found)) return;
    asking.current = true;
    ask("tasks", { mesh, seconds, first }).then(
      (answer) => {
        asking.current = false;
        setFound(answer);
        setError("");
      },
      (problem) => {
        asking.current = false;
        setError(problem.message);
      },
    );
  }, [store.board.number, mesh, seconds, first, held]);
  const total = found ? found.count : 0;
  return html`<div class="tasks">
    <p class="controls">
      <label>mesh <select value=${mesh} onChange=${(event) => (setFirst(0), setMesh(event.target.value))}>
        <option value="">all</option>
        ${meshes.map((grid) => html`<option key=${grid.name} value=${grid.name}>${grid.name}</option>`)}
      </select></label>
      <label>last <select value=${seconds} onChange=${(event) => setSeconds(Number(event.target.value))}>
        ${SECONDS.map((one) => html`<option key=${one} value=${one}>${one} s</option>`)}
      </select></label>
      <button type="button" aria-pressed=${String(held)} onClick=${() => setHeld(!held)}>${held ? "go on" : "hold"}</button>
      <button type="button" disabled=${first === 0} onClick=${() => setFirst(Math.max(0, first - PAGE))}>earlier ranks</button>
      <button type="button" disabled=${first + PAGE >= total} onClick=${() => setFirst(first + PAGE)}>later ranks</button>
      <span class="dim">${total ? `${first + 1} to ${Math.min(total, first + PAGE)} of ${count(total)} processes` : ""}</span>
    </p>
    ${error && html`<p class="cut">${error}</p>`}
    ${found && html`<${Stream} stream=${found.stream} scheme=${store.scheme} filter=${store.filter} />`}
    ${found && html`<${Latencies} rows=${found.stream.latencies} />`}
  </div>`;
}

function Stream({ stream, scheme, filter }) {
  const canvas = useRef(null);
  const [said, setSaid] = useState("");
  const rows = stream.rows.filter((row) => !filter || row.name.includes(filter));
  const tops = [];
  let height = 22;
  for (const row of rows) {
    tops.push(height);
    height += row.slots * SLOT + 3;
  }
  const [width, setWidth] = useState(900);
  useLayoutEffect(() => {
    const box = canvas.current.parentElement;
    const observer = new ResizeObserver(() => setWidth(Math.max(400, box.clientWidth)));
    observer.observe(box);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => paint(canvas.current, stream, rows, tops, width, height), [stream, scheme, width, filter]);
  const barAt = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const at = tops.findIndex((top, number) => y >= top && y < top + rows[number].slots * SLOT);
    if (at < 0) return [null, null];
    const millis = ((x - NAMES) / (width - NAMES)) * stream.seconds * 1e3;
    const slot = Math.floor((y - tops[at]) / SLOT);
    const slack = (2 / (width - NAMES)) * stream.seconds * 1e3;
    return [rows[at], rows[at].bars.find(([begin, length, , , , where]) => where === slot && millis >= begin - slack && millis <= begin + length + slack)];
  };
  const tell = (event) => {
    const [row, bar] = barAt(event);
    if (!row) return setSaid("");
    if (!bar) return setSaid(row.error ? `${row.name}: ${row.error}` : row.name);
    const [, length, endpoint, outcome, number] = bar;
    return setSaid(`${row.name}  ·  ${stream.endpoints[endpoint]}  ·  ${number > 1 ? `${number} calls in ` : ""}${latency(length / 1e3)}  ·  ${OUTCOMES[outcome]}`);
  };
  return html`<div>
    <ul class="legend" aria-label="endpoints">
      ${stream.endpoints.slice(0, 16).map((name, at) => html`<li key=${name}><${Swatch} at=${at} scheme=${scheme} /> ${name}</li>`)}
      <li class="dim">a bar with an open end runs; with a cross it raised; with a line through it was cancelled</li>
    </ul>
    <div class="stream">
      <canvas ref=${canvas} role="img" aria-label=${`calls of ${rows.length} processes in the last ${stream.seconds} s`} onMouseMove=${tell} onClick=${(event) => barAt(event)[0] && selectByName(barAt(event)[0].name)}></canvas>
    </div>
    <p class="said">${said || "point at a bar for its details"}</p>
    ${rows.some((row) => row.missing) && html`<p class="dim">Calls at the left edge may be missing: a process keeps its newest 8,192.</p>`}
  </div>`;
}

function Swatch({ at, scheme }) {
  const canvas = useRef(null);
  useLayoutEffect(() => {
    canvas.current.width = 28;
    canvas.current.height = 12;
    bar(canvas.current.getContext("2d"), 0, 0, 28, 12, at, 1);
  }, [at, scheme]);
  return html`<canvas class="swatch" ref=${canvas} aria-hidden="true"></canvas>`;
}

function paint(canvas, stream, rows, tops, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const c = palette();
  pen.scale(ratio, ratio);
  pen.font = `12px ${c.mono}`;
  pen.textBaseline = "middle";
  const span = width - NAMES;
  for (let tick = 0; tick <= 5; tick += 1) {
    const x = NAMES + (span * tick) / 5;
    pen.fillStyle = c.line;
    pen.fillRect(Math.min(width - 1, x), 16, 1, height - 16);
    pen.fillStyle = c.dim;
    pen.textAlign = tick === 0 ? "left" : tick === 5 ? "right" : "center";
    pen.fillText(tick === 5 ? "now" : `−${((stream.seconds * (5 - tick)) / 5).toFixed(1)} s`, x, 8);
  }
  pen.textAlign = "left";
  rows.forEach((row, at) => {
    pen.fillStyle = c.ink;
    pen.fillText(row.name.length > 25 ? `…${row.name.slice(-24)}` : row.name, 0, tops[at] + SLOT / 2, NAMES - 8);
    pen.fillStyle = c.line;
    pen.fillRect(0, tops[at] + row.slots * SLOT + 1, width, 1);
    if (row.error) {
      pen.fillStyle = c.dim;
      pen.fillText(row.error, NAMES + 6, tops[at] + SLOT / 2, span - 10);
    }
    const pixels = span / (stream.seconds * 1e3);
    for (const [begin, length, endpoint, outcome, , slot] of row.bars) {
      bar(pen, NAMES + begin * pixels, tops[at] + slot * SLOT + 1, Math.max(2, length * pixels), SLOT - 2, endpoint, outcome);
    }
  });
}

function bar(pen, x, y, wide, high, endpoint, outcome) {
  const c = palette();
  pen.fillStyle = c.series[endpoint % 8];
  pen.fillRect(x, y, wide, high);
  pen.save();
  pen.beginPath();
  pen.rect(x, y, wide, high);
  pen.clip();
  pen.strokeStyle = c.back;
  pen.lineWidth = 1.2;
  pen.beginPath();
  const pattern = endpoint % 4;
  const isDense = endpoint % 8 > 3;
  const step = isDense ? 5 : 10;
  if (pattern > 0) {
    for (let at = x - (x % step) - high; at < x + wide + high; at += step) {
      pen.moveTo(at, y + high);
      pen.lineTo(pattern === 1 ? at + high : pattern === 2 ? at - high : at, y);
    }
  }
  pen.stroke();
  pen.restore();
  pen.strokeStyle = c.ink;
  pen.lineWidth = 1.5;
  if (outcome === 2) {
    const half = Math.min(5, high / 2);
    const middle = Math.max(x + half, x + wide - half - 1);
    pen.beginPath();
    pen.moveTo(middle - half, y);
    pen.lineTo(middle + half, y + high);
    pen.moveTo(middle + half, y);
    pen.lineTo(middle - half, y + high);
    pen.stroke();
  } else if (outcome === 3) {
    pen.beginPath();
    pen.moveTo(x, y + high / 2);
    pen.lineTo(x + wide, y + high / 2);
    pen.stroke();
  } else if (outcome === 0) {
    pen.strokeRect(x, y + 0.5, wide + 4, high - 1);
  }
}

function Latencies({ rows }) {
  if (!rows.length) return html`<p class="dim">no call has ended in this time</p>`;
  return html`<h3>how long calls took, from their coming to their end</h3>
    <table>
      <thead><tr><th>endpoint</th><th class="number">calls</th><th class="number">raised</th><th class="number">half</th><th class="number">99 of 100</th><th class="number">longest</th><th class="number">half waited</th></tr></thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${row.endpoint}>
            <td>${row.endpoint}</td>
            <td class="number">${count(row.count)}</td>
            <td class=${row.failed ? "number wrong" : "number"}>${count(row.failed)}</td>
            <td class="number">${latency(row.half)}</td>
            <td class="number">${latency(row.most)}</td>
            <td class="number">${latency(row.longest)}</td>
            <td class="number">${latency(row.waited)}</td>
          </tr>`,
        )}
      </tbody>
    </table>`;
}
