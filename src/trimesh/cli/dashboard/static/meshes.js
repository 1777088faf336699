// Mesh cards: a mesh of processes and the actors on it are one card with tabs; below them what the shapes mean.

import { html, useLayoutEffect, useRef, useState } from "./markup.js";
import { MEANINGS, MEASURES, WORDS, fullOf, isWrong, ramp, sprite } from "./cells.js";
import { Cells } from "./mesh.js";
import { update } from "./store.js";
import { count } from "./format.js";

const firstSeen = new Map(); // cards keep their places

/** Return the meshes of a board as cards: the processes, then the actors on them; the controller's last. */
export function cardsOf(board) {
  const cards = new Map();
  for (const grid of board.meshes) if (grid.kind === "procs") cards.set(grid.name, { name: grid.name, grids: [grid] });
  for (const grid of board.meshes) {
    if (grid.kind === "procs") continue;
    const name = cards.has(grid.on) ? grid.on : grid.name;
    if (!cards.has(name)) cards.set(name, { name, grids: [] });
    const procs = cards.get(name).grids.find((one) => one.kind === "procs");
    cards.get(name).grids.push(procs && String(procs.sizes) === String(grid.sizes) ? withUse(grid, procs) : grid);
  }
  const controller = cards.get("controller");
  if (controller && controller.grids.length === 1) cards.delete("controller");
  for (const { name, grids } of cards.values()) {
    grids.sort((a, b) => (b.kind === "procs") - (a.kind === "procs") || (a.name < b.name ? -1 : 1));
    if (!firstSeen.has(name)) firstSeen.set(name, firstSeen.size);
  }
  return [...cards.values()].sort((a, b) => (a.name === "controller") - (b.name === "controller") || firstSeen.get(a.name) - firstSeen.get(b.name));
}

/** An actor has the resources of its process. */
function withUse(grid, procs) {
  return { ...grid, cpu: procs.cpu, gpu: procs.gpu, memory: procs.memory, rate: procs.rate };
}

export function Meshes({ store, extra }) {
  const frame = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const look = () => setWidth(Math.max(200, frame.current.clientWidth));
    const observer = new ResizeObserver(look);
    observer.observe(frame.current);
    look();
    return () => observer.disconnect();
  }, []);
  const { board, colourBy, filter } = store;
  const cards = cardsOf(board).filter(({ name, grids }) => !filter || name.includes(filter) || grids.some((grid) => `${grid.name} ${grid.cls}`.includes(filter)));
  return html`<div class="meshes" ref=${frame}>
    <div class="controls">
      <label>colour by <select value=${colourBy} onChange=${(event) => update({ colourBy: event.target.value })}>
        ${Object.entries(MEASURES).map(([key, measure]) => html`<option key=${key} value=${key}>${measure.title}</option>`)}
      </select></label>
      <${Legend} meshes=${cards.flatMap((card) => card.grids)} colourBy=${colourBy} scheme=${store.scheme} />
    </div>
    <div class="cards">
      ${width > 0 && cards.map((card) => html`<${Card} key=${card.name} card=${card} store=${store} width=${width - 22} />`)}
      ${extra}
    </div>
    ${!cards.length && filter && html`<p class="dim">no mesh has ${filter} in its name</p>`}
  </div>`;
}

