// All meshes, what their cells are coloured by, and what each shape means.

import { html, useLayoutEffect, useRef, useState } from "./markup.js";
import { MEANINGS, MEASURES, WORDS, isWrong, ramp, sprite } from "./cells.js";
import { Mesh } from "./mesh.js";
import { update } from "./store.js";
import { count } from "./format.js";

export function Meshes({ store }) {
  const frame = useRef(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const look = () => setWidth(Math.max(200, frame.current.clientWidth - 8));
    const observer = new ResizeObserver(look);
    observer.observe(frame.current);
    look();
    return () => observer.disconnect();
  }, []);
  const { board, colourBy, filter } = store;
  const wanted = board.meshes.filter((grid) => !filter || `${grid.name} ${grid.cls}`.includes(filter));
  return html`<div class="meshes" ref=${frame}>
    <fieldset class="choice">
      <legend>colour by</legend>
      ${Object.entries(MEASURES).map(
        ([key, measure]) => html`<label key=${key}>
          <input type="radio" name="colour" checked=${colourBy === key} onChange=${() => update({ colourBy: key })} />
          ${measure.title}
        </label>`,
      )}
    </fieldset>
    <${Legend} meshes=${wanted} colourBy=${colourBy} scheme=${store.scheme} />
    ${width > 0 &&
    wanted.map(
      (grid) => html`<${Mesh}
        key=${`${grid.kind} ${grid.name}`}
        grid=${grid}
        colourBy=${colourBy}
        selected=${store.selected}
        width=${width}
        scheme=${store.scheme}
      />`,
    )}
    ${!wanted.length && html`<p class="dim">no mesh has ${filter} in its name</p>`}
  </div>`;
}

function Legend({ meshes, colourBy, scheme }) {
  const counts = {};
  for (const grid of meshes) for (const [letter, number] of Object.entries(grid.counts)) counts[letter] = (counts[letter] || 0) + number;
  const letters = Object.keys(WORDS).filter((letter) => counts[letter] && letter !== ".");
  const shown = colourBy === "state" ? letters : letters.filter(isWrong);
  const measure = MEASURES[colourBy];
  const values = measure.of ? meshes.flatMap((grid) => [...measure.of(grid)]) : [];
  return html`<ul class="legend" aria-label="what the shapes mean">
    ${shown.map(
      (letter) => html`<li key=${letter} title=${MEANINGS[letter]}>
        <${Sample} letter=${letter} scheme=${scheme} /> ${WORDS[letter]} <span class="dim">${count(counts[letter])}</span>
      </li>`,
    )}
    ${measure.of &&
    html`<li>
      <${Scale} scheme=${scheme} /> ${measure.title}: 0 to ${values.length ? measure.text(largest(values)) : "0"} <span class="dim">of the largest in its mesh</span>
    </li>`}
  </ul>`;
}

function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
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
