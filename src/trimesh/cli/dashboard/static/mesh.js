// The cells of one mesh on a canvas: drawn as far as they are seen, moved through by mouse and keys, nearer and farther.

import { html, useLayoutEffect, useRef, useState } from "./markup.js";
import { MEASURES, WORDS, barsOf, filling, fullOf, gapOf, isWrong, palette, ramp, sprite, valuesOf } from "./cells.js";
import { BAR, HEAD, WORD, layOut, nameOf, pointOf } from "./layout.js";
import { select } from "./detail.js";

const HEIGHT = 420;

export function keyOf(grid, cell) {
  return `${grid.kind}:${grid.name}:${cell}`;
}

/** The cells of a mesh, and what the one below the pointer, or the selected one, is. */
export function Cells({ grid, colourBy, chosen, width, zoom, setZoom, scheme }) {
  const frame = useRef(null);
  const canvas = useRef(null);
  const [hovered, setHovered] = useState(-1);
  const [cursor, setCursor] = useState(0);
  const bars = barsOf(grid);
  const layout = layOut(grid.sizes, grid.letters.length, width, HEIGHT, zoom, bars.length);
  const seen = { width: Math.min(layout.width, width), height: Math.min(layout.height, HEIGHT) + 2 };
  const at = Math.min(chosen >= 0 ? chosen : cursor, grid.letters.length - 1);

  const paint = () => draw(canvas.current, frame.current, grid, layout, bars, colourBy, chosen, seen);
  useLayoutEffect(paint, [grid, colourBy, chosen, zoom, seen.width, seen.height, scheme]);
  useLayoutEffect(() => {
    const main = frame.current.closest("main");
    main.addEventListener("scroll", paint);
    return () => main.removeEventListener("scroll", paint);
  });

  const move = (cell) => {
    if (cell < 0 || cell >= grid.letters.length) return;
    setCursor(cell);
    select(keyOf(grid, cell));
    const [x, y] = layout.place(cell);
    const box = frame.current;
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + layout.high > box.scrollTop + box.clientHeight) box.scrollTop = y + layout.high - box.clientHeight;
    if (x < box.scrollLeft) box.scrollLeft = x;
    if (x + layout.wide > box.scrollLeft + box.clientWidth) box.scrollLeft = x + layout.wide - box.clientWidth;
  };
  const onKeyDown = (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.down, ArrowDown: layout.down };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in steps) move(at + steps[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(grid.letters.length - 1);
    else if (event.key === "+" || event.key === "=") setZoom(zoom + 1);
    else if (event.key === "-") setZoom(zoom - 1);
    else if (event.key === "0") setZoom(0);
    else if (event.key === "w") move(nextWrong(grid, at));
    else if (event.key === "Enter") move(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const cellOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return layout.cellAt(event.clientX - box.left + frame.current.scrollLeft, event.clientY - box.top + frame.current.scrollTop);
  };
  const said = describe(grid, hovered >= 0 ? hovered : at);
  return html`<div
      class="cells"
      ref=${frame}
      style=${{ width: `${seen.width}px`, height: `${seen.height}px` }}
      tabindex="0"
      role="application"
      aria-label=${`${grid.kind} ${grid.name}: arrows move, enter opens, plus and minus zoom, w goes to the next that is wrong`}
      aria-description=${said}
      onKeyDown=${onKeyDown}
      onScroll=${paint}
      onClick=${(event) => move(cellOf(event))}
      onMouseMove=${(event) => setHovered(cellOf(event))}
      onMouseLeave=${() => setHovered(-1)}
    >
      <div class="all" style=${{ width: `${layout.width}px`, height: `${layout.height}px` }}><canvas ref=${canvas}></canvas></div>
    </div>
    <p class="said" aria-live="off">
      <span>${said}</span>
      ${layout.kind === "bars" && html`<span class="key">bars: ${bars.map((key) => MEASURES[key].title).join(", ")}</span>`}
    </p>`;
}

function describe(grid, cell) {
  if (cell < 0 || cell >= grid.letters.length) return "";
  const parts = [nameOf(grid, cell), WORDS[grid.letters[cell]]];
  for (const key of Object.keys(MEASURES)) {
    const value = valuesOf(grid, key)[cell];
    if (value) parts.push(key === "age" ? callOf(grid, cell) : `${key === "depth" ? "" : `${MEASURES[key].title} `}${MEASURES[key].text(value)}`);
  }
  return parts.join(" · ");
}

function callOf(grid, cell) {
  return `${grid.oldest[cell] || "oldest call"} for ${MEASURES.age.text(grid.age[cell])}`;
}

function nextWrong(grid, from) {
  const all = grid.letters.length;
  for (let step = 1; step <= all; step += 1) {
    const cell = (from + step) % all;
    if (isWrong(grid.letters[cell])) return cell;
  }
  return -1;
}

function draw(canvas, frame, grid, layout, bars, colourBy, chosen, { width, height }) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const [dx, dy] = [frame.scrollLeft, frame.scrollTop];
  const { top: above } = frame.getBoundingClientRect();
  const low = dy + Math.max(0, -above); // of the cells, what the window shows
  const high = dy + Math.min(height, Math.max(0, window.innerHeight - above));
  pen.translate(-dx, -dy);
  marks(pen, grid, layout, low, high);
  const cells = [];
  const { ys } = layout;
  for (let cell = 0; cell < ys.length; cell += 1) if (ys[cell] + layout.high >= low && ys[cell] <= high) cells.push(cell);
  if (layout.kind === "square") squares(pen, grid, layout, cells, colourBy, ratio);
  else for (const cell of cells) (layout.kind === "bars" ? barred : panel)(pen, grid, layout, cell, bars, colourBy, ratio);
  if (chosen >= 0 && chosen < grid.letters.length) {
    const [x, y] = layout.place(chosen);
    const c = palette();
    for (const [wide, colour, out] of [[3, c.back, 0], [2, c.select, 1]]) {
      pen.lineWidth = wide;
      pen.strokeStyle = colour;
      pen.strokeRect(x + out, y + out, layout.wide - 2 * out, layout.high - 2 * out);
    }
  }
}