function Card({ card, store, width }) {
  const { selected, colourBy, scheme } = store;
  const [shown, setShown] = useState("");
  const [zoom, setZoom] = useState(0);
  const own = card.grids.find((grid) => selected.startsWith(`${grid.kind}:${grid.name}:`));
  const grid = card.grids.find((one) => keyOfTab(one) === shown) || card.grids[0];
  const isShown = own && (own === grid || String(own.sizes) === String(grid.sizes)); // the same point of both
  const chosen = isShown ? Number(selected.slice(selected.lastIndexOf(":") + 1)) : -1;
  useLayoutEffect(() => {
    if (own && !isShown) setShown(keyOfTab(own));
  }, [selected]);
  const nearer = (step) => setZoom(Math.max(-9, Math.min(11, step)));
  return html`<section class="card mesh" aria-label=${`mesh ${card.name}`}>
    <header>
      <h2 class="name">${card.name}</h2>
      <span class="choices" role="group" aria-label=${`what of ${card.name} is shown`}>
        ${card.grids.map(
          (one) => html`<button type="button" key=${keyOfTab(one)} aria-pressed=${String(one === grid)} onClick=${() => setShown(keyOfTab(one))}>
            ${one.kind === "procs" ? "processes" : one.name}${one.cls && html` <span class="cls">${one.cls}</span>`}
          </button>`,
        )}
      </span>
      <span class="dim">${extent(grid)}</span>
      <${Counts} grid=${grid} />
      <span class="zoom">
        <button type="button" onClick=${() => nearer(zoom - 1)} aria-label=${`farther from ${card.name}`}>−</button>
        <button type="button" onClick=${() => nearer(zoom + 1)} aria-label=${`nearer to ${card.name}`}>+</button>
      </span>
    </header>
    <${Cells} grid=${grid} colourBy=${colourBy} chosen=${chosen} width=${width} zoom=${zoom} setZoom=${nearer} scheme=${scheme} />
  </section>`;
}

const keyOfTab = (grid) => `${grid.kind} ${grid.name}`;

function Counts({ grid }) {
  const letters = Object.keys(WORDS).filter((letter) => grid.counts[letter] && letter !== ".");
  return html`<span class="counts">${letters.map(
    (letter) => html`<span key=${letter} class=${isWrong(letter) ? "wrong" : ""}>${count(grid.counts[letter])} ${WORDS[letter]}</span>`,
  )}</span>`;
}

/** "hosts=8 ↓ gpus=8 →": which dimension runs down, and which to the right. */
function extent(grid) {
  const all = grid.labels.length;
  return grid.labels.map((label, at) => `${label}=${grid.sizes[at]}${all > 1 && at === all - 1 ? " →" : at === all - 2 ? " ↓" : ""}`).join(" ");
}

function Legend({ meshes, colourBy, scheme }) {
  const counts = {};
  for (const grid of meshes) for (const [letter, number] of Object.entries(grid.counts)) counts[letter] = (counts[letter] || 0) + number;
  const letters = Object.keys(WORDS).filter((letter) => counts[letter] && letter !== ".");
  const shown = colourBy === "state" ? letters : letters.filter(isWrong);
  const measure = MEASURES[colourBy];
  const most = colourBy === "state" ? 0 : Math.max(0, ...meshes.map((grid) => fullOf(grid, colourBy)));
  return html`<ul class="legend" aria-label="what the shapes mean">
    ${shown.map((letter) => html`<li key=${letter} title=${MEANINGS[letter]}><${Sample} letter=${letter} scheme=${scheme} /> ${WORDS[letter]}</li>`)}
    ${colourBy !== "state" && html`<li><${Scale} scheme=${scheme} /> ${measure.title}: 0 to ${measure.text(most)}</li>`}
  </ul>`;
}

export function Sample({ letter, scheme }) {
  const canvas = useRef(null);
  useLayoutEffect(() => {
    const picture = sprite(letter, 16);
    canvas.current.width = picture.width;
    canvas.current.height = picture.height;
    canvas.current.getContext("2d").drawImage(picture, 0, 0);
  }, [letter, scheme]);
  return html`<canvas class="sample" ref=${canvas} aria-hidden="true"></canvas>`;
}

function Scale({ scheme }) {
  const canvas = useRef(null);
  useLayoutEffect(() => {
    canvas.current.width = 96;
    canvas.current.height = 16;
    const pen = canvas.current.getContext("2d");
    for (let step = 0; step < 12; step += 1) {
      pen.fillStyle = ramp(step / 11);
      pen.fillRect(step * 8, 0, 7, 16);
    }
  }, [scheme]);
  return html`<canvas class="scale" ref=${canvas} aria-hidden="true"></canvas>`;
}
