// One mesh as a canvas of cells: drawn as far as it is seen, moved through by mouse and keys, nearer and farther.

import { html, useLayoutEffect, useRef, useState } from "./markup.js";
import { MEASURES, WORDS, filling, gapOf, isWrong, palette, ramp, sprite } from "./cells.js";
import { layOut, nameOf, pointOf } from "./layout.js";
import { count } from "./format.js";
import { select } from "./detail.js";

const HEIGHT = 440;

export function keyOf(grid, cell) {
  return `${grid.kind}:${grid.name}:${cell}`;
}

/** One mesh. */
export function Mesh({ grid, colourBy, selected, width, scheme }) {
  const frame = useRef(null);
  const canvas = useRef(null);
  const [zoom, setZoom] = useState(0);
  const [hovered, setHovered] = useState(-1);
  const [cursor, setCursor] = useState(0);
  const chosen = selected.startsWith(`${grid.kind}:${grid.name}:`) ? Number(selected.split(":").pop()) : -1;
  const layout = layOut(grid.sizes, grid.letters.length, width, HEIGHT, zoom);
  const shownHeight = Math.min(layout.height + 2, HEIGHT + 2);
  const at = Math.min(chosen >= 0 ? chosen : cursor, grid.letters.length - 1);

  const paint = () => draw(canvas.current, frame.current, grid, layout, colourBy, chosen, width, shownHeight);
  useLayoutEffect(paint, [grid, colourBy, chosen, zoom, width, shownHeight, scheme]);
  useLayoutEffect(() => {
    const main = frame.current.closest("main");
    main.addEventListener("scroll", paint);
    return () => main.removeEventListener("scroll", paint);
  });

  const move = (cell) => {
    if (cell < 0 || cell >= grid.letters.length) return;
    setCursor(cell);
    select(keyOf(grid, cell));
    const [, y] = layout.place(cell);
    const box = frame.current;
    if (y < box.scrollTop) box.scrollTop = y;
    if (y + layout.side > box.scrollTop + box.clientHeight) box.scrollTop = y + layout.side - box.clientHeight;
  };
  const onKeyDown = (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout.columns, ArrowDown: layout.columns };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key in steps) move(at + steps[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(grid.letters.length - 1);
    else if (event.key === "+" || event.key === "=") nearer(1);
    else if (event.key === "-") nearer(-1);
    else if (event.key === "0") setZoom(0);
    else if (event.key === "w") move(nextWrong(grid, at));
    else if (event.key === "Enter") move(at);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const nearer = (step) => setZoom(Math.max(-7, Math.min(12, zoom + step)));
  const cellOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return layout.cellAt(event.clientX - box.left, event.clientY - box.top + frame.current.scrollTop);
  };
  const said = describe(grid, hovered >= 0 ? hovered : at);
  return html`<section class="mesh" aria-label=${`${grid.kind} ${grid.name}`}>
    <h3>
      <span class="name">${grid.name}</span>
      <span class="dim"> ${grid.cls && `(${grid.cls}) `}${extent(grid)} </span>
      <${Counts} grid=${grid} />
      <span class="zoom">
        <button type="button" onClick=${() => nearer(-1)} aria-label=${`farther from ${grid.name}`}>−</button>
        <button type="button" onClick=${() => nearer(1)} aria-label=${`nearer to ${grid.name}`}>+</button>
      </span>
    </h3>
    <div
      class="cells"
      ref=${frame}
      style=${{ height: `${shownHeight}px`, width: `${width}px` }}
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
      <div class="all" style=${{ height: `${layout.height}px` }}><canvas ref=${canvas}></canvas></div>
    </div>
    <p class="said" aria-live="off">${said}</p>
  </section>`;
}

function Counts({ grid }) {
  const letters = Object.keys(WORDS).filter((letter) => grid.counts[letter] && letter !== ".");
  return html`<span class="counts">${letters.map(
    (letter) => html`<span key=${letter} class=${isWrong(letter) ? "wrong" : ""}>${count(grid.counts[letter])} ${WORDS[letter]}</span>`,
  )}</span>`;
}

