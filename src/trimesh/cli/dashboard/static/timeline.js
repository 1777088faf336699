// The time line: when calls ran, a row a process, a bar a call. Endpoints differ in colour and pattern, outcomes in what
// is on top. Only the rows that are seen are asked for and drawn.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./markup.js";
import { palette } from "./cells.js";
import { addressOf, ask } from "./run.js";
import { clock, count, latency } from "./format.js";
import { selectByName } from "./detail.js";
import { store, update } from "./store.js";

const NAMES = 190; // width of the names
const ROW = 22;
const AXIS = 20;
const FIRST = 4; // rows of the first request, so that something is drawn soon
const BATCH = 8; // rows of one further request
const SECONDS = [2, 5, 10, 30, 60, 300, 600];
const OUTCOMES = ["runs", "returned", "raised", "cancelled"];

// ---- a colour and a pattern for each endpoint, which it keeps -------------------------------------------------------

const LOOKS = 32;
const looks = new Map();
const taken = new Set();

/** Return the number of the colour and pattern of an endpoint: from its name, the next free one if that is taken. */
export function lookOf(name) {
  if (looks.has(name)) return looks.get(name);
  let hash = 2166136261;
  for (const char of name) hash = Math.imul(hash ^ char.codePointAt(0), 16777619) >>> 0;
  let look = hash % LOOKS;
  for (let tried = 0; taken.has(look) && tried < LOOKS; tried += 1) look = (look + 1) % LOOKS;
  taken.add(look);
  looks.set(name, look);
  return look;
}

// ---- rows, as they are known --------------------------------------------------------------------------------------

const kept = { places: [], counted: "", rows: new Map(), latencies: [], measured: "", asking: false };

/** Return the rows: a head for each host if there are several, and its processes unless it is folded. */
function linesOf(places, mesh, filter, folded) {
  const wanted = places.filter((one) => (!mesh || one[2] === mesh) && (!filter || one[1].includes(filter)));
  const hosts = new Map();
  for (const one of wanted) hosts.set(one[3], [...(hosts.get(one[3]) || []), one]);
  if (hosts.size < 2) return wanted.map(([id, name]) => ({ id, name }));
  return [...hosts].flatMap(([host, procs]) => [{ host, count: procs.length }, ...(folded.has(host) ? [] : procs.map(([id, name]) => ({ id, name })))]);
}