/** Draw labels and indices. */
function marks(pen, grid, layout, low, high) {
  const c = palette();
  const { sizes, labels } = grid;
  pen.font = "11px system-ui, sans-serif";
  pen.fillStyle = c.dim;
  pen.textBaseline = "middle";
  const every = (room, most) => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].find((step) => step * room >= most) || 1024;
  for (let block = 0; block < layout.blocks; block += 1) {
    const [x, y] = layout.corner(block);
    if (layout.title) {
      let rest = Math.floor(block / layout.perGrid);
      const places = [];
      for (let at = sizes.length - 3; at >= 0; at -= 1) {
        places.unshift(`${labels[at]}=${rest % sizes[at]}`);
        rest = Math.floor(rest / sizes[at]);
      }
      pen.textAlign = "left";
      pen.fillText(places.join(","), x + layout.left, y + 7);
    }
    if (layout.top && !(layout.isLine && layout.lines > 1)) {
      pen.textAlign = "center";
      const step = every(layout.wide, 18);
      for (let at = 0; at < layout.across; at += step) pen.fillText(String(at), x + layout.left + (at + 0.5) * layout.wide, y + layout.title + 7);
    }
    if (layout.left && (layout.rows > 1 || layout.lines > 1)) {
      pen.textAlign = "right";
      const first = (block % layout.perGrid) * layout.deep;
      const step = every(layout.high * layout.lines, 12);
      const count = layout.isLine ? layout.lines : Math.min(layout.deep, layout.rows - first);
      for (let at = 0; at < count; at += layout.isLine ? every(layout.high, 12) : step) {
        const line = y + layout.title + layout.top + at * layout.high * (layout.isLine ? 1 : layout.lines) + layout.high / 2;
        if (line > low - 20 && line < high + 20) pen.fillText(String(layout.isLine ? at * layout.across : first + at), x + layout.left - 4, line);
      }
    }
  }
}

function colourOf(grid, cell, colourBy) {
  const letter = grid.letters[cell];
  if (colourBy === "state" || isWrong(letter) || letter === ".") return filling(letter);
  return ramp((valuesOf(grid, colourBy)[cell] || 0) / fullOf(grid, colourBy), 32);
}

function squares(pen, grid, layout, cells, colourBy, ratio) {
  const { wide: side, xs, ys } = layout;
  const values = valuesOf(grid, colourBy);
  const most = colourBy === "state" ? 1 : fullOf(grid, colourBy);
  const plain = new Map(); // colour: cells that are filled with it
  for (const cell of cells) {
    const letter = grid.letters[cell];
    const isMeasured = colourBy !== "state" && !isWrong(letter) && letter !== ".";
    const colour = isMeasured ? ramp((values[cell] || 0) / most, 32) : filling(letter);
    if (colour === null) pen.drawImage(sprite(letter, side, ratio), xs[cell], ys[cell], side, side);
    else if (plain.has(colour)) plain.get(colour).push(cell);
    else plain.set(colour, [cell]);
  }
  const gap = gapOf(side);
  for (const [colour, some] of plain) {
    pen.fillStyle = colour;
    pen.beginPath();
    for (const cell of some) pen.rect(xs[cell] + gap, ys[cell] + gap, side - 2 * gap, side - 2 * gap);
    pen.fill();
  }
}