function extent(grid) {
  return grid.labels.map((label, at) => `${label}=${grid.sizes[at]}`).join(" × ");
}

function describe(grid, cell) {
  if (cell < 0 || cell >= grid.letters.length) return "";
  const parts = [nameOf(grid, cell), WORDS[grid.letters[cell]]];
  for (const measure of Object.values(MEASURES)) {
    const values = measure.of ? measure.of(grid) : [];
    if (values.length && values[cell]) parts.push(measure.text(values[cell]));
  }
  return parts.join("  ·  ");
}

function nextWrong(grid, from) {
  const all = grid.letters.length;
  for (let step = 1; step <= all; step += 1) {
    const cell = (from + step) % all;
    if (isWrong(grid.letters[cell])) return cell;
  }
  return -1;
}

function draw(canvas, frame, grid, layout, colourBy, chosen, width, height) {
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
  const { side, columns } = layout;
  const top = frame.scrollTop;
  const { top: above } = frame.getBoundingClientRect();
  const low = top + Math.max(0, -above); // of the canvas, what the window shows
  const high = top + Math.min(height, Math.max(0, window.innerHeight - above));
  const first = Math.max(0, Math.floor(low / side)) * columns;
  const end = Math.min(grid.letters.length, Math.ceil(high / side) * columns);
  const measure = MEASURES[colourBy];
  const values = measure.of ? measure.of(grid) : null;
  const most = values && values.length ? Math.max(1, largest(values)) : 1;
  const plain = new Map(); // colour: cells that are filled with it
  for (let cell = first; cell < end; cell += 1) {
    const letter = grid.letters[cell];
    const isMeasured = values !== null && !isWrong(letter) && letter !== ".";
    const colour = isMeasured ? ramp((values.length ? values[cell] : 0) / most, 32) : filling(letter);
    if (colour === null) {
      const [x, y] = layout.place(cell);
      pen.drawImage(sprite(letter, side, ratio), x, y - top, side, side);
    } else if (plain.has(colour)) plain.get(colour).push(cell);
    else plain.set(colour, [cell]);
  }
  const gap = gapOf(side);
  for (const [colour, cells] of plain) {
    pen.fillStyle = colour;
    pen.beginPath();
    for (const cell of cells) {
      const [x, y] = layout.place(cell);
      pen.rect(x + gap, y - top + gap, side - 2 * gap, side - 2 * gap);
    }
    pen.fill();
  }
  if (side >= 48) for (let cell = first; cell < end; cell += 1) label(pen, grid, cell, ...layout.place(cell), top, side, values);
  if (chosen >= 0) {
    const [x, y] = layout.place(chosen);
    const c = palette();
    pen.lineWidth = 3;
    pen.strokeStyle = c.back;
    pen.strokeRect(x - 1, y - top - 1, side + 2, side + 2);
    pen.lineWidth = 2;
    pen.strokeStyle = c.select;
    pen.strokeRect(x, y - top, side, side);
  }
}

function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

function label(pen, grid, cell, x, below, top, side, values) {
  const y = below - top;
  const lines = side < 72 ? pointOf(grid, cell).split(",").map((part) => part.split("=")[1]) : pointOf(grid, cell).split(",");
  if (side >= 72) lines.push(WORDS[grid.letters[cell]]);
  if (side >= 112) {
    for (const measure of Object.values(MEASURES)) {
      const all = measure.of ? measure.of(grid) : [];
      if (all.length && all[cell]) lines.push(measure.text(all[cell]));
    }
  } else if (values && values.length) {
    lines.push(String(values[cell]));
  }
  const c = palette();
  pen.font = `${side < 72 ? 11 : 12}px ${c.mono}`;
  pen.textBaseline = "top";
  lines.forEach((line, at) => {
    const wide = Math.min(side - 8, pen.measureText(line).width + 4);
    pen.fillStyle = c.back;
    pen.fillRect(x + 4, y + 4 + at * 15, wide, 14);
    pen.fillStyle = c.ink;
    pen.fillText(line, x + 6, y + 6 + at * 15, side - 12);
  });
}