export function Tasks({ store }) {
  const { board, filter } = store;
  const meshes = board.meshes.filter((grid) => grid.kind === "procs" && grid.name !== "controller");
  const [mesh, setMesh] = useState("");
  const [millis, setMillis] = useState(10000);
  const [until, setUntil] = useState(0); // 0 follows the run
  const [folded, setFolded] = useState(new Set());
  const [span, setSpan] = useState([0, FIRST]); // of the lines that are seen
  const [, setTurn] = useState(0);
  const [error, setError] = useState("");
  const lines = linesOf(kept.places, mesh, filter, folded);
  const seen = lines.slice(...span).filter((line) => line.id);
  const key = `${until} ${millis}`;
  const end = until || board.at * 1e3;

  const counted = Object.values(board.procs).join() + board.meshes.length;
  useEffect(() => {
    if (kept.counted === counted) return;
    kept.counted = counted;
    ask("places").then((found) => {
      kept.places = found;
      setTurn((turn) => turn + 1);
    }, (problem) => setError(problem.message));
  }, [counted]);

  // Rows of this period that are not known, or are older than the board of a run that is followed, a few at a time.
  const stamp = until ? key : `${key} ${board.number}`;
  const missing = seen.filter((line) => kept.rows.get(line.id)?.stamp !== stamp).slice(0, kept.rows.size ? BATCH : FIRST);
  useEffect(() => {
    if (kept.asking || !missing.length) return;
    kept.asking = true;
    const done = () => {
      kept.asking = false;
      setTurn((turn) => turn + 1);
    };
    ask("tasks", { procs: missing.map((line) => line.id).join(","), millis, until: Math.round(end) }).then(
      (answer) => {
        for (const row of answer.rows) kept.rows.set(row.id, { ...row, stamp, since: answer.since * 1e3, endpoints: answer.endpoints });
        for (const name of answer.endpoints) lookOf(name);
        setError("");
        done();
      },
      (problem) => {
        setError(problem.message);
        kept.asking = false;
      },
    );
  });

  // Durations of the rows that are seen: their records are read again, so not with each board.
  const period = `${key} ${seen.map((line) => line.id)} ${until ? "" : Math.floor(board.number / 5)}`;
  useEffect(() => {
    if (missing.length || !seen.length || kept.measured === period) return;
    kept.measured = period;
    const procs = seen.map((line) => line.id).join(",");
    ask("latencies", { procs, millis, until: Math.round(end) }).then((found) => {
      kept.latencies = found;
      setTurn((turn) => turn + 1);
    }, () => {});
  });

  const look = (from, to) => {
    const length = Math.min(600e3, Math.max(1, to - from));
    setMillis(Math.round(length));
    setUntil(Math.min(board.at * 1e3, to));
  };
  const live = () => (setUntil(0), setMillis(10000));
  const names = [...looks.keys()].sort();
  return html`<div class="tasks">
    <p class="controls">
      <label>mesh <select value=${mesh} onChange=${(event) => setMesh(event.target.value)}>
        <option value="">all</option>
        ${meshes.map((grid) => html`<option key=${grid.name} value=${grid.name}>${grid.name}</option>`)}
      </select></label>
      <label>last <select value=${SECONDS.includes(millis / 1e3) && !until ? millis / 1e3 : ""} onChange=${(event) => (setUntil(0), setMillis(Number(event.target.value) * 1e3))}>
        <option value="" disabled>zoomed</option>
        ${SECONDS.map((one) => html`<option key=${one} value=${one}>${one} s</option>`)}
      </select></label>
      <button type="button" aria-pressed=${String(until > 0)} onClick=${() => setUntil(until ? 0 : board.at * 1e3)}>${until ? "follow" : "hold"}</button>
      <a href=${addressOf("trace", { millis, until: Math.round(end) })} download>save for Perfetto</a>
      <span class="dim">drag to zoom, or turn the wheel on the axis (with Ctrl anywhere); double-click for the last 10 s</span>
    </p>
    ${error && html`<p class="cut">${error}</p>`}
    <ul class="legend endpoints" aria-label="endpoints">
      ${names.slice(0, 16).map((name) => html`<li key=${name}><${Swatch} look=${lookOf(name)} scheme=${store.scheme} /> ${name}</li>`)}
    </ul>
    <${Stream} lines=${lines} since=${end - millis} millis=${millis} isLive=${!until} folded=${folded} setFolded=${setFolded} setSpan=${setSpan} look=${look} live=${live} scheme=${store.scheme} turn=${missing.length} />
    <${Latencies} rows=${kept.latencies} />
  </div>`;
}