function frameOf(pen, grid, layout, cell) {
  const c = palette();
  const [x, y] = layout.place(cell);
  pen.fillStyle = c.raised;
  pen.fillRect(x + 2, y + 2, layout.wide - 4, layout.high - 4);
  const letter = grid.letters[cell];
  pen.strokeStyle = isWrong(letter) ? c.wrong : c.line;
  pen.lineWidth = isWrong(letter) ? 1.5 : 1;
  pen.strokeRect(x + 2.5, y + 2.5, layout.wide - 5, layout.high - 5);
  return [x, y];
}

function signAt(pen, grid, cell, x, y, colourBy, ratio) {
  const colour = colourOf(grid, cell, colourBy);
  if (colour === null) pen.drawImage(sprite(grid.letters[cell], 16, ratio), x, y, 16, 16);
  else {
    pen.fillStyle = colour;
    pen.fillRect(x + 1.5, y + 1.5, 13, 13);
  }
}

function bar(pen, grid, cell, key, x, y, wide, high) {
  const c = palette();
  pen.fillStyle = c.line;
  pen.fillRect(x, y, wide, high);
  const share = (valuesOf(grid, key)[cell] || 0) / fullOf(grid, key);
  pen.fillStyle = isWrong(grid.letters[cell]) && grid.letters[cell] !== "W" ? c.dim : c.busy; // last known
  pen.fillRect(x, y, Math.max(share > 0 ? 1 : 0, wide * share), high);
}

function barred(pen, grid, layout, cell, bars, colourBy, ratio) {
  if (grid.letters[cell] === ".") return;
  const [x, y] = frameOf(pen, grid, layout, cell);
  signAt(pen, grid, cell, x + 6, y + layout.high / 2 - 8, colourBy, ratio);
  if (grid.letters[cell] !== "D") bars.forEach((key, at) => bar(pen, grid, cell, key, x + 27, y + 7 + at * BAR, layout.wide - 35, BAR - 2));
}

function panel(pen, grid, layout, cell, bars, colourBy, ratio) {
  if (grid.letters[cell] === ".") return;
  const c = palette();
  const [x, y] = frameOf(pen, grid, layout, cell);
  signAt(pen, grid, cell, x + 8, y + 6, colourBy, ratio);
  pen.textBaseline = "middle";
  const word = WORDS[grid.letters[cell]];
  pen.font = "11.5px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.fillStyle = isWrong(grid.letters[cell]) ? c.wrong : c.dim;
  const taken = pen.measureText(word).width;
  pen.fillText(word, x + layout.wide - 9, y + 15);
  pen.font = "600 11.5px system-ui, sans-serif";
  pen.textAlign = "left";
  pen.fillStyle = c.ink;
  pen.fillText(pointOf(grid, cell) || grid.name, x + 28, y + 15, layout.wide - taken - 44);
  pen.font = "11.5px system-ui, sans-serif";
  if (grid.letters[cell] === "D") return;
  const words = Math.max(40, layout.wide * 0.28);
  bars.forEach((key, at) => {
    const line = y + 4 + HEAD + at * WORD;
    const value = valuesOf(grid, key)[cell] || 0;
    const label = key === "age" ? (grid.oldest || [])[cell] || "no call" : MEASURES[key].short;
    pen.textAlign = "left";
    pen.fillStyle = c.dim;
    pen.fillText(cut(pen, label, words), x + 9, line + 6);
    pen.textAlign = "right";
    pen.fillStyle = c.ink;
    if (key !== "age" || value || (grid.oldest || [])[cell]) pen.fillText(key === "depth" ? String(value) : MEASURES[key].text(value), x + layout.wide - 9, line + 6);
    if (layout.wide > 145) bar(pen, grid, cell, key, x + 15 + words, line + 4, layout.wide - 86 - words, 5);
  });
}

function cut(pen, text, most) {
  if (pen.measureText(text).width <= most) return text;
  while (text.length > 1 && pen.measureText(`${text}…`).width > most) text = text.slice(0, -1);
  return `${text}…`;
}