function Stream({ lines, since, millis, isLive, folded, setFolded, setSpan, look, live, scheme, turn }) {
  const frame = useRef(null);
  const canvas = useRef(null);
  const drag = useRef(null);
  const [said, setSaid] = useState("");
  const [width, setWidth] = useState(0);
  const height = Math.min(lines.length * ROW + AXIS, Math.max(200, Math.round(window.innerHeight * 0.62)));
  const names = Math.min(NAMES, width * 0.35);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => frame.current && setWidth(frame.current.clientWidth));
    observer.observe(frame.current);
    setWidth(frame.current.clientWidth);
    return () => observer.disconnect();
  }, []);
  const first = () => Math.floor((frame.current ? frame.current.scrollTop : 0) / ROW);
  const draw = () => {
    if (!width) return;
    paint(canvas.current, lines, first(), frame.current.scrollTop, { since, millis, isLive, width, height, names, folded, drag: drag.current });
    if (kept.rows.size && !performance.getEntriesByName("trimesh:timeline").length) performance.mark("trimesh:timeline");
  };
  const onScroll = () => {
    setSpan([first(), first() + Math.ceil(height / ROW) + 1]);
    draw();
  };
  useLayoutEffect(() => draw());
  useLayoutEffect(() => onScroll(), [height, lines.length]);

  const timeAt = (x) => since + (Math.max(0, x - names) / (width - names)) * millis;
  const at = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const line = y < AXIS ? null : lines[Math.floor((y - AXIS + frame.current.scrollTop) / ROW)];
    const row = line && kept.rows.get(line.id);
    let bar = null;
    if (row && x >= names) {
      const slot = Math.floor((((y - AXIS + frame.current.scrollTop) % ROW) / ROW) * row.slots);
      const [time, slack] = [timeAt(x) - row.since, (3 / (width - names)) * millis];
      bar = row.bars.find(([begin, length, , , , where]) => where === slot && time >= begin - slack && time <= begin + length + slack);
    }
    return { x, y, line, row, bar };
  };
  const onMouseMove = (event) => {
    const { x, line, row, bar } = at(event);
    if (drag.current) {
      drag.current.to = x;
      draw();
    }
    if (!line || !line.id) return setSaid("");
    if (!bar) return setSaid(row && row.error ? `${line.name}: ${row.error}` : line.name);
    const [, length, endpoint, outcome, number] = bar;
    return setSaid(`${line.name} · ${row.endpoints[endpoint]} · ${number > 1 ? `${number} calls in ` : ""}${latency(length / 1e3)} · ${OUTCOMES[outcome]}`);
  };
  const onMouseDown = (event) => {
    const { x, y } = at(event);
    if (x > names && y > 0 && event.button === 0) drag.current = { from: x, to: x };
  };
  const onMouseUp = (event) => {
    const dragged = drag.current;
    drag.current = null;
    if (dragged && Math.abs(dragged.to - dragged.from) > 5) {
      const [from, to] = [timeAt(dragged.from), timeAt(dragged.to)].sort((a, b) => a - b);
      return look(from, to);
    }
    const { line, bar } = at(event);
    if (!line) return undefined;
    if (line.host !== undefined && !line.id) {
      const next = new Set(folded);
      if (!next.delete(line.host)) next.add(line.host);
      return setFolded(next);
    }
    selectByName(line.name);
    return showCall(bar ? { proc: line.id, number: bar[6], of: bar[4] } : null);
  };
  const zoom = (factor, time) => look(time - (time - since) * factor, time + (since + millis - time) * factor);
  const onWheel = (event) => {
    const { x, y } = at(event);
    if (!(event.ctrlKey || y < AXIS) || !event.deltaY) return;
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, timeAt(x));
  };
  const onKeyDown = (event) => {
    const step = millis / 5;
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "ArrowLeft") look(since - step, since + millis - step);
    else if (event.key === "ArrowRight") look(since + step, since + millis + step);
    else if (event.key === "+" || event.key === "=") zoom(1 / 1.5, since + millis / 2);
    else if (event.key === "-") zoom(1.5, since + millis / 2);
    else if (event.key === "0") live();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div
      class="stream"
      ref=${frame}
      style=${{ height: `${height}px` }}
      tabindex="0"
      role="application"
      aria-label=${`calls of ${lines.filter((line) => line.id).length} processes: left and right move, plus and minus zoom, 0 follows the run`}
      onScroll=${onScroll}
      onWheel=${onWheel}
      onKeyDown=${onKeyDown}
      onDblClick=${live}
      onMouseMove=${onMouseMove}
      onMouseDown=${onMouseDown}
      onMouseUp=${onMouseUp}
      onMouseLeave=${() => ((drag.current = null), setSaid(""))}
    >
      <div style=${{ height: `${lines.length * ROW + AXIS}px` }}><canvas ref=${canvas} data-turn=${turn}></canvas></div>
    </div>
    <p class="said"><span>${said}</span><span class="key">${lines.some((line) => kept.rows.get(line.id)?.missing) ? "the left edge may lack calls: a process keeps its newest 8,192; " : ""}open end: runs; cross: raised; line through: cancelled</span></p>`;
}

/** Show one call beside the time line. */
async function showCall(wanted) {
  update({ call: null });
  if (!wanted) return;
  const { proc, number, of } = wanted;
  const { selected } = store;
  let call = null;
  try {
    call = { ...(await ask("call", { proc, number })), of };
  } catch (error) {
    call = { error: error.message };
  }
  if (store.selected === selected) update({ call }); // else it was closed meanwhile
}

function paint(canvas, lines, first, scrolled, { since, millis, isLive, width, height, names, folded, drag }) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  const c = palette();
  pen.scale(ratio, ratio);
  pen.textBaseline = "middle";
  const room = width - names;
  const pixels = room / millis;
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 15e3, 3e4, 6e4, 12e4];
  const step = steps.find((one) => one * pixels >= 90) || 3e5;
  const ticks = [];
  for (let time = Math.ceil(since / step) * step; time <= since + millis; time += step) ticks.push(time);
  pen.fillStyle = c.line;
  for (const time of ticks) pen.fillRect(names + (time - since) * pixels, AXIS - 4, 1, height);
  pen.font = `12px ${c.mono}`;
  const chars = Math.floor((names - 10) / pen.measureText("0").width);
  for (let at = first; at < lines.length && (at - first) * ROW < height; at += 1) {
    const line = lines[at];
    const top = AXIS + at * ROW - scrolled;
    pen.fillStyle = c.line;
    pen.fillRect(0, top + ROW - 1, width, 1);
    pen.fillStyle = c.ink;
    pen.textAlign = "left";
    if (!line.id) {
      pen.font = "600 12.5px system-ui, sans-serif";
      pen.fillText(`${folded.has(line.host) ? "▸" : "▾"} ${line.host || "this host"}, ${line.count} processes`, 2, top + ROW / 2);
      pen.font = `12px ${c.mono}`;
      continue;
    }
    pen.fillText(line.name.length > chars ? `…${line.name.slice(1 - chars)}` : line.name, 2, top + ROW / 2);
    const row = kept.rows.get(line.id);
    if (!row) continue;
    if (row.error) {
      pen.fillStyle = c.dim;
      pen.fillText(row.error, names + 6, top + ROW / 2, room - 10);
    }
    pen.save();
    pen.beginPath();
    pen.rect(names, top, room, ROW);
    pen.clip();
    const high = (ROW - 3) / row.slots;
    for (const [begin, length, endpoint, outcome, , slot] of row.bars) {
      const x = names + (row.since + begin - since) * pixels;
      if (x < width && x + length * pixels > names - 4) bar(pen, x, top + 1 + slot * high, Math.max(2, length * pixels), Math.max(2, high - 1), lookOf(row.endpoints[endpoint]), outcome);
    }
    pen.restore();
  }
  pen.fillStyle = c.back;
  pen.fillRect(0, 0, width, AXIS - 4);
  pen.fillStyle = c.dim;
  pen.font = "11px system-ui, sans-serif";
  for (const time of ticks) {
    const x = names + (time - since) * pixels;
    pen.textAlign = "center";
    if (x > names + 30 && x < width - (isLive ? 80 : 40)) pen.fillText(clock(time / 1e3, step < 1e3), x, 8);
  }
  pen.textAlign = "right";
  pen.fillText(isLive ? "now" : "", width - 2, 8);
  if (drag) {
    pen.fillStyle = `${c.select}33`;
    pen.fillRect(Math.min(drag.from, drag.to), AXIS - 4, Math.abs(drag.to - drag.from), height);
  }
}

function Swatch({ look, scheme }) {
  const canvas = useRef(null);
  useLayoutEffect(() => {
    canvas.current.width = 28;
    canvas.current.height = 12;
    bar(canvas.current.getContext("2d"), 0, 0, 28, 12, look, 1);
  }, [look, scheme]);
  return html`<canvas class="swatch" ref=${canvas} aria-hidden="true"></canvas>`;
}

function bar(pen, x, y, wide, high, look, outcome) {
  const c = palette();
  pen.fillStyle = c.series[look % 8];
  pen.fillRect(x, y, wide, high);
  pen.save();
  pen.beginPath();
  pen.rect(x, y, wide, high);
  pen.clip();
  pen.strokeStyle = c.back;
  pen.lineWidth = 1.2;
  pen.beginPath();
  const pattern = (look + (look >> 3)) % 4; // another one for each endpoint of the same colour
  const step = 8;
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
  if (!rows.length) return null;
  return html`<h2>duration of calls on the ranks shown, from arrival to end</h2>
    <table>
      <thead><tr><th>endpoint</th><th class="number">calls</th><th class="number">raised</th><th class="number">p50</th><th class="number">p99</th><th class="number">longest</th><th class="number">p50 in the mailbox</th></tr></thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr key=${row.endpoint}>
            <td>${row.endpoint}</td>
            <td class="number">${count(row.count)}</td>
            <td class=${row.failed ? "number wrong" : "number"}>${count(row.failed)}</td>
            <td class="number">${latency(row.p50)}</td>
            <td class="number">${latency(row.p99)}</td>
            <td class="number">${latency(row.longest)}</td>
            <td class="number">${latency(row.waited)}</td>
          </tr>`,
        )}
      </tbody>
    </table>`;
}
